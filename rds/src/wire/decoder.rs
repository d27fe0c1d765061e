//! Splits a TCP stream into messages, regardless of how the stream is fragmented.

use rtrs_base::time::Instant;

use super::header::{HEADER_LEN, Header, Kind, WireError};

/// Minimum capacity allocated for a payload before its bytes arrive.
const FIRST_ROOM: usize = 64 << 10;

/// Result of decoding a piece of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// A valid header. Its payload is kept unless [`Decoder::skip`] is called next.
    Header(Header, Kind),
    /// The end of a message, with its payload if that was kept.
    Message(Header, Kind, Option<Vec<u8>>),
}

/// Times at which the parts of a message arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalTimes {
    /// First byte of the header.
    pub header: Instant,
    /// Last byte of the header.
    pub payload: Instant,
    /// Last byte of the payload.
    pub end: Instant,
}

impl ArrivalTimes {
    /// Creates the times of a message that arrives all at once.
    pub const fn at(now: Instant) -> Self {
        Self { header: now, payload: now, end: now }
    }
}

/// State between two pieces of a stream.
#[derive(Debug)]
pub struct Decoder {
    head: Head,
    /// The message whose payload is arriving.
    body: Option<Body>,
    /// Times of the current message. `end` is the time of the current piece.
    times: ArrivalTimes,
}

impl Default for Decoder {
    fn default() -> Self {
        let times = ArrivalTimes::at(Instant::ZERO);
        Self { head: Head::default(), body: None, times }
    }
}

#[derive(Debug)]
struct Head {
    bytes: [u8; HEADER_LEN],
    got: usize,
}

impl Default for Head {
    fn default() -> Self {
        Self { bytes: [0; HEADER_LEN], got: 0 }
    }
}

#[derive(Debug)]
struct Body {
    header: Header,
    kind: Kind,
    /// None if the bytes are discarded.
    payload: Option<Vec<u8>>,
    left: usize,
}

impl Decoder {
    /// Sets the arrival time of the next bytes.
    pub fn set_time(&mut self, now: Instant) {
        self.times.end = now;
    }

    /// Returns the times of the most recently returned message.
    pub fn times(&self) -> ArrivalTimes {
        self.times
    }

    /// Consumes bytes from the front of `input`, up to the next step. Returns `None` if all are
    /// consumed without completing a step.
    ///
    /// # Errors
    /// An invalid header. The stream cannot be read any further.
    pub fn step(&mut self, input: &mut &[u8]) -> Result<Option<Step>, WireError> {
        let Some(body) = &mut self.body else { return self.head(input) };
        let count = body.left.min(input.len());
        let (taken, rest) = input.split_at(count);
        if let Some(payload) = &mut body.payload {
            make_room(payload, count, body.left);
            payload.extend_from_slice(taken);
        }
        *input = rest;
        body.left -= count;
        if body.left > 0 {
            return Ok(None);
        }
        let end = self.body.take();
        Ok(end.map(|body| Step::Message(body.header, body.kind, body.payload)))
    }

    fn head(&mut self, input: &mut &[u8]) -> Result<Option<Step>, WireError> {
        let Head { bytes, got } = &mut self.head;
        if *got == 0 && !input.is_empty() {
            self.times.header = self.times.end;
        }
        let count = (HEADER_LEN - *got).min(input.len());
        let (taken, rest) = input.split_at(count);
        bytes[*got..*got + count].copy_from_slice(taken);
        *input = rest;
        *got += count;
        if *got < HEADER_LEN {
            return Ok(None);
        }
        *got = 0;
        self.times.payload = self.times.end;
        let header = Header::decode(bytes);
        let kind = header.kind()?;
        let left = header.len as usize;
        self.body = Some(Body { header, kind, payload: Some(Vec::new()), left });
        Ok(Some(Step::Header(header, kind)))
    }

    /// Discards the part of the current payload that has arrived, and the rest as it arrives.
    pub fn skip(&mut self) {
        if let Some(body) = &mut self.body {
            body.payload = None;
        }
    }

    /// Returns the number of bytes of memory held for an unfinished payload.
    pub fn held(&self) -> usize {
        let payload = self.body.as_ref().and_then(|body| body.payload.as_ref());
        payload.map_or(0, Vec::capacity)
    }

    /// Returns the number of bytes missing from the current header, and from the current payload.
    pub fn left(&self) -> (usize, usize) {
        let header = match self.head.got {
            0 => 0,
            got => HEADER_LEN - got,
        };
        (header, self.body.as_ref().map_or(0, |body| body.left))
    }

    /// Whether the decoder is between two messages.
    pub fn is_between(&self) -> bool {
        self.body.is_none() && self.head.got == 0
    }
}

