//! Tests of rate limits: the combined rate of sessions, changes of limits, and paths and exports
//! that end while requests are waiting.

use std::collections::VecDeque;

use rtrs_core::block::IoOp;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Rw};

use super::fixture::{Fixture, StandOptions};
use super::peer::{Peer, PeerOptions, Reply, io};
use crate::engine::message::{AdminReply, AdminRequest};
use crate::rate_limits::RateLimits;
use crate::stats::ExportIo;

const MS: Duration = Duration::from_millis(1);
/// Number of permits of each played client.
const DEPTH: u16 = 16;

/// One request per second, which an idle export does not accumulate.
const ONE: RateLimits = RateLimits {
    iops: Some(1),
    iops_read: None,
    iops_write: None,
    bandwidth: None,
    bandwidth_read: None,
    bandwidth_write: None,
    burst_ms: 10,
};

impl Fixture {
    /// Changes the limits of `vol`.
    fn limit(&mut self, limits: RateLimits) {
        let request = AdminRequest::ExportLimit { name: "vol".into(), limits };
        assert_eq!(self.admin(request).lock().take(), Some(AdminReply::Done));
    }

    /// Operations and offsets that `vol` has executed since the last call.
    fn executed(&self) -> Vec<(IoOp, u64)> {
        let log = std::mem::take(&mut self.device.lock().log);
        log.into_iter().map(|(op, offset, ..)| (op, offset)).collect()
    }
}

fn limited(limits: RateLimits) -> Fixture {
    let mut fixture = Fixture::new(StandOptions::default());
    fixture.limit(limits);
    fixture
}

fn second_session() -> PeerOptions {
    PeerOptions { session: 2, path: 2, local: 2, ..PeerOptions::default() }
}

/// Sends one write per permit, to the sector with the same number, all on one connection. The first
/// begins immediately; the others wait.
fn send_writes(peer: &mut Peer, permits: std::ops::Range<u16>) {
    for permit in permits {
        peer.send_write((1, permit), io(Rw::WRITE, permit.into(), 512), &[7; 512]);
    }
}

/// Permits of the requests answered so far, all of which succeeded.
fn answered(peer: &mut Peer, fixture: &mut Fixture) -> Vec<u16> {
    let replies = peer.replies(fixture);
    assert!(replies.iter().all(|reply| reply.errno == 0), "{replies:?}");
    replies.iter().map(|reply| reply.permit).collect()
}

fn writes(sectors: std::ops::Range<u64>) -> Vec<(IoOp, u64)> {
    sectors.map(|sector| (IoOp::Write, sector * 512)).collect()
}

#[test]
fn sessions_together_stay_within_the_limit() {
    for (limits, len, per_second) in [
        (RateLimits { iops: Some(100), burst_ms: 100, ..RateLimits::default() }, 512, 100),
        (RateLimits { bandwidth: Some(4 << 20), ..ONE }, 4096, 1),
        (RateLimits { bandwidth: Some(100 * 8192), iops: None, ..ONE }, 8192, 100),
    ] {
        let mut fixture = limited(limits);
        let mut writer = Peer::open(&mut fixture, PeerOptions::default());
        let mut reader = Peer::up(&mut fixture, second_session(), "other");
        reader.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
        let data = vec![1; len as usize];
        let mut free: [VecDeque<u16>; 2] = [(0..DEPTH).collect(), (0..DEPTH).collect()];
        let (mut done, end) = ([0_u64; 2], fixture.now() + Duration::from_secs(5));
        while fixture.now() < end {
            while let Some(permit) = free[0].pop_front() {
                let conn = usize::from(permit % 2) + 1;
                writer.send_write((conn, permit), io(Rw::WRITE, 0, len), &data);
            }
            while let Some(permit) = free[1].pop_front() {
                let conn = usize::from(permit % 2) + 1;
                reader.send_read((conn, permit), io(Rw::READ, 0, len));
            }
            fixture.pass(MS);
            for (at, peer) in [&mut writer, &mut reader].into_iter().enumerate() {
                peer.drain();
                while let Some((conn, imm)) = peer.take_immediate() {
                    let reply = Reply::from_immediate(conn, imm).expect("an answer");
                    assert_eq!(reply.errno, 0);
                    done[at] += 1;
                    free[at].push_back(reply.permit);
                }
            }
        }
        let burst = per_second * limits.burst_ms / 1000 + 1;
        let (total, expected) = (done[0] + done[1], 5 * per_second);
        assert!(total * 100 <= (expected + burst) * 102, "{done:?} of {expected}");
        assert!(total * 100 >= expected * 98, "{done:?} of {expected}");
        assert!(done.iter().all(|one| one * 4 >= total), "a session starves: {done:?}");
    }
}

#[test]
fn requests_wait_in_order_and_flushes_pass() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    send_writes(&mut peer, 0..4);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    peer.send_flush((1, 9));
    assert_eq!(answered(&mut peer, &mut fixture), [9]);
    assert_eq!(fixture.sessions()[0].io.inflight, 3);
    for permit in 1..4 {
        fixture.pass(500 * MS);
        assert!(answered(&mut peer, &mut fixture).is_empty());
        fixture.pass(500 * MS);
        assert_eq!(answered(&mut peer, &mut fixture), [permit]);
    }
    let flushed = [writes(0..1), vec![(IoOp::Flush, 0)], writes(1..4)].concat();
    assert_eq!(fixture.executed(), flushed);
    let totals = fixture.counters();
    assert_eq!(totals.throttled, 3);
    // The sum of the waits of about one, two and three seconds.
    assert_eq!(totals.throttled_ns / 500_000_000, 11);
    assert_eq!(ExportIo::from(&totals).throttled, 3);
}

