//! TLS handshakes of a shard's connections. The shard moves the bytes, and threads of the
//! [`TlsEndpoint`] compute.
//!
//! A connection that is accepted is half-open until its request has come, inside TLS here: it has
//! the same place in the limits, the same share of its source, and the same time as one over plain
//! TCP. It holds one buffer of the pool, which takes turns between receiving and sending. A
//! connection that is refused gets its alert, and stays until the peer closes or its time is over:
//! closing at once could destroy the alert on its way.

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

/// Bytes of a handshake that are received or sent at once.
pub(super) const GREETING_BUFFER: usize = 4096;

/// Refused handshakes that wait to be reported; at most as many as a turn has.
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

    /// A step that a thread has taken.
    pub(super) fn next(&mut self) -> Option<Done> {
        self.inbox.take_or_watch()
    }

    /// Lets a thread take a step. What it gives is to be kept as long as the answer is wanted;
    /// None when the threads have too much to do.
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

/// What the client sends above TLS: the request of MPA.
fn request_len(bytes: &[u8]) -> Option<usize> {
    match bytes.first_chunk::<START_LEN>() {
        None => Some(START_LEN),
        Some(head) => StartHeader::decode(head, false).ok().map(|h| START_LEN + h.data_len),
    }
}

/// Where the handshake of a half-open connection is.
#[derive(Debug)]
pub(super) enum Greeting {
    /// The next bytes of the client are awaited.
    Receiving(Box<Handshake>),
    /// A thread computes.
    Working { _wanted: Arc<()> },
    /// The answer goes out.
    Sending { output: Vec<u8>, sent: usize, then: Box<Then> },
    /// It is refused, and the client has not closed yet.
    Refused,
}

/// What follows when the answer went out.
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
    /// For an accepted connection. None where TLS is for connecting only.
    pub(super) fn new(tls: &Tls) -> Option<Self> {
        tls.endpoint.accept(request_len).map(|handshake| Self::Receiving(Box::new(handshake)))
    }
}

impl Listeners {
    /// Bytes of a handshake came.
    pub(super) fn greet(&mut self, env: &mut Env<'_>, id: u64, mut half: HalfOpen, count: usize) {
        match half.greeting.take() {
            Some(Greeting::Receiving(handshake)) => {
                let mut received = vec![0; count];
                self.copy(&half, 0, &mut received);
                let token = token::of(id, token::HALF_OPEN);
                let wanted = env.tls.and_then(|tls| tls.submit(token, handshake, received));
                let Some(_wanted) = wanted else {
                    self.note_refused(half.peer, "too many TLS handshakes wait".into());
                    self.drop_half(id, &half);
                    return;
                };
                half.greeting = Some(Greeting::Working { _wanted });
            }
            // What a refused client still sends is of no interest.
            other => {
                half.greeting = other;
                self.receive(env.port, id, &mut half);
            }
        }
        self.half_open.insert(id, half);
    }

    /// A thread has taken a step of a handshake.
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

    /// Notes a peer whose handshake was refused. Who asks for it logs it, within limits.
    fn note_refused(&mut self, peer: SocketAddr, why: ProofError) {
        tracing::debug!(%peer, %why, "TLS refused");
        if self.refused.len() < REFUSED_MAX {
            self.refused.push_back((peer, why));
        }
    }

    /// Sends the next part of an answer, or does what follows it.
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
                // A client that is gone already needs no end of the stream.
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

    /// A part of an answer was sent.
    pub(super) fn greeted(&mut self, env: &mut Env<'_>, id: u64, done: Completed) {
        let Some((mut half, count)) = self.take_back(id, done) else { return };
        if let Some(Greeting::Sending { sent, .. }) = &mut half.greeting {
            *sent += count;
        }
        self.send_greeting(env, id, half);
    }
}
