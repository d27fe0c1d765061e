//! Tests of rate limits in simulated time: rates, bursts, changes, and how shards take turns.

use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::ids::PermitId;
use rtrs_core::time::Duration;

use super::super::progress::{DeviceTime, IoStep, SyncProgress, Turn};
use super::*;
use crate::engine::device_table::DeviceId;
use crate::export::ExportIndex;
use crate::rate_limits::RateLimits;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Number of requests that wait on each shard.
const DEPTH: usize = 8;
const MIB: u32 = 1 << 20;

fn limits(text: &str) -> RateLimits {
    format!("/x,{text}").parse::<crate::settings::ExportSpec>().unwrap().rate_limits()
}

fn io(op: IoOp, len: u32) -> IoProgress {
    IoProgress {
        export: ExportIndex(0),
        device: DeviceId(0),
        op,
        flags: IoFlags::default(),
        step: IoStep::Data,
        post_flush: false,
        offset: 0,
        done: 0,
        len,
        part: 0,
        partial: None,
        turn: Turn::None,
        room: 0,
        sync: SyncProgress::default(),
        device_time: DeviceTime::default(),
    }
}

fn request(path: u32, permit: u16) -> RequestRef {
    RequestRef { path: PathRow(path), permit: PermitId(permit) }
}

fn queues(limits: RateLimits) -> Box<Delayed> {
    Delayed::new(&Throttle::new(limits)).unwrap()
}

fn at(after: Duration) -> Instant {
    Instant::from_nanos(7_000_000_000) + after
}

/// Shards that have requests for one export.
struct Shards {
    throttle: Throttle,
    shards: Vec<Delayed>,
    now: Instant,
    /// Delay of each poll.
    late: Duration,
}

impl Shards {
    fn new(count: usize, text: &str) -> Self {
        let throttle = Throttle::new(limits(text));
        let shards = (0..count).map(|_| *Delayed::new(&throttle).unwrap()).collect();
        Self { throttle, shards, now: at(Duration::ZERO), late: Duration::ZERO }
    }

    /// Changes the limits on all shards.
    fn set(&mut self, text: &str) {
        self.throttle.set(limits(text));
        for shard in &mut self.shards {
            shard.change(self.throttle.budget());
        }
    }

    /// Runs for this time; each shard always has more requests. Returns the number of requests that
    /// each shard began.
    fn run(&mut self, time: Duration, io: &IoProgress) -> Vec<u64> {
        let end = self.now + time;
        let mut begun = vec![0; self.shards.len()];
        while self.now < end {
            for (shard, begun) in self.shards.iter_mut().zip(&mut begun) {
                while shard.next(self.now).is_some() {
                    *begun += 1;
                }
                while shard.reads.entries.len() + shard.writes.entries.len() < DEPTH {
                    *begun += u64::from(!shard.delays(request(0, 0), io, self.now));
                }
            }
            let next = self.shards.iter().filter_map(Delayed::deadline).min().unwrap();
            self.now = next.max(self.now + Duration::from_nanos(1)) + self.late;
        }
        begun
    }
}

#[track_caller]
fn assert_near(count: u64, expected: u64) {
    let off = count.abs_diff(expected);
    assert!(off * 100 <= expected * 2, "{count} is not within 2 % of {expected}");
}

#[test]
fn the_rate_is_exact() {
    for (text, len, per_second) in [
        ("iops=2000", 4096, 2000),
        ("iops=50", 4096, 50),
        ("iops-write=700", MIB, 700),
        ("bandwidth=10M", 4096, 2560),
        ("bandwidth=10M", MIB, 10),
        ("bandwidth-write=100M", MIB, 100),
        ("bandwidth=256M", 4096, 65_536),
        ("bandwidth=256k", 4096, 64),
        ("iops=100,bandwidth=1G", MIB, 100),
        ("iops=10000,bandwidth=1M", 4096, 256),
        ("iops=1000,iops-write=300,iops-read=5", 512, 300),
    ] {
        for late in [Duration::ZERO, Duration::from_micros(60), 5 * MS] {
            let mut shards = Shards::new(2, text);
            shards.late = late;
            // Uses up the burst.
            shards.run(SECOND, &io(IoOp::Write, len));
            let begun: u64 = shards.run(10 * SECOND, &io(IoOp::Write, len)).iter().sum();
            assert_near(begun, 10 * per_second);
        }
    }
}

#[test]
fn shards_take_turns() {
    let mut shards = Shards::new(3, "iops=900");
    shards.run(SECOND, &io(IoOp::Read, 4096));
    let begun = shards.run(10 * SECOND, &io(IoOp::Read, 4096));
    begun.into_iter().for_each(|begun| assert_near(begun, 3000));
}

#[test]
fn an_unused_export_saves_up_no_more_than_the_burst() {
    for (text, burst) in [("iops=1000", 100), ("iops=1000,burst=2s", 2000)] {
        let mut shards = Shards::new(1, text);
        for pause in [Duration::ZERO, 3600 * SECOND] {
            shards.now = shards.now + pause;
            let begun = shards.run(Duration::from_nanos(1), &io(IoOp::Read, 4096));
            // The request that empties the bucket begins, too.
            assert_eq!(begun, [burst + 1]);
            shards.run(10 * SECOND, &io(IoOp::Read, 4096));
            shards.shards[0].remove(PathRow(0), shards.now);
        }
    }
}

