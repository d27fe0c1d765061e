//! Devices whose IOs complete within `submit`, and the bounded queue of completions that every
//! backend keeps for `reap`.

use std::collections::VecDeque;
use std::fmt::Debug;

use rtrs_core::block::{BlockDevice, Completion, Geometry, Io};
use rtrs_core::status::{IoStatus, Outcome};
use rtrs_core::time::Instant;

use super::target::INFLIGHT_MAX;

/// Completions to be reaped, with room for every IO that a device accepts.
#[derive(Debug)]
pub(crate) struct Done(VecDeque<Completion>);

impl Done {
    pub(crate) fn new() -> Self {
        Self(VecDeque::with_capacity(INFLIGHT_MAX))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn push(&mut self, tag: u64, outcome: impl Into<Outcome>) {
        self.add(Completion::new(tag, outcome));
    }

    pub(crate) fn add(&mut self, completion: Completion) {
        self.0.push_back(completion);
    }

    pub(crate) fn pop(&mut self) -> Option<Completion> {
        let done = self.0.pop_front();
        if self.0.is_empty() {
            // Restart at the beginning of the buffer, so that a light load touches little memory.
            self.0.clear();
        }
        done
    }

    /// Returns an immediate deadline if there are completions to reap.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        (!self.0.is_empty()).then_some(Instant::ZERO)
    }
}

/// Implementation of an [`Immediate`] device.
pub(super) trait Content: Debug {
    /// Current size.
    fn size(&self) -> u64;

    /// Runs an IO that the geometry allows.
    fn run(&self, io: &Io) -> IoStatus;
}

/// A device whose IOs complete within `submit`.
#[derive(Debug)]
pub(super) struct Immediate<C> {
    geometry: Geometry,
    content: C,
    done: Done,
}

impl<C> Immediate<C> {
    pub(super) fn new(geometry: Geometry, content: C) -> Self {
        Self { geometry, content, done: Done::new() }
    }
}

impl<C: Content> BlockDevice for Immediate<C> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn refresh(&mut self) {
        self.geometry.size = self.content.size();
    }

    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.done.len() >= INFLIGHT_MAX {
            return Err(io);
        }
        self.refresh();
        let status = match self.geometry.check(&io) {
            IoStatus::Ok => self.content.run(&io),
            refused => refused,
        };
        self.done.push(io.tag, status);
        Ok(())
    }

    fn poll(&mut self, _now: Instant) -> bool {
        false
    }

    fn reap(&mut self) -> Option<Completion> {
        self.done.pop()
    }

    fn inflight(&self) -> usize {
        self.done.len()
    }

    fn deadline(&self) -> Option<Instant> {
        self.done.deadline()
    }
}
