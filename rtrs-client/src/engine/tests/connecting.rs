//! Tests of connecting: the order of steps, and every refusal or invalid message from a server.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::block::IoOp;
use rtrs_core::fabric::sim::{BindMode, LinkOptions};
use rtrs_core::fabric::{WcOp, WcStatus, WorkCompletion};
use rtrs_core::ids::{PathId, QpNum};
use rtrs_core::status::IoStatus;
use rtrs_core::time::Instant;
use rtrs_core::wire::{
    ClientExtensions, ConnReq, ConnRsp, Extensions, InfoRsp, OpenRsp, errno, errno_name,
};

use super::fixture::{Fixture, MS, SEC, Setup, client_ip, server_ip};
use super::server::{How, Rewrite, Seen};
use crate::engine::control::paths::OPENER_TIME_MAX;
use crate::engine::{DeviceIndex, SessionFailure};
use crate::path::io::WrId;
use crate::path::state::PathState;

/// Kinds of events that the server saw, in order.
fn order(fixture: &Fixture) -> Vec<String> {
    let word = |seen: &Seen| match seen {
        Seen::Connect { req, .. } => format!("connect {}", req.cid),
        Seen::Info { name } => format!("info {}", String::from_utf8_lossy(name)),
        Seen::Request(request) => format!("request {}", request.tail[0]),
        Seen::Heartbeat { .. } => "heartbeat".into(),
        Seen::HeartbeatAck { .. } => "ack".into(),
        Seen::Closed { cid, .. } => format!("closed {cid}"),
    };
    fixture.server.seen.iter().map(word).collect()
}

/// Returns the queue pairs of shard 0 whose completions belong to a path.
fn queue_pairs(fixture: &mut Fixture, path: u16) -> Vec<u32> {
    let (now, wr_id) = (fixture.now(), WrId::Request.encode(PathId(path)));
    let wc = |qp: u32| WorkCompletion::new(QpNum(qp), wr_id, WcOp::RdmaWrite, WcStatus::Success);
    (0..64).filter(|qp| fixture.client.owns(now, 0, &wc(*qp))).collect()
}

#[test]
fn a_late_completion_belongs_to_no_path() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    let [ended, other] = [0, 1].map(|path| queue_pairs(&mut fixture, path));
    assert_eq!([ended.len(), other.len()], [2; 2], "connection 0 and the one for IO");
    assert!(ended.iter().all(|qp| !other.contains(qp)));
    assert!(queue_pairs(&mut fixture, 2).is_empty(), "a slot without a path");
    let now = fixture.now();
    fixture.server.end_path(now, 0);
    fixture.until("the end", SEC, |s| s.client.states()[0] == PathState::Waiting);
    assert!(queue_pairs(&mut fixture, 0).is_empty());
    fixture.until("the next connection", SEC, Fixture::is_whole);
    let next = queue_pairs(&mut fixture, 0);
    assert!(next.len() == 2 && ended.iter().all(|qp| !next.contains(qp)));
    assert_eq!(queue_pairs(&mut fixture, 1), other);
}

#[test]
fn the_handshake_keeps_its_order() {
    for acknowledged in [false, true] {
        let fixture = Fixture::open(|s| {
            s.config.shards = 3;
            s.world.acknowledged = acknowledged;
        });
        // The server itself asserts that each connection is up before the next is requested, and
        // that INFO_REQ is the first message.
        let expected = [
            "connect 0",
            "connect 1",
            "connect 2",
            "connect 3",
            "info fixture",
            "request 0",
            "request 2",
        ];
        assert_eq!(order(&fixture), expected);
        let connects = fixture.server.connects();
        for (index, (req, local, _)) in connects.iter().enumerate() {
            assert_eq!((req.cid.index(), req.cid_num, req.recon_cnt), (index, 4, 1));
            assert_eq!((req.path_uuid.0, req.session_id.0), ([0xa0; 16], [0x5e; 16]));
            assert!(req.first_conn);
            assert_eq!(*local, server_ip(0));
        }
    }
}

