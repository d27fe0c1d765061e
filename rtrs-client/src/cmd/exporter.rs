//! `exporter`: serves the metrics of all of a host's sessions at one address.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use clap::Args;
use parking_lot::Mutex;
use rtrs_core::local::{RunDir, ServiceManager, passed_sockets};
use rtrs_core::logging::log_to_stderr;
use rtrs_core::metrics::MetricsServer;
use rtrs_core::rt::Signal;
use rtrs_core::settings::{LogFilter, LogFormat, MetricsAddress, Output};
use rtrs_core::time::Duration;

use super::global::GlobalArgs;
use super::metrics::{Gathered, gather};
use crate::daemon::signals::forward_signals;
use crate::error::{Error, ErrorKind, system, usage};
use crate::metrics::ALL;

/// Time limit for a session that answered the last scrape, or is new.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a session that did not answer the last scrape, so that a hanging session does not
/// delay every scrape by the longer limit.
const SILENT_TIMEOUT: Duration = Duration::from_millis(200);
/// Address used without `--listen` or socket activation.
const DEFAULT_ADDRESS: &str = "127.0.0.1:9824";

/// The arguments.
#[derive(Debug, Args)]
pub struct ExporterArgs {
    /// Address: ADDR:PORT or unix:/PATH [default: 127.0.0.1:9824]
    ///
    /// With port 0, the system chooses a port, which is written to the log. Anyone who can connect
    /// can read the metrics, so use an address on a trusted network. Cannot be used with socket
    /// activation, where ListenStream= in the socket unit sets the address.
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<MetricsAddress>,

    /// Log level: error, warn, info, debug, trace, or a filter by module
    ///
    /// The log goes to stderr.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: LogFilter,

    /// Format of the log: text, json or journald
    ///
    /// json is one object per line. journald is text with the priority at the start of each line,
    /// where systemd reads it, and without the time or level.
    #[arg(long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub log_format: LogFormat,
}

pub(super) fn run(args: &ExporterArgs, global: &GlobalArgs) -> Result<(), Error> {
    if global.output == Output::Json {
        return Err(usage("exporter serves the text format of Prometheus; drop -o json"));
    }
    let _log = log_to_stderr(&args.log, args.log_format)
        .map_err(system("cannot start the logging thread"))?;
    let exporter = Exporter { run_dir: global.run_dir()?, silent: Mutex::default() };
    exporter.run_dir.check()?;
    let servers = servers(args.listen.as_ref())?;
    let (stop, stopped) = mpsc::channel();
    let _forwarding = forward_signals(move |signal| match signal {
        // The receiver is gone if this is the second signal.
        Signal::Stop => drop(stop.send(())),
        Signal::Reload | Signal::Dump => tracing::info!("{signal:?}: nothing to do"),
    })?;
    let exporter = Arc::new(exporter);
    for server in &servers {
        let exporter = Arc::clone(&exporter);
        server.serve(move || exporter.text()).map_err(system("cannot serve metrics"))?;
        tracing::info!(address = %server.at(), "serving metrics");
    }
    let manager = ServiceManager::from_env();
    let addresses: Vec<&str> = servers.iter().map(MetricsServer::at).collect();
    manager.ready(&format!("serving {}", addresses.join(", ")));
    if stopped.recv().is_ok() {
        tracing::info!("stopping");
    }
    manager.stopping();
    Ok(())
}

/// Returns servers on the service manager's sockets, or else one at the address.
fn servers(listen: Option<&MetricsAddress>) -> Result<Vec<MetricsServer>, Error> {
    let failed = system("cannot use the sockets of the service manager");
    let passed = passed_sockets().map_err(failed)?;
    if passed.is_empty() {
        let default = || DEFAULT_ADDRESS.parse().map_err(|error| usage(format!("{error}")));
        let at = listen.cloned().map_or_else(default, Ok)?;
        let server = MetricsServer::bind(&at).map_err(|error| {
            let text = format!("cannot serve metrics at {at}");
            Error::with_source(ErrorKind::InUse, text, error)
        })?;
        return Ok(vec![server]);
    }
    if let Some(listen) = listen {
        return Err(usage(format!(
            "--listen {listen} cannot be used with socket activation; drop it, and set \
             ListenStream={listen} in the socket unit"
        )));
    }
    Ok(passed.into_iter().map(MetricsServer::on_passed).collect())
}

/// Collects the metrics for scrapes.
struct Exporter {
    run_dir: RunDir,
    /// Names of the sessions that did not answer the last scrape.
    silent: Mutex<BTreeSet<String>>,
}

impl Exporter {
    /// Returns the text of a scrape. Scrapes at several addresses are serialized.
    fn text(&self) -> Result<String, String> {
        let mut silent = self.silent.lock();
        let before = silent.clone();
        let timeout = |name: &str| if before.contains(name) { SILENT_TIMEOUT } else { TIMEOUT };
        let found = gather(&self.run_dir, timeout).map_err(|error| error.chain().to_string())?;
        log_changes(&before, &found);
        *silent = found.silent.into_iter().map(|(name, _)| name).collect();
        Ok(found.samples.text(ALL))
    }
}

/// Logs which sessions have stopped responding or started to respond again.
fn log_changes(before: &BTreeSet<String>, found: &Gathered) {
    for (name, error) in found.silent.iter().filter(|(name, _)| !before.contains(name)) {
        tracing::warn!("session {name:?} is not responding: {error}");
    }
    for name in before.iter().filter(|name| found.silent.iter().all(|(other, _)| other != *name)) {
        tracing::info!("session {name:?} is responding again, or has ended");
    }
}
