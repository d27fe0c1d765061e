//! Requests of the transmission phase, and their validation.
//!
//! [`Request::decode`] decodes a 28-byte request, [`ExtendedRequest::decode`] a 32-byte one.
//! [`Rules::check`] returns the operation to run or the refusal, including how to treat the payload
//! that follows a refused write. Nothing is allocated; `Rules` is a small `Copy` struct that a
//! connection keeps next to its buffers. A validated request is within the export, uses offered
//! features and has a bounded length. It is aligned if the client asked for the block sizes; other
//! clients may request any byte range, and are served with whole blocks internally. Called once per
//! request by the connection code.
//!
//! Source: "Request message", "Request types", "Command flags", "Error values" and "Size
//! constraints" of the NBD specification.

use super::export_info::ExportInfo;
use super::wire::{
    CHUNK_MAX, ExtendedRequest, NbdError, PAYLOAD_MAX, cmd, cmd_flags, transmission_flags as tf,
};

/// A request as received; only its magic has been checked. If decoding fails for any reason other
/// than missing bytes, the stream is out of sync and the connection must be closed.
pub use super::wire::RequestHeader as Request;

/// Maximum payload of a refused write that is read and dropped to keep the connection. A client
/// that sends more than twice its limit is not worth the time.
pub(crate) const SKIP_MAX: u32 = 2 * PAYLOAD_MAX;

/// Operation of a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read `len` bytes and send them.
    Read,
    /// Write the `len` bytes that follow the request.
    Write,
    /// Make all answered writes durable.
    Flush,
    /// Discard.
    Trim,
    /// Read ahead; a hint without data.
    Cache,
    /// Write zeroes.
    WriteZeroes,
    /// Report holes, for as much of the range as is convenient.
    BlockStatus,
    /// Finish what is in flight, then close; no reply.
    Disconnect,
}

/// A request that may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validated {
    /// Operation to run.
    pub op: Op,
    /// Client's handle, echoed in the reply.
    pub cookie: u64,
    /// First byte; 0 for flush and disconnect.
    pub offset: u64,
    /// Number of bytes; 0 for flush and disconnect, otherwise above 0 with `offset + len` within
    /// the export. At most the maximum payload for reads and writes.
    pub len: u64,
    /// Data must be durable before the reply. Only set for write, trim and write zeroes.
    pub fua: bool,
    /// Write zeroes must leave the range allocated.
    pub no_hole: bool,
    /// Write zeroes must fail with [`NbdError::NotSup`] unless it is quicker than a write.
    pub fast_only: bool,
    /// Block status needs to report only the first extent.
    pub one: bool,
    /// The read must be answered with one chunk.
    pub one_chunk: bool,
}

/// Treatment of the connection after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRefusal {
    /// Send the error; the next request follows.
    Continue,
    /// Send the error; drop this many bytes of payload before the next request.
    Skip(u32),
    /// The payload is too long to drop: send the error if that is possible immediately, then close.
    Close,
}

/// A request that must not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error to reply with.
    pub error: NbdError,
    /// The reason, for the message of a structured error and for the log.
    pub reason: &'static str,
    /// Treatment of the connection.
    pub after: AfterRefusal,
}

/// Features that a client requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Reads and errors are answered with structured chunks.
    pub structured_replies: bool,
    /// Whether the client has received the block sizes, and so must send whole blocks.
    pub keeps_blocks: bool,
    /// The client selected the context `base:allocation`.
    pub block_status: bool,
    /// Requests and replies have extended headers, with 64-bit lengths. Implies structured replies.
    pub extended: bool,
}

/// Rules against which the requests of one connection are validated, together with the current size
/// of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    min_block: u32,
    terms: Terms,
    /// Parts of blocks cannot be changed.
    shared_writes: bool,
    max_payload: u32,
    /// Advertised transmission flags; a feature that is not advertised is refused.
    flags: u16,
}

impl Rules {
    /// Returns the rules for an export, as negotiated on this connection.
    pub fn new(export: &ExportInfo, terms: Terms) -> Self {
        Self {
            min_block: export.min_block,
            terms,
            shared_writes: export.shared_writes,
            max_payload: export.max_payload.min(PAYLOAD_MAX),
            flags: export.transmission_flags(terms.structured_replies),
        }
    }

