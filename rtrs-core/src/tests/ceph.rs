//! Ceph cluster of one monitor and one OSD (`scripts/ceph.sh`): one shared by all tests of a
//! binary, or one in a network namespace. It stops when the test process exits, even if killed,
//! because the script waits for its input to end.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use crate::skip::skip;

/// Time limit for the cluster to come up: it takes 10 s on an idle machine.
const READY_TIME_MAX: Duration = Duration::from_secs(300);
/// Maximum number of attempts to start a cluster.
const STARTS_MAX: u32 = 3;
/// Time limit for the OSD to stop after the signal.
const STOP_TIME_MAX: Duration = Duration::from_secs(60);
/// Time limit for a command that accesses the cluster, in seconds.
const COMMAND_SECONDS_MAX: &str = "120";

/// Running cluster. Its pool `rbd` is empty at first.
#[derive(Debug)]
pub struct Ceph {
    dir: PathBuf,
    /// Process whose network namespace the cluster runs in.
    netns: Option<u32>,
    /// Keeps the script's input open.
    _script: Child,
}

impl Ceph {
    /// Returns the cluster, which is started by the first test that calls this. Returns None and
    /// reports a skip if Ceph is not installed; the test must then return.
    ///
    /// # Panics
    /// Panics if the cluster does not come up.
    #[must_use]
    pub fn get() -> Option<&'static Self> {
        static CEPH: OnceLock<Ceph> = OnceLock::new();
        Self::is_installed().then(|| CEPH.get_or_init(|| Self::start(None)))
    }

    /// Starts a separate cluster in a process's network namespace, whose loopback must be up.
    ///
    /// # Panics
    /// Panics if the cluster does not come up.
    #[must_use]
    pub fn start_at(netns: u32) -> Option<Self> {
        Self::is_installed().then(|| Self::start(Some(netns)))
    }

    fn is_installed() -> bool {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let has = |tool: &str| std::env::split_paths(&path).any(|dir| dir.join(tool).is_file());
        let missing = ["ceph-mon", "ceph-osd", "ceph", "rbd"].into_iter().find(|tool| !has(tool));
        if let Some(missing) = missing {
            skip(&format!("no {missing}"));
        }
        missing.is_none()
    }

    fn start(netns: Option<u32>) -> Self {
        // Another test may take the port before the monitor does.
        let started = (0..STARTS_MAX).find_map(|attempt| Self::try_start(netns, attempt));
        started.expect("scripts/ceph.sh starts the cluster")
    }

    /// Starts a cluster. Returns None if the script exits before the cluster is up.
    fn try_start(netns: Option<u32>, attempt: u32) -> Option<Self> {
        let space = netns.unwrap_or(0);
        let name = format!("rtrs-ceph-{}-{space}-{attempt}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("its address").port();
        drop(listener);
        let mut command = entering(netns, "bash");
        command.arg(root.join("scripts/ceph.sh")).arg("hold").arg(&dir).arg(port.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut script = command.spawn().expect("start scripts/ceph.sh");
        let mut out = script.stdout.take().expect("its output");
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut word = [0; 6];
            let _ = sender.send(out.read_exact(&mut word).map(|()| word));
        });
        let word = receiver.recv_timeout(READY_TIME_MAX).expect("a cluster in time");
        if let Err(error) = word {
            eprintln!("scripts/ceph.sh ended with {:?}: {error}", script.wait());
            return None;
        }
        assert_eq!(word.ok().as_ref(), Some(b"ready\n"));
        Some(Self { dir, netns, _script: script })
    }

    /// Returns the configuration file of the cluster.
    #[must_use]
    pub fn conf(&self) -> String {
        self.dir.join("ceph.conf").display().to_string()
    }

    /// Runs a program with access to the cluster, which must succeed. Returns its output.
    ///
    /// # Panics
    /// Panics if the program fails or exceeds the time limit.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        let (ok, text) = self.try_run(program, args);
        assert!(ok, "{program} {args:?}: {text}");
        text
    }

    /// Runs a program with access to the cluster. Returns whether it succeeded, and its output.
    ///
    /// # Panics
    /// Panics if the program cannot be started.
    pub fn try_run(&self, program: &str, args: &[&str]) -> (bool, String) {
        let mut command = entering(self.netns, "timeout");
        command.arg(COMMAND_SECONDS_MAX).arg(program).args(args).env("CEPH_CONF", self.conf());
        let done = command.output().expect("start a command");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (done.status.success(), text(&done.stdout) + &text(&done.stderr))
    }

    /// Creates an image of `mib` MiB in the pool `rbd`.
    ///
    /// # Panics
    /// Panics on failure.
    pub fn image(&self, name: &str, mib: u64) {
        self.run("rbd", &["create", "--size", &mib.to_string(), &format!("rbd/{name}")]);
    }

    /// Returns the addresses of the clients that have an image open.
    ///
    /// # Panics
    /// Panics if they cannot be read.
    #[must_use]
    pub fn watchers(&self, image: &str) -> Vec<String> {
        let status = self.run("rbd", &["status", image]);
        let all = status.lines().filter_map(|line| line.trim().strip_prefix("watcher="));
        all.filter_map(|rest| rest.split_whitespace().next()).map(ToOwned::to_owned).collect()
    }

    /// Returns the address of the only client that has an image open.
    ///
    /// # Panics
    /// Panics if there is none, or several.
    #[must_use]
    pub fn watcher(&self, image: &str) -> String {
        <[String; 1]>::try_from(self.watchers(image)).map(|[one]| one).expect("one watcher")
    }

    /// Sends a signal to the OSD. After `STOP`, waits until it has stopped.
    ///
    /// # Panics
    /// Panics if the OSD is not running, or does not stop.
    pub fn signal_osd(&self, signal: &str) {
        let pid = std::fs::read_to_string(self.dir.join("run/osd.0.pid")).expect("its process");
        let sent = Command::new("kill").args(["-s", signal, pid.trim()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "cannot signal the OSD");
        if signal == "STOP" {
            // Its threads stop one after the other.
            let begin = Instant::now();
            while !is_stopped(pid.trim()) {
                assert!(begin.elapsed() < STOP_TIME_MAX, "the OSD does not stop");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Returns true if all threads of a process are stopped.
fn is_stopped(pid: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    threads.flatten().all(|thread| {
        // A thread that has exited has no state.
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('T'))
    })
}

/// Returns a command that runs in the network namespace of a process.
fn entering(netns: Option<u32>, program: &str) -> Command {
    let Some(pid) = netns else { return Command::new(program) };
    let mut command = Command::new("nsenter");
    command.args(["-t", &pid.to_string(), "-n", "--", program]);
    command
}
