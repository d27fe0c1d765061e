//! Limits for paths whose clients have not yet authenticated.
//!
//! Anyone who can reach the port can connect such paths, and anyone who knows a session's UUID can
//! connect them to the session. Such paths therefore take no capacity from authenticated paths:
//! they are counted separately, by session and by the memory of their chunks, which is pinned
//! before the client authenticates. That memory counts until it is deregistered, even if the path
//! ended long before.
//!
//! When a limit is reached, existing paths are evicted until the newcomer fits, starting with the
//! oldest path of the source that holds the most. If the newcomer would not fit even then, no path
//! is evicted, and the newcomer is refused and retries. A path can be evicted if its source holds
//! more than the newcomer's source, or if the path is older than [`PATIENCE`]; an honest client
//! authenticates within milliseconds. A source is known if an authenticated path from there is
//! open, or ended less than [`LOST_FOR`] ago. A newcomer from a known source evicts paths of
//! unknown sources immediately. Paths of known sources are evicted last, and never within their own
//! session. Unauthenticated clients therefore cannot prevent a client from coming back, however
//! many addresses they use.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use rtrs_core::fabric::Who;
use rtrs_core::ids::SessionId;
use rtrs_core::mem::{MemoryMeter, Region};
use rtrs_core::proto::quota::Source;
use rtrs_core::time::{Duration, Instant};

use crate::engine::control::path::Path;
use crate::engine::control::refusal::Refusal;
use crate::engine::control::registry::Registry;
use crate::path::{PathEnd, PathKey, PathShared};

/// Maximum number of unauthenticated paths in a session, doubled for known sources. Must be at
/// least the number of paths of an honest client.
const UNPROVED_MAX: usize = 32;

/// Divisor of `memory-max` that gives the limit for all unauthenticated paths. One path is always
/// permitted.
const MEMORY_SHARE: u64 = 4;

/// Age from which a path can be evicted regardless of how much each source holds.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time for which a source remains known after its paths have ended.
const LOST_FOR: Duration = Duration::from_secs(600);
/// Maximum number of remembered pairs of source and session.
const LOST_MAX: usize = 1024;

/// A path about to be created.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::control) struct Newcomer {
    pub(in crate::engine::control) session: SessionId,
    pub(in crate::engine::control) source: Source,
    /// Size in bytes of the path's chunks before authentication.
    pub(in crate::engine::control) bytes: u64,
}

/// Memory of unauthenticated paths, and the known sources.
#[derive(Debug)]
pub(super) struct UnprovedPaths {
    meter: Arc<MemoryMeter>,
    /// Memory of unauthenticated paths, each region with its path and source.
    regions: Vec<(PathKey, Source, Weak<Region>)>,
    /// Sources of authenticated paths that have ended, with the time of the end.
    lost: BTreeMap<(Source, SessionId), Instant>,
}

/// Resources of one source.
#[derive(Debug, Default)]
struct Share {
    /// Number of paths, or bytes.
    amount: u64,
    /// Paths of the source, oldest first, with the amount of each.
    paths: BTreeMap<(Instant, PathKey), u64>,
}

/// Resources that a newcomer needs.
#[derive(Clone, Copy, Debug)]
struct Demand {
    source: Source,
    /// Number of paths, or bytes.
    amount: u64,
    /// Limit for all sources together.
    limit: u64,
}

/// Known sources.
struct Known {
    sources: BTreeSet<Source>,
    /// Whether paths of known sources are never evicted.
    stay: bool,
}

/// Resources of all sources.
#[derive(Debug, Default)]
struct Places {
    shares: BTreeMap<Source, Share>,
    live: u64,
    /// Amount held by paths that are ending or have ended.
    ending: u64,
    /// Sources of paths that are ending or have ended.
    ending_from: BTreeSet<Source>,
}

impl UnprovedPaths {
    /// Creates the limits for a server whose chunks may use `memory_max` bytes in total.
    pub(super) fn new(memory_max: u64) -> Self {
        let meter = MemoryMeter::new(memory_max / MEMORY_SHARE);
        Self { meter, regions: Vec::new(), lost: BTreeMap::new() }
    }

