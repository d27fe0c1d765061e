//! iWARP by hand over plain TCP: start-up frames and FPDUs byte by byte, well formed or not.
//!
//! Written from docs/PROTOCOL.md, without code shared with the tested provider. Reads have a time
//! limit; a peer that fails to close causes a panic.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Maximum time for the server to answer or to close the connection.
const TIME_MAX: Duration = Duration::from_secs(60);

/// First bytes of an MPA request.
pub const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
/// First bytes of an MPA reply.
pub const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";
/// MPA flags: markers, checksums, refused, enhanced.
pub const MARKERS: u8 = 0x80;
/// See [`MARKERS`].
pub const CRC: u8 = 0x40;
/// See [`MARKERS`].
pub const REFUSED: u8 = 0x20;
/// See [`MARKERS`].
pub const ENHANCED: u8 = 0x10;
/// Control bytes of an RDMA write, of a send and of an immediate, each the last frame of its
/// message.
pub const WRITE: [u8; 2] = [0xc1, 0x40];
/// See [`WRITE`].
pub const SEND: [u8; 2] = [0x41, 0x43];
/// See [`WRITE`].
pub const IMMEDIATE: [u8; 2] = [0x41, 0x48];

/// End of a stream, as the peer saw it.
#[derive(Debug)]
pub struct Ended {
    /// All bytes before the end.
    pub bytes: Vec<u8>,
    /// Whether the end was a reset instead of a FIN.
    pub reset: bool,
}

impl Ended {
    /// Returns the first two bytes of a Terminate's payload, if one is among the frames.
    #[must_use]
    pub fn terminate(&self) -> Option<[u8; 2]> {
        let mut rest = &self.bytes[..];
        while let Some((length, after)) = rest.split_first_chunk::<2>() {
            let len = usize::from(u16::from_be_bytes(*length));
            let ulpdu = after.get(..len)?;
            if ulpdu[1] & 0x0f == 7 {
                return Some([*ulpdu.get(18)?, *ulpdu.get(19)?]);
            }
            rest = rest.get((2 + len).next_multiple_of(4) + 4..)?;
        }
        None
    }
}

/// Returns a start-up frame with arbitrary key, flags, revision and data.
///
/// # Panics
/// Panics if the data is too long for the length field.
#[must_use]
pub fn start_frame(key: &[u8; 16], flags: u8, revision: u8, data: &[u8]) -> Vec<u8> {
    let len = u16::try_from(data.len()).expect("a length").to_be_bytes();
    [&key[..], &[flags, revision], &len, data].concat()
}

/// Returns the enhanced words and preamble that our own initiator sends, then the private data.
#[must_use]
pub fn start_data(private_data: &[u8]) -> Vec<u8> {
    [&[0x80, 0x10, 0x80, 0x10][..], b"RTIW\x01\x03\x00\x00", private_data].concat()
}

/// Returns a frame for `ulpdu`, with length, padding and checksum.
///
/// # Panics
/// Panics if the ULPDU is too long for the length field.
#[must_use]
pub fn frame(ulpdu: &[u8]) -> Vec<u8> {
    let len = u16::try_from(ulpdu.len()).expect("a length").to_be_bytes();
    let mut bytes = [&len[..], ulpdu].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let sum = crc32c::crc32c(&bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Returns the ULPDU of a tagged frame.
#[must_use]
pub fn tagged(controls: [u8; 2], key: u32, address: u64, payload: &[u8]) -> Vec<u8> {
    [&controls[..], &key.to_be_bytes(), &address.to_be_bytes(), payload].concat()
}

/// Returns the ULPDU of an untagged frame: queue, message number, offset.
#[must_use]
pub fn untagged(controls: [u8; 2], [qn, msn, mo]: [u32; 3], payload: &[u8]) -> Vec<u8> {
    let words = [0, qn, msn, mo].map(u32::to_be_bytes).concat();
    [&controls[..], &words, payload].concat()
}

/// Returns a send of `message`, with the empty prefix.
#[must_use]
pub fn send(msn: u32, message: &[u8]) -> Vec<u8> {
    untagged(SEND, [0, msn, 0], &[&[0; 8][..], message].concat())
}

/// Returns an immediate.
#[must_use]
pub fn immediate(msn: u32, imm: u32) -> Vec<u8> {
    untagged(IMMEDIATE, [0, msn, 0], &[imm.to_be_bytes(), [0; 4]].concat())
}

/// TCP stream to the server.
#[derive(Debug)]
pub struct RawMpa {
    stream: TcpStream,
}

impl RawMpa {
    /// Connects.
    ///
    /// # Panics
    /// Panics if TCP cannot connect.
    #[must_use]
    pub fn connect(server: SocketAddr) -> Self {
        let stream = TcpStream::connect_timeout(&server, TIME_MAX).expect("connect");
        stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        stream.set_write_timeout(Some(TIME_MAX)).expect("a timeout");
        stream.set_nodelay(true).expect("nodelay");
        Self { stream }
    }

    /// Connects, starts up with `private_data` and sends the ready-to-receive frame.
    ///
    /// # Panics
    /// Panics if the server refuses the connection.
    #[must_use]
    pub fn start(server: SocketAddr, private_data: &[u8]) -> Self {
        let mut raw = Self::connect(server);
        raw.write(&start_frame(REQUEST_KEY, ENHANCED | CRC, 2, &start_data(private_data)));
        let head = raw.read_exact(20);
        assert_eq!(&head[..16], REPLY_KEY);
        assert_eq!(head[16] & (REFUSED | MARKERS), 0, "refused: {head:02x?}");
        let len = usize::from(u16::from_be_bytes([head[18], head[19]]));
        let _ = raw.read_exact(len);
        raw.write(&frame(&tagged(WRITE, 1, 0, &[])));
        raw
    }

    /// Sends bytes. An error means that the server closed the connection, as the next read will
    /// show.
    pub fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes);
    }

    /// Shuts down our sending direction.
    pub fn finish(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Reads exactly `len` bytes.
    ///
    /// # Panics
    /// Panics if they do not arrive.
    pub fn read_exact(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut got = 0;
        let start = Instant::now();
        while got < len {
            assert!(start.elapsed() < TIME_MAX, "{got} of {len} bytes came");
            match self.stream.read(&mut bytes[got..]) {
                Ok(0) => panic!("closed after {got} of {len} bytes"),
                Ok(count) => got += count,
                Err(e) if is_time_out(&e) => {}
                Err(e) => panic!("{e} after {got} of {len} bytes"),
            }
        }
        bytes
    }

    /// Takes the next frame's ULPDU.
    ///
    /// # Panics
    /// Panics if there is no frame.
    pub fn read_frame(&mut self) -> Vec<u8> {
        let length = self.read_exact(2);
        let len = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let mut rest = self.read_exact((2 + len).next_multiple_of(4) - 2 + 4);
        rest.truncate(len);
        rest
    }

    /// Reads to the end of the stream.
    ///
    /// # Panics
    /// Panics if it is still open after `limit`.
    pub fn ended(&mut self, what: &str, limit: Duration) -> Ended {
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        let start = Instant::now();
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ended { bytes, reset: false },
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(e) if is_time_out(&e) => {}
                Err(_) => return Ended { bytes, reset: true },
            }
            assert!(
                start.elapsed() < limit,
                "still open after {limit:?}: {what}; got {bytes:02x?}"
            );
        }
    }
}

fn is_time_out(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
