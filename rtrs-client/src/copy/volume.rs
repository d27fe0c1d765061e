//! Volume as one end of a copy: an embedded session with the queues of the client's engine.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rtrs_core::block::{IoFlags, IoOp};
use rtrs_core::extents::{self, Extent};
use rtrs_core::mem::{OwnedBytes, SharedBytes};
use rtrs_core::rt::{EventReceiver, Sender};
use rtrs_core::status::IoStatus;

use super::failure::Failure;
use super::side::{Answer, Limits, Op, Request, Results, Setup, Side, Sizes};
use crate::embed::{
    EmbedOptions, EmbedPlan, EmbeddedVolume, Outcome, Pieces, Submission, VolumeEvent, VolumeUri,
};
use crate::error::{Error, ErrorKind, system, usage};

/// Time allowed for requests in flight to finish when a copy ends early.
const GRACE: Duration = Duration::from_secs(1);
/// Interval at which a waiting thread checks again.
const WAIT: Duration = Duration::from_secs(60);

/// Access to an opened volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VolumeAccess {
    Read,
    Write,
}

/// Request held by the session.
#[derive(Debug)]
struct Held {
    request: Request,
    memory: Option<SharedBytes>,
}

/// Requests held by the session, by slot.
#[derive(Debug)]
struct InFlight {
    held: Vec<Option<Held>>,
    has_ended: bool,
}

/// Volume as one end of a copy.
pub(super) struct VolumeSide {
    volume: EmbeddedVolume,
    limits: Limits,
    submissions: Vec<Sender<Submission>>,
    inflight: Arc<Mutex<InFlight>>,
    results: Results,
}

impl fmt::Debug for VolumeSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeSide").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// Identity of a volume, used to find out whether two ends are the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeIdentity {
    /// Identity that the server reports, or the export and path if it reports none.
    text: String,
}

/// Returns the settings for the volume at a URI. Each slot can be in flight on each queue.
fn plan(uri: &str, access: VolumeAccess, sizes: Sizes) -> Result<EmbedPlan, Error> {
    let options = EmbedOptions {
        queues: 1,
        queue_depth: sizes.requests + 1,
        io_max: sizes.io_max,
        retry_for: Duration::ZERO,
    };
    let VolumeUri { path, export, mut settings } = uri.parse()?;
    for (name, flag) in [("queue-depth", "--requests"), ("io-max", "--request-size")] {
        if settings.iter().any(|(given, _)| given == name) {
            return Err(usage(format!("cannot use {name} in the URI {uri:?}; use {flag}")));
        }
    }
    settings.insert(0, ("path".to_owned(), path));
    let access = match access {
        VolumeAccess::Read => "ro",
        VolumeAccess::Write => "rw",
    };
    settings.push(("access".to_owned(), access.to_owned()));
    EmbedPlan::new(&export, &settings, options)
}

impl VolumeSide {
    /// Opens the volume at a URI.
    pub(super) fn open(
        uri: &str,
        access: VolumeAccess,
        Setup { sizes, results }: Setup,
    ) -> Result<(Self, VolumeIdentity), Error> {
        let plan = plan(uri, access, sizes)?;
        let (volume, users) = EmbeddedVolume::open(&plan)?;
        let geometry = volume.geometry();
        let limits = Limits {
            size: Some(geometry.size),
            block: geometry.logical_block,
            io_max: geometry.io_max.min(sizes.io_max),
            zeroes_max: geometry.zeroes_max.into(),
            extents: geometry.extents,
            is_zero: false,
        };
        let held = (0..=sizes.requests).map(|_| None).collect();
        let inflight = Arc::new(Mutex::new(InFlight { held, has_ended: false }));
        let mut side = Self { volume, limits, submissions: Vec::new(), inflight, results };
        if access == VolumeAccess::Write && geometry.read_only {
            return Err(Error::new(ErrorKind::System, format!("cannot write: {uri} is read-only")));
        }
        for user in users {
            side.submissions.push(user.submissions);
            side.spawn_receiver(user.outcomes)?;
        }
        let reported = side.volume.report().and_then(|report| report.identity);
        let identity = reported.map_or_else(
            || format!("{} {:?}", plan.session.export_name, plan.session.settings.path),
            |identity| identity.to_string(),
        );
        Ok((side, VolumeIdentity { text: identity }))
    }