    /// Bytes of chunks of unauthenticated paths. The chunks are short-lived, so they do not reduce
    /// the memory of other sessions.
    pub(super) fn bytes(&self) -> u64 {
        self.meter.used()
    }

    /// Counts the memory of a path whose client has not authenticated yet.
    pub(super) fn count(&mut self, key: PathKey, source: Source, region: &Arc<Region>) {
        self.regions.retain(|(_, _, region)| region.strong_count() > 0);
        region.count_for(&self.meter);
        self.regions.push((key, source, Arc::downgrade(region)));
    }

    /// Moves the memory of a path to `meter` when its client has authenticated.
    pub(super) fn proved(&mut self, path: &PathShared, meter: &Arc<MemoryMeter>) {
        self.regions.retain(|(key, ..)| *key != path.key);
        path.chunks.get().into_iter().for_each(|pool| pool.region().count_for(meter));
    }

    /// Records the end of a path. The source of an authenticated client stays known for a while.
    pub(super) fn ended(&mut self, path: &Path, end: &PathEnd, now: Instant) {
        let session = path.shared().session.id;
        if matches!(end, PathEnd::NotAllowed | PathEnd::Unknown | PathEnd::Evicted) {
            return self.lost.retain(|(_, id), _| *id != session);
        }
        if !has_proved(path) {
            return;
        }
        self.lost.retain(|_, at| now.since(*at) < LOST_FOR);
        self.lost.insert((source_of(path), session), now);
        if self.lost.len() > LOST_MAX {
            let oldest = self.lost.iter().min_by_key(|(_, at)| **at).map(|(of, _)| *of);
            oldest.map(|of| self.lost.remove(&of));
        }
    }

    /// Sources that are known for the session `of`, or for any session if `of` is None.
    fn known(&self, of: Option<SessionId>, registry: &Registry, now: Instant) -> Known {
        let paths = registry.paths().filter(|path| {
            let counts = of.is_none_or(|id| path.shared().session.id == id);
            counts && has_proved(path) && path.state().may_begin()
        });
        let lost = self
            .lost
            .iter()
            .filter(|((_, id), at)| of.is_none_or(|of| of == *id) && now.since(**at) < LOST_FOR);
        let lost = lost.map(|((source, _), _)| *source);
        Known { sources: paths.map(source_of).chain(lost).collect(), stay: of.is_some() }
    }

    /// Selects the paths that must end to make room for a path whose client must authenticate.
    pub(super) fn room(
        &self,
        newcomer: Newcomer,
        registry: &Registry,
        now: Instant,
    ) -> Result<Vec<PathKey>, Refusal> {
        let Newcomer { session, source, bytes } = newcomer;
        let paths = || registry.paths_of(session);
        let known = self.known(Some(session), registry, now);
        let limit = UNPROVED_MAX as u64 * if known.has(source) { 2 } else { 1 };
        let refusal = Refusal::UnprovedPaths(paths().filter(|path| path.is_unproved()).count());
        let mut places = Places::of(paths(), |_| 1, now);
        let demand = Demand { source, amount: 1, limit };
        let mut ended = places.room(demand, &known, now).ok_or(refusal)?;
        if bytes == 0 {
            return Ok(ended);
        }
        let known = self.known(None, registry, now);
        let mut places = self.memory(registry, now);
        ended.iter().for_each(|key| places.end(*key));
        let refusal = Refusal::UnprovedMemory(places.live + places.ending);
        let demand = Demand { source, amount: bytes, limit: self.meter.max() };
        ended.extend(places.room(demand, &known, now).ok_or(refusal)?);
        Ok(ended)
    }

    /// Memory use by source.
    fn memory(&self, registry: &Registry, now: Instant) -> Places {
        let mut places = Places::of(registry.paths(), Path::chunk_bytes, now);
        places.ending = self.meter.used().saturating_sub(places.live);
        let ends = |key| registry.path(key).is_none_or(|path| path.state().is_ending());
        let regions = self.regions.iter().filter(|(_, _, region)| region.strong_count() > 0);
        let ending = regions.filter(|(key, ..)| ends(*key)).map(|(_, source, _)| *source);
        places.ending_from.extend(ending);
        places
    }
}

