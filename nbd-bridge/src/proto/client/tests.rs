//! Tests of both state machines against our own server, and against bytes that violate the
//! protocol.

use proptest::prelude::*;

use super::*;
use crate::proto::wire::{
    ChunkHeader, Greeting, OptionReplyHeader, RequestHeader, SimpleReply, cmd, magic, opt, rep,
};
use crate::proto::{ExportInfo, Exports, Handshake, Outcome};

struct One(ExportInfo);

impl Exports for One {
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo)) {
        visit(&self.0);
    }

    fn lookup(&self, name: &str) -> Option<ExportInfo> {
        (name == self.0.name).then(|| self.0.clone())
    }
}

/// Runs a handshake between our client and our server, in pieces of `piece` bytes.
fn shake(name: &str, piece: usize) -> Result<Offered, HandshakeError> {
    let exports = One(ExportInfo { min_block: 512, ..ExportInfo::plain("disk", 1 << 20) });
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let mut server = Handshake::start(&mut to_client);
    let mut client = ClientHandshake::new(name);
    for _ in 0..10_000 {
        let count = to_client.len().min(piece);
        let (taken, offered) = client.feed(&to_client[..count], &mut to_server)?;
        to_client.drain(..taken);
        if let Some(offered) = offered {
            assert!(to_client.is_empty(), "the server is ahead");
            return Ok(offered);
        }
        let count = to_server.len().min(piece);
        // The server's handshake ends with its last answer.
        if count == 0 {
            continue;
        }
        let (taken, outcome) = server.feed(&to_server[..count], &exports, &mut to_client);
        to_server.drain(..taken);
        assert!(!matches!(outcome, Outcome::Close(_) | Outcome::Abort), "{outcome:?}");
    }
    panic!("no end");
}

#[test]
fn our_server_completes_the_handshake() {
    for piece in [1, 7, 4096] {
        let offered = shake("disk", piece).unwrap();
        assert_eq!((offered.size, offered.min_block), (1 << 20, 512));
        assert!(offered.structured && offered.max_payload > 32 << 20);
        assert!(matches!(shake("none", piece), Err(HandshakeError::Unknown(_))));
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    Greeting { version: magic::OPTION, flags }.encode().to_vec()
}

fn option_reply(option: u32, reply: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    [&OptionReplyHeader { option, reply, len }.encode()[..], data].concat()
}

fn feed(parts: &[Vec<u8>]) -> Result<Option<Offered>, HandshakeError> {
    let mut out = Vec::new();
    ClientHandshake::new("x").feed(&parts.concat(), &mut out).map(|(_, offered)| offered)
}

#[test]
fn servers_with_fewer_features_are_accepted() {
    let size = [&(1u64 << 20).to_be_bytes()[..], &5u16.to_be_bytes()].concat();
    // Not fixed newstyle: only EXPORT_NAME, with its zeroes.
    let offered = feed(&[greeting(0), size.clone(), vec![0; 124]]).unwrap().unwrap();
    assert_eq!((offered.size, offered.flags, offered.structured), (1 << 20, 5, false));
    assert_eq!(offered.max_payload, 32 << 20);
    // A server without GO.
    let unknown = |option| option_reply(option, rep::ERR_UNSUP, b"what?");
    let parts = [greeting(3), unknown(opt::STRUCTURED_REPLY), unknown(opt::GO), size];
    assert_eq!(feed(&parts).unwrap().unwrap().flags, 5);
}

#[test]
fn servers_that_refuse_or_lie_are_rejected() {
    let go = |reply, data: &[u8]| {
        let structured = option_reply(opt::STRUCTURED_REPLY, rep::ACK, &[]);
        feed(&[greeting(3), structured, option_reply(opt::GO, reply, data)])
    };
    assert_eq!(go(rep::ERR_TLS_REQD, b""), Err(HandshakeError::Tls));
    let error = go(rep::ERR_POLICY, b"not you").unwrap_err().to_string();
    assert_eq!(error, "the server refused the export (error 0x2): \"not you\"");
    for (reply, data) in
        [(rep::ACK, &b""[..]), (rep::INFO, b"\0"), (rep::INFO, b"\0\0abc"), (9, b"")]
    {
        assert!(matches!(go(reply, data), Err(HandshakeError::Malformed(_))), "{reply} {data:?}");
    }
    let blocks = |min: u32, max: u32| {
        [&3u16.to_be_bytes()[..], &min.to_be_bytes(), &4096u32.to_be_bytes(), &max.to_be_bytes()]
            .concat()
    };
    for bad in [blocks(0, 4096), blocks(3, 4096), blocks(4096, 512)] {
        let export = [&[0; 2][..], &[0; 8], &[0; 2]].concat();
        let parts = [
            greeting(3),
            option_reply(opt::STRUCTURED_REPLY, rep::ACK, &[]),
            option_reply(opt::GO, rep::INFO, &export),
            option_reply(opt::GO, rep::INFO, &bad),
            option_reply(opt::GO, rep::ACK, &[]),
        ];
        assert!(matches!(feed(&parts), Err(HandshakeError::Malformed(_))), "{bad:?}");
    }
    assert_eq!(feed(&[vec![1; 18]]), Err(HandshakeError::NoNbd));
    let old = Greeting { version: 0x0000_4202_8186_1253, flags: 0 }.encode().to_vec();
    assert_eq!(feed(&[old]), Err(HandshakeError::Oldstyle));
    let long = OptionReplyHeader { option: opt::STRUCTURED_REPLY, reply: rep::ACK, len: 1 << 20 };
    let long = feed(&[greeting(3), long.encode().to_vec()]);
    assert!(matches!(long, Err(HandshakeError::Malformed(_))));
}

/// Creates requests with a pending read of 4 KiB at 8 KiB and a pending write.
fn two(structured: bool) -> (Requests, u64, u64) {
    let mut requests = Requests::new(4);
    requests.reconnect(structured);
    let mut send = |command| {
        let row = requests.add(command, 0, 8192, 4096).unwrap();
        let head = RequestHeader::decode(&requests.send(row)).unwrap();
        assert_eq!((head.offset, head.len, head.command), (8192, 4096, command));
        head.cookie
    };
    let (read, write) = (send(cmd::READ), send(cmd::WRITE));
    (requests, read, write)
}

fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap();
    [&ChunkHeader { flags, kind, cookie, len }.encode()[..], payload].concat()
}

