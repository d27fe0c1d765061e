//! Images of Ceph's block device: `image.rs` one that this server has alone, `gateway/` one that it
//! shares with others.

mod gateway;
mod image;

pub use gateway::GatewaySource;
pub use image::{RbdOptions, RbdSource};

#[cfg(test)]
mod tests;
