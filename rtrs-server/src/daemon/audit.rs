//! Audit log: one JSON object per line, in a file or in the journal.
//!
//! A separate thread does the writing, so that a slow disk delays no other work. Its queue is
//! bounded: events that do not fit are counted, and a line with their number precedes the next
//! event. When a file reaches its limit, part of it and of the previous file is kept as `FILE.1`,
//! so there are at most two files.
//!
//! `audit/limit.rs` limit per client · `audit/rotation.rs` rotation of a full file

mod limit;
mod rotation;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rtrs_core::logging::timestamp;
use rtrs_core::rt::Clock;
use serde::Serialize;
use serde_json::json;

use self::limit::Limits;
use crate::audit::{AuditEvent, AuditSink};
use crate::error::{Error, ErrorKind, failed};
use crate::settings::{AuditLog, Settings};

/// Maximum number of events that wait for the thread.
const QUEUE_MAX: usize = 4096;
/// Maximum time that the server's exit waits for the writes.
const END_MAX: Duration = Duration::from_secs(2);
/// Interval at which the thread checks for unreported suppressed events.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
const JOURNAL: &str = "/run/systemd/journal/socket";

/// A line of the log, with its time.
#[derive(Serialize)]
struct Line {
    time: String,
    #[serde(flatten)]
    event: AuditEvent,
}

/// Message to the thread.
enum Job {
    Write(Box<Line>),
    /// No more lines follow.
    End,
}

/// A running audit log. Dropping it writes all recorded events.
pub(super) struct AuditThread(Option<(SyncSender<Job>, JoinHandle<()>)>);

impl Drop for AuditThread {
    fn drop(&mut self) {
        let Some((sender, thread)) = self.0.take() else { return };
        let until = Instant::now() + END_MAX;
        let mut queued = false;
        while !thread.is_finished() && Instant::now() < until {
            queued = queued || sender.try_send(Job::End).is_ok();
            std::thread::sleep(Duration::from_millis(1));
        }
        if !thread.is_finished() {
            tracing::error!("the audit log is too slow; the last lines are lost");
        }
    }
}

/// Opens the audit log named in the settings and starts its thread. Without that setting, nothing
/// is recorded.
///
/// # Errors
/// [`ErrorKind::System`] for a file or journal that cannot be opened.
pub(super) fn start(set: &Settings) -> Result<(AuditSink, AuditThread), Error> {
    let Some(to) = &set.audit_log else { return Ok((AuditSink::default(), AuditThread(None))) };
    let out = match to {
        AuditLog::Journal => Out::journal(Path::new(JOURNAL)),
        AuditLog::File(path) => Out::file(path, set.audit_log_max.bytes()),
    };
    let out = out.map_err(failed(ErrorKind::System, cannot_open(to)))?;
    let (sender, queue) = sync_channel(QUEUE_MAX);
    let gate =
        Arc::new(Gate { limits: Mutex::new(Limits::new(Clock.now())), lost: AtomicU64::new(0) });
    let gate_of = Arc::clone(&gate);
    let thread = std::thread::Builder::new()
        .name("audit".into())
        .spawn(move || write_all(out, &queue, &gate_of))
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    let running = AuditThread(Some((sender.clone(), thread)));
    let sink = AuditSink::new(move |event| {
        // The thread holds the lock only briefly.
        let Some(event) = gate.limits.lock().admit(Clock.now(), event) else { return };
        if sender.try_send(Job::Write(Box::new(Line::now(event)))).is_err() {
            gate.lost.fetch_add(1, Ordering::Relaxed);
        }
    });
    Ok((sink, running))
}

/// Filter for events before they are queued.
struct Gate {
    limits: Mutex<Limits>,
    /// Number of events that did not fit into the queue or could not be written.
    lost: AtomicU64,
}

impl Line {
    fn now(event: AuditEvent) -> Self {
        Self { time: timestamp(), event }
    }
}

/// Refuses settings that [`start`] would refuse, without creating a file.
///
/// # Errors
/// [`ErrorKind::System`] for a file or journal that cannot be opened.
pub(super) fn check(set: &Settings) -> Result<(), Error> {
    let Some(to) = &set.audit_log else { return Ok(()) };
    let checked = match to {
        AuditLog::Journal => Out::journal(Path::new(JOURNAL)).map(drop),
        AuditLog::File(path) => check_file(path),
    };
    checked.map_err(failed(ErrorKind::System, cannot_open(to)))
}

