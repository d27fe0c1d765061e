//! Exports whose path now resolves to a different file or device.
//!
//! Once a second, a thread reopens unused exports by path. Each export is reopened on its own
//! thread, because targets can hang. Before the first session opens an export, the export is
//! reopened in the same way ([`Examiner`]), so that no session starts using the old file. The
//! backend examines the path's target (`backend/file/watch.rs`) on threads that may block; the wait
//! for the result is bounded.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use rtrs_core::wire::Name;

use super::control_shard::ControlShard;
use super::reload::Changes;
use crate::engine::finder::{Examined, Examiner, OpenMode};
use crate::engine::message::{ControlMessage, ControlRequest, Message};
use crate::engine::reply_to::ReplyTo;

/// Interval between checks of all exports.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of open requests whose targets are examined at the same time.
const EXAMINED_MAX: usize = 64;
/// Maximum number of exports being reopened at the same time.
const REOPENED_MAX: usize = 64;

/// An open request that waits until the target has been examined.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    reply_to: ReplyTo,
    name: Name,
    mode: OpenMode,
}

/// Sender of open requests to the thread that handles them.
#[derive(Debug)]
struct Opens(Sender<Waiting>);

impl Examiner for Opens {
    fn examine(&self, reply_to: ReplyTo, name: &Name, mode: OpenMode) -> bool {
        self.0.send(Waiting { reply_to, name: *name, mode }).is_ok()
    }
}

/// Starts the threads, which end soon after the exports are dropped. Open requests are sent through
/// the returned examiner.
pub(super) fn watch(
    changes: &Arc<Changes>,
    control: ControlShard,
) -> std::io::Result<Box<dyn Examiner>> {
    let (opens, inbox) = mpsc::channel();
    let (of_opens, changes) = (Arc::downgrade(changes), Arc::downgrade(changes));
    let named = thread::Builder::new().name("export-targets".into());
    named.spawn(move || look(&changes))?;
    let named = thread::Builder::new().name("export-opens".into());
    named.spawn(move || take_opens(&inbox, &of_opens, &control))?;
    Ok(Box::new(Opens(opens)))
}

fn look(changes: &Weak<Changes>) {
    let running = Arc::new(());
    loop {
        thread::sleep(LOOK_EVERY);
        let Some(changes) = changes.upgrade() else { return };
        changes.exports.opener.warn_of_slow_save();
        for name in changes.exports.to_reopen() {
            let (of_thread, one) = (Arc::clone(&changes), Arc::clone(&running));
            if Arc::strong_count(&running) > REOPENED_MAX + 1 {
                break;
            }
            let named = thread::Builder::new().name("export-reopen".into());
            // If no thread can be started, the next check tries again.
            let _ = named.spawn(move || {
                let _one = one;
                of_thread.exports.reopen_unused(&name);
            });
        }
    }
}

/// Examines the targets of open requests, each on its own thread, so that a hanging target does not
/// delay others.
fn take_opens(inbox: &Receiver<Waiting>, changes: &Weak<Changes>, control: &ControlShard) {
    let running = Arc::new(());
    for open in inbox {
        let (of_thread, to, one) = (Weak::clone(changes), control.clone(), Arc::clone(&running));
        let named = thread::Builder::new().name("export-open".into());
        let started = Arc::strong_count(&running) <= EXAMINED_MAX + 1
            && named
                .spawn(move || {
                    let _one = one;
                    examine(open, &of_thread, &to);
                })
                .is_ok();
        if !started {
            examine(open, changes, control);
        }
    }
}

/// Examines the target of an open request, then passes the request on to the control shard.
fn examine(open: Waiting, changes: &Weak<Changes>, control: &ControlShard) {
    let Waiting { reply_to, name, mode } = open;
    let examined = changes
        .upgrade()
        .map_or(Examined::Yes, |changes| changes.exports.examine_before_open(name.as_bytes()));
    let mode = OpenMode { examined, ..mode };
    let request = ControlRequest::Open { name: Box::new(name), mode };
    control.0.send(Message::Control(ControlMessage::Request { reply_to, request }));
}
