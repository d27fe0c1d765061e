//! Room for paths whose clients have still to prove who they are.
//!
//! Whoever reaches the port can connect them, and whoever knows a session's UUID can connect them
//! to it. So they take no place of paths that have proved something: they are counted by
//! themselves, by session and by the memory of their chunks, which is pinned before the proof. That
//! memory counts until its registration is undone, also when its path is long gone.
//!
//! When there are too many, others give way to a newcomer, the oldest of the source that has most
//! first, until the newcomer fits; if it would not fit then, none does, and it is refused and tries
//! again. They give way if the newcomer's source has less, or after [`PATIENCE`] for what takes an
//! honest client milliseconds. Sources are known if a path from there has proved who its client is,
//! and serves or ended less than [`LOST_FOR`] ago. Others give way to them at once, and they give
//! way last: in their own session never to others. So strangers keep no client from coming back,
//! however many addresses they have.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use rtrs_core::fabric::Who;
use rtrs_core::ids::SessionId;
use rtrs_core::mem::{MemoryMeter, Region};
use rtrs_core::proto::quota::Source;
use rtrs_core::time::{Duration, Instant};

use super::path::Path;
use super::refusal::Refusal;
use super::registry::Registry;
use crate::path::{PathEnd, PathKey, PathShared};

/// Such paths of a session; twice as many for known sources. Not less than an honest client has
/// paths.
pub(super) const UNPROVED_MAX: usize = 32;

/// Of `memory-max`, all such paths together may take one part in so many, and always one path.
const MEMORY_SHARE: u64 = 4;

/// A path that is older gives way also to one of a source that has as many.
const PATIENCE: Duration = Duration::from_secs(1);

/// For so long a source is known whose paths have ended.
const LOST_FOR: Duration = Duration::from_secs(600);
/// Sources with their sessions that are known for that.
const LOST_MAX: usize = 1024;

/// A path that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newcomer {
    pub(super) session: SessionId,
    pub(super) source: Source,
    /// What its chunks take before the proof.
    pub(super) bytes: u64,
}

/// The memory of such paths, and the sources that are known.
#[derive(Debug)]
pub(super) struct Unproved {
    meter: Arc<MemoryMeter>,
    /// All that counts, with its path and where that is from.
    regions: Vec<(PathKey, Source, Weak<Region>)>,
    /// Where paths were that had proved something, and when they ended.
    lost: BTreeMap<(Source, SessionId), Instant>,
}

/// What one source has.
#[derive(Debug, Default)]
struct Share {
    /// Paths, or bytes.
    amount: u64,
    /// Its paths, the oldest first, with what each has of that.
    paths: BTreeMap<(Instant, PathKey), u64>,
}

/// Sources that are known.
struct Known {
    sources: BTreeSet<Source>,
    /// They never give way.
    stay: bool,
}

/// What all sources have.
#[derive(Debug, Default)]
struct Places {
    shares: BTreeMap<Source, Share>,
    live: u64,
    /// Of paths that end, and of those that have ended.
    ending: u64,
    /// Sources of those.
    ending_from: BTreeSet<Source>,
}

impl Unproved {
    /// Of a server with a limit of so many bytes for all chunks.
    pub(super) fn new(memory_max: u64) -> Self {
        let meter = MemoryMeter::new(memory_max / MEMORY_SHARE);
        Self { meter, regions: Vec::new(), lost: BTreeMap::new() }
    }

    /// Bytes of chunks of such paths. They are there for a moment only, so nobody gets less for
    /// them.
    pub(super) fn bytes(&self) -> u64 {
        self.meter.used()
    }

    /// A path has this memory, and has proved nothing yet.
    pub(super) fn count(&mut self, (key, source): (PathKey, Source), region: &Arc<Region>) {
        self.regions.retain(|(_, _, region)| region.strong_count() > 0);
        region.count_for(&self.meter);
        self.regions.push((key, source, Arc::downgrade(region)));
    }

    /// The client of a path has proved who it is: that meter counts its memory now.
    pub(super) fn proved(&mut self, path: &PathShared, meter: &Arc<MemoryMeter>) {
        self.regions.retain(|(key, ..)| *key != path.key);
        path.chunks.get().into_iter().for_each(|pool| pool.region().count_for(meter));
    }

