//! Golden bytes of every header, and truncation of messages.

use super::*;
use proptest::prelude::*;

const COOKIE: u64 = 0x0102_0304_0506_0708;
const OFFSET: u64 = 0x0000_0011_2233_4400;

const SIMPLE: Answered = Answered { form: Form::Simple, cookie: COOKIE, offset: 0 };
const STRUCTURED: Answered = Answered { form: Form::Structured, ..SIMPLE };
const EXTENDED: Answered = Answered { form: Form::Extended, offset: OFFSET, ..SIMPLE };

#[test]
fn golden_simple() {
    let ok = b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08";
    assert_eq!(*success(SIMPLE), *ok);
    assert_eq!(*read_head(SIMPLE, OFFSET, 512, true), *ok);
    assert_eq!(
        *failure(SIMPLE, NbdError::NoSpc, "not seen"),
        *b"\x67\x44\x66\x98\0\0\0\x1c\x01\x02\x03\x04\x05\x06\x07\x08"
    );
}

#[test]
fn golden_data() {
    let expect = b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\x02\x08\
                   \0\0\0\x11\x22\x33\x44\0";
    assert_eq!(*read_head(STRUCTURED, OFFSET, 512, true), *expect);
    let more = read_head(STRUCTURED, OFFSET, 512, false);
    assert_eq!((&more[..4], &more[4..6], &more[6..]), (&expect[..4], &[0, 0][..], &expect[6..]));
}

#[test]
fn golden_status() {
    let expect = b"\x66\x8e\x33\xef\0\x01\0\x05\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x14\
                   \0\0\0\x01";
    assert_eq!(*status_head(STRUCTURED, 2), *expect);
}

#[test]
fn golden_extended() {
    const HEAD: &[u8] = b"\x6e\x8a\x27\x8c\0\x01";
    const OF: &[u8] = b"\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x11\x22\x33\x44\0";
    let chunk =
        |kind: &[u8], len: &[u8], data: &[u8]| [HEAD, kind, OF, b"\0\0\0\0", len, data].concat();
    assert_eq!(*success(EXTENDED), chunk(b"\0\0", b"\0\0\0\0", b""));
    let data = b"\0\0\0\x11\x22\x33\x54\0";
    let read = read_head(EXTENDED, OFFSET + 4096, 512, true);
    assert_eq!(*read, chunk(b"\0\x01", b"\0\0\x02\x08", data));
    let status = status_head(EXTENDED, 2);
    assert_eq!(*status, chunk(b"\0\x06", b"\0\0\0\x28", b"\0\0\0\x01\0\0\0\x02"));
    let error = failure(EXTENDED, NbdError::Io, "disk");
    assert_eq!(*error, chunk(b"\x80\x01", b"\0\0\0\x0a", b"\0\0\0\x05\0\x04disk"));
}

#[test]
fn golden_errors() {
    assert_eq!(
        *failure(STRUCTURED, NbdError::Io, "disk"),
        *b"\x66\x8e\x33\xef\0\x01\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0a\
          \0\0\0\x05\0\x04disk"
    );
    assert_eq!(
        *failure(STRUCTURED, NbdError::Shutdown, ""),
        *b"\x66\x8e\x33\xef\0\x01\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x06\0\0\0\x6c\0\0"
    );
}

#[test]
fn long_messages_are_cut_at_character_boundaries() {
    let head = failure(STRUCTURED, NbdError::Io, &"é".repeat(4000));
    assert_eq!(head.len(), ROOM - 12);
    let head = failure(STRUCTURED, NbdError::Io, &format!("x{}", "é".repeat(4000)));
    assert_eq!((head.len(), &head[24..26]), (ROOM - 13, &[0, 99][..]));
    assert_eq!(failure(EXTENDED, NbdError::Io, &"é".repeat(4000)).len(), ROOM);
    assert!(std::str::from_utf8(&head[26..]).is_ok());
}

#[test]
fn the_longest_read_has_a_header() {
    let head = read_head(STRUCTURED, 0, PAYLOAD_MAX, true);
    assert_eq!(ChunkHeader::decode(&head).unwrap().len, PAYLOAD_MAX + 8);
}

#[test]
#[should_panic(expected = "was not refused")]
fn reads_do_not_exceed_the_maximum_payload() {
    read_head(STRUCTURED, 0, PAYLOAD_MAX + 1, true);
}

proptest! {
    #[test]
    fn error_headers_state_their_length(cookie: u64, message in ".{0,80}") {
        let bytes = failure(Answered { cookie, ..STRUCTURED }, NbdError::Io, &message);
        let head = ChunkHeader::decode(&bytes).unwrap();
        prop_assert_eq!(bytes.len(), ChunkHeader::LEN + head.len as usize);
        prop_assert_eq!((head.cookie, head.flags), (cookie, 1));
        let text = &bytes[26..];
        prop_assert_eq!(usize::from(u16::from_be_bytes([bytes[24], bytes[25]])), text.len());
        prop_assert!(message.as_bytes().starts_with(text));
        prop_assert!(std::str::from_utf8(text).is_ok());
    }
}
