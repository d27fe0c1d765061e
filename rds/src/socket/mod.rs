//! Sockets of users: [`Node`] and [`RdsSocket`], and the layers below them.

mod access;
mod error;
mod incoming;
mod kernel;
mod rds;
mod request;
mod room;
mod transfer;

pub use access::{Access, AtPath, Binding, Bound, Control, Place, Slot, new_socket};
pub use error::Error;
pub use incoming::receive;
pub use kernel::has_kernel_rds;
pub use rds::{DIR_DEFAULT, Node, RdsSocket, node_dir, node_path};
pub use transfer::{Arrival, How, Incoming, Outgoing, send};

pub use crate::channel::Connect;