    /// A path ends. Where its client was is known for a while, if the client was.
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

    /// The sources that a session is known by, or any session.
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

    /// What has to end so that a path has room whose client has to prove who it is.
    pub(super) fn room(
        &self,
        newcomer: Newcomer,
        registry: &Registry,
        now: Instant,
    ) -> Result<Vec<PathKey>, Refusal> {
        let Newcomer { session, source, bytes } = newcomer;
        let paths = || registry.paths_of(session);
        let known = self.known(Some(session), registry, now);
        let most = UNPROVED_MAX as u64 * if known.has(source) { 2 } else { 1 };
        let refusal = Refusal::UnprovedPaths(paths().filter(|path| path.is_unproved()).count());
        let mut places = Places::of(paths(), |_| 1, now);
        let mut ended = places.room((source, 1, most), &known, now).ok_or(refusal)?;
        if bytes == 0 {
            return Ok(ended);
        }
        let known = self.known(None, registry, now);
        let mut places = self.memory(registry, now);
        ended.iter().for_each(|key| places.end(*key));
        let refusal = Refusal::UnprovedMemory(places.live + places.ending);
        let asked = (source, bytes, self.meter.max());
        ended.extend(places.room(asked, &known, now).ok_or(refusal)?);
        Ok(ended)
    }

    /// Who has how much memory.
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
    /// Of paths that have proved nothing, each counted as `amount` says.
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
            // One that has proved itself waits for its older connect only.
            if more == 0 || path.proving().is_some_and(|proving| proving.waiting().is_some()) {
                continue;
            }
            // Before that its client can do nothing.
            let since = path.accepted().unwrap_or(now);
            let share = places.shares.entry(source).or_default();
            share.amount += more;
            share.paths.insert((since, path.key()), more);
        }
        places
    }

    /// What has to end so that `more` for a source fits below `most`.
    fn room(
        &mut self,
        (source, more, most): (Source, u64, u64),
        known: &Known,
        now: Instant,
    ) -> Option<Vec<PathKey>> {
        let most = most.max(more);
        // What ends may take some drivers a while. Who has none of it waits for less, and who is
        // known for nobody else.
        let bound = match (known.has(source), self.ending_from.contains(&source)) {
            (true, _) => most * 3,
            (false, false) => most * 5 / 2,
            (false, true) => most * 2,
        };
        if self.live + self.ending + more > bound {
            return None;
        }
        let mut ended = Vec::new();
        while self.live + more > most {
            let key = self.next((source, more, most), known, now)?;
            self.end(key);
            ended.push(key);
        }
        Some(ended)
    }

    /// Which path gives way next, if any does.
    fn next(
        &self,
        (source, more, most): (Source, u64, u64),
        known: &Known,
        now: Instant,
    ) -> Option<PathKey> {
        let own = self.shares.get(&source).map_or(0, |share| share.amount);
        // A known source has half for itself, and at least one path.
        let comes_first = known.has(source) && (own == 0 || own + more <= most / 2);
        let next = self.shares.iter().filter_map(|(from, share)| {
            let (since, key) = *share.paths.first_key_value()?.0;
            let (has_more, is_late) = (share.amount > own + more, now.since(since) >= PATIENCE);
            let gives_way = match known.has(*from) {
                true if known.stay => false,
                // It has half for itself, not all.
                true => is_late || has_more && (known.has(source) || share.amount > most / 2),
                false => is_late || has_more || comes_first,
            };
            gives_way.then_some(((!known.has(*from), share.amount, Reverse(since)), key))
        });
        next.max_by_key(|(order, _)| *order).map(|(_, key)| key)
    }

    /// A path is about to end. What it has counts until it is gone.
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

/// Whether it is known who the client of a path is.
fn has_proved(path: &Path) -> bool {
    !path.is_unproved() && path.shared().identity().who != Who::Anonymous
}

fn source_of(path: &Path) -> Source {
    Source::of(path.shared().origin.peer.ip())
}
