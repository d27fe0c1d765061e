//! Attach daemon: the process of an attached session, from acquiring sockets to shutdown.
//!
//! The daemon acquires the host's resources for each volume, starts the threads, waits until the
//! volumes are attached (`attached.rs`), and reports to the command. It runs on the process's main
//! thread.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime};

use rtrs_core::local::{PassedSocket, ServiceManager};
use rtrs_core::logging::log_to_stderr;
use rtrs_core::rt::{become_daemon, end_with_starter};
use rtrs_core::settings::{Output, announce as announce_lines, write_text};
use serde_json::json;

use super::attached::AttachedSession;
use super::config::session_config;
use super::driver::check_rings;
use super::events::{READY_TIMEOUT, forward_events};
use super::fabrics::FabricRegistry;
use super::launch::{self, VolumeFronts};
use super::metrics::Scraped;
use super::open_files;
use super::report::{self, Identity};
use super::roster::Roster;
use super::saved;
use super::signals::serve_signals;
use super::volume::{Prepared, Volume, prepare};
use crate::control_protocol::NotAttached;
use crate::engine::{DeviceIndex, PathTarget, Reported, SessionConfig};
use crate::error::{Error, ErrorKind, system};
use crate::plan::{AttachPlan, Front};
use crate::session_log::{has_starter_ended, is_in_background};

/// Prefix of the only output line of a background daemon. [`Attached`] follows as JSON or, if there
/// are several volumes, a list of [`Attached`] and [`NotAttached`]. If no volume is attached, that
/// list follows `NONE`; an error follows `FAILED`.
///
/// [`Attached`]: crate::control_protocol::Attached
/// [`NotAttached`]: crate::control_protocol::NotAttached
pub(crate) const READY: &str = "ready ";
pub(crate) const NONE: &str = "none ";
pub(crate) const FAILED: &str = "failed ";
/// Time allowed for starting the devices: connecting, partitions, udev.
const DEVICE_TIME: Duration = Duration::from_secs(60);
/// Time added to the start limits for the service manager.
const START_MARGIN: Duration = Duration::from_secs(60);

/// Maximum start time of a session with the volumes of a plan.
pub(crate) fn start_max(plan: &AttachPlan) -> Duration {
    let has_device = plan.volumes().any(|volume| matches!(volume.front, Front::Device(_)));
    let of_devices = if has_device { DEVICE_TIME } else { Duration::ZERO };
    READY_TIMEOUT + plan.open_patience() + of_devices
}

/// Runs a session until it is detached or a signal ends it. Volumes are served on the sockets that
/// the service manager passed for them.
pub(crate) fn run(plan: &AttachPlan, passed: &[PassedSocket]) -> Result<(), Error> {
    attach(plan, passed).inspect_err(report_failure)
}

/// Acquires everything that a start needs and that the plan does not check, then releases it: open
/// files, the metrics address, the paths' certificates or RDMA devices, and the shards' rings.
///
/// # Errors
/// Returns the same errors as a start.
pub(crate) fn check(plan: &AttachPlan) -> Result<(), Error> {
    open_files::prepare(plan)?;
    let _metrics = plan.settings.metrics.as_ref().map(Scraped::bind).transpose()?;
    FabricRegistry::new(&plan.session)?;
    check_rings(plan.session.shards()).map_err(system("cannot start the shards"))
}

/// Reports the failure to the command that started this process in the background. The failure is
/// also in the log, if its disk has room.
fn report_failure(error: &Error) {
    if is_in_background() {
        let why = error.chain().to_string().replace('\n', " ");
        if let Err(error) = write_text(&format!("{FAILED}{why}\n")) {
            tracing::debug!("cannot report the failure to the attach command: {error}");
        }
    }
}

