//! Tests every wire vector of `tests/golden/rtrs.hex` in both directions: encoding a message yields
//! the vector byte for byte, and decoding the vector yields the message.
//!
//! A vector that no assertion used fails the test, so that the file cannot contain unused vectors.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use rtrs_core::gateway::Standing;
use rtrs_core::identity::{EvictionSecret, ExportId, ServerProcess};
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, Rkey, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::wire::{
    AccessMode, Auth, Challenge, ChallengeRsp, ChunkRequest, ClientExtensions, Close, ConnReq,
    ConnRsp, Credential, CredentialKind, Discover, Discovered, Extensions, Fence, Imm, InfoReq,
    InfoRsp, IoHeader, Move, Name, Open, OpenFlags, OpenRsp, OpenRspTail, Page, ReadMsg, RkeyRsp,
    Rw, RwOp, SessInfo, SessInfoRsp, SgDesc, SignedProof, TimedRkeyRsp, UserMessage, WireError,
    WriteMsg, errno,
};

/// Vectors by name, with the set of used ones.
struct Vectors {
    bytes: BTreeMap<String, Vec<u8>>,
    seen: RefCell<BTreeSet<String>>,
}

impl Vectors {
    fn load() -> Self {
        let mut bytes: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut current: Option<String> = None;
        for line in include_str!("../../../tests/golden/rtrs.hex").lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(name) = line.strip_suffix(':') {
                assert!(bytes.insert(name.to_owned(), vec![]).is_none(), "{name} twice");
                current = Some(name.to_owned());
                continue;
            }
            for token in line.split_whitespace() {
                let (hex, count) = token.split_once('*').unwrap_or((token, "1"));
                let byte = u8::from_str_radix(hex, 16).expect(token);
                let name = current.as_ref().expect("bytes before the first name");
                let vector = bytes.get_mut(name).expect(name);
                vector.extend(std::iter::repeat_n(byte, count.parse().expect(token)));
            }
        }
        Self { bytes, seen: RefCell::default() }
    }

    fn get(&self, name: &str) -> &[u8] {
        self.seen.borrow_mut().insert(name.to_owned());
        self.bytes.get(name).unwrap_or_else(|| panic!("no vector {name}"))
    }

    /// Tests both directions of one message.
    fn check<M: Debug + PartialEq>(
        &self,
        name: &str,
        message: M,
        encoded: impl AsRef<[u8]>,
        decode: impl Fn(&[u8]) -> Result<M, WireError>,
    ) {
        let golden = self.get(name);
        assert_eq!(encoded.as_ref(), golden, "encoding {name}");
        assert_eq!(decode(golden).as_ref(), Ok(&message), "decoding {name}");
        let mut longer = golden.to_vec();
        longer.extend([0xee; 140]);
        assert_eq!(decode(&longer), Ok(message), "decoding {name} with padding after it");
    }

    fn check_read(&self, name: &str, message: ReadMsg) {
        let mut bytes = [0xff; ReadMsg::LEN_MAX];
        let len = message.encode(&mut bytes);
        self.check(name, message, &bytes[..len], ReadMsg::decode);
    }

    fn check_info_rsp(&self, name: &str, message: &InfoRsp) {
        let mut bytes = vec![0xff; message.encoded_len()];
        assert_eq!(message.encode(&mut bytes), bytes.len());
        self.check(name, message.clone(), &bytes, InfoRsp::decode);
    }

    /// Locates and validates the tail of a chunk as a server does.
    fn tail<'a>(&'a self, name: &str, data_len: u32, message_len: usize) -> UserMessage<'a> {
        let bytes = self.get(name);
        let (user, message) = bytes.split_at(bytes.len() - message_len);
        let off = data_len + user.len() as u32;
        let range = ChunkRequest::message_range(off, Limits::DEFAULT.chunk_size()).unwrap();
        assert_eq!(range.start, off as usize, "{name}");
        let request = ChunkRequest::parse(off, message).expect(name);
        assert_eq!(request.data_len, data_len, "{name}");
        assert_eq!(request.user_range(), data_len as usize..off as usize, "{name}");
        request.user(user, 2).expect(name)
    }
}

