//! Removal of a path from use on request.
//!
//! A leaving path is given no new requests. Its shards report when its requests have finished. Only
//! then are its connections closed, so that nothing needs to be resent. Requests still in flight at
//! the deadline move to the other paths as when a path dies, including the fence. The slot of a
//! removed path is reused for the next path that is added.

use rtrs_core::ids::PathId;

use super::change::{ChangeError, Leaving};
use super::leave::{Leave, Why};
use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;
use crate::engine::session::{NoPath, SessionConfig};

/// Takes a path out of use. Returns its ID and whether its connections must be ended now.
pub(super) fn leave(
    paths: &mut Paths,
    why: Why,
    leaving: &Leaving,
    config: &SessionConfig,
    ctx: &mut Ctx<'_>,
) -> Result<(PathId, bool), ChangeError> {
    let Leaving { path: name, within, force } = leaving;
    let Some(id) = paths.named(name) else {
        return Err(ChangeError::NoPath(name.clone()));
    };
    if !force {
        check(paths, id, why, config.no_path)?;
    }
    let leave = Leave::new(why, ctx.now + *within, config.shards);
    let ends = paths[id].leave(leave, ctx)?;
    Ok((id, ends))
}

/// Rejects a request after which IO would wait or fail.
fn check(paths: &Paths, id: PathId, why: Why, no_path: NoPath) -> Result<(), ChangeError> {
    let stays = |path: &Path| path.is_connected() && !path.is_leaving();
    if paths.others(id).any(stays) {
        return Ok(());
    }
    let path = &paths[id];
    let name = || path.channel.name().to_owned();
    let last = !paths.others(id).any(Path::is_listed);
    match why {
        Why::Remove if last => Err(ChangeError::LastPath(name())),
        Why::Remove | Why::Disconnect if stays(path) => Err(ChangeError::IoWouldWait(name())),
        Why::Reconnect if stays(path) && no_path == NoPath::Fail => {
            Err(ChangeError::IoWouldFail(name()))
        }
        _ => Ok(()),
    }
}
