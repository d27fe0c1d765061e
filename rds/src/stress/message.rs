//! Requests and their answers: a head, and bytes derived from the request's number.

use std::sync::OnceLock;

use rtrs_base::prng::Prng;

use crate::wire::PAYLOAD_MAX;

/// Length of the head, and therefore of the shortest message.
pub(crate) const HEAD_LEN: usize = 40;
/// Maximum length of a message.
pub(crate) const LEN_MAX: usize = PAYLOAD_MAX;
const MAGIC: u32 = 0x5244_5373;
/// Number of positions in the pattern at which a message may begin.
const SHIFTS: u64 = 1024;

/// The head of a request or an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) is_answer: bool,
    /// Whether the receiver must check the bytes after the head.
    pub(super) is_checked: bool,
    /// Distinguishes runs of clients.
    pub(super) session: u32,
    /// Number of the request, counted from 0 for each socket of a client.
    pub(super) number: u64,
    /// Length of the answer.
    pub(super) answer_len: u32,
    /// Time at which the request was sent, by the client's clock, in nanoseconds.
    pub(super) sent_at: u64,
    /// Number of errors that the server has found in this session.
    pub(super) wrong: u64,
}

/// Returns bytes that are the same in every process.
fn pattern() -> &'static [u8] {
    static PATTERN: OnceLock<Vec<u8>> = OnceLock::new();
    PATTERN.get_or_init(|| {
        let mut bytes = vec![0; LEN_MAX + SHIFTS as usize];
        Prng::new(u64::from(MAGIC)).fill(&mut bytes);
        bytes
    })
}

/// Returns the bytes that follow the head of a message of this length.
fn body(number: u64, len: usize) -> &'static [u8] {
    #[allow(clippy::cast_possible_truncation, reason = "below SHIFTS")]
    let at = (number % SHIFTS) as usize;
    &pattern()[at..at + len - HEAD_LEN]
}

impl Head {
    /// Encodes a message of this length, which is at least [`HEAD_LEN`].
    pub(super) fn message(&self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len);
        out.extend(MAGIC.to_be_bytes());
        out.extend(self.session.to_be_bytes());
        out.extend(self.number.to_be_bytes());
        let flags = u32::from(self.is_answer) << 31 | u32::from(self.is_checked) << 30;
        out.extend((self.answer_len | flags).to_be_bytes());
        out.extend(u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
        out.extend(self.sent_at.to_be_bytes());
        out.extend(self.wrong.to_be_bytes());
        out.extend_from_slice(body(self.number, len));
        out
    }

    /// Decodes and checks a message. Returns `None` if the head, or any byte that is to be checked,
    /// is wrong.
    pub(super) fn of(message: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_be_bytes(*message.get(at..)?.first_chunk()?));
        let long = |at: usize| Some(u64::from_be_bytes(*message.get(at..)?.first_chunk()?));
        let packed = word(16)?;
        let head = Self {
            is_answer: packed >> 31 == 1,
            is_checked: packed >> 30 & 1 == 1,
            session: word(4)?,
            number: long(8)?,
            answer_len: packed & 0x3fff_ffff,
            sent_at: long(24)?,
            wrong: long(32)?,
        };
        let len = message.len();
        let is_whole = word(0)? == MAGIC && word(20)? as usize == len && len <= LEN_MAX;
        let is_right = || !head.is_checked || message[HEAD_LEN..] == *body(head.number, len);
        (is_whole && is_right()).then_some(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_checked() {
        let head = Head {
            is_answer: false,
            is_checked: true,
            session: 7,
            number: 1023,
            answer_len: 64,
            sent_at: 5,
            wrong: 0,
        };
        for len in [HEAD_LEN, HEAD_LEN + 1, 200] {
            let message = head.message(len);
            assert_eq!((message.len(), Head::of(&message)), (len, Some(head)));
            for at in (0..len).filter(|at| !(4..8).contains(at)) {
                let mut other = message.clone();
                other[at] ^= 1;
                assert_ne!(Head::of(&other), Some(head), "byte {at}");
            }
            assert_eq!(Head::of(&message[..len - 1]), None);
        }
        assert_eq!(head.message(LEN_MAX).len(), LEN_MAX);
        let unchecked = Head { is_checked: false, ..head };
        let mut message = unchecked.message(200);
        message[199] ^= 1;
        assert_eq!(Head::of(&message), Some(unchecked));
    }
}
