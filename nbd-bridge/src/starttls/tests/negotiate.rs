//! Tests with clients that send raw bytes, ahead of the engine's own handshake.

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::proto::wire::{client_flags, magic};
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

/// The negotiating engine, which records the bytes sent to it.
struct Engine {
    handshake: Handshake,
    out: Vec<u8>,
    got: Vec<u8>,
    over: bool,
}

impl Engine {
    fn new() -> Self {
        let mut out = Vec::new();
        Self { handshake: Handshake::start(&mut out), out, got: Vec::new(), over: false }
    }
}

impl Write for Engine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.got.extend_from_slice(bytes);
        let exports = One(ExportInfo::plain("disk", 1 << 20));
        let mut rest = bytes;
        while !rest.is_empty() && !self.over {
            let (taken, outcome) = self.handshake.feed(rest, &exports, &mut self.out);
            rest = &rest[taken..];
            self.over = !matches!(outcome, Outcome::NeedMore | Outcome::Reply);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for Engine {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = bytes.len().min(self.out.len());
        bytes[..count].copy_from_slice(&self.out[..count]);
        self.out.drain(..count);
        Ok(count)
    }
}

/// A client with its prepared input, and the bytes sent to it.
struct Client {
    says: Cursor<Vec<u8>>,
    told: Vec<u8>,
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.says.read(bytes)
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.told.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Client {
    fn left(&self) -> usize {
        self.says.get_ref().len() - self.says.position() as usize
    }

    /// Returns option, type and message of each reply.
    fn replies(&self) -> Vec<(u32, u32, String)> {
        let mut rest = &self.told[Greeting::LEN..];
        let mut replies = Vec::new();
        while !rest.is_empty() {
            let head = OptionReplyHeader::decode(rest).unwrap();
            let (data, after) = rest[OptionReplyHeader::LEN..].split_at(head.len as usize);
            replies.push((head.option, head.reply, String::from_utf8_lossy(data).into_owned()));
            rest = after;
        }
        replies
    }

    fn types(&self) -> Vec<(u32, u32)> {
        self.replies().into_iter().map(|(option, reply, _)| (option, reply)).collect()
    }
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&OptionHeader { option, len }.encode()[..], data].concat()
}

fn go() -> Vec<u8> {
    option(opt::GO, b"\0\0\0\x04disk\0\0")
}

struct Played {
    negotiation: Negotiation,
    client: Client,
    engine: Engine,
    next: Result<Next, Stop>,
}

/// Sends flags followed by these options.
fn play(mode: TlsMode, options: &[Vec<u8>]) -> Played {
    let flags = (client_flags::FIXED_NEWSTYLE | client_flags::NO_ZEROES).to_be_bytes();
    let says = Cursor::new([&flags[..], &options.concat()].concat());
    let (mut client, mut engine) = (Client { says, told: Vec::new() }, Engine::new());
    let mut negotiation = Negotiation::new(mode);
    negotiation.greet(&mut client, &mut engine).unwrap();
    let next = negotiation.options(&mut client, &mut engine);
    Played { negotiation, client, engine, next }
}

#[test]
fn a_plain_client_is_refused_with_require() {
    let options = [option(opt::LIST, &[]), option(opt::STRUCTURED_REPLY, &[]), go()];
    let played = play(TlsMode::Require, &[&options[..], &[option(opt::ABORT, b"x")]].concat());
    assert!(matches!(played.next, Ok(Next::Over)), "{:?}", played.next);
    assert!(played.negotiation.refused);
    assert_eq!(
        played.client.types(),
        [
            (opt::LIST, rep::ERR_TLS_REQD),
            (opt::STRUCTURED_REPLY, rep::ERR_TLS_REQD),
            (opt::GO, rep::ERR_TLS_REQD),
            (opt::ABORT, rep::ACK),
        ]
    );
    assert_eq!(played.client.replies()[0].2, "this server requires TLS");
    assert_eq!(played.engine.got.len(), 4, "only the flags");
    // This option has no error reply.
    let played = play(TlsMode::Require, &[option(opt::EXPORT_NAME, b"disk")]);
    assert!(matches!(played.next, Err(Stop::Plain)));
    assert!(played.negotiation.refused);
    assert_eq!((played.client.types().len(), played.engine.got.len()), (0, 4));
}

#[test]
fn plain_text_after_starttls_is_left_to_tls() {
    for mode in [TlsMode::On, TlsMode::Require] {
        let injected = [option(opt::STRUCTURED_REPLY, &[]), go()].concat();
        let mut played = play(mode, &[option(opt::STARTTLS, &[]), injected.clone()]);
        assert!(matches!(played.next, Ok(Next::Handshake)), "{:?}", played.next);
        assert_eq!(played.client.types(), [(opt::STARTTLS, rep::ACK)]);
        assert_eq!(played.client.left(), injected.len());
        assert_eq!(played.engine.got.len(), 4, "only the flags");
        // Behave as if the connection used TLS.
        played.negotiation.secured();
        let next = played.negotiation.options(&mut played.client, &mut played.engine);
        assert!(matches!(next, Ok(Next::Pipe)), "{next:?}");
        let types = played.client.types();
        assert_eq!(types[1], (opt::STRUCTURED_REPLY, rep::ACK));
        assert_eq!(types[2..], [(opt::GO, rep::INFO), (opt::GO, rep::ACK)]);
        assert_eq!(played.engine.got[4..], injected);
        assert!(!played.negotiation.refused);
    }
}

