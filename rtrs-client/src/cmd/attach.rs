//! `attach`: starts the session's daemon in the background and waits until the volumes are ready.
//! With `--foreground`, or when started by `start_daemon`, this process is the daemon. With
//! `--session` it asks a running daemon to add a volume.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

use clap::Args;
use rtrs_core::local::{PassedSocket, RunDir, passed_sockets};
use rtrs_core::paths::make_absolute;
use rtrs_core::rt::close_descriptors_on_exec;
use rtrs_core::settings::{Flags, printable};
use serde::{Deserialize, Serialize};

use super::global::GlobalArgs;
use super::notice::Awaited;
use super::session::{Session, Within};
use super::sessions::{Answer, find};
use super::source::{SourceArgs, print_settings};
use super::text::remark;
use crate::control_protocol::{Attached, NotAttached, Request};
use crate::daemon::attach::{self as daemon, FAILED, NONE, READY};
use crate::daemon::saved::{left_of, session_left};
use crate::error::{Error, ErrorKind, system, usage};
use crate::plan::{
    AttachPlan, LaterVolume, OF_ADDED, VolumeName, check_name, non_default, of_session,
};
use crate::session_log::{
    DAEMON_LOG, LogError, STARTER, SessionLog, is_in_background, path_of, remove_failed,
};
use crate::settings::{AttachSettings, SessionSettings, Settings};

/// The arguments.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Names of the exports at the server; without --as, each also names its volume on this host
    ///
    /// Several exports become the volumes of one session, with one process and one set of
    /// connections to the server. The volumes share all settings. Use --device auto, or --socket
    /// with {name} in its path.
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,

    /// Name of the volume on this host, if not that of the export
    ///
    /// All other commands take this name, and device links, sockets and NBD clients use it.
    /// Different names allow exports with the same name at two servers. With several exports,
    /// repeat the flag for each, in the same order.
    #[arg(long = "as", value_name = "NAME")]
    pub local_names: Vec<String>,

    /// Add the volume to this session, which is already attached
    ///
    /// The name of one of its volumes, or the session's name at the server. The paths and most
    /// settings are those of the session; the volume has its own device, socket, listen or
    /// vhost-user, with their settings, and its own access, read-only and identity.
    #[arg(
        long,
        value_name = "SESSION",
        conflicts_with_all = ["config", "check", "print_config", "retry_for"]
    )]
    pub session: Option<String>,

    /// Another volume of the session, with its own settings; passed by apply.
    #[arg(long = "with", value_name = "JSON", hide = true)]
    with: Vec<LaterVolume>,

    /// The settings of the session.
    #[command(flatten)]
    pub of_session: Flags<SessionSettings>,

    /// How the volume is served.
    #[command(flatten)]
    pub attach: Flags<AttachSettings>,

    /// Accept a different server or export: the volume was moved on purpose
    ///
    /// Ignores --identity, the identity in the configuration file, and the identity that a dead
    /// process left for a takeover. The volume is bound to the first export that it opens. The
    /// configuration file has no such key, so it cannot be set permanently.
    #[arg(long)]
    pub accept_new_identity: bool,

    /// Try again for TIME (unit required, e.g. 1m) if the export cannot be opened [default: 0s]
    ///
    /// Applies while no path connects, or the server refuses the export. At most 10m. Intended for
    /// services: at boot the server may start later than this host. With takeover, the minimum is
    /// device-dead-timeout.
    #[arg(long, value_name = "TIME", default_value = "0s", hide_default_value = true)]
    pub retry_for: Within,

    /// Source of the settings.
    #[command(flatten)]
    pub source: SourceArgs,
}

/// Result for a volume.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Outcome {
    Attached(Box<Attached>),
    NotAttached(NotAttached),
}

impl Outcome {
    /// Output line of an attached volume.
    fn text(&self) -> String {
        let Self::Attached(attached) = self else { return String::new() };
        let at = attached.device.as_deref().or(attached.uri.as_deref());
        let mode = if attached.read_only == Some(true) { " (read-only)" } else { "" };
        format!("{} attached: {}{mode}\n", printable(&attached.name), at.unwrap_or("-"))
    }

    /// Warns if a volume is read-only although `rw` was tried first, and about files that its next
    /// process will not find.
    pub(super) fn warn(&self) {
        let Self::Attached(attached) = self else { return };
        let name = &attached.name;
        if attached.read_only_fallback {
            remark(format_args!("warning: {name} is read-only: the server refused rw"));
        }
        for why in &attached.unsaved {
            remark(format_args!("warning: {name}: {why}"));
        }
    }

