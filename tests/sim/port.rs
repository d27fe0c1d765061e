//! Fabric as the engines see it: the simulated fabric, with queue pairs that fail on a work request
//! drawn from the seed, and with planted bugs.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use rtrs_core::fabric::sim::SimFabric;
use rtrs_core::fabric::{
    Access, AsyncRegistration, BindResult, Capabilities, CloseReason, ConnRequest, Fabric,
    FabricError, FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData, ProtectionDomain,
    RegisterError, Registered, Sge, ToRegister, Window, WorkRequest, WrOp,
};
use rtrs_core::ids::QpNum;
use rtrs_core::mem::{MemSlice, Region};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{ConnReq, ConnRsp, IoHeader, RNBD_VERSION, RwOp};

use super::Plant;

/// Time that a queue pair stays alive after its end was reported too early, for a planted bug.
const UNDEAD_MAX: Duration = Duration::from_secs(3);

/// Frequency of late data without a planted bug.
const RARE: Ratio = Ratio::new(1, 50);

/// Faults at the ports of one end, shared by all its cores.
#[derive(Debug)]
pub(super) struct PortFaults {
    /// Number of work requests after which a queue pair enters the error state.
    pub(super) fail_after: Option<u32>,
    /// Whether `fail_after` counts receives instead of sends and binds.
    pub(super) at_receive: bool,
    /// Number of memory registrations that fail from now on.
    pub(super) no_memory: u32,
    /// Maximum time to register memory; None if memory is not pinned.
    pub(super) pinned: Option<Duration>,
    /// Whether data of answered reads is sometimes written a second time.
    pub(super) late_data: bool,
    /// Whether PREFLUSH is added to durable writes.
    pub(super) preflush: bool,
    /// Whether the peer's extensions are hidden.
    pub(super) kernel: bool,
    /// Whether the session is being detached.
    pub(super) detaching: bool,
    /// Number of errors so far.
    pub(super) failed: u64,
    plant: Plant,
    leaked: Vec<Arc<dyn MemoryRegistration>>,
    prng: Prng,
}

/// Faults of one end; clones refer to the same end.
pub(super) type SharedFaults = Rc<RefCell<PortFaults>>;

impl PortFaults {
    pub(super) fn new(plant: Plant, prng: Prng) -> SharedFaults {
        let leaked = Vec::new();
        Rc::new(RefCell::new(Self {
            fail_after: None,
            at_receive: false,
            no_memory: 0,
            pinned: None,
            late_data: false,
            preflush: false,
            kernel: false,
            detaching: false,
            failed: 0,
            plant,
            leaked,
            prng,
        }))
    }

    /// Returns the result of a memory registration made now.
    fn memory(&mut self, what: &str) -> Result<(), FabricError> {
        if self.no_memory == 0 {
            return Ok(());
        }
        self.no_memory -= 1;
        self.failed += 1;
        Err(FabricError::system(what, io::Error::from(io::ErrorKind::OutOfMemory)))
    }

    /// Whether the current work request is the one that must fail.
    fn strikes(&mut self, receive: bool) -> bool {
        match self.fail_after.filter(|_| self.at_receive == receive) {
            Some(0) => {
                self.fail_after = None;
                self.failed += 1;
                true
            }
            Some(left) => {
                self.fail_after = Some(left - 1);
                false
            }
            None => false,
        }
    }
}

/// Returns a connection request as a kernel client would have sent it.
fn asked_by_kernel(private_data: &PrivateData) -> PrivateData {
    match ConnReq::decode(private_data.as_bytes()) {
        Ok(req) => PrivateData::new(&ConnReq { ext: ConnReq::default().ext, ..req }.encode()),
        Err(_) => *private_data,
    }
}

/// Returns an answer as a kernel server would have sent it.
fn without_extensions(private_data: &PrivateData) -> PrivateData {
    match ConnRsp::decode(private_data.as_bytes()) {
        Ok(rsp) => PrivateData::new(&ConnRsp { ext: ConnRsp::default().ext, ..rsp }.encode()),
        Err(_) => *private_data,
    }
}

/// Adds PREFLUSH to a durable request, in its client's memory.
fn ask_for_preflush(wr: &WorkRequest) {
    let header = wr.sges.second.as_ref().or(wr.sges.first.as_ref());
    let (WrOp::RdmaWrite { imm: Some(_), .. }, Some(sge)) = (&wr.op, header) else { return };
    let mut bytes = [0; IoHeader::LEN];
    let Some(slice) = sge.slice.slice(0, bytes.len()) else { return };
    slice.copy_out(0, &mut bytes);
    let Ok(io) = IoHeader::decode(&bytes, RNBD_VERSION) else { return };
    if io.rw.is_fua() && io.rw.op() != Ok(RwOp::Flush) {
        slice.copy_in(0, &IoHeader { rw: io.rw.preflush(true), ..io }.encode());
    }
}

