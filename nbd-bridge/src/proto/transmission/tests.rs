//! Tests with handwritten requests: each command, each violation, and the error required by the
//! specification.

use super::*;
use crate::proto::fuzz::fuzz_transmission;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const WRITES: [u16; 3] = [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES];
const RANGED: [u16; 5] = [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES];

/// An export of 64 MiB that offers every feature, with blocks of 512 bytes.
fn export() -> ExportInfo {
    let mut export = ExportInfo::plain("vol0", 64 * MIB);
    (export.trim, export.write_zeroes, export.fast_zero) = (true, true, true);
    (export.cache, export.min_block) = (true, 512);
    export
}

fn request(command: u16, offset: u64, len: u32) -> Request {
    Request { flags: 0, command, cookie: 77, offset, len }
}

fn flagged(command: u16, flags: u16) -> Request {
    Request { flags, ..request(command, 512, 512) }
}

/// Rules for a client that has requested the block sizes.
fn rules(export: &ExportInfo, structured_replies: bool) -> Rules {
    Rules::new(export, Terms { structured_replies, keeps_blocks: true, ..Terms::default() })
}

fn check(request: Request) -> Result<Validated, Refusal> {
    rules(&export(), true).check(&request, export().size)
}

/// Returns a refusal's error, after checking that the stream stays in sync.
fn refused(export: &ExportInfo, structured: bool, request: Request) -> Option<NbdError> {
    let refusal = rules(export, structured).check(&request, export.size).err()?;
    let after = match request.command {
        cmd::WRITE if request.len > 128 << 20 => AfterRefusal::Close,
        cmd::WRITE if request.len > 0 => AfterRefusal::Skip(request.len),
        _ => AfterRefusal::Continue,
    };
    assert_eq!(refusal.after, after);
    assert!(!refusal.reason.is_empty());
    Some(refusal.error)
}

fn error(request: Request) -> Option<NbdError> {
    refused(&export(), true, request)
}

#[test]
fn each_command_maps_to_its_op() {
    for (command, op) in [
        (cmd::READ, Op::Read),
        (cmd::WRITE, Op::Write),
        (cmd::TRIM, Op::Trim),
        (cmd::CACHE, Op::Cache),
        (cmd::WRITE_ZEROES, Op::WriteZeroes),
    ] {
        let run = check(request(command, 64 * MIB - 1024, 1024)).unwrap();
        assert_eq!((run.op, run.cookie), (op, 77));
        assert_eq!((run.offset, run.len), (64 * MIB - 1024, 1024));
        assert!(!run.fua && !run.no_hole && !run.fast_only);
        assert_eq!(run.payload(), if op == Op::Write { 1024 } else { 0 });
    }
    assert_eq!(check(request(cmd::FLUSH, 0, 0)), Ok(Validated::bare(Op::Flush, 77)));
}

#[test]
fn flags_reach_the_ops_they_apply_to() {
    for command in RANGED {
        let run = check(flagged(command, cmd_flags::FUA)).unwrap();
        assert_eq!(run.fua, WRITES.contains(&command));
    }
    let flush = Request { flags: cmd_flags::FUA, ..request(cmd::FLUSH, 0, 0) };
    assert!(!check(flush).unwrap().fua);
    let both = cmd_flags::NO_HOLE | cmd_flags::FAST_ZERO;
    let run = check(flagged(cmd::WRITE_ZEROES, both)).unwrap();
    assert!(run.no_hole && run.fast_only && !run.fua);
    assert_eq!(check(flagged(cmd::READ, cmd_flags::DF)).unwrap().op, Op::Read);
}

#[test]
fn flags_of_other_commands_are_invalid() {
    for command in RANGED {
        for bit in 0..16 {
            let flag = 1 << bit;
            let good = flag == cmd_flags::FUA
                || (command == cmd::READ && flag == cmd_flags::DF)
                || (command == cmd::WRITE_ZEROES
                    && [cmd_flags::NO_HOLE, cmd_flags::FAST_ZERO].contains(&flag));
            let expect = (!good).then_some(NbdError::Inval);
            assert_eq!(error(flagged(command, flag)), expect, "{command} {flag:#x}");
        }
    }
    let flush = Request { flags: cmd_flags::NO_HOLE, ..request(cmd::FLUSH, 0, 0) };
    assert_eq!(error(flush), Some(NbdError::Inval));
}

