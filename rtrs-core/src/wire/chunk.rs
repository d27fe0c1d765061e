//! Layout of a request in its chunk, for the client that writes it and the server that validates
//! it.
//!
//! ```text
//! 0          data_len          off = data_len + usr_len
//! [ data     ) [ user header   ) [ RTRS message )            chunk_size
//! ```
//! Only `off` is transmitted, in the immediate; there is no padding or alignment. The peer may
//! still write to the chunk while it is read, so a server never parses in place. Its steps:
//!
//! 1. copy [`ChunkRequest::message_range`] (at most 24 bytes) and pass it to
//!    [`ChunkRequest::parse`]. An error here ends the path, as with the kernel's server, because
//!    the server does not know how to answer;
//! 2. copy [`ChunkRequest::user_range`] (at most [`USER_LEN_MAX`] bytes) and pass it to
//!    [`ChunkRequest::user`]. An error here is answered with [`WireError::errno`], and
//!    [`ChunkRequest::invalidate`] still applies.
//!
//! After both, the lengths of header, data, descriptor and operation are consistent
//! (docs/PROTOCOL.md, what the kernel does not check). The caller must check the device, the range
//! on it, and that the permit is not in flight.

use std::ops::Range;

use super::auth::{Auth, Challenge, ChallengeRsp, SignedProof};
use super::bytes::{fixed, u16_at};
use super::discover::{Discover, Page};
use super::error::{Fault, WireError};
use super::export::{
    AccessMode, Close, Open, OpenFlags, OpenRsp, SessInfo, SessInfoRsp, TYPE_OPEN,
};
use super::fence::Fence;
use super::gateway::Move;
use super::info::SgDesc;
use super::io::{IoHeader, ReadMsg, RwOp, TYPE_READ, WriteMsg};
use super::version::RNBD_VERSION;
use crate::extents;
use crate::ids::Rkey;
use crate::limits::MAX_HDR_SIZE;

/// Maximum number of bytes of a user header that are examined: the length of the largest message,
/// OPEN.
pub const USER_LEN_MAX: usize = Open::LEN;

const NAME: &str = "request in chunk";

/// Offsets of a request that a client is about to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkLayout {
    data_len: u32,
    usr_len: u16,
    message_len: u16,
}

impl ChunkLayout {
    /// Computes the layout of a request with this many bytes of data, user header and RTRS message.
    ///
    /// # Errors
    /// The header and message exceed `max_hdr_size`, or the whole request exceeds the chunk.
    pub fn new(
        data_len: u32,
        usr_len: u16,
        message_len: u16,
        chunk_size: u32,
        max_hdr_size: u32,
    ) -> Result<Self, WireError> {
        let header = u32::from(usr_len) + u32::from(message_len);
        if header > max_hdr_size {
            let fault = Fault::Mismatch {
                field: "header length",
                found: header.into(),
                against: "max_hdr_size",
                bound: max_hdr_size.into(),
            };
            return Err(WireError { message: NAME, at: 0, fault });
        }
        if header > chunk_size || data_len > chunk_size - header {
            let fault = Fault::Mismatch {
                field: "data length",
                found: data_len.into(),
                against: "chunk size less the header",
                bound: chunk_size.saturating_sub(header).into(),
            };
            return Err(WireError { message: NAME, at: 0, fault });
        }
        Ok(Self { data_len, usr_len, message_len })
    }

    /// Returns the offset of the user header, which follows the data.
    pub const fn user_at(self) -> u32 {
        self.data_len
    }

    /// Returns the offset of the RTRS message: `off` of the immediate.
    pub const fn message_at(self) -> u32 {
        self.data_len + self.usr_len as u32
    }

    /// Returns the end of the request.
    pub const fn end(self) -> u32 {
        self.message_at() + self.message_len as u32
    }
}

/// RTRS message in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The answer is written to the client's memory, or there is none (flush).
    Read(ReadMsg),
    /// The data, if any, is in the chunk.
    Write(WriteMsg),
}

/// Request whose RTRS message has been validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRequest {
    /// RTRS message.
    pub message: Message,
    /// Number of data bytes at the start of the chunk: written data, or space for data to be read.
    pub data_len: u32,
    /// Length of the user header, which follows the data.
    pub usr_len: u16,
}

