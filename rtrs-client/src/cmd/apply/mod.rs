//! `apply` and `diff`: change this host's sessions to match a file, or show the changes needed.

mod act;
mod begin;
mod group;
mod lock;
mod prune;
mod renew;
mod start;
mod state;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use rtrs_core::settings::{config_text, printable, without_bom};
use serde::Serialize;

use self::act::{Allowed, Turn, act, dead};
use self::group::{Group, Item};
use self::lock::Lock;
use self::prune::Purpose;
use self::renew::{Renewal, renew};
pub(super) use self::state::running;
use self::state::state_of;
use super::at_once::at_once;
use super::global::GlobalArgs;
use super::session::{Session, Within};
use super::sessions::{self, Answer};
use crate::control_protocol::SessionState;
use crate::error::{Error, ErrorKind, system};
use crate::plan::AttachPlan;
use crate::volumes::difference::{Action, Difference, Task, Wanted, task};
use crate::volumes::{Volume, line_of_session, read};

/// Number of sessions handled at the same time: enough for a fast boot, without flooding a server.
const AT_ONCE: usize = 16;
/// Maximum size of a file read from stdin, in bytes.
const STDIN_BYTES_MAX: u64 = 1 << 20;

/// The file, and the sessions that it is compared with.
#[derive(Debug, Args)]
pub struct FileArgs {
    /// Read sessions and volumes from this YAML file, or from stdin if FILE is -
    ///
    /// configs/volumes.yaml in the source tree is an example.
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,

    /// Also detach sessions that the file does not list
    ///
    /// Affects only sessions of this run directory. A session is not detached while its device is
    /// mounted or open, or while NBD clients are connected.
    #[arg(long)]
    pub prune: bool,
}

/// The arguments of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// Options for the file.
    #[command(flatten)]
    pub file: FileArgs,
}

/// The arguments of `apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// Options for the file.
    #[command(flatten)]
    pub file: FileArgs,

    /// Print what would be done and change nothing
    ///
    /// Similar to diff, but the exit code is 1 only if a session cannot be changed to match the
    /// file.
    #[arg(long)]
    pub dry_run: bool,

    /// Reattach sessions whose settings cannot change while the session is running
    ///
    /// This interrupts the IO of these sessions. A session is not detached while its device is
    /// mounted or open, or while NBD clients are connected. Without this option, sessions that need
    /// a reattach are only reported.
    #[arg(long)]
    pub reattach: bool,

    /// With --reattach or --prune, detach sessions even if in use; unwritten data is lost
    ///
    /// Like detach --force: IO in flight fails, and NBD connections are closed.
    #[arg(long)]
    pub force: bool,

    /// Wait at most TIME (unit required, e.g. 5s) for IO in flight when detaching [default: 5s]
    ///
    /// At most 10m; 0 means no wait. Also applies to paths that are removed.
    #[arg(long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub within: Within,

    /// Try again for TIME (unit required, e.g. 1m) if an export cannot be opened [default: 0s]
    ///
    /// Like attach --retry-for, for each session that is attached. At most 10m.
    #[arg(long, value_name = "TIME", default_value = "0s", hide_default_value = true)]
    pub retry_for: Within,

    /// Exit with 3 if sessions were changed, and with 0 only if there was nothing to change
    ///
    /// Useful for configuration management. With --dry-run, 3 means that sessions would be changed.
    #[arg(long)]
    pub detailed_exitcode: bool,
}

/// Output of the command.
#[derive(Debug, Serialize)]
struct Report {
    sessions: Vec<Row>,
    /// Whether a session was changed, or would be. None for `diff`.
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<bool>,
}

/// Output for a session.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    name: String,
    /// Action for the session.
    action: Action,
    /// Result of the action; None if nothing was tried.
    result: Option<&'static str>,
    differences: Vec<Difference>,
    /// Reason for the action, or a further explanation.
    reason: Option<String>,
    error: Option<String>,
}

impl Row {
    /// Whether the session was changed, even if it still needs a reattach.
    fn has_changed(&self) -> bool {
        let is_left = self.action == Action::NeedsReattach && self.error.is_none();
        self.result.is_some() || is_left && self.differences.iter().any(|one| one.online)
    }