    /// Starts the thread that reports the outcomes of a queue.
    fn spawn_receiver(&self, mut outcomes: EventReceiver<Outcome>) -> Result<(), Error> {
        let (inflight, results) = (Arc::clone(&self.inflight), self.results.clone());
        let work = move || {
            loop {
                let is_closed = outcomes.is_closed();
                while let Some(Outcome { slot, status }) = outcomes.take() {
                    let held = inflight.lock().held[slot as usize].take();
                    if held.is_some_and(|held| !held.report(&results, status)) {
                        return;
                    }
                }
                if is_closed {
                    return end(&inflight, &results);
                }
                if let Err(error) = outcomes.wait(WAIT) {
                    tracing::error!("cannot wait for outcomes: {error}");
                    return end(&inflight, &results);
                }
            }
        };
        let spawned = thread::Builder::new().name("rtrs-outcomes".into()).spawn(work);
        spawned.map(drop).map_err(system("cannot start a thread"))
    }
}

/// Fails all requests in flight, and all later ones.
fn end(inflight: &Mutex<InFlight>, results: &Results) {
    let mut inflight = inflight.lock();
    inflight.has_ended = true;
    for held in inflight.held.iter_mut().filter_map(Option::take) {
        if !held.report(results, IoStatus::Aborted) {
            return;
        }
    }
}

impl Held {
    /// Reports the outcome. Returns false if the copy has ended.
    fn report(self, results: &Results, status: IoStatus) -> bool {
        let Self { mut request, memory } = self;
        let mut answer = Answer { len: request.len, extents: Vec::new() };
        let mut result = if status.is_ok() { Ok(()) } else { Err(status) };
        if let Some(memory) = memory {
            if request.op == Op::Extents && result.is_ok() {
                let len = u32::try_from(request.len).unwrap_or(u32::MAX);
                let is_valid = extents::read(&memory.region().whole(), len, |extent: Extent| {
                    answer.extents.push(extent);
                    true
                });
                result = if is_valid { Ok(()) } else { Err(IoStatus::Io) };
            } else {
                request.buffer = Some(OwnedBytes::reclaim(memory));
            }
        }
        results.send(request, result.map(|()| answer).map_err(Failure::from))
    }
}

impl Side for VolumeSide {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, mut request: Request) {
        let rounded = request.len.next_multiple_of(self.limits.block.into());
        let op = match request.op {
            Op::Read => IoOp::Read,
            Op::Write => IoOp::Write,
            Op::Zero => IoOp::WriteZeroes,
            Op::Extents => IoOp::Extents,
            Op::Finish { durable: true } => IoOp::Flush,
            Op::Finish { durable: false } => {
                self.results.send(request, Ok(Answer::default()));
                return;
            }
        };
        if let (Op::Write, Some(buffer)) = (request.op, &mut request.buffer) {
            let range = |len: u64| usize::try_from(len).unwrap_or(usize::MAX);
            let rest = buffer.get_mut(range(request.len)..range(rounded));
            rest.into_iter().for_each(|rest| rest.fill(0));
        }
        let buffer = match op {
            IoOp::Extents => Some(OwnedBytes::from(vec![0; extents::LEN_MAX])),
            _ => request.buffer.take(),
        };
        let memory = buffer.map(OwnedBytes::share);
        let bytes = usize::try_from(rounded).unwrap_or(usize::MAX);
        let pieces = match (&memory, op) {
            (None, _) => Pieces::None,
            (Some(memory), IoOp::Extents) => Pieces::One(memory.region().whole()),
            (Some(memory), _) => match memory.region().slice(0, bytes) {
                Some(slice) => Pieces::One(slice),
                None => Pieces::None,
            },
        };
        let slot = request.slot;
        let is_flush = op == IoOp::Flush;
        let submission = Submission {
            slot: u32::try_from(slot).unwrap_or(u32::MAX),
            op,
            flags: IoFlags::default(),
            offset: if is_flush { 0 } else { request.offset },
            len: if is_flush { 0 } else { u32::try_from(rounded).unwrap_or(u32::MAX) },
            memory: pieces,
        };
        let held = Held { request, memory };
        let mut inflight = self.inflight.lock();
        if inflight.has_ended {
            held.report(&self.results, IoStatus::Aborted);
            return;
        }
        inflight.held[slot] = Some(held);
        let queue = slot % self.submissions.len();
        self.submissions[queue].send(submission);
    }

    fn explain(&self) -> Option<String> {
        let events = std::iter::from_fn(|| self.volume.next_event(Duration::ZERO));
        let failures = events.filter_map(|event| match event {
            VolumeEvent::Failed(why) => Some(why),
            _ => None,
        });
        failures.last()
    }
}

impl Drop for VolumeSide {
    fn drop(&mut self) {
        let abandoned = self.volume.close(GRACE);
        if abandoned > 0 {
            tracing::warn!("{abandoned} requests did not finish; the server may still run them");
        }
    }
}
