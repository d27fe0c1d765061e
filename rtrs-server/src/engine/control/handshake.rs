//! Handshake of a path: its connections join and wait until the path's chunks are registered; it
//! ends when INFO_REQ is accepted.

use std::sync::{Arc, Weak};

use rtrs_core::fabric::ConnRequest;
use rtrs_core::ids::ConnIndex;
use rtrs_core::time::Instant;
use rtrs_core::wire::{ConnReq, Name};

use crate::engine::control::refusal::Refusal;
use crate::path::handshake::Joining;
use crate::path::{InfoError, PathEnd};

/// Connections waiting for their path's chunks to be registered.
#[derive(Debug, Default)]
pub(super) struct Held {
    connections: Vec<(ConnIndex, ConnRequest)>,
    /// Expires when the connections stop waiting.
    wanted: Arc<()>,
}

impl Held {
    /// Expires when the connections stop waiting.
    pub(super) fn wanted(&self) -> Weak<()> {
        Arc::downgrade(&self.wanted)
    }
}

/// Handshake of a path, or what remains of it.
#[derive(Debug)]
pub(super) struct Handshake {
    /// None once INFO_REQ has been accepted or the path is closing.
    joining: Option<Joining>,
    /// Present while the chunks are being registered.
    held: Option<Held>,
    /// Time when the connections were accepted, after the chunks were registered.
    accepted: Option<Instant>,
}

impl Handshake {
    /// Creates a handshake of `cid_num` connections that began at `since`, to end by `deadline`.
    pub(super) fn new(cid_num: u16, since: Instant, deadline: Instant, held: Option<Held>) -> Self {
        let joining = Some(Joining::new(cid_num, deadline));
        Self { joining, accepted: held.is_none().then_some(since), held }
    }

    /// Time when the connections were accepted; None while the chunks are being registered.
    pub(super) fn accepted(&self) -> Option<Instant> {
        self.accepted
    }

    /// Whether the chunks are being registered.
    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Deadline of the handshake; None once the handshake has ended.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.joining.as_ref().map(Joining::deadline)
    }

    /// Checks whether a connection can be added.
    pub(super) fn check_join(&self, conn: &ConnReq) -> Result<(), Refusal> {
        let joining = self.joining.as_ref().ok_or(Refusal::PathExists)?;
        joining.check(conn.cid, conn.cid_num).map_err(Refusal::Join)
    }

    /// Adds a connection.
    pub(super) fn join(&mut self, conn: &ConnReq) -> Result<(), Refusal> {
        let joining = self.joining.as_mut().ok_or(Refusal::PathExists)?;
        joining.join(conn.cid, conn.cid_num).map_err(Refusal::Join)
    }

    /// Holds a connection until the chunks are registered. Returns the connection if the chunks are
    /// already registered, or if no registration precedes INFO_REQ.
    pub(super) fn hold(&mut self, cid: ConnIndex, request: ConnRequest) -> Option<ConnRequest> {
        match &mut self.held {
            Some(held) => {
                held.connections.push((cid, request));
                None
            }
            None => Some(request),
        }
    }

    /// Ends the wait for the chunks to be registered, whether or not that succeeded. Returns None
    /// if the path is closing and so no longer waits.
    pub(super) fn take_held(
        &mut self,
        now: Instant,
        deadline: Instant,
    ) -> Option<Vec<(ConnIndex, ConnRequest)>> {
        let held = self.held.take()?;
        self.accepted = Some(now);
        self.joining.iter_mut().for_each(|joining| joining.set_deadline(deadline));
        Some(held.connections)
    }

    /// Processes INFO_REQ, or another message in its place. Returns None if no message is expected.
    pub(super) fn admit(&self, bytes: &[u8]) -> Option<Result<Name, InfoError>> {
        let joining = self.joining.as_ref()?;
        let held = self.held.as_ref().map_or(0, |held| held.connections.len());
        if held > 0 {
            return Some(Err(InfoError::Early(u16::try_from(held).unwrap_or(u16::MAX))));
        }
        Some(joining.admit(bytes))
    }

    /// Records that INFO_REQ was refused. Returns false if the handshake is over.
    pub(super) fn refuse(&mut self, why: &PathEnd) -> bool {
        self.joining.iter_mut().for_each(|joining| joining.refuse(why.clone()));
        self.joining.is_some()
    }

    /// Reason for an INFO_REQ refusal that was sent to the client.
    pub(super) fn refused(&self) -> Option<&PathEnd> {
        self.joining.as_ref().and_then(Joining::refused)
    }

    /// Ends the handshake: INFO_REQ was accepted.
    pub(super) fn end(&mut self) {
        self.joining = None;
    }

    /// Ends the handshake without a result.
    pub(super) fn cancel(&mut self) {
        (self.joining, self.held) = (None, None);
    }
}