fn check_file(path: &Path) -> io::Result<()> {
    match open_with(path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
            let dir = dir.unwrap_or_else(|| Path::new("."));
            // An unnamed file, which vanishes when it is closed.
            let tried = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(dir);
            match tried {
                // The file system does not support such files.
                Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
                tried => tried.map(drop),
            }
        }
        opened => opened.map(drop),
    }
}

fn cannot_open(to: &AuditLog) -> String {
    format!("cannot open the audit log {to} (audit-log)")
}

/// Writes lines until [`Job::End`], or until the last sink is dropped.
fn write_all(out: Out, queue: &Receiver<Job>, gate: &Gate) {
    let mut writer = Writer { out, gate, is_failing: false };
    let mut next_check = Instant::now() + POLL_INTERVAL;
    loop {
        match queue.recv_timeout(next_check.saturating_duration_since(Instant::now())) {
            Ok(Job::Write(line)) => writer.write(&line),
            Ok(Job::End) | Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() >= next_check {
            next_check = Instant::now() + POLL_INTERVAL;
            let overdue = || gate.limits.lock().overdue(Clock.now());
            while let Some(event) = overdue() {
                writer.write(&Line::now(event));
            }
        }
    }
    let rest = gate.limits.lock().rest();
    rest.into_iter().for_each(|event| writer.write(&Line::now(event)));
}

struct Writer<'a> {
    out: Out,
    gate: &'a Gate,
    is_failing: bool,
}

impl Writer<'_> {
    fn write(&mut self, line: &Line) {
        let missed = self.gate.lost.swap(0, Ordering::Relaxed);
        let mut text = String::new();
        if missed > 0 {
            text += &format!("{}\n", json!({ "time": line.time, "event": "lost", "lost": missed }));
        }
        // Serialization of these fields cannot fail.
        text += &serde_json::to_string(line).unwrap_or_default();
        text.push('\n');
        match self.out.write(&text) {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                self.gate.lost.fetch_add(missed + 1, Ordering::Relaxed);
                if !self.is_failing {
                    tracing::error!(%error, "cannot write the audit log");
                }
                self.is_failing = true;
            }
        }
    }
}

/// Destination for lines.
enum Out {
    File { path: PathBuf, file: File, written: u64, max: u64 },
    Journal(UnixDatagram),
}

impl Out {
    fn file(path: &Path, max: u64) -> io::Result<Self> {
        let (file, written) = open(path)?;
        Ok(Self::File { path: path.to_owned(), file, written, max })
    }

    fn journal(socket: &Path) -> io::Result<Self> {
        let journal = UnixDatagram::unbound()?;
        journal.connect(socket)?;
        // If the journal does not read, the thread does not wait: lines are lost and counted.
        journal.set_nonblocking(true)?;
        Ok(Self::Journal(journal))
    }

    /// Writes complete lines.
    fn write(&mut self, lines: &str) -> io::Result<()> {
        match self {
            Self::File { path, file, written, max } => {
                let len = lines.len() as u64;
                if *written > 0 && *written + len > *max {
                    rotate(path, *max)?;
                    (*file, *written) = open(path)?;
                }
                file.write_all(lines.as_bytes()).inspect_err(|_| {
                    // Removes an incomplete line before the next is written. If that fails, readers
                    // see the incomplete line.
                    let _ = file.set_len(*written);
                })?;
                *written += len;
                Ok(())
            }
            Self::Journal(journal) => lines.lines().try_for_each(|line| {
                let entry =
                    format!("MESSAGE={line}\nPRIORITY=5\nSYSLOG_IDENTIFIER=rtrs-server-audit\n");
                journal.send(entry.as_bytes()).map(drop)
            }),
        }
    }
}

/// Makes room for a new file. If no part of the lines can be kept, for example on a full disk, the
/// file replaces the previous one.
fn rotate(path: &Path, max: u64) -> io::Result<()> {
    let mut before = path.to_owned().into_os_string();
    before.push(".1");
    if rotation::rotate(path, Path::new(&before), max).is_ok() {
        return Ok(());
    }
    match fs::rename(path, before) {
        // The file is absent if an earlier attempt renamed it and could not open a new one, or if
        // it was deleted.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        renamed => renamed,
    }
}