/// Port of one core.
#[derive(Debug)]
pub(super) struct Port {
    inner: SimFabric,
    faults: SharedFaults,
    /// Queue pairs that enter the error state once their posted requests have been sent.
    failing: Vec<(QpNum, bool)>,
    /// Queue pairs whose end was reported but that stay alive until this time, for a planted bug.
    undead: Vec<(QpNum, Instant)>,
    /// Events to report before the fabric's, for a planted bug.
    reported: VecDeque<FabricEvent>,
    /// Windows of queue pairs that may become undead, for a planted bug.
    windows: Vec<(QpNum, Arc<dyn Window>)>,
    /// Work request to post again after this many others, for a planted bug.
    twice: Option<(QpNum, WorkRequest, u32)>,
    /// Memory that is being registered, and the time at which each registration ends.
    registering: Vec<(Instant, u64, ToRegister)>,
    now: Instant,
}

impl Port {
    pub(super) fn boxed(inner: SimFabric, faults: SharedFaults) -> Box<dyn Fabric> {
        Box::new(Self {
            inner,
            faults,
            failing: Vec::new(),
            undead: Vec::new(),
            reported: VecDeque::new(),
            windows: Vec::new(),
            twice: None,
            registering: Vec::new(),
            now: Instant::ZERO,
        })
    }

    fn posted(&mut self, qp: QpNum, receive: bool) {
        let mut faults = self.faults.borrow_mut();
        if faults.strikes(receive) {
            let reported = faults.prng.chance(Ratio::new(1, 2));
            if faults.prng.chance(Ratio::new(1, 2)) {
                drop(faults);
                self.inner.fail(qp, reported);
            } else {
                self.failing.push((qp, reported));
            }
        }
    }

    fn has(&self, plant: Plant) -> bool {
        self.faults.borrow().plant == plant
    }

    /// Posts the data of some reads a second time, after some more work requests.
    fn repeats(&mut self, qp: QpNum, wr: &WorkRequest) {
        let faults = &mut self.faults.borrow_mut();
        let often = if faults.late_data { RARE } else { Ratio::new(1, 4) };
        if let Some((_, _, left)) = self.twice.as_mut().filter(|(of, ..)| *of == qp) {
            *left = left.saturating_sub(1);
            if *left == 0
                && let Some((_, wr, _)) = self.twice.take()
            {
                // A failure to post the copy does not matter.
                let _ = self.inner.post_send(qp, wr);
            }
        } else if self.twice.is_none()
            && matches!(wr.op, WrOp::RdmaWrite { imm: None, .. })
            && faults.prng.chance(often)
        {
            let after = faults.prng.range(2..=6) as u32;
            self.twice = Some((qp, WorkRequest { signaled: false, ..wr.clone() }, after));
        }
    }

    /// Ends queue pairs whose end was reported long ago.
    fn bury(&mut self, now: Instant) {
        let all = self.faults.borrow().detaching;
        for (qp, _) in self.undead.extract_if(.., |(_, at)| all || *at <= now) {
            self.windows.retain(|(of, _)| *of != qp);
            self.inner.abort(now, qp);
        }
    }

    /// Whether the planted bug loses this work request.
    fn loses(&self, wr: &WorkRequest) -> bool {
        let mut faults = self.faults.borrow_mut();
        let answer = matches!(wr.op, WrOp::Send { imm: Some(_), .. })
            || matches!(wr.op, WrOp::RdmaWrite { imm: Some(_), .. });
        faults.plant == Plant::LostAnswer
            && answer
            && !wr.signaled
            && faults.prng.chance(Ratio::new(1, 20))
    }
}

impl Listener for Port {
    rtrs_core::forward_listener!(inner);

    fn fits(&self, pd: &Arc<dyn ProtectionDomain>, request: &ConnRequest) -> bool {
        self.inner.fits(pd, request)
    }
}

impl Fabric for Port {
    rtrs_core::forward_fabric!(inner);

