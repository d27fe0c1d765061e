//! `--check`: refuses what a start would refuse, and changes nothing.

use rtrs_core::local::{SocketState, request, socket_state};
use rtrs_core::time::Duration;
use serde::Serialize;

use crate::backend::open_target;
use crate::control_protocol::{ExportList, Request, Status};
use crate::daemon::audit;
use crate::daemon::portals::Portals;
use crate::daemon::privileges::{self, RunAs};
use crate::daemon::serve::session_params;
use crate::error::{Error, ErrorKind, failed};
use crate::plan::partial::Partial;
use crate::plan::{Plan, check_export};
use crate::settings::{ExportSpec, Settings};
use crate::stats::{ExportSnapshot, ExportState};

/// Maximum time for a running server to report its status.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// This server is already running: another process with its name, or without a name at its address.
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
    /// Names and targets of its exports.
    #[serde(skip)]
    exports: Vec<(String, String)>,
}

impl Running {
    /// Finds the running server of these settings, if any.
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
                    let text = format!("a server of this name runs ({socket}) but does not answer");
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
            let Status { name, pid, portals, .. } = status;
            return Ok(Some(Self { name, pid, holds: Vec::new(), portals, exports }));
        }
        Ok(None)
    }

    fn has(&self, spec: &ExportSpec) -> bool {
        let target = spec.target.to_string();
        self.exports.iter().any(|(name, backing)| name == spec.name() && *backing == target)
    }
}

/// Refuses what [`serve`](crate::serve) would refuse: opens and locks the exports, tries the
/// addresses and the name, and releases everything. If this server is already running, its
/// resources are not tried.
///
/// # Errors
/// Those of [`serve`](crate::serve).
pub(crate) fn check_start(plan: &Plan) -> Result<Option<Running>, Error> {
    let set = &plan.settings;
    RunAs::find(set)?;
    audit::check(set)?;
    session_params(plan, set.shards.count())?;
    let portals = Portals::new(plan)?;
    let mut running = Running::find(set, &portals)?;
    let mut holds = Vec::new();
    let open = |spec: &ExportSpec| {
        check_export(spec)?;
        let text = format!("cannot export {:?}", spec.name());
        let mut spec = spec.clone();
        if running.as_ref().is_some_and(|running| running.has(&spec)) {
            holds.push(format!("export {:?}", spec.name()));
            // A target that it has locked can still be examined read-only.
            spec.ro = true;
        }
        open_target(&spec).map_err(failed(ErrorKind::Export, text))
    };
    // Kept open simultaneously: two exports of one file exclude each other.
    let _opened = Partial::open(set, open).all()?;
    let held = running.as_ref().map_or(&[][..], |running| &running.portals);
    portals.check(held)?;
    holds.extend(portals.held_by(held));
    if let Some(running) = &mut running {
        running.holds = holds;
    }
    Ok(running)
}
