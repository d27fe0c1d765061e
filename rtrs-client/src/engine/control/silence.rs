//! Whether a silent path is dead.
//!
//! Servers of ours get heartbeats earlier than kernels and are given up sooner. What is judged then
//! is the link, and a server that has no processor to run on must not be taken for a dead one. Two
//! things tell them apart. Where the provider knows that the peer's system acknowledges all we
//! send, the link works and the server's program is slow; it gets as long as a kernel's. And the
//! other paths confirm that the server runs: when one path is silent for a period after its
//! heartbeat, the others send one too. A server of ours answers the heartbeats of all paths on one
//! shard. When it has answered such a later heartbeat, and nothing comes over the silent path for
//! another period, the server runs and the path is dead, whatever acknowledges there. A turn of
//! ours that came late does not count (`Heartbeat`).

use rtrs_core::ids::PathId;
use rtrs_core::time::{Duration, Instant};

use super::heartbeat::Silence;
use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;

/// True when a server of ours has answered, a period ago or longer, a heartbeat that was sent over
/// another path after this one fell silent. Else the paths over which one has to be sent for that.
pub(super) fn confirm(paths: &mut Paths, id: PathId, now: Instant) -> Result<bool, Vec<PathId>> {
    let path = &paths[id];
    let (Some(doubted), true) = (path.heartbeat.doubted_since(), path.fences()) else {
        return Ok(false);
    };
    if let Some(confirmed) = path.heartbeat.is_confirmed(now) {
        return Ok(confirmed);
    }
    let server = path.server();
    let other = |path: &Path| {
        path.id() != id && path.fences() && path.is_connected() && path.server() == server
    };
    let confirms = |path: &Path| path.heartbeat.has_answered_since(doubted);
    if paths.iter().any(|path| other(path) && confirms(path)) {
        paths[id].heartbeat.confirm(now);
        return Ok(false);
    }
    let others = paths.iter_mut().filter(|path| other(path));
    Err(others.filter_map(|path| path.heartbeat.ask(now).then_some(path.id())).collect())
}

/// Why a silent path has to end, if it has. Where the link works, the silence may last for
/// `patience`: the server is slow.
pub(super) fn judge(
    path: &Path,
    silence: Silence,
    confirmed: bool,
    patience: Duration,
    ctx: &Ctx<'_>,
) -> Option<String> {
    if !(silence.dead || confirmed && silence.dead_if_confirmed) {
        return None;
    }
    let ms = silence.length.as_millis();
    if !confirmed && silence.asked < patience && path.peer_has_all(ctx) {
        tracing::debug!(path = %path.name(), "slow: no answer for {ms} ms");
        return None;
    }
    let besides = if confirmed { " while another path was answered" } else { "" };
    Some(format!("silent for {ms} ms{besides}"))
}
