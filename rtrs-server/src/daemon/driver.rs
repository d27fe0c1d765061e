//! Connects a shard's engine to its providers, its mailbox and its reactor.

use std::fmt;
use std::sync::Arc;

use rtrs_core::fabric::Fabric;
use rtrs_core::ids::ProviderIndex;
use rtrs_core::rt::{Clock, Inbox, Sender, Shard};
use rtrs_core::time::{Instant, earliest};

use crate::engine::ServerEngine;
use crate::engine::message::Message;

/// A shard of a running server.
pub struct ServerShard {
    engine: ServerEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: Inbox<Message>,
    senders: Arc<[Sender<Message>]>,
    listening: bool,
}

impl ServerShard {
    /// Creates a shard from its engine, its providers, its inbox, and senders to all shards'
    /// mailboxes.
    pub fn new(
        engine: ServerEngine,
        fabrics: Vec<Box<dyn Fabric>>,
        inbox: Inbox<Message>,
        senders: Arc<[Sender<Message>]>,
    ) -> Self {
        Self { engine, fabrics, inbox, senders, listening: true }
    }

    /// Engine of the shard, for inspection.
    pub fn engine(&self) -> &ServerEngine {
        &self.engine
    }
}

impl Shard for ServerShard {
    type Message = Message;

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(message) = self.inbox.take() {
            busy = true;
            self.engine.handle_message(now, message, &mut self.fabrics);
        }
        for provider in ProviderIndex::all(self.fabrics.len()) {
            busy |= self.fabrics[provider.index()].poll(now);
            // Remaining events are processed in the next turn, which follows a busy turn
            // immediately.
            while !self.engine.is_turn_full()
                && let Some(event) = self.fabrics[provider.index()].next_event()
            {
                busy = true;
                self.engine.handle_event(now, provider, event, &mut self.fabrics);
            }
        }
        // All events have been processed, and a device that works within `submit` has completed its
        // IOs.
        let now = if busy { Clock.now() } else { now };
        busy |= self.engine.poll(now, &mut self.fabrics);
        if self.listening && self.engine.is_stopping() {
            self.listening = false;
            self.fabrics.iter_mut().for_each(|fabric| fabric.stop_listening());
        }
        while let Some((to, message)) = self.engine.take_message() {
            if let Some(sender) = self.senders.get(to.index()) {
                sender.send(message);
            }
        }
        self.fabrics.iter_mut().for_each(|fabric| fabric.flush(now));
        busy
    }

    fn deadline(&self) -> Option<Instant> {
        self.fabrics
            .iter()
            .fold(self.engine.deadline(), |at, fabric| earliest(at, fabric.deadline()))
    }

    fn is_done(&self) -> bool {
        self.engine.is_done()
    }

    fn inbox(&mut self) -> Option<&mut Inbox<Message>> {
        Some(&mut self.inbox)
    }
}

impl fmt::Debug for ServerShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerShard").field("engine", &self.engine).finish_non_exhaustive()
    }
}
