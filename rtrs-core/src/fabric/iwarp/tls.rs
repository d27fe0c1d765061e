//! Record layer of a connection over TLS: seals the output of the stream machine and opens its
//! input, without access to sockets or clocks.
//!
//! rustls performs the handshake (`tls/handshake.rs`). Its unbuffered interface would copy each
//! record into separate memory when opening it, and allocate when sealing. So after the handshake
//! this module handles the records itself: rustls' decrypter opens them where they were received,
//! in the machine's staging, and `ring` seals them where they are sent from, with nonces and
//! additional data from rustls. Nothing is allocated per record. New keys come from rustls.
//!
//! A record that cannot be opened, is longer than allowed, or holds anything but data, an alert or
//! a KeyUpdate ends the connection with an alert (RFC 8446 section 6). So does a flood of
//! KeyUpdates or of empty records.

use std::fmt;
use std::io;
use std::sync::Arc;

use ring::aead::{self, Aad, LessSafeKey, UnboundKey};
use rustls::Tls13CipherSuite;
use rustls::crypto::cipher::{InboundOpaqueMessage, Iv, MessageDecrypter, Nonce, make_tls13_aad};
use rustls::{AlertDescription, ConnectionTrafficSecrets, ContentType, ProtocolVersion};

use super::batch::TX_STAGE;
use super::qp::QpMachine;
use crate::limits::TLS_CONNECTION_BUFFERS;
use crate::mem::{IoVecs, MemSlice, Region};
use crate::tls::{Credentials, Secrets, Session, alert_text};

/// Maximum content length of a record (RFC 8446 section 5.1).
const CONTENT_MAX: usize = 16 << 10;
/// Length of a record's header.
const HEAD: usize = 5;
/// Bytes added by sealing: the content type and the tag.
const SEAL: usize = 1 + 16;
/// Maximum length of a sent record.
const RECORD: usize = HEAD + CONTENT_MAX + SEAL;
/// Maximum body length of a received record (RFC 8446 section 5.2).
const BODY_MAX: usize = CONTENT_MAX + 256;
/// Size of receive staging: the longest frame, the longest record after it, and room for several
/// more.
pub(super) const TLS_STAGE: usize = 128 << 10;
/// Size of the buffer for the five sealed records that are sent together. With more records, the
/// peer waits while this end seals, and then this end waits while the peer opens; with fewer,
/// system calls cost more (docs/explanation/benchmarks.md).
pub(super) const TLS_SEND: usize = 84 << 10;

/// Number of records after which a key is replaced: half the limit for AES-GCM (RFC 8446 section
/// 5.5).
pub(super) const KEY_RECORDS: u64 = if cfg!(test) { 2 << 10 } else { 1 << 23 };
/// Maximum number of KeyUpdates that a peer may send in a burst, and the number of records after
/// which it may send one more.
const UPDATES_MAX: u32 = 4;
const UPDATE_EVERY: u32 = 1024;
/// Maximum number of consecutive records without content.
const EMPTY_MAX: u32 = 32;

const KEY_UPDATE: u8 = 24;
const SESSION_TICKET: u8 = 4;

const _: () = assert!((TLS_STAGE + TX_STAGE + TLS_SEND) as u64 == TLS_CONNECTION_BUFFERS);
const _: () = assert!(TLS_SEND / RECORD == 5);
const _: () = assert!(TLS_STAGE >= super::mpa::FPDU_MAX + HEAD + BODY_MAX + 4096);

/// Kind of a received record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// Data of the stream, decrypted in place.
    Data { at: usize, len: usize },
    /// No data for the stream.
    Other,
    /// The peer will send no more data.
    Closed,
}

/// Reason why the connection must end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TlsFault {
    /// The peer violated the protocol and is sent this alert.
    Peer(AlertDescription, &'static str),
    /// The peer sent an alert.
    Alert(String),
}

/// Sealing key of one direction.
pub(super) struct Sealer {
    key: LessSafeKey,
    iv: Iv,
    number: u64,
}

