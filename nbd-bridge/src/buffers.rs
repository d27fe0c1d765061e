//! Buffers of one bridge: reference-counted parts of its share of a pool in one registered region.
//!
//! A connection receives into a buffer of its own. The payload of a write is submitted to the
//! device where it was received, and the buffer is returned when the last such write is done. A
//! connection's small reads share a buffer and are carved from it one after another. After startup
//! this module allocates nothing.
//!
//! Only reads can hold memory for as long as a client likes. Therefore one receive buffer and a
//! first read buffer are reserved for every connection; beyond these, a connection may hold as many
//! buffers as remain free. When bridges of other devices use the same pool (`buffer_pool`), that
//! reserve covers only as many connections as the bridge's own share has room for. A bridge that
//! gets no buffers for a while because others hold the memory switches to a share of another pool.

use std::io;
use std::sync::Arc;

use rtrs_core::mem::{MemSlice, Region};

pub(crate) use crate::buffer_pool::BUFFER_LEN;
use crate::buffer_pool::{BufferPools, Share};
use crate::proto::wire::{CHUNK_MAX, MIN_BLOCK_MAX};

/// Maximum number of bytes of one read or write in one buffer.
pub(crate) const PART_MAX: usize = 256 * 1024;
/// Maximum number of bytes of memory that a read takes at a time: the data of one chunk, and the
/// rest of the blocks at its ends. A longer read is done piece by piece.
pub(crate) const PIECE_MAX: usize = CHUNK_MAX as usize + 2 * MIN_BLOCK_MAX as usize;
/// Bit position of the share's index in a buffer number.
const SHARE_SHIFT: u32 = 24;
/// Maximum number of shares of a bridge. Each one beyond the first was added because others held
/// the memory.
const SHARES_MAX: usize = 8;
/// Maximum length of a read that shares a buffer.
const SMALL_MAX: usize = PART_MAX / 2;

/// Part of a buffer, with a reference to that buffer.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) buffer: u32,
    pub(crate) slice: MemSlice,
}

/// Memory held by the reads of one connection.
#[derive(Debug, Default)]
pub(crate) struct ReadMemory {
    /// Buffer from which small reads are carved, and the number of bytes used.
    cut: Option<(u32, usize)>,
    /// Number of buffers held, including the one above.
    held: usize,
}

impl ReadMemory {
    /// Whether no buffer is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Number of buffers held.
    pub(crate) fn held(&self) -> usize {
        self.held
    }
}

/// A bridge's shares of pools, and the reserves for its connections.
#[derive(Debug)]
pub(crate) struct Buffers {
    pools: BufferPools,
    /// Number of buffers in a pool.
    count: u32,
    /// Shares, indexed by the high part of a buffer number. All but the current share have buffers
    /// in use.
    shares: Vec<Option<Share>>,
    current: usize,
    /// Bytes populated with physical memory.
    touched: usize,
    connections_max: usize,
    /// Number of connections with a receive buffer, and of connections that hold memory for reads.
    receivers: usize,
    readers: usize,
    /// Whether a request for memory has failed since the last query because others hold the memory.
    squeezed: bool,
}