/// Opens a regular file for appending. Returns the file and its length. A new file is accessible
/// only to its owner.
fn open(path: &Path) -> io::Result<(File, u64)> {
    open_with(path, true)
}

fn open_with(path: &Path, create: bool) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    // The open neither follows a link nor waits for the other end of a FIFO.
    let options = options.append(true).create(create).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok((file, meta.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::{AuditKind, AuditResult};

    /// A directory for one test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("rtrs-audit-{}-{name}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_is_bounded_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = Scratch::new("file");
        let path = dir.path("audit.log");
        let mut out = Out::file(&path, 100).unwrap();
        for n in 0..10 {
            out.write(&format!("{n}{}\n", "x".repeat(38))).unwrap();
        }
        let before = fs::read_to_string(dir.path("audit.log.1")).unwrap();
        let now = fs::read_to_string(&path).unwrap();
        assert_eq!((before.len(), now.len()), (80, 80));
        assert!(before.starts_with('6') && now.starts_with('8'), "{before} {now}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // An existing file is appended to.
        let mut out = Out::file(&path, 100).unwrap();
        out.write("last\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap().len(), 85);
    }

    #[test]
    fn a_failed_rotation_is_retried() {
        let dir = Scratch::new("rotation");
        let path = dir.path("audit.log");
        let mut out = Out::file(&path, 10).unwrap();
        out.write("12345678\n").unwrap();
        // A directory blocks the name of the kept file.
        fs::create_dir_all(dir.path("audit.log.1/x")).unwrap();
        out.write("abcdefgh\n").unwrap_err();
        fs::remove_dir_all(dir.path("audit.log.1")).unwrap();
        // The file itself is missing, as after a failed open.
        fs::rename(&path, dir.path("elsewhere")).unwrap();
        out.write("ABCDEFGH\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "ABCDEFGH\n");
    }

    #[test]
    fn links_and_pipes_are_refused() {
        let dir = Scratch::new("links");
        let link = dir.path("link");
        std::os::unix::fs::symlink(dir.path("target"), &link).unwrap();
        assert!(Out::file(&link, 10).is_err());
        assert!(!dir.path("target").exists());
        assert!(Out::file(Path::new("/dev/null"), 10).is_err());
    }

    #[test]
    fn a_check_refuses_what_startup_would_and_creates_no_file() {
        let dir = Scratch::new("check");
        let of = |path: PathBuf| Settings {
            audit_log: Some(AuditLog::File(path)),
            ..Settings::default()
        };
        let good = dir.path("audit.log");
        check(&of(good.clone())).unwrap();
        assert!(!good.exists());
        fs::write(&good, "a line\n").unwrap();
        check(&of(good.clone())).unwrap();
        assert_eq!(fs::read_to_string(&good).unwrap(), "a line\n");
        let link = dir.path("link");
        std::os::unix::fs::symlink(dir.path("target"), &link).unwrap();
        for bad in [dir.path("none/a.log"), good.join("a.log"), dir.0.clone(), link] {
            let [checked, started] =
                [check(&of(bad.clone())).unwrap_err(), start(&of(bad)).map(drop).unwrap_err()];
            assert_eq!(checked.chain().to_string(), started.chain().to_string());
        }
        let text = check(&of("/dev/null".into())).unwrap_err().chain().to_string();
        assert!(text.contains("cannot open the audit log /dev/null (audit-log)"), "{text}");
    }

    #[test]
    fn dropping_the_log_waits_for_recorded_events() {
        let dir = Scratch::new("end");
        let path = dir.path("audit.log");
        let set = Settings { audit_log: Some(AuditLog::File(path.clone())), ..Settings::default() };
        let (sink, thread) = start(&set).unwrap();
        for _ in 0..1000 {
            sink.record(|| AuditEvent::new(AuditKind::Reload, AuditResult::Ok));
        }
        let begin = Instant::now();
        drop(thread);
        let took = begin.elapsed();
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        // Dropping it waits no longer than this for a slow thread.
        assert!(lines == 1000 || took >= END_MAX, "{lines} lines after {took:?}");
    }

    #[test]
    fn a_journal_receives_a_message_for_each_line() {
        let dir = Scratch::new("journal");
        let socket = dir.path("journal");
        let journal = UnixDatagram::bind(&socket).unwrap();
        let mut out = Out::journal(&socket).unwrap();
        out.write("{1}\n{2}\n").unwrap();
        let mut bytes = [0; 256];
        for n in ["{1}", "{2}"] {
            let len = journal.recv(&mut bytes).unwrap();
            let entry = std::str::from_utf8(&bytes[..len]).unwrap();
            assert!(entry.starts_with(&format!("MESSAGE={n}\nPRIORITY=5\n")), "{entry}");
        }
    }

    #[test]
    fn lost_records_are_reported() {
        let dir = Scratch::new("lost");
        let path = dir.path("audit.log");
        let (sender, queue) = sync_channel(2);
        let event = AuditEvent::new(AuditKind::Reload, AuditResult::Ok);
        sender.send(Job::Write(Box::new(Line { time: "now".into(), event }))).unwrap();
        drop(sender);
        let limits = Mutex::new(Limits::new(Clock.now()));
        let gate = Gate { limits, lost: AtomicU64::new(3) };
        write_all(Out::file(&path, 1 << 20).unwrap(), &queue, &gate);
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], r#"{"event":"lost","lost":3,"time":"now"}"#);
        assert!(lines[1].starts_with(r#"{"time":"now","event":"reload","result":"ok""#), "{text}");
    }

    fn opened(identity: &str, number: u32) -> AuditEvent {
        AuditEvent {
            identity: Some(identity.to_owned()),
            address: Some(([10, 0, 0, 1], 1).into()),
            export: Some(format!("vol{number}")),
            ..AuditEvent::new(AuditKind::Open, AuditResult::Ok)
        }
    }

    #[test]
    fn a_client_cannot_push_out_the_records_of_others() {
        let dir = Scratch::new("flush");
        let path = dir.path("audit.log");
        let max = 16 << 10;
        let set = Settings {
            audit_log: Some(AuditLog::File(path.clone())),
            audit_log_max: "16K".parse().unwrap(),
            ..Settings::default()
        };
        let (sink, mut thread) = start(&set).unwrap();
        sink.record(|| AuditEvent::new(AuditKind::Reload, AuditResult::Ok));
        for number in 0..10 {
            sink.record(|| opened("db1", number));
        }
        for number in 0..100_000 {
            sink.record(|| opened("intruder", number));
        }
        // This waits longer than stopping does.
        let (queue, writing) = thread.0.take().unwrap();
        queue.send(Job::End).unwrap();
        writing.join().unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let (before, now) = (read(&dir.path("audit.log.1")), read(&path));
        assert!(before.len() <= max && now.len() <= max, "{} {}", before.len(), now.len());
        let all = before + &now;
        assert_eq!(all.matches(r#""identity":"db1""#).count(), 10);
        assert_eq!(all.matches(r#""event":"reload""#).count(), 1);
        let lines = all.lines().map(|line| serde_json::from_str(line).unwrap());
        let left_out = |line: serde_json::Value| line["left_out"].as_u64().unwrap();
        assert!(lines.map(left_out).sum::<u64>() > 90_000, "{all}");
    }

    #[test]
    fn repeatedly_full_files_keep_the_records_of_others() {
        let dir = Scratch::new("full");
        let path = dir.path("audit.log");
        let mut out = Out::file(&path, 8 << 10).unwrap();
        let mut write = |event: AuditEvent| {
            let line = Line { time: "now".into(), event };
            out.write(&format!("{}\n", serde_json::to_string(&line).unwrap())).unwrap();
        };
        write(opened("db1", 7));
        for number in 0..2000 {
            write(opened("intruder", number));
        }
        let before = fs::read_to_string(dir.path("audit.log.1")).unwrap();
        assert!(before.len() <= 8 << 10);
        assert!(before.lines().next().unwrap().contains(r#""export":"vol7""#), "{before}");
        assert!(before.contains("intruder") && !dir.path("audit.log.1.new").exists());
    }
}
