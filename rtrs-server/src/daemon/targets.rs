//! Exports whose path has come to lead to another file or device.
//!
//! A thread reopens unused exports by their path: once a second, and before the first session opens
//! an export ([`Examiner`]), so that no session starts on the old file. The backend examines the
//! target of the path (`backend/file/watch.rs`) on threads that may block; the wait for that is
//! bounded.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::wire::Name;

use super::control_shard::ControlShard;
use super::reload::Changes;
use crate::engine::finder::{Examiner, OpenMode};
use crate::engine::message::{ControlMessage, ControlRequest, Message};
use crate::engine::reply_to::ReplyTo;

/// Interval between checks of all exports.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// An open that waits until the target is examined.
#[derive(Debug)]
struct Waiting {
    reply_to: ReplyTo,
    name: Name,
    mode: OpenMode,
}

/// Sender of opens to the thread.
#[derive(Debug)]
struct Opens(Sender<Waiting>);

impl Examiner for Opens {
    fn examine(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool {
        self.0.send(Waiting { reply_to, name: *name, mode }).is_ok()
    }
}

/// Starts the thread, which ends soon after the exports are dropped. Opens are sent through the
/// returned examiner.
pub(super) fn watch(
    changes: &Arc<Changes>,
    control: ControlShard,
) -> std::io::Result<Box<dyn Examiner>> {
    let (opens, inbox) = mpsc::channel();
    let changes = Arc::downgrade(changes);
    let named = thread::Builder::new().name("export-targets".into());
    named.spawn(move || look(&inbox, &changes, &control))?;
    Ok(Box::new(Opens(opens)))
}

fn look(inbox: &Receiver<Waiting>, changes: &Weak<Changes>, control: &ControlShard) {
    let mut next = Instant::now() + LOOK_EVERY;
    loop {
        match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Waiting { reply_to, name, mode }) => {
                if let Some(changes) = changes.upgrade() {
                    changes.exports.examine_before_open(name.as_bytes());
                }
                let mode = OpenMode { examined: true, ..mode };
                let request = ControlRequest::Open { name: Box::new(name), mode };
                control.0.send(Message::Control(ControlMessage::Request { reply_to, request }));
            }
            Err(RecvTimeoutError::Timeout) => {
                let Some(changes) = changes.upgrade() else { return };
                changes.exports.reopen_replaced();
                next = Instant::now() + LOOK_EVERY;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