    /// Whether the action would change the session.
    fn would_change(&self, reattach: bool) -> bool {
        let is_online = || self.differences.iter().any(|one| one.online);
        self.error.is_none()
            && match self.action {
                Action::Attach | Action::Change | Action::Detach => true,
                Action::NeedsReattach => reattach || is_online(),
                Action::Unchanged | Action::ServesNoIo | Action::NotListed | Action::Unclear => {
                    false
                }
            }
    }
}

/// Result of the action for a session.
#[derive(Default)]
struct Outcome {
    result: Option<&'static str>,
    error: Option<Error>,
    /// Re-evaluated action, if handling earlier volumes may have changed the action.
    now: Option<Task>,
}

impl Item {
    /// Output for the session, with the result of the action.
    fn row(self, outcome: Outcome) -> Row {
        let Outcome { result, error, now } = outcome;
        let Task { action, differences, reason } = now.unwrap_or(self.task);
        let error = self.error.or(error).map(|error| error.chain().to_string());
        // The error already contains the reason.
        let reason = reason.filter(|_| action != Action::Unclear || error.is_none());
        Row { name: self.name, action, result, differences, reason, error }
    }
}

pub(super) fn diff(args: &DiffArgs, global: &GlobalArgs) -> Result<(), Error> {
    let failed = |error: Error| Error::new(ErrorKind::NotCompared, error.chain().to_string());
    let rows = plain(compare(&args.file, Purpose::Compare, global).map_err(failed)?);
    global.output.print(&rows, text).map_err(failed)?;
    let all = rows.sessions.len();
    let is_unclear = |row: &&Row| row.action == Action::Unclear || row.error.is_some();
    let unclear = rows.sessions.iter().filter(is_unclear).count();
    if unclear > 0 {
        let text = format!("cannot compare {unclear} of {all} sessions: see above");
        return Err(Error::new(ErrorKind::NotCompared, text));
    }
    let differs = |row: &&Row| !matches!(row.action, Action::Unchanged | Action::NotListed);
    match rows.sessions.iter().filter(differs).count() {
        0 => Ok(()),
        count => {
            let text = format!("{count} of {all} sessions differ from the file or serve no IO");
            Err(Error::new(ErrorKind::Differs, text))
        }
    }
}

pub(super) fn apply(args: &ApplyArgs, global: &GlobalArgs) -> Result<(), Error> {
    if args.dry_run {
        let mut rows = plain(compare(&args.file, Purpose::Show { force: args.force }, global)?);
        rows.changed = Some(rows.sessions.iter().any(|row| row.would_change(args.reattach)));
        global.output.print(&rows, text)?;
        return verdict(&rows, args.detailed_exitcode);
    }
    let run_dir = global.run_dir()?;
    run_dir.make()?;
    let _lock = Lock::take(&run_dir)?;
    let items = compare(&args.file, Purpose::Act, global)?;
    let (within_ms, retry_for) = (args.within.millis(), args.retry_for);
    let may = Allowed { reattach: args.reattach, force: args.force, within_ms, retry_for };
    // Volumes of one session are started together, and otherwise handled one after another.
    let is_later = |item: &Item| item.wanted.as_ref().is_some_and(|one| one.first.is_some());
    let groups: Vec<&[Item]> = items.chunk_by(|_, next| is_later(next)).collect();
    let apply = |groups: &[&[Item]]| {
        at_once(groups, AT_ONCE, |items| {
            let retry_until = Instant::now() + Duration::from_millis(retry_for.millis());
            Group { items, may, retry_until, global }.apply()
        })
    };
    // Sessions that the file does not list come last. They are detached first, because others may
    // need their devices, sockets or exports.
    let (listed, others) = groups.split_at(groups.partition_point(|group| is_listed(group)));
    let of_others = apply(others);
    let results: Vec<Outcome> = apply(listed).into_iter().chain(of_others).flatten().collect();
    let rows = items.into_iter().zip(results).map(|(item, outcome)| item.row(outcome));
    let sessions: Vec<Row> = rows.collect();
    let changed = Some(sessions.iter().any(Row::has_changed));
    let rows = Report { sessions, changed };
    global.output.print(&rows, text)?;
    verdict(&rows, args.detailed_exitcode)
}