/// Makes room for `count` more bytes, using at most a few reallocations for all of `left`. A peer
/// that merely announces a long payload uses little memory.
fn make_room(payload: &mut Vec<u8>, count: usize, left: usize) {
    if payload.capacity() - payload.len() < count {
        let ahead = FIRST_ROOM.max(payload.len()).max(count);
        payload.reserve_exact(ahead.min(left));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rtrs_base::time::Duration;

    use super::super::header::CONG_BITMAP;
    use super::*;

    fn message(sequence: u64, payload: &[u8]) -> Vec<u8> {
        let len = u32::try_from(payload.len()).unwrap();
        let header = Header { sequence, len, sport: 3000, dport: 4000, ..Header::default() };
        [&header.encode(), payload].concat()
    }

    /// Decodes all messages of a stream that arrives in pieces of these sizes, used cyclically.
    fn read(stream: &[u8], pieces: &[usize]) -> Result<Vec<(Header, Vec<u8>)>, WireError> {
        let mut decoder = Decoder::default();
        let mut found = Vec::new();
        let mut rest = stream;
        for piece in pieces.iter().cycle() {
            let (mut input, later) = rest.split_at(rest.len().min(*piece));
            while let Some(step) = decoder.step(&mut input)? {
                if let Step::Message(header, _, payload) = step {
                    found.push((header, payload.unwrap()));
                }
            }
            assert!(input.is_empty());
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        assert!(decoder.is_between());
        Ok(found)
    }

    #[test]
    fn a_payload_uses_no_more_memory_than_has_arrived() {
        let mut decoder = Decoder::default();
        let mut stream = message(1, &vec![7; 1 << 20]);
        let rest = stream.split_off(HEADER_LEN);
        let mut held = 0;
        for (at, mut piece) in [&stream[..]].into_iter().chain(rest.chunks(1000)).enumerate() {
            while decoder.step(&mut piece).unwrap().is_some() {}
            held = held.max(decoder.held());
            assert!(decoder.held() <= (2 * at * 1000).max(FIRST_ROOM), "{at}: {}", decoder.held());
        }
        assert!(held >= 1 << 19);
        assert_eq!(decoder.held(), 0);
    }

    #[test]
    fn an_unwanted_payload_is_not_buffered() {
        let mut decoder = Decoder::default();
        let stream = [message(1, &[7; 5000]), message(2, b"next")].concat();
        let mut input = &stream[..100];
        assert!(matches!(decoder.step(&mut input), Ok(Some(Step::Header(..)))));
        assert_eq!(decoder.step(&mut input), Ok(None));
        assert!(decoder.held() > 0);
        decoder.skip();
        assert_eq!(decoder.held(), 0);
        let mut input = &stream[100..];
        let step = decoder.step(&mut input).unwrap();
        assert!(matches!(step, Some(Step::Message(_, Kind::Message, None))), "{step:?}");
        assert!(matches!(decoder.step(&mut input), Ok(Some(Step::Header(h, _))) if h.len == 4));
        let step = decoder.step(&mut input).unwrap();
        assert!(matches!(&step, Some(Step::Message(h, _, Some(p))) if h.sequence == 2
            && p == b"next"));
    }

    #[test]
    fn the_times_of_a_message_are_those_of_its_pieces() {
        let mut decoder = Decoder::default();
        let stream = [message(1, b"one"), message(2, b"two")].concat();
        let at = |millis| Instant::ZERO + Duration::from_millis(millis);
        let mut found = Vec::new();
        let ends = [10, HEADER_LEN, HEADER_LEN + 3, stream.len()];
        let mut begin = 0;
        for (millis, end) in (1..).zip(ends) {
            decoder.set_time(at(millis));
            let mut input = &stream[begin..end];
            while let Some(step) = decoder.step(&mut input).unwrap() {
                if matches!(step, Step::Message(..)) {
                    found.push(decoder.times());
                }
            }
            begin = end;
        }
        let first = ArrivalTimes { header: at(1), payload: at(2), end: at(3) };
        assert_eq!(found, [first, ArrivalTimes::at(at(4))]);
    }

    #[test]
    fn malformed_input_ends_the_stream() {
        let header = Header { flags: CONG_BITMAP, len: 8191, ..Header::default() };
        assert_eq!(read(&header.encode(), &[1]), Err(WireError::MapLength(8191)));
        let header = Header { len: u32::MAX, ..Header::default() };
        assert_eq!(read(&header.encode(), &[48]), Err(WireError::TooLong(u32::MAX)));
    }

    proptest! {
        #[test]
        fn splitting_a_stream_changes_nothing(
            payloads in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 0..300), 0..8),
            pieces in proptest::collection::vec(1_usize..200, 1..5),
        ) {
            let stream: Vec<u8> =
                (1..).zip(&payloads).flat_map(|(seq, payload)| message(seq, payload)).collect();
            let found = read(&stream, &pieces).unwrap();
            prop_assert_eq!(found.len(), payloads.len());
            for ((seq, payload), (header, got)) in (1..).zip(&payloads).zip(&found) {
                prop_assert_eq!((seq, payload), (header.sequence, got));
            }
        }

        #[test]
        fn encoding_reverses_decoding(bytes in any::<[u8; 32]>(), more in any::<[u8; 16]>()) {
            let mut whole = [0; HEADER_LEN];
            whole[..32].copy_from_slice(&bytes);
            whole[32..].copy_from_slice(&more);
            // Fields that TCP does not use are dropped.
            whole[8..16].fill(0);
            whole[25..32].fill(0);
            prop_assert_eq!(Header::decode(&whole).encode(), whole);
        }
    }
}