/// Parses all replies in `bytes`, leaving out data.
fn replies(requests: &mut Requests, mut bytes: &[u8]) -> Result<Vec<Reply>, BadReply> {
    let mut all = Vec::new();
    while let Some((count, reply)) = requests.next(&bytes[..bytes.len().min(32)])? {
        bytes = &bytes[count..];
        if let Reply::Data { len, .. } = reply {
            bytes = &bytes[len as usize..];
        }
        all.extend(Some(reply).filter(|reply| *reply != Reply::Nothing));
    }
    assert!(bytes.is_empty(), "{} bytes are left", bytes.len());
    Ok(all)
}

#[test]
fn simple_replies_are_decoded() {
    let (mut requests, read, write) = two(false);
    let bytes = [
        &SimpleReply { error: 28, cookie: write }.encode()[..],
        &SimpleReply { error: 0, cookie: read }.encode(),
        &[7; 4096],
    ];
    let all = replies(&mut requests, &bytes.concat()).unwrap();
    let data = Reply::Data { row: 0, at: 0, len: 4096 };
    assert_eq!(all, [Reply::End { row: 1, error: 28 }, data, Reply::End { row: 0, error: 0 }]);
    let again = replies(&mut requests, &SimpleReply { error: 0, cookie: read }.encode());
    assert_eq!(again, Err(BadReply::Cookie), "it has ended");
}

#[test]
fn structured_replies_are_decoded_in_any_order() {
    let (mut requests, read, write) = two(true);
    let part = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![7; len]].concat();
    let hole = [&10240u64.to_be_bytes()[..], &1024u32.to_be_bytes()].concat();
    let error = [&5u32.to_be_bytes()[..], &40u16.to_be_bytes(), &[b'x'; 40]].concat();
    let bytes = [
        chunk(0, 1, read, &part(11264, 1024)),
        chunk(1, (1 << 15) + 1, write, &error),
        chunk(0, 2, read, &hole),
        chunk(0, 1, read, &part(8192, 2048)),
        chunk(1, 0, read, &[]),
    ];
    let all = replies(&mut requests, &bytes.concat()).unwrap();
    assert_eq!(
        all,
        [
            Reply::Data { row: 0, at: 3072, len: 1024 },
            Reply::End { row: 1, error: 5 },
            Reply::Hole { row: 0, at: 2048, len: 1024 },
            Reply::Data { row: 0, at: 0, len: 2048 },
            Reply::End { row: 0, error: 0 },
        ]
    );
}