impl Sealer {
    /// Creates the key from the pair that rustls returns: the first record's number, and the
    /// secrets.
    pub(super) fn new(tx: (u64, ConnectionTrafficSecrets)) -> io::Result<Self> {
        let (number, secrets) = tx;
        let (algorithm, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&aead::AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&aead::AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                (&aead::CHACHA20_POLY1305, key, iv)
            }
            _ => return Err(unusable()),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unusable())?;
        Ok(Self { key: LessSafeKey::new(key), iv, number })
    }

    /// Seals the content that follows the space for a header. Returns the length of the record.
    pub(super) fn seal(
        &mut self,
        record: &mut [u8],
        content: usize,
        kind: ContentType,
    ) -> io::Result<usize> {
        let end = HEAD + content + 1;
        record[end - 1] = kind.into();
        // The header is the additional data (RFC 8446 section 5.2).
        let header = make_tls13_aad(content + SEAL);
        let nonce = aead::Nonce::assume_unique_for_key(Nonce::new(&self.iv, self.number).0);
        let body = &mut record[HEAD..end];
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), body);
        let tag = tag.map_err(|_| io::Error::other("cannot seal a record"))?;
        record[..HEAD].copy_from_slice(&header);
        record[end..end + tag.as_ref().len()].copy_from_slice(tag.as_ref());
        self.number += 1;
        Ok(end + tag.as_ref().len())
    }
}

fn unusable() -> io::Error {
    io::Error::other("ring rejects the key")
}

fn opener(
    suite: &Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> io::Result<Box<dyn MessageDecrypter>> {
    let (ConnectionTrafficSecrets::Aes128Gcm { key, iv }
    | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
    | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv }) = secrets
    else {
        return Err(unusable());
    };
    Ok(suite.aead_alg.decrypter(key, iv))
}

/// A peer's allowance for records that carry no data.
struct Allowance {
    /// Number of KeyUpdates that the peer may send in a burst.
    updates: u32,
    /// Records with data since `updates` last grew.
    records: u32,
    /// Consecutive records without content.
    empty: u32,
}

impl Allowance {
    const fn new() -> Self {
        Self { updates: UPDATES_MAX, records: 0, empty: 0 }
    }

    fn take_empty_record(&mut self) -> Result<(), TlsFault> {
        self.empty += 1;
        if self.empty > EMPTY_MAX {
            let text = "too many records without content";
            return Err(fault(AlertDescription::UnexpectedMessage, text));
        }
        Ok(())
    }

    fn take_data_record(&mut self) {
        self.empty = 0;
        self.records += 1;
        if self.records >= UPDATE_EVERY {
            self.records = 0;
            self.updates = (self.updates + 1).min(UPDATES_MAX);
        }
    }

    fn take_key_update(&mut self) -> Result<(), TlsFault> {
        let Some(left) = self.updates.checked_sub(1) else {
            return Err(fault(AlertDescription::UnexpectedMessage, "too many KeyUpdates"));
        };
        self.updates = left;
        Ok(())
    }
}

/// Record layer of one connection.
pub(super) struct TlsStream {
    suite: &'static Tls13CipherSuite,
    secrets: Secrets,
    credentials: Credentials,
    opener: Box<dyn MessageDecrypter>,
    opened: u64,
    sealer: Sealer,
    /// Start of the received records that have not been opened yet, in the machine's staging.
    start: usize,
    end: usize,
    /// Buffer for sealed records.
    sealed: Arc<Region>,
    /// Output of the machine that has not been sealed yet.
    pub(super) plain: Box<IoVecs>,
    /// Whether `plain` holds a batch from the machine.
    pub(super) in_batch: bool,
    /// Whether the peer requested a new sending key.
    update_due: bool,
    alert_due: Option<AlertDescription>,
    /// Whether an alert was sent; nothing else may be sent after it.
    silent: bool,
    allowance: Allowance,
}

impl TlsStream {
    /// Creates the record layer of an established session; `rest` was received after its handshake.
    ///
    /// # Errors
    /// Returns the system's error if the memory cannot be allocated.
    pub(super) fn new(
        session: Session,
        rest: &[u8],
        machine: &QpMachine,
        slices: usize,
    ) -> io::Result<Self> {
        let Session { suite, tx, rx: (opened, rx), secrets, credentials, .. } = session;
        if rest.len() > machine.stage.len() {
            return Err(io::Error::other("too many bytes after the handshake"));
        }
        machine.stage.copy_in(0, rest);
        Ok(Self {
            suite,
            secrets,
            credentials,
            opener: opener(suite, rx)?,
            opened,
            sealer: Sealer::new(tx)?,
            start: 0,
            end: rest.len(),
            sealed: Region::new(TLS_SEND)?,
            plain: IoVecs::new(slices),
            in_batch: false,
            update_due: false,
            alert_due: None,
            silent: false,
            allowance: Allowance::new(),
        })
    }

