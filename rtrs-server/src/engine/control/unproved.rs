//! Room for paths whose clients have still to prove who they are.
//!
//! Whoever reaches the port can connect them, and whoever knows a session's UUID can connect them
//! to it. So they take no place of paths that have proved something: they are counted by
//! themselves, by session and by the memory of their chunks, which is pinned before the proof. When
//! there are too many, the oldest of the source that has most gives way, if the newcomer's source
//! has less, or if it has had [`PATIENCE`] for what takes an honest client milliseconds. Else the
//! newcomer is refused and tries again. In their session, those of sources from which a path has
//! proved itself do not give way to others.
//!
//! Holds nothing: all is counted anew for each path, in the registry.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rtrs_core::ids::SessionId;
use rtrs_core::proto::quota::Source;
use rtrs_core::time::{Duration, Instant};

use super::path::Path;
use super::refusal::Refusal;
use super::registry::Registry;
use crate::path::PathKey;

/// Such paths of a session; twice as many for sources from which a path has proved itself. Not
/// less than an honest client has paths.
pub(super) const UNPROVED_MAX: usize = 32;

/// Of `memory-max`, all such paths together may take one part in so many, and always one path.
const MEMORY_SHARE: u64 = 4;

/// Paths that end for one newcomer at most. Each means a look at all paths.
pub(super) const ENDED_FOR_ONE: usize = 8;

/// A path that is older gives way also to one of a source that has as many.
const PATIENCE: Duration = Duration::from_secs(1);

/// A path that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer {
    pub(super) session: SessionId,
    pub(super) source: Source,
    /// What its chunks take before the proof.
    pub(super) bytes: u64,
}

/// Whether it has room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It has.
    Free,
    /// It may have when this path was ended.
    After(PathKey),
}

/// What one source has.
#[derive(Debug)]
struct Share {
    /// Paths, or bytes.
    amount: u64,
    oldest: (PathKey, Instant),
}

/// What all sources have.
#[derive(Debug, Default)]
struct Places {
    shares: BTreeMap<Source, Share>,
    live: u64,
    /// Of paths that end.
    ending: u64,
    /// Sources of those.
    ending_from: BTreeSet<Source>,
}

impl Places {
    /// Of paths that have proved nothing, each counted as `amount` says.
    fn of<'a>(paths: impl Iterator<Item = &'a Path>, amount: impl Fn(&Path) -> u64) -> Self {
        let mut places = Self::default();
        for path in paths.filter(|path| path.is_unproved()) {
            let (source, more) = (source_of(path), amount(path));
            if path.state().is_ending() {
                places.ending += more;
                places.ending_from.insert(source);
                continue;
            }
            places.live += more;
            // One that has proved itself waits for its older connect only.
            if more == 0 || path.proving().is_some_and(|proving| proving.waiting().is_some()) {
                continue;
            }
            let oldest = (path.key(), path.since());
            let share = places.shares.entry(source).or_insert(Share { amount: 0, oldest });
            share.amount += more;
            share.oldest = share.oldest.min(oldest);
        }
        places
    }

    /// Whether `more` for a source fits below `most`.
    fn room(
        &self,
        (source, more, most): (Source, u64, u64),
        keeps: &BTreeSet<Source>,
        now: Instant,
    ) -> Option<Room> {
        let most = most.max(more);
        // Those that end may take some drivers a while. Who has none of them waits for none.
        let bound = most * if self.ending_from.contains(&source) { 2 } else { 3 };
        if self.live + self.ending + more > bound {
            return None;
        }
        if self.live + more <= most {
            return Some(Room::Free);
        }
        let own = self.shares.get(&source).map_or(0, |share| share.amount);
        let others = self.shares.iter().filter(|(from, _)| !keeps.contains(from));
        let (_, share) = others.max_by_key(|(_, share)| (share.amount, Reverse(share.oldest)))?;
        let (oldest, since) = share.oldest;
        let gives_way = share.amount > own + more || now.since(since) >= PATIENCE;
        gives_way.then_some(Room::After(oldest))
    }
}

fn source_of(path: &Path) -> Source {
    Source::of(path.shared().origin.peer.ip())
}

/// Whether a path that has to prove who its client is has room. What ends for it makes room at
/// once, so that this can be asked again.
pub(super) fn room(
    newcomer: Newcomer,
    memory_max: u64,
    registry: &Registry,
    now: Instant,
) -> Result<Room, Refusal> {
    let Newcomer { session, source, bytes } = newcomer;
    let paths = || registry.paths_of(session);
    let proved = paths().filter(|path| !path.is_unproved() && path.state().may_begin());
    let keeps: BTreeSet<Source> = proved.map(source_of).collect();
    let most = UNPROVED_MAX as u64 * if keeps.contains(&source) { 2 } else { 1 };
    let places = Places::of(paths(), |_| 1);
    let refusal = Refusal::UnprovedPaths(paths().filter(|path| path.is_unproved()).count());
    match places.room((source, 1, most), &keeps, now).ok_or(refusal)? {
        Room::Free if bytes == 0 => return Ok(Room::Free),
        Room::Free => {}
        after @ Room::After(_) => return Ok(after),
    }
    let places = Places::of(registry.paths(), Path::chunk_bytes);
    let refusal = Refusal::UnprovedMemory(places.live + places.ending);
    places.room((source, bytes, memory_max / MEMORY_SHARE), &BTreeSet::new(), now).ok_or(refusal)
}

/// Bytes of chunks of all paths that have proved nothing. They are there for a moment only, so
/// nobody gets less for them.
pub(super) fn bytes(registry: &Registry) -> u64 {
    registry.paths().filter(|path| path.is_unproved()).map(Path::chunk_bytes).sum()
}
