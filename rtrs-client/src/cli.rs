//! What was typed: the command line of `rtrs-client`.
//!
//! Owns [`LowArgs`], which clap fills; wrong flags end the process with code 2 before anything
//! else happens. What the flags mean, together with a configuration file, is `plan.rs`. Flags that
//! are settings are declared in `settings.rs`, since each is also a key of the file.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod link;
mod online;

pub use link::{DoctorArgs, LinkTarget, Mode, PingArgs, Timeout};
pub use online::{PathAddArgs, PathArgs, PathCommand, PathLeaveArgs, PolicyArgs};

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rtrs_core::settings::{Flags, MINUTE, Time, settings_from_file};

use crate::error::Error;
use crate::settings::{AttachSettings, BenchSettings, SessionSettings, Settings};

/// Time for requests in flight.
pub type Within = Time<0, { 10 * MINUTE }>;

/// Attach network block devices over RTRS and serve them as NBD
///
/// Exit codes: 0 ended well, 1 failed, 2 wrong usage or wrong contents of the configuration file.
#[derive(Debug, Parser)]
#[command(name = "rtrs-client", version, max_term_width = 100)]
pub struct LowArgs {
    /// Print for people (text) or for programs (json)
    ///
    /// Applies to attach, list, status, stats, path, policy, detach, bench, ping, doctor and
    /// --print-config, which prints YAML as text.
    #[arg(short, long, global = true, value_name = "FORMAT", default_value = "text")]
    pub output: Output,

    /// Keep control sockets here [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID. list, status, stats and detach find
    /// sessions only in the directory they were attached with.
    #[arg(long, global = true, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Format of what is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Attach an export as a block device or as NBD; returns when it can be opened
    ///
    /// Every flag that is a setting is also a key of the configuration file, under the same name;
    /// flags win over the file, and a repeatable flag replaces the file's list.
    Attach(Box<AttachArgs>),
    /// List what is attached
    ///
    /// One line per session found in the run directory.
    List,
    /// Show one session: its paths, their states, its NBD connections
    ///
    /// NAME is the name it was attached with.
    Status(NameArgs),
    /// Show one session's counters and latencies
    ///
    /// NAME is the name it was attached with.
    Stats(NameArgs),
    /// Detach: finish running requests, close the session, end its process
    ///
    /// NAME is the name it was attached with.
    Detach(DetachArgs),
    /// List, add, remove, disconnect or reconnect the paths of a session while it runs
    ///
    /// No IO fails by any of them.
    Path(PathArgs),
    /// Pick paths in another way from now on
    ///
    /// NAME is the name it was attached with.
    Policy(PolicyArgs),
    /// Measure a session without NBD
    ///
    /// Opens the export, runs requests for a time, and prints rates and latencies. The session's
    /// settings are read from the configuration file too, and bench's own under the key bench.
    Bench(Box<BenchArgs>),
    /// See whether a link does RDMA, in the words of rping and krping
    ///
    /// Asks a rtrs-server, or with --rping an rping -s. In each round the server reads this end's
    /// data and writes it back, and it is compared. Ends with a table; exit code 1 on loss.
    Ping(Box<PingArgs>),
    /// Look at a path step by step and say what to change
    ///
    /// From the host's name over route, device and port to a ping and the first message of a
    /// session, which is not opened. Exit code 1 when a step fails.
    Doctor(DoctorArgs),
    /// Open a device and close it again
    ///
    /// For this program itself, which must not wait for a device that it serves.
    #[command(hide = true)]
    OpenDevice(OpenDeviceArgs),
}

/// The session a command is about.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// `detach`.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// The name the session was attached with.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// Give running requests this long, up to 10m [default: 5s]
    ///
    /// What still runs then ends with an error. 0 waits for nothing.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Within,

    /// Detach also when the session's device is mounted, open or otherwise in use
    ///
    /// The IO of its users then fails, and what they have not written yet is lost.
    #[arg(long)]
    pub force: bool,
}

/// `open-device`.
#[derive(Debug, Args)]
pub struct OpenDeviceArgs {
    /// The device.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,

    /// Fail if somebody has claimed it
    ///
    /// Mounts, swap and devices on top of it do.
    #[arg(long)]
    pub exclusive: bool,
}

/// Where settings come from, and what to do with them.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Read settings from this YAML file
    ///
    /// configs/client.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check flags, file, addresses and socket paths, then stop
    ///
    /// Host names are resolved; nothing is connected or changed.
    #[arg(long)]
    pub check: bool,

    /// Print all settings with their defaults, then stop
    ///
    /// What is printed is a complete configuration file.
    #[arg(long)]
    pub print_config: bool,
}

/// `attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// The export's name at the server, and the session's name here.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The settings of the session.
    #[command(flatten)]
    pub session: Flags<SessionSettings>,

    /// Where it is served, and how.
    #[command(flatten)]
    pub attach: Flags<AttachSettings>,

    /// Go on with another server or export than before: the volume was moved on purpose
    ///
    /// What --identity and the file say, and what a process left that this one takes over from, is
    /// ignored; what opens first counts from now on. No key of the file, so that it is said each
    /// time.
    #[arg(long)]
    pub accept_new_identity: bool,

    /// Where settings come from.
    #[command(flatten)]
    pub source: SourceArgs,
}

/// `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The export's name at the server.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// What to measure.
    #[command(flatten)]
    pub bench: Flags<BenchSettings>,

    /// The settings of the session.
    #[command(flatten)]
    pub session: Flags<SessionSettings>,

    /// Where settings come from.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl SourceArgs {
    /// The configuration file, if one was named, below the flags of the session.
    fn settings(&self, session: &Flags<SessionSettings>) -> Result<Settings, Error> {
        let mut settings: Settings = match &self.config {
            Some(path) => settings_from_file(path)?,
            None => Settings::default(),
        };
        if session.any(&["access", "read-only"]) {
            (settings.session.access, settings.session.read_only) = (None, false);
        }
        session.apply(&mut settings.session)?;
        Ok(settings)
    }
}

impl AttachArgs {
    /// The flags laid over the configuration file. `socket`, `listen` and `device` replace another.
    ///
    /// # Errors
    /// Those of the file, and of flags with old names.
    pub fn settings(&self) -> Result<Settings, Error> {
        let mut settings = self.source.settings(&self.session)?;
        let attach = &mut settings.attach;
        if self.attach.any(&["socket", "listen", "device"]) {
            (attach.socket, attach.listen, attach.device) = (None, None, None);
        }
        self.attach.apply(attach)?;
        Ok(settings)
    }
}

impl BenchArgs {
    /// The flags laid over the configuration file.
    ///
    /// # Errors
    /// Those of the file, and of flags with old names.
    pub fn settings(&self) -> Result<Settings, Error> {
        let mut settings = self.source.settings(&self.session)?;
        self.bench.apply(&mut settings.bench)?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests;
