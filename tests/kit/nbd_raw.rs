//! NBD client that sends arbitrary bytes, valid or not; the hostile tests use it to attack the
//! front end. Written from the NBD specification (doc/proto.md in the NetworkBlockDevice
//! repository), and deliberately independent of the bridge's code. [`Innocent`] is a well-behaved
//! client of the same front end that must not be affected.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::client::Front;
use crate::stand::{Stream, connect};
use crate::wait_for;

/// Constants from the NBD specification that tests use.
pub mod consts {
    /// "IHAVEOPT", before every option.
    pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
    /// Magic number before every reply to an option.
    pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
    /// Magic number before every request.
    pub const REQUEST_MAGIC: u32 = 0x2560_9513;
    /// Magic number before every simple reply.
    pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
    /// Client flags: fixed newstyle, no zeroes.
    pub const CLIENT_FLAGS: u32 = 3;

    /// NBD_OPT_EXPORT_NAME.
    pub const OPT_EXPORT_NAME: u32 = 1;
    /// NBD_OPT_ABORT.
    pub const OPT_ABORT: u32 = 2;
    /// NBD_OPT_LIST.
    pub const OPT_LIST: u32 = 3;
    /// NBD_OPT_INFO.
    pub const OPT_INFO: u32 = 6;
    /// NBD_OPT_GO.
    pub const OPT_GO: u32 = 7;

    /// NBD_REP_ACK.
    pub const REP_ACK: u32 = 1;
    /// NBD_REP_SERVER.
    pub const REP_SERVER: u32 = 2;
    /// NBD_REP_INFO.
    pub const REP_INFO: u32 = 3;
    /// NBD_REP_ERR_UNSUP.
    pub const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
    /// NBD_REP_ERR_INVALID.
    pub const REP_ERR_INVALID: u32 = (1 << 31) + 3;
    /// NBD_REP_ERR_UNKNOWN.
    pub const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// NBD_REP_ERR_TOO_BIG.
    pub const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

    /// NBD_CMD_READ.
    pub const CMD_READ: u16 = 0;
    /// NBD_CMD_WRITE.
    pub const CMD_WRITE: u16 = 1;
    /// NBD_CMD_DISC.
    pub const CMD_DISC: u16 = 2;
    /// NBD_CMD_FLUSH.
    pub const CMD_FLUSH: u16 = 3;
    /// NBD_CMD_TRIM.
    pub const CMD_TRIM: u16 = 4;
    /// NBD_CMD_WRITE_ZEROES.
    pub const CMD_WRITE_ZEROES: u16 = 6;

    /// NBD_CMD_FLAG_FUA.
    pub const CMD_FLAG_FUA: u16 = 1;

    /// NBD_EPERM.
    pub const EPERM: u32 = 1;
    /// NBD_EINVAL.
    pub const EINVAL: u32 = 22;
    /// NBD_ENOSPC.
    pub const ENOSPC: u32 = 28;
    /// NBD_EOVERFLOW.
    pub const EOVERFLOW: u32 = 75;
}

/// A server's response to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A simple reply with this error; 0 means success.
    Error(u32),
    /// The server closed the connection.
    Closed,
}

/// One connection, after its greeting.
pub struct RawNbd {
    stream: Box<dyn Stream>,
    cookie: u64,
}

