//! A byte-level NBD client: tests choose what it sends, valid or not.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const ZEROES: u16 = 6;
pub(crate) const STATUS: u16 = 7;
pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) structured: bool,
    /// Replies whose last chunk has not arrived: start offset and data.
    partial: HashMap<u64, (u64, Vec<u8>)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = 0x4948_4156_454f_5054u64.to_be_bytes().to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
    bytes.extend(data);
    bytes
}

pub(crate) fn go(name: &str) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend([0, 0]);
    option(7, &data)
}

/// Same as [`go`], but for a client that requests the block sizes.
pub(crate) fn go_asking(name: &str) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend([0, 1, 0, 3]);
    option(7, &data)
}

pub(crate) fn request(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

impl Client {
    pub(crate) fn go(stream: UnixStream, structured: bool) -> Self {
        Self::with(stream, structured, &go("vol0"))
    }

    pub(crate) fn with(mut stream: UnixStream, structured: bool, go: &[u8]) -> Self {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        if structured {
            stream.write_all(&option(8, &[])).unwrap();
            assert_eq!(Self::option_reply(&mut stream).0, 1);
        }
        stream.write_all(go).unwrap();
        while Self::option_reply(&mut stream).0 != 1 {}
        Self::past_handshake(stream, structured)
    }

    /// Connects a client that negotiates block status. Returns None if the server does not offer
    /// it.
    pub(crate) fn knowing_holes(mut stream: UnixStream) -> Option<Self> {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        let query = b"\0\0\0\x04vol0\0\0\0\x01\0\0\0\x0fbase:allocation";
        let options = [option(8, &[]), option(10, query), go("vol0")];
        stream.write_all(&[&3u32.to_be_bytes()[..], &options.concat()].concat()).unwrap();
        let mut knows = false;
        for _ in 0..3 {
            loop {
                match Self::option_reply(&mut stream) {
                    (1, _) => break,
                    (4, context) => {
                        assert_eq!(context, b"\0\0\0\x01base:allocation");
                        knows = true;
                    }
                    (kind, _) => assert_eq!(kind, 3),
                }
            }
        }
        knows.then(|| Self::past_handshake(stream, true))
    }

    /// Returns the lengths and flags of a range's extents, or the error.
    pub(crate) fn status(&mut self, flags: u16, at: u64, len: u32) -> Result<Vec<(u32, u32)>, u32> {
        self.send(STATUS, flags, 5, at, len);
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic).unwrap();
        let (cookie, last, kind, data) = self.chunk(magic).unwrap();
        assert!(cookie == 5 && last);
        let number = |at: usize| u32::from_be_bytes(data[at..at + 4].try_into().unwrap());
        if kind == 0x8001 {
            return Err(number(0));
        }
        assert_eq!((kind, number(0), data.len() % 8), (5, 1, 4));
        Ok((4..data.len()).step_by(8).map(|at| (number(at), number(at + 4))).collect())
    }

    /// Connects a client that negotiates extended headers and block status.
    pub(crate) fn extended(mut stream: UnixStream) -> Self {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        let query = b"\0\0\0\x04vol0\0\0\0\x01\0\0\0\x0fbase:allocation";
        let options = [option(11, &[]), option(10, query), go("vol0")];
        stream.write_all(&[&3u32.to_be_bytes()[..], &options.concat()].concat()).unwrap();
        for _ in 0..3 {
            while Self::option_reply(&mut stream).0 != 1 {}
        }
        Self::past_handshake(stream, true)
    }

    /// Sends a request with an extended header and returns the type and payload of the reply.
    pub(crate) fn ask(
        &mut self,
        command: u16,
        flags: u16,
        at: u64,
        len: u64,
        payload: &[u8],
    ) -> (u16, Vec<u8>) {
        let mut bytes = 0x21e4_1c71u32.to_be_bytes().to_vec();
        bytes.extend([flags, command].map(u16::to_be_bytes).concat());
        bytes.extend([77, at, len].map(u64::to_be_bytes).concat());
        bytes.extend(payload);
        self.stream.write_all(&bytes).unwrap();
        let mut head = [0; 32];
        self.stream.read_exact(&mut head).unwrap();
        let number = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
        assert_eq!(head[..6], [0x6e, 0x8a, 0x27, 0x8c, 0, 1], "expected a final chunk");
        assert_eq!((number(8), number(16)), (77, at));
        let mut data = vec![0; usize::try_from(number(24)).unwrap()];
        self.stream.read_exact(&mut data).unwrap();
        (u16::from_be_bytes([head[6], head[7]]), data)
    }

    /// Creates a client on a socket that needs no handshake.
    pub(crate) fn past_handshake(stream: UnixStream, structured: bool) -> Self {
        Self { stream, structured, partial: HashMap::new() }
    }

    pub(crate) fn option_reply(stream: &mut UnixStream) -> (u32, Vec<u8>) {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        assert_eq!(head[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
        let len = u32::from_be_bytes(head[16..].try_into().unwrap());
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data).unwrap();
        (kind, data)
    }

    pub(crate) fn send(&mut self, command: u16, flags: u16, cookie: u64, offset: u64, len: u32) {
        self.stream.write_all(&request(command, flags, cookie, offset, len)).unwrap();
    }

    pub(crate) fn send_write(&mut self, flags: u16, cookie: u64, offset: u64, data: &[u8]) {
        let len = u32::try_from(data.len()).unwrap();
        let mut bytes = request(WRITE, flags, cookie, offset, len);
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Returns the next reply; `len_of` returns the data length of a successful simple reply.
    pub(crate) fn reply(&mut self, len_of: impl FnOnce(u64) -> usize) -> Reply {
        self.try_reply(len_of).unwrap()
    }

    pub(crate) fn try_reply(&mut self, len_of: impl FnOnce(u64) -> usize) -> io::Result<Reply> {
        let mut magic = [0; 4];
        self.stream.read_exact(&mut magic)?;
        if u32::from_be_bytes(magic) == 0x6744_6698 {
            let mut head = [0; 12];
            self.stream.read_exact(&mut head)?;
            let error = u32::from_be_bytes(head[..4].try_into().unwrap());
            let cookie = u64::from_be_bytes(head[4..].try_into().unwrap());
            let len = len_of(cookie);
            assert!(!self.structured || len == 0, "expected chunks in reply to a read");
            let mut data = vec![0; if error == 0 { len } else { 0 }];
            self.stream.read_exact(&mut data)?;
            return Ok(Reply { cookie, error, data });
        }
        let (cookie, last, kind, data) = self.chunk(magic)?;
        if kind == 1 {
            let at = u64::from_be_bytes(data[..8].try_into().unwrap());
            let (begin, all) = self.partial.entry(cookie).or_insert((at, Vec::new()));
            assert_eq!(at - *begin, all.len() as u64, "gap between chunks");
            all.extend(&data[8..]);
            if !last {
                return self.try_reply(len_of);
            }
            let data = self.partial.remove(&cookie).map(|(_, all)| all).unwrap();
            assert_eq!(data.len(), len_of(cookie));
            return Ok(Reply { cookie, error: 0, data });
        }
        assert!(kind == 0x8001 && last, "expected an error chunk");
        self.partial.remove(&cookie);
        let error = u32::from_be_bytes(data[..4].try_into().unwrap());
        let text = usize::from(u16::from_be_bytes(data[4..6].try_into().unwrap()));
        assert_eq!(text, data.len() - 6);
        Ok(Reply { cookie, error, data: Vec::new() })
    }

    /// Reads a chunk that begins with `magic`: cookie, last flag, type and payload.
    fn chunk(&mut self, magic: [u8; 4]) -> io::Result<(u64, bool, u16, Vec<u8>)> {
        assert_eq!(u32::from_be_bytes(magic), 0x668e_33ef, "wrong magic of a reply");
        assert!(self.structured, "chunks were not negotiated");
        let mut head = [0; 16];
        self.stream.read_exact(&mut head)?;
        let flags = u16::from_be_bytes(head[..2].try_into().unwrap());
        let kind = u16::from_be_bytes(head[2..4].try_into().unwrap());
        let cookie = u64::from_be_bytes(head[4..12].try_into().unwrap());
        let len = u32::from_be_bytes(head[12..].try_into().unwrap()) as usize;
        assert!(flags <= 1, "unknown flags of a chunk");
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok((cookie, flags == 1, kind, data))
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        self.send(READ, 0, 7, offset, len);
        let reply = self.reply(|_| len as usize);
        assert_eq!((reply.cookie, reply.error), (7, 0));
        reply.data
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        self.send_write(0, 8, offset, data);
        assert_eq!(self.reply(|_| 0), Reply { cookie: 8, error: 0, data: Vec::new() });
    }

    /// Sends a request without data and returns the error in its reply.
    pub(crate) fn error_of(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> u32 {
        self.send(command, flags, 9, offset, len);
        let reply = self.reply(|_| 0);
        assert_eq!(reply.cookie, 9);
        reply.error
    }

    /// Whether the bridge closed the connection without sending anything more.
    pub(crate) fn is_closed(&mut self) -> bool {
        is_closed(&mut self.stream)
    }

    /// Disconnects immediately. Closing the socket is not enough while another test starts a
    /// program: the child holds a copy of the descriptor until exec.
    pub(crate) fn leave(self) {
        self.stream.shutdown(Shutdown::Both).unwrap();
    }

    pub(crate) fn disconnect(mut self) {
        self.send(DISC, 0, 0, 0, 0);
        assert!(self.is_closed(), "the bridge must close the connection without a reply");
    }
}

pub(crate) fn is_closed(stream: &mut UnixStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => rest.is_empty(),
        Err(e) => e.kind() == io::ErrorKind::ConnectionReset && rest.is_empty(),
    }
}

/// Returns bytes that depend on the position and the seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
