//! Shares of the registered regions: a front end whose guest has many regions leaves enough for the
//! others.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of registered regions in the process. Each can become two mappings, of which a
/// process has 65,530 by default.
pub(super) const REGIONS_MAX: usize = 16_384;
/// Number of regions that each front end can always register.
const GUARANTEED: usize = 64;
/// Maximum number of front ends with a guarantee: one for each volume of a session.
const HOLDERS_MAX: usize = 128;
/// Number of regions beyond the guarantees, for all front ends together.
const COMMON: usize = REGIONS_MAX - HOLDERS_MAX * GUARANTEED;

/// Counts for the whole process.
#[derive(Debug)]
struct Counts {
    /// Number of regions registered beyond the guarantees.
    common: AtomicUsize,
    /// Number of front ends with a guarantee.
    holders: AtomicUsize,
}

impl Counts {
    const fn new() -> Self {
        Self { common: AtomicUsize::new(0), holders: AtomicUsize::new(0) }
    }
}

static COUNTS: Counts = Counts::new();

fn take(count: &AtomicUsize, max: usize) -> bool {
    let next = |count| (count < max).then_some(count + 1);
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok()
}

/// Share of a front end: a number of regions that it can always register. Whether it can register
/// more depends on the others.
#[derive(Debug)]
pub struct RegionShare {
    counts: &'static Counts,
    guaranteed: usize,
    used: AtomicUsize,
}

impl RegionShare {
    /// Creates a front end's share. Beyond 128 front ends, nothing is guaranteed.
    pub fn new() -> Arc<Self> {
        Self::of(&COUNTS)
    }

    fn of(counts: &'static Counts) -> Arc<Self> {
        let guaranteed = if take(&counts.holders, HOLDERS_MAX) { GUARANTEED } else { 0 };
        Arc::new(Self { counts, guaranteed, used: AtomicUsize::new(0) })
    }

    /// Creates a share without a guarantee.
    pub(super) fn common() -> Arc<Self> {
        Arc::new(Self { counts: &COUNTS, guaranteed: 0, used: AtomicUsize::new(0) })
    }

    /// Takes a part for one region.
    pub(super) fn take(self: &Arc<Self>) -> io::Result<RegionPart> {
        let is_own = take(&self.used, self.guaranteed);
        if is_own || take(&self.counts.common, COMMON) {
            return Ok(RegionPart { share: Arc::clone(self), is_own });
        }
        let text = format!(
            "the process shares too many regions of memory: all {COMMON} beyond the first \
             {GUARANTEED} of each volume are in use; use fewer and larger regions"
        );
        Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
    }
}

impl Drop for RegionShare {
    fn drop(&mut self) {
        if self.guaranteed > 0 {
            self.counts.holders.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Part of a share for one region, returned when it is dropped.
#[derive(Debug)]
pub(super) struct RegionPart {
    share: Arc<RegionShare>,
    is_own: bool,
}

impl Drop for RegionPart {
    fn drop(&mut self) {
        let count = if self.is_own { &self.share.used } else { &self.share.counts.common };
        count.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> &'static Counts {
        Box::leak(Box::new(Counts::new()))
    }

    #[test]
    fn each_front_end_keeps_its_guarantee() {
        let counts = counts();
        let [greedy, modest] = [0; 2].map(|_| RegionShare::of(counts));
        let mut taken: Vec<_> = (0..COMMON + GUARANTEED).map(|_| greedy.take().unwrap()).collect();
        let refused = greedy.take().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::OutOfMemory);
        assert!(refused.to_string().contains("use fewer and larger regions"), "{refused}");
        let mut own: Vec<_> = (0..GUARANTEED).map(|_| modest.take().unwrap()).collect();
        assert!(modest.take().is_err());
        // A part of the guarantee stays with its front end.
        own.pop();
        assert!(greedy.take().is_err());
        own.push(modest.take().unwrap());
        // Parts beyond the guarantees go to anyone.
        taken.pop();
        own.push(modest.take().unwrap());
        assert!(greedy.take().is_err());
    }

    #[test]
    fn no_more_is_guaranteed_than_there_is() {
        let counts = counts();
        let mut holders: Vec<_> = (0..HOLDERS_MAX).map(|_| RegionShare::of(counts)).collect();
        assert!(holders.iter().all(|holder| holder.guaranteed == GUARANTEED));
        assert_eq!(RegionShare::of(counts).guaranteed, 0);
        holders.pop();
        assert_eq!(RegionShare::of(counts).guaranteed, GUARANTEED);
        assert_eq!(HOLDERS_MAX * GUARANTEED + COMMON, REGIONS_MAX);
    }
}