#[test]
fn bad_replies_are_refused() {
    let part = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![7; len]].concat();
    let (_, read, write) = two(true);
    for (bytes, expected) in [
        (vec![0; 32], BadReply::Magic),
        (chunk(1, 0, read + 7, &[]), BadReply::Cookie),
        (chunk(1, 0, read + (1 << 32), &[]), BadReply::Cookie),
        (chunk(1, 0, read, &[]), BadReply::Missing),
        (chunk(0, 0, read, &[]), BadReply::Chunk),
        (chunk(1, 1, write, &part(8192, 512)), BadReply::Chunk),
        (chunk(1, 1, read, &part(8191, 512)), BadReply::Range),
        (chunk(1, 1, read, &part(8192, 4097)), BadReply::Range),
        (chunk(1, 1, read, &part(u64::MAX, 512)), BadReply::Range),
        (chunk(1, 1, read, &part(8192, 512)), BadReply::Missing),
        (chunk(1, 3, read, &[0; 12]), BadReply::Chunk),
        (chunk(1, (1 << 15) + 1, read, &[0; 5]), BadReply::Chunk),
        (SimpleReply { error: 0, cookie: read }.encode().to_vec(), BadReply::Chunk),
    ] {
        let (mut requests, ..) = two(true);
        assert_eq!(replies(&mut requests, &bytes), Err(expected), "{bytes:?}");
    }
    let (mut requests, read, _) = two(true);
    let twice = chunk(0, 1, read, &part(8192, 4096)).repeat(2);
    assert_eq!(replies(&mut requests, &twice), Err(BadReply::Range), "the whole range twice");
    let (mut requests, read, _) = two(false);
    assert_eq!(replies(&mut requests, &chunk(1, 0, read, &[])), Err(BadReply::Magic));
}

#[test]
fn a_reply_from_an_earlier_connection_is_refused() {
    let (mut requests, read, _) = two(true);
    requests.reconnect(false);
    let late = SimpleReply { error: 5, cookie: read }.encode();
    assert_eq!(requests.next(&late), Err(BadReply::Cookie));
    let again = RequestHeader::decode(&requests.send(0)).unwrap().cookie;
    assert_ne!(again, read);
    assert_eq!(requests.next(&late), Err(BadReply::Cookie), "not to what was resent");
    let reply = SimpleReply { error: 5, cookie: again }.encode();
    assert_eq!(requests.next(&reply), Ok(Some((16, Reply::End { row: 0, error: 5 }))));
}

#[test]
fn overlapping_chunks_are_refused_even_if_lengths_add_up() {
    let part = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![7; len]].concat();
    let hole = |at: u64, len: u32| [&at.to_be_bytes()[..], &len.to_be_bytes()].concat();
    for second in [chunk(1, 1, 0, &part(8192, 2048)), chunk(1, 2, 0, &hole(8191 + 2048, 2048))] {
        let (mut requests, read, _) = two(true);
        let mut bytes = chunk(0, 1, read, &part(8192, 2048));
        bytes.extend(second);
        let cookie = bytes.len() - (20 + 8 + if bytes.len() > 4096 { 2048 } else { 4 });
        bytes[cookie + 8..cookie + 16].copy_from_slice(&read.to_be_bytes());
        assert_eq!(replies(&mut requests, &bytes), Err(BadReply::Range));
    }
}

proptest! {
    #[test]
    fn each_byte_of_a_read_arrives_once(
        parts in prop::collection::vec((0..18_u64, 1..5_u32), 1..12),
    ) {
        const UNIT: u64 = 256;
        let (mut requests, read, _) = two(true);
        let mut got = [false; 16];
        for (at, len) in parts {
            let payload =
                [&(8192 + at * UNIT).to_be_bytes()[..], &(len * 256).to_be_bytes()].concat();
            let range = at as usize..(at + u64::from(len)) as usize;
            let is_new = got.get(range.clone()).is_some_and(|part| !part.contains(&true));
            let taken = replies(&mut requests, &chunk(0, 2, read, &payload));
            prop_assert_eq!(taken.is_ok(), is_new, "{:?}", taken);
            if !is_new {
                return Ok(());
            }
            got[range].fill(true);
        }
        let ended = replies(&mut requests, &chunk(1, 0, read, &[]));
        prop_assert_eq!(ended.is_ok(), got == [true; 16], "{:?}", ended);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), magic in 0..3u8) {
        let mut out = Vec::new();
        let start = [&greeting(3)[..], &bytes].concat();
        let _ = ClientHandshake::new("x").feed(&start, &mut out);
        let (mut requests, read, _) = two(true);
        let mut bytes = bytes;
        let head = match magic {
            0 => SimpleReply { error: 0, cookie: read }.encode().to_vec(),
            1 => chunk(0, 1, read, &[0; 9]),
            _ => Vec::new(),
        };
        bytes.splice(0..0, head);
        let mut bytes = &bytes[..];
        while let Ok(Some((count, reply))) = requests.next(&bytes[..bytes.len().min(32)]) {
            bytes = &bytes[count..];
            if let Reply::Data { len, at, .. } = reply {
                prop_assert!(at + len <= 4096);
                bytes = &bytes[bytes.len().min(len as usize)..];
            }
        }
    }
}
