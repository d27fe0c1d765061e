//! Tests with hand-written handshakes: each option, each violation, golden bytes, and input in
//! pieces.

use super::*;
use crate::proto::BadExport;
use crate::proto::fuzz::{drive, fuzz_handshake};
use proptest::prelude::*;

const FIXED: u32 = client_flags::FIXED_NEWSTYLE;
const BOTH: u32 = client_flags::KNOWN;

struct Shelf(Vec<ExportInfo>);

impl Exports for Shelf {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        self.0.iter().for_each(visit);
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        let default = name.is_empty();
        self.0.iter().find(|e| default || e.name == name).cloned()
    }
}

fn shelf() -> Shelf {
    let mut vol0 = ExportInfo::plain("vol0", 0x1000_0000);
    (vol0.description, vol0.extents) = ("first".into(), true);
    let mut vol1 = ExportInfo::plain("vol1", 4096);
    (vol1.read_only, vol1.min_block) = (true, 512);
    Shelf(vec![vol0, vol1])
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let head = OptionHeader { option, len: u32::try_from(data.len()).unwrap() };
    [&head.encode(), data].concat()
}

fn info_data(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&u16::try_from(kinds.len()).unwrap().to_be_bytes());
    data.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

fn client(flags: u32, options: &[Vec<u8>]) -> Vec<u8> {
    [&flags.to_be_bytes()[..], &options.concat()].concat()
}

/// Returns the replies after the greeting, the outcome, and the number of bytes left over.
fn run(input: &[u8]) -> (Vec<u8>, Outcome, usize) {
    run_on(&shelf(), input)
}

fn run_on(exports: &Shelf, input: &[u8]) -> (Vec<u8>, Outcome, usize) {
    let (taken, out, outcome) = drive(input, input.len(), exports);
    assert_eq!(&out[..Greeting::LEN], b"NBDMAGICIHAVEOPT\x00\x03");
    (out[Greeting::LEN..].to_vec(), outcome, input.len() - taken)
}

/// Parses the option replies in `out`.
fn replies(mut out: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut all = Vec::new();
    while !out.is_empty() {
        let head = OptionReplyHeader::decode(out).unwrap();
        let (data, rest) = out[OptionReplyHeader::LEN..].split_at(head.len as usize);
        all.push((head.option, head.reply, data.to_vec()));
        out = rest;
    }
    all
}

/// Sends one option followed by a LIST. The option must receive exactly one error of type `reply`
/// with a message, and the LIST must still be understood.
fn assert_refused(bad: &[u8], reply: u32) {
    let (out, outcome, left) = run(&client(BOTH, &[bad.to_vec(), option(opt::LIST, b"")]));
    let all = replies(&out);
    assert_eq!(all[0].0, u32::from_be_bytes(bad[8..12].try_into().unwrap()));
    assert_eq!(all[0].1, reply, "{:?}", String::from_utf8_lossy(&all[0].2));
    assert!(!all[0].2.is_empty() && all[0].2.len() < 100);
    let list: Vec<u32> = all[1..].iter().map(|r| r.1).collect();
    assert_eq!(list, [rep::SERVER, rep::SERVER, rep::ACK]);
    assert_eq!((outcome, left), (Outcome::NeedMore, 0));
}

fn assert_closed(input: &[u8], error: ProtocolError) {
    let (out, outcome, _) = run(input);
    assert_eq!(outcome, Outcome::Close(error));
    assert!(out.is_empty());
}

fn terms(outcome: Outcome) -> Negotiated {
    match outcome {
        Outcome::Ready(terms) => *terms,
        other => panic!("not ready but {other:?}"),
    }
}

#[test]
fn golden_go() {
    let go = option(opt::GO, &info_data("vol0", &[info::BLOCK_SIZE]));
    let sr = option(opt::STRUCTURED_REPLY, b"");
    assert_eq!(
        client(BOTH, &[sr.clone(), go.clone()]),
        b"\0\0\0\x03IHAVEOPT\0\0\0\x08\0\0\0\0\
          IHAVEOPT\0\0\0\x07\0\0\0\x0c\0\0\0\x04vol0\0\x01\0\x03"
    );
    let (out, outcome, left) = run(&client(BOTH, &[sr, go, b"next".to_vec()]));
    const MAGIC: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9";
    let expect = [
        MAGIC,
        b"\0\0\0\x08\0\0\0\x01\0\0\0\0",
        MAGIC,
        b"\0\0\0\x07\0\0\0\x03\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\0\x8d",
        MAGIC,
        b"\0\0\0\x07\0\0\0\x03\0\0\0\x0e\0\x03\0\0\0\x01\0\0\x10\0\x04\0\0\0",
        MAGIC,
        b"\0\0\0\x07\0\0\0\x01\0\0\0\0",
    ];
    assert_eq!(out, expect.concat());
    assert_eq!(left, 4, "the first request must stay in the input");
    let terms = terms(outcome);
    assert_eq!(terms.export, shelf().0[0]);
    assert!(terms.terms.structured_replies && terms.no_zeroes && terms.terms.keeps_blocks);
    assert!(terms.rules().structured_replies());
}

