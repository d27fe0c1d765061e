//! What a daemon has on its own machine beside the network: the run directory, unix sockets bound
//! safely beside others that want the same path, and the control socket commands speak to.
//!
//! Runs off the IO path. Called by both daemons and by the NBD listener.

mod control;
mod run_dir;
mod unix_socket;

pub use control::{ControlSocket, ask, reply};
pub use run_dir::{PlaceError, PlaceProblem, RunDir, SocketState, check_socket_path, socket_state};
pub use unix_socket::{SocketFile, bind_unix};