/// Whether the file lists the volumes of a group.
fn is_listed(group: &[Item]) -> bool {
    group.iter().all(|item| item.wanted.is_some())
}

impl Group<'_> {
    /// Performs the actions for the volumes, in their order.
    fn apply(&self) -> Vec<Outcome> {
        let mut renewal = renew(self);
        let mut started = self.start(&renewal);
        let outcome = |item: &Item| {
            if item.error.is_some() {
                return Outcome::default();
            }
            if let Some(result) = started.remove(&item.name) {
                let is_new = item.task.action == Action::Attach;
                let done = if is_new { "attached" } else { "reattached" };
                let result = result.map(|()| done);
                return Outcome {
                    result: result.as_ref().ok().copied(),
                    error: result.err(),
                    now: None,
                };
            }
            let outcome = self.apply_one(item, &renewal);
            outcome.unwrap_or_else(|error| Outcome { error: Some(error), ..Outcome::default() })
        };
        let mut outcomes: Vec<Outcome> = self.items.iter().map(outcome).collect();
        if let Renewal::Ended { cut_off } | Renewal::Refused { cut_off, .. } = &mut renewal {
            for (item, outcome) in self.items.iter().zip(&mut outcomes) {
                outcome.error = outcome.error.take().or_else(|| cut_off.remove(&item.name));
            }
        }
        outcomes
    }

    /// Performs the action for a volume.
    fn apply_one(&self, item: &Item, renewal: &Renewal) -> Result<Outcome, Error> {
        let session = Session::new(&item.name, self.global)?;
        let mates = self.items.iter().filter(|other| other.name != item.name);
        let mates: Vec<Session> = mates.map(|other| session.sibling(&other.name)).collect();
        let (wanted, original) = (item.wanted.as_ref(), item.task.action);
        // Compare again: handling earlier volumes may have changed the session's settings, a
        // takeover attaches all volumes of a session, and a renewal detaches them.
        let is_renewed = !matches!(renewal, Renewal::NotNeeded);
        let does = is_renewed
            || matches!(original, Action::Attach | Action::Change | Action::NeedsReattach);
        let may_differ = |wanted: &Wanted| does && (wanted.first.is_some() || is_renewed);
        let now = wanted.filter(|wanted| may_differ(wanted));
        let now =
            now.map(|wanted| task(wanted, &state_of(&item.name, &session.run_dir, self.global)));
        if now.as_ref().is_some_and(|now| now.action == Action::Unchanged) {
            let result = match original {
                Action::Attach => Some("attached"),
                Action::Change | Action::NeedsReattach => Some("changed"),
                _ => None,
            };
            return Ok(Outcome { result, ..Outcome::default() });
        }
        let task = now.as_ref().unwrap_or(&item.task);
        if let (Renewal::Refused { why, .. }, Action::NeedsReattach) = (renewal, task.action) {
            return Err(Error::new(ErrorKind::InUse, format!("cannot reattach it: {why}")));
        }
        let retry_until = self.retry_until;
        let turn = Turn { session: &session, wanted, task, mates: &mates, retry_until };
        let acted = act(&turn, self.may);
        if matches!(renewal, Renewal::Ended { .. }) && original != Action::Attach {
            // The output keeps the differences found before the renewal.
            return acted.map(|_| Outcome { result: Some("reattached"), ..Outcome::default() });
        }
        match acted {
            Ok(result) => Ok(Outcome { result, error: None, now }),
            Err(error) => Ok(Outcome { result: None, error: Some(error), now }),
        }
    }
}

/// Returns a report without performing any action.
fn plain(items: Vec<Item>) -> Report {
    let sessions = items.into_iter().map(|item| item.row(Outcome::default())).collect();
    Report { sessions, changed: None }
}