fn uuid(first: u8) -> [u8; 16] {
    std::array::from_fn(|i| first + i as u8)
}

fn check_handshake(vectors: &Vectors) {
    let req = ConnReq {
        cid: ConnIndex(0),
        cid_num: 5,
        recon_cnt: 1,
        path_uuid: PathUuid(uuid(0xa0)),
        session_id: SessionId(uuid(0xb0)),
        first_conn: true,
        ext: [0; 11],
    };
    vectors.check("con_req_cid0_of_5", req, req.encode(), ConnReq::decode);
    let req = ConnReq {
        cid: ConnIndex(2),
        cid_num: 3,
        recon_cnt: 7,
        path_uuid: PathUuid(uuid(0xb0)),
        session_id: SessionId(uuid(0xa0)),
        first_conn: false,
        ext: [0; 11],
    };
    vectors.check("con_req_second_path", req, req.encode(), ConnReq::decode);
    let req = ConnReq {
        cid: ConnIndex(1),
        cid_num: 3,
        recon_cnt: 2,
        path_uuid: PathUuid(uuid(0xa0)),
        session_id: SessionId(uuid(0xb0)),
        first_conn: true,
        ext: ClientExtensions {
            smaller_depth: true,
            changed: true,
            times: true,
            authenticates: false,
            gateways: true,
            info_refusals: false,
            queue_depth: 128,
        }
        .encode(),
    };
    vectors.check("con_req_known_depth", req, req.encode(), ConnReq::decode);
    let extensions = ClientExtensions { info_refusals: true, ..ClientExtensions::decode(&req.ext) };
    let req = ConnReq { ext: extensions.encode(), ..req };
    vectors.check("con_req_info_refusals", req, req.encode(), ConnReq::decode);

    for (name, new_rkey) in [("con_rsp_accept_new_rkey", true), ("con_rsp_accept", false)] {
        let rsp = ConnRsp::accept(Limits::DEFAULT, new_rkey);
        vectors.check(name, rsp, rsp.encode(), ConnRsp::decode);
        assert_eq!(rsp.chunk_size(), Ok(131_072));
        assert_eq!(Extensions::decode(&rsp.ext), Extensions::default());
    }
    let identity = Some(uuid(0xc0));
    let ours = Extensions {
        identity,
        times: true,
        idle_ms: Some(30_000),
        process: Some(ServerProcess([0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5])),
        ..Extensions::OURS
    };
    let rsp = ConnRsp { ext: ours.encode(), ..ConnRsp::accept(Limits::DEFAULT, true) };
    assert_eq!(Extensions::decode(&rsp.ext), ours);
    vectors.check("con_rsp_accept_ours", rsp, rsp.encode(), ConnRsp::decode);
    let evicted = Extensions { identity: Some(uuid(0xd0)), ..Extensions::default() };
    let rsp = ConnRsp { ext: evicted.encode(), ..ConnRsp::reject(errno::ESTALE) };
    vectors.check("con_rsp_reject_estale_ours", rsp, rsp.encode(), ConnRsp::decode);
    for (name, errno) in [
        ("con_rsp_reject_econnreset", errno::ECONNRESET),
        ("con_rsp_reject_enxio", errno::ENXIO),
        ("con_rsp_reject_eexist", errno::EEXIST),
        ("con_rsp_reject_enomem", errno::ENOMEM),
        ("con_rsp_reject_eusers", errno::EUSERS),
        ("con_rsp_reject_edquot", errno::EDQUOT),
    ] {
        let rsp = ConnRsp::reject(errno);
        vectors.check(name, rsp, rsp.encode(), ConnRsp::decode);
    }

    let req = InfoReq { session_name: Name::new(b"goldn").unwrap() };
    vectors.check("info_req", req, req.encode(), InfoReq::decode);
    let pool = SgDesc { addr: 0xff33_9240_0958_0000, key: Rkey(0x20490), len: 64 << 20 };
    let rsp = InfoRsp { descs: vec![pool] };
    vectors.check_info_rsp("info_rsp_one_desc", &rsp);
    let chunks = rsp.chunks(512, 131_072).unwrap();
    assert_eq!(chunks.len(), 512);
    assert_eq!(chunks[511].addr, pool.addr + 511 * 131_072);
    let chunk = |addr, key| SgDesc { addr, key: Rkey(key), len: 131_072 };
    let rsp = InfoRsp { descs: vec![chunk(0x1000_0000, 0x3b5), chunk(0x1002_0000, 0x3b6)] };
    vectors.check_info_rsp("info_rsp_two_desc", &rsp);
    let decode = |bytes: &[u8]| Ok(InfoRsp::refused(bytes).unwrap_or_default());
    vectors.check("info_rsp_refused", errno::EEXIST, InfoRsp::refusal(errno::EEXIST), decode);
}

