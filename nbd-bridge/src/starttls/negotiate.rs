//! Option negotiation until the connection can be piped, over TLS or plain. No sockets, no TLS.
//!
//! The negotiation sits between the client and the engine. It forwards the engine's greeting and
//! the client's flags, then one option at a time with its replies, so that it always knows which
//! side sends next. It answers STARTTLS itself, and in `require` mode also every option that comes
//! before STARTTLS. It reads exactly the bytes of each option: plain text that a client or an
//! attacker sends after STARTTLS is left for TLS, which refuses it.
//!
//! Source: "Handshake", "TLS support" and "Option types" in the NBD specification.

use std::fmt;
use std::io::{self, Read, Write};

use crate::proto::wire::{Greeting, OptionHeader, OptionReplyHeader, opt, rep};
use crate::proto::{OPTION_SKIP_MAX, OPTIONS_MAX, RECEIVED_MAX, Refused, put_error, put_reply};

/// Whether clients must use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// TLS is optional.
    On,
    /// TLS is required.
    Require,
}

/// Next phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// STARTTLS was acknowledged: the client's next byte belongs to TLS.
    Handshake,
    /// All further bytes are exchanged between the client and the engine.
    Pipe,
    /// The client ended the handshake.
    Over,
}

/// Reason why a negotiation ended.
#[derive(Debug)]
pub(super) enum Stop {
    /// A socket error, or the end of a stream in the middle of a message.
    Io(io::Error),
    /// The client violated the protocol.
    Protocol(&'static str),
    /// The client requested an export without TLS, using an option that has no error reply.
    Plain,
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("the connection was closed")
            }
            Self::Io(error) => error.fmt(f),
            Self::Protocol(why) => f.write_str(why),
            Self::Plain => f.write_str("the client does not use TLS"),
        }
    }
}

/// Negotiation of one connection.
#[derive(Debug)]
pub(super) struct Negotiation {
    mode: TlsMode,
    /// The client uses TLS.
    secure: bool,
    /// An option was forwarded to the engine.
    begun: bool,
    options: u32,
    received: u64,
    /// An option was refused because it came without TLS.
    pub(super) refused: bool,
}

impl Negotiation {
    pub(super) fn new(mode: TlsMode) -> Self {
        Self { mode, secure: false, begun: false, options: 0, received: 0, refused: false }
    }

    /// Forwards the greeting and the client's flags.
    pub(super) fn greet(
        &self,
        client: &mut (impl Read + Write),
        engine: &mut (impl Read + Write),
    ) -> Result<(), Stop> {
        let mut greeting = [0; Greeting::LEN];
        engine.read_exact(&mut greeting)?;
        client.write_all(&greeting)?;
        let mut flags = [0; 4];
        client.read_exact(&mut flags)?;
        Ok(engine.write_all(&flags)?)
    }

    /// Records that TLS is established.
    pub(super) fn secured(&mut self) {
        self.secure = true;
    }

    /// Forwards options until the next phase is known.
    pub(super) fn options(
        &mut self,
        client: &mut (impl Read + Write),
        engine: &mut (impl Read + Write),
    ) -> Result<Next, Stop> {
        loop {
            let mut head = [0; OptionHeader::LEN];
            client.read_exact(&mut head)?;
            let wrong = |_| Stop::Protocol("wrong magic in an option header");
            let OptionHeader { option, len } = OptionHeader::decode(&head).map_err(wrong)?;
            if option == opt::ABORT {
                // The data of an ABORT is to be ignored.
                reply(client, |out| put_reply(out, option, rep::ACK, &[]))?;
                return Ok(Next::Over);
            }
            self.count(len)?;
            if option == opt::STARTTLS {
                skip(client, len)?;
                match self.starttls(len) {
                    None => {
                        reply(client, |out| put_reply(out, option, rep::ACK, &[]))?;
                        return Ok(Next::Handshake);
                    }
                    Some(refusal) => reply(client, |out| put_error(out, option, refusal))?,
                }
                continue;
            }
            if self.mode == TlsMode::Require && !self.secure {
                self.refused = true;
                if option == opt::EXPORT_NAME {
                    return Err(Stop::Plain);
                }
                skip(client, len)?;
                let refusal = (rep::ERR_TLS_REQD, "this server requires TLS");
                reply(client, |out| put_error(out, option, refusal))?;
                continue;
            }
            self.begun = true;
            engine.write_all(&head)?;
            copy(client, engine, len)?;
            if option == opt::EXPORT_NAME {
                return Ok(Next::Pipe);
            }
            if replies(engine, client)? == rep::ACK && option == opt::GO {
                return Ok(Next::Pipe);
            }
        }
    }

    /// Enforces the same limits as the engine.
    fn count(&mut self, len: u32) -> Result<(), Stop> {
        self.options += 1;
        self.received += OptionHeader::LEN as u64 + u64::from(len);
        if len > OPTION_SKIP_MAX {
            return Err(Stop::Protocol("an option with too much data"));
        }
        if self.options > OPTIONS_MAX || self.received > RECEIVED_MAX {
            return Err(Stop::Protocol("too many options"));
        }
        Ok(())
    }

    /// Returns the refusal of STARTTLS, or None to accept it.
    fn starttls(&self, len: u32) -> Option<Refused> {
        if len > 0 {
            return Some((rep::ERR_INVALID, "the option takes no data"));
        }
        if self.secure {
            return Some((rep::ERR_INVALID, "TLS is in use already"));
        }
        // State negotiated before TLS must not be used afterwards, and the engine remembers it.
        self.begun.then_some((rep::ERR_POLICY, "STARTTLS has to come before other options"))
    }
}

/// Sends one reply.
fn reply(client: &mut impl Write, put: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
    let mut out = Vec::new();
    put(&mut out);
    client.write_all(&out)?;
    client.flush()
}

fn skip(client: &mut impl Read, len: u32) -> io::Result<()> {
    copy(client, &mut io::sink(), len)
}

/// Copies exactly `len` bytes.
fn copy(from: &mut impl Read, to: &mut impl Write, len: u32) -> io::Result<()> {
    let copied = io::copy(&mut from.take(len.into()), to)?;
    if copied < u64::from(len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    to.flush()
}

/// Forwards the engine's replies to one option. Returns the type of the last reply.
fn replies(engine: &mut impl Read, client: &mut impl Write) -> Result<u32, Stop> {
    loop {
        let mut head = [0; OptionReplyHeader::LEN];
        engine.read_exact(&mut head)?;
        let wrong = |_| Stop::Protocol("a malformed reply");
        let OptionReplyHeader { reply, len, .. } =
            OptionReplyHeader::decode(&head).map_err(wrong)?;
        client.write_all(&head)?;
        copy(engine, client, len)?;
        if !matches!(reply, rep::SERVER | rep::INFO | rep::META_CONTEXT) {
            return Ok(reply);
        }
    }
}

#[cfg(test)]
#[path = "tests/negotiate.rs"]
mod tests;
