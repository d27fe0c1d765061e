//! `--check`: refuses what startup would refuse, and changes nothing.

use rtrs_core::local::{SocketState, check_socket_path, request, socket_state};
use rtrs_core::metrics::MetricsServer;
use rtrs_core::rt::FilesAs;
use rtrs_core::time::Duration;
use serde::Serialize;

use crate::backend::open_target;
use crate::control_protocol::{ExportList, Request, Status};
use crate::daemon::audit;
use crate::daemon::identity::Sources;
use crate::daemon::metrics;
use crate::daemon::portals::{Portals, passed};
use crate::daemon::privileges::{self, RunAs};
use crate::daemon::serve::session_params;
use crate::daemon::shards::check_rings;
use crate::error::{Error, ErrorKind, failed};
use crate::plan::partial::Partial;
use crate::plan::{Plan, check_export};
use crate::settings::{ExportSpec, Id, Settings};
use crate::state::{check_directory, check_state_dir};
use crate::stats::{ExportSnapshot, ExportState};

/// Maximum time for a running server to report its status.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A running instance of this server: a process with its name or, if it has no name, at its
/// address.
#[derive(Debug, Serialize)]
pub(crate) struct Running {
    /// Name of the server.
    pub(crate) name: String,
    /// Process ID.
    pub(crate) pid: u32,
    /// Addresses and exports of the plan that the running server holds.
    pub(crate) holds: Vec<String>,
    #[serde(skip)]
    portals: Vec<String>,
    /// Address of the server's metrics.
    #[serde(skip)]
    metrics: Option<String>,
    /// Names and targets of the server's exports.
    #[serde(skip)]
    exports: Vec<(String, String)>,
}

impl Running {
    /// Finds the running server with these settings, if any.
    fn find(set: &Settings, portals: &Portals) -> Result<Option<Self>, Error> {
        let run_dir = privileges::run_dir(set)?;
        let named = set.name.as_ref().get().map(|name| run_dir.server_socket(name.get()));
        let sockets = match &named {
            Some(socket) => vec![socket.clone()],
            None => run_dir.server_sockets()?,
        };
        for socket in sockets {
            if socket_state(&socket)? != SocketState::InUse {
                continue;
            }
            let Ok((status, _)) =
                request::<Status>(&socket, &Request::Status { load: false }, REPLY_TIMEOUT)
            else {
                if named.is_some() {
                    let socket = socket.display();
                    let text =
                        format!("a server of this name is running ({socket}) but does not answer");
                    return Err(Error::new(ErrorKind::InUse, text));
                }
                continue;
            };
            if named.is_none() && portals.held_by(&status.portals).next().is_none() {
                continue;
            }
            let list = request::<ExportList>(&socket, &Request::ExportList, REPLY_TIMEOUT);
            let exports = list.map(|(list, _)| list.exports).unwrap_or_default();
            let served = |export: &ExportSnapshot| export.state != ExportState::Failed;
            let exports = exports.into_iter().filter(served);
            let exports = exports.map(|export| (export.name, export.backing)).collect();
            let Status { name, pid, portals, metrics, .. } = status;
            let holds = Vec::new();
            return Ok(Some(Self { name, pid, holds, portals, metrics, exports }));
        }
        Ok(None)
    }

    fn has(&self, spec: &ExportSpec) -> bool {
        let target = spec.target.to_string();
        self.exports.iter().any(|(name, backing)| name == spec.name() && *backing == target)
    }
}

/// Result of a check that has found no error.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) running: Option<Running>,
    /// Warnings that startup would log, in addition to those about the settings.
    pub(crate) warnings: Vec<String>,
}