#[test]
fn waiting_requests_follow_changed_limits() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    send_writes(&mut peer, 0..12);
    fixture.pass(100 * MS);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    fixture.limit(RateLimits { iops: Some(10), ..ONE });
    fixture.pass(250 * MS);
    assert_eq!(answered(&mut peer, &mut fixture), [1, 2, 3]);
    fixture.limit(RateLimits { iops_read: Some(1), iops: None, ..ONE });
    assert_eq!(answered(&mut peer, &mut fixture), (4..12).collect::<Vec<_>>());
    // Without limits, nothing waits or counts as throttled.
    peer.send_read((1, 0), io(Rw::READ, 0, 512));
    peer.send_read((1, 1), io(Rw::READ, 0, 512));
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    fixture.limit(RateLimits::default());
    assert_eq!(answered(&mut peer, &mut fixture), [1]);
    send_writes(&mut peer, 0..12);
    assert_eq!(answered(&mut peer, &mut fixture).len(), 12);
    assert_eq!(fixture.counters().throttled, 12);
    let unknown = AdminRequest::ExportLimit { name: "none".into(), limits: ONE };
    let refused = fixture.admin(unknown).lock().take();
    assert!(matches!(refused, Some(AdminReply::Refused(_))), "{refused:?}");
}

#[test]
fn removed_limits_release_more_requests_than_the_device_takes() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    fixture.device.lock().room = 2;
    send_writes(&mut peer, 0..12);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    fixture.limit(RateLimits::default());
    assert_eq!(answered(&mut peer, &mut fixture), (1..12).collect::<Vec<_>>());
    assert_eq!(fixture.executed(), writes(0..12));
}

#[test]
fn a_session_that_ends_drops_its_waiting_requests() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    let mut other = Peer::up(&mut fixture, second_session(), "other");
    other.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
    send_writes(&mut peer, 0..8);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    other.send_read((1, 3), io(Rw::READ, 0, 512));
    assert!(answered(&mut other, &mut fixture).is_empty());
    peer.leave(&mut fixture);
    assert_eq!(fixture.sessions().len(), 1);
    // The session that left had the next turn, and gave it back.
    fixture.pass(Duration::from_secs(2));
    assert_eq!(answered(&mut other, &mut fixture), [3]);
    assert_eq!(fixture.executed(), [(IoOp::Write, 0), (IoOp::Read, 0)]);
    // Requests of the second session are waiting too when its connections break.
    for permit in 0..8 {
        other.send_read((2, permit), io(Rw::READ, 0, 512));
    }
    fixture.settle();
    other.leave(&mut fixture);
    fixture.pass(Duration::from_secs(20));
    fixture.assert_empty();
    assert_eq!(fixture.device.lock().open, 0, "the device is closed");
    assert_eq!(fixture.counters().throttled, 7 + 1 + 7);
}

#[test]
fn a_waiting_request_is_resent_over_another_path() {
    let mut fixture = limited(ONE);
    let mut first = Peer::open(&mut fixture, PeerOptions::default());
    let options = PeerOptions { path: 2, local: 1, first_conn: false, ..PeerOptions::default() };
    let mut second = Peer::up(&mut fixture, options, "sess");
    send_writes(&mut first, 0..4);
    assert_eq!(answered(&mut first, &mut fixture), [0]);
    // The client has given up on the first path, as the permits tell the server.
    send_writes(&mut second, 1..4);
    fixture.pass(Duration::from_secs(4));
    let mut permits = answered(&mut second, &mut fixture);
    permits.sort_unstable();
    assert_eq!(permits, [1, 2, 3]);
    assert_eq!(first.closed(&mut fixture), 3);
    let mut executed = fixture.executed();
    executed.sort_unstable_by_key(|(_, offset)| *offset);
    assert_eq!(executed, writes(0..4), "each once");
    assert_eq!(fixture.load().1, 0);
}

#[test]
fn a_drain_does_not_wait_for_limits() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    send_writes(&mut peer, 0..12);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    let drained = fixture.admin(AdminRequest::Drain { within: Duration::from_secs(1) });
    fixture.pass(500 * MS);
    assert_eq!(answered(&mut peer, &mut fixture), (1..12).collect::<Vec<_>>());
    let answer = drained.lock().take();
    assert_eq!(answer, Some(AdminReply::Drained { unfinished: 0 }));
}

#[test]
fn a_removed_export_does_not_wait_for_limits() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    send_writes(&mut peer, 0..12);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    let request = AdminRequest::ExportRemove { name: "vol".into(), force: true };
    let answer = fixture.admin(request).lock().take();
    assert!(matches!(answer, Some(AdminReply::ExportRemoved { .. })), "{answer:?}");
    assert_eq!(answered(&mut peer, &mut fixture), (1..12).collect::<Vec<_>>());
    assert_eq!(fixture.device.lock().open, 0, "the export is released");
    send_writes(&mut peer, 0..1);
    assert_ne!(peer.reply(&mut fixture).errno, 0);
}

#[test]
fn a_device_that_shrinks_refuses_requests_that_waited() {
    let mut fixture = limited(ONE);
    let mut peer = Peer::open(&mut fixture, PeerOptions::default());
    send_writes(&mut peer, 0..1);
    assert_eq!(answered(&mut peer, &mut fixture), [0]);
    let last = (1 << 20) / 512 - 1;
    peer.send_write((1, 1), io(Rw::WRITE, last, 512), &[7; 512]);
    fixture.settle();
    fixture.device.lock().size = Some(1 << 19);
    fixture.pass(Duration::from_secs(2));
    assert_ne!(peer.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.executed(), writes(0..1));
}
