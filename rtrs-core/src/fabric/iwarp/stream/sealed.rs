//! TLS for a connection: the initiator's handshake, and the records.

use std::io;
use std::sync::Arc;

use super::super::batch::BATCH_SLICES;
use super::super::env::{Env, token};
use super::super::mpa::{START_LEN, StartHeader};
use super::super::tls::{Record, TlsFault, TlsStream};
use super::{IwarpConn, Phase, lost};
use crate::fabric::CloseReason;
use crate::tls::{Ended, Handshake, Progress, Step};

/// Maximum number of handshake bytes received in one operation.
const RECEIVE: usize = 16 << 10;

impl IwarpConn {
    /// Submits the next handshake step to a thread.
    pub(super) fn compute(&mut self, env: &mut Env<'_>, received: Vec<u8>) {
        let token = self.socket.token(token::SECURE);
        let securing = self.securing.as_mut();
        let wanted = securing.and_then(|securing| {
            let handshake = securing.handshake.take()?;
            securing._wanted = env.tls?.submit(token, handshake, received);
            securing._wanted.as_ref().map(drop)
        });
        if wanted.is_none() {
            self.stop(env, CloseReason::Lost("too many concurrent TLS handshakes".into()));
        }
    }

    /// Handles a handshake step that a thread has completed.
    pub(in super::super) fn secured(
        &mut self,
        env: &mut Env<'_>,
        handshake: Box<Handshake>,
        progress: Progress,
    ) {
        let Some(securing) = &mut self.securing else { return };
        if self.phase != Phase::Securing {
            return;
        }
        (securing.output, securing.sent) = (progress.output, 0);
        match progress.step {
            Step::More => securing.handshake = Some(handshake),
            Step::Done(ended) => securing.ended = Some(ended),
            Step::Failed(why) => {
                // The alert fits in the empty send buffer.
                self.socket.send_now(&securing.output);
                self.stop(env, CloseReason::Tls(why.to_string()));
                return;
            }
        }
        self.send_securing(env);
        self.advance(env);
    }

    /// Sends the next part of the handshake, or continues with the next phase if no part is left.
    fn send_securing(&mut self, env: &mut Env<'_>) {
        let Some(securing) = &mut self.securing else { return };
        let rest = &securing.output[securing.sent..];
        if !rest.is_empty() {
            let len = rest.len().min(RECEIVE);
            if let Some(buf) = self.machine.start_buffer(true, len) {
                buf.copy_in(0, &rest[..len]);
                self.socket.send(env.port, buf);
            }
            return;
        }
        if let Some(ended) = securing.ended.take() {
            self.securing = None;
            self.begin_records(env, *ended);
        } else if let Some(buf) = self.machine.start_buffer(false, RECEIVE) {
            self.start = Some(buf.clone());
            self.socket.recv(env.port, buf);
        }
    }

    pub(super) fn securing_sent(&mut self, env: &mut Env<'_>, result: io::Result<usize>) {
        match (result, &mut self.securing) {
            (Ok(count), Some(securing)) => {
                securing.sent += count;
                self.send_securing(env);
            }
            (Err(e), _) => self.stop(env, lost("sending the TLS handshake", &e)),
            (Ok(_), None) => {}
        }
    }

    pub(super) fn securing_received(&mut self, env: &mut Env<'_>, result: io::Result<usize>) {
        match (result, self.start.take()) {
            (Ok(count), Some(buf)) if count > 0 => {
                let mut received = vec![0; count];
                buf.copy_out(0, &mut received);
                self.compute(env, received);
            }
            (Err(e), _) => self.stop(env, lost("during the TLS handshake", &e)),
            _ => {
                let what = "the peer closed the connection during the TLS handshake";
                self.stop(env, CloseReason::Lost(what.into()));
            }
        }
    }

