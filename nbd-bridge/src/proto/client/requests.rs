//! [`Requests`]: the requests of a connection that wait for their replies.

use crate::proto::wire::{
    ChunkHeader, NbdError, RequestHeader, SimpleReply, cmd, magic, reply_flags, reply_type, take,
};

/// Longest payload of an error chunk: its numbers, and a message.
const ERROR_MAX: u32 = 8 << 10;

/// What follows in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The next `len` bytes belong to the data of a read, from its byte `at` on. The caller takes
    /// them before it goes on.
    Data {
        /// The request.
        row: u32,
        /// The first byte within the request.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// That much of a read is zeroes, and was not sent.
    Hole {
        /// The request.
        row: u32,
        /// The first byte within the request.
        at: u32,
        /// Bytes.
        len: u32,
    },
    /// A request has ended, with the number of an NBD error or 0.
    End {
        /// The request.
        row: u32,
        /// 0, or an error.
        error: u32,
    },
    /// Nothing for the caller.
    Nothing,
}

/// What no server may send: the connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// Neither a simple nor, where that was agreed on, a structured reply.
    #[error("a reply without its magic")]
    Magic,
    /// Nothing waits for it.
    #[error("a reply to no request")]
    Cookie,
    /// Data outside its request, or for what reads nothing, or twice, or in too many parts at a
    /// time.
    #[error("data outside its request")]
    Range,
    /// A read ended well without all of its data.
    #[error("a read without all of its data")]
    Missing,
    /// A chunk of a kind or length that cannot be.
    #[error("a malformed chunk")]
    Chunk,
    /// Not wrong, but an end too: the request is to be sent again over another connection.
    #[error("the server shuts down")]
    Shutdown,
}

/// Parts of a read that a chunk may come for in any order, at most.
const PARTS_MAX: usize = 64;

/// Which bytes of a read have come: ranges that neither overlap nor touch, in order.
#[derive(Clone, Debug, Default)]
struct Parts(Vec<(u32, u32)>);

impl Parts {
    /// Adds a range that is not empty. False if a part of it has come already, or if there would be
    /// too many ranges.
    fn add(&mut self, start: u32, end: u32) -> bool {
        let at = self.0.partition_point(|(_, before)| *before < start);
        match self.0.get(at).copied() {
            Some((from, to)) if to == start => {
                let next = self.0.get(at + 1).copied();
                match next {
                    Some((from, _)) if from < end => return false,
                    Some((from_next, to_next)) if from_next == end => {
                        self.0[at] = (from, to_next);
                        self.0.remove(at + 1);
                    }
                    _ => self.0[at] = (from, end),
                }
                true
            }
            Some((from, _)) if from < end => false,
            Some((from, to)) if from == end => {
                self.0[at] = (start, to);
                true
            }
            _ if self.0.len() >= PARTS_MAX => false,
            _ => {
                self.0.insert(at, (start, end));
                true
            }
        }
    }

    /// Whether all of a read of this length has come.
    fn is_whole(&self, len: u32) -> bool {
        len == 0 || self.0 == [(0, len)]
    }
}

#[derive(Clone, Debug, Default)]
struct Row {
    /// Part of its cookie: replies to an earlier request of the row are none to this one.
    round: u32,
    waits: bool,
    command: u16,
    flags: u16,
    offset: u64,
    len: u32,
    got: Parts,
    error: u32,
}

/// Requests by row, from the first byte that is sent until the reply has ended.
#[derive(Debug)]
pub struct Requests {
    structured: bool,
    rows: Box<[Row]>,
    free: Vec<u32>,
    /// Bytes of an error chunk still to be passed over.
    skip: u32,
    /// Ends when its data, which the caller takes, is there.
    ends: Option<u32>,
}

impl Requests {
    /// Room for so many.
    pub fn new(room: u32) -> Self {
        Self {
            structured: false,
            rows: (0..room)
                .map(|_| Row { got: Parts(Vec::with_capacity(PARTS_MAX)), ..Row::default() })
                .collect(),
            free: (0..room).rev().collect(),
            skip: 0,
            ends: None,
        }
    }