#[test]
fn paths_open_the_device_one_after_the_other() {
    let mut fixture = Fixture::new(|s| {
        s.paths = 3;
        s.how.hold_control = true;
    });
    // For a kernel server, the control permit is the same memory on every path.
    for served in 0..6 {
        fixture.run(20 * MS);
        assert_eq!(fixture.server.held.len(), 1, "after {served} answers");
        assert_eq!(fixture.server.requests().count(), served + 1);
        fixture.server.release();
    }
    fixture.until("all paths", SEC, Fixture::is_whole);

    // An unanswered open delays the others only until its own time limit.
    fixture.server.how.hold_control = true;
    for path in 0..3 {
        fixture.server.end_path(fixture.now(), path);
    }
    fixture.until("a path that asks", 5 * SEC, |s| !s.server.held.is_empty());
    fixture.server.how.hold_control = false;
    fixture.until("all paths again", 15 * SEC, Fixture::is_whole);
}

#[test]
fn permits_and_bounds_hold_in_every_mode() {
    for (bind, invalidate_reads) in
        [(BindMode::Done, true), (BindMode::Pending, true), (BindMode::Pending, false)]
    {
        for new_rkey in [true, false] {
            for acknowledged in [true, false] {
                let mut fixture = Fixture::open(|s| {
                    s.how.new_rkey = new_rkey;
                    s.world.bind = bind;
                    s.invalidate_reads = invalidate_reads;
                    s.world.acknowledged = acknowledged;
                });
                let disk = fixture.server.disk.clone();
                assert_eq!(fixture.read(0, 512, 4096), disk[512..4608]);
                assert_eq!(fixture.read(1, 1 << 20, 200_192), disk[1 << 20..(1 << 20) + 200_192]);
            }
        }
    }
}

#[test]
fn every_reject_is_reported_and_retried() {
    for errno in [104_i16, 6, 17, 12, 16, 1, 110] {
        // RDMA CM returns a reject padded to its full capacity.
        let mut rsp = ConnRsp { errno: -errno, ..ConnRsp::default() }.encode().to_vec();
        rsp.resize(148, 0);
        let mut fixture = Fixture::spoiled(|_| {}, |how| how.refuse = Some(rsp));
        fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 2);
        let reported = fixture.client.last_error(0);
        assert!(reported.contains("refused by the server"), "{reported}");
        assert!(reported.contains(errno_name(errno.unsigned_abs())), "{reported}");
        fixture.server.how.refuse = None;
        fixture.until("a good path", 5 * SEC, Fixture::is_whole);
        assert_eq!(fixture.client.last_error(0), "");
    }
}

#[test]
fn rejects_without_an_errno_are_rejects() {
    let zero = ConnRsp::default().encode().to_vec();
    let positive = ConnRsp { errno: 104, ..ConnRsp::default() }.encode().to_vec();
    for data in [Vec::new(), vec![0xff; 8], zero, positive] {
        let mut fixture = Fixture::spoiled(|_| {}, |how| how.refuse = Some(data.clone()));
        fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 2);
        let reported = fixture.client.last_error(0);
        assert!(reported.contains("refused by the server"), "{reported}");
    }
}

#[test]
fn attempts_back_off_and_keep_their_uuids() {
    let mut fixture = Fixture::spoiled(
        |s| (s.config.reconnect_min, s.config.reconnect_max) = (100 * MS, 800 * MS),
        |how| how.refuse = Some(ConnRsp::reject(104).encode().to_vec()),
    );
    fixture.run(20 * SEC);
    let connects = fixture.server.connects();
    assert!((20..45).contains(&connects.len()), "{}", connects.len());
    // The first wait precedes the first of these attempts.
    let mut bound = 200 * MS;
    for (before, after) in connects.iter().zip(&connects[1..]) {
        let wait = after.2.since(before.2);
        assert!(wait >= bound / 2 && wait <= bound + MS, "{wait:?} for {bound:?}");
        bound = (bound * 2).min(800 * MS);
        assert_eq!(after.0.recon_cnt, before.0.recon_cnt + 1, "each attempt counts");
        assert_eq!(after.0.path_uuid, before.0.path_uuid);
        assert_eq!(after.0.session_id, before.0.session_id);
    }
}

