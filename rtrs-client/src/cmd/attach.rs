//! `attach`: starts the daemon of the session in the background and waits until the device is
//! ready; with `--foreground` this process is the daemon.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use clap::Args;
use rtrs_core::local::open_log;
use rtrs_core::settings::Flags;
use rtrs_core::time::Duration;

use super::global::GlobalArgs;
use super::source::SourceArgs;
use crate::control_protocol::Attached;
use crate::daemon::attach::{self as daemon, DAEMON_LOG, FAILED, READY};
use crate::error::{Error, ErrorKind, system};
use crate::plan::AttachPlan;
use crate::settings::{AttachSettings, SessionSettings, Settings};

/// How long a session that ends may hold its log.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// The arguments.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Name of the export at the server; also names the session on this host.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// The settings of the session.
    #[command(flatten)]
    pub session: Flags<SessionSettings>,

    /// Where it is served, and how.
    #[command(flatten)]
    pub attach: Flags<AttachSettings>,

    /// Accept another server or export than before: the volume was moved on purpose
    ///
    /// Ignores --identity, the identity in the configuration file, and the identity that a dead
    /// process left for a takeover. The session is bound to the first export that it opens. There
    /// is no such key in the file, so that nobody sets it permanently.
    #[arg(long)]
    pub accept_new_identity: bool,

    /// Where settings come from.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl AttachArgs {
    /// The flags laid over the configuration file. `socket`, `listen` and `device` replace another.
    ///
    /// # Errors
    /// Those of the file, and of flags with old names.
    pub fn settings(&self, global: &GlobalArgs) -> Result<Settings, Error> {
        let mut settings = self.source.settings(&self.session, global)?;
        let attach = &mut settings.attach;
        if self.attach.any(&["socket", "listen", "device"]) {
            (attach.socket, attach.listen, attach.device) = (None, None, None);
        }
        self.attach.apply(attach)?;
        Ok(settings)
    }

    pub(super) fn plan(&self, global: &GlobalArgs) -> Result<AttachPlan, Error> {
        let plan = AttachPlan::new(&self.name, self.settings(global)?, global.output)?;
        Ok(AttachPlan { accept_new_identity: self.accept_new_identity, ..plan })
    }
}

pub(super) fn run(args: &AttachArgs, global: &GlobalArgs) -> Result<(), Error> {
    let plan = args.plan(global)?;
    if !args.source.check_and_print(global, || plan.check(), || plan.printed())? {
        return Ok(());
    }
    if plan.settings.foreground { daemon::run(&plan) } else { start_daemon(&plan) }
}

/// Starts the daemon and waits for its line.
fn start_daemon(plan: &AttachPlan) -> Result<(), Error> {
    plan.run_dir.make()?;
    let name = &plan.session.export_name;
    let log = plan.run_dir.control_socket(name).with_extension("log");
    let exe = std::env::current_exe().map_err(system("cannot find this program"))?;
    let errors = own_log(plan, &log)?;
    let mut child = Command::new(exe)
        .args(std::env::args_os().skip(1))
        .arg("--foreground")
        .env(DAEMON_LOG, &log)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .map_err(system("cannot start the session's process"))?;
    let Some(out) = child.stdout.take() else {
        return Err(Error::new(ErrorKind::System, "no pipe to the session's process"));
    };
    // The daemon limits the time of its start; its line or its end comes.
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line).map_err(system("cannot hear the session"))?;
    if let Some(attached) = line.strip_prefix(READY).map(serde_json::from_str::<Attached>) {
        let attached = attached.map_err(|error| {
            let what = "the session's process is running, but its reply is not understood";
            Error::with_source(ErrorKind::System, what, error)
        })?;
        let text = |attached: &Attached| {
            let at = attached.device.as_deref().or(attached.uri.as_deref());
            format!("{name} attached: {}\n", at.unwrap_or("-"))
        };
        return plan.output.print(&attached, text).map_err(|error: Error| {
            let text = format!("{name} is attached, but this cannot be printed; detach to undo it");
            Error::with_source(error.kind(), text, error)
        });
    }
    let status = child.wait().map_err(system("cannot wait for the session's process"))?;
    let why = line.trim_end().strip_prefix(FAILED).map(str::to_owned);
    let why = why.or_else(|| last_error(&log));
    let last = why.unwrap_or_else(|| format!("the session's process ended with {status}"));
    let kind = if status.code() == Some(2) { ErrorKind::Usage } else { ErrorKind::Path };
    Err(Error::new(kind, last))
}

/// The session's log, emptied and locked. The lock is the session's as long as its process has
/// the log open, so of two attaches at once one is refused, and neither empties the other's log.
fn own_log(attach: &AttachPlan, path: &Path) -> Result<File, Error> {
    let failed = || system(format!("cannot write the log {}", path.display()));
    let log = open_log(path).map_err(|e| failed()(e))?;
    let deadline = Instant::now() + LOG_TIMEOUT;
    loop {
        match log.try_lock() {
            Ok(()) => {
                log.set_len(0).map_err(failed())?;
                return Ok(log);
            }
            Err(TryLockError::Error(error)) => return Err(failed()(error)),
            // A session that is gone for others may still be about to end its process.
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                attach.check()?;
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(TryLockError::WouldBlock) => {
                let name = &attach.session.export_name;
                let text = format!("{name:?} is being attached or detached by another process");
                return Err(Error::new(ErrorKind::InUse, text));
            }
        }
    }
}

/// The last line that the daemon wrote as its error.
fn last_error(log: &Path) -> Option<String> {
    let text = fs::read_to_string(log).ok()?;
    let line = text.lines().rev().find_map(|line| line.strip_prefix("rtrs-client: "))?;
    Some(line.to_owned())
}
