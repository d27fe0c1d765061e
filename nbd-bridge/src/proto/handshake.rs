//! `Handshake`: server side of the fixed newstyle negotiation, as a state machine without IO.
//!
//! The caller sends what [`Handshake::start`] appends, then feeds every byte that the client sends
//! and sends every byte that is appended, until the outcome is neither `NeedMore` nor `Reply`. How
//! the input is split makes no difference. No client can make the handshake hold more than
//! [`OPTION_DATA_MAX`] bytes, read more than [`RECEIVED_MAX`] or answer more than [`OPTIONS_MAX`]
//! options; the caller enforces timeouts. The listener's connections run it before the transmission
//! phase.
//!
//! Offered: EXPORT_NAME, ABORT, LIST, INFO, GO, STRUCTURED_REPLY, EXTENDED_HEADERS, and
//! LIST_META_CONTEXT and SET_META_CONTEXT with one context, `base:allocation`. Everything else is
//! answered with UNSUP, TLS included.
//!
//! Source: "Handshake", "Option types" and "Option reply types" in the NBD specification.

use super::export_info::{self, ExportInfo};
use super::transmission::{Rules, Terms};
use super::wire::{
    EXPORT_NAME_ZEROES, Greeting, OptionHeader, OptionReplyHeader, STRING_MAX, base_allocation,
    client_flags, clip, handshake_flags, info, magic, opt, rep, take,
};

/// Maximum option data that is stored and parsed: a name of 4096 bytes and two thousand information
/// requests.
pub(crate) const OPTION_DATA_MAX: u32 = 8 << 10;
/// Maximum option data that is skipped and answered with an error; beyond it the connection ends.
pub(crate) const OPTION_SKIP_MAX: u32 = 256 << 10;
/// Maximum number of options in one handshake, including the last. Listing an export takes two.
pub(crate) const OPTIONS_MAX: u32 = 1024;
/// Maximum number of bytes from the client in one handshake, including announced option data.
pub(crate) const RECEIVED_MAX: u64 = 1 << 20;

/// The exports that clients may see. Used only during the handshake.
pub trait Exports {
    /// Calls `visit` for every export, in a stable order.
    fn list(&self, visit: &mut dyn FnMut(&ExportInfo));

    /// Returns the export with this name. The empty name means the default export, if there is one.
    fn lookup(&self, name: &str) -> Option<ExportInfo>;
}

/// Result of a successful handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// The export under its canonical name.
    pub export: ExportInfo,
    /// Features that the client requested.
    pub terms: Terms,
    /// The client asked to omit the 124 zeroes after EXPORT_NAME.
    pub no_zeroes: bool,
}

impl Negotiated {
    /// Returns the rules for this connection's requests.
    pub fn rules(&self) -> Rules {
        Rules::new(&self.export, self.terms)
    }
}

/// State of the handshake after some input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All input was consumed and more is needed.
    NeedMore,
    /// An option was answered. Send what was appended, then feed the rest of the input or wait for
    /// more. One option per call bounds the appended bytes.
    Reply,
    /// Send what was appended; the rest of the input belongs to the transmission phase.
    Ready(Box<Negotiated>),
    /// The client ended the handshake. Send what was appended, then close.
    Abort,
    /// The client violated the protocol, or sent a request that can only be refused by closing.
    /// Close; nothing was appended in this call.
    Close(ProtocolError),
}

/// Reason why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// Flags other than [`client_flags::KNOWN`].
    #[error("unknown client flags {0:#x}")]
    ClientFlags(u32),
    /// An option does not start with `IHAVEOPT`.
    #[error("wrong magic in an option header")]
    OptionMagic,
    /// A client that does not speak fixed newstyle sent an option other than EXPORT_NAME.
    #[error("option {0} from a client without the fixed newstyle flag")]
    NotFixed(u32),
    /// Option data that is too long to be skipped.
    #[error("option {option} with {len} bytes of data")]
    OptionTooLong {
        /// Type of the option.
        option: u32,
        /// Announced length.
        len: u32,
    },
    /// More options than any client needs.
    #[error("too many options")]
    TooManyOptions,
    /// More bytes than any client needs.
    #[error("too many bytes of options")]
    TooManyBytes,
    /// EXPORT_NAME with a name that is too long, not UTF-8 or contains a NUL.
    #[error("malformed export name")]
    BadName,
    /// EXPORT_NAME with an unknown name; this option has no error reply.
    #[error("unknown export")]
    UnknownExport,
    /// EXPORT_NAME for an export whose description violates the protocol.
    #[error("the export cannot be served: {0}")]
    BadExport(export_info::BadExport),
    /// Input after the end of the handshake, which is a bug in the caller.
    #[error("the handshake is over")]
    Over,
}

