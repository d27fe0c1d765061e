//! Payloads that arrive in two pieces, one much later than the other, and partial writes to blocks
//! that other writes also change, in bytes that are never read.
//!
//! A user stops in the middle of a payload for up to a few seconds, at most one payload at a time,
//! which delays all its later requests. Before some writes it submits extra writes to separate
//! sectors, both small ones and ones longer than a buffer of the bridge, which begin and end within
//! the same few blocks. Their results are ignored, but each must end exactly once.

use std::collections::BTreeSet;

use nbd_bridge::Request;
use nbd_bridge::wire::cmd;
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

use super::super::disk::SECTOR;
use super::super::options::MS;

/// Number of sectors for the extra writes.
pub(in super::super) const SECTORS: u32 = 1024;
/// Bit in the cookie of an extra write.
const EXTRA: u64 = 1 << 62;
/// Maximum number of extra writes per front.
const EXTRA_MAX: u64 = 40;
/// Maximum lengths of short and long extra writes.
const SHORT_MAX: u64 = 600;
const LONG_MAX: u64 = 400 << 10;
/// Maximum time for which a user stops.
const STALL_MAX: Duration = Duration::from_millis(2000);

/// A core's user that stops in the middle of payloads.
#[derive(Debug)]
pub(super) struct Stalls {
    /// Offset in bytes of the sectors for extra writes.
    base: u64,
    prng: Prng,
    asked: u64,
    open: BTreeSet<u64>,
    /// Number of bytes sent so far.
    sent: u64,
    /// Position at which the user next stops, and for how long.
    next: Option<(u64, Duration)>,
    until: Instant,
}

impl Stalls {
    pub(super) fn new(base: u64, prng: Prng) -> Self {
        let (asked, open, sent) = (0, BTreeSet::new(), 0);
        Self { base, prng, asked, open, sent, next: None, until: Instant::ZERO }
    }

    /// Whether the user has stopped.
    pub(super) fn has_stopped(&mut self, now: Instant) -> bool {
        let stopped = self.until > now;
        if !stopped {
            self.until = Instant::ZERO;
        }
        stopped
    }

    /// Returns when a stopped user resumes.
    pub(super) fn resumes(&self) -> Option<Instant> {
        (self.until > Instant::ZERO).then_some(self.until)
    }

    /// Returns how many of `len` bytes the user sends before it stops.
    pub(super) fn room(&self, len: usize) -> usize {
        let room = self.next.map_or(u64::MAX, |(at, _)| at - self.sent);
        usize::try_from(room).unwrap_or(usize::MAX).min(len)
    }

    /// Records that `count` bytes were sent.
    pub(super) fn sent(&mut self, now: Instant, count: usize) {
        self.sent += count as u64;
        let stops = self.next.take_if(|(at, _)| *at <= self.sent);
        self.until = stops.map_or(Instant::ZERO, |(_, time)| now + time);
    }

    /// Adds a payload that is sent after `before` other bytes; the user may stop midway through it.
    pub(super) fn payload(&mut self, before: usize, len: usize) {
        if self.next.is_none() && self.prng.chance(Ratio::new(1, 6)) {
            let at = self.sent + (before + self.prng.index(len)) as u64;
            self.next = Some((at.max(self.sent + 1), self.prng.duration(MS..=STALL_MAX)));
        }
    }

    /// Occasionally appends extra writes to the requests.
    pub(super) fn submit_extra(&mut self, out: &mut Vec<u8>) {
        if self.asked >= EXTRA_MAX || self.prng.chance(Ratio::new(3, 4)) {
            return;
        }
        let block = self.base + self.prng.below(2) * SECTOR as u64;
        for _ in 0..1 + self.prng.below(3) {
            self.asked += 1;
            let long = self.prng.chance(Ratio::new(1, 4));
            let most = if long { LONG_MAX } else { SHORT_MAX };
            let (offset, len) = (block + self.prng.below(500), 1 + self.prng.below(most));
            let (cookie, len) = (EXTRA | self.asked, len as u32);
            let head = Request { flags: 0, command: cmd::WRITE, cookie, offset, len };
            out.extend_from_slice(&head.encode());
            self.payload(out.len(), len as usize);
            out.resize(out.len() + len as usize, 0x5a);
            self.open.insert(cookie);
        }
    }

    /// Whether this is the reply to an extra write.
    pub(super) fn take_reply(&mut self, cookie: u64) -> bool {
        let ended = self.open.remove(&cookie);
        assert!(ended || cookie & EXTRA == 0, "an extra write ended that was not submitted");
        ended
    }

    /// Forgets all extra writes, because the connection is closed.
    pub(super) fn closed(&mut self) {
        self.open.clear();
        (self.next, self.until) = (None, Instant::ZERO);
    }
}