    /// A row for a request; None when all are taken.
    pub fn add(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> Option<u32> {
        let row = self.free.pop()?;
        let entry = &mut self.rows[row as usize];
        let (round, got) = (entry.round, std::mem::take(&mut entry.got));
        *entry = Row { round, command, flags, offset, len, got, ..Row::default() };
        Some(row)
    }

    /// The head of a request that is about to be sent; from now on a reply may come.
    pub fn send(&mut self, row: u32) -> [u8; RequestHeader::LEN] {
        let entry = &mut self.rows[row as usize];
        entry.round = entry.round.wrapping_add(1);
        (entry.waits, entry.error) = (true, 0);
        // Its memory is kept.
        entry.got.0.clear();
        let Row { command, flags, offset, len, round, .. } = *entry;
        let cookie = u64::from(round) << 32 | u64::from(row);
        RequestHeader { flags, command, cookie, offset, len }.encode()
    }

    /// The request will not be sent again: it ended without a reply.
    pub fn remove(&mut self, row: u32) {
        self.rows[row as usize].waits = false;
        self.free.push(row);
    }

    /// A new connection begins: no reply comes any more to what was sent before.
    pub fn reconnect(&mut self, structured: bool) {
        self.structured = structured;
        (self.skip, self.ends) = (0, None);
        self.rows.iter_mut().for_each(|row| row.waits = false);
    }

    /// The row that waits for the reply with this cookie.
    fn row(&self, cookie: u64) -> Result<u32, BadReply> {
        #[allow(clippy::cast_possible_truncation, reason = "two halves")]
        let (round, row) = ((cookie >> 32) as u32, cookie as u32);
        let waits = |entry: &Row| entry.waits && entry.round == round;
        self.rows.get(row as usize).filter(|e| waits(e)).map(|_| row).ok_or(BadReply::Cookie)
    }

    /// Takes the next bytes; 32 are always enough. None when these are too few. Else how many it
    /// took, and what that was.
    ///
    /// # Errors
    /// What no server may send.
    pub fn next(&mut self, bytes: &[u8]) -> Result<Option<(usize, Reply)>, BadReply> {
        if self.skip > 0 {
            let count = bytes.len().min(self.skip as usize);
            #[allow(clippy::cast_possible_truncation, reason = "at most `skip`")]
            let left = self.skip - count as u32;
            self.skip = left;
            return Ok((count > 0).then_some((count, Reply::Nothing)));
        }
        if let Some(row) = self.ends.take() {
            return Ok(Some((0, self.end(row)?)));
        }
        let Some(first) = bytes.first_chunk() else { return Ok(None) };
        match u32::from_be_bytes(*first) {
            magic::SIMPLE_REPLY => self.simple(bytes),
            magic::STRUCTURED_REPLY if self.structured => self.chunk(bytes),
            _ => Err(BadReply::Magic),
        }
    }

    fn simple(&mut self, bytes: &[u8]) -> Result<Option<(usize, Reply)>, BadReply> {
        let Ok(SimpleReply { error, cookie }) = SimpleReply::decode(bytes) else { return Ok(None) };
        let row = self.row(cookie)?;
        let Row { command, len, .. } = self.rows[row as usize];
        self.rows[row as usize].error = error;
        let reply = if command == cmd::READ && error == 0 {
            if self.structured {
                return Err(BadReply::Chunk);
            }
            self.data(row, 0, len, true)?
        } else {
            self.end(row)?
        };
        Ok(Some((SimpleReply::LEN, reply)))
    }

    fn chunk(&mut self, bytes: &[u8]) -> Result<Option<(usize, Reply)>, BadReply> {
        const NONE: u16 = 0;
        const OFFSET_HOLE: u16 = 2;
        let Ok(head) = ChunkHeader::decode(bytes) else { return Ok(None) };
        let row = self.row(head.cookie)?;
        let done = head.flags & reply_flags::DONE != 0;
        let mut rest = &bytes[ChunkHeader::LEN..];
        let is_read = self.rows[row as usize].command == cmd::READ;
        let (extra, reply) = match head.kind {
            NONE if head.len == 0 && done => (0, self.end(row)?),
            reply_type::OFFSET_DATA if is_read && head.len > 8 => {
                let Some(offset) = take(&mut rest).map(u64::from_be_bytes) else { return Ok(None) };
                (8, self.data(row, offset, head.len - 8, done)?)
            }
            OFFSET_HOLE if is_read && head.len == 12 => {
                let Some(offset) = take(&mut rest).map(u64::from_be_bytes) else { return Ok(None) };
                let Some(len) = take(&mut rest).map(u32::from_be_bytes) else { return Ok(None) };
                let Reply::Data { row, at, len } = self.data(row, offset, len, done)? else {
                    return Err(BadReply::Range);
                };
                (12, Reply::Hole { row, at, len })
            }
            kind if kind & (1 << 15) != 0 && (6..=ERROR_MAX).contains(&head.len) => {
                let Some(error) = take(&mut rest).map(u32::from_be_bytes) else { return Ok(None) };
                self.rows[row as usize].error =
                    if error == 0 { NbdError::Inval.code() } else { error };
                self.skip = head.len - 4;
                self.ends = done.then_some(row);
                (4, Reply::Nothing)
            }
            _ => return Err(BadReply::Chunk),
        };
        Ok(Some((ChunkHeader::LEN + extra, reply)))
    }

    /// Data of a read, from this offset of the device on; of a simple reply from 0.
    fn data(&mut self, row: u32, from: u64, len: u32, done: bool) -> Result<Reply, BadReply> {
        let structured = self.structured;
        let entry = &mut self.rows[row as usize];
        let at = if structured { from.checked_sub(entry.offset) } else { Some(0) };
        let at = at.and_then(|at| u32::try_from(at).ok()).ok_or(BadReply::Range)?;
        let end = at.checked_add(len).filter(|end| len > 0 && *end <= entry.len);
        if !end.is_some_and(|end| entry.got.add(at, end)) {
            return Err(BadReply::Range);
        }
        self.ends = done.then_some(row);
        Ok(Reply::Data { row, at, len })
    }

    /// The reply is complete.
    fn end(&mut self, row: u32) -> Result<Reply, BadReply> {
        let entry = &mut self.rows[row as usize];
        if entry.error == NbdError::Shutdown.code() {
            return Err(BadReply::Shutdown);
        }
        if entry.command == cmd::READ && entry.error == 0 && !entry.got.is_whole(entry.len) {
            return Err(BadReply::Missing);
        }
        entry.waits = false;
        let error = entry.error;
        self.free.push(row);
        Ok(Reply::End { row, error })
    }
}
