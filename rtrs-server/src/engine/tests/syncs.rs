//! Tests of failed syncs: each session with something to lose gets one report, regardless of which
//! session's sync got the error.

use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_core::block::IoOp;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, IoHeader, OpenRsp, OpenRspTail, Rw, errno};

use super::fixture::{Fixture, StandOptions};
use super::log_lines::LogLines;
use super::peer::{Peer, PeerOptions, io};
use crate::engine::epoch::{EpochState, EpochStore, SyncEpoch};

/// Connections on the two shards.
const CORES: [usize; 2] = [1, 2];

fn options(n: u8) -> PeerOptions {
    PeerOptions { session: n, path: n, local: n, ..PeerOptions::default() }
}

fn open(fixture: &mut Fixture, n: u8, access: AccessMode) -> (Peer, OpenRsp) {
    let mut peer = Peer::up(fixture, options(n), &format!("sess{n}"));
    let opened = peer.open_device(fixture, "vol", access).unwrap();
    (peer, opened)
}

fn write(fixture: &mut Fixture, peer: &mut Peer, conn: usize, fua: bool) -> u16 {
    let rw = if fua { Rw::WRITE.fua(true) } else { Rw::WRITE };
    peer.send_write((conn, 3), io(rw, 0, 512), &[1; 512]);
    peer.reply(fixture).errno
}

fn flush(fixture: &mut Fixture, peer: &mut Peer, conn: usize) -> u16 {
    peer.send_flush((conn, 4));
    peer.reply(fixture).errno
}

fn lose(fixture: &Fixture) {
    fixture.device.lock().lost = Some(IoStatus::Io);
}

#[test]
fn disk_errors_are_counted_apart_from_refusals() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut writer, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    let mut failed = 0;
    for (status, device_errors) in [
        (IoStatus::Io, 1),
        (IoStatus::NoSpace, 2),
        (IoStatus::Beyond, 3),
        (IoStatus::Unsupported, 3),
        (IoStatus::Invalid, 3),
    ] {
        assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
        fixture.device.lock().lost = Some(status);
        assert_ne!(write(&mut fixture, &mut writer, 2, true), 0, "{status}");
        failed += 1 + u64::from(flush(&mut fixture, &mut writer, 1) != 0);
        let errors = fixture.counters().ops.iter().map(|op| op.errors).sum::<u64>();
        assert_eq!(errors, failed, "{status}");
        assert_eq!(fixture.sessions()[0].io.device_errors, device_errors, "{status}");
        assert_eq!(fixture.counters().device_errors, device_errors, "{status}");
    }
}

/// Both shards fail syncs of one export many times: a few log lines count all failures.
#[test]
fn failed_syncs_of_an_export_are_logged_at_a_limited_rate() {
    let lines = LogLines::default();
    let failed = lines.during(|| {
        let mut fixture = Fixture::new(StandOptions::default());
        let (mut writer, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
        for round in 0..50 {
            assert_eq!(write(&mut fixture, &mut writer, CORES[round % 2], false), 0);
            lose(&fixture);
            assert_eq!(flush(&mut fixture, &mut writer, CORES[(round + 1) % 2]), errno::EIO);
        }
        let first = lines.take("a sync failed");
        assert_eq!(first.len(), 1, "{first:?}");
        assert!(first[0].contains("export=\"vol\"") && first[0].contains("failures=1 "));
        fixture.pass(Duration::from_secs(6));
        lines.take("more syncs failed")
    });
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed[0].contains("failures=50 left_out=49 "), "{failed:?}");
}

#[test]
fn a_readers_flush_does_not_consume_a_writers_error() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut writer, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    let (mut reader, _) = open(&mut fixture, 2, AccessMode::ReadOnly);
    assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
    lose(&fixture);
    let ran = fixture.device.lock().log.len();
    assert_eq!(flush(&mut fixture, &mut reader, 2), 0, "it has nothing to make durable");
    reader.send_read((2, 5), io(Rw::READ.preflush(true), 0, 512));
    assert_eq!(reader.reply(&mut fixture).errno, 0);
    assert_eq!(fixture.device.lock().log.len(), ran + 1, "a read, and no sync");
    assert_eq!(flush(&mut fixture, &mut writer, 1), errno::EIO);
    assert_eq!(flush(&mut fixture, &mut writer, 1), 0, "reported once");
}