    /// Whether reads and errors are answered with structured chunks.
    pub fn structured_replies(&self) -> bool {
        self.terms.structured_replies
    }

    /// Whether requests and replies have extended headers.
    pub fn extended(&self) -> bool {
        self.terms.extended
    }

    /// Returns the device's block size.
    pub(crate) fn min_block(&self) -> u32 {
        self.min_block
    }

    /// Validates a request to an export of `size` bytes.
    ///
    /// # Errors
    /// The error to reply with, and how to skip the payload of a refused write.
    pub fn check(&self, request: &Request, size: u64) -> Result<Validated, Refusal> {
        self.check_extended(&(*request).into(), size)
    }

    /// Validates a request to an export of `size` bytes, like [`Self::check`].
    ///
    /// # Errors
    /// The error to reply with, and how to skip the payload of a refused write.
    pub fn check_extended(
        &self,
        request: &ExtendedRequest,
        size: u64,
    ) -> Result<Validated, Refusal> {
        self.validate(request, size).map_err(|(error, reason)| {
            let says = self.terms.extended && request.flags & cmd_flags::PAYLOAD_LEN != 0;
            let has_payload = (says || request.command == cmd::WRITE) && request.len > 0;
            let after = match u32::try_from(request.len) {
                _ if !has_payload => AfterRefusal::Continue,
                Ok(len) if len <= SKIP_MAX => AfterRefusal::Skip(len),
                _ => AfterRefusal::Close,
            };
            Refusal { error, reason, after }
        })
    }

    /// Checks whether a request may cover parts of blocks ("Size constraints").
    fn check_part(&self, op: Op, flags: u16) -> Result<(), (NbdError, &'static str)> {
        let changes_part = matches!(op, Op::Write | Op::WriteZeroes);
        if self.terms.keeps_blocks {
            let reason = "offset or length is not a multiple of the minimum block size";
            return Err((NbdError::Inval, reason));
        }
        if changes_part && self.shared_writes {
            let reason = "cannot change part of a block, because another host may write to it";
            return Err((NbdError::Inval, reason));
        }
        if flags & cmd_flags::FAST_ZERO != 0 {
            return Err((NbdError::NotSup, "zeroing part of a block is not fast"));
        }
        Ok(())
    }