fn attach(plan: &AttachPlan, passed: &[PassedSocket]) -> Result<(), Error> {
    let settings = &plan.session.settings;
    let _log = log_to_stderr(&settings.log, settings.log_format)
        .map_err(system("cannot start the logging thread"))?;
    open_files::prepare(plan)?;
    let background = is_in_background();
    // A background process is not part of the service of the command that started it.
    let manager = if background { ServiceManager::default() } else { ServiceManager::from_env() };
    manager.starting(start_max(plan) + START_MARGIN);
    plan.run_dir.make()?;
    if background {
        check_starter()?;
    }
    warn_of_unused(plan, passed);
    let scraped = plan.settings.metrics.as_ref().map(Scraped::bind).transpose()?;
    let (prepared, refused) = prepare_all(plan, passed)?;
    if !plan.takes_over() {
        saved::forget_left(&plan.run_dir, &plan.session.session_name);
    }
    let config = config_of(plan, &prepared)?;
    let of_session = identity(plan, &config);
    for warning in plan.session.warnings().into_iter().chain(duplicates(&config.paths)) {
        tracing::warn!("{warning}");
    }
    let registry = Arc::new(FabricRegistry::new(&plan.session)?);
    let (volumes, fronts) = volumes_of(plan.open_patience(), prepared, &of_session);
    let running = launch::start(&plan.session.settings, config, fronts, &registry)?;
    let (wakes, inbox) = mpsc::channel();
    let (shards, roster) = (running.shards(), Arc::new(Roster::default()));
    let _forwarding = serve_signals(wakes.clone(), shards.clone(), Arc::clone(&roster))?;
    if background {
        end_with_starter(true).map_err(system("cannot end with the attach command"))?;
        // If the command had already exited, no signal reports this.
        check_starter()?;
    }
    let _metrics = scraped.map(|scraped| scraped.serve(&roster, &shards)).transpose()?;
    let mut session =
        AttachedSession::new(shards, registry, roster, wakes.clone(), manager.clone());
    session.failures = refused;
    for (volume, plan) in volumes {
        session.add(volume, AttachPlan { more: Vec::new(), ..plan.clone() })?;
    }
    let running = forward_events(running, wakes, session.files.clone());
    session.open(&inbox);
    session.settle_paths(&inbox);
    if session.is_ending() || session.has_failed() {
        let failures = std::mem::take(&mut session.failures);
        let ended = session.wait_end(&inbox, running);
        report_failures(plan, &failures);
        return match failures.into_iter().next() {
            Some((_, error)) => Err(error),
            None => ended,
        };
    }
    // Detach only now: until this point, Ctrl-C in the attach command's terminal, or the end of
    // that command, also ends this process.
    if background {
        end_with_starter(false).map_err(system("cannot outlive the attach command"))?;
        become_daemon().map_err(system("cannot leave the terminal"))?;
    }
    announce(plan, &mut session, &manager, background)?;
    session.wait_end(&inbox, running)
}

/// Returns an error if the command that started this process has exited.
fn check_starter() -> Result<(), Error> {
    if has_starter_ended() {
        return Err(Error::new(ErrorKind::System, "the attach command has ended"));
    }
    Ok(())
}

/// Logs the sockets that the service manager passed but that no volume uses.
fn warn_of_unused(plan: &AttachPlan, passed: &[PassedSocket]) {
    for socket in plan.unused(passed) {
        tracing::warn!(
            socket = socket.name,
            "connections to {socket} of the service manager are not served: no volume of the \
             session has this socket or this listen address"
        );
    }
}

/// Returns warnings about paths that lead to the same address as an earlier one. They are not
/// errors: a volume must be attached at boot even if two names now refer to the same host.
fn duplicates(paths: &[PathTarget]) -> impl Iterator<Item = String> {
    paths.iter().enumerate().filter_map(|(at, path)| {
        let first = paths[..at].iter().find(|first| path.duplicates(first))?;
        Some(format!(
            "path {} leads to the same address as path {}; when one fails, the other does too",
            path.name, first.name
        ))
    })
}

/// Plan of a volume, with its resources.
type Ready<'a> = (&'a AttachPlan, Prepared);

/// Name of a volume, with the reason why it is not attached.
type Failure = (String, Error);

/// Acquires the resources of all volumes. Also returns the failures, unless all fail.
///
/// # Errors
/// Returns the failure of the first volume if no volume has its resources.
fn prepare_all<'a>(
    plan: &'a AttachPlan,
    passed: &[PassedSocket],
) -> Result<(Vec<Ready<'a>>, Vec<Failure>), Error> {
    let (mut prepared, mut refused) = (Vec::new(), Vec::new());
    for volume in plan.volumes() {
        match prepare(volume, passed) {
            Ok(ready) => prepared.push((volume, ready)),
            Err(error) => refused.push((volume.session.name.clone(), error)),
        }
    }
    if prepared.is_empty() && !refused.is_empty() {
        report_failures(plan, &refused);
        return Err(refused.swap_remove(0).1);
    }
    Ok((prepared, refused))
}

/// Reports the failures of several volumes to the command that started this process in the
/// background. For a volume without a failure of its own, the session's failure is reported.
fn report_failures(plan: &AttachPlan, failures: &[Failure]) {
    if plan.more.is_empty() || !is_in_background() {
        return;
    }
    let failed = plan.volumes().map(|volume| {
        let (_, error) = failures.iter().find(|(name, _)| *name == volume.session.name)?;
        Some(not_attached(volume, error))
    });
    let Some(failed) = failed.collect::<Option<Vec<_>>>() else { return };
    if let Err(error) = write_text(&format!("{NONE}{}\n", json!(failed))) {
        tracing::debug!("cannot report the failures to the attach command: {error}");
    }
}

