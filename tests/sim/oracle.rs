//! The simulator's oracle: decides what reads may return and what must survive a power cut.
//!
//! Each sector is a separate register. Every write puts its number into all of its sectors, so that
//! a read shows which write it saw. Time is a counter of submissions and completions.
//!
//! **Writes that do not overlap in flight** (the usual run) are checked for linearizability: all
//! operations on a sector must fit a single order in which each takes effect at one point in time
//! between its submission and its completion. The zone of a write extends from the first completion
//! to the last submission of the write and its reads. By Gibbons and Korach (Testing shared
//! memories, 1997), the operations are linearizable if and only if no two forward zones overlap and
//! no backward zone is inside a forward one.
//!
//! **Runs whose writes overlap**: a write may take effect more than once while it is in flight,
//! because it may be replayed. A read may return any write that began before the read ended, unless
//! that write was replaced by another that began after its end and ended before the read began.
//!
//! **While no write is open**, a sector keeps its content, in all runs. A write whose client was
//! killed is open until the server lets the next client write, and is open again once the user
//! repeats it on that client: by then, the dead client's requests have taken effect or never will.
//! From then on it counts as a separate write of the same content.
//!
//! **A write that ended with an error** from the backend may or may not have happened, but if it
//! does, it happens by the time it ends. If `no_path` lets IO end with an error, or the client was
//! killed, the write may happen at any later time, until the server's process ends, the server lets
//! a different session write, or nothing is in flight any more. If neither the disk nor the cores
//! are slow, it may happen only until an IO that its core submitted later has succeeded, because by
//! then the paths on which it was sent are fenced off. In any case, it happens before any write to
//! the same sector that begins after the error was reported: once such a write has been
//! acknowledged or seen, no read that begins afterwards sees the failed write.
//!
//! **A power cut** may leave in a sector any write that no durable write has replaced. A write is
//! durable if it was acknowledged with FUA, or before the start of a flush that was itself
//! acknowledged before the cut. A flush is checked against the writes that were acknowledged before
//! it began, even if the power failed in between, until a failed flush has reported the loss; a
//! flush may fail for no other reason. If a different user follows a killed client, no client is
//! left to receive reports of lost writes. If a client takes over from a killed one, its users
//! receive these reports; then a flush may also fail once for a power cut that lost nothing.

mod dropped;
mod losses;
mod truncated;

use std::collections::BTreeMap;

use rtrs_core::time::Instant;

use super::Failure;
use super::disk::SECTOR;

/// Time later than all others.
const OPEN: u64 = u64::MAX;
/// Number of users of a device; losses are reported to each user separately.
pub(super) const USERS: usize = 2;

/// State of a write.
#[derive(Clone, Debug)]
struct Write {
    sector: u32,
    count: u32,
    /// Whether the write leaves zeroes, like some other writes, instead of its number.
    zero: bool,
    start: u64,
    /// Time after which the write can no longer happen; `OPEN` while it may.
    finish: u64,
    acked: bool,
    /// Time at which an error was reported to the user; `OPEN` without an error.
    failed: u64,
    /// Whether the write was submitted and has not ended for its user.
    pending: bool,
    durable: bool,
    /// Whether the client that submitted the write has ended.
    orphan: bool,
    /// Whether the client ended before the write did, and the next client has not been asked to
    /// repeat the write.
    dead: bool,
    /// Whether a `dead` write has happened by now, or will not until the next client is asked to
    /// repeat it.
    parked: bool,
    /// Time at which each user learned that a power cut lost the write: a flush of that user which
    /// begins later does not cover the write. 0 if no client is left to receive the report.
    excused: [Option<u64>; USERS],
    /// Whether the acknowledgement may be one that the server sent before the power failed.
    old: bool,
}

/// Known facts about a write, or about the initial content, on one sector.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    id: u32,
    /// Time before which no part of the write can have happened.
    start: u64,
    read_first: u64,
    read_last: u64,
}

