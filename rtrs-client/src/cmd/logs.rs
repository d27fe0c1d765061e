//! `logs`: prints the log of a background session.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use rtrs_core::local::RunDir;
use rtrs_core::rt::{PeerEnd, peer_end};
use rtrs_core::settings::Output;

use super::global::GlobalArgs;
use super::sessions::{Answer, ask};
use crate::error::{Error, ErrorKind, system, usage};
use crate::session_log::path_of;

/// Interval between checks of a log that is being followed.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Maximum time for a session to report its log.
const ASK: Duration = Duration::from_secs(1);

/// The arguments.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Name of the session
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Print only the last N lines
    ///
    /// Without it, the whole log is printed.
    #[arg(short = 'n', long, value_name = "N")]
    pub lines: Option<usize>,

    /// Print new lines as they are logged, until Ctrl-C
    ///
    /// Continues when the log is rotated.
    #[arg(short, long)]
    pub follow: bool,
}

pub(super) fn run(args: &LogsArgs, global: &GlobalArgs) -> Result<(), Error> {
    if global.output == Output::Json {
        return Err(usage("logs prints the log unchanged; drop -o json"));
    }
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    let path = log_of(&args.name, &run_dir);
    let mut file = File::open(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => no_log(&args.name, &path),
        _ => failed(&path)(error),
    })?;
    let text = read_more(&mut file).map_err(failed(&path))?;
    print(tail(&text, args.lines))?;
    if !args.follow {
        return Ok(());
    }
    // Prints until the reader stops reading, as `head` does.
    while peer_end(io::stdout()) != PeerEnd::Gone {
        std::thread::sleep(POLL_INTERVAL);
        // First the rest of the file, then the file that replaced it when it was rotated.
        print(&read_more(&mut file).map_err(failed(&path))?)?;
        let ino = file.metadata().map_err(failed(&path))?.ino();
        if let Ok(other) = File::open(&path)
            && other.metadata().map_err(failed(&path))?.ino() != ino
        {
            file = other;
        }
    }
    Ok(())
}

/// Returns the log of the session that has this volume; the log is named after the session's first
/// volume. If there is no such session, the log that a past session with this name left behind.
fn log_of(name: &str, run_dir: &RunDir) -> PathBuf {
    let log = match ask(name, &run_dir.control_socket(name), ASK) {
        Some(Answer::Status(status)) if !status.log.is_empty() => status.log,
        _ => name.to_owned(),
    };
    path_of(run_dir, &log)
}

/// Reads the text appended since the last call.
fn read_more(file: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.read_to_end(&mut text).map(|_| text)
}

/// Returns the last lines, or all lines.
fn tail(text: &[u8], lines: Option<usize>) -> &[u8] {
    let Some(lines) = lines else { return text };
    let whole = text.strip_suffix(b"\n").unwrap_or(text);
    let mut breaks = whole.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    match lines.checked_sub(1) {
        None => &[],
        Some(before) => breaks.nth(before).map_or(text, |(at, _)| &text[at + 1..]),
    }
}

fn print(text: &[u8]) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.map_err(system("cannot print")),
    }
}

fn no_log(name: &str, path: &Path) -> Error {
    let text = format!(
        "{name:?} has no log {}: it was attached in the foreground or with another run directory \
         (check list and --run-dir)",
        path.display()
    );
    Error::new(ErrorKind::System, text)
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Error {
    let what = format!("cannot read the log {}", path.display());
    move |error| Error::with_source(ErrorKind::System, what.clone(), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_shown() {
        let text = b"one\ntwo\nthree\n";
        for (lines, shown) in [
            (None, "one\ntwo\nthree\n"),
            (Some(0), ""),
            (Some(1), "three\n"),
            (Some(2), "two\nthree\n"),
            (Some(3), "one\ntwo\nthree\n"),
            (Some(9), "one\ntwo\nthree\n"),
        ] {
            assert_eq!(tail(text, lines), shown.as_bytes(), "{lines:?}");
        }
        assert_eq!(tail(b"a\nunfinished", Some(1)), b"unfinished");
        assert_eq!(tail(b"", Some(1)), b"");
    }
}