#[test]
fn a_session_that_lost_write_access_flushes_its_writes() {
    for (reconnects, fails) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut fixture = Fixture::new(StandOptions::default());
        let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
        assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
        if reconnects {
            one.leave(&mut fixture);
            (one, _) = open(&mut fixture, 1, AccessMode::ReadOnly);
        } else {
            one.open_device(&mut fixture, "vol", AccessMode::ReadOnly).unwrap();
        }
        assert_eq!(write(&mut fixture, &mut one, 1, false), errno::EPERM);
        if fails {
            lose(&fixture);
        }
        let expected = if fails { errno::EIO } else { 0 };
        assert_eq!(flush(&mut fixture, &mut one, 2), expected, "reconnects: {reconnects}");
        let last = fixture.device.lock().log.pop();
        assert_eq!(last, Some((IoOp::Flush, 0, 0, false)), "reconnects: {reconnects}");
        // Everything is flushed or reported: the next flush has nothing to do.
        let ran = fixture.device.lock().log.len();
        assert_eq!(flush(&mut fixture, &mut one, 1), 0);
        assert_eq!(fixture.device.lock().log.len(), ran, "no sync");
    }
}

#[test]
fn a_loss_is_reported_once_per_writing_session_on_any_core() {
    for (who, conn) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
        let mut fixture = Fixture::new(StandOptions::default());
        let (first, _) = open(&mut fixture, 1, AccessMode::Migration);
        let (second, _) = open(&mut fixture, 2, AccessMode::Migration);
        let mut peers = [first, second];
        for peer in &mut peers {
            assert_eq!(write(&mut fixture, peer, 1, false), 0);
        }
        lose(&fixture);
        assert_eq!(flush(&mut fixture, &mut peers[who], conn), errno::EIO, "it got the error");
        assert_eq!(flush(&mut fixture, &mut peers[who], 1), 0, "it knows");
        assert_eq!(flush(&mut fixture, &mut peers[1 - who], conn), errno::EIO);
        assert_eq!(flush(&mut fixture, &mut peers[1 - who], conn), 0);
        // These writes came after the failure: there is nothing to report.
        for peer in &mut peers {
            assert_eq!(write(&mut fixture, peer, 2, false), 0);
            assert_eq!(flush(&mut fixture, peer, 1), 0);
        }
    }
}

#[test]
fn sessions_without_unflushed_writes_get_no_error() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut writer, _) = open(&mut fixture, 1, AccessMode::Migration);
    let (mut other, _) = open(&mut fixture, 2, AccessMode::Migration);
    assert_eq!(write(&mut fixture, &mut other, 1, false), 0);
    assert_eq!(flush(&mut fixture, &mut other, 1), 0);
    assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut writer, 2), errno::EIO);
    assert_eq!(flush(&mut fixture, &mut other, 1), 0);
}

#[test]
fn a_failed_fua_write_fails_itself_and_the_next_flush() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut writer, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
    lose(&fixture);
    assert_eq!(write(&mut fixture, &mut writer, 2, true), errno::EIO);
    assert_eq!(flush(&mut fixture, &mut writer, 1), errno::EIO, "for the first write");
    assert_eq!(flush(&mut fixture, &mut writer, 1), 0);
    assert_eq!(write(&mut fixture, &mut writer, 2, true), 0);
    // A failed flush before a write counts as well.
    assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
    lose(&fixture);
    writer.send_write((1, 3), io(Rw::WRITE.preflush(true), 8, 512), &[2; 512]);
    assert_eq!(writer.reply(&mut fixture).errno, errno::EIO);
    assert_eq!(fixture.device.lock().bytes[8 * 512], 0, "not begun");
    assert_eq!(flush(&mut fixture, &mut writer, 1), 0);
}