#[test]
fn invalid_and_repeated_starttls_is_refused() {
    let data = option(opt::STARTTLS, &[0; 9]);
    let mut played = play(TlsMode::Require, &[data, option(opt::STARTTLS, &[])]);
    let types = [(opt::STARTTLS, rep::ERR_INVALID), (opt::STARTTLS, rep::ACK)];
    assert_eq!(played.client.types(), types);
    played.negotiation.secured();
    played.client.says = Cursor::new([option(opt::STARTTLS, &[]), go()].concat());
    let next = played.negotiation.options(&mut played.client, &mut played.engine);
    assert!(matches!(next, Ok(Next::Pipe)), "{next:?}");
    let replies = played.client.replies();
    assert_eq!(replies[2], (opt::STARTTLS, rep::ERR_INVALID, "TLS is in use already".into()));

    let late = [option(opt::STRUCTURED_REPLY, &[]), option(opt::STARTTLS, &[]), go()];
    let played = play(TlsMode::On, &late);
    assert!(matches!(played.next, Ok(Next::Pipe)), "{:?}", played.next);
    assert_eq!(played.client.types()[1], (opt::STARTTLS, rep::ERR_POLICY));
    assert_eq!(played.engine.got[4..], [late[0].clone(), go()].concat(), "not of STARTTLS");
}

#[test]
fn a_plain_client_continues_with_on() {
    for (options, ready) in [
        (vec![option(opt::EXPORT_NAME, b"disk")], true),
        (vec![option(opt::LIST, &[]), option(99, b"abc"), go()], true),
        (vec![option(opt::GO, b"\0\0\0\x01x\0\0"), option(opt::LIST, &[])], false),
    ] {
        let played = play(TlsMode::On, &options);
        assert_eq!(played.engine.got[4..], options.concat());
        assert_eq!(matches!(played.next, Ok(Next::Pipe)), ready, "{:?}", played.next);
        assert!(!played.negotiation.refused);
    }
}

#[test]
fn malformed_and_endless_options_close_the_connection() {
    let cut = |bytes: &[u8]| {
        matches!(play(TlsMode::Require, &[bytes.to_vec()]).next,
        Err(Stop::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof)
    };
    let list = option(opt::LIST, b"data");
    assert!((0..list.len()).all(|len| cut(&list[..len])));
    let why = |mode, options: &[Vec<u8>]| match play(mode, options).next {
        Err(Stop::Protocol(why)) => why,
        other => panic!("{other:?}"),
    };
    for mode in [TlsMode::On, TlsMode::Require] {
        assert!(why(mode, &[vec![7; 16]]).contains("wrong magic"));
        for number in [opt::STARTTLS, opt::LIST, opt::EXPORT_NAME] {
            let len = OPTION_SKIP_MAX + 1;
            let head = OptionHeader { option: number, len }.encode().to_vec();
            assert!(why(mode, &[head]).contains("too much data"));
        }
        let many = vec![option(99, &[]); OPTIONS_MAX as usize + 1];
        assert!(why(mode, &many).contains("too many options"));
        let large = vec![option(99, &[0; OPTION_SKIP_MAX as usize]); 4];
        assert!(why(mode, &large).contains("too many options"));
    }
}

proptest! {
    #[test]
    fn plain_text_never_passes_with_require(
        pieces in prop::collection::vec(
            (0u32..14, prop::collection::vec(any::<u8>(), 0..40), any::<bool>()), 0..12
        ),
        cut in 0usize..40,
    ) {
        let mut options: Vec<Vec<u8>> = pieces
            .iter()
            .map(|(number, data, real)| if *real { option(*number, data) } else { data.clone() })
            .collect();
        if let Some(last) = options.last_mut() {
            last.truncate(last.len().saturating_sub(cut));
        }
        let played = play(TlsMode::Require, &options);
        prop_assert_eq!(played.engine.got.len(), 4);
        prop_assert!(!matches!(played.next, Ok(Next::Pipe)));
        for (option, reply) in played.client.types() {
            let right: &[u32] = match option {
                opt::ABORT => &[rep::ACK],
                opt::STARTTLS => &[rep::ACK, rep::ERR_INVALID],
                _ => &[rep::ERR_TLS_REQD],
            };
            prop_assert!(right.contains(&reply), "{} answers {}", reply, option);
        }
        // The other mode must accept any bytes too.
        let _ = play(TlsMode::On, &options);
        prop_assert_eq!(&played.client.told[..8], &magic::INIT.to_be_bytes()[..]);
    }
}
