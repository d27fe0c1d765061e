//! Sources of a shard's events other than its devices: the connection manager and other threads.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use super::device::{Report, Watch};
use super::reaper::Reaper;
use super::sys::{CmEvent, EventChannel};
use crate::fabric::AsyncRegistration;
use crate::rt::{Fd, Inbox, Port, Ring, Sender, mailbox};

/// Event channel of the connection manager.
#[derive(Debug)]
pub(super) struct CmChannel {
    channel: Arc<EventChannel>,
    watch: Watch,
}

impl CmChannel {
    /// Opens a channel that is polled with this token.
    pub(super) fn open(reaper: &Arc<Reaper>, token: u64) -> io::Result<Self> {
        let channel = EventChannel::new(reaper)?;
        let watch = Watch::new(Fd::new(channel.pollable()?), token);
        Ok(Self { channel, watch })
    }

    /// Returns the channel, for new identifiers.
    pub(super) fn channel(&self) -> &Arc<EventChannel> {
        &self.channel
    }

    /// Returns the next event.
    pub(super) fn next(&self) -> io::Result<Option<CmEvent>> {
        self.channel.next()
    }

    /// Requests one notification when there are events.
    pub(super) fn arm(&mut self, port: &Port) {
        self.watch.arm(port);
    }

    /// Handles the ring's notification.
    pub(super) fn fired(&mut self) {
        self.watch.fired();
    }
}

/// Reports from other threads, and the memory that they have registered.
#[derive(Debug)]
pub(super) struct Reports {
    inbox: Inbox<Report>,
    sender: Sender<Report>,
    made: VecDeque<AsyncRegistration>,
}

impl Reports {
    /// Creates a mailbox on the shard's ring.
    pub(super) fn new(ring: &Rc<Ring>) -> io::Result<Self> {
        let (sender, mailbox) = mailbox()?;
        let inbox = mailbox.arm(ring)?;
        Ok(Self { inbox, sender, made: VecDeque::new() })
    }

    /// Returns the sender through which another thread reports.
    pub(super) fn sender(&self) -> Sender<Report> {
        self.sender.clone()
    }

    /// Returns the next report.
    pub(super) fn next(&mut self) -> Option<Report> {
        self.inbox.take_or_watch()
    }

    /// Stores registered memory for its user.
    pub(super) fn keep_made(&mut self, made: AsyncRegistration) {
        self.made.push_back(made);
    }

    /// Returns the next registered memory.
    pub(super) fn next_made(&mut self) -> Option<AsyncRegistration> {
        self.made.pop_front()
    }

    /// Returns true if registered memory is waiting for its user.
    pub(super) fn has_made(&self) -> bool {
        !self.made.is_empty()
    }
}
