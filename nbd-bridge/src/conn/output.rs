//! Bytes for the client: handshake replies, and headers and data of replies to requests.

use std::collections::VecDeque;
use std::ops::Range;

use rtrs_core::mem::{IoVecs, MemSlice, Region};

use crate::proto::Op;
use crate::proto::reply::{self, Answered, Form};
use crate::proto::wire::NbdError;
use crate::requests::{NbdRow, Requests};

/// Maximum number of replies per system call.
const REPLIES_MAX: usize = 64;
/// Maximum number of slices per system call: a 32 MiB piece of a read in parts, or many small
/// reads.
const SLICES_MAX: usize = 320;
/// Number of bytes after which no further reply is added to a send. A client that does not read
/// ties up the memory of a send.
const SEND_MAX: usize = 4 << 20;
/// Bytes of handshake replies that may be queued before further options are processed.
const GREETING_MAX: usize = 64 * 1024;

/// Replies waiting to be sent, and those of the send in progress.
#[derive(Debug)]
pub(super) struct Output {
    /// Slices of the next send; None while a send is using them.
    vecs: Option<Box<IoVecs>>,
    /// Memory for handshake bytes and reply headers.
    staging: MemSlice,
    /// Handshake bytes to be sent.
    greeting: Vec<u8>,
    replies: VecDeque<u32>,
    in_send: Vec<u32>,
    /// Rows whose data was dropped and must be reread.
    dropped: VecDeque<u32>,
    /// Row of a simple reply that has been partly sent.
    cut_short: Option<u32>,
    /// Bytes of the next send that have already been sent.
    sent_before: usize,
}

impl Output {
    /// Creates the output of a connection to a shard with `rows` rows. The client has already
    /// received `sent_before` bytes of the first reply.
    pub(super) fn new(greeting: Vec<u8>, rows: usize, sent_before: usize) -> std::io::Result<Self> {
        Ok(Self {
            vecs: Some(IoVecs::new(SLICES_MAX)),
            staging: Region::new(REPLIES_MAX * reply::ROOM)?.whole(),
            greeting,
            replies: VecDeque::with_capacity(rows),
            in_send: Vec::with_capacity(REPLIES_MAX),
            dropped: VecDeque::with_capacity(rows),
            cut_short: None,
            sent_before,
        })
    }

    /// Whether nothing is waiting to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.greeting.is_empty() && self.replies.is_empty()
    }

    /// Number of replies waiting to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.replies.len()
    }

    /// Handshake bytes to be sent.
    pub(super) fn greeting(&mut self) -> &mut Vec<u8> {
        &mut self.greeting
    }

    /// Whether the waiting handshake bytes exceed their limit. Further options then wait too.
    pub(super) fn is_greeting_full(&self) -> bool {
        self.greeting.len() > GREETING_MAX
    }

    /// Queues a row's reply.
    pub(super) fn push(&mut self, row: u32) {
        self.replies.push_back(row);
    }

    /// Takes the next row whose reply is waiting to be sent, and drops the reply.
    pub(super) fn drop_reply(&mut self) -> Option<u32> {
        self.replies.pop_front().or_else(|| self.dropped.pop_front())
    }

    /// Moves rows from the waiting replies to those that must be reread, if `drop` has dropped
    /// their data. Returns the number of such rows.
    pub(super) fn drop_data(&mut self, mut drop: impl FnMut(u32) -> bool) -> usize {
        let Self { replies, dropped, cut_short, .. } = self;
        let before = replies.len();
        replies.retain(|row| {
            // Once a simple reply has been partly sent, it can no longer fail.
            let drops = *cut_short != Some(*row) && drop(*row);
            dropped.extend(drops.then_some(*row));
            !drops
        });
        before - replies.len()
    }

    /// First row whose data must be reread.
    pub(super) fn first_dropped(&self) -> Option<u32> {
        self.dropped.front().copied()
    }

    /// Removes the first row whose data must be reread.
    pub(super) fn pop_dropped(&mut self) {
        self.dropped.pop_front();
    }

    /// Whether a row's reply is in the send that was gathered last.
    pub(super) fn sends(&self, row: u32) -> bool {
        self.in_send.contains(&row)
    }

    /// Takes a row whose reply has been sent.
    pub(super) fn take_sent(&mut self) -> Option<u32> {
        self.in_send.pop()
    }

    /// Takes back the slices of a send that has ended.
    pub(super) fn send_ended(&mut self, mut vecs: Box<IoVecs>) {
        vecs.clear();
        self.vecs = Some(vecs);
    }

    /// Whether the rest of a simple reply failed; the protocol has no way to report that to the
    /// client.
    pub(super) fn is_cut_short(&self, requests: &mut Requests) -> bool {
        let next = self.cut_short.and_then(|_| next_reply(&self.replies, self.cut_short));
        next.is_some_and(|row| !requests.row(row).reply.status().is_ok())
    }

    /// Gathers what can be sent now: handshake bytes, then headers and data of as many finished
    /// requests as fit. The device has `size` bytes. Returns None if a send is in progress or
    /// nothing can be sent.
    pub(super) fn gather(
        &mut self,
        form: Form,
        size: u64,
        requests: &mut Requests,
    ) -> Option<Box<IoVecs>> {
        let vecs = self.vecs.take()?;
        let mut batch = Batch { vecs, staging: &self.staging, used: 0, form, size };
        if !self.greeting.is_empty() {
            let count = self.greeting.len().min(self.staging.len());
            batch.stage(&self.greeting[..count]);
            self.greeting.drain(..count);
        }
        while let Some(index) = next_reply(&self.replies, self.cut_short) {
            let row = requests.row(index);
            let full = self.in_send.len() == REPLIES_MAX || batch.vecs.remaining() >= SEND_MAX;
            if full || !batch.has_room(row) {
                break;
            }
            batch.add_reply(row);
            let complete = row.progress.is_complete();
            self.cut_short = (form == Form::Simple && !complete).then_some(index);
            if self.replies.front() == Some(&index) {
                self.replies.pop_front();
            } else {
                self.replies.retain(|reply| *reply != index);
            }
            self.in_send.push(index);
        }
        let mut vecs = batch.vecs;
        if vecs.is_empty() {
            self.vecs = Some(vecs);
            return None;
        }
        vecs.advance(std::mem::take(&mut self.sent_before));
        Some(vecs)
    }
}