    /// Adds the destination of the next received bytes to `iov`.
    pub(super) fn rx_prepare(&mut self, machine: &mut QpMachine, iov: &mut IoVecs) {
        iov.clear();
        let (_, staged) = machine.staged();
        let len = machine.stage.len();
        if machine.failure.is_some() || (staged == 0 && self.start == self.end) {
            (self.start, self.end) = (0, 0);
            if machine.failure.is_none() {
                machine.move_staged();
            }
        } else if len - self.end < len / 2 {
            machine.move_staged();
            let rest = self.end - self.start;
            machine.stage.copy_from(staged, &machine.stage, self.start, rest);
            (self.start, self.end) = (staged, staged + rest);
        }
        if let Some(room) = machine.stage.slice(self.end, len - self.end) {
            iov.push(room);
        }
    }

    /// Records that `count` bytes arrived at the destination from `rx_prepare`.
    pub(super) fn arrived(&mut self, count: usize) {
        self.end += count;
    }

    /// Opens the next whole record in staging. Returns None if there is none.
    pub(super) fn next(&mut self, stage: &mut [u8]) -> Result<Option<Record>, TlsFault> {
        let Some(head) = stage[self.start..self.end].first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let body = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[0] != u8::from(ContentType::ApplicationData) {
            return Err(match head[0] {
                20..=22 => fault(AlertDescription::UnexpectedMessage, "a record in clear text"),
                _ => fault(AlertDescription::DecodeError, "bytes that are not a TLS record"),
            });
        }
        if body > BODY_MAX {
            return Err(fault(AlertDescription::RecordOverflow, "a record that is too long"));
        }
        let from = self.start + HEAD;
        if self.end < from + body {
            return Ok(None);
        }
        let number = self.opened;
        self.opened += 1;
        self.start = from + body;
        let (kind, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        let sealed = InboundOpaqueMessage::new(kind, version, &mut stage[from..from + body]);
        let Ok(open) = self.opener.decrypt(sealed, number) else {
            let text = "a record that cannot be decrypted";
            return Err(fault(AlertDescription::BadRecordMac, text));
        };
        let (kind, len) = (open.typ, open.payload.len());
        // Records are opened in place, so the content begins where the body did.
        let content = &stage[from..from + len];
        match kind {
            ContentType::ApplicationData => self.data(from, len).map(Some),
            ContentType::Handshake => self.handshake(content).map(Some),
            ContentType::Alert => alert(content, self.credentials).map(Some),
            _ => Err(fault(AlertDescription::UnexpectedMessage, "an unexpected record")),
        }
    }

    fn data(&mut self, at: usize, len: usize) -> Result<Record, TlsFault> {
        if len == 0 {
            self.allowance.take_empty_record()?;
            return Ok(Record::Other);
        }
        self.allowance.take_data_record();
        Ok(Record::Data { at, len })
    }

    fn handshake(&mut self, content: &[u8]) -> Result<Record, TlsFault> {
        match *content {
            [KEY_UPDATE, 0, 0, 1, asked @ 0..=1] => {
                self.allowance.take_key_update()?;
                let renewed = self.secrets.next_rx().ok().and_then(|(number, secrets)| {
                    Some((number, opener(self.suite, secrets).ok()?))
                });
                let Some((number, opener)) = renewed else {
                    return Err(fault(AlertDescription::InternalError, "no new key"));
                };
                (self.opened, self.opener) = (number, opener);
                // No matter how many are requested, one update suffices (RFC 8446 section 4.6.3).
                self.update_due |= asked == 1;
                Ok(Record::Other)
            }
            // Sessions are not resumed.
            [SESSION_TICKET, ..] if matches!(self.secrets, Secrets::Client(_)) => Ok(Record::Other),
            _ => {
                let text = "an unexpected handshake message";
                Err(fault(AlertDescription::UnexpectedMessage, text))
            }
        }
    }

    /// Ends the connection with `alert`; unsealed data is dropped.
    pub(super) fn alert(&mut self, alert: AlertDescription) {
        if !self.silent {
            self.alert_due.get_or_insert(alert);
            self.plain.clear();
            self.in_batch = false;
        }
    }

    /// Queues the final close alert, after which nothing is sent. Returns false if it or another
    /// alert was already queued.
    pub(super) fn close(&mut self) -> bool {
        self.alert(AlertDescription::CloseNotify);
        self.alert_due.is_some()
    }

    /// Returns true if an alert is waiting to be sent.
    pub(super) fn has_alert(&self) -> bool {
        self.alert_due.is_some()
    }

    /// Returns true if the machine may supply its next batch.
    pub(super) fn takes_batch(&self) -> bool {
        !self.in_batch && !self.silent && self.alert_due.is_none()
    }

    /// Seals as much as fits. Returns None if there is nothing to send.
    ///
    /// # Errors
    /// Returns an error if ring or rustls fails, which is not expected.
    pub(super) fn seal(&mut self) -> io::Result<Option<MemSlice>> {
        let Self { sealed, sealer, plain, .. } = self;
        let Some(region) = Arc::get_mut(sealed) else {
            return Err(io::Error::other("cannot seal records while others are being sent"));
        };
        let out = region.bytes_mut();
        let mut at = 0;
        while out.len() - at >= RECORD && !self.silent {
            let record = &mut out[at..];
            if let Some(alert) = self.alert_due.take() {
                let level = if alert == AlertDescription::CloseNotify { 1 } else { 2 };
                record[HEAD..HEAD + 2].copy_from_slice(&[level, u8::from(alert)]);
                at += sealer.seal(record, 2, ContentType::Alert)?;
                self.silent = true;
            } else if (self.update_due || sealer.number >= KEY_RECORDS) && !plain.is_empty() {
                self.update_due = false;
                record[HEAD..HEAD + 5].copy_from_slice(&[KEY_UPDATE, 0, 0, 1, 0]);
                at += sealer.seal(record, 5, ContentType::Handshake)?;
                *sealer = Sealer::new(self.secrets.next_tx().map_err(io::Error::other)?)?;
            } else {
                let content = plain.take_into(&mut record[HEAD..HEAD + CONTENT_MAX]);
                if content == 0 {
                    break;
                }
                at += sealer.seal(record, content, ContentType::ApplicationData)?;
            }
        }
        Ok(sealed.slice(0, at).filter(|records| !records.is_empty()))
    }

    /// Seals a few bytes into a separate record, for a start-up frame.
    ///
    /// # Errors
    /// See [`TlsStream::seal`].
    pub(super) fn seal_start(&mut self, bytes: &[u8]) -> io::Result<Option<MemSlice>> {
        let record = seal_small(&mut self.sealer, bytes)?;
        self.sealed.copy_in(0, &record);
        Ok(self.sealed.slice(0, record.len()))
    }
}

impl fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsStream")
            .field("opened", &self.opened)
            .field("sealed", &self.sealer.number)
            .finish_non_exhaustive()
    }
}

/// Seals the only record that a session sends: a refusal.
pub(super) fn seal_once(session: Session, bytes: &[u8]) -> io::Result<Vec<u8>> {
    seal_small(&mut Sealer::new(session.tx)?, bytes)
}

fn seal_small(sealer: &mut Sealer, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut record = vec![0; HEAD + bytes.len() + SEAL];
    record[HEAD..HEAD + bytes.len()].copy_from_slice(bytes);
    sealer.seal(&mut record, bytes.len(), ContentType::ApplicationData)?;
    Ok(record)
}

fn fault(alert: AlertDescription, text: &'static str) -> TlsFault {
    TlsFault::Peer(alert, text)
}

/// Interprets an alert. In TLS 1.3 every alert except these two is fatal, regardless of its level.
fn alert(content: &[u8], credentials: Credentials) -> Result<Record, TlsFault> {
    let &[_, description] = content else {
        return Err(fault(AlertDescription::DecodeError, "an alert of wrong length"));
    };
    match AlertDescription::from(description) {
        AlertDescription::CloseNotify => Ok(Record::Closed),
        AlertDescription::UserCanceled => Ok(Record::Other),
        other => Err(TlsFault::Alert(alert_text(other, credentials.raw_keys, credentials.own))),
    }
}