    fn offers(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    fn validate(
        &self,
        request: &ExtendedRequest,
        size: u64,
    ) -> Result<Validated, (NbdError, &'static str)> {
        let ExtendedRequest { flags, command, cookie, offset, len } = *request;
        let invalid = |reason| Err((NbdError::Inval, reason));
        // A disconnect has no reply, so a bad flag cannot be reported.
        if command == cmd::DISC {
            return Ok(Validated::bare(Op::Disconnect, cookie));
        }
        let Command { op, own_flags, needs } = self.command(command)?;
        let writes = matches!(op, Op::Write | Op::Trim | Op::WriteZeroes);
        if writes && self.offers(tf::READ_ONLY) {
            return Err((NbdError::Perm, "the export is read-only"));
        }
        if !self.offers(needs) {
            return invalid("the export does not offer this command");
        }
        if flags & !self.allowed_flags(own_flags) != 0 {
            return invalid("the command does not take these flags");
        }
        if op == Op::Flush {
            if offset != 0 || len != 0 {
                return invalid("a flush must have offset 0 and length 0");
            }
            return Ok(Validated::bare(op, cookie));
        }
        self.check_range(op, request, size)?;
        let has = |flag| flags & flag != 0;
        Ok(Validated {
            op,
            cookie,
            offset,
            len,
            fua: writes && has(cmd_flags::FUA),
            no_hole: has(cmd_flags::NO_HOLE),
            fast_only: has(cmd_flags::FAST_ZERO),
            one: has(cmd_flags::REQ_ONE),
            one_chunk: has(cmd_flags::DF),
        })
    }

    /// Looks up a command that has a reply.
    fn command(&self, command: u16) -> Result<Command, (NbdError, &'static str)> {
        let (op, own_flags, needs) = match command {
            cmd::READ => (Op::Read, cmd_flags::DF, tf::HAS_FLAGS),
            cmd::WRITE => {
                // With extended headers, clients must set this flag.
                let own = if self.terms.extended { cmd_flags::PAYLOAD_LEN } else { 0 };
                (Op::Write, own, tf::HAS_FLAGS)
            }
            cmd::FLUSH => (Op::Flush, 0, tf::SEND_FLUSH),
            cmd::TRIM => (Op::Trim, 0, tf::SEND_TRIM),
            cmd::CACHE => (Op::Cache, 0, tf::SEND_CACHE),
            cmd::WRITE_ZEROES => {
                let own = cmd_flags::NO_HOLE | cmd_flags::FAST_ZERO;
                (Op::WriteZeroes, own, tf::SEND_WRITE_ZEROES)
            }
            cmd::BLOCK_STATUS if self.terms.block_status => {
                (Op::BlockStatus, cmd_flags::REQ_ONE, tf::HAS_FLAGS)
            }
            cmd::BLOCK_STATUS => {
                return Err((NbdError::Inval, "no metadata context was negotiated"));
            }
            _ => return Err((NbdError::Inval, "unknown command")),
        };
        Ok(Command { op, own_flags, needs })
    }

    /// Returns the flags that a command may contain. FUA is allowed with every command once it is
    /// offered; other flags only with their own command.
    fn allowed_flags(&self, own_flags: u16) -> u16 {
        let mut allowed = own_flags;
        for (flag, offer) in [
            (cmd_flags::FUA, tf::SEND_FUA),
            (cmd_flags::DF, tf::SEND_DF),
            (cmd_flags::FAST_ZERO, tf::SEND_FAST_ZERO),
        ] {
            if !self.offers(offer) {
                allowed &= !flag;
            } else if flag == cmd_flags::FUA {
                allowed |= flag;
            }
        }
        allowed
    }

    /// Checks offset and length against the export and the limits of one request.
    fn check_range(
        &self,
        op: Op,
        request: &ExtendedRequest,
        size: u64,
    ) -> Result<(), (NbdError, &'static str)> {
        let ExtendedRequest { flags, offset, len, .. } = *request;
        if len == 0 {
            return Err((NbdError::Inval, "the length is 0"));
        }
        if offset.checked_add(len).is_none_or(|end| end > size) {
            let full = matches!(op, Op::Write | Op::WriteZeroes);
            let error = if full { NbdError::NoSpc } else { NbdError::Inval };
            return Err((error, "the range goes past the end of the export"));
        }
        if matches!(op, Op::Read | Op::Write) && len > u64::from(self.max_payload) {
            // Only a structured read may fail with EOVERFLOW ("NBD_CMD_READ").
            let overflow = op == Op::Read && self.structured_replies();
            let error = if overflow { NbdError::Overflow } else { NbdError::Inval };
            return Err((error, "the length exceeds the maximum payload"));
        }
        if flags & cmd_flags::DF != 0 && len > u64::from(CHUNK_MAX) {
            return Err((NbdError::Overflow, "the length exceeds the maximum of one chunk"));
        }
        let block = u64::from(self.min_block);
        if !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
            self.check_part(op, flags)?;
        }
        Ok(())
    }
}

/// Properties of a command.
struct Command {
    op: Op,
    /// Command flags that only some commands take.
    own_flags: u16,
    /// Transmission flag of exports that offer the command.
    needs: u16,
}

impl Validated {
    const fn bare(op: Op, cookie: u64) -> Self {
        let (fua, no_hole, fast_only, one, one_chunk) = (false, false, false, false, false);
        Self { op, cookie, offset: 0, len: 0, fua, no_hole, fast_only, one, one_chunk }
    }

    /// Returns the number of payload bytes that follow the request on the stream.
    pub fn payload(&self) -> u32 {
        let len = if self.op == Op::Write { self.len } else { 0 };
        // A write's length is at most the maximum payload.
        u32::try_from(len).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests;