#[test]
fn a_second_path_does_not_reopen_the_session() {
    let mut fixture = Fixture::new(|s| s.paths = 2);
    fixture.link_down(1);
    fixture
        .until("the first path", 2 * SEC, |s| s.client.control.view().is_open(DeviceIndex::FIRST));
    fixture.link_up(1);
    fixture.until("the second path", 5 * SEC, Fixture::is_whole);
    let connects = fixture.server.connects();
    let second: Vec<_> = connects.iter().filter(|c| c.1 == server_ip(1)).collect();
    assert!(!second[0].0.first_conn, "cid 0 of a second path joins");
    assert!(second[1..].iter().all(|c| c.0.first_conn));
    assert!(second.iter().all(|c| c.0.path_uuid.0 == [0xa1; 16]));
    assert_eq!(fixture.server.opens, 1, "the device is open already");
}

#[test]
fn one_path_opens_the_session_and_the_others_join_it() {
    let mut fixture = Fixture::new(|s| s.paths = 3);
    fixture.until("all paths", 5 * SEC, Fixture::is_whole);
    let connects = fixture.server.connects();
    let opened: Vec<_> = connects.iter().filter(|c| c.0.cid.index() == 0).collect();
    assert_eq!(opened.len(), 3, "each path connected once");
    assert!(opened[0].0.first_conn, "the first one opens");
    assert!(opened[1..].iter().all(|c| !c.0.first_conn), "the others join");
}

#[test]
fn an_unresponsive_first_path_delays_the_others_for_a_bounded_time() {
    let mut fixture = Fixture::new(|s| {
        s.paths = 2;
        s.config.connect_timeout = 4 * SEC;
    });
    fixture.link_down(0);
    fixture
        .until("the second path", 5 * SEC, |s| s.client.control.view().is_open(DeviceIndex::FIRST));
    let connects = fixture.server.connects();
    assert_eq!(connects[0].1, server_ip(1));
    assert!(connects[0].0.first_conn, "no other path opened the session");
    let waited = connects[0].2.since(Instant::ZERO);
    assert!(waited >= OPENER_TIME_MAX && waited < OPENER_TIME_MAX + SEC / 4, "{waited:?}");
}

#[test]
fn invalid_accepts_end_the_attempt() {
    let patched = |at: usize, byte: u8| {
        move |rsp: ConnRsp| {
            let mut bytes = rsp.encode().to_vec();
            bytes[at] = byte;
            bytes
        }
    };
    let lies: [(&str, Rewrite<ConnRsp>); 8] = [
        ("magic", Box::new(patched(0, 0xbc))),
        ("version", Box::new(patched(3, 0x03))),
        ("accepted with error", Box::new(patched(4, 0x98))),
        ("bad connect response", Box::new(|_| Vec::new())),
        ("bad connect response", Box::new(|rsp: ConnRsp| rsp.encode()[..55].to_vec())),
        ("queue_depth", Box::new(|rsp| ConnRsp { queue_depth: 0, ..rsp }.encode().to_vec())),
        ("max_io_size", Box::new(|rsp| ConnRsp { max_io_size: !0, ..rsp }.encode().to_vec())),
        ("max_hdr_size", Box::new(|rsp| ConnRsp { max_hdr_size: 64, ..rsp }.encode().to_vec())),
    ];
    for (words, lie) in lies {
        let spoil = |how: &mut How| how.con_rsp = Some(Box::new(move |_, rsp| lie(rsp)));
        let mut fixture = Fixture::spoiled(|_| {}, spoil);
        fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 2);
        let error = fixture.client.last_error(0);
        assert!(error.contains(words), "{error:?} for {words}");
        assert_eq!(fixture.client.control.failure(), None, "{words}: worth another try");
        fixture.server.how.con_rsp = None;
        fixture.until("a good path", 10 * SEC, Fixture::is_whole);
    }
}

