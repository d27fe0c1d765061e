//! The shards' threads: their common parameters, startup and shutdown.
//!
//! Each thread creates its own ring, providers and engine, reports the result, and waits until the
//! main thread lets it serve. A shard that ends unexpectedly stops the others.

use std::io;
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::{self, JoinHandle};

use rtrs_core::block::{Core, WakeHandle};
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::{Mailbox, PollPolicy, Ring, Sender, mailbox, pin_to, run};

use crate::audit::AuditSink;
use crate::daemon::authenticate::Proofs;
use crate::daemon::control_shard::ControlShard;
use crate::daemon::driver::ServerShard;
use crate::daemon::portals::Portals;
use crate::engine::ServerEngine;
use crate::engine::message::{ControlMessage, Message, ShardMessage};
use crate::engine::session::SessionParams;
use crate::error::{Error, ErrorKind, failed};
use crate::export::ExportTable;

/// Number of submissions that a shard's ring can hold per turn before it must submit early.
const RING_ENTRIES: u32 = 1024;

/// Common parameters of all shards.
pub(super) struct Setup {
    pub(super) params: SessionParams,
    pub(super) exports: Arc<ExportTable>,
    pub(super) portals: Portals,
    pub(super) policy: PollPolicy,
    pub(super) cpus: Vec<usize>,
    pub(super) senders: Arc<[Sender<Message>]>,
    pub(super) audit: AuditSink,
    /// Set once the shards may serve.
    pub(super) released: OnceLock<()>,
}

impl Setup {
    /// Lets the shards serve, after all privileges are dropped.
    pub(super) fn release(&self) {
        self.released.get_or_init(|| ());
    }

    /// Stops the shards.
    pub(super) fn stop(&self) {
        stop_all(&self.senders);
        self.release();
    }

    /// Returns a handle for requests to the control shard.
    pub(super) fn control(&self) -> ControlShard {
        ControlShard(self.senders[0].clone())
    }
}

/// Running threads of all shards.
pub(super) struct ShardThreads {
    threads: Vec<JoinHandle<Result<(), Error>>>,
    /// Portals of each shard that has started, or its error.
    started: mpsc::Receiver<Result<Vec<String>, Error>>,
}

impl ShardThreads {
    /// Starts one thread per shard. Stops the others if one cannot be started.
    pub(super) fn start(
        setup: &Arc<Setup>,
        mailboxes: Vec<Mailbox<Message>>,
    ) -> Result<Self, Error> {
        let (report, started) = mpsc::channel();
        let mut threads = Vec::new();
        for (core, mailbox) in (0..setup.params.cores).zip(mailboxes) {
            let (setup_of, report) = (Arc::clone(setup), report.clone());
            let thread = thread::Builder::new()
                .name(format!("shard-{core}"))
                .spawn(move || run_shard(&setup_of, CoreIndex(core), mailbox, &report));
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    setup.stop();
                    let text = "cannot start a thread";
                    return Err(Error::with_source(ErrorKind::System, text, error));
                }
            }
        }
        Ok(Self { threads, started })
    }

    /// Waits until all shards have started. Returns the portals that they listen on.
    pub(super) fn listening(&self) -> Result<Vec<String>, Error> {
        let started = self.started.iter().take(self.threads.len());
        let portals = started.collect::<Result<Vec<_>, _>>()?;
        Ok(portals.into_iter().flatten().collect())
    }

    /// Waits until all threads have ended. Returns the first error.
    pub(super) fn join(self) -> Result<(), Error> {
        let mut outcome = Ok(());
        for thread in self.threads {
            let ended = thread.join().unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::System, "a shard panicked; see the message above"))
            });
            outcome = outcome.and(ended);
        }
        outcome
    }
}

/// Stops the other shards when one ends unexpectedly.
struct Alarm {
    core: CoreIndex,
    senders: Arc<[Sender<Message>]>,
    armed: bool,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if self.core.0 == 0 {
            stop_all(&self.senders);
        } else {
            self.senders[0].send(Message::Control(ControlMessage::Shutdown));
        }
    }
}

