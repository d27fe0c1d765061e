//! A link of this host went down: which paths cannot go on without it.
//!
//! A TCP path with a source address on that link ends at once, long before its heartbeats would
//! tell, if another path can go on. Without another there is nothing to gain: the link may come
//! back before TCP gives up. Devices of RDMA report their ports themselves.

use std::net::IpAddr;

use rtrs_core::ids::PathId;

use super::path::Path;
use super::paths::Paths;
use crate::engine::ctx::Ctx;

/// The connected paths that end because these addresses of this host are on a link that went down.
pub(super) fn cut_off(paths: &Paths, addresses: &[IpAddr], ctx: &Ctx<'_>) -> Vec<PathId> {
    let is_cut_off = |path: &&Path| path.comes_from(addresses);
    let mut connected = paths.iter().filter(|path| path.is_connected());
    if connected.all(|path| is_cut_off(&path)) {
        return Vec::new();
    }
    let connected = paths.iter().filter(|path| path.is_connected() && !path.is_rdma(ctx));
    connected.filter(is_cut_off).map(Path::id).collect()
}
