//! `rtrs-server` as a real process: started with a builder, ready when it has printed its
//! addresses, stopped with SIGTERM ([`Server::stop`] checks for exit code 0) or killed on drop.
//! Each server has its own run directory, in which [`Server::command`] finds it.

use std::fs::{Permissions, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::activation::Activation;
use crate::cable::Netns;
use crate::proc::{Finished, Proc, bin, run};
use crate::scratch::Scratch;
use crate::transport::Transport;
use crate::{COMMAND_TIME_MAX, wait_for};

/// Maximum time until the server reports that it is listening.
const READY_TIME_MAX: Duration = Duration::from_secs(60);
/// Prefix of each line with an address in the server's output.
const READY_WORDS: &str = "listening on ";

/// Options for a server to start.
#[derive(Debug, Default)]
pub struct ServerBuilder {
    exports: Vec<String>,
    listens: Vec<String>,
    netns: Option<Netns>,
    args: Vec<String>,
    program: Option<&'static str>,
    user: Option<&'static str>,
    envs: Vec<(&'static str, String)>,
    activation: Option<Activation>,
    /// Number of the service manager's sockets that the server listens on without `--listen`.
    portals: usize,
}

impl ServerBuilder {
    /// Starts the server with these sockets from a service manager; without `--listen` it listens
    /// on `portals` of them.
    #[must_use]
    pub fn activated(mut self, sockets: &Activation, portals: usize) -> Self {
        self.activation = Some(sockets.clone());
        self.portals = portals;
        self
    }

    /// Runs a different program of this workspace that accepts the server's flags.
    #[must_use]
    pub fn program(mut self, name: &'static str) -> Self {
        self.program = Some(name);
        self
    }

    /// Makes the server switch to this user, with directories that the user can reach.
    #[must_use]
    pub fn user(mut self, name: &'static str) -> Self {
        self.user = Some(name);
        self
    }

    /// Sets an environment variable for the server.
    #[must_use]
    pub fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.envs.push((name, value.into()));
        self
    }

    /// Adds `--export NAME=WHAT[,OPTION]`.
    #[must_use]
    pub fn export(mut self, export: impl Into<String>) -> Self {
        self.exports.push(export.into());
        self
    }

    /// Adds `--listen`; without any `--listen`, the server listens on a free port, see
    /// [`Transport`].
    #[must_use]
    pub fn listen(mut self, listen: impl Into<String>) -> Self {
        self.listens.push(listen.into());
        self
    }

    /// Runs the server on this host.
    #[must_use]
    pub fn on(mut self, host: Netns) -> Self {
        self.netns = Some(host);
        self
    }

    /// Adds further arguments unchanged.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|&arg| arg.to_owned()));
        self
    }

    /// Returns the command line.
    #[must_use]
    pub fn command(&self) -> Command {
        let program = self.program.unwrap_or("rtrs-server");
        let mut command = Netns::program(self.netns, program);
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        for export in &self.exports {
            command.args(["--export", export]);
        }
        for listen in &self.listens {
            command.args(["--listen", listen]);
        }
        command.args(self.user.map(|user| format!("--user={user}")));
        command.args(&self.args);
        command
    }

    /// Starts the server and waits until it listens on all its addresses.
    ///
    /// # Panics
    /// Panics if the server does not start in time.
    #[must_use]
    pub fn start(mut self) -> Server {
        if self.listens.is_empty() && self.activation.is_none() {
            self.listens.push(Transport::of_environment().listen());
        }
        let run_dir = Scratch::new();
        if self.user.is_some() {
            let reachable = Permissions::from_mode(0o711);
            set_permissions(run_dir.dir(), reachable).expect("make a directory reachable");
        }
        if !self.args.iter().any(|arg| arg == "--run-dir") {
            self.args.extend(["--run-dir".to_owned(), run_dir.text("server")]);
        }
        if !self.args.iter().any(|arg| arg == "--state-dir") {
            self.args.extend(["--state-dir".to_owned(), run_dir.text("state")]);
        }
        let mut proc = self.spawn();
        let count = if self.listens.is_empty() { self.portals } else { self.listens.len() };
        let portals = proc.wait_starts(READY_WORDS, count, READY_TIME_MAX);
        Server { proc, portals, run_dir }
    }

    /// Runs a server that is expected to reject its command line or environment.
    ///
    /// # Panics
    /// Panics if the process does not end in time.
    #[must_use]
    pub fn run(&self) -> Finished {
        self.spawn().wait(READY_TIME_MAX)
    }

    fn spawn(&self) -> Proc {
        match &self.activation {
            Some(activation) => activation.start(&self.command()),
            None => Proc::start(self.command()),
        }
    }
}