/// Returns the next reply to send. After a piece of a simple reply, only the next piece of that
/// reply may follow.
fn next_reply(replies: &VecDeque<u32>, cut_short: Option<u32>) -> Option<u32> {
    match cut_short {
        Some(row) => replies.contains(&row).then_some(row),
        None => replies.front().copied(),
    }
}

/// A send that is being gathered.
struct Batch<'a> {
    vecs: Box<IoVecs>,
    staging: &'a MemSlice,
    /// Number of bytes of the staging memory in use.
    used: usize,
    form: Form,
    /// Size of the device in bytes.
    size: u64,
}

impl Batch<'_> {
    /// Whether the reply of this row fits.
    fn has_room(&self, row: &NbdRow) -> bool {
        self.staging.len() - self.used >= reply::ROOM && self.vecs.room() > row.parts.len()
    }

    /// Appends a reply's header and data.
    fn add_reply(&mut self, row: &NbdRow) {
        let (op, cookie, form) = (row.command.op(), row.command.cookie(), self.form);
        let of = Answered { form, cookie, offset: row.command.offset() };
        let mut error = row.reply.error();
        let mut statuses = None;
        if op == Op::BlockStatus && error.is_none_or(|(e, _)| e == NbdError::NotSup) {
            statuses = row.statuses(form, self.size);
            let none = (NbdError::Io, "the device does not report its extents");
            error = statuses.is_none().then_some(none);
        }
        let head = match error {
            Some((error, why)) => reply::failure(of, error, why),
            None if op == Op::Read => {
                let Range { start, end } = row.asked();
                let len = u32::try_from(end - start).unwrap_or(0);
                reply::read_head(of, start, len, row.progress.is_complete())
            }
            None => match &statuses {
                Some((_, count)) => reply::status_head(of, *count),
                None => reply::success(of),
            },
        };
        // A simple reply has one header, before the data of its first piece.
        if form != Form::Simple || row.progress.current_piece().start == 0 {
            self.stage(&head);
        }
        if error.is_none() && op == Op::Read {
            row.data(|slice| self.vecs.push(slice));
        }
        if let Some((list, _)) = statuses {
            self.vecs.push(list);
        }
    }

    /// Copies bytes into the staging memory and appends them.
    fn stage(&mut self, bytes: &[u8]) {
        let (at, room) = (self.used, self.staging.len());
        let Some(slice) = self.staging.slice(at, bytes.len()) else {
            panic!("{at}+{} is outside the {room} bytes of staging", bytes.len());
        };
        slice.copy_in(0, bytes);
        self.vecs.push(slice);
        self.used += bytes.len();
    }
}
