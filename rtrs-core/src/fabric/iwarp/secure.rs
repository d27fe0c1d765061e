//! TLS handshakes of a shard's connections. The shard moves the bytes, and threads of the
//! [`TlsEndpoint`] compute.
//!
//! An accepted connection is half-open until its request has arrived inside TLS. The same limits,
//! per-source shares and timeouts apply as over plain TCP. It holds one buffer of the pool, which
//! alternates between receiving and sending. A refused connection is sent an alert and stays open
//! until the peer closes it or its timeout expires, because closing at once could destroy the alert
//! in transit.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use socket2::SockRef;

use super::listener::{HalfOpen, Listeners};
use super::mpa::{START_LEN, StartFrame, StartHeader};
use super::stream::{Env, token};
use crate::fabric::ProofError;
use crate::rt::{Completed, Inbox, Op, Ring, Sender, mailbox};
use crate::tls::{Done, Ended, Handshake, Job, Progress, Step, TlsEndpoint};

/// Bytes of a handshake received or sent at once.
pub(super) const GREETING_BUFFER: usize = 4096;

/// Maximum number of refused handshakes that wait to be reported; those beyond are not reported.
const REFUSED_MAX: usize = 64;

/// A shard's access to the threads that compute handshakes.
#[derive(Debug)]
pub(super) struct Tls {
    pub(super) endpoint: Arc<TlsEndpoint>,
    sender: Sender<Done>,
    inbox: Inbox<Done>,
}

impl Tls {
    pub(super) fn new(ring: &Rc<Ring>, endpoint: Arc<TlsEndpoint>) -> io::Result<Self> {
        let (sender, mailbox) = mailbox()?;
        Ok(Self { endpoint, sender, inbox: mailbox.arm(ring)? })
    }

    /// Returns a handshake step that a thread has completed.
    pub(super) fn next(&mut self) -> Option<Done> {
        self.inbox.take_or_watch()
    }

    /// Submits a handshake step to a thread. The caller keeps the returned token for as long as it
    /// wants the result. Returns None if the threads are overloaded.
    pub(super) fn submit(
        &self,
        token: u64,
        handshake: Box<Handshake>,
        received: Vec<u8>,
    ) -> Option<Arc<()>> {
        let wanted = Arc::new(());
        let job = Job {
            token,
            handshake,
            received,
            wanted: Arc::downgrade(&wanted),
            reply: self.sender.clone(),
        };
        self.endpoint.submit(job).then_some(wanted)
    }
}

/// Returns the length of the client's first message inside TLS, the MPA request.
fn request_len(bytes: &[u8]) -> Option<usize> {
    match bytes.first_chunk::<START_LEN>() {
        None => Some(START_LEN),
        Some(head) => StartHeader::decode(head, false).ok().map(|h| START_LEN + h.data_len),
    }
}

/// Handshake state of a half-open connection.
#[derive(Debug)]
pub(super) enum Greeting {
    /// Waiting for the next bytes from the client.
    Receiving(Box<Handshake>),
    /// A thread computes the next step.
    Working { _wanted: Arc<()> },
    /// Sending the answer.
    Sending { output: Vec<u8>, sent: usize, then: Box<Then> },
    /// Refused; the client has not closed the connection yet.
    Refused,
}

/// Action after the answer was sent.
#[derive(Debug)]
pub(super) enum Then {
    Receive(Box<Handshake>),
    Report(Box<Ended>),
    Refuse,
}

impl std::fmt::Debug for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ended").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Greeting {
    /// Creates the state for an accepted connection. Returns None if TLS is only used for outgoing
    /// connections.
    pub(super) fn new(tls: &Tls) -> Option<Self> {
        tls.endpoint.accept(request_len).map(|handshake| Self::Receiving(Box::new(handshake)))
    }
}

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
            // Data that a refused client still sends is ignored.
            other => {
                half.greeting = other;
                self.receive(env.port, id, &mut half);
            }
        }
        self.half_open.insert(id, half);
    }

    /// Handles a handshake step that a thread has completed.
    pub(super) fn secured(
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

    /// Records a peer whose handshake was refused. The caller that takes the record logs it, rate
    /// limited.
    fn note_refused(&mut self, peer: SocketAddr, why: ProofError) {
        tracing::debug!(%peer, %why, "TLS refused");
        if self.refused.len() < REFUSED_MAX {
            self.refused.push_back((peer, why));
        }
    }

    /// Sends the next part of an answer, or performs the action that follows it.
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
                // If the client has already closed, the shutdown fails harmlessly.
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
    pub(super) fn greeted(&mut self, env: &mut Env<'_>, id: u64, done: Completed) {
        let Some((mut half, count)) = self.take_back(id, done) else { return };
        if let Some(Greeting::Sending { sent, .. }) = &mut half.greeting {
            *sent += count;
        }
        self.send_greeting(env, id, half);
    }
}