/// Server side of one handshake.
#[derive(Debug)]
pub struct Handshake {
    step: Step,
    /// Header or data received so far.
    buf: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    structured_replies: bool,
    extended: bool,
    /// The export for which the client has chosen `base:allocation`.
    context_of: Option<String>,
    options: u32,
    received: u64,
}

/// Meaning of the next bytes, in the order of a handshake.
#[derive(Clone, Copy, Debug)]
enum Step {
    ClientFlags,
    Header,
    /// Data of a supported option.
    Data {
        option: u32,
        len: u32,
    },
    /// Data to be skipped before `refusal` is sent.
    Skip {
        option: u32,
        left: u32,
        refusal: Refused,
    },
    Over,
}

/// An error reply: its type and the message for users.
pub(crate) type Refused = (u32, &'static str);

const CLIENT_FLAGS_LEN: usize = 4;

impl Handshake {
    /// Starts a handshake: appends the greeting.
    pub fn start(out: &mut Vec<u8>) -> Self {
        let flags = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
        out.extend_from_slice(&Greeting { version: magic::OPTION, flags }.encode());
        Self {
            step: Step::ClientFlags,
            buf: Vec::new(),
            fixed: false,
            no_zeroes: false,
            structured_replies: false,
            extended: false,
            context_of: None,
            options: 0,
            received: 0,
        }
    }

    /// Consumes input and appends answers to `out`. Returns the number of bytes of `input`
    /// consumed, and the state.
    pub fn feed(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> (usize, Outcome) {
        let mut rest = input;
        let outcome = loop {
            if let Some(outcome) = self.advance(&mut rest, exports, out) {
                break outcome;
            }
        };
        if !matches!(outcome, Outcome::NeedMore | Outcome::Reply) {
            self.step = Step::Over;
            self.buf = Vec::new();
        }
        (input.len() - rest.len(), outcome)
    }

    /// Performs one step. Returns None when the next step can be tried immediately.
    fn advance(
        &mut self,
        rest: &mut &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Option<Outcome> {
        match self.step {
            Step::ClientFlags => {
                if !self.gather(rest, CLIENT_FLAGS_LEN) {
                    return Some(Outcome::NeedMore);
                }
                let flags = be32(&mut self.buf.as_slice()).unwrap_or(0);
                self.buf.clear();
                if flags & !client_flags::KNOWN != 0 {
                    return Some(Outcome::Close(ProtocolError::ClientFlags(flags)));
                }
                self.fixed = flags & client_flags::FIXED_NEWSTYLE != 0;
                self.no_zeroes = flags & client_flags::NO_ZEROES != 0;
                self.step = Step::Header;
                None
            }
            Step::Header => {
                if !self.gather(rest, OptionHeader::LEN) {
                    return Some(Outcome::NeedMore);
                }
                let head = OptionHeader::decode(&self.buf);
                self.buf.clear();
                match head {
                    Ok(head) => self.open_option(head, out),
                    Err(_) => Some(Outcome::Close(ProtocolError::OptionMagic)),
                }
            }
            Step::Data { option, len } => {
                if !self.gather(rest, len as usize) {
                    return Some(Outcome::NeedMore);
                }
                self.step = Step::Header;
                let mut data = std::mem::take(&mut self.buf);
                let outcome = self.answer(option, &data, exports, out);
                data.clear();
                self.buf = data;
                Some(outcome)
            }
            Step::Skip { option, left, refusal } => {
                let now = rest.len().min(left as usize);
                *rest = &rest[now..];
                // `now` is at most `left`, so it fits.
                let left = left - now as u32;
                if left > 0 {
                    self.step = Step::Skip { option, left, refusal };
                    return Some(Outcome::NeedMore);
                }
                self.step = Step::Header;
                put_error(out, option, refusal);
                Some(Outcome::Reply)
            }
            Step::Over => Some(Outcome::Close(ProtocolError::Over)),
        }
    }

    /// Moves bytes from `rest` to the buffer until it holds `want` bytes. Returns true once it
    /// does.
    fn gather(&mut self, rest: &mut &[u8], want: usize) -> bool {
        let missing = want.saturating_sub(self.buf.len());
        let (now, later) = rest.split_at(missing.min(rest.len()));
        self.buf.extend_from_slice(now);
        *rest = later;
        now.len() == missing
    }

    /// Validates the header of an option and decides how to treat its data.
    fn open_option(&mut self, head: OptionHeader, out: &mut Vec<u8>) -> Option<Outcome> {
        let OptionHeader { option, len } = head;
        let close = |error| Some(Outcome::Close(error));
        if !self.fixed && option != opt::EXPORT_NAME {
            return close(ProtocolError::NotFixed(option));
        }
        if option == opt::ABORT {
            // The data must be ignored, and the client may close before all of it has arrived.
            put_reply(out, option, rep::ACK, &[]);
            return Some(Outcome::Abort);
        }
        if len > OPTION_SKIP_MAX {
            return close(ProtocolError::OptionTooLong { option, len });
        }
        self.options += 1;
        if self.options > OPTIONS_MAX {
            return close(ProtocolError::TooManyOptions);
        }
        self.received += OptionHeader::LEN as u64 + u64::from(len);
        if self.received > RECEIVED_MAX {
            return close(ProtocolError::TooManyBytes);
        }
        let skip = |refusal| Step::Skip { option, left: len, refusal };
        self.step = match option {
            opt::EXPORT_NAME if len as usize > STRING_MAX => return close(ProtocolError::BadName),
            opt::EXPORT_NAME => Step::Data { option, len },
            opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT
                if len <= OPTION_DATA_MAX =>
            {
                Step::Data { option, len }
            }
            opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                skip((rep::ERR_TOO_BIG, "too much data in the option"))
            }
            opt::LIST | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS if len == 0 => {
                Step::Data { option, len }
            }
            opt::LIST | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS | opt::STARTTLS
                if len > 0 =>
            {
                skip((rep::ERR_INVALID, "the option takes no data"))
            }
            opt::STARTTLS => skip((rep::ERR_UNSUP, "this server has no TLS")),
            _ => skip((rep::ERR_UNSUP, "unknown option")),
        };
        None
    }

    /// Answers an option whose data is complete.
    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Outcome {
        match option {
            opt::EXPORT_NAME => return self.export_name(data, exports, out),
            opt::INFO | opt::GO => match self.info_or_go(option, data, exports, out) {
                Ok(terms) if option == opt::GO => return Outcome::Ready(Box::new(terms)),
                Ok(_) => {}
                Err(refusal) => put_error(out, option, refusal),
            },
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                if let Err(refusal) = self.meta_context(option, data, exports, out) {
                    put_error(out, option, refusal);
                }
            }
            opt::LIST => {
                exports.list(&mut |export| {
                    let name = export.name.as_bytes();
                    // A name that cannot be requested is not worth listing.
                    if export.name.len() > STRING_MAX {
                        return;
                    }
                    let name_len = (name.len() as u32).to_be_bytes();
                    let text = clip(&export.description, STRING_MAX).as_bytes();
                    put_reply(out, option, rep::SERVER, &[&name_len, name, text]);
                });
                put_reply(out, option, rep::ACK, &[]);
            }
            opt::EXTENDED_HEADERS => {
                (self.structured_replies, self.extended) = (true, true);
                put_reply(out, option, rep::ACK, &[]);
            }
            opt::STRUCTURED_REPLY if self.extended => {
                let text = "extended headers are in use already";
                put_error(out, option, (rep::ERR_EXT_HEADER_REQD, text));
            }
            // STRUCTURED_REPLY: `open_option` passes no other option. Repeating it changes nothing.
            _ => {
                self.structured_replies = true;
                put_reply(out, option, rep::ACK, &[]);
            }
        }
        Outcome::Reply
    }

    fn export_name(&self, data: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Outcome {
        let Some(name) = string(data) else {
            return Outcome::Close(ProtocolError::BadName);
        };
        let Some(export) = exports.lookup(name) else {
            return Outcome::Close(ProtocolError::UnknownExport);
        };
        if let Err(bad) = export.check() {
            return Outcome::Close(ProtocolError::BadExport(bad));
        }
        out.extend_from_slice(&export.size.to_be_bytes());
        let flags = export.transmission_flags(self.structured_replies);
        out.extend_from_slice(&flags.to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
        }
        Outcome::Ready(Box::new(self.terms(export, false)))
    }

    /// Appends the information replies and the acknowledgment, or returns the error to reply with.
    fn info_or_go(
        &self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Negotiated, Refused> {
        let InfoRequest { name, wants_name, wants_description, wants_sizes } = parse_info(data)?;
        let export = exports.lookup(name).ok_or(UNKNOWN_EXPORT)?;
        if export.check().is_err() {
            return Err((rep::ERR_POLICY, "the export is misconfigured; see the server's log"));
        }
        let mut put_info = |kind: u16, parts: [&[u8]; 3]| {
            let [a, b, c] = parts;
            put_reply(out, option, rep::INFO, &[&kind.to_be_bytes(), a, b, c]);
        };
        let flags = export.transmission_flags(self.structured_replies).to_be_bytes();
        put_info(info::EXPORT, [&export.size.to_be_bytes(), &flags, &[]]);
        if wants_name {
            put_info(info::NAME, [export.name.as_bytes(), &[], &[]]);
        }
        if wants_description && !export.description.is_empty() {
            put_info(info::DESCRIPTION, [export.description.as_bytes(), &[], &[]]);
        }
        // Sent even if not requested when the client would otherwise run into errors ("Size
        // constraints").
        if wants_sizes || export.has_own_sizes() {
            let sizes = [export.min_block, export.preferred_block, export.max_payload];
            let [min, preferred, max] = sizes.map(u32::to_be_bytes);
            put_info(info::BLOCK_SIZE, [&min, &preferred, &max]);
        }
        put_reply(out, option, rep::ACK, &[]);
        Ok(self.terms(export, wants_sizes))
    }

    /// Lists the contexts that the client asks for, or selects them instead of the previous ones.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let sets = option == opt::SET_META_CONTEXT;
        if sets {
            self.context_of = None;
        }
        if !self.structured_replies {
            return Err((rep::ERR_INVALID, "negotiate structured replies first"));
        }
        let mut rest = data;
        let name = name(&mut rest)?;
        let count = be32(&mut rest).ok_or(CUT)?;
        let mut wanted = count == 0 && !sets;
        for _ in 0..count {
            let len = be32(&mut rest).ok_or(CUT)? as usize;
            let (query, behind) = rest.split_at_checked(len).ok_or(CUT)?;
            rest = behind;
            let all = !sets && query == base_allocation::NAMESPACE.as_bytes();
            wanted |= all || query == base_allocation::NAME.as_bytes();
        }
        if !rest.is_empty() {
            return Err(NOT_AS_LONG);
        }
        let export = exports.lookup(name).ok_or(UNKNOWN_EXPORT)?;
        if wanted && export.extents {
            let id = if sets { base_allocation::ID } else { 0 };
            let parts = [&id.to_be_bytes()[..], base_allocation::NAME.as_bytes()];
            put_reply(out, option, rep::META_CONTEXT, &parts);
            if sets {
                self.context_of = Some(export.name);
            }
        }
        put_reply(out, option, rep::ACK, &[]);
        Ok(())
    }

    fn terms(&self, export: ExportInfo, keeps_blocks: bool) -> Negotiated {
        let terms = Terms {
            structured_replies: self.structured_replies,
            keeps_blocks,
            block_status: self.context_of.as_ref() == Some(&export.name),
            extended: self.extended,
        };
        Negotiated { export, terms, no_zeroes: self.no_zeroes }
    }
}

const CUT: Refused = (rep::ERR_INVALID, "the option is shorter than its fields");
const NOT_AS_LONG: Refused = (rep::ERR_INVALID, "the option is not as long as its fields");
const UNKNOWN_EXPORT: Refused = (rep::ERR_UNKNOWN, "this server has no export of that name");

/// Data of INFO and GO. Unknown information requests are ignored, as the specification requires,
/// and repeated ones are accepted.
struct InfoRequest<'a> {
    name: &'a str,
    wants_name: bool,
    wants_description: bool,
    wants_sizes: bool,
}

fn parse_info(data: &[u8]) -> Result<InfoRequest<'_>, Refused> {
    let mut rest = data;
    let name = name(&mut rest)?;
    let count = usize::from(take(&mut rest).map(u16::from_be_bytes).ok_or(CUT)?);
    if rest.len() != 2 * count {
        return Err(NOT_AS_LONG);
    }
    let wants = |kind: u16| rest.chunks_exact(2).any(|pair| pair == kind.to_be_bytes());
    Ok(InfoRequest {
        name,
        wants_name: wants(info::NAME),
        wants_description: wants(info::DESCRIPTION),
        wants_sizes: wants(info::BLOCK_SIZE),
    })
}