#[test]
fn flags_that_were_not_offered_are_invalid() {
    let mut bare = export();
    (bare.fua, bare.fast_zero) = (false, false);
    for command in RANGED {
        assert_eq!(refused(&bare, false, flagged(command, cmd_flags::FUA)), Some(NbdError::Inval));
    }
    let fast = flagged(cmd::WRITE_ZEROES, cmd_flags::FAST_ZERO);
    assert_eq!(refused(&bare, false, fast), Some(NbdError::Inval));
    assert_eq!(refused(&bare, false, flagged(cmd::READ, cmd_flags::DF)), Some(NbdError::Inval));
    assert_eq!(refused(&bare, false, flagged(cmd::WRITE_ZEROES, cmd_flags::NO_HOLE)), None);
}

#[test]
fn commands_that_were_not_offered_are_invalid() {
    let mut bare = export();
    (bare.flush, bare.trim, bare.write_zeroes, bare.cache) = (false, false, false, false);
    for command in [cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
        assert_eq!(refused(&bare, true, request(command, 0, 512)), Some(NbdError::Inval));
    }
    assert_eq!(refused(&bare, true, request(cmd::FLUSH, 0, 0)), Some(NbdError::Inval));
    assert_eq!(refused(&bare, true, request(cmd::READ, 0, 512)), None);
}

#[test]
fn unknown_commands_and_block_status_are_invalid() {
    for command in [cmd::BLOCK_STATUS, cmd::RESIZE, 9, 0x100, u16::MAX] {
        assert_eq!(error(request(command, 0, 512)), Some(NbdError::Inval));
        assert_eq!(error(request(command, u64::MAX, u32::MAX)), Some(NbdError::Inval));
    }
    let one = Request { flags: cmd_flags::REQ_ONE, ..request(cmd::BLOCK_STATUS, 0, 512) };
    assert_eq!(error(one), Some(NbdError::Inval));
}

#[test]
fn writes_to_a_read_only_export_are_not_permitted() {
    let mut iso = export();
    iso.read_only = true;
    for command in WRITES {
        // EPERM takes precedence over all other errors.
        for (offset, len) in [(0, 512), (1, 1), (u64::MAX, 512), (0, 0)] {
            assert_eq!(refused(&iso, true, request(command, offset, len)), Some(NbdError::Perm));
        }
        let bits = Request { flags: u16::MAX, ..request(command, 0, 512) };
        assert_eq!(refused(&iso, true, bits), Some(NbdError::Perm));
    }
    assert_eq!(refused(&iso, true, request(cmd::READ, 0, 512)), None);
    assert_eq!(refused(&iso, true, request(cmd::FLUSH, 0, 0)), None);
}

#[test]
fn io_past_the_end_is_no_space_for_writes_and_invalid_otherwise() {
    for command in RANGED {
        let writes = [cmd::WRITE, cmd::WRITE_ZEROES].contains(&command);
        let expect = Some(if writes { NbdError::NoSpc } else { NbdError::Inval });
        for (offset, len) in [
            (64 * MIB, 512),
            (64 * MIB - 512, 1024),
            (1 << 40, 512),
            (u64::MAX - 511, 512),
            (u64::MAX, u32::MAX),
            (u64::MAX - u64::from(u32::MAX), u32::MAX),
        ] {
            assert_eq!(error(request(command, offset, len)), expect, "{command} {offset} {len}");
        }
    }
}

#[test]
fn an_empty_export_accepts_only_flush() {
    let empty = ExportInfo::plain("", 0);
    assert_eq!(refused(&empty, false, request(cmd::READ, 0, 1)), Some(NbdError::Inval));
    assert_eq!(refused(&empty, false, request(cmd::WRITE, 0, 1)), Some(NbdError::NoSpc));
    assert_eq!(refused(&empty, false, request(cmd::FLUSH, 0, 0)), None);
}

#[test]
fn zero_length_requests_are_invalid() {
    for command in RANGED {
        assert_eq!(error(request(command, 0, 0)), Some(NbdError::Inval));
    }
}

#[test]
fn a_flush_has_no_range() {
    assert_eq!(error(request(cmd::FLUSH, 512, 0)), Some(NbdError::Inval));
    assert_eq!(error(request(cmd::FLUSH, 0, 512)), Some(NbdError::Inval));
}

#[test]
fn a_disconnect_is_accepted_with_any_fields() {
    let odd = Request { flags: u16::MAX, ..request(cmd::DISC, u64::MAX, u32::MAX) };
    for request in [request(cmd::DISC, 0, 0), odd] {
        assert_eq!(check(request), Ok(Validated::bare(Op::Disconnect, 77)));
    }
}