fn check_export(vectors: &Vectors) {
    let info = SessInfo::default();
    vectors.check("sess_info", info, info.encode(), SessInfo::decode);
    let rsp = SessInfoRsp::answer(info);
    vectors.check("sess_info_rsp", rsp, rsp.encode(), SessInfoRsp::decode);
    let dev_name = Name::new(b"/dev/loop0").unwrap();
    let flags = OpenFlags::default();
    let open = Open { access: AccessMode::ReadWrite, flags, dev_name };
    vectors.check("open_rw", open, open.encode(), Open::decode);
    let flags = OpenFlags { returns: true, waits: true };
    let open = Open { access: AccessMode::Migration, flags, dev_name };
    vectors.check("open_migration_ours", open, open.encode(), Open::decode);
    let rsp = OpenRsp {
        nsectors: 131_072,
        max_hw_sectors: 0xa00,
        max_discard_sectors: 0x7f_ffff,
        discard_granularity: 4096,
        physical_block_size: 512,
        logical_block_size: 512,
        max_segments: 128,
        write_cache: true,
        ..OpenRsp::default()
    };
    vectors.check("open_rsp", rsp, rsp.encode(), OpenRsp::decode);
    let rsp = OpenRsp { volatile: true, cache_id: 0x1122_3344_5566_7788, ..rsp };
    vectors.check("open_rsp_ours", rsp, rsp.encode(), OpenRsp::decode);
    let tail = OpenRspTail {
        export: Some(ExportId::from_bytes(uuid(0xe0), true)),
        secret: EvictionSecret(uuid(0xd0)),
        standing: None,
    };
    vectors.check("open_rsp_long", tail, tail.encode(&rsp), OpenRspTail::decode);
    let standing = Some(Standing { active: false, term: 0x0102_0304 });
    let tail = OpenRspTail { standing, ..tail };
    vectors.check("open_rsp_standby", tail, tail.encode(&rsp), OpenRspTail::decode);
    let close = Close { device_id: 0 };
    vectors.check("close", close, close.encode(), Close::decode);
}

