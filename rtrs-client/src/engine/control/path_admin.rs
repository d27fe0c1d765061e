//! What changes while a session runs, and paths that come and go.
//!
//! A path that is to go takes no new request; its shards say when what it carried has come home,
//! and only then its connections are closed, so that nothing of it has to be sent again. What is
//! still in flight when its time is over goes to the other paths as when a path dies, fence and
//! all. The place of a removed path in the tables is given to the next one that is added.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

use super::leave::{Leave, Why};
use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;
use crate::engine::session::{NoPath, PathTarget, SessionConfig, Tuning, VolumeConfig};

/// What is changed while a session runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One more path, under an identity that no path of the session had before.
    Add {
        /// Where it leads.
        target: PathTarget,
        /// Its identity at the server.
        uuid: [u8; 16],
    },
    /// The path is not listed any more when it is gone.
    Remove(Leaving),
    /// The path stays down until it is asked to connect again.
    Disconnect(Leaving),
    /// The path is connected anew: at once where it is down, after its requests where it is up.
    Reconnect(Leaving),
    /// Settings that may change.
    Tune(Box<Tuning>),
    /// One more volume, which is opened on each path.
    AddVolume(VolumeConfig),
    /// A volume that its user does not have any more: it is closed when nothing of it is left. The
    /// last volume of a session ends with the session.
    CloseVolume {
        /// The name of its export.
        export: String,
    },
    /// A volume that moves between servers: its server gives it up, and another takes it over.
    SwitchVolume {
        /// The name of its export.
        export: String,
    },
}

/// A path that is to go, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Its name, as listings show it.
    pub path: String,
    /// Time for what it carries; then that goes to the other paths.
    pub within: Duration,
    /// Also when IO then has to wait for a path.
    pub force: bool,
}

/// Takes a path out of use. Returns it, and whether its connections have to be ended now.
pub(super) fn leave(
    paths: &mut Paths,
    (why, leaving): (Why, &Leaving),
    config: &SessionConfig,
    ctx: &mut Ctx<'_>,
) -> Result<(PathId, bool), String> {
    let Leaving { path: name, within, force } = leaving;
    let Some(id) = paths.named(name) else {
        return Err(format!("no path {name}; see path list"));
    };
    if !force {
        check(paths, id, why, config.no_path)?;
    }
    let leave = Leave::new(why, ctx.now + *within, config.shards);
    let ends = paths[id].leave(leave, ctx)?;
    Ok((id, ends))
}

/// Refuses what would make IO wait, or fail.
fn check(paths: &Paths, id: PathId, why: Why, no_path: NoPath) -> Result<(), String> {
    let stays = |path: &Path| path.is_connected() && !path.is_leaving();
    if paths.others(id).any(stays) {
        return Ok(());
    }
    let path = &paths[id];
    let name = path.name();
    let last = !paths.others(id).any(Path::is_listed);
    match why {
        Why::Remove if last => Err(format!(
            "{name} is the last path of the session; add another first, or use --force"
        )),
        Why::Remove | Why::Disconnect if stays(path) => Err(format!(
            "{name} is the only connected path, and IO would wait for another; connect \
             another first, or use --force"
        )),
        Why::Reconnect if stays(path) && no_path == NoPath::Fail => Err(format!(
            "{name} is the only connected path, and with no-path fail IO would end with \
             errors; connect another first, or use --force"
        )),
        _ => Ok(()),
    }
}