fn not_attached(volume: &AttachPlan, error: &Error) -> NotAttached {
    let (name, export) = (volume.session.name.clone(), volume.session.export_name.clone());
    NotAttached { name, export, error: error.chain().to_string() }
}

/// Returns the configuration of the session with its prepared volumes.
fn config_of(plan: &AttachPlan, prepared: &[Ready<'_>]) -> Result<SessionConfig, Error> {
    let volumes = prepared.iter().map(|(_, volume)| volume.config.clone()).collect();
    Ok(SessionConfig {
        open_patience: plan.open_patience(),
        resent_for: plan.resent_for(),
        slow_io: plan.slow_io(),
        ..session_config(&plan.session, volumes)?
    })
}

/// Creates the volumes with their plans, and the front ends for the shards.
fn volumes_of<'a>(
    open_patience: Duration,
    prepared: Vec<Ready<'a>>,
    of_session: &Identity,
) -> (Vec<(Volume, &'a AttachPlan)>, Vec<VolumeFronts>) {
    let patience = READY_TIMEOUT + open_patience;
    let (mut volumes, mut fronts) = (Vec::new(), Vec::new());
    for (index, (plan, prepared)) in DeviceIndex::all().zip(prepared) {
        let identity = Identity {
            name: plan.session.name.clone(),
            export: plan.session.export_name.clone(),
            index,
            access: plan.session.access,
            uri: prepared.uri.clone(),
            device: Arc::default(),
            ending: Arc::default(),
            saved: prepared.saved.clone(),
            ..of_session.clone()
        };
        let (volume, front) = Volume::new(plan, prepared, identity, patience);
        volumes.push((volume, plan));
        fronts.push(VolumeFronts { name: plan.session.name.clone(), make: front });
    }
    (volumes, fronts)
}

/// Reports the volumes to the command and to the service manager. Stops a background session whose
/// command has exited.
fn announce(
    plan: &AttachPlan,
    session: &mut AttachedSession,
    manager: &ServiceManager,
    background: bool,
) -> Result<(), Error> {
    for (_, error) in &session.failures {
        tracing::error!("{}", error.chain());
    }
    let (answering, count) = (session.shards.clone(), session.shards.count());
    manager
        .watch(move || answering.reports(Reported::None).len() == count)
        .map_err(system("cannot start a thread"))?;
    let (printed, served_at) = print_attached(plan, session, background);
    manager.ready(&served_at);
    if let Err(error) = printed
        && background
    {
        tracing::warn!("the attach command has ended: {error}; the session ends too");
        session.stop(Duration::ZERO);
    }
    Ok(())
}

/// Properties that all volumes of the session share; it is named after the first one.
fn identity(plan: &AttachPlan, config: &SessionConfig) -> Identity {
    Identity {
        name: plan.session.name.clone(),
        export: plan.session.export_name.clone(),
        index: DeviceIndex::FIRST,
        log: plan.session.name.clone(),
        session: config.name.clone(),
        session_id: config.id.to_string(),
        access: plan.session.access,
        no_path: plan.session.settings.no_path,
        failover: plan.session.settings.failover,
        slow_io: plan.slow_io(),
        uri: None,
        device: Arc::default(),
        pid: std::process::id(),
        shards: config.shards,
        ending: Arc::default(),
        saved: None,
        started: SystemTime::now(),
    }
}

/// Reports the attached volumes and, if there are several, also the failed ones to the command or
/// to the starter of a foreground process. Also returns where the volumes are served.
fn print_attached(
    plan: &AttachPlan,
    session: &AttachedSession,
    background: bool,
) -> (io::Result<()>, String) {
    let (mut values, mut texts) = (Vec::new(), Vec::new());
    for volume in plan.volumes() {
        let name = &volume.session.name;
        let failed = session.failures.iter().find(|(of, _)| of == name);
        let served_at = match (failed, session.status(name)) {
            (None, Some(status)) => {
                let served_at = status.served_at().to_owned();
                values.push(json!(report::attached(status)));
                served_at
            }
            (Some((_, error)), _) => {
                values.push(json!(not_attached(volume, error)));
                "-".to_owned()
            }
            (None, None) => continue,
        };
        let several = !plan.more.is_empty();
        texts.push(if several { format!("{name}={served_at}") } else { served_at });
    }
    let value = match values.pop() {
        Some(only) if plan.more.is_empty() => only,
        last => values.into_iter().chain(last).collect(),
    };
    let served_at = texts.join(" ");
    let printed = announce_lines(match (background, plan.output) {
        // Read and printed by the command.
        (true, _) => format!("{READY}{value}\n"),
        (false, Output::Json) => format!("{value:#}\n"),
        (false, Output::Text) => format!("{READY}{served_at}\n"),
    });
    (printed, served_at)
}
