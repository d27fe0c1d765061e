//! Socket activation: starts programs and passes listening sockets to them as systemd does.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use crate::proc::Proc;

/// Shell script that moves its sockets to descriptors 3 and 4 and runs the command that follows
/// their names. The program's log goes to standard output.
const PASS_ONE: &str = "exec 3<&0 </dev/null 2>&1;";
const PASS_TWO: &str = "exec 3<&0 </dev/null 4<&2 2>&1;";
const RUN: &str = "LISTEN_PID=$$ LISTEN_FDS=$0 LISTEN_FDNAMES=\"$1\"; shift; \
                   export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; exec \"$@\"";

/// A service manager's listening sockets, at most two. Programs that it starts receive duplicates.
#[derive(Clone, Debug, Default)]
pub struct Activation(Vec<(String, Arc<OwnedFd>)>);

impl Activation {
    /// Adds a descriptor of any kind, with this name.
    #[must_use]
    pub fn descriptor(mut self, name: &str, socket: impl Into<OwnedFd>) -> Self {
        self.0.push((name.to_owned(), Arc::new(socket.into())));
        self
    }

    /// Adds a listener on a free port of an address. Returns the address with the port.
    ///
    /// # Panics
    /// Panics if the system refuses.
    #[must_use]
    pub fn tcp(self, name: &str, address: &str) -> (Self, SocketAddr) {
        let listener = TcpListener::bind((address, 0)).expect("a port");
        // As systemd does.
        listener.set_nonblocking(true).expect("a nonblocking socket");
        let address = listener.local_addr().expect("an address");
        (self.descriptor(name, listener), address)
    }

    /// Adds a listener on a unix socket.
    ///
    /// # Panics
    /// Panics if the system refuses.
    #[must_use]
    pub fn unix(self, name: &str, path: &Path) -> Self {
        let listener = UnixListener::bind(path).expect("a socket");
        listener.set_nonblocking(true).expect("a nonblocking socket");
        self.descriptor(name, listener)
    }

    /// Starts a program with the sockets.
    ///
    /// # Panics
    /// Panics if it cannot be started.
    #[must_use]
    pub fn start(&self, program: &Command) -> Proc {
        let duplicate = |at: usize| {
            let socket = self.0.get(at).map(|(_, socket)| socket.try_clone());
            socket.map(|socket| Stdio::from(socket.expect("a duplicate of a socket")))
        };
        let pass = if self.0.len() > 1 { PASS_TWO } else { PASS_ONE };
        let names: Vec<&str> = self.0.iter().map(|(name, _)| &**name).collect();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{pass} {RUN}"), &names.len().to_string(), &names.join(":")]);
        shell.arg(program.get_program()).args(program.get_args());
        shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        Proc::start_with_streams(shell, duplicate(0), duplicate(1))
    }
}