#[test]
fn an_invalid_accept_of_a_later_connection_ends_the_attempt() {
    for (at, byte) in [(0, 0xbc), (3, 9), (4, 0x98)] {
        let lie = move |req: &ConnReq, rsp: ConnRsp| {
            let mut bytes = rsp.encode().to_vec();
            if req.cid.0 == 2 {
                bytes[at] = byte;
            }
            bytes
        };
        let mut fixture = Fixture::spoiled(|_| {}, |how| how.con_rsp = Some(Box::new(lie)));
        fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 4);
        let error = fixture.client.last_error(0);
        assert!(error.starts_with("connection 2: "), "{error}");
        assert!(error.contains("bad connect") || error.contains("accepted with"), "{error}");
        // The limits in a later connection's answer are ignored.
        fixture.server.how.con_rsp = Some(Box::new(|req, rsp| {
            let rsp = if req.cid.0 == 0 { rsp } else { ConnRsp { queue_depth: 0, ..rsp } };
            rsp.encode().to_vec()
        }));
        fixture.until("a good path", 10 * SEC, Fixture::is_whole);
    }
}

#[test]
fn a_depth_below_the_number_of_shards_fails_the_session() {
    let mut fixture = Fixture::new(|s| {
        s.config.shards = 4;
        s.how.queue_depth = 4;
    });
    fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
    let text = fixture.client.control.failure().unwrap().to_string();
    assert!(text.contains("queue depth of 4") && text.contains("--shards 3"), "{text}");

    // One more permit is enough for every shard.
    let mut fixture = Fixture::open(|s| {
        s.config.shards = 4;
        s.how.queue_depth = 5;
    });
    for shard in 0..4 {
        fixture.read(shard, 0, 4096);
    }

    let mut fixture = Fixture::new(|s| s.config.queue_depth_limit = 2);
    fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
    let text = fixture.client.control.failure().unwrap().to_string();
    assert!(text.contains("queue depth of 2") && text.contains("--shards 1"), "{text}");

    // There is no smaller number of shards to suggest.
    let mut fixture = Fixture::new(|s| s.config.queue_depth_limit = 1);
    fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
    let text = fixture.client.control.failure().unwrap().to_string();
    assert!(text.ends_with("connection: use a larger queue depth"), "{text}");
}

#[test]
fn changed_bounds_after_a_reconnect_are_refused_until_restored() {
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.queue_depth = 32;
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("attempts", 5 * SEC, |s| {
        s.client.last_error(0).contains("limits have changed (queue depth 16 to 32")
    });
    fixture.run(3 * SEC);
    assert_eq!(fixture.client.control.failure(), None);
    assert_ne!(fixture.client.states(), [PathState::Connected]);
    fixture.server.how.queue_depth = 16;
    fixture.until("a good path", 10 * SEC, Fixture::is_whole);
    fixture.read(1, 0, 4096);
}

/// A server that is short of memory may grant a smaller depth. The client repeats that depth on
/// every connect, even to a server that no longer knows the session.
#[test]
fn the_granted_depth_is_repeated() {
    let mut fixture = Fixture::open(|s| s.paths = 2);
    let offered = |fixture: &Fixture| -> Vec<ClientExtensions> {
        let connects = fixture.server.connects().into_iter();
        connects.map(|(req, ..)| ClientExtensions::decode(&req.ext)).collect()
    };
    let before = offered(&fixture);
    assert!(before.iter().all(|offered| offered.smaller_depth));
    assert_eq!(before[0].queue_depth, 0, "nothing is known yet");
    assert!(before.iter().all(|offered| matches!(offered.queue_depth, 0 | 16)), "{before:?}");
    for path in [1, 0] {
        fixture.server.end_path(fixture.now(), path);
    }
    let all = before.len() * 2;
    fixture
        .until("both paths again", 10 * SEC, |s| s.server.connects().len() >= all && s.is_whole());
    let again = offered(&fixture).split_off(before.len());
    assert!(again.iter().all(|offered| offered.queue_depth == 16), "{again:?}");
}

