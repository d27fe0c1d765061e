//! [`ClientHandshake`]: requests one export from a server, with structured replies if supported.

use crate::proto::wire::{
    EXPORT_NAME_ZEROES, Greeting, OptionHeader, OptionReplyHeader, PAYLOAD_DEFAULT, STRING_MAX,
    WireError, client_flags, clip, handshake_flags, info, magic, opt, rep, take,
};

/// Maximum data length of an option reply.
const REPLY_MAX: u32 = 64 << 10;
/// Maximum number of option replies in a handshake.
const REPLIES_MAX: u32 = 256;

/// Export parameters offered by a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Size in bytes.
    pub size: u64,
    /// [`transmission_flags`](crate::proto::wire::transmission_flags).
    pub flags: u16,
    /// Reads are answered with structured replies.
    pub structured: bool,
    /// Offsets and lengths must be multiples of this.
    pub min_block: u32,
    /// Block size that the server prefers.
    pub preferred_block: u32,
    /// Maximum length of a read or write.
    pub max_payload: u32,
}

/// Reason why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The first bytes are not those of an NBD server.
    #[error("the server does not speak NBD")]
    NoNbd,
    /// The server supports only the handshake without options, which has no export names.
    #[error("the server supports only the oldstyle handshake")]
    Oldstyle,
    /// The server has no export with this name.
    #[error("the server has no such export{}", said(.0))]
    Unknown(String),
    /// The server requires TLS.
    #[error("the server requires TLS, which this client does not support")]
    Tls,
    /// The server sent an error reply: its code and message.
    #[error("the server refused the export (error {:#x}){}", .0, said(.1))]
    Refused(u32, String),
    /// The server violated the protocol.
    #[error("protocol violation by the server: {0}")]
    Malformed(&'static str),
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message:?}") }
}

/// Client side of one handshake.
#[derive(Debug)]
pub struct ClientHandshake {
    name: String,
    step: Step,
    buf: Vec<u8>,
    replies: u32,
    no_zeroes: bool,
    structured: bool,
    export: Option<(u64, u16)>,
    /// Minimum block size, preferred block size and maximum payload.
    blocks: (u32, u32, u32),
}

/// Message that the client is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Greeting,
    /// The answer to STRUCTURED_REPLY.
    Structured,
    /// The answers to GO.
    Go,
    /// The answer to EXPORT_NAME.
    ExportName,
}

impl ClientHandshake {
    /// Creates a handshake for the export `name`.
    pub fn new(name: &str) -> Self {
        Self {
            name: clip(name, STRING_MAX).to_owned(),
            step: Step::Greeting,
            buf: Vec::new(),
            replies: 0,
            no_zeroes: false,
            structured: false,
            export: None,
            blocks: (1, 4096, PAYLOAD_DEFAULT),
        }
    }

    /// Consumes bytes from the server and appends the bytes to send. Returns the number of bytes
    /// consumed and, at the end, the server's offer; remaining bytes belong to the transmission
    /// phase.
    ///
    /// # Errors
    /// The reason why the server cannot be used; the connection must be closed.
    pub fn feed(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Option<Offered>), HandshakeError> {
        let mut taken = 0;
        loop {
            let need = self.need()? - self.buf.len();
            let part = &input[taken..input.len().min(taken + need)];
            self.buf.extend_from_slice(part);
            taken += part.len();
            if part.len() < need {
                return Ok((taken, None));
            }
            // The header has arrived, but not its data.
            if self.need()? > self.buf.len() {
                continue;
            }
            let data = std::mem::take(&mut self.buf);
            if let Some(offered) = self.advance(&data, out)? {
                return Ok((taken, Some(offered)));
            }
        }
    }

    /// Returns the length of the expected message, or of the part whose length is known so far.
    fn need(&self) -> Result<usize, HandshakeError> {
        Ok(match self.step {
            Step::Greeting => Greeting::LEN,
            Step::ExportName if self.no_zeroes => 10,
            Step::ExportName => 10 + EXPORT_NAME_ZEROES,
            _ if self.buf.len() < OptionReplyHeader::LEN => OptionReplyHeader::LEN,
            _ => {
                let head = reply_head(&self.buf)?;
                if head.len > REPLY_MAX {
                    return Err(HandshakeError::Malformed("a reply of more than 64 KiB"));
                }
                OptionReplyHeader::LEN + head.len as usize
            }
        })
    }

