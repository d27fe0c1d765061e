//! Child processes with limits on everything. [`run`] is for programs that exit, [`Proc`] for
//! daemons. Output goes to files, not pipes: a background process that keeps a stream open cannot
//! block a test, and no pipe fills up. Each child leads its own process group, so that its own
//! children are killed with it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use crate::requires::search_path;
use crate::{COMMAND_TIME_MAX, wait_for};

/// Ticks per second in /proc/PID/stat: USER_HZ, 100 on every Linux that we build for.
const TICKS_PER_SECOND: u64 = 100;

/// Returns the path of one of this project's programs: in `RTRS_BIN_DIR`, or else next to the
/// running test binary.
///
/// # Panics
/// Panics if the program has not been built.
#[must_use]
pub fn bin(name: &str) -> PathBuf {
    let dir = std::env::var_os("RTRS_BIN_DIR").map_or_else(
        || {
            let exe = std::env::current_exe().expect("the path of this test binary");
            // target/PROFILE/deps/TEST-HASH
            exe.ancestors().nth(2).expect("a target directory").to_owned()
        },
        PathBuf::from,
    );
    let path = dir.join(name);
    assert!(path.is_file(), "{} is not built: cargo build --workspace", path.display());
    path
}

/// Exit code and output of a program.
#[derive(Debug)]
pub struct Finished {
    /// Command line, for messages.
    pub command: String,
    /// Exit code; `None` if a signal ended the program.
    pub code: Option<i32>,
    /// Complete standard output, decoded lossily.
    pub stdout: String,
    /// Complete standard error, decoded lossily.
    pub stderr: String,
}

impl Finished {
    /// Checks that the exit code is 0.
    ///
    /// # Panics
    /// Panics with the program's output if it is not.
    #[must_use]
    pub fn ok(self) -> Self {
        self.code(0)
    }

    /// Checks that the exit code is `code`.
    ///
    /// # Panics
    /// Panics with the program's output if it is not.
    #[must_use]
    pub fn code(self, code: i32) -> Self {
        assert!(self.code == Some(code), "expected exit code {code}, got {self:#?}");
        self
    }

    /// Checks that stderr or stdout contains `word`, ignoring case, and that the program did not
    /// panic.
    ///
    /// # Panics
    /// Panics if `word` is missing, or with a panic's message.
    #[must_use]
    pub fn says(self, word: &str) -> Self {
        let all = format!("{}\n{}", self.stderr, self.stdout).to_lowercase();
        assert!(all.contains(&word.to_lowercase()), "no {word:?} in {self:#?}");
        assert!(!all.contains("panicked at"), "a panic in {self:#?}");
        self
    }

    /// Whether a session refused this command because clients were connected.
    #[must_use]
    pub fn is_refused_for_users(&self) -> bool {
        let refusals = ["is served to NBD clients", "is used by a virtual machine"];
        let says = |text: &String| refusals.iter().any(|refusal| text.contains(refusal));
        says(&self.stderr) || says(&self.stdout)
    }

    /// Parses the standard output as JSON.
    ///
    /// # Panics
    /// Panics if it is not JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("no JSON ({error}) from {self:#?}"))
    }
}

/// Runs a program until it exits, for at most `limit`.
///
/// # Panics
/// Panics if the program cannot be started or does not exit in time; in that case, it is killed.
pub fn run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S], limit: Duration) -> Finished {
    let mut command = Command::new(program);
    command.args(args);
    Proc::start(command).wait(limit)
}

/// Running child process.
#[derive(Debug)]
pub struct Proc {
    child: Child,
    command: String,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
    ended: Option<ExitStatus>,
}

impl Proc {
    /// Starts the command without input, keeping its output.
    ///
    /// # Panics
    /// Panics if it cannot be started.
    #[must_use]
    pub fn start(command: Command) -> Self {
        Self::start_with(command, None)
    }

