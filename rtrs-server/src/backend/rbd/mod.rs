//! Ceph block device (RBD) images: `image.rs` for images that only this server exports, `gateway/`
//! for images shared with other servers.

mod gateway;
mod image;

pub use gateway::GatewaySource;
pub use image::{RbdOptions, RbdSource};

#[cfg(test)]
mod tests;