#[test]
fn golden_export_name() {
    let name = option(opt::EXPORT_NAME, b"vol0");
    let (out, outcome, left) = run(&client(BOTH, &[name.clone(), vec![7; 28]]));
    assert_eq!(out, b"\0\0\0\0\x10\0\0\0\0\x0d");
    assert_eq!(left, 28);
    assert!(!terms(outcome).terms.structured_replies);
    // Without the no-zeroes flag, and for a client of the original newstyle, 124 zeroes follow.
    for flags in [FIXED, 0] {
        let (out, outcome, _) = run(&client(flags, std::slice::from_ref(&name)));
        assert_eq!(out, [&b"\0\0\0\0\x10\0\0\0\0\x0d"[..], &[0; 124]].concat());
        assert!(!terms(outcome).no_zeroes);
    }
}

#[test]
fn golden_list() {
    let (out, _, _) = run(&client(FIXED, &[option(opt::LIST, b"")]));
    let all = replies(&out);
    assert_eq!(
        all,
        [
            (opt::LIST, rep::SERVER, b"\0\0\0\x04vol0first".to_vec()),
            (opt::LIST, rep::SERVER, b"\0\0\0\x04vol1".to_vec()),
            (opt::LIST, rep::ACK, vec![]),
        ]
    );
}

#[test]
fn an_empty_list_is_acknowledged_and_long_strings_fit() {
    let (out, _, _) = run_on(&Shelf(vec![]), &client(FIXED, &[option(opt::LIST, b"")]));
    assert_eq!(replies(&out), [(opt::LIST, rep::ACK, vec![])]);
    let too_long = ExportInfo::plain("n".repeat(4097), 0);
    let mut wordy = ExportInfo::plain("w", 0);
    wordy.description = "é".repeat(3000);
    let (out, _, _) =
        run_on(&Shelf(vec![too_long, wordy]), &client(FIXED, &[option(opt::LIST, b"")]));
    let all = replies(&out);
    assert_eq!(all.len(), 2);
    assert_eq!(all[0].2.len(), 4 + 1 + 4096);
}

#[test]
fn info_returns_the_requested_items_and_stays_in_the_handshake() {
    let kinds = [info::DESCRIPTION, 0xffff, info::NAME, info::NAME];
    let ask = option(opt::INFO, &info_data("", &kinds));
    let (out, outcome, _) = run(&client(FIXED, &[ask]));
    let got: Vec<(u32, Vec<u8>)> = replies(&out).into_iter().map(|r| (r.1, r.2)).collect();
    assert_eq!(
        got,
        [
            (rep::INFO, b"\0\0\0\0\0\0\x10\0\0\0\0\x0d".to_vec()),
            (rep::INFO, b"\0\x01vol0".to_vec()),
            (rep::INFO, b"\0\x02first".to_vec()),
            (rep::ACK, vec![]),
        ]
    );
    assert_eq!(outcome, Outcome::NeedMore);
}

#[test]
fn block_sizes_are_sent_unasked_but_no_empty_description() {
    let ask = option(opt::GO, &info_data("vol1", &[info::DESCRIPTION]));
    let (out, outcome, _) = run(&client(FIXED, &[ask]));
    let got: Vec<Vec<u8>> = replies(&out).into_iter().map(|r| r.2).collect();
    assert_eq!(
        got,
        [
            b"\0\0\0\0\0\0\0\0\x10\0\0\x0f".to_vec(),
            b"\0\x03\0\0\x02\0\0\0\x10\0\x04\0\0\0".to_vec(),
            vec![],
        ]
    );
    assert!(!terms(outcome).terms.keeps_blocks);
}