impl Buffers {
    /// Takes a share of a pool of at least `bytes`, for at most `connections_max` connections.
    ///
    /// # Errors
    /// `InvalidInput` when a request of `payload_max` bytes might never fit alongside the
    /// connections; the system's error when memory is refused.
    pub(crate) fn new(
        pools: &BufferPools,
        bytes: usize,
        connections_max: usize,
        payload_max: usize,
    ) -> io::Result<Self> {
        let piece = PIECE_MAX.min(payload_max + 2 * MIN_BLOCK_MAX as usize);
        let least = piece.div_ceil(PART_MAX) + 2 * connections_max;
        if bytes.div_ceil(BUFFER_LEN) < least {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{bytes} bytes is not enough buffer space: {connections_max} connections and \
                     requests of {payload_max} bytes need {}",
                    least * BUFFER_LEN
                ),
            ));
        }
        let count = u32::try_from(bytes.div_ceil(BUFFER_LEN)).unwrap_or(u32::MAX);
        let (pools, shares) = (pools.clone(), vec![Some(pools.join(count, &[])?)]);
        let (current, touched, receivers, readers, squeezed) = (0, 0, 0, 0, false);
        Ok(Self {
            pools,
            count,
            shares,
            current,
            touched,
            connections_max,
            receivers,
            readers,
            squeezed,
        })
    }

    /// Returns the share from which buffers are taken.
    fn share(&self) -> &Share {
        self.share_at(self.current)
    }

    fn share_at(&self, at: usize) -> &Share {
        self.shares[at].as_ref().unwrap_or_else(|| panic!("share {at} was released"))
    }

    /// Returns a buffer's share, and its index in that share.
    fn place(&self, buffer: u32) -> (&Share, u32) {
        (self.share_at((buffer >> SHARE_SHIFT) as usize), buffer & ((1 << SHARE_SHIFT) - 1))
    }

    /// Takes a whole buffer with a reference count of one.
    fn take(&mut self) -> Option<u32> {
        let taken = self.share().take();
        self.squeezed |= taken.is_none() && self.is_squeezed(1);
        let share = u32::try_from(self.current).unwrap_or(u32::MAX);
        taken.map(|index| share << SHARE_SHIFT | index)
    }

    /// Returns the region from which buffers are taken.
    pub(crate) fn region(&self) -> &Arc<Region> {
        self.share().region()
    }

    /// Populates the first `bytes` of the buffers for this bridge with physical memory.
    pub(crate) fn touch(&mut self, bytes: usize) {
        self.touched = bytes;
        if let Some(share) = &mut self.shares[self.current] {
            share.touch(bytes);
        }
    }

    /// Whether `count` buffers are unavailable because others hold them, rather than because this
    /// bridge already holds more than its guaranteed number.
    fn is_squeezed(&self, count: usize) -> bool {
        let (share, own) = (self.share(), self.share().held().saturating_sub(self.receivers));
        let alone = share.guaranteed() == share.capacity();
        !alone && share.room() < count && own <= share.guaranteed()
    }

    /// Whether others have held needed memory since the last call.
    pub(crate) fn was_squeezed(&mut self) -> bool {
        std::mem::take(&mut self.squeezed)
    }

    /// Takes a share of a pool in which this bridge has no share yet. Returns None if the bridge
    /// already has the maximum number of shares.
    ///
    /// # Errors
    /// The system's error when memory is refused.
    pub(crate) fn another_share(&self) -> io::Result<Option<Share>> {
        let has_place = self.shares.len() < SHARES_MAX || self.shares.iter().any(Option::is_none);
        has_place.then(|| self.pools.join(self.count, &self.shares)).transpose()
    }

    /// Switches to taking buffers from `share`. Buffers in use are returned to their own share.
    pub(crate) fn switch_to(&mut self, share: Share) {
        let before = self.current;
        self.current = self.shares.iter().position(Option::is_none).unwrap_or_else(|| {
            self.shares.push(None);
            self.shares.len() - 1
        });
        self.shares[self.current] = Some(share);
        self.touch(self.touched);
        self.release_unused(before);
    }

    /// Releases a share that is not the current one, once none of its buffers is in use.
    fn release_unused(&mut self, at: usize) {
        if at != self.current && self.share_at(at).held() == 0 {
            self.shares[at] = None;
        }
    }

    /// Number of connections for which two buffers are reserved: all possible connections, unless
    /// other bridges use the pool.
    fn kept(&self) -> usize {
        match self.share().guaranteed() {
            all if all == self.share().capacity() => self.connections_max,
            guaranteed => (guaranteed / 4).clamp(1, self.connections_max),
        }
    }

    /// Maximum length, in bytes, of a read piece that is eventually given memory regardless of what
    /// other bridges do.
    pub(crate) fn guaranteed_piece(&self) -> usize {
        let buffers = self.share().guaranteed().saturating_sub(2 * self.kept()).max(1);
        PIECE_MAX.min(buffers * PART_MAX)
    }

    /// Maximum length, in bytes, of a read piece for which a connection that holds no memory could
    /// get memory right now.
    pub(crate) fn available_piece(&self) -> usize {
        let kept = self.kept();
        let free = self.share().room().saturating_sub(kept.saturating_sub(self.receivers));
        PIECE_MAX.min(free.saturating_sub(kept.saturating_sub(self.readers)).max(1) * PART_MAX)
    }

    /// Takes a receive buffer for a new connection.
    pub(crate) fn take_receiver(&mut self) -> Option<u32> {
        let buffer = self.take()?;
        self.receivers += 1;
        Some(buffer)
    }

    /// Releases a connection's receive buffer.
    pub(crate) fn release_receiver(&mut self, buffer: u32) {
        self.receivers -= 1;
        self.release(buffer);
    }

    /// Replaces buffer `old` with a fresh one that starts with the `len` bytes at `from`.
    pub(crate) fn exchange(&mut self, old: u32, from: usize, len: usize) -> Option<u32> {
        let fresh = self.take()?;
        self.copy((old, from), (fresh, 0), len);
        self.release(old);
        Some(fresh)
    }

    /// Adds a reference.
    pub(crate) fn hold(&mut self, index: u32) {
        let (share, index) = self.place(index);
        share.hold(index);
    }

    /// Drops a reference; the last one frees the buffer. Returns true if it was the last.
    pub(crate) fn release(&mut self, index: u32) -> bool {
        let (share, at) = self.place(index);
        let last = share.release(at);
        if last {
            self.release_unused((index >> SHARE_SHIFT) as usize);
        }
        last
    }

    /// Returns a part of a buffer.
    pub(crate) fn slice(&self, index: u32, from: usize, len: usize) -> MemSlice {
        assert!(from + len <= BUFFER_LEN, "{from}+{len} is outside a buffer");
        let (share, at) = self.place(index);
        share
            .region()
            .slice(at as usize * BUFFER_LEN + from, len)
            .unwrap_or_else(|| panic!("buffer {index} is outside the pool"))
    }

    /// Copies bytes out of a buffer.
    pub(crate) fn copy_out(&self, index: u32, from: usize, to: &mut [u8]) {
        assert!(from + to.len() <= BUFFER_LEN, "{from}+{} is outside a buffer", to.len());
        let (share, index) = self.place(index);
        share.region().copy_out(index as usize * BUFFER_LEN + from, to);
    }

    /// Whether the caller holds the only reference.
    pub(crate) fn is_sole_holder(&self, index: u32) -> bool {
        let (share, index) = self.place(index);
        share.is_sole_holder(index)
    }

    /// Moves bytes between two buffers, or within one.
    pub(crate) fn copy(&self, from: (u32, usize), to: (u32, usize), len: usize) {
        assert!(from.1 + len <= BUFFER_LEN && to.1 + len <= BUFFER_LEN, "outside a buffer");
        let ((source, from_at), (target, to_at)) = (self.place(from.0), self.place(to.0));
        target.region().copy_from(
            to_at as usize * BUFFER_LEN + to.1,
            source.region(),
            from_at as usize * BUFFER_LEN + from.1,
            len,
        );
    }

    /// Allocates memory for a read of `len` bytes and appends it to `parts`: all or nothing.
    /// Returns false if there is not enough now, or if another connection is waiting for memory and
    /// this would not be the connection's first buffer.
    pub(crate) fn take_read(
        &mut self,
        len: usize,
        others_first: bool,
        memory: &mut ReadMemory,
        parts: &mut Vec<Part>,
    ) -> bool {
        if len <= SMALL_MAX {
            return self.take_small(len, others_first, memory, parts);
        }
        let count = len.div_ceil(PART_MAX);
        if !self.may_take(count, others_first, memory) {
            self.squeezed |= self.is_squeezed(count);
            return false;
        }
        let (mut left, before) = (len, parts.len());
        for _ in 0..count {
            let Some(buffer) = self.take_for(memory) else {
                for part in parts.drain(before..) {
                    self.release_read(part.buffer, memory);
                }
                return false;
            };
            let part = left.min(PART_MAX);
            parts.push(Part { buffer, slice: self.slice(buffer, 0, part) });
            left -= part;
        }
        true
    }

    fn take_small(
        &mut self,
        len: usize,
        others_first: bool,
        memory: &mut ReadMemory,
        parts: &mut Vec<Part>,
    ) -> bool {
        let aligned = len.next_multiple_of(512);
        if let Some((buffer, used)) = memory.cut {
            // No other holder: start over at the beginning, which is the warmest memory.
            let used = if self.is_sole_holder(buffer) { 0 } else { used };
            if used + aligned <= BUFFER_LEN {
                memory.cut = Some((buffer, used + aligned));
                self.hold(buffer);
                parts.push(Part { buffer, slice: self.slice(buffer, used, len) });
                return true;
            }
            // The buffer is full and held by its reads.
            self.drop_cut(memory);
        }
        if !self.may_take(1, others_first, memory) {
            self.squeezed |= self.is_squeezed(1);
            return false;
        }
        let Some(buffer) = self.take_for(memory) else { return false };
        memory.cut = Some((buffer, aligned));
        self.hold(buffer);
        parts.push(Part { buffer, slice: self.slice(buffer, 0, len) });
        true
    }

    fn may_take(&self, count: usize, others_first: bool, memory: &ReadMemory) -> bool {
        let kept = self.kept();
        let free = self.share().room().saturating_sub(kept.saturating_sub(self.receivers));
        if memory.is_empty() && count == 1 && (!others_first || self.readers < kept) {
            return free >= 1;
        }
        let free = free.saturating_sub(kept.saturating_sub(self.readers));
        !others_first && count <= free && (memory.is_empty() || memory.held + count <= free)
    }

    /// Takes a buffer that [`Buffers::may_take`] promised.
    fn take_for(&mut self, memory: &mut ReadMemory) -> Option<u32> {
        let buffer = self.take();
        debug_assert!(buffer.is_some(), "fewer buffers than counted");
        let buffer = buffer?;
        if memory.is_empty() {
            self.readers += 1;
        }
        memory.held += 1;
        Some(buffer)
    }

    /// Releases a read's reference to a buffer.
    pub(crate) fn release_read(&mut self, buffer: u32, memory: &mut ReadMemory) {
        if self.release(buffer) {
            memory.held -= 1;
            if memory.is_empty() {
                self.readers -= 1;
            }
        }
    }

    /// Releases the small-read buffer of a connection that has no reads in progress.
    pub(crate) fn drop_cut(&mut self, memory: &mut ReadMemory) {
        if let Some((buffer, _)) = memory.cut.take() {
            self.release_read(buffer, memory);
        }
    }

    /// Number of buffers held by the bridge.
    pub(crate) fn held(&self) -> usize {
        self.shares.iter().flatten().map(Share::held).sum()
    }

    /// Number of connections with a receive buffer.
    pub(crate) fn receivers(&self) -> usize {
        self.receivers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pools: &BufferPools, count: usize, connections_max: usize) -> io::Result<Buffers> {
        Buffers::new(pools, BUFFER_LEN * count, connections_max, PART_MAX)
    }

    fn buffers(count: usize, connections_max: usize) -> Buffers {
        of(&BufferPools::default(), count, connections_max).unwrap()
    }

    #[test]
    fn small_reads_share_a_buffer_and_release_it() {
        let mut buffers = buffers(4, 1);
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        for _ in 0..65 {
            assert!(buffers.take_read(4096, false, &mut memory, &mut parts));
        }
        assert_eq!((buffers.held(), memory.held()), (1, 1), "65 reads fit in one buffer");
        assert_eq!(parts[1].slice.offset() - parts[0].slice.offset(), 4096);
        assert!(buffers.take_read(4096, false, &mut memory, &mut parts));
        assert_eq!((buffers.held(), memory.held()), (2, 2));
        for part in parts.drain(..) {
            buffers.release_read(part.buffer, &mut memory);
        }
        assert_eq!((buffers.held(), memory.held()), (1, 1), "one is kept for small reads");
        buffers.drop_cut(&mut memory);
        assert_eq!((buffers.held(), memory.held(), buffers.readers), (0, 0, 0));
    }

    #[test]
    fn a_large_read_gets_all_or_nothing() {
        let mut buffers = buffers(5, 1);
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        assert!(!buffers.take_read(PART_MAX * 3 + 1, false, &mut memory, &mut parts));
        assert!(parts.is_empty() && memory.is_empty());
        assert!(buffers.take_read(PART_MAX * 2 + 1, false, &mut memory, &mut parts));
        assert_eq!(parts.iter().map(|p| p.slice.len()).sum::<usize>(), PART_MAX * 2 + 1);
    }

    #[test]
    fn each_connection_gets_its_first_buffers_despite_others() {
        let mut buffers = buffers(40, 8);
        let mut greedy: Vec<_> = (0..7).map(|_| (ReadMemory::default(), Vec::new())).collect();
        let mut progress = true;
        while progress {
            progress = false;
            for (memory, parts) in &mut greedy {
                progress |= buffers.take_read(PART_MAX, false, memory, parts);
            }
        }
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        assert!(buffers.take_read(PART_MAX, true, &mut memory, &mut parts));
        for _ in 0..8 {
            assert!(buffers.take_receiver().is_some());
        }
    }

    #[test]
    fn touched_buffers_are_taken_first() {
        let mut buffers = buffers(6, 1);
        buffers.region().fill(0, 6 * BUFFER_LEN, 7);
        buffers.touch(BUFFER_LEN + 1);
        assert_eq!(buffers.held(), 0);
        let first = |buffers: &Buffers, index| {
            let mut byte = [0];
            buffers.copy_out(index, BUFFER_LEN - 1, &mut byte);
            byte[0]
        };
        let taken: Vec<u32> = (0..6).filter_map(|_| buffers.take()).collect();
        let touched: Vec<u8> = taken.iter().map(|&index| first(&buffers, index)).collect();
        assert_eq!(touched, [0, 0, 7, 7, 7, 7]);
        buffers.touch(usize::MAX);
    }

    #[test]
    fn too_little_memory_is_refused_at_start() {
        let pools = BufferPools::default();
        assert!(of(&pools, 3, 1).is_err());
        assert!(of(&pools, 4, 1).is_ok());
        // A longer read is done in pieces.
        let piece = BUFFER_LEN * (PIECE_MAX.div_ceil(PART_MAX) + 2);
        assert!(Buffers::new(&pools, piece, 1, 2 * PIECE_MAX).is_ok());
        assert!(Buffers::new(&pools, piece - BUFFER_LEN, 1, 2 * PIECE_MAX).is_err());
    }

    /// Takes one buffer as a connection's first memory for reads.
    fn reads(buffers: &mut Buffers) -> bool {
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        buffers.take_read(PART_MAX, true, &mut memory, &mut parts)
    }

    #[test]
    fn a_bridge_receives_and_reads_when_others_use_all_buffers() {
        let pools = BufferPools::default();
        let mut greedy = of(&pools, 246, 48).unwrap();
        assert_eq!(
            greedy.guaranteed_piece(),
            PIECE_MAX,
            "without others the longest piece is guaranteed"
        );
        let mut others: Vec<_> = (0..49).map(|_| of(&pools, 246, 48).unwrap()).collect();
        assert!(others.iter().all(|other| other.region().id() == greedy.region().id()));
        while greedy.take().is_some() {}
        assert_eq!(greedy.held(), 246 - 49 * 2, "the others' reserves are left");
        for other in &mut others {
            assert_eq!(other.guaranteed_piece(), PART_MAX, "a long read comes in pieces");
            assert!(other.take_receiver().is_some() && reads(other));
            assert!(other.take().is_none(), "there are no more");
        }
    }

    #[test]
    fn each_of_two_bridges_is_guaranteed_half_its_share() {
        let pools = BufferPools::default();
        let [mut one, mut two] = [0, 1].map(|_| of(&pools, 240, 48).unwrap());
        // Sixty are guaranteed: two for each of fifteen connections, and the rest for a long read.
        assert_eq!(one.guaranteed_piece(), 30 * PART_MAX);
        while one.take().is_some() {}
        assert_eq!((one.held(), two.share().room()), (180, 60));
        for _ in 0..15 {
            assert!(two.take_receiver().is_some());
        }
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        assert!(two.take_read(two.guaranteed_piece(), false, &mut memory, &mut parts));
        for _ in 0..14 {
            assert!(reads(&mut two), "each connection's first");
        }
        // Buffers returned by one bridge are available to the other once the first is within its
        // limit.
        one.release(0);
        assert!(one.take().is_some());
    }

    #[test]
    fn a_long_read_is_served_among_short_ones_while_another_bridge_hangs() {
        let pools = BufferPools::default();
        let [mut one, mut two] = [0, 1].map(|_| of(&pools, 246, 48).unwrap());
        for _ in 0..20 {
            assert!(one.take_receiver().is_some());
        }
        while two.take().is_some() {}
        let mut short = Vec::new();
        for _ in 0..31 {
            let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
            if one.take_read(PART_MAX, false, &mut memory, &mut parts) {
                short.push((memory, parts));
            }
        }
        // The long read waits while short ones keep arriving.
        let (mut memory, mut parts) = (ReadMemory::default(), Vec::new());
        let mut turns = 0;
        while !one.take_read(8 * PART_MAX, false, &mut memory, &mut parts) {
            let (mut own, mut its) = short.remove(0);
            for part in its.drain(..) {
                one.release_read(part.buffer, &mut own);
            }
            if !one.take_read(8 * PART_MAX, false, &mut memory, &mut parts)
                && one.take_read(PART_MAX, true, &mut own, &mut its)
            {
                short.push((own, its));
            }
            turns += 1;
            assert!(turns < 1000, "starved");
        }
    }
}
