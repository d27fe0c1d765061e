//! `attach`: starts the daemon of the session in the background and waits until the device is
//! ready; with `--foreground` this process is the daemon.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use clap::Args;
use rtrs_core::settings::Flags;

use super::global::GlobalArgs;
use super::source::{SourceArgs, print_settings};
use crate::control_protocol::Attached;
use crate::daemon::attach::{self as daemon, FAILED, READY};
use crate::error::{Error, ErrorKind, system};
use crate::plan::AttachPlan;
use crate::session_log::{DAEMON_LOG, LogError, SessionLog, path_of, remove_failed};
use crate::settings::{AttachSettings, SessionSettings, Settings};

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
    if args.source.print_config && !args.source.check {
        let settings = args.settings(global)?;
        // Where to attach may be said later, beside the file.
        if settings.attach.is_nowhere() {
            return print_settings(&AttachPlan::printed_nowhere(&args.name, settings)?, global);
        }
    }
    let plan = args.plan(global)?;
    let check = || if args.source.check { plan.check_start() } else { plan.check() };
    if !args.source.check_and_print(global, check, || plan.printed())? {
        if args.source.check {
            warn(&plan);
        }
        return Ok(());
    }
    if plan.settings.foreground {
        return daemon::run(&plan);
    }
    let words = std::env::args_os().skip(1).chain(["--foreground".into()]);
    let attached = start_daemon(&plan, words)?;
    let name = &plan.session.export_name;
    let text = |attached: &Attached| {
        let at = attached.device.as_deref().or(attached.uri.as_deref());
        format!("{name} attached: {}\n", at.unwrap_or("-"))
    };
    plan.output.print(&attached, text).map_err(|error: Error| {
        let text = format!("{name} is attached, but this cannot be printed; detach to undo it");
        Error::with_source(error.kind(), text, error)
    })
}

/// Warns the operator; the daemon's log has it too.
fn warn(plan: &AttachPlan) {
    for warning in plan.session.warnings() {
        // Nobody may be there to read it.
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
}

/// Starts the daemon of a plan, which these arguments describe, and waits for its line.
pub(super) fn start_daemon(
    plan: &AttachPlan,
    words: impl IntoIterator<Item = OsString>,
) -> Result<Attached, Error> {
    plan.run_dir.make()?;
    warn(plan);
    let exe = std::env::current_exe().map_err(system("cannot find this program"))?;
    remove_failed(plan.run_dir.path(), SystemTime::now());
    let log = own_log(plan)?;
    let errors = log.for_process().map_err(system("cannot share the log"))?;
    let mut child = Command::new(exe)
        .args(words)
        .env(DAEMON_LOG, log.path())
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
        return attached.map_err(|error| {
            let what = "the session's process is running, but its reply is not understood";
            Error::with_source(ErrorKind::System, what, error)
        });
    }
    let status = child.wait().map_err(system("cannot wait for the session's process"))?;
    let why = line.trim_end().strip_prefix(FAILED).map(str::to_owned);
    let why = why.or_else(|| log.last_error());
    let last = why.unwrap_or_else(|| format!("the session's process ended with {status}"));
    let kind = if status.code() == Some(2) { ErrorKind::Usage } else { ErrorKind::Path };
    Err(Error::new(kind, last))
}

/// The session's log, for its process.
fn own_log(plan: &AttachPlan) -> Result<SessionLog, Error> {
    let name = &plan.session.export_name;
    let path = path_of(&plan.run_dir, name);
    let what = format!("cannot write the log {}", path.display());
    SessionLog::open(path, || plan.check()).map_err(|error| match error {
        LogError::Busy => {
            let text = format!("{name:?} is being attached or detached by another process");
            Error::new(ErrorKind::InUse, text)
        }
        LogError::Taken(error) => error,
        LogError::System(error) => system(what)(error),
    })
}
