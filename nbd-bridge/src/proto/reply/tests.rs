//! Golden bytes of every head, and what happens when there is no room for it.

use super::*;
use proptest::prelude::*;

const COOKIE: u64 = 0x0102_0304_0506_0708;
const OFFSET: u64 = 0x0000_0011_2233_4400;

fn written(write: impl FnOnce(&mut [u8]) -> Result<usize, ReplyError>) -> Vec<u8> {
    let mut out = [0xee; 5000];
    let n = write(&mut out).unwrap();
    assert!(out[n..].iter().all(|&b| b == 0xee), "bytes beyond the head were touched");
    out[..n].to_vec()
}

#[test]
fn golden_simple() {
    let ok = b"\x67\x44\x66\x98\0\0\0\0\x01\x02\x03\x04\x05\x06\x07\x08";
    assert_eq!(written(|o| success(o, COOKIE)), ok);
    assert_eq!(written(|o| read_head(o, false, COOKIE, OFFSET, 512)), ok);
    assert_eq!(
        written(|o| failure(o, false, COOKIE, NbdError::NoSpc, "not seen")),
        b"\x67\x44\x66\x98\0\0\0\x1c\x01\x02\x03\x04\x05\x06\x07\x08"
    );
}

#[test]
fn golden_data() {
    let expect = b"\x66\x8e\x33\xef\0\x01\0\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\x02\x08\
                   \0\0\0\x11\x22\x33\x44\0";
    assert_eq!(written(|o| read_head(o, true, COOKIE, OFFSET, 512)), expect);
    assert_eq!(expect.len(), READ_HEAD_LEN);
    let mut part = expect.to_vec();
    part[5] = 0;
    assert_eq!(written(|o| offset_data(o, COOKIE, OFFSET, 512, false)), part);
}

#[test]
fn golden_hole_and_none() {
    assert_eq!(
        written(|o| offset_hole(o, COOKIE, OFFSET, 0x1000, false)),
        b"\x66\x8e\x33\xef\0\0\0\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0c\
          \0\0\0\x11\x22\x33\x44\0\0\0\x10\0"
    );
    assert_eq!(
        written(|o| none(o, COOKIE)),
        b"\x66\x8e\x33\xef\0\x01\0\0\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\0"
    );
}

#[test]
fn golden_errors() {
    assert_eq!(
        written(|o| failure(o, true, COOKIE, NbdError::Io, "disk")),
        b"\x66\x8e\x33\xef\0\x01\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x0a\
          \0\0\0\x05\0\x04disk"
    );
    assert_eq!(
        written(|o| error_chunk(o, COOKIE, NbdError::Shutdown, "", false)),
        b"\x66\x8e\x33\xef\0\0\x80\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x06\0\0\0\x6c\0\0"
    );
    assert_eq!(
        written(|o| error_offset(o, COOKIE, NbdError::Io, "bad", OFFSET, true)),
        b"\x66\x8e\x33\xef\0\x01\x80\x02\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x11\
          \0\0\0\x05\0\x03bad\0\0\0\x11\x22\x33\x44\0"
    );
}

#[test]
fn long_messages_are_cut_between_characters() {
    let long = "é".repeat(4000);
    let head = written(|o| error_chunk(o, COOKIE, NbdError::Io, &long, true));
    assert_eq!(head.len(), 26 + 4096);
    let mut small = [0; 26 + 5];
    assert_eq!(error_chunk(&mut small, COOKIE, NbdError::Io, &long, true), Ok(26 + 4));
    assert_eq!(small[24..26], [0, 4]);
    assert_eq!(&small[26..30], "éé".as_bytes());
    let mut bare = [0; 34];
    assert_eq!(error_offset(&mut bare, COOKIE, NbdError::Io, &long, OFFSET, true), Ok(34));
    assert_eq!(bare[26..34], OFFSET.to_be_bytes());
}

#[test]
fn lengths_a_chunk_cannot_say_are_refused() {
    let mut out = [0; 64];
    for len in [0, u32::MAX, u32::MAX - 7] {
        assert_eq!(read_head(&mut out, true, 1, 0, len), Err(ReplyError::BadLength(len)));
    }
    assert_eq!(read_head(&mut out, true, 1, 0, u32::MAX - 8), Ok(28));
    assert_eq!(offset_hole(&mut out, 1, 0, 0, true), Err(ReplyError::BadLength(0)));
}

#[test]
fn without_room_nothing_is_written() {
    type Write = fn(&mut [u8]) -> Result<usize, ReplyError>;
    let heads: [(usize, Write); 6] = [
        (16, |o| success(o, 1)),
        (20, |o| none(o, 1)),
        (28, |o| read_head(o, true, 1, 2, 3)),
        (32, |o| offset_hole(o, 1, 2, 3, true)),
        (26, |o| failure(o, true, 1, NbdError::Io, "")),
        (34, |o| error_offset(o, 1, NbdError::Io, "", 2, true)),
    ];
    for (len, write) in heads {
        let mut out = [0xee; 64];
        for room in 0..len {
            assert_eq!(write(&mut out[..room]), Err(ReplyError::NoRoom));
        }
        assert_eq!(out, [0xee; 64]);
        assert_eq!(write(&mut out[..len]), Ok(len));
    }
}

proptest! {
    #[test]
    fn every_error_head_says_its_own_length(
        room in 0..200usize, cookie: u64, offset: u64, message in ".{0,80}", done: bool,
    ) {
        let mut out = vec![0; room];
        let put = error_offset(&mut out, cookie, NbdError::Io, &message, offset, done);
        prop_assert_eq!(put.is_ok(), room >= 34);
        if let Ok(n) = put {
            let head = ChunkHeader::decode(&out).unwrap();
            prop_assert_eq!(n, ChunkHeader::LEN + head.len as usize);
            prop_assert_eq!((head.cookie, head.flags), (cookie, u16::from(done)));
            let text = &out[26..n - 8];
            prop_assert_eq!(usize::from(u16::from_be_bytes([out[24], out[25]])), text.len());
            prop_assert!(message.as_bytes().starts_with(text));
            prop_assert!(std::str::from_utf8(text).is_ok());
            prop_assert_eq!(&out[n - 8..n], &offset.to_be_bytes()[..]);
        }
    }
}