/// Returns an error if sessions failed or differ from the file, and, if requested, the exit code
/// for changed sessions.
fn verdict(report: &Report, detailed: bool) -> Result<(), Error> {
    let failed = |row: &&Row| row.error.is_some();
    let left = |row: &&Row| row.action == Action::NeedsReattach && row.result.is_none();
    let no_io = |row: &&Row| row.action == Action::ServesNoIo;
    let count = |which: &dyn Fn(&&Row) -> bool| report.sessions.iter().filter(which).count();
    let (failed, left, all) = (count(&failed), count(&left), report.sessions.len());
    match (failed, left, count(&no_io)) {
        (0, 0, 0) if detailed && report.changed == Some(true) => {
            Err(Error::exit(ErrorKind::Changed))
        }
        (0, 0, 0) => Ok(()),
        (0, 0, no_io) => {
            let text = format!("{no_io} of {all} sessions serve no IO: see above");
            Err(Error::new(ErrorKind::System, text))
        }
        (0, left, _) => {
            let text = format!(
                "{left} of {all} sessions must be attached again to match the file; use \
                 --reattach, which interrupts their IO"
            );
            Err(Error::new(ErrorKind::Differs, text))
        }
        (failed, ..) => {
            let text = format!("cannot apply {failed} of {all} sessions: see above");
            Err(Error::new(ErrorKind::System, text))
        }
    }
}