    /// Starts the record layer. The request was sent with the end of the handshake, so its reply is
    /// expected next.
    fn begin_records(&mut self, env: &mut Env<'_>, ended: Ended) {
        let stream = TlsStream::new(ended.session, &ended.rest, &self.machine, BATCH_SLICES);
        match stream {
            Ok(stream) => self.tls = Some(Box::new(stream)),
            Err(e) => {
                self.stop(env, lost("setting up TLS", &e));
                return;
            }
        }
        self.phase = Phase::ReplyHeader;
        let bound = env.now + env.options.startup_timeout;
        self.deadline = Some(self.deadline.map_or(bound, |at| at.min(bound)));
        if !ended.rest.is_empty() {
            self.open_records(env, 0);
        }
    }

    /// Opens records after `count` more bytes have been received; 0 means the end of the stream, or
    /// no new data.
    pub(super) fn open_records(&mut self, env: &mut Env<'_>, count: usize) {
        let Some(tls) = &mut self.tls else { return };
        tls.arrived(count);
        while self.machine.failure.is_none() {
            let Some(stage) = Arc::get_mut(&mut self.machine.stage) else {
                tracing::error!("records cannot be opened while their memory is in use");
                self.machine.end(CloseReason::Lost("internal TLS error".into()), None);
                return;
            };
            match tls.next(stage.bytes_mut()) {
                Ok(Some(Record::Data { at, len })) => self.machine.rx_plain(env.core, at, len),
                Ok(Some(Record::Other)) => {}
                Ok(Some(Record::Closed)) => {
                    self.socket.end_receiving();
                    self.machine.rx_done(env.core, 0);
                }
                Ok(None) => break,
                Err(TlsFault::Peer(alert, text)) => {
                    tls.alert(alert);
                    self.machine.end(CloseReason::Protocol(text.into()), None);
                }
                Err(TlsFault::Alert(text)) => {
                    self.machine.end(CloseReason::Tls(text), None);
                }
            }
        }
        if self.socket.has_peer_ended() && self.machine.failure.is_none() {
            // Anyone between the ends can cause this, so the peer is not blamed.
            let what = "the connection ended without the peer's close_notify";
            self.machine.end(CloseReason::Lost(what.into()), None);
        }
        self.take_reply(env);
    }

    /// Processes the reply to the request, once the reply is complete.
    fn take_reply(&mut self, env: &mut Env<'_>) {
        let (at, staged) = self.machine.staged();
        if !matches!(self.phase, Phase::ReplyHeader) || staged < START_LEN {
            return;
        }
        let mut bytes = [0; START_LEN];
        self.machine.stage.copy_out(at, &mut bytes);
        match StartHeader::decode(&bytes, true) {
            Ok(header) if staged >= START_LEN + header.data_len => self.replied(env, header),
            Ok(_) => {}
            Err(e) => self.stop(env, CloseReason::Protocol(e.to_string())),
        }
    }

    /// Seals and sends the machine's output.
    pub(super) fn kick_send_sealed(&mut self, env: &mut Env<'_>) {
        let Some(tls) = &mut self.tls else { return };
        if tls.takes_batch() && self.machine.has_output() {
            tls.in_batch = self.machine.tx_prepare(&mut tls.plain) > 0;
        }
        let Some(mut iov) = self.socket.take_send_list() else { return };
        match tls.seal() {
            Ok(Some(records)) => {
                iov.push(records);
                self.socket.send_list(env.port, iov);
            }
            Ok(None) => self.socket.keep_send_list(iov),
            Err(e) => {
                self.socket.keep_send_list(iov);
                self.stop(env, lost("TLS", &e));
            }
        }
    }

    /// Handles the completed send of the machine's batch or, over TLS, of part of it.
    pub(super) fn batch_sent(&mut self, env: &mut Env<'_>) {
        match &mut self.tls {
            None => self.machine.tx_done(env.core),
            Some(tls) if tls.in_batch && tls.plain.is_empty() => {
                tls.in_batch = false;
                tls.plain.clear();
                self.machine.tx_done(env.core);
            }
            Some(_) => {}
        }
    }

    /// Returns true if an alert must be sent to the peer.
    pub(super) fn has_alert(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_alert())
    }
}