/// Parses the name of an export, which follows its length.
fn name<'a>(rest: &mut &'a [u8]) -> Result<&'a str, Refused> {
    let len = be32(rest).ok_or(CUT)? as usize;
    let (name, behind) = rest.split_at_checked(len).ok_or(CUT)?;
    *rest = behind;
    if name.len() > STRING_MAX {
        return Err((rep::ERR_TOO_BIG, "the name is longer than 4096 bytes"));
    }
    string(name).ok_or((rep::ERR_INVALID, "the name is not UTF-8 or contains a NUL"))
}

/// Checks a string against the specification's rules, apart from its length.
fn string(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|s| !s.contains('\0'))
}

fn be32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_be_bytes)
}

/// Appends an error reply.
pub(crate) fn put_error(out: &mut Vec<u8>, option: u32, (reply, text): Refused) {
    put_reply(out, option, reply, &[text.as_bytes()]);
}

/// Appends an option reply. The parts are two strings and a few numbers at most, so their sum is
/// far below the limit of the length field.
pub(crate) fn put_reply(out: &mut Vec<u8>, option: u32, reply: u32, parts: &[&[u8]]) {
    let len = parts.iter().map(|part| part.len()).sum::<usize>() as u32;
    out.extend_from_slice(&OptionReplyHeader { option, reply, len }.encode());
    for part in parts {
        out.extend_from_slice(part);
    }
}

#[cfg(test)]
mod tests;