fn stop_all(senders: &[Sender<Message>]) {
    for sender in senders {
        sender.send(Message::Shard(ShardMessage::Exit));
    }
}

/// Runs a shard's thread: creates its resources, reports the result, and serves.
fn run_shard(
    setup: &Setup,
    core: CoreIndex,
    mailbox: Mailbox<Message>,
    report: &mpsc::Sender<Result<Vec<String>, Error>>,
) -> Result<(), Error> {
    let senders = Arc::clone(&setup.senders);
    let mut alarm = Alarm { core, senders, armed: true };
    let (ring, mut shard) = match start_shard(setup, core, mailbox) {
        Ok((ring, shard, listening)) => {
            let _ = report.send(Ok(listening));
            (ring, shard)
        }
        Err(error) => {
            // The main thread stops the other shards and returns this error.
            alarm.armed = false;
            let _ = report.send(Err(error));
            return Ok(());
        }
    };
    // The main thread always releases or stops every shard, even after errors.
    setup.released.wait();
    let stats = run(&ring, setup.policy, &mut shard)
        .map_err(failed(ErrorKind::System, format!("shard {core} failed")))?;
    tracing::debug!(%core, ?stats, "a shard ended");
    alarm.armed = false;
    Ok(())
}

fn new_ring() -> Result<std::rc::Rc<Ring>, Error> {
    Ring::new(RING_ENTRIES).map_err(failed(ErrorKind::System, "cannot set up io_uring"))
}

/// Sets up the rings of this many shards at the same time, because they share the limit on locked
/// memory, and then releases them.
///
/// # Errors
/// [`ErrorKind::System`], with the limit and a remedy.
pub(super) fn check_rings(shards: u16) -> Result<(), Error> {
    (0..shards).map(|_| new_ring()).collect::<Result<Vec<_>, _>>().map(drop)
}

type Started = (std::rc::Rc<Ring>, ServerShard, Vec<String>);

fn start_shard(
    setup: &Setup,
    core: CoreIndex,
    mailbox: Mailbox<Message>,
) -> Result<Started, Error> {
    if let Some(cpu) = setup.cpus.get(core.index())
        && let Err(error) = pin_to(*cpu)
    {
        tracing::warn!(%core, cpu, %error, "cannot bind the shard to its CPU");
    }
    let ring = new_ring()?;
    let inbox = mailbox.arm(&ring).map_err(failed(ErrorKind::System, "cannot set up a mailbox"))?;
    let mut fabrics = setup.portals.fabrics(&ring)?;
    let listening = if core.0 == 0 { setup.portals.listen(&mut fabrics)? } else { Vec::new() };
    let senders = Arc::clone(&setup.senders);
    let wake = WakeHandle::new(move || senders[core.index()].send(Message::Wake));
    let place = Core { index: core, ring: Some(std::rc::Rc::clone(&ring)), wake };
    let mut engine = ServerEngine::new(setup.params, place, &setup.exports);
    engine.set_audit(setup.audit.clone());
    if let Some(endpoint) = setup.portals.tls() {
        engine.set_authenticator(Proofs::new(endpoint, setup.senders[0].clone()));
    }
    let senders = Arc::clone(&setup.senders);
    Ok((ring, ServerShard::new(engine, fabrics, inbox, senders), listening))
}

type Mailboxes = (Arc<[Sender<Message>]>, Vec<Mailbox<Message>>);

pub(super) fn mailboxes(cores: u16) -> Result<Mailboxes, Error> {
    let pairs = (0..cores)
        .map(|_| mailbox())
        .collect::<io::Result<Vec<_>>>()
        .map_err(failed(ErrorKind::System, "cannot create mailboxes"))?;
    let (senders, boxes) = pairs.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
    Ok((senders.into(), boxes))
}