/// User header of a request, validated together with its RTRS message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserMessage<'a> {
    /// Negotiate versions; the answer is a [`SessInfoRsp`].
    SessInfo(SessInfo),
    /// Open a device; the answer is an [`OpenRsp`].
    Open {
        /// Access mode.
        access: AccessMode,
        /// Flags, if the client has room for the long [`OpenRsp`].
        flags: OpenFlags,
        /// Name of the device, without its NUL; at most 254 bytes, possibly empty.
        dev_name: &'a [u8],
    },
    /// Read, write, flush, discard, write zeroes, or extents.
    Io(RwOp, IoHeader),
    /// Close a device.
    Close(Close),
    /// Discard late requests from a dead path. Extension.
    Fence(Fence),
    /// Move a device to another gateway. Extension.
    Move(Move),
    /// List exports; the answer is a [`Page`]. Extension.
    Discover {
        /// Name after which the list starts, without its NUL; at most 254 bytes, possibly empty.
        after: &'a [u8],
    },
    /// Prove the server's identity; the answer is a [`ChallengeRsp`]. Extension.
    Challenge(Challenge),
    /// Prove the client's identity with the request's data. Extension.
    Auth(Auth),
}

impl ChunkRequest {
    /// Returns the range of a chunk to copy for [`ChunkRequest::parse`]: from `off`, at most 24
    /// bytes.
    ///
    /// # Errors
    /// `off` leaves no room for a message.
    pub fn message_range(off: u32, chunk_size: u32) -> Result<Range<usize>, WireError> {
        let room = chunk_size.saturating_sub(off) as usize;
        if room < WriteMsg::LEN {
            let fault = Fault::Mismatch {
                field: "off",
                found: off.into(),
                against: "chunk size less a message",
                bound: chunk_size.saturating_sub(4).into(),
            };
            return Err(WireError { message: NAME, at: off as usize, fault });
        }
        let off = off as usize;
        Ok(off..off + room.min(ReadMsg::LEN_MAX))
    }

    /// Validates the RTRS message at `off`. `message` is a copy of [`ChunkRequest::message_range`].
    ///
    /// # Errors
    /// Not a READ or WRITE, a message that exceeds the chunk, more than one descriptor, or a user
    /// header longer than the bytes before it or than the space for headers. The path must end.
    pub fn parse(off: u32, message: &[u8]) -> Result<Self, WireError> {
        let head: &[u8; WriteMsg::LEN] = fixed(NAME, message)?;
        let (message, usr_len, message_len) = match u16_at(head, 0) {
            WriteMsg::TYPE => {
                let write = WriteMsg::decode(head)?;
                (Message::Write(write), write.usr_len, WriteMsg::LEN)
            }
            TYPE_READ => {
                let read = ReadMsg::decode(message)?;
                (Message::Read(read), read.usr_len, read.encoded_len())
            }
            kind => {
                let found = u64::from(kind);
                return Err(WireError::value(NAME, off as usize, "type", found, "2 or 3"));
            }
        };
        let usr = u32::from(usr_len);
        let wrong = |against, bound: u32| {
            let (found, bound) = (u64::from(usr), u64::from(bound));
            let fault = Fault::Mismatch { field: "usr_len", found, against, bound };
            WireError { message: NAME, at: off as usize + 2, fault }
        };
        if usr as usize + message_len > MAX_HDR_SIZE as usize {
            return Err(wrong("the header room of", MAX_HDR_SIZE));
        }
        let data_len = off.checked_sub(usr).ok_or_else(|| wrong("off", off))?;
        Ok(Self { message, data_len, usr_len })
    }

    /// Returns the range of the chunk to copy for [`ChunkRequest::user`]: the user header, limited
    /// to the length of the longest message.
    pub fn user_range(&self) -> Range<usize> {
        let start = self.data_len as usize;
        start..start + usize::from(self.usr_len).min(USER_LEN_MAX)
    }

    /// Returns the key to invalidate with the answer, whether successful or not.
    pub const fn invalidate(&self) -> Option<Rkey> {
        match &self.message {
            Message::Read(read) => read.invalidate(),
            Message::Write(_) => None,
        }
    }

    /// Returns the descriptor for the result.
    pub const fn desc(&self) -> Option<SgDesc> {
        match &self.message {
            Message::Read(read) => read.desc,
            Message::Write(_) => None,
        }
    }

