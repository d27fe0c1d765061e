//! What will run: a command and its settings, judged, with every default filled in.
//!
//! Owns [`Plan`]. [`Plan::new`] judges what the settings mean together; apart
//! from user, host name and environment it does not look at the system. [`Plan::check`] then looks
//! at what the plan needs (addresses, socket paths) before anything is connected or started. Every
//! error says which setting, which value and what would do.
//!
//! Called by the binary; read by the rest of the client.

mod attach;
mod bench;
mod link;
mod online;
mod session;

pub use attach::{AttachPlan, Front};
pub use bench::BenchPlan;
pub use link::{DoctorPlan, PingPlan};
pub(crate) use online::path_name;
use online::path_step;
pub use online::{Leave, ManagePlan, PathStep, Step};
pub use session::SessionPlan;

pub use rtrs_core::local::RunDir;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::cli::{Command, LowArgs, Output};
use crate::error::{Error, ErrorKind};
use crate::settings::Settings;

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
    /// Look at what is attached, change it or end it.
    Manage(ManagePlan),
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
        let args_dir = || args.run_dir.clone();
        let placed = |mut settings: Settings| {
            settings.place.run_dir = args_dir().or(settings.place.run_dir);
            settings
        };
        let manage = |name: &str, step| {
            session::check_name("export name", name)?;
            let run_dir = RunDir::new(args_dir())?;
            Ok(Self::Manage(ManagePlan { name: name.to_owned(), step, run_dir, output }))
        };
        match &args.command {
            Command::Attach(attach) => {
                let settings = placed(attach.settings()?);
                let accept_new_identity = attach.accept_new_identity;
                let plan = AttachPlan::new(&attach.name, settings, output)?;
                Ok(Self::Attach(Box::new(AttachPlan { accept_new_identity, ..plan })))
            }
            Command::Bench(bench) => {
                let settings = placed(bench.settings()?);
                BenchPlan::new(&bench.name, settings, output).map(Box::new).map(Self::Bench)
            }
            Command::List => Ok(Self::List { run_dir: RunDir::new(args.run_dir.clone())?, output }),
            Command::Status(args) => manage(&args.name, Step::Status),
            Command::Stats(args) => manage(&args.name, Step::Stats),
            Command::Detach(args) => {
                let within_ms = args.within.millis();
                manage(&args.name, Step::Detach { within_ms, force: args.force })
            }
            Command::Path(args) => {
                let (name, step) = path_step(&args.command)?;
                manage(name, Step::Path(step))
            }
            Command::Policy(args) => manage(&args.name, Step::Policy(args.policy)),
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
            Self::List { run_dir, .. } | Self::Manage(ManagePlan { run_dir, .. }) => {
                Ok(run_dir.check()?)
            }
            Self::Ping(_) | Self::Doctor(_) | Self::OpenDevice { .. } => Ok(()),
        }
    }

    /// The settings that make this plan again, or `None` for a command without settings.
    #[must_use]
    pub fn settings(&self) -> Option<Settings> {
        match self {
            Self::Attach(attach) => Some(attach.printed()),
            Self::Bench(bench) => Some(bench.printed()),
            _ => None,
        }
    }
}

pub(crate) fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
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
