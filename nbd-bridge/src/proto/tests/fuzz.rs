//! Bodies of the fuzz targets `nbd_handshake` and `nbd_transmission`.
//!
//! They accept any bytes and panic only if the protocol state machines break a guarantee. The fuzz
//! crate calls them with new inputs, the tests with the corpus and with random bytes.

use super::reply::{Answered, Form};
use super::wire::{
    self, ChunkHeader, ExtendedChunkHeader, ExtendedRequest, NbdError, SimpleReply, cmd, cmd_flags,
    reply_type,
};
use super::{
    AfterRefusal, ExportInfo, Exports, Handshake, Op, Outcome, Request, Rules, Terms, reply,
};

/// Three exports: an ordinary one that is also the default, a read-only one with odd sizes, and one
/// whose values violate the protocol.
struct Three([ExportInfo; 3]);

impl Three {
    fn new() -> Self {
        let mut disk = ExportInfo::plain("disk", 1 << 20);
        (disk.trim, disk.write_zeroes, disk.fast_zero, disk.extents) = (true, true, true, true);
        let mut iso = ExportInfo::plain("iso", 3 << 20);
        (iso.read_only, iso.min_block) = (true, 4096);
        iso.description = "an image".into();
        let mut broken = ExportInfo::plain("broken", 0);
        broken.min_block = 0;
        Self([disk, iso, broken])
    }
}

impl Exports for Three {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        self.0.iter().for_each(visit);
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        self.0.iter().find(|e| e.name == name || (name.is_empty() && e.name == "disk")).cloned()
    }
}

/// Feeds `input` in pieces of at most `piece` bytes. Returns the bytes consumed, the bytes sent and
/// the outcome.
pub(crate) fn drive(
    input: &[u8],
    piece: usize,
    exports: &dyn Exports,
) -> (usize, Vec<u8>, Outcome) {
    let mut out = Vec::new();
    let mut handshake = Handshake::start(&mut out);
    let mut taken = 0;
    loop {
        let end = input.len().min(taken + piece.max(1));
        let before = out.len();
        let (n, outcome) = handshake.feed(&input[taken..end], exports, &mut out);
        assert!(n <= end - taken, "more bytes taken than given");
        taken += n;
        match outcome {
            Outcome::NeedMore => {
                assert!(taken == end, "more input is requested while some is left");
                assert!(out.len() == before, "an answer without an option");
                if end == input.len() {
                    return (taken, out, Outcome::NeedMore);
                }
            }
            Outcome::Reply => assert!(out.len() > before, "a reply without bytes"),
            Outcome::Close(_) => {
                assert!(out.len() == before, "bytes for a client that is dropped");
                return (taken, out, outcome);
            }
            Outcome::Ready(_) | Outcome::Abort => return (taken, out, outcome),
        }
    }
}

/// Runs the client side of a handshake. The first byte of the input selects how the rest is split,
/// which must not affect the result.
#[doc(hidden)]
pub fn fuzz_handshake(data: &[u8]) {
    let Some((&piece, input)) = data.split_first() else {
        return;
    };
    let exports = Three::new();
    let whole = drive(input, input.len(), &exports);
    assert_eq!(whole, drive(input, usize::from(piece), &exports), "the split changes the outcome");
    if let Outcome::Ready(terms) = whole.2 {
        assert_eq!(terms.export.check(), Ok(()), "an export out of bounds is served");
    }
}

/// Validates requests. The first 16 bytes describe an export, and every 28 bytes after them are a
/// request, or every 32 with extended headers. Every second request gets a valid magic, so that
/// validation is reached.
#[doc(hidden)]
pub fn fuzz_transmission(data: &[u8]) {
    let Some((head, requests)) = data.split_first_chunk::<16>() else {
        return;
    };
    let export = export_from(head);
    let has = |bit| head[12] & bit != 0;
    let extended = has(8);
    let terms = Terms {
        structured_replies: has(1) || extended,
        keeps_blocks: has(2),
        block_status: has(4),
        extended,
    };
    let rules = Rules::new(&export, terms);
    let (len, magic) = match extended {
        true => (ExtendedRequest::LEN, wire::magic::EXTENDED_REQUEST),
        false => (Request::LEN, wire::magic::REQUEST),
    };
    for (i, bytes) in requests.chunks(len).enumerate() {
        let mut bytes = bytes.to_vec();
        if i % 2 == 1 && bytes.len() >= 4 {
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
        }
        let request = if extended {
            let Ok(request) = ExtendedRequest::decode(&bytes) else { continue };
            assert_eq!(request.encode()[..], bytes[..], "a request changes on its way");
            request
        } else {
            let Ok(request) = Request::decode(&bytes) else { continue };
            assert_eq!(request.encode()[..], bytes[..], "a request changes on its way");
            assert_eq!(
                rules.check(&request, export.size),
                rules.check_extended(&request.into(), export.size)
            );
            request.into()
        };
        check_request(&rules, &export, terms, &request);
    }
}

