//! Binds a core's machine to its providers, its mailbox and its reactor, and nothing more.

use std::fmt;
use std::sync::Arc;

use rtrs_core::fabric::Fabric;
use rtrs_core::rt::{Inbox, Sender, Shard};
use rtrs_core::time::{Instant, earliest};

use crate::engine::ServerEngine;
use crate::engine::message::Message;

/// One core of a running server.
pub struct ServerShard {
    core: ServerEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<Message>,
    senders: Arc<[Sender<Message>]>,
    listening: bool,
}

impl ServerShard {
    /// A core with its providers, its inbox, and the way to all cores' mailboxes.
    pub fn new(
        core: ServerEngine,
        fabrics: Vec<Box<dyn Fabric>>,
        inbox: Inbox<Message>,
        senders: Arc<[Sender<Message>]>,
    ) -> Self {
        Self { core, fabrics, inbox, senders, listening: true }
    }

    /// The core's machine, to look at.
    pub fn core(&self) -> &ServerEngine {
        &self.core
    }
}

impl Shard for ServerShard {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(message) = self.inbox.take() {
            busy = true;
            self.core.handle_message(now, message, &mut self.fabrics);
        }
        for at in 0..self.fabrics.len() {
            busy |= self.fabrics[at].poll(now);
            while let Some(event) = self.fabrics[at].next_event() {
                busy = true;
                self.core.handle_event(now, at, event, &mut self.fabrics);
            }
        }
        busy |= self.core.poll(now, &mut self.fabrics);
        if self.listening && self.core.is_stopping() {
            self.listening = false;
            self.fabrics.iter_mut().for_each(|fabric| fabric.stop_listening());
        }
        while let Some((to, message)) = self.core.take_message() {
            if let Some(sender) = self.senders.get(to.index()) {
                sender.send(message);
            }
        }
        self.fabrics.iter_mut().for_each(|fabric| fabric.flush(now));
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        self.fabrics.iter().fold(self.core.deadline(), |at, fabric| earliest(at, fabric.deadline()))
    }

    fn is_done(&self) -> bool {
        self.core.is_done()
    }

    fn has_mail(&self) -> bool {
        !self.inbox.is_empty()
    }

    fn prepare_sleep(&mut self) -> bool {
        self.inbox.prepare_sleep()
    }

    fn awake(&mut self) {
        self.inbox.awake();
    }
}

impl fmt::Debug for ServerShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerShard").field("core", &self.core).finish_non_exhaustive()
    }
}