#[derive(Clone, Debug)]
struct Sector {
    clusters: Vec<Cluster>,
    /// Writes that the last power cut may have left; empty before the first cut and once a read has
    /// shown which write it left.
    survivors: Vec<u32>,
    /// Initial content, or the content shown by a read after the last cut.
    initial: Option<u32>,
    /// Time from which `initial` holds: the start or the last cut.
    since: u64,
    /// Content seen while no write was open.
    settled: Option<u32>,
    /// Number of writes that may still happen.
    open: u32,
    /// Time at which a write last began or ended.
    stirred: u64,
}

/// Known facts about a run's disk.
#[derive(Debug)]
pub(super) struct Oracle {
    clock: u64,
    overlap: bool,
    write_cache: bool,
    /// Time of the last power failure.
    last_cut: u64,
    /// For each user, the power cut that a flush has reported, and the time of the report.
    reported: [(u64, u64); USERS],
    /// Whether a client took over from another and cannot know which of the other's writes were
    /// flushed.
    doubt: bool,
    /// Whether messages that a server sent before its power failed may arrive afterwards.
    pub(super) flights: bool,
    /// Maximum number of sectors that the client writes in one request.
    pub(super) part_max: u32,
    writes: Vec<Write>,
    sectors: Vec<Sector>,
    /// Number of pending and open writes per sector, for users that must not overlap.
    busy: Vec<u32>,
    /// Writes that ended with an error, each with the time by which it has happened or never will.
    closing: Vec<(Instant, u32)>,
    /// Start times of the reads in flight.
    reads: BTreeMap<u64, u64>,
    /// Writes left by closed connections (`dropped.rs`).
    dropped: Vec<u32>,
    /// Length of a backing file that was truncated (`truncated.rs`).
    file: truncated::Length,
}

/// Returns the eight bytes that a write repeats in a sector.
fn word(id: u32, sector: u32) -> u64 {
    u64::from(id) << 32 | u64::from(sector)
}

/// Returns the data of a write.
pub(super) fn pattern(id: u32, sector: u32, count: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count as usize * SECTOR);
    for sector in sector..sector + count {
        let word = word(id, sector).to_le_bytes();
        for _ in 0..SECTOR / 8 {
            bytes.extend_from_slice(&word);
        }
    }
    bytes
}

