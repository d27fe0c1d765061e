//! TLS handshakes of accepted connections.
//!
//! An accepted connection is half-open until its request has arrived inside TLS. The limits,
//! per-source shares and timeouts are the same as over plain TCP. The connection holds one pool
//! buffer, which alternates between receiving and sending. A refused connection is sent an alert
//! and stays open until the peer closes it or its timeout expires, because closing immediately
//! could destroy the alert in transit.

use std::net::{Shutdown, SocketAddr};

use socket2::SockRef;

use super::super::env::{Env, token};
use super::super::mpa::{START_LEN, StartFrame, StartHeader};
use super::super::secure::{GREETING_BUFFER, Greeting, Then};
use super::{HalfOpen, Listeners};
use crate::fabric::ProofError;
use crate::rt::{Completed, Op};
use crate::tls::{Ended, Handshake, Progress, Step};

/// Maximum number of refused handshakes waiting to be reported; further ones go unreported.
const REFUSED_MAX: usize = 64;

impl Listeners {
    /// Handles received handshake bytes.
    pub(super) fn greet(&mut self, env: &mut Env<'_>, id: u64, mut half: HalfOpen, count: usize) {
        match half.greeting.take() {
            Some(Greeting::Receiving(handshake)) => {
                let mut received = vec![0; count];
                self.copy(&half, 0, &mut received);
                let token = token::of(id, token::HALF_OPEN);
                let wanted = env.tls.and_then(|tls| tls.submit(token, handshake, received));
                let Some(_wanted) = wanted else {
                    self.note_refused(half.peer, "too many pending TLS handshakes".into());
                    self.drop_half(id, &half);
                    return;
                };
                half.greeting = Some(Greeting::Working { _wanted });
            }
            // Any data that a refused client still sends is ignored.
            other => {
                half.greeting = other;
                self.receive(env.port, id, &mut half);
            }
        }
        self.half_open.insert(id, half);
    }

    /// Handles a handshake step that a thread has completed.
    pub(in super::super) fn secured(
        &mut self,
        env: &mut Env<'_>,
        id: u64,
        handshake: Box<Handshake>,
        progress: Progress,
    ) {
        let Some(mut half) = self.half_open.remove(&id) else { return };
        let then = match progress.step {
            Step::More => Then::Receive(handshake),
            Step::Done(ended) => Then::Report(ended),
            Step::Failed(why) => {
                self.note_refused(half.peer, why);
                Then::Refuse
            }
        };
        let (output, sent) = (progress.output, 0);
        half.greeting = Some(Greeting::Sending { output, sent, then: Box::new(then) });
        self.send_greeting(env, id, half);
    }

    /// Records a peer whose handshake was refused. Whoever takes the record logs it, with a rate
    /// limit.
    fn note_refused(&mut self, peer: SocketAddr, why: ProofError) {
        tracing::debug!(%peer, %why, "TLS refused");
        if self.refused.len() < REFUSED_MAX {
            self.refused.push_back((peer, why));
        }
    }

    /// Sends the next part of an answer or, after the last part, performs the action that follows.
    fn send_greeting(&mut self, env: &mut Env<'_>, id: u64, mut half: HalfOpen) {
        let Some(Greeting::Sending { output, sent, then }) = half.greeting.take() else { return };
        if sent < output.len() {
            let len = (output.len() - sent).min(GREETING_BUFFER);
            let whole = self.pool.as_ref().map(|pool| pool.slice(half.buffer));
            let Some(buf) = whole.and_then(|slice| slice.slice(0, len)) else { return };
            buf.copy_in(0, &output[sent..sent + len]);
            half.greeting = Some(Greeting::Sending { output, sent, then });
            let op = Op::Send { fd: half.fd.clone(), buf };
            half.op = Some(env.port.submit(op, token::of(id, token::GREETING)));
            self.half_open.insert(id, half);
            return;
        }
        match *then {
            Then::Receive(handshake) => half.greeting = Some(Greeting::Receiving(handshake)),
            Then::Refuse => {
                // If the client has already closed the connection, the shutdown fails harmlessly.
                let _ = SockRef::from(&half.fd).shutdown(Shutdown::Write);
                half.greeting = Some(Greeting::Refused);
            }
            Then::Report(ended) => {
                self.drop_half(id, &half);
                let Ended { session, request, .. } = *ended;
                let header = request.first_chunk::<START_LEN>();
                let header = header.and_then(|head| StartHeader::decode(head, false).ok());
                if let Some(header) = header {
                    let frame = StartFrame::decode(header, &request[START_LEN..], false);
                    self.report(env, half, frame, Some(Box::new(session)));
                }
                return;
            }
        }
        self.receive(env.port, id, &mut half);
        self.half_open.insert(id, half);
    }

    /// Handles the completion of a send.
    pub(in super::super) fn greeted(&mut self, env: &mut Env<'_>, id: u64, done: Completed) {
        let Some((mut half, count)) = self.take_back(id, done) else { return };
        if let Some(Greeting::Sending { sent, .. }) = &mut half.greeting {
            *sent += count;
        }
        self.send_greeting(env, id, half);
    }
}
