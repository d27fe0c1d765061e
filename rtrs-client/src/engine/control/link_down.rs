//! A link of this host went down: which paths cannot go on without it.
//!
//! A TCP path with a source address on that link ends at once, long before its heartbeats would
//! tell, if others carry all that it serves. Without them there is nothing to gain: the link may
//! come back before TCP gives up, and a volume without a path fails IO or moves to another gateway.
//! Devices of RDMA report their ports themselves.

use std::net::IpAddr;

use rtrs_core::ids::PathId;

use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;

/// The connected paths that end because these addresses of this host are on a link that went down.
pub(super) fn cut_off(paths: &Paths, addresses: &[IpAddr], ctx: &Ctx<'_>) -> Vec<PathId> {
    let is_cut_off = |path: &&Path| {
        path.is_connected()
            && !path.is_rdma(ctx)
            && path.comes_from(addresses)
            && is_replaced(path, paths, addresses)
    };
    paths.iter().filter(is_cut_off).map(Path::id).collect()
}

/// Whether all that a path serves goes on over others, known to be on other links. A standby path
/// serves nothing; any other one will do.
fn is_replaced(path: &Path, paths: &Paths, addresses: &[IpAddr]) -> bool {
    let goes_on = |other: &&Path| {
        other.is_connected() && !other.is_leaving() && other.comes_from_elsewhere(addresses)
    };
    let others = || paths.others(path.id()).filter(goes_on);
    let is_carried = |device| others().any(|other| other.carries(device));
    others().next().is_some() && path.terms.served().all(|served| is_carried(served.device))
}
