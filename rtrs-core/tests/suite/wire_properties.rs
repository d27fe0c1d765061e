//! Properties of the wire format: decoding accepts any bytes without panicking, encoding loses
//! nothing, and immediates convert in both directions without failure.

use proptest::collection::vec;
use proptest::prelude::*;
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, Rkey, SessionId};
use rtrs_core::limits::{CONNS_PER_PATH_MAX, Limits};
use rtrs_core::wire::{
    AccessMode, ChunkLayout, ChunkRequest, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoHeader,
    MemBits, Name, Open, OpenFlags, OpenRsp, ReadMsg, RkeyRsp, Rw, RwOp, SgDesc, UserMessage,
    WriteMsg, errno, fuzz,
};

fn limits() -> impl Strategy<Value = Limits> {
    (13u32..=28).prop_flat_map(|shift| {
        (1..=(1u32 << (28 - shift)).min(65535))
            .prop_map(move |depth| Limits::new(depth, 1 << shift).expect("fits by construction"))
    })
}

fn name() -> impl Strategy<Value = Name> {
    vec(1..=u8::MAX, 0..=254).prop_map(|bytes| Name::new(&bytes).expect("no NUL, not too long"))
}

fn desc() -> impl Strategy<Value = SgDesc> {
    any::<(u64, u32, u32)>().prop_map(|(addr, key, len)| SgDesc { addr, key: Rkey(key), len })
}

