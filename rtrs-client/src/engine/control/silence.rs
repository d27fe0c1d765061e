//! Decides whether a silent path is dead.
//!
//! The client sends heartbeats to `rtrs-server` earlier than to kernel servers, and ends its paths
//! sooner, to detect dead links. It must not mistake a server that is starved of CPU for a dead
//! link. Two tests tell the two apart. First, if the provider knows that the peer's system
//! acknowledges everything sent, the link works and the server process is slow, so the server is
//! given as much time as a kernel server. Second, the other paths show whether the server is
//! running: when one path is silent for a period after its heartbeat, the others send one too.
//! `rtrs-server` answers the heartbeats of all paths on one shard. If it has answered such a later
//! heartbeat and the silent path receives nothing for another period, the server is running and the
//! path is dead, even if the peer's system still acknowledges. A period in which this process
//! polled late does not count (`Heartbeat`).

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::heartbeat::Silence;
use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;
use crate::engine::path_end::PathEnd;

/// Whether `rtrs-server` has answered, at least a period ago, a heartbeat that was sent over
/// another path after this one fell silent. Otherwise returns the paths that must send one.
pub(super) fn confirm(paths: &mut Paths, id: PathId, now: Instant) -> Result<bool, Vec<PathId>> {
    let path = &paths[id];
    let (Some(doubted), true) = (path.channel.heartbeat.doubted_since(), path.channel.fences())
    else {
        return Ok(false);
    };
    if let Some(confirmed) = path.channel.heartbeat.is_confirmed(now) {
        return Ok(confirmed);
    }
    let server = path.channel.server();
    let other = |path: &Path| {
        path.id() != id
            && path.channel.fences()
            && path.is_connected()
            && path.channel.server() == server
    };
    let confirms = |path: &Path| path.channel.heartbeat.has_answered_since(doubted);
    if paths.iter().any(|path| other(path) && confirms(path)) {
        paths[id].channel.heartbeat.confirm(now);
        return Ok(false);
    }
    let others = paths.iter_mut().filter(|path| other(path));
    Err(others.filter_map(|path| path.channel.heartbeat.ask(now).then_some(path.id())).collect())
}

/// Returns the reason to end a silent path, if any. If the link works but the server is slow, the
/// silence may last for `patience`.
pub(super) fn judge(
    path: &Path,
    silence: Silence,
    confirmed: bool,
    patience: Duration,
    ctx: &Ctx<'_>,
) -> Option<PathEnd> {
    if !(silence.dead || confirmed && silence.dead_if_confirmed) {
        return None;
    }
    let ms = silence.length.as_millis();
    if !confirmed && silence.asked < patience && path.channel.peer_has_all(ctx) {
        tracing::debug!(path = %path.channel.name(), "slow: no answer for {ms} ms");
        return None;
    }
    Some(PathEnd::Silent { ms, confirmed })
}
