//! Exports that move between servers: processing of MOVE, and the condition for opens on a standby.
//! The source implements the move itself (`rtrs_core::gateway`).

use rtrs_core::wire::{AccessMode, Move, Name, errno};

use crate::engine::device_table::DeviceId;
use crate::engine::message::ControlAnswer;
use crate::engine::session::SessionShared;
use crate::export::ExportTable;

/// Reason for refusing an open of a standby, for a client that does not support standbys.
pub(super) const STANDBY: &str = "this server is standby; another server serves the export";

/// Answers MOVE: the move has begun, or is refused.
pub(super) fn answer(
    Move { device_id, away }: Move,
    session: &SessionShared,
    exports: &ExportTable,
) -> ControlAnswer {
    let refused = ControlAnswer::Refused;
    let entry = match session.devices.lookup(DeviceId(device_id)) {
        Ok(entry) => entry,
        Err(errno) => return refused(errno),
    };
    // A reader loses nothing by waiting for the writer.
    if !entry.writable {
        return refused(errno::EPERM);
    }
    let Some(export) = exports.get(entry.export) else { return refused(errno::ENOTCONN) };
    match export.source.gateway() {
        None => refused(errno::EINVAL),
        Some(gateway) if away => {
            gateway.begin_release();
            ControlAnswer::Done
        }
        Some(gateway) => match gateway.take_over(session.id) {
            Ok(()) => ControlAnswer::Done,
            Err(_) => refused(errno::EAGAIN),
        },
    }
}

/// Whether another server serves the export.
pub(super) fn is_standby(name: &Name, exports: &ExportTable) -> bool {
    let export = exports.find(name.as_bytes()).and_then(|at| exports.get(at));
    export.is_some_and(|export| {
        export.source.gateway().is_some_and(|gateway| !gateway.standing().active)
    })
}

/// Records that a session has opened an export for writing.
pub(super) fn note_writer(
    name: &Name,
    access: AccessMode,
    session: &SessionShared,
    exports: &ExportTable,
) {
    let export = exports.find(name.as_bytes()).and_then(|at| exports.get(at));
    let gateway = export.as_ref().and_then(|export| export.source.gateway());
    if let Some(gateway) = gateway.filter(|gateway| gateway.standing().active)
        && access.may_write()
    {
        gateway.opened_by(session.id);
    }
}
