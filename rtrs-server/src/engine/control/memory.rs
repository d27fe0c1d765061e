//! The memory limit for chunks (`memory-max`), and the queue depth of a new session.
//!
//! A new session is given the server's depth if a path of that depth fits into the remaining
//! memory, otherwise half that depth, and so on; a client that cannot use a smaller depth is
//! refused. `rtrs-core/base/src/mem/usage.rs` defines what counts: over TCP the chunks that peers
//! have written to, over RDMA all chunks. The limit therefore applies to new sessions and does not
//! bound the server's memory: existing sessions may still write to chunks that they have never
//! used. A session may have as many simultaneous paths as it had before, and their memory stays
//! reserved until the session ends, regardless of what else is admitted: a failed path can always
//! reconnect. For one more path, all chunks of the session must fit in addition to what others use,
//! so no session uses more than the limit.
//!
//! A session keeps its depth as long as either end remembers it: the client repeats it to a
//! restarted server. Owned by the control shard.

use std::sync::Arc;

use rtrs_core::limits::Limits;
use rtrs_core::mem::MemoryMeter;
use rtrs_core::wire::{ClientExtensions, ConnReq};

use crate::engine::control::refusal::Refusal;
use crate::path::chunks::ChunkPool;
use crate::stats::MemorySnapshot;

/// Minimum depth given to a session, unless the server is configured for less; below it, the
/// session is refused.
const DEPTH_MIN: u16 = 16;

/// Memory of a session that requests an additional path.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionMemory {
    /// Number of paths that the session has.
    pub(super) paths: usize,
    /// Number of bytes in a path's chunks.
    pub(super) path_bytes: u64,
    /// Bytes of the session's chunks that count against the limit.
    pub(super) used: u64,
    /// Bytes that other sessions may need for paths that they once had.
    pub(super) reserved_by_others: u64,
}

/// Accounting of chunk memory.
#[derive(Debug)]
pub(super) struct Memory {
    meter: Arc<MemoryMeter>,
}

impl Memory {
    /// Creates the accounting with a limit of `max` bytes.
    pub(super) fn new(max: u64) -> Self {
        Self { meter: MemoryMeter::new(max) }
    }

    /// Meter for chunk memory, except the memory of paths whose clients have not authenticated.
    pub(super) fn meter(&self) -> &Arc<MemoryMeter> {
        &self.meter
    }

    /// Memory used by chunks, and its limit.
    pub(super) fn snapshot(&self) -> MemorySnapshot {
        MemorySnapshot { used_bytes: self.meter.used(), max_bytes: self.meter.max() }
    }

    /// Limits of a session that is new to this server. `full` holds the server's limits; `reserved`
    /// is the number of bytes that other sessions may need for paths that they once had.
    pub(super) fn limits_of_new(
        &self,
        full: Limits,
        conn: &ConnReq,
        reserved: u64,
    ) -> Result<Limits, Refusal> {
        let ClientExtensions { smaller_depth, queue_depth: has, .. } =
            ClientExtensions::decode(&conn.ext);
        let most = full.queue_depth();
        let (mut depth, least) = match has {
            // A session from before this server's start. If its depth exceeds the server's depth,
            // the session is given the server's depth.
            1.. => (has.min(most), has.min(most)),
            // At least two permits per connection, so that every shard of the client has some.
            0 if smaller_depth => (most, most.min(DEPTH_MIN.max(conn.cid_num.saturating_mul(2)))),
            0 => (most, most),
        };
        let room = self.meter.room().saturating_sub(reserved);
        loop {
            let limits = full.with_depth(depth);
            if ChunkPool::bytes(limits) as u64 <= room {
                return Ok(limits);
            }
            if depth / 2 < least {
                let needs = ChunkPool::bytes(full.with_depth(least)) as u64;
                return Err(Refusal::MemoryMax { needs, room, max: self.meter.max() });
            }
            depth /= 2;
        }
    }

    /// Checks whether a session may have one more simultaneous path than before.
    pub(super) fn check_further_path(&self, share: &SessionMemory) -> Result<(), Refusal> {
        let SessionMemory { paths, path_bytes, used, reserved_by_others } = *share;
        let max = self.meter.max();
        let others = self.meter.used().saturating_sub(used).saturating_add(reserved_by_others);
        let own = path_bytes.saturating_mul(paths as u64).max(used);
        let room = max.saturating_sub(others).saturating_sub(own);
        match path_bytes <= room || rtrs_core::mutated!(PathsUnbounded) {
            true => Ok(()),
            false => Err(Refusal::MemoryMax { needs: path_bytes, room, max }),
        }
    }