#[test]
fn a_repeated_structured_reply_option_is_acknowledged_again() {
    let ask = option(opt::STRUCTURED_REPLY, b"");
    let (out, _, _) = run(&client(FIXED, &[ask.clone(), ask]));
    let ack = (opt::STRUCTURED_REPLY, rep::ACK, vec![]);
    assert_eq!(replies(&out), [ack.clone(), ack]);
}

#[test]
fn abort_is_acknowledged_before_its_data_arrives() {
    for data in [&b""[..], b"bye"] {
        let (out, outcome, _) = run(&client(FIXED, &[option(opt::ABORT, data)]));
        assert_eq!(replies(&out), [(opt::ABORT, rep::ACK, vec![])]);
        assert_eq!(outcome, Outcome::Abort);
    }
    let endless = OptionHeader { option: opt::ABORT, len: u32::MAX }.encode().to_vec();
    assert_eq!(run(&client(FIXED, &[endless])).1, Outcome::Abort);
}

#[test]
fn unsupported_options_are_refused_and_the_next_is_processed() {
    for (kind, data) in [
        (opt::STARTTLS, &b""[..]),
        (opt::PEEK_EXPORT, b"x"),
        (0, b""),
        (12, b"IHAVEOPT"),
        (u32::MAX, &[0; 1000]),
    ] {
        assert_refused(&option(kind, data), rep::ERR_UNSUP);
    }
}

/// Builds LIST_META_CONTEXT or SET_META_CONTEXT.
fn contexts(kind: u32, name: &str, queries: &[&str]) -> Vec<u8> {
    let string = |text: &str| {
        let len = u32::try_from(text.len()).unwrap();
        [&len.to_be_bytes()[..], text.as_bytes()].concat()
    };
    let count = u32::try_from(queries.len()).unwrap();
    let mut data = [string(name), count.to_be_bytes().to_vec()].concat();
    data.extend(queries.iter().flat_map(|query| string(query)));
    option(kind, &data)
}

#[test]
fn golden_meta_context() {
    let sr = option(opt::STRUCTURED_REPLY, b"");
    let set = contexts(opt::SET_META_CONTEXT, "vol0", &["base:allocation"]);
    let sent = b"IHAVEOPT\0\0\0\x0a\0\0\0\x1f\0\0\0\x04vol0\0\0\0\x01\0\0\0\x0fbase:allocation";
    assert_eq!(set, sent);
    let (out, _, _) = run(&client(BOTH, &[sr, set]));
    const MAGIC: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9";
    let expect = [
        MAGIC,
        b"\0\0\0\x0a\0\0\0\x04\0\0\0\x13\0\0\0\x01base:allocation",
        MAGIC,
        b"\0\0\0\x0a\0\0\0\x01\0\0\0\0",
    ];
    assert_eq!(out[20..], expect.concat());
}

#[test]
fn contexts_are_listed_and_selected_for_an_export() {
    let sr = || option(opt::STRUCTURED_REPLY, b"");
    let allocation = "base:allocation";
    let found = |kind, name, queries: &[&str]| {
        let (out, _, _) = run(&client(FIXED, &[sr(), contexts(kind, name, queries)]));
        let replies = replies(&out);
        assert_eq!(replies.last().unwrap(), &(kind, rep::ACK, vec![]));
        replies.iter().filter(|(_, reply, _)| *reply == rep::META_CONTEXT).count()
    };
    for (queries, listed, set) in [
        (&[][..], 1, 0),
        (&["base:"], 1, 0),
        (&[allocation], 1, 1),
        (&["qemu:x", allocation, allocation], 1, 1),
        (&["base", "base:alloc", "qemu:", ""], 0, 0),
    ] {
        assert_eq!(found(opt::LIST_META_CONTEXT, "vol0", queries), listed, "{queries:?}");
        assert_eq!(found(opt::SET_META_CONTEXT, "vol0", queries), set, "{queries:?}");
        assert_eq!(found(opt::SET_META_CONTEXT, "", queries), set, "the default export");
        assert_eq!(found(opt::LIST_META_CONTEXT, "vol1", queries), 0, "it knows no extents");
    }
    let chosen = |options: &[Vec<u8>], go: &str| {
        let go = option(opt::GO, &info_data(go, &[]));
        let (_, outcome, _) = run(&client(FIXED, &[options.concat(), go]));
        terms(outcome).terms.block_status
    };
    let set = |name, query| contexts(opt::SET_META_CONTEXT, name, &[query]);
    assert!(chosen(&[sr(), set("vol0", allocation)], "vol0"));
    assert!(chosen(&[sr(), set("", allocation)], "vol0"), "the same export");
    assert!(!chosen(&[sr(), set("vol0", allocation)], "vol1"), "another one");
    assert!(!chosen(&[sr(), set("vol0", allocation), set("vol0", "x:y")], "vol0"), "replaced");
    assert!(!chosen(&[sr(), set("vol0", allocation), set("none", allocation)], "vol0"));
    assert!(!chosen(&[set("vol0", allocation), sr()], "vol0"), "before structured replies");
    let listed = contexts(opt::LIST_META_CONTEXT, "vol0", &[allocation]);
    assert!(chosen(&[sr(), set("vol0", allocation), listed], "vol0"), "a list changes nothing");
}