fn file_text(path: &Path) -> Result<(String, String), Error> {
    if path != Path::new("-") {
        return Ok((config_text(path)?, path.display().to_string()));
    }
    let mut text = String::new();
    let read = io::stdin().take(STDIN_BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(system("cannot read stdin"))?;
    if text.len() as u64 > STDIN_BYTES_MAX {
        return Err(Error::new(ErrorKind::Config, "stdin: larger than 1 MiB"));
    }
    Ok((without_bom(text), "stdin".to_owned()))
}

/// Plans for the volumes in the file. Plans of the same session are adjacent.
fn plans(path: &Path, global: &GlobalArgs) -> Result<Vec<Wanted>, Error> {
    let (text, file) = file_text(path)?;
    let run_dir = global.run_dir()?;
    let mut wanted: Vec<Wanted> = Vec::new();
    for (at, mut volume) in read(&text, &file)?.into_iter().enumerate() {
        volume.settings.place.run_dir = Some(run_dir.path().to_path_buf());
        let wrong = |error: &Error| {
            let (line, name) = (line_of_session(&text, at), &volume.name);
            let text = format!("{file}:{line}: session {name:?}: {}", error.chain());
            Error::new(ErrorKind::Config, text)
        };
        for one in plans_of(&volume, global).map_err(|error| wrong(&error))? {
            check_front(&one, &wanted).map_err(|error| wrong(&error))?;
            wanted.push(one);
        }
    }
    Ok(wanted)
}

/// Plans for the volumes of a session.
fn plans_of(volume: &Volume, global: &GlobalArgs) -> Result<Vec<Wanted>, Error> {
    let configured = volume.settings.clone();
    let plan = AttachPlan::new(&volume.name, configured.clone(), global.output)?;
    if plan.session.settings.path.is_empty() {
        return Err(Error::new(ErrorKind::Config, "it has no path; add path: tcp://HOST"));
    }
    let mut all = vec![Wanted { configured, plan, first: None }];
    for (name, own) in &volume.more {
        let plan = all[0].plan.adding(name, own).map_err(|error| {
            let text = format!("volume {name:?}: {}", error.chain());
            Error::new(ErrorKind::Config, text)
        })?;
        let configured = all[0].configured.clone();
        all.push(Wanted { configured, plan, first: Some(volume.name.clone()) });
    }
    Ok(all)
}

/// Rejects a socket, address or device that another volume in the file uses.
fn check_front(one: &Wanted, others: &[Wanted]) -> Result<(), Error> {
    let set = &one.plan.settings;
    let this = &one.plan.session.name;
    for other in others {
        let has = &other.plan.settings;
        let device = set.device.filter(|device| device.to_string() != "auto");
        let listen = set.listen.filter(|address| address.get().port() != 0);
        let front = match () {
            () if set.socket.is_some() && set.socket == has.socket => "socket",
            () if set.vhost_user.is_some() && set.vhost_user == has.vhost_user => "socket",
            () if listen.is_some() && listen == has.listen => "listen address",
            () if device.is_some() && device == has.device => "device",
            () => continue,
        };
        let name = &other.plan.session.name;
        let text = match &one.first {
            None => format!("it has the same {front} as session {name:?}"),
            Some(_) => format!("volume {this:?} has the same {front} as {name:?}"),
        };
        return Err(Error::new(ErrorKind::Config, text));
    }
    Ok(())
}

/// Determines the actions. Changes nothing, and checks everything that can be checked in advance.
fn compare(args: &FileArgs, purpose: Purpose, global: &GlobalArgs) -> Result<Vec<Item>, Error> {
    let wanted = plans(&args.file, global)?;
    if args.prune && wanted.is_empty() {
        let text =
            "the file lists no session, and --prune would detach all; use `detach --all` for that";
        return Err(Error::new(ErrorKind::Config, text));
    }
    let run_dir = global.run_dir()?;
    run_dir.check()?;
    let found = sessions::find_with_left(&run_dir, global.output)?;
    let name_of = |wanted: &Wanted| wanted.plan.session.name.clone();
    let listed: Vec<String> = wanted.iter().map(name_of).collect();
    // A dead session's name may be truncated, like the name of its socket.
    let is_listed = |answer: &Answer| {
        let socket = run_dir.control_socket(answer.name());
        listed.iter().any(|name| name == answer.name() || run_dir.control_socket(name) == socket)
    };
    let others = found.iter().filter(|found| !is_listed(&found.answer));
    let others: Vec<Item> = others.map(|found| unlisted(&found.answer, args.prune)).collect();
    let tasks = at_once(&wanted, AT_ONCE, |wanted| {
        let task = task(wanted, &state_of(&name_of(wanted), &run_dir, global));
        let attaches = task.action == Action::Attach;
        (task, if attaches { wanted.plan.check_start().err() } else { None })
    });
    let items = wanted.into_iter().zip(tasks).map(|(wanted, (task, error))| Item {
        name: name_of(&wanted),
        wanted: Some(wanted),
        task,
        error,
    });
    let mut items: Vec<Item> = items.collect();
    items.extend(others);
    if matches!(purpose, Purpose::Compare | Purpose::Show { force: false }) {
        prune::foresee_refusals(&mut items, global);
    }
    if purpose == Purpose::Compare {
        // A session in use that cannot be detached counts as a difference here, not an error.
        prune::explain_refusals(&mut items);
    }
    prune::expect_free_places(&mut items, &run_dir, global);
    Ok(items)
}

/// Returns the item of a session that the file does not list.
fn unlisted(answer: &Answer, prune: bool) -> Item {
    let task = match prune {
        true => Task::of(Action::Detach, None),
        false => Task::of(Action::NotListed, Some("use --prune to detach it")),
    };
    let is_dead = answer.state() == SessionState::Dead;
    let error = (prune && is_dead).then(dead);
    Item { name: answer.name().to_owned(), wanted: None, task, error }
}

/// Formats one line per session.
fn text(report: &Report) -> String {
    let mut out = format!("{:<24} {:<15} {}\n", "NAME", "RESULT", "DETAIL");
    for row in &report.sessions {
        let action = row.action.to_string();
        let result = match &row.error {
            Some(_) => "failed",
            None => row.result.unwrap_or(&action),
        };
        let differences = row.differences.iter().map(difference_text);
        let parts: Vec<String> =
            row.error.iter().chain(&row.reason).cloned().chain(differences).collect();
        let detail = if parts.is_empty() { "-".to_owned() } else { parts.join("; ") };
        out += &format!("{:<24} {result:<15} {}\n", printable(&row.name), printable(&detail));
    }
    out
}

fn difference_text(one: &Difference) -> String {
    let value = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => "unset".to_owned(),
        other => other.to_string(),
    };
    let (is, wanted) = (&one.running, &one.wanted);
    match one.setting.as_str() {
        "path" if is.is_null() => format!("add path {}", value(wanted)),
        "path" => format!("remove path {}", value(is)),
        name => format!("{name}: {} -> {}", value(is), value(wanted)),
    }
}