impl Known {
    fn has(&self, source: Source) -> bool {
        self.sources.contains(&source)
    }
}

impl Places {
    /// Sums the `amount` of unauthenticated paths by source.
    fn of<'a>(
        paths: impl Iterator<Item = &'a Path>,
        amount: impl Fn(&Path) -> u64,
        now: Instant,
    ) -> Self {
        let mut places = Self::default();
        for path in paths.filter(|path| path.is_unproved()) {
            let (source, more) = (source_of(path), amount(path));
            if path.state().is_ending() {
                places.ending += more;
                places.ending_from.insert(source);
                continue;
            }
            places.live += more;
            // Not evicted: the client has authenticated, and the path waits only for older
            // connection attempts to end.
            if more == 0 || path.proving().is_some_and(|proving| proving.waiting().is_some()) {
                continue;
            }
            // The age counts from acceptance, because the client cannot authenticate earlier.
            let since = path.handshake.accepted().unwrap_or(now);
            let share = places.shares.entry(source).or_default();
            share.amount += more;
            share.paths.insert((since, path.key()), more);
        }
        places
    }

    /// Selects the paths that must end so that a demand fits within its limit.
    fn room(&mut self, demand: Demand, known: &Known, now: Instant) -> Option<Vec<PathKey>> {
        let Demand { source, amount, limit } = demand;
        let limit = limit.max(amount);
        // Resources of ending paths may be released late by some drivers. The bound is higher for
        // sources without ending paths, and highest for known sources.
        let bound = match (known.has(source), self.ending_from.contains(&source)) {
            (true, _) => limit * 3,
            (false, false) => limit * 5 / 2,
            (false, true) => limit * 2,
        };
        if self.live + self.ending + amount > bound {
            return None;
        }
        let mut ended = Vec::new();
        while self.live + amount > limit {
            let key = self.next(Demand { limit, ..demand }, known, now)?;
            self.end(key);
            ended.push(key);
        }
        Some(ended)
    }

    /// Selects the next path to evict, if any.
    fn next(&self, demand: Demand, known: &Known, now: Instant) -> Option<PathKey> {
        let Demand { source, amount, limit } = demand;
        let own = self.shares.get(&source).map_or(0, |share| share.amount);
        // Half of the limit, and at least one path, is reserved for known sources.
        let comes_first = known.has(source) && (own == 0 || own + amount <= limit / 2);
        let next = self.shares.iter().filter_map(|(from, share)| {
            let (since, key) = *share.paths.first_key_value()?.0;
            let (has_more, is_late) = (share.amount > own + amount, now.since(since) >= PATIENCE);
            let gives_way = match known.has(*from) {
                true if known.stay => false,
                // Below the age `PATIENCE`, an unknown newcomer evicts a path of a known source
                // only if that source holds more than half of the limit.
                true => is_late || has_more && (known.has(source) || share.amount > limit / 2),
                false => is_late || has_more || comes_first,
            };
            gives_way.then_some(((!known.has(*from), share.amount, Reverse(since)), key))
        });
        next.max_by_key(|(order, _)| *order).map(|(_, key)| key)
    }

    /// Marks a path as ending. Its resources count until the path has ended.
    fn end(&mut self, key: PathKey) {
        for share in self.shares.values_mut() {
            let at = share.paths.keys().find(|(_, path)| *path == key).copied();
            let amount = at.and_then(|at| share.paths.remove(&at)).unwrap_or(0);
            share.amount -= amount;
            self.live -= amount;
            self.ending += amount;
        }
        self.shares.retain(|_, share| !share.paths.is_empty());
    }
}

/// Whether the client of a path has authenticated.
fn has_proved(path: &Path) -> bool {
    !path.is_unproved() && path.shared().identity().who != Who::Anonymous
}

fn source_of(path: &Path) -> Source {
    Source::of(path.shared().origin.peer.ip())
}
