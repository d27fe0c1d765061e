//! Local resources of a daemon besides the network: the run directory, Unix sockets that are bound
//! safely when several processes want the same path, the control socket to which commands connect,
//! the service manager and the sockets that it passes, and small text files.
//!
//! Runs off the IO path. Used by both daemons, the NBD listener and the metrics server.

mod activation;
mod control;
mod denied;
mod own_files;
mod run_dir;
mod service_manager;
mod tcp_address;
mod text_file;
pub(crate) mod timed;
mod unix_socket;

pub use activation::{PassedSocket, passed_sockets};
pub use control::{ControlSocket, RequestError, SocketRenewal, reply, request};
pub use denied::{why_denied, why_denied_to};
pub use own_files::OwnFiles;
pub use run_dir::{
    PlaceError, PlaceProblem, RunDir, SocketState, absolute_path, check_socket_path, open_log,
    socket_state,
};
pub use service_manager::ServiceManager;
pub use tcp_address::check_tcp_address;
pub use text_file::read_text;
pub use unix_socket::{SocketFile, bind_seqpacket, bind_unix, listening_pid, remove_left_behind};