#[test]
fn a_request_larger_than_the_burst_begins_and_delays_the_next() {
    let delayed = &mut queues(limits("bandwidth=1M"));
    let large = io(IoOp::Write, 16 * MIB);
    assert!(!delayed.delays(request(0, 0), &large, at(Duration::ZERO)));
    assert!(delayed.delays(request(0, 1), &large, at(MS)));
    assert_eq!(delayed.deadline(), Some(at(16 * SECOND - 100 * MS)));
    assert_eq!(delayed.next(at(15 * SECOND)), None);
    let released = delayed.next(at(16 * SECOND)).unwrap();
    let waited_ns = 15_999_000_000;
    assert_eq!(released, Released { request: request(0, 1), waited_ns });
    assert!(delayed.is_empty() && delayed.deadline().is_none());
}

#[test]
fn directions_do_not_wait_for_each_other() {
    let delayed = &mut queues(limits("iops-write=1"));
    let (read, write) = (io(IoOp::Read, 4096), io(IoOp::Write, 4096));
    assert!(!delayed.delays(request(0, 0), &write, at(Duration::ZERO)));
    assert!(delayed.delays(request(0, 1), &write, at(Duration::ZERO)));
    for permit in 2..1000 {
        assert!(!delayed.delays(request(0, permit), &read, at(Duration::ZERO)));
    }
    // A limit on both directions serves requests in the order in which they reached the front of
    // its queue.
    let delayed = &mut queues(limits("iops=1"));
    for (permit, io) in (0..).zip([&read, &write, &read, &read, &write]) {
        let delays = delayed.delays(request(0, permit), io, at(Duration::ZERO));
        assert_eq!(delays, permit > 0);
    }
    let begun = (0..60).filter_map(|second| delayed.next(at(second * SECOND)));
    let permits: Vec<u16> = begun.map(|begun| begun.request.permit.0).collect();
    assert_eq!(permits, [1, 2, 4, 3]);
}

#[test]
fn only_requests_for_data_are_limited() {
    let delayed = &mut queues(limits("iops=1,bandwidth=64k"));
    let write = io(IoOp::Write, 4096);
    assert!(!delayed.delays(request(0, 0), &write, at(Duration::ZERO)));
    assert!(delayed.delays(request(0, 1), &write, at(Duration::ZERO)));
    for op in [IoOp::Flush, IoOp::Extents] {
        assert!(!delayed.delays(request(0, 2), &io(op, 1 << 30), at(Duration::ZERO)));
    }
    // There is a maximum cost for the length of a discard.
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        let delayed = &mut queues(limits("bandwidth-write=1M"));
        assert!(!delayed.delays(request(0, 0), &io(op, 1 << 30), at(Duration::ZERO)));
        assert!(delayed.delays(request(0, 1), &io(op, 512), at(Duration::ZERO)));
        assert_eq!(delayed.deadline(), Some(at(SECOND - 100 * MS)));
    }
}

#[test]
fn changed_limits_apply_to_requests_that_wait() {
    let write = io(IoOp::Write, 4096);
    let mut shards = Shards::new(2, "iops=1");
    shards.run(10 * SECOND, &write);
    shards.set("iops=1000");
    let begun: u64 = shards.run(10 * SECOND, &write).iter().sum();
    assert_near(begun, 10_000 + 100);
    shards.set("iops=10");
    let begun: u64 = shards.run(10 * SECOND, &write).iter().sum();
    assert_near(begun, 100 + 2);
    // Without limits, all waiting requests begin, in order, before later requests.
    shards.set("iops=none");
    let now = shards.now;
    let delayed = &mut shards.shards[0];
    assert!(!delayed.is_empty());
    assert!(delayed.delays(request(0, 7), &write, now), "others wait");
    let last = std::iter::from_fn(|| delayed.next(now)).last();
    assert_eq!(last.map(|last| last.request), Some(request(0, 7)));
    assert!(delayed.is_over() && !delayed.delays(request(0, 8), &write, now));
}

#[test]
fn clocks_of_shards_may_differ_and_jump() {
    let mut shards = Shards::new(1, "iops=1000");
    let write = io(IoOp::Write, 4096);
    shards.run(SECOND, &write);
    shards.now = shards.now + 3600 * SECOND;
    let begun: u64 = shards.run(SECOND, &write).iter().sum();
    assert_near(begun, 1000 + 100);
    // A shard whose turn began earlier may use an earlier time.
    shards.now = Instant::from_nanos(shards.now.as_nanos() - 5_000_000);
    let begun: u64 = shards.run(SECOND, &write).iter().sum();
    assert_near(begun, 1000 - 5);
}

#[test]
fn requests_of_a_path_are_removed_and_waste_nothing() {
    let throttle = Throttle::new(limits("bandwidth=1M"));
    let [leaving, staying] = &mut [(); 2].map(|()| Delayed::new(&throttle).unwrap());
    let now = at(Duration::ZERO);
    let large = io(IoOp::Write, 10 * MIB);
    assert!(!leaving.delays(request(0, 0), &large, now));
    for permit in 1..4 {
        assert!(leaving.delays(request(permit.into(), permit), &large, now));
    }
    assert!(leaving.delays(request(1, 4), &large, now));
    let removed = leaving.remove(PathRow(1), at(SECOND));
    let requests: Vec<_> = removed.iter().map(|one| one.request).collect();
    assert_eq!(requests, [request(1, 1), request(1, 4)]);
    assert!(removed.iter().all(|one| one.waited_ns == 1_000_000_000));
    assert!(!leaving.contains(request(1, 1)) && leaving.contains(request(2, 2)));
    // Only the request that began has used up any of the rate.
    assert!(staying.delays(request(9, 0), &io(IoOp::Read, 4096), now));
    assert_eq!(staying.deadline(), Some(at(10 * SECOND - 100 * MS)));
    assert_eq!(leaving.remove(PathRow(2), now).len() + leaving.remove(PathRow(3), now).len(), 2);
    assert!(leaving.is_empty() && !leaving.is_over());
}