#[test]
fn malformed_contexts_are_invalid() {
    let sr = option(opt::STRUCTURED_REPLY, b"");
    let refused = |bytes: &[u8], error| {
        let (out, _, _) = run(&client(FIXED, &[sr.clone(), bytes.to_vec(), sr.clone()]));
        let replies = replies(&out);
        assert_eq!((replies.len(), replies[1].1, replies[2].1), (3, error, rep::ACK));
    };
    for kind in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        let good = contexts(kind, "vol0", &["base:allocation"]);
        for cut in 0..good.len() - OptionHeader::LEN {
            refused(&option(kind, &good[OptionHeader::LEN..][..cut]), rep::ERR_INVALID);
        }
        let longer = [&good[OptionHeader::LEN..], b"x"].concat();
        refused(&option(kind, &longer), rep::ERR_INVALID);
        refused(&option(kind, b"\0\0\0\x04vol0\xff\xff\xff\xff"), rep::ERR_INVALID);
        refused(&contexts(kind, "none", &["base:allocation"]), rep::ERR_UNKNOWN);
        refused(&contexts(kind, &"x".repeat(4097), &[]), rep::ERR_TOO_BIG);
        refused(&option(kind, &[0; 9000]), rep::ERR_TOO_BIG);
        assert_refused(&good, rep::ERR_INVALID);
    }
}

#[test]
fn extended_headers_imply_structured_replies_and_exclude_the_option() {
    let extended = option(opt::EXTENDED_HEADERS, b"");
    let structured = option(opt::STRUCTURED_REPLY, b"");
    let go = option(opt::GO, b"\0\0\0\x04vol0\0\0");
    let (out, outcome, _) =
        run(&client(FIXED, &[structured.clone(), extended, structured, go.clone()]));
    let kinds: Vec<_> = replies(&out).iter().map(|reply| (reply.0, reply.1)).collect();
    assert_eq!(
        kinds[..3],
        [
            (opt::STRUCTURED_REPLY, rep::ACK),
            (opt::EXTENDED_HEADERS, rep::ACK),
            (opt::STRUCTURED_REPLY, rep::ERR_EXT_HEADER_REQD),
        ]
    );
    let terms = terms(outcome);
    assert!(terms.rules().extended() && terms.rules().structured_replies());
    assert!(!self::terms(run(&client(FIXED, &[go])).1).terms.extended);
}

#[test]
fn unexpected_data_is_invalid() {
    for kind in [opt::LIST, opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS, opt::STARTTLS] {
        assert_refused(&option(kind, b"x"), rep::ERR_INVALID);
        assert_refused(&option(kind, &[0; 20_000]), rep::ERR_INVALID);
    }
    // A refused STRUCTURED_REPLY must have no effect.
    let bad = option(opt::STRUCTURED_REPLY, b"x");
    let (_, outcome, _) = run(&client(FIXED, &[bad, option(opt::EXPORT_NAME, b"")]));
    assert!(!terms(outcome).terms.structured_replies);
}

#[test]
fn malformed_info_and_go_are_invalid() {
    let good = info_data("vol0", &[info::NAME, info::BLOCK_SIZE]);
    for kind in [opt::INFO, opt::GO] {
        for cut in 0..good.len() {
            assert_refused(&option(kind, &good[..cut]), rep::ERR_INVALID);
        }
        let longer = [&good[..], b"x"].concat();
        for data in [
            &longer[..],
            b"\xff\xff\xff\xffvol0\0\0",
            b"\0\0\0\x05vol0\0\0",
            b"\0\0\0\x03vol0\0\0",
            b"\0\0\0\x04vol0\xff\xff",
            b"\0\0\0\x04vo\xff0\0\0",
            b"\0\0\0\x04vol\0\0\0",
        ] {
            assert_refused(&option(kind, data), rep::ERR_INVALID);
        }
    }
}