    /// Warns about paths that do not work. Volumes of a session have the same paths.
    fn warn_of_paths(&self) {
        let Self::Attached(attached) = self else { return };
        for path in attached.paths.iter().flatten().filter(|path| !path.is_connected()) {
            let (name, path) = (&attached.name, path.not_connected());
            remark(format_args!("warning: {name}: {path}"));
        }
    }

    /// Name of the volume on this host.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Attached(attached) => &attached.name,
            Self::NotAttached(failed) => &failed.name,
        }
    }

    /// Reason why the volume is not attached.
    pub(super) fn error(&self) -> Option<&str> {
        match self {
            Self::Attached(_) => None,
            Self::NotAttached(NotAttached { error, .. }) => Some(error),
        }
    }
}

impl AttachArgs {
    /// Returns the flags, which override the configuration file. `socket`, `listen`, `device` and
    /// `vhost-user` replace one another.
    ///
    /// # Errors
    /// Returns errors in the file, and errors for flags with old names.
    pub fn settings(&self, global: &GlobalArgs) -> Result<Settings, Error> {
        let mut settings = self.source.settings(&self.of_session, global)?;
        let attach = &mut settings.attach;
        if self.attach.any(&["socket", "listen", "device", "vhost-user"]) {
            attach.take_place();
        }
        self.attach.apply(attach)?;
        Ok(settings)
    }

    /// Returns the plan for a session to which the service manager passed these sockets.
    pub(super) fn plan(
        &self,
        global: &GlobalArgs,
        passed: &[PassedSocket],
    ) -> Result<AttachPlan, Error> {
        let mut settings = self.settings(global)?;
        settings.attach.activate(passed)?;
        let takes_over = settings.attach.takeover || settings.attach.quick_takeover;
        if takes_over && settings.session.session_name.is_none() {
            // The devices' identifiers contain the session's name.
            let run_dir = RunDir::new(settings.place.run_dir.clone())?;
            settings.session.session_name = session_left(&run_dir, self.locals());
        }
        let mut plan = AttachPlan::of_volumes(&self.volume_names()?, settings, global.output)?;
        for LaterVolume { name, settings } in &self.with {
            let volume = plan.adding(name, settings)?;
            plan.more.push(volume);
        }
        if plan.takes_over() {
            add_left_behind(&mut plan);
        }
        (plan.accept_new_identity, plan.retry_for) =
            (self.accept_new_identity, self.retry_for.get());
        for volume in &mut plan.more {
            volume.accept_new_identity = self.accept_new_identity;
        }
        plan.activate(passed)?;
        Ok(plan)
    }

    /// Names of the volumes on this host.
    fn locals(&self) -> &[String] {
        if self.local_names.is_empty() { &self.names } else { &self.local_names }
    }

    fn volume_names(&self) -> Result<Vec<VolumeName>, Error> {
        VolumeName::all(&self.names, &self.local_names)
    }

    /// Returns the settings specific to a volume that is added to a session.
    fn own(&self) -> Result<BTreeMap<String, String>, Error> {
        let (mut session, mut attach) = (SessionSettings::default(), AttachSettings::default());
        self.of_session.apply(&mut session)?;
        self.attach.apply(&mut attach)?;
        make_absolute([&mut attach.socket, &mut attach.vhost_user, &mut attach.nbd_tls_dir])
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot use a path", e))?;
        let own = non_default(&session, &attach);
        match own.keys().find(|name| !OF_ADDED.contains(&name.as_str())) {
            Some(name) => Err(of_session(name)),
            None => Ok(own),
        }
    }
}

/// Adds the session's other volumes that a dead process left behind, which are taken over too.
fn add_left_behind(plan: &mut AttachPlan) {
    for left in left_of(&plan.run_dir, &plan.session.session_name) {
        if plan.volumes().any(|volume| volume.session.name == left.name) {
            continue;
        }
        match plan.adding(&left.name, &left.settings) {
            Ok(volume) => plan.more.push(volume),
            Err(error) => {
                remark(format_args!("{} is not taken over: {}", left.name, error.chain()))
            }
        }
    }
}