#[test]
fn unaligned_requests_are_invalid() {
    for command in RANGED {
        for (offset, len) in [(1, 512), (512, 511), (256, 256), (513, 1023)] {
            assert_eq!(error(request(command, offset, len)), Some(NbdError::Inval));
        }
        let bytes = ExportInfo { min_block: 1, ..export() };
        assert_eq!(refused(&bytes, true, request(command, 3, 7)), None);
    }
}

#[test]
fn clients_without_block_sizes_may_access_partial_blocks() {
    let ask = |export: &ExportInfo, request| {
        Rules::new(export, Terms { structured_replies: true, ..Terms::default() })
            .check(&request, export.size)
            .map_err(|r| r.error)
    };
    let shared = ExportInfo { shared_writes: true, ..export() };
    for command in RANGED {
        for (offset, len) in [(1, 512), (512, 511), (256, 256), (513, 1023)] {
            let run = ask(&export(), request(command, offset, len)).unwrap();
            assert_eq!((run.offset, run.len), (offset, len.into()));
            let changes = [cmd::WRITE, cmd::WRITE_ZEROES].contains(&command);
            let got = ask(&shared, request(command, offset, len)).map(|_| ());
            assert_eq!(got, if changes { Err(NbdError::Inval) } else { Ok(()) });
            assert!(ask(&shared, request(command, 512, 1024)).is_ok());
        }
        assert!(ask(&export(), request(command, 64 * MIB - 1, 2)).is_err(), "past the end");
    }
    let fast = Request { flags: cmd_flags::FAST_ZERO, ..request(cmd::WRITE_ZEROES, 1, 512) };
    assert_eq!(ask(&export(), fast).map(|_| ()), Err(NbdError::NotSup));
}

#[test]
fn extended_requests_have_64_bit_lengths_and_say_whether_there_is_a_payload() {
    let big = ExportInfo { size: 15 << 40, ..export() };
    let terms = Terms { structured_replies: true, extended: true, ..Terms::default() };
    let rules = Rules::new(&big, Terms { block_status: true, ..terms });
    let ask = |command, flags, len| {
        let request = ExtendedRequest { flags, command, cookie: 7, offset: 0, len };
        rules.check_extended(&request, big.size)
    };
    for command in [cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS] {
        assert_eq!(ask(command, 0, 15 << 40).unwrap().len, 15 << 40);
        assert!(ask(command, 0, (15 << 40) + 1).is_err(), "past the end");
        // A payload is dropped if the command does not take one.
        let refusal = ask(command, cmd_flags::PAYLOAD_LEN, 512).unwrap_err();
        assert_eq!((refusal.error, refusal.after), (NbdError::Inval, AfterRefusal::Skip(512)));
        let refusal = ask(command, cmd_flags::PAYLOAD_LEN, 1 << 32).unwrap_err();
        assert_eq!((refusal.error, refusal.after), (NbdError::Inval, AfterRefusal::Close));
    }
    for flags in [0, cmd_flags::PAYLOAD_LEN] {
        assert_eq!(ask(cmd::WRITE, flags, 4096).unwrap().payload(), 4096);
        assert_eq!(ask(cmd::WRITE, flags, 1 << 33).unwrap_err().after, AfterRefusal::Close);
    }
    assert_eq!(ask(cmd::READ, 0, 1 << 33).unwrap_err().error, NbdError::Overflow);
    let plain = Rules::new(&big, Terms { extended: false, ..terms });
    let flagged = flagged(cmd::WRITE, cmd_flags::PAYLOAD_LEN);
    assert_eq!(plain.check(&flagged, big.size).unwrap_err().error, NbdError::Inval);
}

#[test]
fn block_status_requires_its_context() {
    let rules = Rules::new(&export(), Terms { block_status: true, ..Terms::default() });
    let ask = |request| rules.check(&request, export().size).map_err(|r| r.error);
    let run = ask(request(cmd::BLOCK_STATUS, 1, 3)).unwrap();
    assert_eq!((run.op, run.offset, run.len, run.one), (Op::BlockStatus, 1, 3, false));
    let one = Request { flags: cmd_flags::REQ_ONE, ..request(cmd::BLOCK_STATUS, 0, 1 << 26) };
    assert!(ask(one).unwrap().one);
    for (offset, len) in [(0, 0), (64 * MIB, 1), (0, (64 << 20) + 1)] {
        assert_eq!(ask(request(cmd::BLOCK_STATUS, offset, len)), Err(NbdError::Inval));
    }
    let odd = Request { flags: cmd_flags::DF, ..request(cmd::BLOCK_STATUS, 0, 512) };
    assert_eq!(ask(odd), Err(NbdError::Inval));
    let read = Request { flags: cmd_flags::REQ_ONE, ..request(cmd::READ, 0, 512) };
    assert_eq!(ask(read), Err(NbdError::Inval));
}

