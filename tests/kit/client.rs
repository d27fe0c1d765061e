//! `rtrs-client` as users run it: `attach` returns and leaves a background process, and the other
//! commands use its control socket. Every [`Client`] has its own run directory, so sessions of
//! different tests do not see each other. Background processes are found by that directory's name
//! on their command line, and are terminated when the handle is dropped.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::activation::Activation;
use crate::cable::Netns;
use crate::proc::{Finished, Proc, send_signal, wait_stopped};
use crate::requires::free_port;
use crate::scratch::Scratch;
use crate::{COMMAND_TIME_MAX, wait_for};

/// Address on which the session serves NBD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Front {
    /// A unix socket at this path.
    Unix(PathBuf),
    /// A port on 127.0.0.1.
    Tcp(u16),
}

impl Front {
    /// Returns the `attach` option for this address.
    #[must_use]
    pub fn args(&self) -> [String; 2] {
        match self {
            Self::Unix(path) => ["--socket".to_owned(), path.display().to_string()],
            Self::Tcp(port) => ["--listen".to_owned(), format!("127.0.0.1:{port}")],
        }
    }

    /// Returns the NBD URI of an export at this address.
    #[must_use]
    pub fn uri(&self, export: &str) -> String {
        match self {
            Self::Unix(path) => format!("nbd+unix:///{export}?socket={}", path.display()),
            Self::Tcp(port) => format!("nbd://127.0.0.1:{port}/{export}"),
        }
    }
}

/// Options of a session to be attached.
#[derive(Debug)]
pub struct ClientBuilder {
    export: String,
    paths: Vec<String>,
    front: Option<Front>,
    netns: Option<Netns>,
    args: Vec<String>,
    program: Option<&'static str>,
    envs: Vec<(&'static str, String)>,
    activation: Option<Activation>,
}

impl ClientBuilder {
    /// Passes these sockets to the foreground process, as a service manager does.
    #[must_use]
    pub fn activated(mut self, sockets: &Activation) -> Self {
        self.activation = Some(sockets.clone());
        self
    }

    /// Runs a different program, which must accept the flags of `attach`, in the foreground.
    #[must_use]
    pub fn program(mut self, name: &'static str) -> Self {
        self.program = Some(name);
        self
    }

    /// Sets an environment variable of the foreground process.
    #[must_use]
    pub fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.envs.push((name, value.into()));
        self
    }

    /// Adds `--path`.
    #[must_use]
    pub fn path(mut self, path: impl Into<String>) -> Self {
        self.paths.push(path.into());
        self
    }

    /// Sets the address on which NBD is served; the default is a unix socket in the run directory.
    #[must_use]
    pub fn front(mut self, front: Front) -> Self {
        self.front = Some(front);
        self
    }

    /// Serves NBD on a free port on 127.0.0.1.
    #[must_use]
    pub fn tcp(self) -> Self {
        self.front(Front::Tcp(free_port()))
    }

    /// Runs the client, and all its commands, on this host.
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

    fn words(&self, front: &Front) -> Vec<String> {
        let mut words = vec!["attach".to_owned(), self.export.clone()];
        for path in &self.paths {
            words.extend(["--path".to_owned(), path.clone()]);
        }
        words.extend(front.args());
        words.extend(self.args.iter().cloned());
        words
    }

    /// Attaches; returns when `attach` has returned 0.
    ///
    /// # Panics
    /// Panics if it fails or takes too long.
    #[must_use]
    pub fn start(self) -> Client {
        let (client, finished) = self.try_start();
        let _ = finished.ok();
        client
    }

    /// Attaches and returns the result, success or failure; the handle cleans up in any case.
    #[must_use]
    pub fn try_start(self) -> (Client, Finished) {
        let client = self.handle();
        let mut command = client.process(&self.words(&client.front));
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        let finished = Proc::start(command).wait(COMMAND_TIME_MAX);
        (client, finished)
    }

    /// Creates only a run directory for commands, without a session.
    #[must_use]
    pub fn unattached(self) -> Client {
        self.handle()
    }

    /// Attaches with `--foreground`; waits until the client reports that it is ready.
    ///
    /// # Panics
    /// Panics if it does not come up in time.
    #[must_use]
    pub fn start_foreground(self) -> Client {
        let mut client = self.handle();
        let mut words = self.words(&client.front);
        words.push("--foreground".to_owned());
        let mut command = client.process_of(self.program.unwrap_or("rtrs-client"), &words);
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        let mut proc = match &self.activation {
            Some(activation) => activation.start(&command),
            None => Proc::start(command),
        };
        let _ = proc.wait_lines("ready ", 1, COMMAND_TIME_MAX);
        client.foreground = Some(proc);
        client
    }

    fn handle(&self) -> Client {
        let run_dir = Scratch::new();
        let front = self.front.clone();
        let front = front.unwrap_or_else(|| Front::Unix(run_dir.path("nbd.sock")));
        Client { export: self.export.clone(), front, netns: self.netns, run_dir, foreground: None }
    }
}

/// A session, and the run directory that contains its control socket.
#[derive(Debug)]
pub struct Client {
    export: String,
    front: Front,
    netns: Option<Netns>,
    run_dir: Scratch,
    foreground: Option<Proc>,
}

impl Client {
    /// Returns options for a session with this export.
    #[must_use]
    pub fn attach(export: &str) -> ClientBuilder {
        let export = export.to_owned();
        ClientBuilder {
            export,
            paths: Vec::new(),
            front: None,
            netns: None,
            args: Vec::new(),
            program: None,
            envs: Vec::new(),
            activation: None,
        }
    }

