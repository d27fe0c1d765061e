//! Unflushed writes of sessions that ended without closing an export.
//!
//! A client whose paths have all failed loses its session. When it reconnects under the same ID, it
//! is given a new session with a new ledger, but for the client nothing has changed: it still
//! relies on a flush for the writes that were acknowledged earlier. The control shard therefore
//! keeps the contents of the ledger, and the next session with that ID takes over these contents
//! when it opens the export. A kernel client has no other way to learn of a loss. An rtrs client
//! compares cache IDs at each open, which reveals earlier failures; later failures are reported by
//! flushes, as for a kernel client.
//!
//! At most [`KEPT_MAX`] exports of sessions are kept, each for at most [`KEPT_FOR`]; the oldest are
//! dropped first.

use std::collections::VecDeque;

use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::time::{Duration, Instant};

use crate::engine::epoch::EpochMark;
use crate::engine::ledger::FlushLedger;
use crate::export::Export;

/// Maximum number of kept entries.
const KEPT_MAX: usize = 1024;

/// Maximum time for a client to reconnect.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// Description of an export that outlives the export.
#[derive(Clone, Debug)]
pub(super) struct Known {
    name: String,
    id: Option<ExportId>,
    epoch: EpochMark,
}

impl Known {
    pub(super) fn new(export: &Export) -> Self {
        Self { name: export.name.clone(), id: export.id, epoch: export.epoch.mark(0) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// Unflushed writes of one session to one export.
#[derive(Debug)]
struct Entry {
    session: SessionId,
    /// Name of the export, because its index may have been reused.
    name: String,
    id: Option<ExportId>,
    /// Epoch of the oldest write that no successful flush has covered.
    oldest: EpochMark,
    /// Whether a loss must still be reported.
    late: bool,
    /// Whether a different session made the writes; see [`Left::inherited`].
    inherited: bool,
    at: Instant,
}

/// Unflushed writes that a session takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Left {
    /// Whether any of them may be lost without the client's knowledge.
    pub(super) lost: bool,
    /// Whether the session on the old host of a virtual machine made them, so the client cannot
    /// detect the loss by comparing cache IDs.
    pub(super) inherited: bool,
}

/// Unflushed writes of ended sessions, oldest first.
#[derive(Debug, Default)]
pub(super) struct Ended(VecDeque<Entry>);

impl Ended {
    /// Stores the ledger of a session that ended with this export open, for the next session with
    /// this ID. `inherited` means that the ledger is that of a different session.
    pub(super) fn keep(
        &mut self,
        now: Instant,
        session: SessionId,
        export: &Known,
        ledger: &FlushLedger,
        inherited: bool,
    ) {
        let Some((oldest, late)) = ledger.unflushed() else { return };
        let inherited = inherited || ledger.has_inherited_loss();
        let Known { name, id, epoch } = export.clone();
        let oldest = epoch.after(oldest);
        self.expire(now);
        let is_same =
            |one: &Entry| one.session == session && one.name == export.name && one.id == export.id;
        if let Some(one) = self.0.iter_mut().find(|one| is_same(one)) {
            // The earlier entry has the lower epoch.
            one.late |= late;
            one.inherited |= inherited;
            return;
        }
        if self.0.len() >= KEPT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Entry { session, name, id, oldest, late, inherited, at: now });
    }

    /// Takes the unflushed writes that earlier sessions left for the session with this ID at the
    /// export. Returns None if there are none. All are lost if a different file or disk now has the
    /// name.
    pub(super) fn take(
        &mut self,
        now: Instant,
        session: SessionId,
        export: &Export,
    ) -> Option<Left> {
        self.expire(now);
        let at = self.0.iter().position(|entry| {
            let same = entry.name == export.name || entry.id.is_some() && entry.id == export.id;
            same && entry.session == session
        })?;
        let entry = self.0.remove(at)?;
        let other = entry.id.zip(export.id).is_some_and(|(before, now)| before != now);
        let lost = other || entry.late || export.epoch.has_risen_since(&entry.oldest);
        Some(Left { lost, inherited: entry.inherited })
    }

    fn expire(&mut self, now: Instant) {
        while self.0.front().is_some_and(|entry| now.since(entry.at) >= KEPT_FOR) {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::backend::NullSource;
    use crate::engine::epoch::SyncEpoch;

    const SESSION: SessionId = SessionId([1; 16]);
    const START: Instant = Instant::ZERO;

    fn export(name: &str, epoch: &Arc<SyncEpoch>) -> Export {
        let source = Arc::new(NullSource::new(4096, 512));
        let epoch = Arc::clone(epoch);
        Export { epoch, ..Export::new(name, source) }
    }

    fn is_lost(left: Option<Left>) -> Option<bool> {
        left.map(|left| left.lost)
    }

    fn dirty() -> FlushLedger {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        ledger
    }

    #[test]
    fn only_the_same_session_resumes_unflushed_writes_and_only_once() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let vol = export("vol", &epoch);
        ended.keep(START, SESSION, &Known::new(&vol), &FlushLedger::default(), false);
        assert_eq!(ended.take(START, SESSION, &vol), None, "nothing was written");
        ended.keep(START, SESSION, &Known::new(&vol), &dirty(), false);
        assert_eq!(ended.take(START, SessionId([2; 16]), &vol), None);
        assert_eq!(ended.take(START, SESSION, &export("other", &epoch)), None);
        assert_eq!(is_lost(ended.take(START, SESSION, &vol)), Some(false));
        assert_eq!(ended.take(START, SESSION, &vol), None);
        ended.keep(START, SESSION, &Known::new(&vol), &dirty(), false);
        epoch.raise();
        assert_eq!(is_lost(ended.take(START, SESSION, &vol)), Some(true));
    }

    #[test]
    fn the_number_of_kept_sessions_is_bounded() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let vol = |n: usize| export(&n.to_string(), &epoch);
        for n in 0..=KEPT_MAX {
            ended.keep(START, SESSION, &Known::new(&vol(n)), &dirty(), false);
        }
        assert_eq!(ended.0.len(), KEPT_MAX);
        assert_eq!(ended.take(START, SESSION, &vol(0)), None, "the oldest was dropped");
        let almost = START + Duration::from_secs(599);
        assert_eq!(is_lost(ended.take(almost, SESSION, &vol(1))), Some(false));
        assert_eq!(ended.take(START + KEPT_FOR, SESSION, &vol(2)), None);
        assert!(ended.0.is_empty());
    }

    #[test]
    fn a_reopened_found_export_is_compared_by_its_epoch() {
        let mut ended = Ended::default();
        let kept = |base| SyncEpoch::kept(base, Arc::new(Nowhere), "/a/b".into());
        let before = kept(7);
        before.raise();
        let ledger = FlushLedger::default();
        ledger.wrote(1, 1);
        for (base, lost) in [(8, false), (9, true)] {
            ended.keep(START, SESSION, &Known::new(&export("b", &before)), &ledger, false);
            assert_eq!(
                is_lost(ended.take(START, SESSION, &export("b", &kept(base)))),
                Some(lost),
                "{base}"
            );
        }
        // If the number is not saved, the result is unknown.
        ended.keep(START, SESSION, &Known::new(&export("b", &Arc::default())), &dirty(), false);
        assert_eq!(is_lost(ended.take(START, SESSION, &export("b", &Arc::default()))), Some(true));
    }

    #[test]
    fn another_disk_of_the_same_name_inherits_no_unflushed_writes() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let with = |id| Export { id: Some(ExportId::of_name(id)), ..export("vol", &epoch) };
        for (id, lost) in [("a", false), ("b", true)] {
            ended.keep(START, SESSION, &Known::new(&with("a")), &dirty(), false);
            assert_eq!(is_lost(ended.take(START, SESSION, &with(id))), Some(lost), "{id}");
        }
    }

    #[derive(Debug)]
    struct Nowhere;

    impl crate::engine::epoch::EpochStore for Nowhere {
        fn save(&self, _key: &str, _state: &Arc<crate::engine::epoch::EpochState>) {}
    }
}