    fn capabilities(&self) -> Capabilities {
        let pins_memory = self.faults.borrow().pinned.is_some();
        Capabilities { pins_memory, ..self.inner.capabilities() }
    }
    fn alloc_pd(&mut self, of: PdUse<'_>) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        let mut faults = self.faults.borrow_mut();
        faults.memory("a protection domain")?;
        let pd = self.inner.alloc_pd(of)?;
        if faults.plant == Plant::Leak
            && let Ok(region) = Region::new(256 << 10)
        {
            faults.leaked.push(pd.register(&region, Access::LOCAL)?);
        }
        Ok(pd)
    }
    fn register_async(
        &mut self,
        id: u64,
        what: ToRegister,
    ) -> Option<Result<Registered, RegisterError>> {
        let faults = &mut self.faults.borrow_mut();
        let Some(most) = faults.pinned else { return Some(what.register()) };
        let takes = faults.prng.duration(Duration::ZERO..=most);
        self.registering.push((self.now + takes, id, what));
        None
    }
    fn next_registration(&mut self) -> Option<AsyncRegistration> {
        let at = self.registering.iter().position(|(at, ..)| *at <= self.now)?;
        let (_, id, what) = self.registering.remove(at);
        let memory = self.faults.borrow_mut().memory("memory").map_err(RegisterError::Memory);
        let result = memory.and_then(|()| what.register());
        Some(AsyncRegistration { id, pd: what.pd, result, took: Duration::ZERO })
    }
    fn post_send(&mut self, qp: QpNum, wr: WorkRequest) -> Result<(), FabricError> {
        if self.loses(&wr) {
            return Ok(());
        }
        if self.has(Plant::OpenWindow) || self.faults.borrow().late_data {
            self.repeats(qp, &wr);
        }
        if self.faults.borrow().preflush {
            ask_for_preflush(&wr);
        }
        self.inner.post_send(qp, wr)?;
        self.posted(qp, false);
        Ok(())
    }
    fn post_recv(&mut self, qp: QpNum, wr_id: u64, buf: Option<Sge>) -> Result<(), FabricError> {
        self.inner.post_recv(qp, wr_id, buf)?;
        self.posted(qp, true);
        Ok(())
    }
    fn bind(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        if self.has(Plant::EarlyClosed) && !self.windows.iter().any(|(_, w)| Arc::ptr_eq(w, window))
        {
            self.windows.push((qp, Arc::clone(window)));
        }
        let result = self.inner.bind(qp, window, slice, access, wr_id);
        self.posted(qp, false);
        result
    }
    fn revoke(
        &mut self,
        qp: QpNum,
        window: &Arc<dyn Window>,
        wr_id: u64,
    ) -> Result<BindResult, FabricError> {
        if self.has(Plant::OpenWindow) {
            return Ok(BindResult::Done(window.rkey()));
        }
        let result = self.inner.revoke(qp, window, wr_id);
        self.posted(qp, false);
        result
    }
    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
        for (qp, reported) in std::mem::take(&mut self.failing) {
            self.inner.fail(qp, reported);
        }
    }
    fn abort(&mut self, now: Instant, qp: QpNum) {
        if self.has(Plant::EarlyClosed) && self.windows.iter().any(|(of, _)| *of == qp) {
            self.undead.push((qp, now + UNDEAD_MAX));
            self.reported.push_back(FabricEvent::Closed { qp, reason: CloseReason::Local });
            return;
        }
        self.inner.abort(now, qp);
    }
    fn poll(&mut self, now: Instant) -> bool {
        self.now = now;
        if !self.undead.is_empty() {
            self.bury(now);
        }
        let made = self.registering.iter().any(|(at, ..)| *at <= now);
        self.inner.poll(now) || made || !self.reported.is_empty()
    }
    fn next_event(&mut self) -> Option<FabricEvent> {
        if let Some(event) = self.reported.pop_front() {
            return Some(event);
        }
        let mut event = self.inner.next_event()?;
        if self.faults.borrow().kernel {
            match &mut event {
                FabricEvent::Established { private_data, .. } => {
                    **private_data = without_extensions(private_data);
                }
                FabricEvent::Request(request) => {
                    request.private_data = asked_by_kernel(&request.private_data);
                }
                _ => {}
            }
        }
        if let FabricEvent::Closed { qp, .. } = event {
            self.windows.retain(|(of, _)| *of != qp);
            // The copy would hold memory of a path that has ended.
            self.twice.take_if(|(of, ..)| *of == qp);
        }
        let faults = self.faults.borrow();
        let lost = faults.plant == Plant::LostClose
            && faults.detaching
            && matches!(event, FabricEvent::Closed { .. });
        if lost { self.inner.next_event() } else { Some(event) }
    }
    fn deadline(&self) -> Option<Instant> {
        self.registering
            .iter()
            .fold(self.inner.deadline(), |at, (own, ..)| earliest(at, Some(*own)))
    }
}