pub(super) fn run(args: &AttachArgs, global: &GlobalArgs) -> Result<(), Error> {
    if let Some(session) = &args.session {
        return add(args, session, global);
    }
    if args.source.print_config && !args.source.check {
        let names = args.volume_names()?;
        let [VolumeName { name, export }] = &names[..] else {
            return Err(usage("--print-config supports only one volume; name one"));
        };
        let mut settings = args.settings(global)?;
        if export.is_some() {
            settings.attach.export = export.clone().filter(|export| export != name);
        }
        // The file need not say where to serve the volume: that may be specified later.
        if settings.attach.is_nowhere() {
            return print_settings(&AttachPlan::printed_nowhere(name, settings)?, global);
        }
    }
    let failed = system("cannot use the sockets of the service manager");
    let passed = passed_sockets().map_err(failed)?;
    let plan = args.plan(global, &passed)?;
    let check = || match args.source.check {
        true => plan.check_start().and_then(|()| daemon::check(&plan)),
        false => plan.check(),
    };
    if !args.source.check_and_print(global, check, || plan.printed())? {
        if args.source.check {
            warn(plan.session.warnings().into_iter().chain(plan.session.unresolved()));
        }
        return Ok(());
    }
    if plan.settings.foreground || is_in_background() {
        return daemon::run(&plan, &passed);
    }
    if let Some(file) = &args.source.config {
        check_readable_again(file)?;
    }
    // The arguments stay the same: the environment marks the process as the daemon.
    let outcomes = start_daemon(&plan, std::env::args_os().skip(1))?;
    if plan.more.is_empty()
        && let [only] = &outcomes[..]
    {
        show(&plan.session.name, only, Outcome::text, global)?;
    } else {
        let text = |all: &Vec<Outcome>| all.iter().map(Outcome::text).collect();
        show("the session", &outcomes, text, global)?;
    }
    all_attached(&outcomes)
}

/// Checks that the session's process can read the configuration file, too. That process does not
/// inherit descriptors, and a pipe can be read only once.
fn check_readable_again(file: &Path) -> Result<(), Error> {
    let of_process = ["/dev/fd", "/dev/stdin", "/proc/self", "/proc/thread-self"];
    let is_own = of_process.iter().any(|place| file.starts_with(place));
    if !is_own && std::fs::metadata(file).is_ok_and(|found| found.is_file()) {
        return Ok(());
    }
    Err(usage(format!(
        "--config {} can be read only by this process, but the session runs in another process; \
         use a regular file, or --foreground",
        file.display()
    )))
}

/// Returns the errors of the volumes that were not attached.
pub(super) fn all_attached(outcomes: &[Outcome]) -> Result<(), Error> {
    let errors: Vec<&str> = outcomes.iter().filter_map(Outcome::error).collect();
    if errors.is_empty() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Path, errors.join("; ")))
}

/// Prints the attached volumes.
fn show<T: Serialize>(
    what: &str,
    value: &T,
    text: impl FnOnce(&T) -> String,
    global: &GlobalArgs,
) -> Result<(), Error> {
    global.output.print(value, text).map_err(|error: Error| {
        let text = format!(
            "{what} is attached, but the result cannot be printed; detach to undo the attach"
        );
        Error::with_source(error.kind(), text, error)
    })
}

/// Asks a session to add a volume.
fn add(args: &AttachArgs, session: &str, global: &GlobalArgs) -> Result<(), Error> {
    let names = args.volume_names()?;
    let [VolumeName { name, export }] = &names[..] else {
        return Err(usage("add one volume at a time with --session; name one"));
    };
    check_name("export name", export.as_ref().unwrap_or(name))?;
    if args.accept_new_identity {
        return Err(usage(
            "--accept-new-identity applies only when a session is attached; an added volume \
             without --identity accepts any export; if a dead process left the volume attached, \
             detach it first",
        ));
    }
    let mut settings = args.own()?;
    settings.extend(export.clone().map(|export| ("export".to_owned(), export)));
    let request = Request::VolumeAdd { name: name.clone(), settings };
    let attached: Attached = named(session, global)?.request(&request)?;
    let outcome = Outcome::Attached(Box::new(attached));
    outcome.warn();
    show(name, &outcome, Outcome::text, global)
}

/// Finds the session that has a volume with this name, or that has this name on the server.
fn named(name: &str, global: &GlobalArgs) -> Result<Session, Error> {
    let session = Session::find(name, global)?;
    let error = match session.status() {
        Err(error) if error.kind() == ErrorKind::NotAttached => error,
        found => return found.map(|_| session),
    };
    let all = find(&[(None, session.run_dir.clone())], session.output)?;
    let found = all.iter().find_map(|found| match &found.answer {
        Answer::Status(status) if status.session == name => Some(&status.name),
        _ => None,
    });
    found.map_or(Err(error), |name| Session::new(name, global))
}