#[test]
fn a_fua_write_refused_before_the_disk_loses_nothing() {
    for (status, errno) in [
        (IoStatus::Beyond, errno::EIO),
        (IoStatus::Invalid, errno::EINVAL),
        (IoStatus::ReadOnly, errno::EPERM),
        (IoStatus::Unsupported, errno::EOPNOTSUPP),
    ] {
        let options = StandOptions::default();
        let epoch = Arc::clone(&options.epoch);
        let mut fixture = Fixture::new(options);
        let (mut writer, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
        assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
        fixture.device.lock().lost = Some(status);
        assert_eq!(write(&mut fixture, &mut writer, 2, true), errno);
        assert_eq!((epoch.rises(), flush(&mut fixture, &mut writer, 1)), (0, 0), "{status}");
        // A flush cannot be refused: any failure may be a loss.
        assert_eq!(write(&mut fixture, &mut writer, 1, false), 0);
        fixture.device.lock().lost = Some(status);
        assert_eq!(flush(&mut fixture, &mut writer, 1), errno);
        assert_eq!((epoch.rises(), flush(&mut fixture, &mut writer, 1)), (1, 0), "{status}");
    }
}

#[test]
fn a_successful_sync_waits_for_syncs_that_may_have_taken_its_error() {
    for (fua, mine, others) in [(false, 1, 2), (false, 1, 1), (true, 1, 2), (true, 2, 2)] {
        let mut fixture = Fixture::new(StandOptions::default());
        let (mut one, _) = open(&mut fixture, 1, AccessMode::Migration);
        let (mut two, _) = open(&mut fixture, 2, AccessMode::Migration);
        assert_eq!(write(&mut fixture, &mut one, CORES[0], false), 0);
        {
            let mut device = fixture.device.lock();
            (device.lost, device.hold_failed) = (Some(IoStatus::NoSpace), true);
        }
        two.send_flush((others, 4));
        fixture.settle();
        assert_eq!(fixture.device.lock().lost, None, "the error is taken");
        if fua {
            let header = io(Rw::WRITE.fua(true), 0, 512);
            one.send_write((mine, 3), header, &[1; 512]);
        } else {
            one.send_flush((mine, 3));
        }
        assert_eq!(one.replies(&mut fixture), [], "its success would prove nothing");
        fixture.device.lock().hold_failed = false;
        assert_eq!(one.reply(&mut fixture).errno, errno::EIO);
        assert_eq!(two.reply(&mut fixture).errno, errno::ENOSPC);
        one.leave(&mut fixture);
        two.leave(&mut fixture);
        fixture.assert_empty();
    }
}

#[test]
fn an_answer_that_may_be_lost_is_repeated() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    let second = PeerOptions { path: 7, local: 4, first_conn: false, ..options(1) };
    let mut two = Peer::up(&mut fixture, second, "sess1");
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO);
    one.leave(&mut fixture);
    assert_eq!(flush(&mut fixture, &mut two, 1), errno::EIO, "as a replay");
    assert_eq!(flush(&mut fixture, &mut two, 1), 0);
    // Reusing the permit has proved that the answer arrived.
    two.leave(&mut fixture);
}

#[test]
fn an_answer_that_arrived_is_not_repeated() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    let second = PeerOptions { path: 7, local: 4, first_conn: false, ..options(1) };
    let mut two = Peer::up(&mut fixture, second, "sess1");
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO);
    one.send_read((1, 4), io(Rw::READ, 0, 512));
    assert_eq!(one.reply(&mut fixture).errno, 0, "the permit is used again");
    one.leave(&mut fixture);
    assert_eq!(flush(&mut fixture, &mut two, 1), 0);
}

#[test]
fn an_answer_is_repeated_at_most_once_across_paths() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    let second = PeerOptions { path: 7, local: 4, first_conn: false, ..options(1) };
    let mut two = Peer::up(&mut fixture, second, "sess1");
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO);
    assert_eq!(flush(&mut fixture, &mut two, 1), errno::EIO, "it may be a replay");
    for _ in 0..3 {
        assert_eq!(flush(&mut fixture, &mut one, 1), 0);
        assert_eq!(flush(&mut fixture, &mut two, 1), 0);
    }
}

#[test]
fn a_failure_on_a_closing_path_counts() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, _) = open(&mut fixture, 1, AccessMode::Migration);
    let (mut two, _) = open(&mut fixture, 2, AccessMode::Migration);
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    {
        let mut device = fixture.device.lock();
        (device.lost, device.hold_failed) = (Some(IoStatus::Io), true);
    }
    two.send_flush((2, 4));
    two.leave(&mut fixture);
    fixture.device.lock().hold_failed = false;
    fixture.settle();
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO);
    assert_eq!(flush(&mut fixture, &mut one, 1), 0);
}

#[derive(Debug, Default)]
struct Store(Mutex<Vec<Arc<EpochState>>>);

impl EpochStore for Store {
    fn save(&self, _key: &str, state: &Arc<EpochState>) {
        self.0.lock().push(Arc::clone(state));
    }
}

#[test]
fn a_failure_is_saved_before_it_is_reported() {
    let store = Arc::new(Store::default());
    let mut options = StandOptions::default();
    options.params.instance.boot = 5;
    options.epoch = SyncEpoch::kept(0, Arc::clone(&store) as _, "vol".into());
    let mut fixture = Fixture::new(options);
    let (mut one, first) = open(&mut fixture, 1, AccessMode::ReadWrite);
    assert_eq!(first.cache_id, 5);
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    one.send_flush((1, 4));
    assert_eq!(one.replies(&mut fixture), []);
    let state = store.0.lock().pop().unwrap();
    let (number, rises) = state.begin_save();
    assert_eq!(number, 1);
    assert_eq!(one.replies(&mut fixture), [], "not yet");
    state.end_save(rises);
    assert_eq!(one.reply(&mut fixture).errno, errno::EIO);
    let again = one.open_device(&mut fixture, "vol", AccessMode::ReadWrite).unwrap();
    assert_eq!(again.cache_id, 5, "this session learns of it from its flushes");
    let (mut two, second) = open(&mut fixture, 2, AccessMode::ReadOnly);
    assert_ne!(second.cache_id, 5, "another one has missed it");
    two.leave(&mut fixture);
    one.leave(&mut fixture);
    let (_, third) = open(&mut fixture, 3, AccessMode::ReadWrite);
    assert_eq!(third.cache_id, second.cache_id);
}

