//! Body of the fuzz target `wire`: passes arbitrary bytes to every decoder.
//!
//! Decoded messages are encoded and decoded again and must be unchanged; errors must have a text,
//! and nothing may panic. Called only by the fuzzer (fuzz/targets/wire.rs) and the replay of its
//! corpus under plain `cargo test` (rtrs-core/tests/suite/corpus.rs).

use std::fmt::Debug;

use super::*;
use crate::limits::Limits;

/// Asserts that a decoded message survives the round trip, and that an error has a text.
fn twice<T: Debug + PartialEq>(
    decoded: Result<T, WireError>,
    again: impl FnOnce(&T) -> Result<T, WireError>,
) {
    match decoded {
        Ok(message) => assert_eq!(again(&message).as_ref(), Ok(&message)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Runs every decoder over `data`.
#[doc(hidden)]
pub fn fuzz(data: &[u8]) {
    macro_rules! round_trips {
        ($($message:ident)+) => {$(
            twice($message::decode(data), |m| $message::decode(&m.encode()));
        )+};
    }
    round_trips! {
        ConnReq ConnRsp PingHello PingReply InfoReq SgDesc RkeyRsp TimedRkeyRsp
        SessInfo SessInfoRsp Open OpenRsp Close WriteMsg Discover Page
        Fence Challenge ChallengeRsp Auth SignedProof Move
    }
    twice(OpenRspTail::decode(data), |m| OpenRspTail::decode(&m.encode(&OpenRsp::default())));
    twice(IoHeader::decode(data, 2), |m| IoHeader::decode(&m.encode(), 2));
    twice(ReadMsg::decode(data), |m| {
        let mut bytes = [0xff; ReadMsg::LEN_MAX];
        let len = m.encode(&mut bytes);
        ReadMsg::decode(&bytes[..len])
    });
    twice(InfoRsp::decode(data), |m| {
        let mut bytes = vec![0xff; m.encoded_len()];
        let len = m.encode(&mut bytes);
        InfoRsp::decode(&bytes[..len])
    });
    if let Ok(rsp) = ConnRsp::decode(data) {
        check_chunk_size(&rsp);
    }
    if let Ok(request) = InfoReq::decode(data) {
        let _ = request.session_name.check_session_name();
        assert!(!request.session_name.to_string().contains(char::is_control));
    }
    if let Ok(rsp) = InfoRsp::decode(data) {
        check_table(&rsp);
    }
    if let Some(head) = data.first_chunk::<4>() {
        check_imm(u32::from_le_bytes(*head));
    }
    check_request(data);
}

fn check_chunk_size(rsp: &ConnRsp) {
    if let Ok(chunk_size) = rsp.chunk_size() {
        assert!(rsp.max_io_size < chunk_size && rsp.max_hdr_size < chunk_size);
        let bits = MemBits::for_depth(rsp.queue_depth);
        assert!(bits.fits(crate::ids::PermitId(rsp.queue_depth - 1), chunk_size - 1));
    }
}

fn check_table(rsp: &InfoRsp) {
    let count = u16::try_from(rsp.descs.len()).unwrap_or(u16::MAX);
    let len = rsp.descs.first().map_or(0, |desc| desc.len);
    for (depth, chunk_size) in [(512, 131_072), (count, len), (1, len), (count, 8192)] {
        if let Ok(table) = rsp.chunks(depth, chunk_size) {
            assert_eq!(table.len(), usize::from(depth));
            assert!(table.iter().all(|chunk| chunk.len == chunk_size));
            let pool: u64 = rsp.descs.iter().map(|desc| u64::from(desc.len)).sum();
            assert_eq!(pool, u64::from(depth) * u64::from(chunk_size));
        }
    }
}

fn check_imm(raw: u32) {
    match Imm::decode(raw) {
        // The payload of an answer has no meaning and is not kept.
        Imm::HeartbeatAck => assert_eq!(raw >> 28, 9),
        imm => assert_eq!(imm.encode(), raw),
    }
    for depth in [1, 2, 500, 512, u16::MAX] {
        let bits = MemBits::for_depth(depth);
        if let imm @ Imm::Request { permit, offset } = Imm::decode_with(raw, bits) {
            assert!(bits.fits(permit, offset));
            assert_eq!(imm.encode_with(bits), raw);
        }
    }
}

/// Parses `data` as the tail of a chunk, a user header and an RTRS message, for every possible
/// split, after data of typical lengths.
fn check_request(data: &[u8]) {
    let chunk_size = Limits::DEFAULT.chunk_size();
    let chosen = data.first_chunk::<2>().map_or(0, |bytes| u16::from_le_bytes(*bytes));
    for message_len in [WriteMsg::LEN, ReadMsg::LEN_MIN, ReadMsg::LEN_MAX] {
        let Some((user, message)) = data.split_at_checked(data.len().wrapping_sub(message_len))
        else {
            continue;
        };
        for data_len in [0, 36, 56, 512, 4096, usize::from(chosen)] {
            let Ok(off) = u32::try_from(data_len + user.len()) else { continue };
            let Ok(range) = ChunkRequest::message_range(off, chunk_size) else { continue };
            assert!(range.end <= chunk_size as usize && range.len() <= ReadMsg::LEN_MAX);
            let Ok(request) = ChunkRequest::parse(off, message) else { continue };
            let range = request.user_range();
            assert!(range.end <= off as usize && range.len() <= USER_LEN_MAX);
            let header = match range.start.checked_sub(data_len) {
                Some(at) => user.get(at..).unwrap_or_default(),
                None => user,
            };
            let header = &header[..header.len().min(range.len())];
            match request.user(header, 2) {
                Ok(UserMessage::Io(RwOp::Read | RwOp::Write, io)) => {
                    assert_eq!(io.bi_size, request.data_len);
                }
                Ok(UserMessage::Open { dev_name, .. }) => assert!(Name::new(dev_name).is_ok()),
                Ok(_) => {}
                Err(error) => assert!(matches!(error.errno(), 22 | 95)),
            }
        }
    }
}