    /// Checks the depth that a client repeats against that of its session here. A depth above the
    /// server's maximum is accepted: the client receives its actual depth, and detects the
    /// difference.
    pub(super) fn check_depth(full: Limits, of: Limits, conn: &ConnReq) -> Result<(), Refusal> {
        let (has, asked) = (of.queue_depth(), ClientExtensions::decode(&conn.ext).queue_depth);
        let same = asked == 0 || asked == has || asked > full.queue_depth();
        if same { Ok(()) } else { Err(Refusal::Depth { has, asked }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u32 = 256 << 10;

    fn conn(cid_num: u16, smaller_depth: bool, queue_depth: u16) -> ConnReq {
        let ext = ClientExtensions { smaller_depth, queue_depth, ..ClientExtensions::default() };
        let ext = ext.encode();
        ConnReq { cid_num, ext, ..ConnReq::default() }
    }

    #[test]
    fn a_new_session_gets_the_depth_that_fits() {
        let full = Limits::new(500, CHUNK).unwrap();
        let bytes = |depth| ChunkPool::bytes(full.with_depth(depth)) as u64;
        let granted = |room: u64, conn: &ConnReq| {
            let memory = Memory::new(room);
            memory.limits_of_new(full, conn, 0).map(Limits::queue_depth)
        };
        let refused = |room, needs| Err(Refusal::MemoryMax { needs, room, max: room });
        let ours = conn(3, true, 0);
        for (room, depth) in [
            (u64::MAX, 500),
            (bytes(500), 500),
            (bytes(500) - 1, 250),
            (bytes(250), 250),
            (bytes(62) - 1, 31),
        ] {
            assert_eq!(granted(room, &ours), Ok(depth), "{room}");
        }
        assert_eq!(granted(bytes(31) - 1, &ours), refused(bytes(31) - 1, bytes(16)));
        assert_eq!(granted(0, &ours), refused(0, bytes(16)));
        // A client with many connections needs a greater depth.
        let wide = conn(50, true, 0);
        assert_eq!(granted(bytes(125), &wide), Ok(125));
        assert_eq!(granted(bytes(125) - 1, &wide), refused(bytes(125) - 1, bytes(100)));
        // A kernel client accepts only the server's depth, as does a client that states none.
        for rigid in [conn(3, false, 0), ConnReq { ext: [0xee; 11], ..conn(3, false, 0) }] {
            assert_eq!(granted(bytes(500), &rigid), Ok(500));
            assert_eq!(granted(bytes(500) - 1, &rigid), refused(bytes(500) - 1, bytes(500)));
        }
        // A client that states a depth is given that depth (at most the server's) or refused.
        for smaller in [false, true] {
            assert_eq!(granted(u64::MAX, &conn(3, smaller, 40)), Ok(40));
            assert_eq!(
                granted(bytes(40) - 1, &conn(3, smaller, 40)),
                refused(bytes(40) - 1, bytes(40))
            );
            assert_eq!(granted(u64::MAX, &conn(3, smaller, 501)), Ok(500));
        }
        // A server with few chunks grants its full depth or none.
        let few = Limits::new(8, CHUNK).unwrap();
        let memory = Memory::new(ChunkPool::bytes(few) as u64 - 1);
        assert!(memory.limits_of_new(few, &ours, 0).is_err());
        // Memory reserved for other sessions is not available.
        let memory = Memory::new(bytes(500));
        let beside =
            |reserved| memory.limits_of_new(full, &ours, reserved).map(Limits::queue_depth);
        assert_eq!((beside(0), beside(1)), (Ok(500), Ok(250)));
    }

    #[test]
    fn all_paths_of_a_session_fit_alongside_other_memory() {
        let memory = Memory::new(100);
        let may = |paths, used, reserved_by_others| {
            let share = SessionMemory { paths, path_bytes: 25, used, reserved_by_others };
            memory.check_further_path(&share).is_ok()
        };
        assert!(may(1, 0, 0) && may(3, 0, 0) && !may(4, 0, 0));
        assert!(may(2, 0, 25) && !may(3, 0, 1) && !may(3, 76, 0));
    }

    #[test]
    fn a_session_keeps_its_depth() {
        let full = Limits::new(500, CHUNK).unwrap();
        let of = full.with_depth(125);
        for asked in [0, 125, 501] {
            assert_eq!(Memory::check_depth(full, of, &conn(3, true, asked)), Ok(()));
        }
        for asked in [124, 500] {
            let refused = Err(Refusal::Depth { has: 125, asked });
            assert_eq!(Memory::check_depth(full, of, &conn(3, true, asked)), refused);
        }
    }
}
