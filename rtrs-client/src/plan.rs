//! What will run: a command and its settings, judged, with every default filled in.
//!
//! Owns [`Plan`]. [`Plan::new`] judges the settings by themselves and against each other; apart
//! from user, host name and environment it does not look at the system. [`Plan::check`] then looks
//! at what the plan needs (addresses, socket paths) before anything is connected or started. Every
//! error says which setting, which value and what would do.
//!
//! Called by the binary; read by the rest of the client, which never sees `Settings`.

mod attach;
mod bench;
mod link;
mod online;
mod session;

pub use attach::{AttachPlan, Front};
pub use bench::BenchPlan;
pub use link::{DoctorPlan, PingPlan};
pub(crate) use online::path_name;
pub use online::{Leave, PathPlan, PathStep};
pub use session::SessionPlan;

pub use rtrs_core::local::RunDir;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use rtrs_core::config::Millis;

use crate::cli::{Command, LowArgs, Output};
use crate::config::{Policy, Settings};
use crate::error::{Error, ErrorKind};

/// Longest time a detach waits for running requests, in milliseconds.
const WITHIN_MS_MAX: u64 = 600_000;

/// A command, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Attach an export and serve it.
    Attach(Box<AttachPlan>),
    /// Measure a session.
    Bench(Box<BenchPlan>),
    /// List what is attached.
    List {
        /// Where control sockets live.
        run_dir: RunDir,
        /// For people or programs.
        output: Output,
    },
    /// Show a session.
    Status {
        /// The session.
        name: String,
        /// Where control sockets live.
        run_dir: RunDir,
        /// For people or programs.
        output: Output,
    },
    /// Show a session's counters.
    Stats {
        /// The session.
        name: String,
        /// Where control sockets live.
        run_dir: RunDir,
        /// For people or programs.
        output: Output,
    },
    /// Detach a session.
    Detach {
        /// The session.
        name: String,
        /// Where control sockets live.
        run_dir: RunDir,
        /// Time for running requests in milliseconds.
        within_ms: u64,
        /// Also when its device is in use.
        force: bool,
        /// For people or programs.
        output: Output,
    },
    /// List or change a session's paths.
    Path(PathPlan),
    /// Choose paths in another way.
    Policy {
        /// The session.
        name: String,
        /// How.
        policy: Policy,
        /// Where control sockets live.
        run_dir: RunDir,
        /// For people or programs.
        output: Output,
    },
    /// Ping.
    Ping(Box<PingPlan>),
    /// Look at a path.
    Doctor(DoctorPlan),
    /// Open a device and close it.
    OpenDevice {
        /// The device.
        path: PathBuf,
        /// Fail if it is claimed.
        exclusive: bool,
    },
}

impl Plan {
    /// Judges what was typed, with the configuration file it names.
    ///
    /// # Errors
    /// Those of the file, and [`ErrorKind::Usage`] for a value out of its range, values that do
    /// not fit together, and what this build cannot do.
    pub fn new(args: &LowArgs) -> Result<Self, Error> {
        let output = args.output;
        let flags = |settings| Settings { run_dir: args.run_dir.clone(), ..settings };
        let args_dir = || args.run_dir.clone();
        let place = |name: &str| {
            session::check_name("export name", name)?;
            Ok((name.to_owned(), RunDir::new(args.run_dir.clone())?))
        };
        match &args.command {
            Command::Attach(attach) => {
                let settings = attach.source.layer(flags(attach.settings()))?;
                let accept_new_identity = attach.accept_new_identity;
                let plan = AttachPlan::new(&attach.name, settings, output)?;
                Ok(Self::Attach(Box::new(AttachPlan { accept_new_identity, ..plan })))
            }
            Command::Bench(bench) => {
                let settings = bench.source.layer(flags(bench.settings()))?;
                BenchPlan::new(&bench.name, settings, output).map(Box::new).map(Self::Bench)
            }
            Command::List => Ok(Self::List { run_dir: RunDir::new(args.run_dir.clone())?, output }),
            Command::Status(args) => {
                place(&args.name).map(|(name, run_dir)| Self::Status { name, run_dir, output })
            }
            Command::Stats(args) => {
                place(&args.name).map(|(name, run_dir)| Self::Stats { name, run_dir, output })
            }
            Command::Detach(args) => {
                let (name, run_dir) = place(&args.name)?;
                let within_ms = within_ms(args.within)?;
                Ok(Self::Detach { name, run_dir, within_ms, force: args.force, output })
            }
            Command::Path(args) => {
                PathPlan::new(&args.command, RunDir::new(args_dir())?, output).map(Self::Path)
            }
            Command::Policy(args) => place(&args.name).map(|(name, run_dir)| Self::Policy {
                name,
                policy: args.policy,
                run_dir,
                output,
            }),
            Command::Ping(args) => PingPlan::new(args, output).map(Box::new).map(Self::Ping),
            Command::Doctor(args) => DoctorPlan::new(args, output).map(Self::Doctor),
            Command::OpenDevice(args) => {
                Ok(Self::OpenDevice { path: args.path.clone(), exclusive: args.exclusive })
            }
        }
    }

    /// Looks at the system. Changes nothing; may wait for the system's resolver.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] without a path, [`ErrorKind::Path`] for a host without an address,
    /// [`ErrorKind::InUse`] for a socket path or a run directory.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            Self::Attach(attach) => attach.check(),
            Self::Bench(bench) => bench.session.check(),
            Self::List { run_dir, .. }
            | Self::Status { run_dir, .. }
            | Self::Stats { run_dir, .. }
            | Self::Detach { run_dir, .. }
            | Self::Policy { run_dir, .. } => Ok(run_dir.check()?),
            Self::Path(path) => Ok(path.run_dir.check()?),
            Self::Ping(_) | Self::Doctor(_) | Self::OpenDevice { .. } => Ok(()),
        }
    }

    /// The settings that make this plan again, or `None` for a command without settings.
    #[must_use]
    pub fn settings(&self) -> Option<Settings> {
        match self {
            Self::Attach(attach) => Some(attach.settings()),
            Self::Bench(bench) => Some(bench.settings()),
            _ => None,
        }
    }
}

pub(crate) fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
}

/// A time that running requests get.
pub(crate) fn within_ms(within: Millis) -> Result<u64, Error> {
    if within.get() > WITHIN_MS_MAX {
        let most = Millis::new(WITHIN_MS_MAX);
        return Err(usage(format!("within {within} is out of range; use 0ms to {most}")));
    }
    Ok(within.get())
}

/// A setting that has neither a value nor a default; [`Settings::defaults`] leaves no such.
pub(crate) fn unsaid() -> Error {
    usage("a setting has neither a value nor a default")
}

/// `value` as the narrower type, if it is in `range`. The ranges here all fit their types.
pub(crate) fn in_range<T: TryFrom<u64>>(
    key: &str,
    value: u64,
    range: RangeInclusive<u64>,
) -> Result<T, Error> {
    let (low, high) = (*range.start(), *range.end());
    T::try_from(value)
        .ok()
        .filter(|_| range.contains(&value))
        .ok_or_else(|| usage(format!("{key} {value} is out of range; use {low} to {high}")))
}

#[cfg(test)]
mod tests;