impl std::fmt::Debug for RawNbd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RawNbd").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl RawNbd {
    /// Connects and reads the server's greeting without sending anything.
    ///
    /// # Panics
    /// Panics when no NBD server offers fixed newstyle negotiation.
    #[must_use]
    pub fn connect(front: &Front) -> Self {
        let mut stream = connect(front);
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("the NBD greeting");
        assert_eq!(&greeting[..8], b"NBDMAGIC");
        assert_eq!(greeting[8..16], consts::OPTION_MAGIC.to_be_bytes());
        assert_eq!(greeting[17] & 1, 1, "expected fixed newstyle");
        Self { stream, cookie: 0 }
    }

    /// Connects and answers the greeting; the connection is then ready for options.
    #[must_use]
    pub fn hello(front: &Front) -> Self {
        let mut raw = Self::connect(front);
        raw.send(&consts::CLIENT_FLAGS.to_be_bytes());
        raw
    }

    /// Connects and enters transmission on this export with NBD_OPT_GO.
    #[must_use]
    pub fn go(front: &Front, export: &str) -> Self {
        let mut raw = Self::hello(front);
        raw.enter(export);
        raw
    }

    /// Sends NBD_OPT_GO and reads its replies up to the acknowledgement.
    ///
    /// # Panics
    /// Panics when the option is refused.
    pub fn enter(&mut self, export: &str) {
        self.send_option(consts::OPT_GO, &go_data(export));
        loop {
            match self.option_reply() {
                Some((consts::REP_INFO, _)) => {}
                Some((consts::REP_ACK, _)) => return,
                other => panic!("NBD_OPT_GO of {export} answered by {other:?}"),
            }
        }
    }

    /// Sends bytes. A connection closed by the server is not an error; the next read detects it.
    ///
    /// # Panics
    /// Panics when the server accepts no bytes for a long time.
    pub fn send(&mut self, bytes: &[u8]) {
        if let Err(error) = self.stream.write_all(bytes) {
            let gone = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
            assert!(gone.contains(&error.kind()), "cannot send: {error}");
        }
    }

    /// Sends an option with its actual length.
    ///
    /// # Panics
    /// Panics like [`Self::send`].
    pub fn send_option(&mut self, option: u32, data: &[u8]) {
        self.send(&option_head(option, data.len() as u32));
        self.send(data);
    }

    /// Reads a reply to an option: its type and data. Returns `None` when the server has closed the
    /// connection.
    ///
    /// # Panics
    /// Panics when the reply is malformed or missing.
    pub fn option_reply(&mut self) -> Option<(u32, Vec<u8>)> {
        let mut head = [0; 20];
        if !self.receive(&mut head) {
            return None;
        }
        assert_eq!(head[..8], consts::OPTION_REPLY_MAGIC.to_be_bytes());
        let length = be32(&head[16..]) as usize;
        assert!(length <= 1 << 20, "an option reply of {length} bytes");
        let mut data = vec![0; length];
        assert!(self.receive(&mut data), "closed inside an option reply");
        Some((be32(&head[12..]), data))
    }

    /// Sends a request head and returns its cookie.
    pub fn send_request(&mut self, flags: u16, command: u16, offset: u64, length: u32) -> u64 {
        self.cookie += 1;
        self.send(&request_head(flags, command, self.cookie, offset, length));
        self.cookie
    }

    /// Reads the head of a simple reply and checks its cookie.
    ///
    /// # Panics
    /// Panics when a different reply or no reply arrives.
    pub fn simple_reply(&mut self, cookie: u64) -> Reply {
        let mut head = [0; 16];
        if !self.receive(&mut head) {
            return Reply::Closed;
        }
        assert_eq!(be32(&head), consts::SIMPLE_REPLY_MAGIC, "expected a simple reply");
        assert_eq!(head[8..], cookie.to_be_bytes(), "the reply to another request");
        Reply::Error(be32(&head[4..]))
    }

    /// Reads the replies to these requests, in any order; all must be successful. The data of each
    /// fills `bytes`.
    ///
    /// # Panics
    /// Panics when a different reply, an error or no reply arrives.
    pub fn take_replies(&mut self, cookies: &[u64], bytes: &mut [u8]) {
        let mut waiting = cookies.to_vec();
        while !waiting.is_empty() {
            let mut head = [0; 16];
            assert!(self.receive(&mut head), "closed before the replies to {waiting:?}");
            assert_eq!(be32(&head), consts::SIMPLE_REPLY_MAGIC, "expected a simple reply");
            let at = waiting.iter().position(|cookie| head[8..] == cookie.to_be_bytes());
            let cookie = waiting.swap_remove(at.expect("the reply to one of these requests"));
            assert_eq!(be32(&head[4..]), 0, "the error of request {cookie}");
            assert!(bytes.is_empty() || self.receive(bytes), "closed inside the data of a read");
        }
    }

    /// Sends a request without data and reads its reply.
    pub fn call(&mut self, flags: u16, command: u16, offset: u64, length: u32) -> Reply {
        let cookie = self.send_request(flags, command, offset, length);
        self.simple_reply(cookie)
    }

    /// Reads from the export.
    ///
    /// # Errors
    /// Returns the error of the reply, or reports that the server closed the connection.
    ///
    /// # Panics
    /// Panics when the data does not follow a successful reply.
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Reply> {
        match self.call(0, consts::CMD_READ, offset, bytes.len() as u32) {
            Reply::Error(0) => {
                assert!(self.receive(bytes), "closed inside the data of a read");
                Ok(())
            }
            other => Err(other),
        }
    }

    /// Writes to the export.
    pub fn write(&mut self, flags: u16, offset: u64, bytes: &[u8]) -> Reply {
        let cookie = self.send_request(flags, consts::CMD_WRITE, offset, bytes.len() as u32);
        self.send(bytes);
        self.simple_reply(cookie)
    }

    /// Checks that the server closes the connection, possibly after other messages; reads at most 1
    /// MiB.
    ///
    /// # Panics
    /// Panics when the connection stays open or the messages do not end.
    pub fn expect_closed(mut self) {
        let mut block = [0; 4096];
        for _ in 0..256 {
            match self.stream.read(&mut block) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the server did not close: {error}"),
            }
        }
        panic!("the server did not close but sent 1 MiB");
    }

    /// Fills `bytes`; returns false if the server closed the connection before the first byte.
    fn receive(&mut self, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        while done < bytes.len() {
            match self.stream.read(&mut bytes[done..]) {
                Ok(0) => {
                    assert_eq!(done, 0, "closed inside a reply");
                    return false;
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return false,
                Err(error) => panic!("no reply: {error}"),
            }
        }
        true
    }
}