fn export_from(head: &[u8; 16]) -> ExportInfo {
    let [s0, s1, s2, s3, s4, s5, s6, s7, bits, min, pref, max, ..] = *head;
    let bit = |n: u8| bits & (1 << n) != 0;
    let mut export =
        ExportInfo::plain("fuzz", u64::from_be_bytes([s0, s1, s2, s3, s4, s5, s6, s7]));
    export.read_only = bit(0);
    export.flush = bit(1);
    export.fua = bit(2);
    export.trim = bit(3);
    export.write_zeroes = bit(4);
    export.fast_zero = bit(5);
    export.cache = bit(6);
    export.shared_writes = bit(7);
    export.min_block = 1 << (min % 17);
    export.preferred_block = export.min_block.max(512) << (pref % 4);
    export.max_payload = export.preferred_block.max(u32::from(max) << 17).min(wire::PAYLOAD_MAX);
    assert_eq!(export.check(), Ok(()));
    export
}

fn check_request(
    rules: &Rules,
    export: &ExportInfo,
    Terms { structured_replies: structured, keeps_blocks, block_status, extended }: Terms,
    request: &ExtendedRequest,
) {
    let form = match (extended, structured) {
        (true, _) => Form::Extended,
        (false, true) => Form::Structured,
        (false, false) => Form::Simple,
    };
    let of = Answered { form, cookie: request.cookie, offset: request.offset };
    match rules.check_extended(request, export.size) {
        Ok(run) => {
            assert_eq!(run.cookie, request.cookie);
            if matches!(run.op, Op::Flush | Op::Disconnect) {
                assert_eq!((run.offset, run.len, run.payload()), (0, 0, 0));
                return;
            }
            let end = run.offset.checked_add(run.len).expect("the range overflows");
            assert!(run.len > 0 && end <= export.size, "the range leaves the export");
            let block = u64::from(export.min_block);
            assert!(run.op != Op::BlockStatus || block_status, "no context was negotiated");
            let aligned = run.offset % block == 0 && end % block == 0;
            assert!(aligned || !keeps_blocks, "the range is not aligned");
            let changes_part = !aligned && matches!(run.op, Op::Write | Op::WriteZeroes);
            assert!(!(changes_part && export.shared_writes), "a part of a block is changed");
            let writes = matches!(run.op, Op::Write | Op::Trim | Op::WriteZeroes);
            assert!(!(writes && export.read_only), "a write on a read-only export");
            assert!(!run.fua || (writes && export.fua), "FUA was not offered");
            if matches!(run.op, Op::Read | Op::Write) {
                assert!(run.len <= export.max_payload.into(), "the payload is over the maximum");
            }
            let payload = if request.command == cmd::WRITE { run.len } else { 0 };
            assert_eq!(u64::from(run.payload()), payload);
            if run.op == Op::Read {
                let head = reply::read_head(of, run.offset, run.len as u32, true);
                let expect = match form {
                    Form::Extended => ExtendedChunkHeader::LEN + 8,
                    Form::Structured => ChunkHeader::LEN + 8,
                    Form::Simple => SimpleReply::LEN,
                };
                assert_eq!(head.len(), expect);
            }
        }
        Err(refusal) => {
            let says = extended && request.flags & cmd_flags::PAYLOAD_LEN != 0;
            let payload = if request.command == cmd::WRITE || says { request.len } else { 0 };
            match refusal.after {
                AfterRefusal::Continue => assert_eq!(payload, 0, "the payload would be parsed"),
                AfterRefusal::Skip(n) => assert!(n > 0 && u64::from(n) == payload, "wrong skip"),
                AfterRefusal::Close => {
                    assert!(payload > wire::PAYLOAD_MAX.into(), "closed too early");
                }
            }
            let head = reply::failure(of, refusal.error, refusal.reason);
            check_failure(&head, of, refusal.error);
        }
    }
}

fn check_failure(bytes: &[u8], of: Answered, error: NbdError) {
    let Answered { form, cookie, offset } = of;
    if form == Form::Extended {
        let chunk = ExtendedChunkHeader::decode(bytes).expect("a chunk");
        assert_eq!((chunk.flags, chunk.kind, chunk.cookie), (1, reply_type::ERROR, cookie));
        assert_eq!(bytes.len() as u64, ExtendedChunkHeader::LEN as u64 + chunk.len);
        assert_eq!((chunk.offset, &bytes[32..36]), (offset, &error.code().to_be_bytes()[..]));
    } else if form == Form::Structured {
        let chunk = ChunkHeader::decode(bytes).expect("a chunk");
        assert_eq!((chunk.flags, chunk.kind, chunk.cookie), (1, reply_type::ERROR, cookie));
        assert_eq!(bytes.len(), ChunkHeader::LEN + chunk.len as usize);
        assert_eq!(bytes[20..24], error.code().to_be_bytes());
    } else {
        assert_eq!(SimpleReply::decode(bytes), Ok(SimpleReply { error: error.code(), cookie }));
        assert_eq!(bytes.len(), SimpleReply::LEN);
    }
}
