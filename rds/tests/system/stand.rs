//! Node daemons on loopback, in a directory of their own.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{COMMAND_TIME_MAX, Finished, Proc, STOP_TIME_MAX, Scratch, bin, free_port};

/// Maximum time for any operation that moves messages.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Nodes 127.0.0.1, 127.0.0.2 and so on, each with a daemon.
pub(crate) struct Stand {
    dir: Scratch,
    port: u16,
    daemons: Vec<Option<Proc>>,
    arguments: Vec<String>,
}

pub(crate) fn address(node: u8) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, node).into()
}

impl Stand {
    /// Starts this many daemons.
    pub(crate) fn new(count: u8) -> Self {
        Self::with(count, &[])
    }

    /// Starts this many daemons with additional arguments.
    pub(crate) fn with(count: u8, arguments: &[&str]) -> Self {
        let (dir, port) = (Scratch::new(), free_port());
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let mut stand = Self { dir, port, daemons: Vec::new(), arguments };
        for node in 1..=count {
            stand.daemons.push(None);
            stand.start(node);
        }
        stand
    }

    /// Starts the daemon of a node.
    pub(crate) fn start(&mut self, node: u8) {
        let mut command = Command::new(bin("rds"));
        let address = address(node).to_string();
        command.args(["node", "--address", &address, "--socket-dir"]).arg(self.dir.dir());
        let port = self.port.to_string();
        command.args(["--listen-port", &port, "--peer-port", &port, "--log", "debug"]);
        command.args(&self.arguments);
        let mut daemon = Proc::start(command);
        daemon.wait_lines("is ready at ", 1, LIMIT);
        self.daemons[usize::from(node) - 1] = Some(daemon);
    }

    /// Stops the daemon of a node.
    pub(crate) fn stop(&mut self, node: u8) {
        let daemon = self.daemons[usize::from(node) - 1].take().expect("a daemon that runs");
        let _ = daemon.terminate(STOP_TIME_MAX).ok();
    }

    /// Kills the daemon of a node.
    pub(crate) fn kill(&mut self, node: u8) {
        drop(self.daemons[usize::from(node) - 1].take());
    }

    /// Returns a daemon's process ID.
    pub(crate) fn pid(&self, node: u8) -> u32 {
        self.daemons[usize::from(node) - 1].as_ref().expect("a daemon that runs").pid()
    }

    /// Sends a daemon the signal with this name (without SIG).
    pub(crate) fn signal(&mut self, node: u8, name: &str) {
        self.daemons[usize::from(node) - 1].as_mut().expect("a daemon that runs").signal(name);
    }

    /// Returns the TCP port that all nodes use.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Returns the directory for the nodes' sockets.
    pub(crate) fn dir(&self) -> PathBuf {
        self.dir.dir().to_owned()
    }

    /// Prepares a command that finds the nodes.
    pub(crate) fn command(&self, program: PathBuf, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(args).env("RDS_DIR", self.dir.dir());
        command
    }

    /// Runs an `rds` command that finds the nodes.
    pub(crate) fn rds(&self, args: &[&str]) -> Finished {
        Proc::start(self.command(bin("rds"), args)).wait(COMMAND_TIME_MAX)
    }

    /// Starts a command that keeps running.
    pub(crate) fn begin(&self, args: &[&str]) -> Proc {
        Proc::start(self.command(bin("rds"), args))
    }
}
