//! Which export each device id of a session means, readable by every shard without a lock.
//!
//! One atomic word per id, written by the control shard on OPEN and CLOSE, loaded once per IO. Ids
//! are per session, start at 0 and are reused, lowest first, as the kernel's are. A session opens
//! an export once at most, so there are as many ids as exports.
//!
//! Word: 0 when closed; else bit 31 set, bit 30 "writes allowed", low 16 bits the export.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::engine::ledger::FlushLedger;
use crate::export::ExportIndex;

const OPEN: u32 = 1 << 31;
const WRITABLE: u32 = 1 << 30;

/// A session's number for an open export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// An open device as an IO sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The export behind the id.
    pub export: ExportIndex,
    /// The session may change it.
    pub writable: bool,
}

/// The devices of one session.
#[derive(Debug)]
pub struct DeviceTable {
    words: Box<[AtomicU32]>,
    ledgers: Box<[FlushLedger]>,
}

impl DeviceTable {
    /// A table with room for one id per export.
    pub fn new(exports: usize) -> Self {
        let words = (0..exports).map(|_| AtomicU32::new(0)).collect();
        Self { words, ledgers: (0..exports).map(|_| FlushLedger::default()).collect() }
    }

    /// The device of an id, or None when it is closed or never was.
    pub fn get(&self, id: DeviceId) -> Option<DeviceEntry> {
        let word = self.words.get(id.0 as usize)?.load(Ordering::Acquire);
        if word & OPEN == 0 {
            return None;
        }
        #[allow(clippy::cast_possible_truncation, reason = "the low half is the export")]
        let export = ExportIndex(word as u16);
        Some(DeviceEntry { export, writable: word & WRITABLE != 0 })
    }

    /// What has not yet been reported to the session of the export behind an id.
    pub fn ledger(&self, id: DeviceId) -> Option<&FlushLedger> {
        self.ledgers.get(id.0 as usize)
    }

    /// The id an export is open under.
    pub fn find(&self, export: ExportIndex) -> Option<DeviceId> {
        self.ids().find(|id| self.get(*id).is_some_and(|entry| entry.export == export))
    }

    /// Opens an export under the lowest free id, or changes the rights of its present one. None
    /// when every id is taken.
    /// `epoch` is the export's, for one that is not open yet.
    pub fn open(&self, entry: DeviceEntry, epoch: u32) -> Option<DeviceId> {
        let id = match self.find(entry.export) {
            Some(id) => id,
            None => {
                let id = self.ids().find(|id| self.get(*id).is_none())?;
                self.ledgers[id.0 as usize].reset(epoch);
                id
            }
        };
        let rights = if entry.writable { WRITABLE } else { 0 };
        let word = OPEN | rights | u32::from(entry.export.0);
        self.words[id.0 as usize].store(word, Ordering::Release);
        Some(id)
    }

    /// Closes an id. Returns what it was.
    pub fn close(&self, id: DeviceId) -> Option<DeviceEntry> {
        let entry = self.get(id)?;
        self.words[id.0 as usize].store(0, Ordering::Release);
        Some(entry)
    }

    /// All ids, open or not.
    pub fn ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..u32::try_from(self.words.len()).unwrap_or(u32::MAX)).map(DeviceId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_start_at_zero_and_are_reused_lowest_first() {
        let table = DeviceTable::new(3);
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
}
