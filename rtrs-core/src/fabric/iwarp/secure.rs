//! TLS handshakes of a shard's connections: access to the [`TlsEndpoint`] threads that compute
//! them, and the state of each handshake. The shard transfers the bytes: `listener/greeting.rs` for
//! accepted connections, `stream/sealed.rs` for outgoing ones.

use std::io;
use std::rc::Rc;
use std::sync::Arc;

use super::mpa::{START_LEN, StartHeader};
use crate::rt::{Inbox, Ring, Sender, mailbox};
use crate::tls::{Done, Ended, Handshake, Job, TlsEndpoint};

/// Maximum number of handshake bytes received or sent in one operation.
pub(super) const GREETING_BUFFER: usize = 4096;

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
    /// needs the result. Returns None if the threads are overloaded.
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
    /// A thread is computing the next step.
    Working { _wanted: Arc<()> },
    /// Sending the answer.
    Sending { output: Vec<u8>, sent: usize, then: Box<Then> },
    /// Refused; the client has not closed the connection yet.
    Refused,
}

/// Action after the answer has been sent.
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
    /// Creates the state for an accepted connection; None if TLS is used only for outgoing
    /// connections.
    pub(super) fn new(tls: &Tls) -> Option<Self> {
        tls.endpoint.accept(request_len).map(|handshake| Self::Receiving(Box::new(handshake)))
    }
}

/// TLS handshake of an outgoing connection.
#[derive(Debug)]
pub(super) struct Securing {
    /// None while a thread is computing the next step.
    pub(super) handshake: Option<Box<Handshake>>,
    pub(super) _wanted: Option<Arc<()>>,
    /// Data to send, with the number of bytes already sent.
    pub(super) output: Vec<u8>,
    pub(super) sent: usize,
    pub(super) ended: Option<Box<Ended>>,
}

impl Securing {
    /// Creates the state before the first step. `handshake` is None if TLS is used only for
    /// accepted connections.
    pub(super) fn new(handshake: Option<Handshake>) -> Self {
        let (output, sent, ended) = (Vec::new(), 0, None);
        Self { handshake: handshake.map(Box::new), _wanted: None, output, sent, ended }
    }
}