#[test]
fn a_failure_is_reported_even_if_saving_it_takes_too_long() {
    let store = Arc::new(Store::default());
    let epoch = SyncEpoch::kept(0, Arc::clone(&store) as _, "vol".into());
    let mut fixture = Fixture::new(StandOptions { epoch, ..StandOptions::default() });
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    one.send_flush((1, 4));
    assert_eq!(one.replies(&mut fixture), []);
    fixture.pass(Duration::from_secs(6));
    assert_eq!(one.reply(&mut fixture).errno, errno::EIO);
    assert_eq!(flush(&mut fixture, &mut one, 1), 0, "reported once");
}

#[test]
fn a_session_that_reopened_has_no_unflushed_writes() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, first) = open(&mut fixture, 1, AccessMode::Migration);
    let (mut two, _) = open(&mut fixture, 2, AccessMode::Migration);
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut two, 1), errno::EIO);
    one.send_close(5, first.device_id);
    assert_eq!(one.reply(&mut fixture).errno, 0);
    let again = one.open_device(&mut fixture, "vol", AccessMode::Migration).unwrap();
    let write = IoHeader { device_id: again.device_id, ..io(Rw::WRITE, 0, 512) };
    one.send_write((1, 3), write, &[1; 512]);
    assert_eq!(one.reply(&mut fixture).errno, 0);
    assert_eq!(flush(&mut fixture, &mut one, 1), 0, "its new cache ID reported the loss");
}

#[test]
fn a_returning_session_learns_of_lost_unflushed_writes() {
    // A kernel client has room only for the short response; rtrs-client compares cache IDs.
    for (room, boot) in [(OpenRsp::LEN, 5), (OpenRspTail::LONG_LEN, 5), (OpenRspTail::LONG_LEN, 0)]
    {
        for lost_before in [true, false] {
            let mut options = StandOptions::default();
            options.params.instance.boot = boot;
            let mut fixture = Fixture::new(options);
            let (mut other, _) = open(&mut fixture, 2, AccessMode::Migration);
            let open = |fixture: &mut Fixture| {
                let mut peer = Peer::up(fixture, self::options(1), "sess1");
                peer.send_open_for(15, "vol", AccessMode::Migration, room);
                assert_eq!(peer.reply(fixture).errno, 0);
                let opened = OpenRsp::decode(&peer.result(OpenRsp::LEN)).unwrap();
                (peer, opened.cache_id)
            };
            let (mut one, first) = open(&mut fixture);
            assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
            one.leave(&mut fixture);
            assert_eq!(fixture.sessions().len(), 1, "its session is over");
            let (mut one, mut cache) = (None, first);
            if !lost_before {
                let (peer, id) = open(&mut fixture);
                (one, cache) = (Some(peer), id);
            }
            lose(&fixture);
            assert_eq!(flush(&mut fixture, &mut other, 1), errno::EIO);
            let mut one = one.unwrap_or_else(|| {
                let (peer, id) = open(&mut fixture);
                cache = id;
                peer
            });
            let by_cache = cache != first && room > OpenRsp::LEN;
            assert_eq!(by_cache, lost_before && room > OpenRsp::LEN && boot != 0);
            let wanted = if by_cache { 0 } else { errno::EIO };
            assert_eq!(flush(&mut fixture, &mut one, 1), wanted, "{room} {boot} {lost_before}");
            assert_eq!(flush(&mut fixture, &mut one, 1), 0, "reported once");
            one.leave(&mut fixture);
            let (mut one, _) = open(&mut fixture);
            assert_eq!(flush(&mut fixture, &mut one, 1), 0, "nothing is left");
        }
    }
}

#[test]
fn an_answer_lost_with_its_session_goes_to_the_next_one() {
    let mut fixture = Fixture::new(StandOptions::default());
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    assert_eq!(write(&mut fixture, &mut one, 1, false), 0);
    lose(&fixture);
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO);
    one.leave(&mut fixture);
    let (mut one, _) = open(&mut fixture, 1, AccessMode::ReadWrite);
    assert_eq!(flush(&mut fixture, &mut one, 1), errno::EIO, "it may not have arrived");
    assert_eq!(flush(&mut fixture, &mut one, 1), 0);
}