#[test]
fn oversize_info_and_go_are_too_big() {
    for kind in [opt::INFO, opt::GO] {
        let name = "n".repeat(STRING_MAX + 1);
        assert_refused(&option(kind, &info_data(&name, &[])), rep::ERR_TOO_BIG);
        let many = info_data("vol0", &vec![info::NAME; 65_535]);
        assert_refused(&option(kind, &many), rep::ERR_TOO_BIG);
        let limit = OPTION_SKIP_MAX as usize;
        assert_refused(&option(kind, &vec![0; limit]), rep::ERR_TOO_BIG);
    }
    let longest = "n".repeat(STRING_MAX);
    assert_refused(&option(opt::GO, &info_data(&longest, &[])), rep::ERR_UNKNOWN);
}

#[test]
fn unknown_and_invalid_exports_are_refused_and_may_be_retried() {
    for kind in [opt::INFO, opt::GO] {
        assert_refused(&option(kind, &info_data("vol2", &[])), rep::ERR_UNKNOWN);
        assert_refused(&option(kind, &info_data("VOL0", &[])), rep::ERR_UNKNOWN);
    }
    let retry = [option(opt::GO, &info_data("x", &[])), option(opt::GO, &info_data("vol1", &[]))];
    assert_eq!(terms(run(&client(FIXED, &retry)).1).export.name, "vol1");

    let mut broken = ExportInfo::plain("broken", 0);
    broken.min_block = 0;
    let exports = Shelf(vec![broken]);
    let go = client(FIXED, &[option(opt::GO, &info_data("broken", &[]))]);
    let (out, outcome, _) = run_on(&exports, &go);
    assert_eq!(outcome, Outcome::NeedMore);
    assert_eq!(replies(&out)[0].1, rep::ERR_POLICY);
    let name = client(FIXED, &[option(opt::EXPORT_NAME, b"broken")]);
    let why = ProtocolError::BadExport(BadExport::MinBlock(0));
    assert_eq!(run_on(&exports, &name).1, Outcome::Close(why));
}

#[test]
fn an_invalid_export_name_closes_the_connection() {
    let name = |bytes: &[u8]| client(BOTH, &[option(opt::EXPORT_NAME, bytes)]);
    assert_closed(&name(b"vol2"), ProtocolError::UnknownExport);
    assert_closed(&name(b"vol\0"), ProtocolError::BadName);
    assert_closed(&name(b"\xc3\x28"), ProtocolError::BadName);
    assert_closed(&name(&[b'n'; STRING_MAX + 1]), ProtocolError::BadName);
    assert_closed(&name(&[b'n'; STRING_MAX]), ProtocolError::UnknownExport);
    assert_eq!(terms(run(&name(b"")).1).export.name, "vol0");
    let empty = run_on(&Shelf(vec![]), &name(b""));
    assert_eq!(empty.1, Outcome::Close(ProtocolError::UnknownExport));
}

#[test]
fn unknown_client_flags_close_the_connection() {
    for flags in [4, 7, 0x8000_0000, u32::MAX, u32::from_be_bytes(*b"GET ")] {
        assert_closed(&client(flags, &[]), ProtocolError::ClientFlags(flags));
    }
}

#[test]
fn a_wrong_magic_closes_the_connection() {
    let mut bad = option(opt::GO, &info_data("vol0", &[]));
    bad[7] ^= 1;
    assert_closed(&client(BOTH, &[bad]), ProtocolError::OptionMagic);
    // A request instead of an option.
    let request = [&magic::REQUEST.to_be_bytes()[..], &[0; 24]].concat();
    assert_closed(&client(BOTH, &[request]), ProtocolError::OptionMagic);
}

#[test]
fn a_client_without_fixed_newstyle_may_only_name_its_export() {
    for kind in [opt::ABORT, opt::LIST, opt::INFO, opt::GO, opt::STRUCTURED_REPLY, 99] {
        let input = client(client_flags::NO_ZEROES, &[option(kind, b"")]);
        assert_closed(&input, ProtocolError::NotFixed(kind));
    }
}

#[test]
fn oversize_lengths_close_before_the_data_arrives() {
    for option in [opt::EXPORT_NAME, opt::LIST, opt::INFO, opt::GO, opt::STARTTLS, 77] {
        for len in [OPTION_SKIP_MAX + 1, u32::MAX] {
            let head = OptionHeader { option, len }.encode().to_vec();
            let error = ProtocolError::OptionTooLong { option, len };
            assert_closed(&client(BOTH, &[head]), error);
        }
    }
}