    /// Returns the address on which the session serves NBD.
    #[must_use]
    pub fn front(&self) -> &Front {
        &self.front
    }

    /// Returns the NBD URI of the session's export.
    #[must_use]
    pub fn uri(&self) -> String {
        self.front.uri(&self.export)
    }

    /// Returns the directory of the session's control socket.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        self.run_dir.dir()
    }

    fn process<S: AsRef<str>>(&self, words: &[S]) -> Command {
        self.process_of("rtrs-client", words)
    }

    fn process_of<S: AsRef<str>>(&self, program: &str, words: &[S]) -> Command {
        let mut command = Netns::program(self.netns, program);
        command.args(words.iter().map(AsRef::as_ref));
        command.arg("--run-dir").arg(self.run_dir()).env("XDG_RUNTIME_DIR", self.run_dir());
        command
    }

    /// Runs `rtrs-client WORDS --run-dir ...` to completion.
    ///
    /// # Panics
    /// Panics if it does not end in time.
    #[must_use]
    pub fn command<S: AsRef<str>>(&self, words: &[S]) -> Finished {
        Proc::start(self.process(words)).wait(COMMAND_TIME_MAX)
    }

    /// Runs a command that is refused while NBD clients are connected. The session takes a moment
    /// to notice that their connections have closed; until then, the command is repeated.
    ///
    /// # Panics
    /// Panics if the command is still refused after [`COMMAND_TIME_MAX`].
    #[must_use]
    pub fn command_without_users<S: AsRef<str>>(&self, words: &[S]) -> Finished {
        wait_for("the NBD clients to be gone", COMMAND_TIME_MAX, || {
            Some(self.command(words)).filter(|done| !done.is_refused_for_users())
        })
    }

    /// Starts `rtrs-client WORDS --run-dir ...`, a command that does not end on its own.
    #[must_use]
    pub fn spawn<S: AsRef<str>>(&self, words: &[S]) -> Proc {
        Proc::start(self.process(words))
    }

    /// Returns the output of `status -o json` for the session, whether or not it serves IO.
    ///
    /// # Panics
    /// Panics if the command fails, or its exit code does not match the session's state.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        let done = self.command(&["status", &self.export, "-o", "json"]);
        let status = done.json();
        let serves = ["open", "degraded", "connecting", "detaching"];
        let serves = serves.iter().any(|state| status["state"] == *state);
        let _ = done.code(if serves { 0 } else { 3 });
        status
    }

    /// Waits until this many paths are connected. `attach` waits for one path, and for the others
    /// no more than a second.
    ///
    /// # Panics
    /// Panics after [`COMMAND_TIME_MAX`].
    pub fn wait_paths(&self, count: usize) {
        wait_for("the session's paths", COMMAND_TIME_MAX, || {
            let status = self.status();
            let paths = status["paths"].as_array()?.iter();
            let connected = paths.filter(|path| path["state"] == "connected").count();
            (connected == count).then_some(())
        });
    }

    /// Detaches, even while NBD clients are connected; checks for exit code 0 and that the
    /// background process ends soon after.
    ///
    /// # Panics
    /// Panics if that fails.
    pub fn detach(&self) {
        let _ = self.command(&["detach", &self.export, "--force"]).ok();
        self.wait_gone(COMMAND_TIME_MAX);
    }

    /// Waits until no process of this run directory is left and its sockets are closed. A dying
    /// process loses its command line before its sockets.
    ///
    /// # Panics
    /// Panics after `limit`.
    pub fn wait_gone(&self, limit: Duration) {
        wait_for("the session's process to end", limit, || {
            (self.pids().is_empty() && !self.is_answering()).then_some(())
        });
    }

    /// Whether a socket of this run directory accepts connections.
    fn is_answering(&self) -> bool {
        let Ok(entries) = fs::read_dir(self.run_dir()) else { return false };
        entries.flatten().any(|entry| UnixStream::connect(entry.path()).is_ok())
    }

    /// Returns the `rtrs-client` processes that have this run directory on their command line.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let needle = self.run_dir().display().to_string();
        let is_ours = |pid: &u32| {
            let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
            let line = String::from_utf8_lossy(&line);
            line.contains("rtrs-client") && line.contains(&needle)
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        names.filter(is_ours).collect()
    }

    /// Returns the only process of the session. First waits for others to exit, such as those of a
    /// session that was just detached.
    ///
    /// # Panics
    /// Panics if there is no process, or still more than one after [`COMMAND_TIME_MAX`].
    #[must_use]
    pub fn pid(&self) -> u32 {
        wait_for("the session to have one process", COMMAND_TIME_MAX, || {
            let pids = self.pids();
            assert!(!pids.is_empty(), "no process of {}", self.export);
            (pids.len() == 1).then(|| pids[0])
        })
    }

    /// Returns the process of a session started in the foreground, so that a test can wait for it.
    ///
    /// # Panics
    /// Panics if the session was not started in the foreground.
    #[must_use]
    pub fn take_foreground(&mut self) -> Proc {
        self.foreground.take().expect("a session in the foreground")
    }

    /// Sends a signal by name, e.g. `TERM`, to the session's process. After `STOP` it waits until
    /// all threads are stopped.
    ///
    /// # Panics
    /// Panics if there is no such process.
    pub fn signal(&self, name: &str) {
        let pid = self.pid();
        assert!(send_signal(name, &pid.to_string()), "cannot signal the session");
        if name == "STOP" {
            wait_stopped(pid);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        for pid in self.pids() {
            let _ = send_signal("KILL", &pid.to_string());
        }
    }
}