    /// Starts the command like [`Proc::start`], with `errors_to` as its standard error instead of a
    /// file.
    ///
    /// # Panics
    /// Panics if it cannot be started.
    #[must_use]
    pub fn start_with(command: Command, errors_to: Option<Stdio>) -> Self {
        Self::start_with_streams(command, None, errors_to)
    }

    /// Starts the command like [`Proc::start`], with these as its standard input and error.
    ///
    /// # Panics
    /// Panics if it cannot be started.
    #[must_use]
    pub fn start_with_streams(
        mut command: Command,
        input: Option<Stdio>,
        errors_to: Option<Stdio>,
    ) -> Self {
        let stdout = NamedTempFile::new().expect("a file for stdout");
        let stderr = NamedTempFile::new().expect("a file for stderr");
        let file = || File::options().append(true).open(stderr.path()).expect("open stderr").into();
        command
            .env("PATH", search_path())
            .stdin(input.unwrap_or_else(Stdio::null))
            .stdout(File::options().append(true).open(stdout.path()).expect("open stdout"))
            .stderr(errors_to.unwrap_or_else(file))
            .process_group(0);
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let text = words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {text}: {error}"));
        Self { child, command: text, stdout, stderr, ended: None }
    }

    /// Returns the process ID, which is not reused until the process has been waited for.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output of both streams so far.
    #[must_use]
    pub fn output(&self) -> String {
        format!("{}{}", text_of(self.stdout.path()), text_of(self.stderr.path()))
    }

    /// Returns the complete lines of each stream so far, without an unfinished last line.
    fn whole_lines(&self) -> String {
        let mut lines = String::new();
        for stream in [&self.stdout, &self.stderr] {
            let text = text_of(stream.path());
            lines.push_str(&text[..text.rfind('\n').map_or(0, |end| end + 1)]);
        }
        lines
    }

    /// Whether the process is running.
    pub fn is_running(&mut self) -> bool {
        self.poll().is_none()
    }