#[test]
fn invalid_chunk_tables_end_the_attempt() {
    let patched = |patches: Vec<(usize, u8)>| {
        move |mut bytes: Vec<u8>| {
            for &(at, byte) in &patches {
                bytes[at] = byte;
            }
            bytes
        }
    };
    let lies: [Rewrite<Vec<u8>>; 9] = [
        Box::new(patched(vec![(0, 4)])),
        Box::new(patched(vec![(2, 0)])),
        Box::new(patched(vec![(2, 15)])),
        Box::new(patched(vec![(2, 8)])),
        Box::new(patched(vec![(2, 32)])),
        Box::new(patched(vec![(8 + 12, 1)])),
        Box::new(patched(vec![(8 + 14, 0)])),
        Box::new(|bytes| bytes[..bytes.len() - 1].to_vec()),
        Box::new(|bytes| bytes[..InfoRsp::HEAD_LEN - 1].to_vec()),
    ];
    for (index, lie) in lies.into_iter().enumerate() {
        let mut fixture = Fixture::spoiled(|_| {}, |how| how.info_rsp = Some(lie));
        fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 6);
        let error = fixture.client.last_error(0);
        assert!(error.contains("bad INFO_RSP"), "lie {index}: {error:?}");
        assert_eq!(fixture.server.requests().count(), 0);
        fixture.server.how.info_rsp = None;
        fixture.until("a good path", 10 * SEC, Fixture::is_whole);
    }
    // Longer than the receive buffer: the fabric refuses it.
    let long = |mut bytes: Vec<u8>| {
        bytes.extend([0; 16]);
        bytes
    };
    let mut fixture = Fixture::spoiled(|_| {}, |how| how.info_rsp = Some(Box::new(long)));
    fixture.until("two attempts", 5 * SEC, |s| s.server.connects().len() >= 6);
}