/// Refuses what [`serve`](crate::serve) would refuse: opens and locks the exports, sets up the
/// rings, tries the addresses and the name, and releases everything. If this server is already
/// running, its resources are not tried.
///
/// # Errors
/// The same as those of [`serve`](crate::serve).
pub(crate) fn check_start(plan: &Plan) -> Result<Checked, Error> {
    let set = &plan.settings;
    let user = RunAs::find(set)?;
    audit::check(set)?;
    session_params(plan, set.shards.count())?;
    let portals = Portals::new(plan, passed()?)?;
    let mut running = Running::find(set, &portals)?;
    // The running server uses locked memory that its successor will have.
    check_rings(if running.is_some() { 1 } else { set.shards.count() })?;
    let mut warnings = check_directories(set, user.as_ref())?;
    let mut holds = Vec::new();
    let sources = Sources::system();
    warnings.extend(sources.server_warning(set.server_id.as_ref().get().map(Id::get)));
    let open = |spec: &ExportSpec| {
        check_export(spec)?;
        let text = format!("cannot export {:?}", spec.name());
        let mut spec = spec.clone();
        if running.as_ref().is_some_and(|running| running.has(&spec)) {
            holds.push(format!("export {:?}", spec.name()));
            // A target that the running server has locked can still be examined read-only.
            spec.ro = true;
        }
        let source = open_target(&spec).map_err(failed(ErrorKind::Export, text))?;
        if spec.id.is_some() || source.identity().is_none() {
            let set = spec.id.as_ref().map(Id::get);
            warnings.extend(sources.export_warning(spec.name(), set, &spec.target));
        }
        Ok::<_, Error>(source)
    };
    // Kept open simultaneously: two exports of one file exclude each other.
    let _opened = Partial::open(set, open).all()?;
    let held = running.as_ref().map_or(&[][..], |running| &running.portals);
    let metrics_held = running.as_ref().and_then(|running| running.metrics.as_deref());
    // Kept bound: the portals must have different addresses.
    let _metrics = bind_metrics(set, user.as_ref(), metrics_held)?;
    portals.check(held)?;
    holds.extend(portals.held_by(held));
    holds.extend(metrics_address(set).filter(|at| Some(at.as_str()) == metrics_held));
    if let Some(running) = &mut running {
        running.holds = holds;
    }
    Ok(Checked { running, warnings })
}

/// Checks that the control socket can be created if the settings require it, and that the state
/// directory is writable. Returns the warnings that startup would log.
fn check_directories(set: &Settings, user: Option<&RunAs>) -> Result<Vec<String>, Error> {
    let account = user.map(RunAs::account);
    let checked = check_run_dir(set, user);
    let mut warnings: Vec<String> =
        check_state_dir(set.state_dir.as_deref(), account).into_iter().collect();
    if let Err(error) = checked {
        if set.name.as_ref().get().is_some() || set.run_dir.is_some() {
            return Err(error);
        }
        warnings.push(format!("no control socket: {}", error.chain()));
    }
    Ok(warnings)
}

fn check_run_dir(set: &Settings, user: Option<&RunAs>) -> Result<(), Error> {
    let run_dir = privileges::run_dir(set)?;
    // Another user's directory was checked with the user.
    if user.is_none() {
        run_dir.check()?;
    }
    if let Some(name) = set.name.as_ref().get() {
        check_socket_path("control socket", &run_dir.server_socket(name.get()))?;
    }
    let text = "cannot create the control socket";
    check_directory(run_dir.path(), "", user.map(RunAs::account))
        .map_err(failed(ErrorKind::System, text))
}

/// Returns the address of the metrics, as a running server reports it.
fn metrics_address(set: &Settings) -> Option<String> {
    set.metrics.as_ref().map(MetricsServer::name)
}

/// Binds the address of the metrics, unless the running server holds it.
fn bind_metrics(
    set: &Settings,
    user: Option<&RunAs>,
    held: Option<&str>,
) -> Result<Option<MetricsServer>, Error> {
    let Some(at) = &set.metrics else { return Ok(None) };
    if metrics_address(set).as_deref() == held {
        return Ok(None);
    }
    let _as = user.map(|user| FilesAs::begin(user.account())).transpose();
    let _as = _as.map_err(failed(ErrorKind::System, "cannot act as the user"))?;
    metrics::bind(at).map(Some)
}