/// Returns the data for NBD_OPT_GO and NBD_OPT_INFO: a name and no information requests.
#[must_use]
pub fn go_data(export: &str) -> Vec<u8> {
    let mut data = (export.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(export.as_bytes());
    data.extend_from_slice(&[0, 0]);
    data
}

/// Returns the head of an option that declares this length.
#[must_use]
pub fn option_head(option: u32, length: u32) -> Vec<u8> {
    let mut head = consts::OPTION_MAGIC.to_be_bytes().to_vec();
    head.extend_from_slice(&option.to_be_bytes());
    head.extend_from_slice(&length.to_be_bytes());
    head
}

/// Returns the 28 bytes of a request.
#[must_use]
pub fn request_head(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut head = consts::REQUEST_MAGIC.to_be_bytes().to_vec();
    head.extend_from_slice(&flags.to_be_bytes());
    head.extend_from_slice(&command.to_be_bytes());
    head.extend_from_slice(&cookie.to_be_bytes());
    head.extend_from_slice(&offset.to_be_bytes());
    head.extend_from_slice(&length.to_be_bytes());
    head
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// Well-behaved client that continuously writes to its own 64 KiB, by default at the start of the
/// export, and reads the data back. A hostile test starts one before its violation and calls
/// [`Self::check`] afterwards.
#[derive(Debug)]
pub struct Innocent {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Innocent {
    /// Connects and starts; returns after a few rounds.
    ///
    /// # Panics
    /// Panics when the client cannot work even before the violation.
    #[must_use]
    pub fn start(front: &Front, export: &str) -> Self {
        Self::start_at(front, export, 0)
    }

    /// Connects and starts with the client's 64 KiB at `base`; returns after a few rounds.
    ///
    /// # Panics
    /// Panics when the client cannot work even before the violation.
    #[must_use]
    pub fn start_at(front: &Front, export: &str, base: u64) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut raw = RawNbd::go(front, export);
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let (mut sent, mut got) = ([0; 4096], [0; 4096]);
            while !stopped.load(Ordering::Relaxed) {
                let round = count.load(Ordering::Relaxed);
                crate::image::fill_pattern(&mut sent, base, round);
                let offset = base + (round % 16) * 4096;
                assert_eq!(raw.write(0, offset, &sent), Reply::Error(0));
                assert_eq!(raw.read(offset, &mut got), Ok(()));
                assert_eq!(sent, got, "the innocent client read back other data");
                count.store(round + 1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let innocent = Self { stop, rounds, thread: Some(thread) };
        innocent.progress();
        innocent
    }

    /// Waits until the client has done a few more rounds or has failed.
    ///
    /// # Panics
    /// Panics when neither happens in time.
    pub fn progress(&self) {
        let before = self.rounds.load(Ordering::Relaxed);
        wait_for("progress of the innocent client", Duration::from_secs(60), || {
            let thread = self.thread.as_ref().expect("started");
            (self.rounds.load(Ordering::Relaxed) > before + 3 || thread.is_finished()).then_some(())
        });
    }

    /// Checks that the client still makes progress and has seen no error.
    ///
    /// # Panics
    /// Panics when there is no progress, or an error.
    pub fn check(mut self) {
        self.progress();
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("started");
        assert!(thread.join().is_ok(), "the innocent client was disturbed");
    }
}

impl Drop for Innocent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
