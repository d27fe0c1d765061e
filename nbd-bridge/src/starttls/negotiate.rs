//! The negotiation until a connection's way is clear: over TLS, or plain. No sockets, no TLS.
//!
//! It stands between client and engine and passes the engine's greeting and the client's flags on,
//! then one option at a time with the replies to it, so that it always knows whose turn it is. It
//! answers STARTTLS itself, and in the mode `require` everything that comes before it. It reads
//! exactly the bytes of each option: what a client, or somebody on the way, sends in plain text
//! behind STARTTLS is left for TLS, which refuses it.
//!
//! Source: "Handshake", "TLS support" and "Option types" of the NBD document.

use std::fmt;
use std::io::{self, Read, Write};

use crate::proto::wire::{Greeting, OptionHeader, OptionReplyHeader, opt, rep};
use crate::proto::{OPTION_SKIP_MAX, OPTIONS_MAX, RECEIVED_MAX, Refused, put_error, put_reply};

/// Whether clients have to use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// They may.
    On,
    /// They have to.
    Require,
}

/// How it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// STARTTLS was acknowledged: the client's next byte belongs to TLS.
    Handshake,
    /// The rest is between client and engine.
    Pipe,
    /// The client asked to end.
    Over,
}

/// Why a negotiation ended.
#[derive(Debug)]
pub(super) enum Stop {
    /// A socket's error, or an end in the middle of a message.
    Io(io::Error),
    /// The client broke the protocol.
    Protocol(&'static str),
    /// The client asked for an export in a way that has no error reply, and without TLS.
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

/// One connection's negotiation.
#[derive(Debug)]
pub(super) struct Negotiation {
    mode: TlsMode,
    /// The client is spoken to over TLS.
    secure: bool,
    /// The engine has had an option.
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

    /// Passes the greeting and the client's flags on.
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

    /// TLS is established.
    pub(super) fn secured(&mut self) {
        self.secure = true;
    }

    /// Passes options on until the way is clear.
    pub(super) fn options(
        &mut self,
        client: &mut (impl Read + Write),
        engine: &mut (impl Read + Write),
    ) -> Result<Next, Stop> {
        loop {
            let mut head = [0; OptionHeader::LEN];
            client.read_exact(&mut head)?;
            let wrong = |_| Stop::Protocol("wrong magic at the head of an option");
            let OptionHeader { option, len } = OptionHeader::decode(&head).map_err(wrong)?;
            if option == opt::ABORT {
                // Its data is to be ignored.
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

    /// The same bounds that the engine has.
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

    /// The refusal of STARTTLS, if it is to be refused.
    fn starttls(&self, len: u32) -> Option<Refused> {
        if len > 0 {
            return Some((rep::ERR_INVALID, "the option takes no data"));
        }
        if self.secure {
            return Some((rep::ERR_INVALID, "TLS is in use already"));
        }
        // Nothing that was negotiated before may count afterwards, and the engine remembers.
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

/// Copies exactly so many bytes.
fn copy(from: &mut impl Read, to: &mut impl Write, len: u32) -> io::Result<()> {
    let copied = io::copy(&mut from.take(len.into()), to)?;
    if copied < u64::from(len) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    to.flush()
}

/// Passes the engine's replies to one option on. Returns the type of the last one.
fn replies(engine: &mut impl Read, client: &mut impl Write) -> Result<u32, Stop> {
    loop {
        let mut head = [0; OptionReplyHeader::LEN];
        engine.read_exact(&mut head)?;
        let wrong = |_| Stop::Protocol("a reply that cannot be read");
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