/// A listening server.
#[derive(Debug)]
pub struct Server {
    proc: Proc,
    portals: Vec<String>,
    run_dir: Scratch,
}

impl Server {
    /// Returns a builder without options.
    #[must_use]
    pub fn builder() -> ServerBuilder {
        ServerBuilder::default()
    }

    /// Returns the first address, as `tcp://127.0.0.1:PORT`.
    #[must_use]
    pub fn portal(&self) -> &str {
        &self.portals[0]
    }

    /// Returns all addresses, in the order of the `listening on` lines.
    #[must_use]
    pub fn portals(&self) -> &[String] {
        &self.portals
    }

    /// Returns the host and port of the first address.
    ///
    /// # Panics
    /// Panics if the address is not of the form `SCHEME://HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> &str {
        self.portal().split_once("://").expect("a portal").1
    }

    /// Returns the server's process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.proc.pid()
    }

    /// Checks that the server is still running and has not panicked.
    ///
    /// # Panics
    /// Panics with the server's output otherwise.
    pub fn check_alive(&mut self) {
        let running = self.proc.is_running();
        let output = self.proc.output();
        assert!(running && !output.contains("panicked at"), "the server died:\n{output}");
    }

    /// Sends a signal, named without SIG, for example `STOP`.
    ///
    /// # Panics
    /// Panics if the server has already ended.
    pub fn signal(&mut self, name: &str) {
        self.proc.signal(name);
    }

    /// Runs `rtrs-server WORDS --run-dir ...`, a command for this server, and waits until it ends.
    ///
    /// # Panics
    /// Panics if the process does not end in time.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Finished {
        let run_dir = self.run_dir.text("server");
        let words = [words, &["--run-dir", &run_dir]].concat();
        run(bin("rtrs-server"), &words, COMMAND_TIME_MAX)
    }

    /// Returns the server's sessions, as in `session list -o json`.
    ///
    /// # Panics
    /// Panics if the command fails.
    #[must_use]
    pub fn sessions(&self) -> Vec<serde_json::Value> {
        self.list()["sessions"].as_array().expect("a list of sessions").clone()
    }

    /// Returns the complete output of `session list -o json`.
    ///
    /// # Panics
    /// Panics if the command fails.
    #[must_use]
    pub fn list(&self) -> serde_json::Value {
        self.command(&["session", "list", "-o", "json"]).ok().json()
    }

    /// Returns the server's output so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.proc.output()
    }

    /// Waits until the server's output contains this text, and returns the output so far. A
    /// separate thread writes the log, so a line may arrive late.
    ///
    /// # Panics
    /// Panics if the text does not appear within [`COMMAND_TIME_MAX`].
    pub fn wait_output(&self, words: &str) -> String {
        let written = || Some(self.output()).filter(|output| output.contains(words));
        wait_for(words, COMMAND_TIME_MAX, written)
    }

    /// Returns the directory of the server's control socket.
    #[must_use]
    pub fn run_dir(&self) -> PathBuf {
        self.run_dir.path("server")
    }

    /// Waits until the server ends for a reason other than [`Self::stop`].
    ///
    /// # Panics
    /// Panics if the server has not ended within `limit`.
    #[must_use]
    pub fn wait(self, limit: Duration) -> Finished {
        self.proc.wait(limit)
    }

    /// Sends SIGTERM and checks for exit code 0 within `limit`.
    ///
    /// # Panics
    /// Panics if it exits late or with a different code.
    pub fn stop(self, limit: Duration) -> Finished {
        self.proc.terminate(limit).ok()
    }

    /// Sends SIGKILL, to simulate a crash.
    pub fn crash(self) {
        drop(self);
    }
}