#[test]
fn the_maximum_payload_limits_only_reads_and_writes() {
    let big = ExportInfo { size: 1 << 40, ..export() };
    let (at, over) = (64 << 20, (64 << 20) + 512);
    for structured in [false, true] {
        assert_eq!(refused(&big, structured, request(cmd::READ, 0, at)), None);
        assert_eq!(refused(&big, structured, request(cmd::WRITE, 0, at)), None);
        assert_eq!(refused(&big, structured, request(cmd::WRITE, 0, over)), Some(NbdError::Inval));
        for command in [cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
            assert_eq!(refused(&big, structured, request(command, 0, 0xffff_fe00)), None);
        }
    }
    // Only a structured read may fail with EOVERFLOW.
    assert_eq!(refused(&big, false, request(cmd::READ, 0, over)), Some(NbdError::Inval));
    assert_eq!(refused(&big, true, request(cmd::READ, 0, over)), Some(NbdError::Overflow));
    // The limit for a single chunk is lower.
    let whole = |len| Request { flags: cmd_flags::DF, ..request(cmd::READ, 0, len) };
    assert_eq!(refused(&big, true, whole(32 << 20)), None);
    assert_eq!(refused(&big, true, whole((32 << 20) + 512)), Some(NbdError::Overflow));
    // A larger value in the export does not raise the limit; a smaller one lowers it.
    let greedy = ExportInfo { max_payload: u32::MAX, ..big.clone() };
    let over_read = request(cmd::READ, 0, over);
    assert_eq!(refused(&greedy, false, over_read), Some(NbdError::Inval));
    let small = ExportInfo { max_payload: 1 << 20, ..big };
    let over_write = request(cmd::WRITE, 0, (1 << 20) + 512);
    assert_eq!(refused(&small, false, over_write), Some(NbdError::Inval));
}

#[test]
fn dropped_payloads_are_bounded() {
    let after = |len| check(request(cmd::WRITE, u64::MAX, len)).unwrap_err().after;
    assert_eq!(after(1), AfterRefusal::Skip(1));
    assert_eq!(after(SKIP_MAX), AfterRefusal::Skip(SKIP_MAX));
    assert_eq!(after(SKIP_MAX + 1), AfterRefusal::Close);
    assert_eq!(after(u32::MAX), AfterRefusal::Close);
    // A read has no payload, whatever its length.
    let read = check(request(cmd::READ, 0, u32::MAX)).unwrap_err();
    assert_eq!(read.after, AfterRefusal::Continue);
}

#[test]
fn a_zero_block_size_is_refused() {
    let broken = ExportInfo { min_block: 0, ..export() };
    assert_eq!(refused(&broken, true, request(cmd::READ, 0, 512)), Some(NbdError::Inval));
}

#[test]
fn foreign_magics_do_not_decode() {
    let good = request(cmd::READ, 0, 512).encode();
    assert_eq!(Request::decode(&good), Ok(request(cmd::READ, 0, 512)));
    for magic in [0, 0x1256_0953, 0x6744_6698, 0x2560_9514, 0x21e4_1c71] {
        let mut bytes = good;
        bytes[..4].copy_from_slice(&u32::to_be_bytes(magic));
        assert!(!Request::decode(&bytes).unwrap_err().is_short());
    }
    assert!(Request::decode(&good[..27]).unwrap_err().is_short());
}

proptest! {
    #[test]
    fn any_bytes_are_validated(data in proptest::collection::vec(any::<u8>(), 0..400)) {
        fuzz_transmission(&data);
    }

    #[test]
    fn near_misses_are_validated(
        head in any::<[u8; 13]>(),
        requests in proptest::collection::vec(
            (0..32u16, 0..9u16, 0..1u64 << 24, 0..1u32 << 23, 0..3u8), 1..20),
    ) {
        // The export is small, so that many ranges end near its end.
        let mut data = vec![0, 0, 0, 0, 0, head[0], head[1], 0];
        data.extend_from_slice(&head[2..10]);
        for (flags, command, offset, len, unit) in requests {
            let unit = [1, 512, 4096][usize::from(unit)];
            let (offset, len) = (offset / unit * unit, len / unit as u32 * unit as u32);
            let request = Request { flags, command, cookie: 1, offset, len };
            data.extend_from_slice(&request.encode());
        }
        fuzz_transmission(&data);
    }
}
