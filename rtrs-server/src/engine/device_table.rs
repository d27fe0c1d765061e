//! Mapping of a session's device IDs to exports, readable by every shard without a lock.
//!
//! Each ID has one atomic word, which the control shard writes on OPEN and CLOSE and each IO loads
//! once. IDs are per session and start at 0, and the lowest free ID is reused first, as in the
//! kernel. A session opens an export at most once, so there are no more IDs than exports. The ID of
//! a removed export is not reused until the client closes it, because the client may not know about
//! the removal yet.
//!
//! The word is 0 when the ID is closed. Otherwise bit 31 is set, bit 30 means "writes allowed", and
//! the low 16 bits hold the export index; if the export was removed, only bit 29 is set.

use std::sync::atomic::{AtomicU32, Ordering};

use rtrs_core::wire::errno;

use crate::engine::ledger::FlushLedger;
use crate::export::{EXPORTS_MAX, ExportIndex};
use crate::segments::Segments;

const OPEN: u32 = 1 << 31;
const WRITABLE: u32 = 1 << 30;
const REMOVED: u32 = 1 << 29;

/// ID of an open export within a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// An open device, as seen by an IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Export of the device.
    pub export: ExportIndex,
    /// Whether the session may write to the device.
    pub writable: bool,
}

/// Devices of one session.
#[derive(Debug)]
pub struct DeviceTable {
    rows: Segments<Row>,
    /// Number of IDs that have ever been used.
    used: AtomicU32,
}

#[derive(Debug, Default)]
struct Row {
    word: AtomicU32,
    ledger: FlushLedger,
}

impl Default for DeviceTable {
    fn default() -> Self {
        Self { rows: Segments::new(EXPORTS_MAX), used: AtomicU32::new(0) }
    }
}

impl DeviceTable {
    fn row(&self, id: DeviceId) -> Option<&Row> {
        self.rows.get(id.0 as usize)
    }

    /// Returns the device with an ID, or None if the ID is not open.
    pub fn get(&self, id: DeviceId) -> Option<DeviceEntry> {
        self.lookup(id).ok()
    }

    /// Returns the device with an ID.
    ///
    /// # Errors
    /// Fails with EIDRM if the export was removed, or ENOTCONN if the ID is not open.
    pub fn lookup(&self, id: DeviceId) -> Result<DeviceEntry, u16> {
        let word = self.row(id).map_or(0, |row| row.word.load(Ordering::Acquire));
        match word {
            REMOVED => return Err(errno::EIDRM),
            word if word & OPEN == 0 => return Err(errno::ENOTCONN),
            _ => {}
        }
        #[allow(clippy::cast_possible_truncation, reason = "the low half is the export")]
        let export = ExportIndex(word as u16);
        Ok(DeviceEntry { export, writable: word & WRITABLE != 0 })
    }

    /// Ledger of unflushed writes to the export open under an ID.
    pub fn ledger(&self, id: DeviceId) -> Option<&FlushLedger> {
        self.row(id).map(|row| &row.ledger)
    }

    /// Returns the ID under which an export is open.
    pub fn find(&self, export: ExportIndex) -> Option<DeviceId> {
        self.ids().find(|id| self.get(*id).is_some_and(|entry| entry.export == export))
    }

    /// Opens an export under the lowest free ID, or changes the access rights of its current ID.
    /// Returns None if every ID is in use. `epoch` is the epoch of an export that is not open yet.
    pub fn open(&self, entry: DeviceEntry, epoch: u32) -> Option<DeviceId> {
        let id = match self.find(entry.export) {
            Some(id) => id,
            None => {
                let closed = |id: &DeviceId| self.lookup(*id) == Err(errno::ENOTCONN);
                let used = self.used.load(Ordering::Relaxed);
                let id = self.ids().find(closed).unwrap_or(DeviceId(used));
                self.rows.make(id.0 as usize)?.ledger.reset(epoch);
                self.used.store(used.max(id.0 + 1), Ordering::Relaxed);
                id
            }
        };
        let rights = if entry.writable { WRITABLE } else { 0 };
        let word = OPEN | rights | u32::from(entry.export.0);
        self.row(id)?.word.store(word, Ordering::Release);
        Some(id)
    }

    /// Closes an ID. Returns the device that was open under this ID.
    pub fn close(&self, id: DeviceId) -> Option<DeviceEntry> {
        let entry = self.get(id);
        self.row(id)?.word.store(0, Ordering::Release);
        entry
    }

    /// Marks the export of an ID as removed, so that no new requests for it begin.
    pub fn remove(&self, id: DeviceId) {
        if let Some(row) = self.row(id)
            && !rtrs_core::mutated!(RemovedServed)
        {
            row.word.store(REMOVED, Ordering::Release);
        }
    }

    /// All IDs that have ever been open.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = DeviceId> + use<> {
        (0..self.used.load(Ordering::Relaxed)).map(DeviceId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_start_at_zero_and_the_lowest_free_one_is_reused() {
        let table = DeviceTable::default();
        let entry = |export, writable| DeviceEntry { export: ExportIndex(export), writable };
        assert_eq!(table.get(DeviceId(0)), None);
        assert_eq!(table.open(entry(2, true), 0), Some(DeviceId(0)));
        assert_eq!(table.open(entry(0, false), 0), Some(DeviceId(1)));
        assert_eq!(table.open(entry(2, false), 0), Some(DeviceId(0)), "one id per export");
        assert_eq!(table.get(DeviceId(0)), Some(entry(2, false)));
        assert_eq!(table.close(DeviceId(0)), Some(entry(2, false)));
        assert_eq!(table.close(DeviceId(0)), None);
        assert_eq!(table.open(entry(1, true), 0), Some(DeviceId(0)));
        assert_eq!(table.get(DeviceId(3)), None);
        assert_eq!(table.get(DeviceId(u32::MAX)), None);
    }

    #[test]
    fn the_id_of_a_removed_export_is_freed_when_its_client_closes_it() {
        let table = DeviceTable::default();
        let entry = |export| DeviceEntry { export: ExportIndex(export), writable: true };
        let id = table.open(entry(0), 0).unwrap();
        table.remove(id);
        assert_eq!((table.lookup(id), table.find(ExportIndex(0))), (Err(errno::EIDRM), None));
        assert_eq!(table.lookup(DeviceId(1)), Err(errno::ENOTCONN));
        assert_eq!(table.open(entry(1), 0), Some(DeviceId(1)), "its client may still write there");
        assert_eq!(table.close(id), None);
        assert_eq!(table.lookup(id), Err(errno::ENOTCONN));
        assert_eq!(table.open(entry(2), 0), Some(id));
    }
}