impl Oracle {
    pub(super) fn new(sectors: u32, overlap: bool, write_cache: bool) -> Self {
        let sector = Sector {
            clusters: vec![Cluster { id: 0, start: 0, read_first: OPEN, read_last: 0 }],
            survivors: Vec::new(),
            initial: Some(0),
            since: 0,
            settled: None,
            open: 0,
            stirred: 0,
        };
        let zero = Write {
            sector: 0,
            count: sectors,
            zero: true,
            start: 0,
            finish: 0,
            acked: true,
            failed: OPEN,
            pending: false,
            durable: true,
            orphan: false,
            dead: false,
            parked: false,
            excused: [None; USERS],
            old: false,
        };
        Self {
            clock: 1,
            overlap,
            write_cache,
            last_cut: 0,
            reported: [(0, 0); USERS],
            doubt: false,
            flights: false,
            part_max: u32::MAX,
            writes: vec![zero],
            sectors: vec![sector; sectors as usize],
            busy: vec![0; sectors as usize],
            closing: Vec::new(),
            reads: BTreeMap::new(),
            dropped: Vec::new(),
            file: truncated::Length::default(),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether no write is in flight on these sectors.
    pub(super) fn is_free(&self, sector: u32, count: u32) -> bool {
        self.busy[sector as usize..(sector + count) as usize].iter().all(|&n| n == 0)
    }

    /// Records a submitted write and returns its number.
    pub(super) fn write(&mut self, sector: u32, count: u32, zero: bool) -> u32 {
        let start = self.tick();
        let id = u32::try_from(self.writes.len()).unwrap_or(u32::MAX);
        let (finish, pending) = (OPEN, true);
        self.writes.push(Write {
            sector,
            count,
            zero,
            start,
            finish,
            acked: false,
            failed: OPEN,
            pending,
            durable: false,
            orphan: false,
            dead: false,
            parked: false,
            excused: [None; USERS],
            old: false,
        });
        for at in sector as usize..(sector + count) as usize {
            self.busy[at] += 1;
            let sector = &mut self.sectors[at];
            sector.clusters.push(Cluster { id, start, read_first: OPEN, read_last: 0 });
            sector.open += 1;
            sector.stirred = start;
            sector.settled = None;
        }
        id
    }

    /// Records an acknowledged write.
    pub(super) fn write_acked(&mut self, id: u32, fua: bool) -> Result<(), Failure> {
        if self.may_be_old(id) && !fua {
            self.acked_or_lost(id);
            return Ok(());
        }
        let now = self.tick();
        let write = &mut self.writes[id as usize];
        (write.finish, write.acked, write.pending) = (now, true, false);
        write.durable = fua || !self.write_cache;
        let range = write.sector as usize..(write.sector + write.count) as usize;
        for at in range {
            self.busy[at] -= 1;
            self.sectors[at].open -= 1;
            self.sectors[at].stirred = now;
            self.judge(at, id)?;
        }
        self.acked_over_dropped(id);
        self.judge_acked(id)
    }

    /// Records a write that ended with an error; `over` if it can no longer happen.
    pub(super) fn write_failed(&mut self, id: u32, over: bool) {
        let now = self.tick();
        let write = &mut self.writes[id as usize];
        (write.failed, write.pending, write.dead) = (now, false, false);
        // The write has happened by now or never will, because no other client is asked to repeat
        // it.
        let parked = std::mem::take(&mut write.parked);
        if parked {
            write.finish = now;
        }
        for at in write.sector as usize..(write.sector + write.count) as usize {
            self.busy[at] -= 1;
        }
        if over && !parked {
            self.close(id, now);
        }
    }

    /// Sets the time by which a failed write has happened or never will.
    pub(super) fn close_at(&mut self, at: Instant, id: u32) {
        self.closing.push((at, id));
    }

    /// Closes the writes whose time has passed.
    pub(super) fn close_due(&mut self, now: Instant) {
        while let Some(at) = self.closing.iter().position(|&(at, _)| at <= now) {
            let (_, id) = self.closing.swap_remove(at);
            if self.writes[id as usize].finish == OPEN {
                let tick = self.tick();
                self.close(id, tick);
            }
        }
    }

    /// Closes a write without acknowledgment: it has happened by now or never will.
    fn close(&mut self, id: u32, now: u64) {
        let write = &mut self.writes[id as usize];
        write.finish = now;
        for at in write.sector as usize..(write.sector + write.count) as usize {
            self.sectors[at].open -= 1;
            self.sectors[at].stirred = now;
        }
    }

    /// Records that the client of a write has ended; the next client will be asked to repeat it.
    pub(super) fn write_orphaned(&mut self, id: u32) {
        self.writes[id as usize].dead = true;
    }

    /// Records that the next client is asked to repeat a write that the previous client left.
    pub(super) fn write_again(&mut self, id: u32) {
        let now = self.tick();
        let write = &mut self.writes[id as usize];
        write.dead = false;
        let parked = std::mem::take(&mut write.parked);
        for at in write.sector as usize..(write.sector + write.count) as usize {
            let sector = &mut self.sectors[at];
            sector.open += u32::from(parked);
            (sector.stirred, sector.settled) = (now, None);
            // From now on, the write may happen again. Its earlier effect has already been checked.
            for cluster in sector.clusters.iter_mut().filter(|cluster| cluster.id == id) {
                (cluster.start, cluster.read_first, cluster.read_last) = (now, OPEN, 0);
            }
        }
    }

    /// Closes all writes that ended with an error, and parks those of dead clients. They have
    /// happened by now or never will, because the server's process ended, or the server let the
    /// next client write, or nothing is in flight anywhere.
    pub(super) fn settle(&mut self) {
        let now = self.tick();
        for id in 1..self.writes.len() {
            let write = &mut self.writes[id];
            let dropped = self.dropped.contains(&(id as u32));
            if write.finish == OPEN && !write.pending && !dropped {
                self.close(u32::try_from(id).unwrap_or(u32::MAX), now);
            } else if write.dead && !write.parked {
                write.parked = true;
                for at in write.sector as usize..(write.sector + write.count) as usize {
                    self.sectors[at].open -= 1;
                    self.sectors[at].stirred = now;
                }
            }
        }
    }

    /// Begins a flush or read and returns its start time.
    pub(super) fn begin(&mut self) -> u64 {
        self.tick()
    }

    /// Begins a read.
    pub(super) fn read(&mut self, tag: u64) {
        let now = self.tick();
        self.reads.insert(tag, now);
    }

    /// Checks a write that a flush made durable, perhaps after a power cut that lost it.
    fn promised(&mut self, id: u32) -> Result<(), Failure> {
        let write = self.writes[id as usize].clone();
        for at in write.sector as usize..(write.sector + write.count) as usize {
            if self.sectors[at].since < write.finish && !write.old {
                continue;
            }
            let writes = &self.writes;
            let replaced = |old: u32| old != id && writes[old as usize].finish < write.start;
            let sector = &mut self.sectors[at];
            sector.survivors.retain(|&old| !replaced(old));
            if let Some(old) = sector.initial.filter(|&old| replaced(old)) {
                let text = format!(
                    "a flush was acknowledged after a power cut that took write {id} from sector \
                     {at}, acknowledged before the flush began: {}; {}",
                    self.explain(at, id),
                    self.explain(at, old)
                );
                return Err(Failure::new("durable", text));
            }
        }
        Ok(())
    }

    /// Ends a read and checks its bytes unless it failed.
    pub(super) fn read_done(
        &mut self,
        tag: u64,
        sector: u32,
        bytes: Option<&[u8]>,
    ) -> Result<(), Failure> {
        let now = self.tick();
        // A read from before a power cut may have seen the state before or after the cut.
        let (Some(start), Some(bytes)) = (self.reads.remove(&tag), bytes) else { return Ok(()) };
        self.judge_end(start, sector, (bytes.len() / SECTOR) as u32)?;
        for (n, content) in (0u32..).zip(bytes.chunks(SECTOR)) {
            let at = sector + n;
            match self.identify(at, content)? {
                0 => self.saw_zeroes(at as usize, start, now)?,
                id => self.saw(at as usize, id, start, now)?,
            }
        }
        self.end_dropped(start, sector, (bytes.len() / SECTOR) as u32);
        Ok(())
    }

    /// Returns the write that a sector's bytes came from.
    fn identify(&self, sector: u32, content: &[u8]) -> Result<u32, Failure> {
        let mut words = content.chunks(8).map(|chunk| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(chunk);
            u64::from_le_bytes(bytes)
        });
        let first = words.next().unwrap_or(0);
        if let Some(other) = words.find(|word| *word != first) {
            return Err(Failure::new(
                "blocks",
                format!("sector {sector} is torn: it holds {first:#x} and {other:#x}"),
            ));
        }
        let id = u32::try_from(first >> 32).unwrap_or(u32::MAX);
        let known = self.writes.get(id as usize);
        let fits = known.is_some_and(|w| w.sector <= sector && sector < w.sector + w.count);
        if first != 0 && (first != word(id, sector) || id == 0 || !fits) {
            return Err(Failure::new(
                "blocks",
                format!("sector {sector} holds {first:#x}, which was never written there"),
            ));
        }
        Ok(id)
    }

    /// Handles a read of zeroes, which any of several writes may have left. The read is legal if it
    /// fits one of these writes, and tells the oracle something only if it fits just one.
    fn saw_zeroes(&mut self, at: usize, start: u64, now: u64) -> Result<(), Failure> {
        let sector = &self.sectors[at];
        let ids = sector.clusters.iter().map(|cluster| cluster.id).chain(sector.survivors.clone());
        let mut ids: Vec<u32> = ids.filter(|&id| self.writes[id as usize].zero).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut first_failure = None;
        if ids.len() > 1 {
            let saved = self.sectors[at].clone();
            ids.retain(|&id| {
                let result = self.saw(at, id, start, now);
                self.sectors[at] = saved.clone();
                let fits = result.is_ok();
                first_failure = first_failure.take().or_else(|| result.err());
                fits
            });
        }
        match (ids.as_slice(), first_failure) {
            ([], Some(failure)) => Err(failure),
            // No write left zeroes, so this is the initial content, if it is still in place.
            ([], None) => self.saw(at, 0, start, now),
            ([id], _) => self.saw(at, *id, start, now),
            _ => Ok(()),
        }
    }

    /// Records that a read from `start` to `now` saw a write in a sector.
    fn saw(&mut self, at: usize, id: u32, start: u64, now: u64) -> Result<(), Failure> {
        let sector = &mut self.sectors[at];
        let found = sector.clusters.iter_mut().find(|cluster| cluster.id == id);
        let cluster = match found {
            Some(cluster) => cluster,
            None => {
                if let Some(initial) = sector.initial {
                    return Err(Failure::new(
                        "blocks",
                        format!(
                            "sector {at} holds write {id} from before the power cut; after the \
                             cut it held write {initial}"
                        ),
                    ));
                }
                if !sector.survivors.contains(&id) {
                    let text = self.explain(at, id);
                    return Err(Failure::new(
                        "durable",
                        format!(
                            "after a power cut sector {at} holds write {id}, which a durable \
                             write had replaced: {text}"
                        ),
                    ));
                }
                let since = sector.since;
                sector.initial = Some(id);
                sector.survivors.clear();
                sector.clusters.push(Cluster { id, start: since, read_first: OPEN, read_last: 0 });
                let last = sector.clusters.len() - 1;
                &mut sector.clusters[last]
            }
        };
        cluster.read_first = cluster.read_first.min(now);
        cluster.read_last = cluster.read_last.max(start);
        if self.overlap {
            self.judge_overlap(at, id, start)?;
        } else {
            self.judge(at, id)?;
        }
        self.judge_failed(at, id, start)?;
        self.judge_rest(at, id, start)
    }

    /// Returns when a write on a sector ended, but no earlier than the sector's last power cut.
    fn finish(&self, at: usize, id: u32) -> u64 {
        let finish = self.writes[id as usize].finish;
        if finish == OPEN { OPEN } else { finish.max(self.sectors[at].since) }
    }

    /// Returns the zone of a cluster, if the write has certainly happened.
    fn zone(&self, at: usize, cluster: &Cluster) -> Option<(u64, u64)> {
        let write = &self.writes[cluster.id as usize];
        let happened = write.acked || cluster.read_first != OPEN;
        let first = self.finish(at, cluster.id).min(cluster.read_first);
        let last = cluster.start.max(cluster.read_last);
        happened.then_some((first, last))
    }

    /// Checks one write to a sector against all others to that sector.
    fn judge(&self, at: usize, id: u32) -> Result<(), Failure> {
        if self.overlap {
            return Ok(());
        }
        let sector = &self.sectors[at];
        let own = sector.clusters.iter().find(|cluster| cluster.id == id);
        let Some((first, last)) = own.and_then(|cluster| self.zone(at, cluster)) else {
            return Ok(());
        };
        for other in sector.clusters.iter().filter(|other| other.id != id) {
            let Some((from, to)) = self.zone(at, other) else { continue };
            let clash = match (first < last, from < to) {
                (true, true) => first < to && from < last,
                (true, false) => first < to && from < last,
                (false, true) => from < last && first < to,
                (false, false) => false,
            };
            if clash && !self.may_repeat_after_cut(id, other.id) {
                return Err(Failure::new(
                    "blocks",
                    format!(
                        "sector {at}: no order of the operations explains what was read of \
                         writes {id} and {}: {}; {}",
                        other.id,
                        self.explain(at, id),
                        self.explain(at, other.id)
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Checks a read from `start` that saw a write, in a run whose writes overlap.
    fn judge_overlap(&mut self, at: usize, id: u32, start: u64) -> Result<(), Failure> {
        let finish = self.finish(at, id);
        let newer = self.sectors[at].clusters.iter().find(|other| {
            let write = &self.writes[other.id as usize];
            write.acked && finish < other.start && write.finish < start
        });
        if let Some(newer) = newer {
            let text = format!(
                "sector {at} returned a write after it was replaced: {}; {}",
                self.explain(at, id),
                self.explain(at, newer.id)
            );
            return Err(Failure::new("blocks", text));
        }
        Ok(())
    }

    /// Checks a read from `start` that saw a write: if the write had failed, no newer write may
    /// have been seen before.
    fn judge_failed(&self, at: usize, id: u32, start: u64) -> Result<(), Failure> {
        let failed = self.writes[id as usize].failed;
        // A write that is in flight when the power is cut may be lost.
        let known = failed.max(self.sectors[at].since);
        let newer = self.sectors[at].clusters.iter().find(|other| {
            let acked = self.writes[other.id as usize].acked;
            let end = if acked { self.finish(at, other.id) } else { OPEN };
            known < other.start && end.min(other.read_first) < start
        });
        match newer {
            None => Ok(()),
            Some(newer) => {
                let text = format!(
                    "sector {at} returned a write that had failed at {failed}, after one that \
                     began later: {}; {}",
                    self.explain(at, id),
                    self.explain(at, newer.id)
                );
                Err(Failure::new("blocks", text))
            }
        }
    }

    /// Checks a read from `start` that saw a write: while no write is open, the content must not
    /// change.
    fn judge_rest(&mut self, at: usize, id: u32, start: u64) -> Result<(), Failure> {
        let content = if self.writes[id as usize].zero { 0 } else { id };
        let sector = &mut self.sectors[at];
        if sector.open == 0 && sector.stirred < start {
            let before = *sector.settled.get_or_insert(content);
            if before != content {
                let text = format!(
                    "sector {at} changed while no write was open: {}; {}",
                    self.explain(at, before),
                    self.explain(at, id)
                );
                return Err(Failure::new("blocks", text));
            }
        }
        Ok(())
    }

    /// Records a power failure. `settle` must be called first. A write in flight may have happened
    /// before the cut or happen after it, so it counts as begun at the cut, in addition to the
    /// content that the cut left.
    pub(super) fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        self.last_cut = now;
        self.excuse(0..USERS, 0, |write| write.orphan);
        for at in 0..self.sectors.len() {
            let mut candidates = self.sectors[at].survivors.clone();
            candidates.extend(self.sectors[at].clusters.iter().map(|cluster| cluster.id));
            let durable: Vec<u32> = candidates
                .iter()
                .copied()
                .filter(|&id| {
                    self.writes[id as usize].durable || self.sectors[at].initial == Some(id)
                })
                .collect();
            let replaced = |id: u32| {
                let finish = self.finish(at, id);
                durable.iter().any(|&d| finish < self.writes[d as usize].start && d != id)
            };
            let survivors = candidates.iter().copied().filter(|&id| !replaced(id)).collect();
            let writes = &self.writes;
            let sector = &mut self.sectors[at];
            sector.survivors = survivors;
            sector.clusters.retain(|cluster| writes[cluster.id as usize].pending);
            for cluster in &mut sector.clusters {
                (cluster.read_first, cluster.read_last) = (OPEN, 0);
                cluster.start = cluster.start.max(now);
            }
            (sector.initial, sector.since, sector.settled) = (None, now, None);
            sector.stirred = now;
        }
    }

    fn explain(&self, at: usize, id: u32) -> String {
        let write = &self.writes[id as usize];
        let finish = match write.finish {
            OPEN => "open".to_owned(),
            finish => finish.to_string(),
        };
        let how = match (write.acked, write.pending) {
            (true, _) => "acknowledged",
            (false, true) => "in flight",
            (false, false) => "failed",
        };
        let durable = if write.durable { ", durable" } else { "" };
        let cluster = self.sectors[at].clusters.iter().find(|cluster| cluster.id == id);
        let reads = match cluster {
            Some(cluster) if cluster.read_first != OPEN => {
                format!(", reads ended {} .. began {}", cluster.read_first, cluster.read_last)
            }
            _ => String::new(),
        };
        format!("write {id} [{}..{finish}] {how}{durable}{reads}", write.start)
    }
}
