//! What sessions left unflushed that ended without closing an export.
//!
//! A client whose paths have all died loses its session. When it connects again under the same id
//! it gets a new one, with a new ledger, and for the client nothing has changed: it still relies
//! on a flush for the writes that were acknowledged before. So the control shard keeps what a
//! ledger knows, and the next session of that id takes it up when it opens the export. A kernel's
//! client learns of a loss in no other way. Ours compares cache ids at each open and hears there of
//! failures up to then; what fails later it learns from its flushes, like a kernel.
//!
//! At most [`KEPT_MAX`] exports of sessions are kept, the oldest are dropped, and each for
//! [`KEPT_FOR`] at most.

use std::collections::VecDeque;

use rtrs_core::identity::ExportId;
use rtrs_core::ids::SessionId;
use rtrs_core::time::{Duration, Instant};

use crate::engine::epoch::EpochMark;
use crate::engine::ledger::FlushLedger;
use crate::export::Export;

/// How many are kept.
const KEPT_MAX: usize = 1024;

/// How long a client may take to come back.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// An export as it is known when it is gone.
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

/// What one session left of one export.
#[derive(Debug)]
struct Left {
    session: SessionId,
    /// Of the export: its place may have been given to another one meanwhile.
    name: String,
    id: Option<ExportId>,
    /// The epoch of the oldest write that no good flush covered.
    oldest: EpochMark,
    /// A loss is still to be reported.
    late: bool,
    at: Instant,
}

/// What ended sessions left, oldest first.
#[derive(Debug, Default)]
pub(super) struct Ended(VecDeque<Left>);

impl Ended {
    /// A session ended with this export open.
    pub(super) fn keep(
        &mut self,
        now: Instant,
        session: SessionId,
        export: &Known,
        ledger: &FlushLedger,
    ) {
        let Some((oldest, late)) = ledger.unflushed() else { return };
        self.expire(now);
        if self.0.len() >= KEPT_MAX {
            self.0.pop_front();
        }
        let Known { name, id, epoch } = export.clone();
        self.0.push_back(Left { session, name, id, oldest: epoch.after(oldest), late, at: now });
    }

    /// A session opens the export: what the one before it left there. True when some of that may
    /// be lost and the client has not heard of it, None when nothing is left. It is lost when
    /// another file or disk has the name by now.
    pub(super) fn take(
        &mut self,
        now: Instant,
        session: SessionId,
        export: &Export,
    ) -> Option<bool> {
        self.expire(now);
        let at = self.0.iter().position(|left| {
            let same = left.name == export.name || left.id.is_some() && left.id == export.id;
            same && left.session == session
        })?;
        let left = self.0.remove(at)?;
        let other = left.id.zip(export.id).is_some_and(|(before, now)| before != now);
        Some(other || left.late || export.epoch.has_risen_since(&left.oldest))
    }

    fn expire(&mut self, now: Instant) {
        while self.0.front().is_some_and(|left| now.since(left.at) >= KEPT_FOR) {
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

    fn dirty() -> FlushLedger {
        let ledger = FlushLedger::default();
        ledger.wrote(0, 0);
        ledger
    }

    #[test]
    fn only_the_same_session_takes_it_up_and_only_once() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let vol = export("vol", &epoch);
        ended.keep(START, SESSION, &Known::new(&vol), &FlushLedger::default());
        assert_eq!(ended.take(START, SESSION, &vol), None, "nothing was written");
        ended.keep(START, SESSION, &Known::new(&vol), &dirty());
        assert_eq!(ended.take(START, SessionId([2; 16]), &vol), None);
        assert_eq!(ended.take(START, SESSION, &export("other", &epoch)), None);
        assert_eq!(ended.take(START, SESSION, &vol), Some(false));
        assert_eq!(ended.take(START, SESSION, &vol), None);
        ended.keep(START, SESSION, &Known::new(&vol), &dirty());
        epoch.raise();
        assert_eq!(ended.take(START, SESSION, &vol), Some(true));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let vol = |n: usize| export(&n.to_string(), &epoch);
        for n in 0..=KEPT_MAX {
            ended.keep(START, SESSION, &Known::new(&vol(n)), &dirty());
        }
        assert_eq!(ended.0.len(), KEPT_MAX);
        assert_eq!(ended.take(START, SESSION, &vol(0)), None, "the oldest was dropped");
        let almost = START + Duration::from_secs(599);
        assert_eq!(ended.take(almost, SESSION, &vol(1)), Some(false));
        assert_eq!(ended.take(START + KEPT_FOR, SESSION, &vol(2)), None);
        assert!(ended.0.is_empty());
    }

    #[test]
    fn an_export_that_was_closed_and_found_again_is_compared_by_its_number() {
        let mut ended = Ended::default();
        let kept = |base| SyncEpoch::kept(base, Arc::new(Nowhere), "/a/b".into());
        let before = kept(7);
        before.raise();
        let ledger = FlushLedger::default();
        ledger.wrote(1, 1);
        for (base, lost) in [(8, false), (9, true)] {
            ended.keep(START, SESSION, &Known::new(&export("b", &before)), &ledger);
            assert_eq!(ended.take(START, SESSION, &export("b", &kept(base))), Some(lost), "{base}");
        }
        // Where the number is not saved, nobody knows.
        ended.keep(START, SESSION, &Known::new(&export("b", &Arc::default())), &dirty());
        assert_eq!(ended.take(START, SESSION, &export("b", &Arc::default())), Some(true));
    }

    #[test]
    fn another_disk_of_the_same_name_has_nothing_of_what_was_written() {
        let (mut ended, epoch) = (Ended::default(), Arc::default());
        let with = |id| Export { id: Some(ExportId::of_name(id)), ..export("vol", &epoch) };
        for (id, lost) in [("a", false), ("b", true)] {
            ended.keep(START, SESSION, &Known::new(&with("a")), &dirty());
            assert_eq!(ended.take(START, SESSION, &with(id)), Some(lost), "{id}");
        }
    }

    #[derive(Debug)]
    struct Nowhere;

    impl crate::engine::epoch::EpochStore for Nowhere {
        fn save(&self, _key: &str, _state: &Arc<crate::engine::epoch::EpochState>) {}
    }
}