proptest! {
    #[test]
    fn any_bytes_are_handled(bytes in vec(any::<u8>(), 0..600)) {
        fuzz(&bytes);
    }

    /// Random bytes seldom have a valid type field, so this test supplies one.
    #[test]
    fn any_bytes_with_a_type_are_handled(kind in 0u8..8, bytes in vec(any::<u8>(), 0..600)) {
        let mut message = vec![kind, 0];
        message.extend(&bytes);
        fuzz(&message);
        message.extend([2 + kind % 2, 0, (bytes.len() + 2).min(255) as u8, 0]);
        message.extend([0; 4]);
        fuzz(&message);
        let mut connect = vec![0, 0, 0xbd, 0x1b, 0, 2];
        connect.extend(&bytes);
        fuzz(&connect);
        fuzz(&connect[2..]);
    }

    #[test]
    fn connects_round_trip(
        cid_num in 1..=CONNS_PER_PATH_MAX,
        cid in any::<prop::sample::Index>(),
        recon_cnt: u16,
        uuids: ([u8; 16], [u8; 16]),
        first_conn: bool,
    ) {
        let req = ConnReq {
            cid: ConnIndex(cid.index(cid_num.into()) as u16),
            cid_num,
            recon_cnt,
            path_uuid: PathUuid(uuids.0),
            session_id: SessionId(uuids.1),
            first_conn,
            ext: [0; 11],
        };
        prop_assert_eq!(ConnReq::decode(&req.encode()), Ok(req));
    }

    #[test]
    fn accepts_and_rejects_round_trip(limits in limits(), new_rkey: bool, errno: u16) {
        let rsp = ConnRsp::accept(limits, new_rkey);
        prop_assert_eq!(ConnRsp::decode(&rsp.encode()), Ok(rsp));
        prop_assert_eq!(rsp.chunk_size(), Ok(limits.chunk_size()));
        let rsp = ConnRsp::reject(errno);
        prop_assert!((-511..0).contains(&rsp.errno));
        prop_assert_eq!(ConnRsp::decode(&rsp.encode()), Ok(rsp));
    }

    #[test]
    fn introductions_round_trip(session_name in name(), descs in vec(desc(), 1..20)) {
        let req = InfoReq { session_name };
        prop_assert_eq!(InfoReq::decode(&req.encode()), Ok(req));
        let rsp = InfoRsp { descs };
        let mut bytes = vec![0xff; rsp.encoded_len() + 3];
        let len = rsp.encode(&mut bytes);
        prop_assert_eq!(len, rsp.encoded_len());
        prop_assert_eq!(&bytes[4..8], &[0; 4]);
        prop_assert_eq!(InfoRsp::decode(&bytes[..len]), Ok(rsp));
    }

    #[test]
    fn a_valid_table_is_expanded(limits in limits(), split in 0u32..4, base: u32, key: u32) {
        let depth = u32::from(limits.queue_depth());
        let parts = 1 << split.min(depth.trailing_zeros());
        let len = (limits.pool_size() / u64::from(parts)) as u32;
        let descs = (0..parts).map(|i| SgDesc {
            addr: (u64::from(i) << 32) + u64::from(base),
            key: Rkey(key.wrapping_add(i)),
            len,
        });
        let rsp = InfoRsp { descs: descs.collect() };
        let table = rsp.chunks(limits.queue_depth(), limits.chunk_size()).unwrap();
        let per_desc = (depth / parts) as usize;
        prop_assert_eq!(table.len(), depth as usize);
        for (i, chunk) in table.iter().enumerate() {
            let from = rsp.descs[i / per_desc];
            let at = (i % per_desc) as u64 * u64::from(limits.chunk_size());
            prop_assert_eq!((chunk.addr, chunk.key), (from.addr + at, from.key));
        }
    }

    #[test]
    fn opens_round_trip(
        mode in 0u8..3, flags: [bool; 2], dev_name in name(),
        numbers: (u32, u64, [u32; 5], [u16; 4]),
    ) {
        let flags = OpenFlags { returns: flags[0], waits: flags[1] };
        let open = Open { access: AccessMode::from_wire(mode).unwrap(), flags, dev_name };
        prop_assert_eq!(Open::decode(&open.encode()), Ok(open));
        let (device_id, nsectors, n, s) = numbers;
        let rsp = OpenRsp {
            device_id,
            nsectors,
            max_hw_sectors: n[0],
            max_write_zeroes_sectors: n[1],
            max_discard_sectors: n[2],
            discard_granularity: n[3],
            discard_alignment: n[4],
            physical_block_size: s[0],
            logical_block_size: s[1],
            max_segments: s[2],
            secure_discard: s[3],
            rotational: mode == 0,
            fua: mode > 0,
            write_cache: mode > 1,
            cache_id: nsectors.rotate_left(7),
            volatile: mode == 1,
            fast_zero: mode != 1,
            extents: mode != 2,
            partial_writes: mode < 2,
        };
        prop_assert_eq!(OpenRsp::decode(&rsp.encode()), Ok(rsp));
    }

    #[test]
    fn keys_round_trip(permit: u16, rkey: u32) {
        let rsp = RkeyRsp { permit: PermitId(permit), rkey: Rkey(rkey) };
        prop_assert_eq!(RkeyRsp::decode(&rsp.encode()), Ok(rsp));
    }

    #[test]
    fn every_number_decodes_to_an_immediate(raw: u32, depth: u16) {
        let bits = MemBits::for_depth(depth);
        match Imm::decode_with(raw, bits) {
            Imm::HeartbeatAck => prop_assert_eq!(raw >> 28, 9),
            imm => prop_assert_eq!(imm.encode_with(bits), raw),
        }
        let _ = Imm::decode(raw);
    }

    #[test]
    fn every_immediate_encodes_to_a_number(
        limits in limits(),
        permit in any::<prop::sample::Index>(),
        offset in any::<prop::sample::Index>(),
        errno: u16,
        invalidated: bool,
    ) {
        let bits = limits.mem_bits();
        let permit = PermitId(permit.index(limits.queue_depth().into()) as u16);
        let offset = offset.index(limits.chunk_size() as usize) as u32;
        prop_assert!(bits.fits(permit, offset));
        let imm = Imm::Request { permit, offset };
        prop_assert_eq!(Imm::decode_with(imm.encode_with(bits), bits), imm);
        let imm = Imm::Response { permit, errno, invalidated };
        let fitted = Imm::Response { permit, errno: errno::fit(errno.into()), invalidated };
        prop_assert_eq!(Imm::decode(imm.encode()), fitted);
        prop_assert_eq!(fitted.encode(), imm.encode());
    }

    /// A server finds a request where the client placed it.
    #[test]
    fn requests_are_decoded_where_they_were_placed(
        read: bool,
        sectors in 1u32..=248,
        need_inval: bool,
        numbers: (u32, u64, u16, u64, u32),
    ) {
        let (device_id, sector, prio, addr, key) = numbers;
        let bi_size = sectors * 512;
        let rw = if read { Rw::READ.sync() } else { Rw::WRITE };
        let header = IoHeader { device_id, sector, rw, bi_size, prio };
        let usr_len = IoHeader::LEN as u16;
        let mut message = [0; ReadMsg::LEN_MAX];
        let desc = SgDesc { addr, key: Rkey(key), len: bi_size };
        let message_len = if read {
            ReadMsg { usr_len, need_inval, desc: Some(desc) }.encode(&mut message)
        } else {
            message[..WriteMsg::LEN].copy_from_slice(&WriteMsg { usr_len }.encode());
            WriteMsg::LEN
        };
        let limits = Limits::DEFAULT;
        let chunk_size = limits.chunk_size();
        let layout =
            ChunkLayout::new(bi_size, usr_len, message_len as u16, chunk_size, 4096).unwrap();
        let mut chunk = vec![0xdd; limits.chunk_size() as usize];
        let (user_at, message_at) = (layout.user_at() as usize, layout.message_at() as usize);
        chunk[user_at..message_at].copy_from_slice(&header.encode());
        chunk[message_at..layout.end() as usize].copy_from_slice(&message[..message_len]);

        let off = layout.message_at();
        let range = ChunkRequest::message_range(off, limits.chunk_size()).unwrap();
        let request = ChunkRequest::parse(off, &chunk[range]).unwrap();
        prop_assert_eq!(request.invalidate(), (read && need_inval).then_some(Rkey(key)));
        prop_assert_eq!(request.desc(), read.then_some(desc));
        let user = request.user(&chunk[request.user_range()], 2).unwrap();
        let op = if read { RwOp::Read } else { RwOp::Write };
        prop_assert_eq!(user, UserMessage::Io(op, header));
    }
}