#[test]
fn silence_at_each_step_has_a_bound() {
    // No answer to INFO_REQ.
    let silent = |_| Vec::new();
    let mut fixture = Fixture::spoiled(|_| {}, |how| how.info_rsp = Some(Box::new(silent)));
    fixture.until("another attempt", 15 * SEC, |s| s.server.connects().len() > 3);
    assert!(fixture.client.last_error(0).contains("no answer in time"));

    // No answer to OPEN, while heartbeats are answered.
    let mut fixture = Fixture::spoiled(|_| {}, |how| how.hold_control = true);
    fixture.until("another attempt", 15 * SEC, |s| s.server.connects().len() > 3);
    let error = fixture.client.last_error(0);
    assert!(error.contains("did not answer the open"), "{error}");
    fixture.server.how.hold_control = false;
    fixture.until("a good path", 15 * SEC, Fixture::is_whole);

    // No answer to a connect.
    let mut fixture = Fixture::spoiled(|_| {}, |_| {});
    fixture.run(MS);
    fixture.world.silence(server_ip(0), client_ip(0));
    fixture.run(1150 * MS);
    assert_eq!(fixture.client.last_error(0), "no answer within the connect timeout");
    fixture.world.unsilence(server_ip(0), client_ip(0));
    fixture.until("a good path", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_path_that_dies_before_its_open_delays_no_other_path() {
    for fence in [true, false] {
        let mut fixture =
            Fixture::open(|s| (s.paths, s.how.fence, s.world.link.detect) = (2, fence, None));
        fixture.server.how.hold_volume = Some("vol0");
        (0..2).for_each(|path| fixture.server.end_path(fixture.now(), path));
        fixture.until("the first open", SEC, |s| s.server.held.len() == 1);
        let opens = fixture.client.states().iter().position(|s| *s == PathState::Opening);
        let waits = 1 - opens.expect("a path that opens");
        fixture.until("the other path", SEC, |s| s.client.states()[waits] == PathState::Opening);
        fixture.link_down(waits);
        fixture.until("its end", SEC, |s| s.client.last_error(waits).contains("silent for"));
        assert_eq!(fixture.client.states()[1 - waits], PathState::Opening, "it is answered late");
        fixture.link_up(waits);
        fixture.server.how.hold_volume = None;
        fixture.server.release();
        fixture.until("both paths", 5 * SEC, Fixture::is_whole);
    }
}

#[test]
fn a_refused_open_fails_the_session_with_an_explanation() {
    for (errno, name, word) in [
        (
            2,
            "ENOENT",
            ": the server has no export of that name (rtrs-client discover lists them), or cannot",
        ),
        (1, "EPERM", "--access ro"),
        (15, "ENOTBLK", ": the server has something else of that name"),
        (16, "EBUSY", "--retry-for keeps trying"),
        (22, "EINVAL", ": the server does not accept this name"),
        (5, "EIO", ""),
    ] {
        let mut fixture = Fixture::new(|s| s.how.open_errno = errno);
        fixture.until("the failure", 2 * SEC, |s| s.client.control.failure().is_some());
        let failure = fixture.client.control.failure().unwrap();
        let SessionFailure::OpenRefused { export, errno, hint } = failure else {
            panic!("{failure:?}");
        };
        assert_eq!((export.as_str(), errno.as_str()), ("vol0", name));
        assert!(hint.contains(word), "{hint}");
        let text = failure.to_string();
        assert!(
            text.starts_with(&format!("the server refused to open \"vol0\": {name}")),
            "{text}"
        );
        // The open is not retried.
        fixture.run(3 * SEC);
        assert_eq!(fixture.server.requests().count(), 2);
    }
}

#[test]
fn a_successor_waits_for_the_export_to_be_free() {
    let setup = |s: &mut Setup| {
        s.how.open_errno = 1;
        s.config.open_patience = 20 * SEC;
    };
    // A server that cannot open the export yet answers ENOENT.
    for (errno, name) in [(1, "EPERM"), (2, "ENOENT"), (16, "EBUSY")] {
        let mut fixture = Fixture::new(|s| {
            setup(s);
            s.how.open_errno = errno;
        });
        fixture.run(5 * SEC);
        assert!(fixture.client.control.failure().is_none(), "{name}");
        assert!(fixture.client.last_error(0).contains(name), "{}", fixture.client.last_error(0));
        fixture.server.how.open_errno = 0;
        fixture.until("the device", 5 * SEC, Fixture::is_whole);
    }
    // Retries have a time limit, and do not cover permanent errors.
    let mut fixture = Fixture::new(setup);
    fixture.run(19 * SEC);
    assert!(fixture.client.control.failure().is_none());
    fixture.until("the failure", 5 * SEC, |s| s.client.control.failure().is_some());
    let mut fixture = Fixture::new(|s| {
        setup(s);
        s.how.open_errno = 15;
    });
    fixture.until("the failure", 2 * SEC, |s| s.client.control.failure().is_some());
}

#[test]
fn an_unusable_device_is_refused() {
    type Lie = fn(OpenRsp) -> OpenRsp;
    let lies: [(&str, Lie); 4] = [
        ("block size is 0", |rsp| OpenRsp { logical_block_size: 0, ..rsp }),
        ("block size is 768", |rsp| OpenRsp { logical_block_size: 768, ..rsp }),
        ("sectors", |rsp| OpenRsp { nsectors: u64::MAX, ..rsp }),
        ("does not fit its largest request", |rsp| OpenRsp { logical_block_size: 32768, ..rsp }),
    ];
    for (word, lie) in lies {
        let spoil = |how: &mut How| how.open_rsp = Some(Box::new(lie));
        let mut fixture = Fixture::spoiled(|s| s.how.max_io = 12288, spoil);
        fixture.until("the error", 2 * SEC, |s| s.client.last_error(0).contains(word));
        assert!(!fixture.client.control.view().is_open(DeviceIndex::FIRST));
        fixture.server.how.open_rsp = None;
        fixture.until("a good path", 5 * SEC, Fixture::is_whole);
    }
    let mut fixture = Fixture::new(|s| {
        s.how.open_rsp = Some(Box::new(|rsp| OpenRsp { nsectors: 0, ..rsp }));
    });
    fixture.until("the failure", 2 * SEC, |s| s.client.control.failure().is_some());
}

#[test]
fn a_session_whose_paths_all_fail_at_first_fails_with_all_reasons() {
    let mut fixture = Fixture::new(|s| {
        s.paths = 2;
        s.how.refuse = Some(ConnRsp::reject(12).encode().to_vec());
    });
    fixture.link_down(1);
    fixture.until("the failure", 2 * SEC, |s| s.client.control.failure().is_some());
    let text = fixture.client.control.failure().unwrap().to_string();
    assert!(text.starts_with("no path to the server: path0: refused by the server: ENOMEM"));
    assert!(text.ends_with("; path1: no answer within the connect timeout"), "{text}");
    // The session has failed, so there are no further attempts.
    let seen = fixture.server.seen.len();
    fixture.run(5 * SEC);
    assert_eq!(fixture.server.seen.len(), seen);
    fixture.detach();
    fixture.until("the end", SEC, |s| s.client.control.view().is_done());
}

#[test]
fn the_read_only_fallback_applies_on_every_path() {
    for delay in [0, 1, 5, 20] {
        let mut fixture = Fixture::new(|s| {
            (s.paths, s.how.read_only, s.config.volumes[0].read_only_fallback) = (3, true, true);
        });
        let slow = LinkOptions { delay: MS / 100 + MS * delay, ..LinkOptions::default() };
        fixture.world.set_link(client_ip(1), server_ip(1), slow);
        fixture.until("all paths", 2 * SEC, Fixture::is_whole);
        let tag = fixture.submit(0, IoOp::Write, 0, 512);
        fixture.drain(SEC);
        assert_eq!(fixture.client.status(tag), Some(IoStatus::ReadOnly));
        fixture.read(1, 0, 4096);
    }
    let mut fixture = Fixture::new(|s| s.how.read_only = true);
    fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
    let text = fixture.client.control.failure().unwrap().to_string();
    assert!(text.contains("EACCES: the export is read-only"), "{text}");
}

/// Creates a session whose path has several addresses; only the one at `good` is the server's.
fn several(good: usize, count: usize) -> Fixture {
    Fixture::new(|s| {
        s.remotes = (0..count)
            .map(|at| if at == good { server_ip(0) } else { unused_ip(at) })
            .map(|ip| SocketAddr::new(ip, 1234))
            .collect();
        // Longer than the test, so only the next address can be tried, not the next round.
        (s.config.reconnect_min, s.config.reconnect_max) = (60 * SEC, 60 * SEC);
    })
}

fn unused_ip(n: usize) -> IpAddr {
    IpAddr::from([10, 99, 0, u8::try_from(n).unwrap()])
}

#[test]
fn every_address_of_a_name_is_tried() {
    for good in 0..3 {
        let mut fixture = several(good, 3);
        fixture.until("a path", 5 * SEC, Fixture::is_whole);
        let status = fixture.client.control.view().paths();
        assert_eq!(status[0].address, format!("{}:1234", server_ip(0)));
        assert_eq!(status[0].reconnects, 0);
    }
}

#[test]
fn a_session_gives_up_when_no_address_answers() {
    let mut fixture = several(9, 3);
    fixture.until("the failure", 20 * SEC, |s| s.client.control.failure().is_some());
    let Some(SessionFailure::Unreachable(text)) = fixture.client.control.failure() else {
        panic!("{:?}", fixture.client.control.failure());
    };
    // The error names the last address tried.
    assert!(text.contains(&format!("{}:1234: ", unused_ip(2))), "{text}");
}

#[test]
fn a_lost_path_waits_before_it_retries_its_addresses() {
    let mut fixture = Fixture::open(|s| {
        s.remotes = vec![SocketAddr::new(server_ip(0), 1234); 2];
        (s.config.reconnect_min, s.config.reconnect_max) = (SEC, SEC);
    });
    fixture.server.end_path(fixture.now(), 0);
    fixture.run(400 * MS);
    assert_eq!(fixture.client.states(), [PathState::Waiting]);
    fixture.until("the path again", 5 * SEC, Fixture::is_whole);
}

#[test]
fn a_path_that_ends_at_info_req_names_the_likely_reason() {
    // If another session has the name, a kernel server ends only one connection, no matter which.
    for (first, has_extensions) in [(0, false), (1, false), (0, true), (1, true)] {
        let mut fixture = Fixture::new(|s| {
            s.how.info_rsp = Some(Box::new(|_| Vec::new()));
            if !has_extensions {
                let ext = Extensions::default().encode();
                let bare = move |_: &ConnReq, rsp| ConnRsp { ext, ..rsp }.encode().to_vec();
                s.how.con_rsp = Some(Box::new(bare));
            }
        });
        let is_info = |seen: &Seen| matches!(seen, Seen::Info { .. });
        let asked = |s: &Fixture| s.server.seen.iter().any(is_info);
        fixture.until("INFO_REQ", SEC, asked);
        fixture.server.end_connection(fixture.now(), 0, first);
        fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
        let error = fixture.client.control.failure().unwrap().to_string();
        assert!(error.contains("in the handshake of session \"fixture\": "), "{error}");
        let guess = "perhaps another session on the server has this name (--session-name)";
        assert_eq!(error.contains(guess), !has_extensions, "{error}");
        assert!(error.contains("see the server's log"), "{error}");
    }
}

#[test]
fn a_refused_session_fails_with_its_name_and_the_reason() {
    for (errno, reason) in [
        (errno::EEXIST, "EEXIST (another session on the server has this name"),
        (errno::EINVAL, "EINVAL (the server does not accept this name"),
        (errno::EACCES, "EACCES (the server's access lists do not admit this client"),
        (errno::ENOMEM, "ENOMEM (the server has no memory"),
        (errno::EIO, "EIO (see the server's log)"),
    ] {
        let refuse = move |_| InfoRsp::refusal(errno).to_vec();
        let mut fixture = Fixture::new(|s| s.how.info_rsp = Some(Box::new(refuse)));
        fixture.until("the failure", SEC, |s| s.client.control.failure().is_some());
        let error = fixture.client.control.failure().unwrap().to_string();
        assert!(error.contains(&format!("refused session \"fixture\": {reason}")), "{error}");
        let (connect, ..) = fixture.server.connects()[0];
        assert!(ClientExtensions::decode(&connect.ext).info_refusals);
    }
    // A session that has been up tries again.
    let mut fixture = Fixture::open(|_| {});
    fixture.server.how.info_rsp = Some(Box::new(|_| InfoRsp::refusal(errno::EEXIST).to_vec()));
    fixture.server.end_path(fixture.now(), 0);
    fixture.until("the refusal", 5 * SEC, |s| s.client.last_error(0).contains("EEXIST"));
    fixture.server.how.info_rsp = None;
    fixture.until("a good path", 10 * SEC, Fixture::is_whole);
}