#[test]
fn options_and_bytes_are_bounded() {
    let noise = option(99, b"");
    let (out, outcome, left) = run(&client(BOTH, &vec![noise; OPTIONS_MAX as usize + 5]));
    assert_eq!(outcome, Outcome::Close(ProtocolError::TooManyOptions));
    assert_eq!(replies(&out).len(), OPTIONS_MAX as usize);
    assert_eq!(left, 4 * OptionHeader::LEN);
    let big = option(99, &vec![0; OPTION_SKIP_MAX as usize]);
    let (out, outcome, _) = run(&client(BOTH, &vec![big; 5]));
    assert_eq!(outcome, Outcome::Close(ProtocolError::TooManyBytes));
    assert_eq!(replies(&out).len(), 3);
}

#[test]
fn input_after_the_end_is_ignored() {
    let exports = shelf();
    let mut out = Vec::new();
    let mut handshake = Handshake::start(&mut out);
    let input = client(BOTH, &[option(opt::EXPORT_NAME, b"")]);
    let (n, outcome) = handshake.feed(&input, &exports, &mut out);
    assert_eq!((n, matches!(outcome, Outcome::Ready(_))), (input.len(), true));
    let (n, outcome) = handshake.feed(&option(opt::LIST, b""), &exports, &mut out);
    assert_eq!((n, outcome), (0, Outcome::Close(ProtocolError::Over)));
}

#[test]
fn memory_per_client_is_bounded() {
    let exports = shelf();
    let mut out = Vec::new();
    let mut handshake = Handshake::start(&mut out);
    let data = vec![0; OPTION_DATA_MAX as usize];
    for kind in [opt::GO, 99, opt::INFO, opt::LIST] {
        let input = client(if kind == opt::GO { BOTH } else { 0 }, &[option(kind, &data)]);
        let input = if kind == opt::GO { &input[..] } else { &input[4..] };
        for piece in input.chunks(100) {
            handshake.feed(piece, &exports, &mut out);
            assert!(handshake.buf.capacity() <= 2 * OPTION_DATA_MAX as usize);
        }
    }
    // A header alone must not reserve memory for the data that it announces.
    let mut handshake = Handshake::start(&mut out);
    let head = OptionHeader { option: opt::GO, len: OPTION_DATA_MAX }.encode().to_vec();
    handshake.feed(&client(BOTH, &[head]), &exports, &mut out);
    assert!(handshake.buf.capacity() <= 64);
}

/// Generates options: most are well formed, some have wrong lengths or contents.
fn any_option() -> impl Strategy<Value = Vec<u8>> {
    let names = prop_oneof![Just("vol0"), Just("vol1"), Just(""), Just("nope")];
    let info = (names, proptest::collection::vec(0..6u16, 0..5))
        .prop_map(|(name, kinds)| info_data(name, &kinds));
    let data = prop_oneof![
        3 => Just(Vec::new()),
        3 => info,
        1 => proptest::collection::vec(any::<u8>(), 0..50),
        1 => Just(vec![b'z'; 9000]),
    ];
    (prop_oneof![10 => 0..13u32, 1 => any::<u32>()], data, 0..20u32).prop_map(
        |(kind, data, lie)| {
            let mut bytes = option(kind, &data);
            match lie {
                0 => bytes[15] ^= 0x01,
                1 => bytes[3] ^= 0x20,
                2 => bytes[12] = 0xff,
                _ => {}
            }
            bytes
        },
    )
}

proptest! {
    #[test]
    fn splitting_the_input_changes_nothing(
        flags in prop_oneof![8 => Just(BOTH), 1 => 0..5u32],
        options in proptest::collection::vec(any_option(), 0..8),
        pieces in proptest::collection::vec(1..64usize, 1..8),
    ) {
        let input = client(flags, &options);
        let exports = shelf();
        let whole = drive(&input, input.len(), &exports);
        for piece in pieces {
            prop_assert_eq!(&drive(&input, piece, &exports), &whole);
        }
    }

    #[test]
    fn any_bytes_are_handled(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzz_handshake(&data);
        // Run again with valid flags, so that the first 4 bytes do not end the handshake.
        fuzz_handshake(&[&[3, 0, 0, 0, 3][..], b"IHAVEOPT", &data[..]].concat());
    }
}