    fn advance(
        &mut self,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Offered>, HandshakeError> {
        match self.step {
            Step::Greeting => self.greet(data, out).map(|()| None),
            Step::ExportName => {
                self.take_export(data)?;
                self.offered().map(Some)
            }
            Step::Structured | Step::Go => {
                let head = reply_head(data)?;
                self.replies += 1;
                if self.replies > REPLIES_MAX {
                    return Err(HandshakeError::Malformed("too many replies"));
                }
                let data = &data[OptionReplyHeader::LEN..];
                match self.step {
                    Step::Structured if head.option == opt::STRUCTURED_REPLY => {
                        self.structured = head.reply == rep::ACK;
                        self.go(out);
                        Ok(None)
                    }
                    Step::Go if head.option == opt::GO => self.answered(head.reply, data, out),
                    _ => Err(HandshakeError::Malformed("a reply to another option")),
                }
            }
        }
    }

    fn greet(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<(), HandshakeError> {
        let greeting = Greeting::decode(data).map_err(|_| HandshakeError::NoNbd)?;
        if greeting.version != magic::OPTION {
            return Err(HandshakeError::Oldstyle);
        }
        let offers = |flag| greeting.flags & flag != 0;
        let fixed = offers(handshake_flags::FIXED_NEWSTYLE);
        self.no_zeroes = offers(handshake_flags::NO_ZEROES);
        let fixed_flag = if fixed { client_flags::FIXED_NEWSTYLE } else { 0 };
        let zeroes_flag = if self.no_zeroes { client_flags::NO_ZEROES } else { 0 };
        out.extend((fixed_flag | zeroes_flag).to_be_bytes());
        if fixed {
            self.step = Step::Structured;
            put_option(out, opt::STRUCTURED_REPLY, &[]);
        } else {
            self.export_name(out);
        }
        Ok(())
    }

    fn go(&mut self, out: &mut Vec<u8>) {
        self.step = Step::Go;
        let name = self.name.as_bytes();
        #[allow(clippy::cast_possible_truncation, reason = "at most STRING_MAX")]
        let len = (name.len() as u32).to_be_bytes();
        let asked = [1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()].concat();
        put_option(out, opt::GO, &[&len, name, &asked[..]].concat());
    }

    fn export_name(&mut self, out: &mut Vec<u8>) {
        self.step = Step::ExportName;
        // A server that does not know GO has no structured replies worth negotiating.
        put_option(out, opt::EXPORT_NAME, self.name.as_bytes());
    }

    /// Handles an answer to GO.
    fn answered(
        &mut self,
        reply: u32,
        mut data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Offered>, HandshakeError> {
        let text = || clip(&String::from_utf8_lossy(data), STRING_MAX).to_owned();
        match reply {
            rep::ACK => return self.offered().map(Some),
            rep::INFO => {
                let short = || HandshakeError::Malformed("information that is too short");
                let kind = u16::from_be_bytes(take(&mut data).ok_or_else(short)?);
                if kind == info::EXPORT {
                    self.take_export(data)?;
                } else if kind == info::BLOCK_SIZE {
                    let mut word = || take(&mut data).map(u32::from_be_bytes).ok_or_else(short);
                    self.blocks = (word()?, word()?, word()?);
                }
            }
            rep::ERR_UNSUP => self.export_name(out),
            rep::ERR_UNKNOWN => return Err(HandshakeError::Unknown(text())),
            rep::ERR_TLS_REQD => return Err(HandshakeError::Tls),
            error if error & rep::ERROR_BIT != 0 => {
                return Err(HandshakeError::Refused(error & !rep::ERROR_BIT, text()));
            }
            _ => return Err(HandshakeError::Malformed("a reply of an unknown kind")),
        }
        Ok(None)
    }

    fn take_export(&mut self, mut data: &[u8]) -> Result<(), HandshakeError> {
        let short = || HandshakeError::Malformed("an export without a size");
        let size = u64::from_be_bytes(take(&mut data).ok_or_else(short)?);
        self.export = Some((size, u16::from_be_bytes(take(&mut data).ok_or_else(short)?)));
        Ok(())
    }

    fn offered(&self) -> Result<Offered, HandshakeError> {
        let wrong = |what| Err(HandshakeError::Malformed(what));
        let (min_block, preferred_block, max_payload) = self.blocks;
        let Some((size, flags)) = self.export else { return wrong("no size of the export") };
        if !min_block.is_power_of_two() || max_payload < min_block {
            return wrong("impossible block sizes");
        }
        let structured = self.structured;
        Ok(Offered { size, flags, structured, min_block, preferred_block, max_payload })
    }
}

fn reply_head(data: &[u8]) -> Result<OptionReplyHeader, HandshakeError> {
    OptionReplyHeader::decode(data).map_err(|error| match error {
        WireError::Magic(_) => HandshakeError::Malformed("a reply without its magic"),
        WireError::Short { .. } => HandshakeError::Malformed("a reply that is too short"),
    })
}

fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    #[allow(clippy::cast_possible_truncation, reason = "a name and a few words")]
    let len = data.len() as u32;
    out.extend(OptionHeader { option, len }.encode());
    out.extend(data);
}
