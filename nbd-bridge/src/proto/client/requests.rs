//! [`Requests`]: the requests of a connection that wait for their replies.

use crate::proto::wire::{
    ChunkHeader, NbdError, RequestHeader, SimpleReply, cmd, magic, reply_flags, reply_type, take,
};

/// Maximum payload of an error chunk: its numeric fields and a message.
const ERROR_MAX: u32 = 8 << 10;

/// Next event of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The next `len` bytes on the connection are data of a read, starting at byte `at` of the
    /// read. The caller must consume them before it continues.
    Data {
        /// Row of the request.
        row: u32,
        /// Position of the first byte within the request.
        at: u32,
        /// Number of bytes.
        len: u32,
    },
    /// A range of a read is zero and was not sent.
    Hole {
        /// Row of the request.
        row: u32,
        /// Position of the first byte within the request.
        at: u32,
        /// Number of bytes.
        len: u32,
    },
    /// A request has ended.
    End {
        /// Row of the request.
        row: u32,
        /// Code of an NBD error, or 0 for success.
        error: u32,
    },
    /// Bytes that need no action by the caller.
    Nothing,
}

/// Protocol violation by the server; the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// Neither a simple reply nor, if negotiated, a structured one.
    #[error("a reply without its magic")]
    Magic,
    /// No request is waiting for the reply.
    #[error("a reply to no request")]
    Cookie,
    /// Data outside its request, data for a request other than a read, data sent twice, or data in
    /// too many separate ranges at once.
    #[error("data outside its request")]
    Range,
    /// A read succeeded without all of its data.
    #[error("a read without all of its data")]
    Missing,
    /// A chunk with an invalid type or length.
    #[error("a malformed chunk")]
    Chunk,
    /// Not a violation, but it ends the connection too: the request must be resent over a new
    /// connection.
    #[error("the server is shutting down")]
    Shutdown,
}

/// Maximum number of separate ranges in which the data of a read may arrive.
const PARTS_MAX: usize = 64;

/// Received ranges of a read: sorted, without overlaps, and merged where they touch.
#[derive(Clone, Debug, Default)]
struct Parts(Vec<(u32, u32)>);

impl Parts {
    /// Adds a non-empty range. Returns false if the range overlaps one that was already received,
    /// or if there would be too many ranges.
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

    /// Whether all data of a read of length `len` has been received.
    fn is_whole(&self, len: u32) -> bool {
        len == 0 || self.0 == [(0, len)]
    }
}

#[derive(Clone, Debug, Default)]
struct Row {
    /// Part of the request's cookie, so that replies to an earlier request in the row do not match.
    round: u32,
    waits: bool,
    command: u16,
    flags: u16,
    offset: u64,
    len: u32,
    got: Parts,
    error: u32,
}

/// Requests by row, from the first byte sent until the end of the reply.
#[derive(Debug)]
pub struct Requests {
    structured: bool,
    rows: Box<[Row]>,
    free: Vec<u32>,
    /// Bytes of an error chunk still to be skipped.
    skip: u32,
    /// Row that ends once the caller has consumed its data.
    ends: Option<u32>,
}

impl Requests {
    /// Creates a table with `room` rows.
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

    /// Allocates a row for a request. Returns None if all rows are in use.
    pub fn add(&mut self, command: u16, flags: u16, offset: u64, len: u32) -> Option<u32> {
        let row = self.free.pop()?;
        let entry = &mut self.rows[row as usize];
        let (round, got) = (entry.round, std::mem::take(&mut entry.got));
        *entry = Row { round, command, flags, offset, len, got, ..Row::default() };
        Some(row)
    }

    /// Returns the header of a request that is about to be sent. From then on, a reply may arrive.
    pub fn send(&mut self, row: u32) -> [u8; RequestHeader::LEN] {
        let entry = &mut self.rows[row as usize];
        entry.round = entry.round.wrapping_add(1);
        (entry.waits, entry.error) = (true, 0);
        // Clears the list but keeps its memory.
        entry.got.0.clear();
        let Row { command, flags, offset, len, round, .. } = *entry;
        let cookie = u64::from(round) << 32 | u64::from(row);
        RequestHeader { flags, command, cookie, offset, len }.encode()
    }

    /// Frees the row of a request that ended without a reply and will not be resent.
    pub fn remove(&mut self, row: u32) {
        self.rows[row as usize].waits = false;
        self.free.push(row);
    }

    /// Starts a new connection. Replies to requests sent earlier can no longer arrive.
    pub fn reconnect(&mut self, structured: bool) {
        self.structured = structured;
        (self.skip, self.ends) = (0, None);
        self.rows.iter_mut().for_each(|row| row.waits = false);
    }

    /// Returns the row that is waiting for the reply with this cookie.
    fn row(&self, cookie: u64) -> Result<u32, BadReply> {
        #[allow(clippy::cast_possible_truncation, reason = "two halves")]
        let (round, row) = ((cookie >> 32) as u32, cookie as u32);
        let waits = |entry: &Row| entry.waits && entry.round == round;
        self.rows.get(row as usize).filter(|e| waits(e)).map(|_| row).ok_or(BadReply::Cookie)
    }

    /// Parses the next bytes; 32 are always enough. Returns None if there are too few bytes,
    /// otherwise the number of bytes consumed and the event.
    ///
    /// # Errors
    /// A protocol violation by the server.
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

    /// Handles data of a read. `from` is an offset on the device; it is 0 for a simple reply.
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

    /// Ends a request whose reply is complete.
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
