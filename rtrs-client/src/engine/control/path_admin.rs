//! Changes of a running session: settings, and paths that are added or removed.
//!
//! A leaving path gets no new requests. Its shards report when its requests have finished, and only
//! then are its connections closed, so that nothing has to be sent again. Requests still in flight
//! at the deadline move to the other paths as when a path dies, including the fence. The slot of a
//! removed path is reused for the next one that is added.

use rtrs_core::ids::PathId;
use rtrs_core::time::Duration;

use super::leave::{Leave, Why};
use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;
use crate::engine::session::{NoPath, PathTarget, SessionConfig, Tuning, VolumeConfig};

/// Change of a running session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add a path, under an identity that no path of the session had before.
    Add {
        /// Addresses and provider of the path.
        target: PathTarget,
        /// Identity of the path at the server.
        uuid: [u8; 16],
    },
    /// Remove the path; once gone, it is no longer listed.
    Remove(Leaving),
    /// Disconnect the path until a reconnect is requested.
    Disconnect(Leaving),
    /// Reconnect the path: at once if it is down, after its requests if it is up.
    Reconnect(Leaving),
    /// Apply other settings.
    Tune(Box<Tuning>),
    /// Add a volume, which each path opens.
    AddVolume(VolumeConfig),
    /// Close a volume that its user has released, once nothing is left. The last volume of a
    /// session ends with the session.
    CloseVolume {
        /// Export name.
        export: String,
    },
    /// Have the volume's server give it up, so that another server takes it over.
    SwitchVolume {
        /// Export name.
        export: String,
    },
}

/// Request to take a path out of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Name of the path, as in listings.
    pub path: String,
    /// Time for the path's requests; afterwards they move to the other paths.
    pub within: Duration,
    /// Also take the path out of use when IO then has to wait for another.
    pub force: bool,
}

/// Takes a path out of use. Returns it, and whether its connections have to be ended now.
pub(super) fn leave(
    paths: &mut Paths,
    why: Why,
    leaving: &Leaving,
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

/// Rejects a request after which IO would wait or fail.
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
