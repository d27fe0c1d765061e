//! Link failures on this host, and the paths that they cut off.
//!
//! A TCP path with a source address on the failed link ends immediately, long before its heartbeats
//! would show the failure, if other paths carry everything that it serves. Without such paths there
//! is nothing to gain: the link may return before TCP gives up, and a volume without a path fails
//! IO or moves to another gateway. RDMA devices themselves report the state of their ports.

use std::net::IpAddr;

use rtrs_core::ids::PathId;

use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;

/// Returns the connected paths to end because these addresses of this host are on a failed link.
pub(super) fn cut_off(paths: &Paths, addresses: &[IpAddr], ctx: &Ctx<'_>) -> Vec<PathId> {
    let is_cut_off = |path: &&Path| {
        path.is_connected()
            && !path.channel.is_rdma(ctx)
            && path.channel.comes_from(addresses)
            && is_replaced(path, paths, addresses)
    };
    paths.iter().filter(is_cut_off).map(Path::id).collect()
}

/// Whether other paths, known to use other links, carry everything that the path serves. A standby
/// path serves nothing, so any other path replaces it.
fn is_replaced(path: &Path, paths: &Paths, addresses: &[IpAddr]) -> bool {
    let stays = |other: &&Path| {
        other.is_connected() && !other.is_leaving() && other.channel.comes_from_elsewhere(addresses)
    };
    let others = || paths.others(path.id()).filter(stays);
    let is_carried = |device| others().any(|other| other.carries(device));
    others().next().is_some() && path.volumes.terms.served().all(|served| is_carried(served.device))
}