fn headers() -> [(&'static str, IoHeader); 7] {
    let header = |sector, rw, bi_size, prio| IoHeader { device_id: 0, sector, rw, bi_size, prio };
    [
        ("io_write_4k", header(0x800, Rw::WRITE.sync(), 4096, 0x4004)),
        ("io_write_4k_fua", header(0x800, Rw::WRITE.sync().fua(true), 4096, 0)),
        ("io_read_4k", header(0, Rw::READ.sync(), 4096, 0x4004)),
        ("io_flush", header(u64::MAX, Rw::FLUSH.sync().fua(true), 0, 0)),
        ("io_discard", header(0x800, Rw::DISCARD.sync(), 65536, 0x4004)),
        ("io_extents", header(0x800, Rw::EXTENTS, 1 << 31, 0)),
        ("io_partial_write", header(0x800, Rw::PARTIAL_WRITE.fua(true), 20, 300)),
    ]
}

fn check_io(vectors: &Vectors) {
    for (name, header) in headers() {
        let decode = |bytes: &[u8]| IoHeader::decode(bytes, 2);
        vectors.check(name, header, header.encode(), decode);
    }
    for (name, usr_len) in [("write_usr32", 32), ("write_usr8", 8)] {
        let message = WriteMsg { usr_len };
        vectors.check(name, message, message.encode(), WriteMsg::decode);
    }
    let flush = ReadMsg { usr_len: 32, need_inval: false, desc: None };
    vectors.check_read("read_usr32_flush", flush);
    for (name, usr_len, len) in [
        ("read_usr32_4k", 32, 4096),
        ("read_usr36_sess_info", 36, 36),
        ("read_usr264_open", 264, 56),
    ] {
        let desc = Some(SgDesc { addr: 0x7060_5040_3020_1000, key: Rkey(0x3b6), len });
        vectors.check_read(name, ReadMsg { usr_len, need_inval: true, desc });
    }
    let path = PathUuid(std::array::from_fn(|i| 0xa0 + i as u8));
    let fence = Fence { path, recon_cnt: 3, process: ServerProcess::NONE };
    vectors.check("fence", fence, fence.encode(), Fence::decode);
    let fence = Fence { process: ServerProcess([0xf0, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5]), ..fence };
    vectors.check("fence_process", fence, fence.encode(), Fence::decode);
    for (name, away) in [("move_here", false), ("move_away", true)] {
        let message = Move { device_id: 7, away };
        vectors.check(name, message, message.encode(), Move::decode);
    }
    let discover = Discover { after: Name::new(b"v1").unwrap() };
    vectors.check("discover", discover, discover.encode(), Discover::decode);
    let export = Discovered {
        name: Name::new(b"v2").unwrap(),
        sectors: 2048,
        block_size: 4096,
        read_only: false,
        written: true,
        id: Some(ExportId::from_bytes(uuid(0xe0), true)),
    };
    let page = Page { exports: vec![export], more: true };
    vectors.check("discover_rsp", page.clone(), page.encode(), Page::decode);
    let challenge =
        Challenge { version: 1, nonce: [0xa1; 32], credential: std::array::from_fn(|i| i as u8) };
    vectors.check("challenge", challenge, challenge.encode(), Challenge::decode);
    let proof = SignedProof {
        credential: Credential {
            kind: CredentialKind::RawKey,
            chain: vec![vec![0x30, 0x2a, 0x30]],
        },
        scheme: 0x0807,
        signature: vec![0x51, 0x52],
    };
    let rsp = ChallengeRsp { version: 1, nonce: [0xb2; 32], proof };
    vectors.check("challenge_rsp", rsp.clone(), rsp.encode(), ChallengeRsp::decode);
    let auth = Auth { version: 1 };
    vectors.check("auth", auth, auth.encode(), Auth::decode);
    let rkey = RkeyRsp { permit: PermitId(0), rkey: Rkey(0x3b6) };
    vectors.check("rkey_rsp_0", rkey, rkey.encode(), RkeyRsp::decode);
    let timed = TimedRkeyRsp {
        permit: PermitId(7),
        rkey: Rkey(0x3b6),
        queue_us: 300,
        backend_us: 0x0102_0304,
    };
    vectors.check("rkey_rsp_7_times", timed, timed.encode(), TimedRkeyRsp::decode);
}

fn check_tails(vectors: &Vectors) {
    let info = vectors.tail("tail_sess_info", 36, ReadMsg::LEN_MAX);
    assert_eq!(info, UserMessage::SessInfo(SessInfo::default()));
    let open = UserMessage::Open {
        access: AccessMode::ReadWrite,
        flags: OpenFlags::default(),
        dev_name: b"/dev/loop0",
    };
    assert_eq!(vectors.tail("tail_open", 56, ReadMsg::LEN_MAX), open);
    let discover = UserMessage::Discover { after: b"v1" };
    assert_eq!(vectors.tail("tail_discover", 4096, ReadMsg::LEN_MAX), discover);
    let auth = UserMessage::Auth(Auth { version: 1 });
    assert_eq!(vectors.tail("tail_auth", 13, WriteMsg::LEN), auth);
    let close = UserMessage::Close(Close { device_id: 0 });
    assert_eq!(vectors.tail("tail_close", 0, WriteMsg::LEN), close);
    let headers: BTreeMap<_, _> = headers().into();
    for (name, header, op, data_len, message_len) in [
        ("tail_write", "io_write_4k", RwOp::Write, 4096, WriteMsg::LEN),
        ("tail_read", "io_read_4k", RwOp::Read, 4096, ReadMsg::LEN_MAX),
        ("tail_flush", "io_flush", RwOp::Flush, 0, ReadMsg::LEN_MIN),
        ("tail_discard", "io_discard", RwOp::Discard, 0, WriteMsg::LEN),
        ("tail_extents", "io_extents", RwOp::Extents, 4096, ReadMsg::LEN_MAX),
        ("tail_partial_write", "io_partial_write", RwOp::PartialWrite, 20, WriteMsg::LEN),
    ] {
        let found = vectors.tail(name, data_len, message_len);
        assert_eq!(found, UserMessage::Io(op, headers[header]), "{name}");
    }
}

fn check_immediates(vectors: &Vectors) {
    let req = |permit, offset| Imm::Request { permit: PermitId(permit), offset };
    let rsp = |permit, errno, invalidated| {
        let permit = PermitId(permit);
        Imm::Response { permit, errno, invalidated }
    };
    let bits = Limits::DEFAULT.mem_bits();
    for (name, imm) in [
        ("imm_req_0_sess_info", req(0, 0x48)),
        ("imm_req_0_open", req(0, 0x140)),
        ("imm_req_0_write", req(0, 0x1020)),
        ("imm_req_1_read", req(1, 0x1020)),
        ("imm_req_0_flush", req(0, 0x20)),
        ("imm_req_0_close", req(0, 8)),
        ("imm_req_5", req(5, 4128)),
        ("imm_rsp_0", rsp(0, 0, false)),
        ("imm_rsp_7", rsp(7, 0, false)),
        ("imm_rsp_inv_0", rsp(0, 0, true)),
        ("imm_rsp_inv_1", rsp(1, 0, true)),
        ("imm_rsp_inv_7", rsp(7, 0, true)),
        ("imm_rsp_7_eio", rsp(7, errno::EIO, false)),
        ("imm_rsp_inv_0_enoent", rsp(0, errno::ENOENT, true)),
        ("imm_rsp_inv_300_eopnotsupp", rsp(300, errno::EOPNOTSUPP, true)),
        ("imm_heartbeat", Imm::Heartbeat { next_ms: 0 }),
        ("imm_heartbeat_idle", Imm::Heartbeat { next_ms: 30_000 }),
        ("imm_heartbeat_ack", Imm::HeartbeatAck),
        ("imm_changed_7", Imm::Changed { device: 7 }),
    ] {
        let golden: [u8; 4] = vectors.get(name).try_into().expect(name);
        assert_eq!(imm.encode_with(bits).to_be_bytes(), golden, "encoding {name}");
        assert_eq!(Imm::decode_with(u32::from_be_bytes(golden), bits), imm, "decoding {name}");
    }
}

#[test]
fn every_vector_encodes_and_decodes() {
    let vectors = Vectors::load();
    check_handshake(&vectors);
    check_export(&vectors);
    check_io(&vectors);
    check_tails(&vectors);
    check_immediates(&vectors);
    let all: BTreeSet<String> = vectors.bytes.keys().cloned().collect();
    assert_eq!(all, *vectors.seen.borrow(), "vectors and assertions are not the same");
}