/// Warns the operator; the warnings are also in the daemon's log.
fn warn(warnings: impl IntoIterator<Item = String>) {
    for warning in warnings {
        // Standard error may be closed.
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
}

/// Starts the daemon for a plan with these arguments, and waits for its output line. The daemon
/// inherits only its standard streams, including the locked log and the pipe for the line.
pub(super) fn start_daemon(
    plan: &AttachPlan,
    words: impl IntoIterator<Item = OsString>,
) -> Result<Vec<Outcome>, Error> {
    plan.run_dir.make()?;
    warn(plan.session.warnings());
    let exe = std::env::current_exe().map_err(system("cannot find this program"))?;
    remove_failed(plan.run_dir.path(), SystemTime::now());
    let log = own_log(plan)?;
    let errors = log.for_process().map_err(system("cannot share the log"))?;
    close_descriptors_on_exec().map_err(system("cannot keep descriptors from the session"))?;
    let mut child = Command::new(exe)
        .args(words)
        .env(DAEMON_LOG, log.path())
        .env(STARTER, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors)
        .spawn()
        .map_err(system("cannot start the session's process"))?;
    let Some(out) = child.stdout.take() else {
        return Err(Error::new(ErrorKind::System, "no pipe to the session's process"));
    };
    // The daemon limits its startup time, so either its line or the end of its output arrives.
    let mut line = String::new();
    let what = || format!("{:?} to be attached", plan.session.name);
    let read = Awaited { what, at_most: daemon::start_max(plan) }
        .with_notice(plan.output, || BufReader::new(out).read_line(&mut line));
    read.map_err(system("cannot read the session's reply"))?;
    if let Some(outcomes) = line.strip_prefix(READY).map(outcomes) {
        let outcomes = outcomes.map_err(|error| {
            let what = "the session's process is running, but its reply is malformed";
            Error::with_source(ErrorKind::System, what, error)
        });
        outcomes.iter().flatten().for_each(Outcome::warn);
        let attached = |outcome: &&Outcome| matches!(outcome, Outcome::Attached(_));
        outcomes.iter().flatten().find(attached).iter().for_each(|first| first.warn_of_paths());
        return outcomes;
    }
    let status = child.wait().map_err(system("cannot wait for the session's process"))?;
    if let Some(Ok(failed)) = line.strip_prefix(NONE).map(outcomes) {
        return Ok(failed);
    }
    let why = line.trim_end().strip_prefix(FAILED).map(str::to_owned);
    let why = why.or_else(|| log.last_error());
    let last = why.unwrap_or_else(|| format!("the session's process ended with {status}"));
    let kind = if status.code() == Some(2) { ErrorKind::Usage } else { ErrorKind::Path };
    Err(Error::new(kind, last))
}

/// Parses a daemon's output for its volumes: an object for one volume, otherwise a list.
fn outcomes(json: &str) -> serde_json::Result<Vec<Outcome>> {
    let value: serde_json::Value = serde_json::from_str(json)?;
    if value.is_array() {
        return serde_json::from_value(value);
    }
    serde_json::from_value(value).map(|only| vec![only])
}

/// Opens the session's log for its process.
fn own_log(plan: &AttachPlan) -> Result<SessionLog, Error> {
    let name = &plan.session.name;
    let path = path_of(&plan.run_dir, name);
    let what = format!("cannot write the log {}", path.display());
    SessionLog::open(path, || plan.check()).map_err(|error| match error {
        LogError::Busy => Error::new(
            ErrorKind::InUse,
            match session_with_log(name, plan) {
                Some(other) => format!(
                    "the log of {name} belongs to the session of {other}, which began as {name}; \
                     add {name} to that session with --session {other}, or detach its volumes first"
                ),
                None => format!("{name:?} is being attached or detached by another process"),
            },
        ),
        LogError::Taken(error) => error,
        LogError::System(error) => system(what)(error),
    })
}

/// Volume whose session logs under this name, if there is one.
fn session_with_log(name: &str, plan: &AttachPlan) -> Option<String> {
    let all = find(&[(None, plan.run_dir.clone())], plan.output).ok()?;
    all.into_iter().find_map(|found| match found.answer {
        Answer::Status(status) if status.log == name => Some(status.name),
        _ => None,
    })
}