    fn poll(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("wait for a child");
        }
        self.ended
    }

    /// Waits until the process's output contains `count` lines with `pattern`. Returns the text
    /// after the pattern on each line, up to white space.
    ///
    /// # Panics
    /// Panics if the process exits first, or when `limit` has passed.
    pub fn wait_lines(&mut self, pattern: &str, count: usize, limit: Duration) -> Vec<String> {
        let rest = |line: &str| Some(line.split_once(pattern)?.1.to_owned());
        self.wait_words(pattern, count, limit, rest)
    }

    /// Waits like [`wait_lines`](Self::wait_lines), for lines that begin with `start`.
    ///
    /// # Panics
    /// Panics if the process exits first, or when `limit` has passed.
    pub fn wait_starts(&mut self, start: &str, count: usize, limit: Duration) -> Vec<String> {
        let rest = |line: &str| line.strip_prefix(start).map(str::to_owned);
        self.wait_words(start, count, limit, rest)
    }

    /// Waits for `count` lines in which `rest` finds a part; returns the first word of each part.
    fn wait_words(
        &mut self,
        pattern: &str,
        count: usize,
        limit: Duration,
        rest: impl Fn(&str) -> Option<String>,
    ) -> Vec<String> {
        let start = Instant::now();
        loop {
            let ended = self.poll();
            let output = self.output();
            let found: Vec<String> = self
                .whole_lines()
                .lines()
                .filter_map(&rest)
                .map(|rest| rest.split_whitespace().next().unwrap_or("").to_owned())
                .collect();
            if found.len() >= count {
                return found;
            }
            assert!(ended.is_none(), "{} ended ({ended:?}):\n{output}", self.command);
            assert!(
                start.elapsed() < limit,
                "{} did not write {count} x {pattern:?} in {limit:?}:\n{output}",
                self.command
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal by its name without SIG, e.g. `TERM`, to this process alone. After `STOP`,
    /// waits until all threads are stopped.
    ///
    /// # Panics
    /// Panics if the process has already exited.
    pub fn signal(&mut self, name: &str) {
        let ended = self.poll();
        assert!(ended.is_none(), "{} has ended: {ended:?}\n{}", self.command, self.output());
        assert!(send_signal(name, &self.pid().to_string()), "cannot signal {}", self.command);
        if name == "STOP" {
            wait_stopped(self.pid());
        }
    }

    /// Waits for the process to exit.
    ///
    /// # Panics
    /// Panics when `limit` has passed; in that case, the process is killed.
    #[must_use]
    pub fn wait(mut self, limit: Duration) -> Finished {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.poll() {
                break status;
            }
            if start.elapsed() >= limit {
                let output = self.output();
                self.kill();
                panic!("{} did not end within {limit:?}:\n{output}", self.command);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let stderr = match status.signal() {
            Some(number) => format!("{}\n(ended by signal {number})", text_of(self.stderr.path())),
            None => text_of(self.stderr.path()),
        };
        let stdout = text_of(self.stdout.path());
        Finished { command: self.command.clone(), code: status.code(), stdout, stderr }
    }

    /// Sends SIGTERM, then waits like [`Self::wait`].
    #[must_use]
    pub fn terminate(mut self, limit: Duration) -> Finished {
        self.signal("TERM");
        self.wait(limit)
    }

    fn kill(&mut self) {
        if self.poll().is_none() {
            // First the group, with the process's own children; then the process, in case the group
            // is gone.
            let _ = send_signal("KILL", &format!("-{}", self.pid()));
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal with the shell's own `kill`, which needs no unsafe code here. Returns whether it
/// was sent.
#[must_use]
pub fn send_signal(name: &str, target: &str) -> bool {
    let mut shell = Command::new("sh");
    shell.args(["-c", "kill -s \"$0\" -- \"$1\"", name, target]).stderr(Stdio::null());
    shell.status().is_ok_and(|status| status.success())
}

/// Waits until all threads of a process are stopped; they may keep running briefly after the signal
/// has been sent. Worker threads of rings are ignored: they may be in a system call that cannot be
/// stopped.
///
/// # Panics
/// Panics if a thread is still running after [`COMMAND_TIME_MAX`].
pub fn wait_stopped(pid: u32) {
    let tasks = format!("/proc/{pid}/task");
    wait_for("all threads to stop", COMMAND_TIME_MAX, || {
        let is_stopped = |task: &fs::DirEntry| {
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            status.contains("State:\tT") || status.starts_with("Name:\tiou-")
        };
        fs::read_dir(&tasks).ok()?.flatten().all(|task| is_stopped(&task)).then_some(())
    });
}

fn text_of(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(path) {
        let _ = file.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the user and system CPU time of a live process, with a resolution of 10 ms.
///
/// # Panics
/// Panics if there is no such process.
#[must_use]
pub fn cpu_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a live process");
    let (_, fields) = stat.rsplit_once(')').expect("the form of /proc/PID/stat");
    // After the name: state is field 0, utime 11, stime 12.
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(number).sum();
    Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND)
}

/// Returns the current resident memory of a live process in bytes.
#[must_use]
pub fn resident_memory(pid: u32) -> u64 {
    memory_line(pid, "VmRSS:")
}

/// Returns the peak resident memory of a live process in bytes.
#[must_use]
pub fn peak_memory(pid: u32) -> u64 {
    memory_line(pid, "VmHWM:")
}

fn memory_line(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a live process");
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()).map_or(0, number) * 1024
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn an_incomplete_line_of_one_stream_is_not_completed_by_the_other() {
        let scratch = Scratch::new();
        let go = scratch.path("go");
        let mut command = Command::new("sh");
        let script = "printf 'word 1'; echo other >&2; until [ -e \"$0\" ]; do sleep 0.01; done; \
                      echo 2";
        command.args(["-c", script]).arg(&go);
        let mut shell = Proc::start(command);
        let _ = shell.wait_starts("other", 1, COMMAND_TIME_MAX);
        File::create(&go).expect("a file");
        assert_eq!(shell.wait_starts("word ", 1, COMMAND_TIME_MAX), ["12"]);
        let _ = shell.wait(COMMAND_TIME_MAX).ok();
    }
}