    /// Validates the user header. `header` is a copy of [`ChunkRequest::user_range`], `ver` the
    /// version negotiated by SESS_INFO, or 0 before that.
    ///
    /// # Errors
    /// An unknown or short message, an unterminated name, an unknown operation, or inconsistent
    /// lengths. The request must be answered with [`WireError::errno`].
    pub fn user<'a>(&self, header: &'a [u8], ver: u8) -> Result<UserMessage<'a>, WireError> {
        let head: &[u8; 2] = fixed("user header", header)?;
        match u16::from_le_bytes(*head) {
            IoHeader::TYPE => {
                let io = IoHeader::decode(header, ver)?;
                let op = self.check_io(&io)?;
                // The position within the block is in a field that older headers lack.
                if op == RwOp::PartialWrite && (ver < RNBD_VERSION || header.len() < IoHeader::LEN)
                {
                    let fault = Fault::UnknownOp(op.to_wire());
                    return Err(WireError { message: "IO", at: 16, fault });
                }
                Ok(UserMessage::Io(op, io))
            }
            SessInfo::TYPE => {
                let info = SessInfo::decode(header)?;
                self.check_answer_room(SessInfoRsp::LEN)?;
                Ok(UserMessage::SessInfo(info))
            }
            TYPE_OPEN => {
                let (access, flags, dev_name) = Open::decode_in_place(header)?;
                self.check_answer_room(OpenRsp::LEN)?;
                Ok(UserMessage::Open { access, flags, dev_name })
            }
            Close::TYPE => Ok(UserMessage::Close(Close::decode(header)?)),
            Fence::TYPE => Ok(UserMessage::Fence(Fence::decode(header)?)),
            Move::TYPE => Ok(UserMessage::Move(Move::decode(header)?)),
            Discover::TYPE => {
                let after = Discover::decode_in_place(header)?;
                self.check_answer_room(Page::LEN_MIN)?;
                Ok(UserMessage::Discover { after })
            }
            Challenge::TYPE => {
                let challenge = Challenge::decode(header)?;
                self.check_answer_room(ChallengeRsp::ROOM_MIN)?;
                Ok(UserMessage::Challenge(challenge))
            }
            Auth::TYPE => {
                let auth = Auth::decode(header)?;
                self.check_direction(false)?;
                self.check_proof()?;
                Ok(UserMessage::Auth(auth))
            }
            kind => {
                let (kind, expected) = (u64::from(kind), "0, 2, 4 or 5");
                Err(WireError::value("user header", 0, "type", kind, expected))
            }
        }
    }

    /// Returns the operation of an IO whose lengths are consistent with the request that contains
    /// it.
    fn check_io(&self, io: &IoHeader) -> Result<RwOp, WireError> {
        let op = io.rw.op();
        let op =
            op.map_err(|op| WireError { message: "IO", at: 16, fault: Fault::UnknownOp(op) })?;
        match op {
            RwOp::Read => {
                self.check_size(io.bi_size)?;
                self.check_desc()?;
            }
            // The size in the header is that of the range, not that of the answer.
            RwOp::Extents => self.check_answer_room(extents::LEN_MIN)?,
            RwOp::Write | RwOp::PartialWrite => {
                self.check_size(io.bi_size)?;
                self.check_direction(false)?;
            }
            // A flush is sent as a READ without a descriptor; a WRITE would be equally unambiguous.
            RwOp::Flush => self.check_no_data()?,
            RwOp::Discard | RwOp::SecureErase | RwOp::WriteZeroes => {
                self.check_no_data()?;
                self.check_direction(false)?;
            }
        }
        Ok(op)
    }

    fn check_size(&self, bi_size: u32) -> Result<(), WireError> {
        if bi_size == self.data_len && bi_size != 0 {
            return Ok(());
        }
        let (found, bound) = (u64::from(bi_size), u64::from(self.data_len));
        let fault = Fault::Mismatch { field: "bi_size", found, against: "data length", bound };
        Err(WireError { message: "IO", at: 20, fault })
    }

    fn check_no_data(&self) -> Result<(), WireError> {
        let stray = self.desc().map_or(0, |desc| desc.len);
        if self.data_len == 0 && stray == 0 {
            return Ok(());
        }
        let found = u64::from(self.data_len.max(stray));
        Err(WireError::value(NAME, 0, "data length", found, "0 for an operation without data"))
    }

    /// Checks that the answer is exactly as long as the space that the chunk reserves for it.
    fn check_desc(&self) -> Result<(), WireError> {
        self.check_direction(true)?;
        match self.desc() {
            Some(desc) if desc.len == self.data_len => Ok(()),
            desc => {
                let len = desc.map_or(0, |desc| desc.len);
                let (found, bound) = (u64::from(len), u64::from(self.data_len));
                let against = "data length";
                let fault = Fault::Mismatch { field: "desc.len", found, against, bound };
                Err(WireError { message: "READ", at: 20, fault })
            }
        }
    }

    /// Checks that a control message has an answer and enough space for it.
    fn check_answer_room(&self, need: usize) -> Result<(), WireError> {
        self.check_desc()?;
        if self.data_len as usize >= need {
            return Ok(());
        }
        let (found, bound) = (u64::from(self.data_len), need as u64);
        let (field, against) = ("room for the answer", "its length");
        let fault = Fault::Mismatch { field, found, against, bound };
        Err(WireError { message: NAME, at: 0, fault })
    }

    /// Checks that an AUTH carries a proof of valid length.
    fn check_proof(&self) -> Result<(), WireError> {
        if (1..=SignedProof::LEN_MAX).contains(&(self.data_len as usize)) {
            return Ok(());
        }
        let found = u64::from(self.data_len);
        Err(WireError::value("AUTH", 0, "data length", found, "1 to 16384 bytes of proof"))
    }

    fn check_direction(&self, read: bool) -> Result<(), WireError> {
        match (&self.message, read) {
            (Message::Read(_), true) | (Message::Write(_), false) => Ok(()),
            (Message::Read(_), false) => {
                Err(WireError::value(NAME, 0, "type", u64::from(TYPE_READ), "2 (WRITE)"))
            }
            (Message::Write(_), true) => {
                Err(WireError::value(NAME, 0, "type", u64::from(WriteMsg::TYPE), "3 (READ)"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::io::Rw;
    use super::*;

    const CHUNK: u32 = 131_072;

    fn read_msg(usr_len: u16, desc_len: Option<u32>) -> Vec<u8> {
        let desc = desc_len.map(|len| SgDesc { addr: 0x1000, key: Rkey(7), len });
        let mut bytes = vec![0; ReadMsg::LEN_MAX];
        let len = ReadMsg { usr_len, need_inval: true, desc }.encode(&mut bytes);
        bytes.truncate(len);
        bytes
    }

    fn write_msg(usr_len: u16) -> Vec<u8> {
        WriteMsg { usr_len }.encode().to_vec()
    }

    /// Validates a request with `data_len` bytes of data as a server would.
    fn validate(data_len: u32, user: &[u8], message: &[u8]) -> Result<RwOp, WireError> {
        let off = data_len + user.len() as u32;
        let request = ChunkRequest::parse(off, message)?;
        assert_eq!(request.data_len, data_len);
        match request.user(user, 2)? {
            UserMessage::Io(op, _) => Ok(op),
            other => panic!("{other:?}"),
        }
    }

    fn io(rw: Rw, bi_size: u32) -> [u8; IoHeader::LEN] {
        IoHeader { rw, bi_size, ..IoHeader::default() }.encode()
    }

    #[test]
    fn kernel_requests_are_accepted() {
        let flush =
            IoHeader { sector: u64::MAX, rw: Rw::FLUSH.sync().fua(true), ..IoHeader::default() };
        let cases = [
            (4096, io(Rw::READ.sync(), 4096), read_msg(32, Some(4096)), RwOp::Read),
            (512, io(Rw::WRITE, 512), write_msg(32), RwOp::Write),
            (0, flush.encode(), read_msg(32, None), RwOp::Flush),
            (0, io(Rw::DISCARD.sync(), 65536), write_msg(32), RwOp::Discard),
            (0, io(Rw::WRITE_ZEROES, 65536), write_msg(32), RwOp::WriteZeroes),
        ];
        for (data_len, user, message, op) in cases {
            assert_eq!(validate(data_len, &user, &message), Ok(op));
            let old_peer = &user[..IoHeader::LEN_MIN];
            let mut message = message;
            message[2] = 24;
            assert_eq!(validate(data_len, old_peer, &message), Ok(op));
        }
    }

    #[test]
    fn inconsistent_lengths_are_refused() {
        let read = |data, size, desc| {
            validate(data, &io(Rw::READ, size), &read_msg(32, desc)).map_err(|e| e.at)
        };
        assert_eq!(read(4096, 4096, Some(4097)), Err(20), "desc.len");
        assert_eq!(read(4096, 4096, None), Err(20), "no desc");
        assert_eq!(read(4096, 512, Some(4096)), Err(20), "bi_size");
        assert_eq!(read(0, 0, Some(0)), Err(20), "nothing to read");
        assert!(validate(4096, &io(Rw::READ, 4096), &write_msg(32)).is_err(), "direction");

        assert!(validate(4096, &io(Rw::WRITE, 8192), &write_msg(32)).is_err());
        assert!(validate(0, &io(Rw::WRITE, 0), &write_msg(32)).is_err());
        assert!(validate(4096, &io(Rw::WRITE, 4096), &read_msg(32, Some(4096))).is_err());
        assert!(validate(512, &io(Rw::DISCARD, 512), &write_msg(32)).is_err());
        assert!(validate(0, &io(Rw::DISCARD, 512), &read_msg(32, None)).is_err());
        assert!(validate(512, &io(Rw::FLUSH, 0), &read_msg(32, None)).is_err());
        assert!(validate(0, &io(Rw::FLUSH, 0), &read_msg(32, Some(8))).is_err());
    }

    #[test]
    fn unknown_operations_and_messages_get_an_errno() {
        let error = validate(0, &io(Rw(6), 0), &write_msg(32)).unwrap_err();
        assert_eq!((error.fault, error.errno()), (Fault::UnknownOp(6), 95));
        let request = ChunkRequest::parse(32, &write_msg(32)).unwrap();
        for kind in [1, 3, 6, 0xff] {
            let mut user = [0; 32];
            user[0] = kind;
            let error = request.user(&user, 2).unwrap_err();
            assert_eq!((error.at, error.errno()), (0, 22));
        }
        assert!(request.user(&[], 2).is_err());
        assert!(request.user(&[4], 2).is_err());
    }

    #[test]
    fn an_invalid_user_header_still_yields_the_key() {
        let request = ChunkRequest::parse(4096 + 32, &read_msg(32, Some(4096))).unwrap();
        assert!(request.user(&[9; 32], 2).is_err());
        assert_eq!(request.invalidate(), Some(Rkey(7)));
    }

    #[test]
    fn control_messages_need_space_for_their_answer() {
        let user = SessInfo::default().encode();
        let parse = |data_len: u32, message: &[u8]| {
            let request = ChunkRequest::parse(data_len + 36, message).unwrap();
            request.user(&user, 0).map_err(|e| e.errno())
        };
        assert_eq!(
            parse(36, &read_msg(36, Some(36))),
            Ok(UserMessage::SessInfo(SessInfo::default()))
        );
        assert_eq!(parse(35, &read_msg(36, Some(35))), Err(22));
        assert_eq!(parse(36, &read_msg(36, Some(35))), Err(22));
        assert_eq!(parse(36, &read_msg(36, None)), Err(22));
        assert_eq!(parse(36, &write_msg(36)), Err(22));
    }

    #[test]
    fn messages_stay_within_chunk_and_header_space() {
        let range = |off| ChunkRequest::message_range(off, CHUNK);
        assert_eq!(range(0), Ok(0..24));
        assert_eq!(range(CHUNK - 24), Ok(CHUNK as usize - 24..CHUNK as usize));
        assert_eq!(range(CHUNK - 4), Ok(CHUNK as usize - 4..CHUNK as usize));
        for off in [CHUNK - 3, CHUNK, CHUNK + 1, u32::MAX] {
            assert!(range(off).is_err(), "{off}");
        }
        // Data cut off at the end of the chunk is detected here.
        assert!(ChunkRequest::parse(CHUNK - 8, &read_msg(32, Some(1))[..8]).is_err());
        assert!(ChunkRequest::parse(CHUNK - 4, &read_msg(32, None)[..4]).is_err());
        assert!(ChunkRequest::parse(CHUNK - 4, &write_msg(32)).is_ok());

        assert_eq!(ChunkRequest::parse(31, &write_msg(32)).map_err(|e| e.at), Err(33));
        assert_eq!(ChunkRequest::parse(32, &write_msg(32)).map(|r| r.data_len), Ok(0));
        assert!(ChunkRequest::parse(8192, &write_msg(4093)).is_err(), "header room");
        let long = ChunkRequest::parse(8192, &write_msg(4092)).unwrap();
        assert_eq!(long.user_range(), 4100..4100 + USER_LEN_MAX);
        assert!(ChunkRequest::parse(32, &[0; 24]).is_err(), "zeroed memory");
    }

    #[test]
    fn layouts_match_the_protocol_document() {
        for (data, usr, message, off, end) in
            [(36, 36, 24, 72, 96), (56, 264, 24, 320, 344), (0, 8, 4, 8, 12), (0, 32, 8, 32, 40)]
        {
            let layout = ChunkLayout::new(data, usr, message, CHUNK, 4096).unwrap();
            let found = (layout.user_at(), layout.message_at(), layout.end());
            assert_eq!(found, (data, off, end));
        }
        assert!(ChunkLayout::new(CHUNK - 36, 32, 4, CHUNK, 4096).is_ok());
        assert!(ChunkLayout::new(CHUNK - 35, 32, 4, CHUNK, 4096).is_err());
        assert!(ChunkLayout::new(u32::MAX, 32, 4, CHUNK, 4096).is_err());
        assert!(ChunkLayout::new(0, 4093, 4, CHUNK, 4096).is_err());
        assert!(ChunkLayout::new(0, u16::MAX, u16::MAX, 64, u32::MAX).is_err());
    }
}
