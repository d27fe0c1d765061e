//! Test bench for a case: both ends of a harness, the events they reported, the rules that hold for
//! every event, and the steps that most cases share (listen, connect, register, post, wait).
//!
//! Waits are limited by the harness's patience. A wait that times out panics with the events that
//! did occur.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use super::{Harness, SIDES, Side};
use crate::fabric::{
    Access, BindResult, CloseReason, ConnRequest, ConnectFailure, ConnectParams, Fabric,
    FabricError, FabricEvent, MemoryRegistration, PdUse, PrivateData, ProtectionDomain, QpLimits,
    RemoteMem, Sge, SgeList, WcOp, WcStatus, Window, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::{QpNum, Rkey};
use crate::mem::{MemSlice, Region};
use crate::prng::Prng;
use crate::time::Instant;

/// Work posted on a queue pair that has not completed yet: its ID, and whether it must complete.
#[derive(Debug, Default)]
struct Open {
    sends: BTreeMap<u64, bool>,
    receives: BTreeSet<u64>,
}

/// A harness with its reported events, and the rules that hold for all events.
pub struct Bench<'h> {
    pub(super) harness: &'h mut dyn Harness,
    events: Vec<(Side, FabricEvent)>,
    open: BTreeMap<(Side, QpNum), Open>,
    ended: BTreeSet<(Side, QpNum)>,
    pub(super) prng: Prng,
    next_id: u64,
}

impl std::fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("events", &self.events).finish_non_exhaustive()
    }
}

/// Connection with a queue pair and a protection domain on each end.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub(super) a: Port,
    pub(super) b: Port,
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(super) struct Port {
    pub(super) side: Side,
    pub(super) qp: QpNum,
    pub(super) pd: Arc<dyn ProtectionDomain>,
}

/// Registered memory of a test.
#[derive(Clone, Debug)]
pub(super) struct Memory(pub(super) Arc<dyn MemoryRegistration>);

impl Memory {
    pub(super) fn slice(&self, offset: usize, len: usize) -> MemSlice {
        self.0.region().slice(offset, len).expect("inside the region")
    }

    pub(super) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { slice: self.slice(offset, len), lkey: self.0.lkey() }
    }

    pub(super) fn remote(&self, offset: u64) -> RemoteMem {
        self.with_key(offset, self.0.rkey())
    }

    pub(super) fn with_key(&self, offset: u64, rkey: Rkey) -> RemoteMem {
        RemoteMem { addr: self.0.base().wrapping_add(offset), rkey }
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.slice(offset, len).to_vec()
    }

    pub(super) fn len(&self) -> usize {
        self.0.region().len()
    }
}

pub(super) const LIMITS: QpLimits = QpLimits { send_max: 64, recv_max: 64 };

pub(super) const SEND: WrOp = WrOp::Send { imm: None, invalidate: None };

pub(super) fn write_to(remote: RemoteMem) -> WrOp {
    WrOp::RdmaWrite { remote, imm: None }
}

pub(super) fn read_from(remote: RemoteMem) -> WrOp {
    WrOp::RdmaRead { remote }
}

impl<'h> Bench<'h> {
    pub(super) fn new(harness: &'h mut dyn Harness) -> Self {
        Self {
            harness,
            events: Vec::new(),
            open: BTreeMap::new(),
            ended: BTreeSet::new(),
            prng: Prng::new(1),
            next_id: 1,
        }
    }

    pub(super) fn fabric(&mut self, side: Side) -> &mut dyn Fabric {
        self.harness.fabric(side).unwrap_or_else(|| panic!("the harness has no {side:?}"))
    }

    pub(super) fn now(&self) -> Instant {
        self.harness.now()
    }

    /// Flushes, steps and polls the fabrics, and collects their events.
    pub(super) fn turn(&mut self) {
        for side in SIDES {
            let now = self.harness.now();
            if let Some(fabric) = self.harness.fabric(side) {
                fabric.flush(now);
            }
        }
        self.harness.step();
        for side in SIDES {
            let now = self.harness.now();
            let Some(fabric) = self.harness.fabric(side) else { continue };
            fabric.poll(now);
            let mut events = Vec::new();
            while let Some(event) = fabric.next_event() {
                events.push(event);
            }
            for event in events {
                self.validate(side, &event);
                self.events.push((side, event));
            }
        }
    }

    /// Checks the rules that hold for every event.
    pub(super) fn validate(&mut self, side: Side, event: &FabricEvent) {
        let (qp, last) = match event {
            FabricEvent::Established { qp, .. } => (*qp, false),
            FabricEvent::Completion(wc) => (wc.qp, false),
            FabricEvent::ConnectFailed { qp, .. } | FabricEvent::Closed { qp, .. } => (*qp, true),
            FabricEvent::Request(_) => return,
        };
        let key = (side, qp);
        assert!(!self.ended.contains(&key), "{side:?} {qp}: after its last event: {event:?}");
        let open = self.open.get_mut(&key);
        let open = open.unwrap_or_else(|| panic!("{side:?}: unknown queue pair: {event:?}"));
        if let FabricEvent::Completion(wc) = event {
            let known = match (wc.status, wc.op) {
                (WcStatus::Success, WcOp::Recv | WcOp::RecvRdmaWithImm) => {
                    open.receives.remove(&wc.wr_id)
                }
                (WcStatus::Success, _) => open.sends.remove(&wc.wr_id) == Some(true),
                _ => open.receives.remove(&wc.wr_id) || open.sends.remove(&wc.wr_id).is_some(),
            };
            assert!(known, "{side:?} {qp}: completed twice or never asked for: {wc:?}");
        }
        if last {
            self.ended.insert(key);
            let signaled = open.sends.values().any(|&signaled| signaled);
            let all = open.receives.is_empty() && !signaled;
            assert!(all, "{side:?} {qp}: {event:?} while open: {open:?}");
        }
    }

    /// Runs turns until `done` returns a value. Panics if that takes too long.
    pub(super) fn wait<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> Option<T>,
    ) -> T {
        let start = self.now();
        for _ in 0..10_000_000_u64 {
            if let Some(result) = done(self) {
                return result;
            }
            let waited = self.now().since(start);
            if waited > self.harness.patience() {
                break;
            }
            self.turn();
        }
        panic!("timed out waiting for {what}; unexpected events: {:?}", self.events);
    }

    /// Runs turns for the harness's settle time.
    pub(super) fn settle(&mut self) {
        let until = self.now() + self.harness.settle_time();
        for _ in 0..10_000_000_u64 {
            if self.now() >= until {
                break;
            }
            self.turn();
        }
    }

    /// Takes the first matching event of a side.
    pub(super) fn take(
        &mut self,
        side: Side,
        fits: impl Fn(&FabricEvent) -> bool,
    ) -> Option<FabricEvent> {
        let at = self.events.iter().position(|(s, e)| *s == side && fits(e))?;
        Some(self.events.remove(at).1)
    }

    pub(super) fn request(&mut self) -> ConnRequest {
        self.wait("a connection request", |bench| {
            match bench.take(Side::A, |e| matches!(e, FabricEvent::Request(_)))? {
                FabricEvent::Request(request) => Some(*request),
                _ => None,
            }
        })
    }

    pub(super) fn established(&mut self, side: Side, qp: QpNum) -> PrivateData {
        self.wait("a connection to be established", |bench| {
            let fits =
                |e: &FabricEvent| matches!(e, FabricEvent::Established { qp: q, .. } if *q == qp);
            match bench.take(side, fits)? {
                FabricEvent::Established { private_data, .. } => Some(*private_data),
                _ => None,
            }
        })
    }

    pub(super) fn connect_failed(&mut self, side: Side, qp: QpNum) -> ConnectFailure {
        self.wait("a connection attempt to fail", |bench| {
            let fits =
                |e: &FabricEvent| matches!(e, FabricEvent::ConnectFailed { qp: q, .. } if *q == qp);
            match bench.take(side, fits)? {
                FabricEvent::ConnectFailed { failure, .. } => Some(failure),
                _ => None,
            }
        })
    }

    /// Waits for the last event of a connection and returns its reason.
    pub(super) fn closed(&mut self, port: &Port) -> CloseReason {
        let (side, qp) = (port.side, port.qp);
        self.wait("a connection to be closed", |bench| {
            let fits = |e: &FabricEvent| matches!(e, FabricEvent::Closed { qp: q, .. } if *q == qp);
            match bench.take(side, fits)? {
                FabricEvent::Closed { reason, .. } => Some(reason),
                _ => None,
            }
        })
    }

    /// Waits for a completion.
    pub(super) fn completion(&mut self, port: &Port, wr_id: u64) -> WorkCompletion {
        let (side, qp) = (port.side, port.qp);
        self.wait("a completion", |bench| {
            let fits = |e: &FabricEvent| {
                matches!(e, FabricEvent::Completion(wc) if wc.qp == qp && wc.wr_id == wr_id)
            };
            match bench.take(side, fits)? {
                FabricEvent::Completion(wc) => Some(wc),
                _ => None,
            }
        })
    }

    /// Waits for a completion and checks that it succeeded.
    pub(super) fn good(&mut self, port: &Port, wr_id: u64) -> WorkCompletion {
        let wc = self.completion(port, wr_id);
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        wc
    }

    /// Takes the completions of a queue pair, in order.
    pub(super) fn completions(&mut self, port: &Port) -> Vec<WorkCompletion> {
        let mut found = Vec::new();
        self.events.retain(|(side, event)| match event {
            FabricEvent::Completion(wc) if *side == port.side && wc.qp == port.qp => {
                found.push(*wc);
                false
            }
            _ => true,
        });
        found
    }

    pub(super) fn listen(&mut self) -> SocketAddr {
        let address = self.harness.listen_address();
        let address = self.fabric(Side::A).listen(address).expect("listen");
        assert_ne!(address.port(), 0);
        address
    }

    pub(super) fn pd(&mut self, side: Side) -> Arc<dyn ProtectionDomain> {
        let remote = self.harness.listen_address();
        let local = match side {
            Side::B => self.harness.source_address(),
            Side::A | Side::SecondA => Some(remote.ip()),
        };
        let pd = self.fabric(side).alloc_pd(PdUse::Connect { local, remote });
        pd.expect("a protection domain")
    }

    pub(super) fn params(&self, remote: SocketAddr) -> ConnectParams {
        ConnectParams {
            local: self.harness.source_address(),
            remote,
            private_data: PrivateData::EMPTY,
            limits: LIMITS,
            timeout: self.harness.patience() / 2,
            peer_name: None,
        }
    }

    /// Starts a connection attempt from `B`.
    pub(super) fn start(&mut self, pd: &Arc<dyn ProtectionDomain>, params: &ConnectParams) -> Port {
        let now = self.now();
        let qp = self.fabric(Side::B).connect(now, pd, params).expect("connect");
        self.open.insert((Side::B, qp), Open::default());
        Port { side: Side::B, qp, pd: Arc::clone(pd) }
    }

    /// Accepts a request on a side.
    pub(super) fn accept(
        &mut self,
        side: Side,
        pd: &Arc<dyn ProtectionDomain>,
        request: ConnRequest,
        private_data: &PrivateData,
    ) -> Port {
        let now = self.now();
        let accepted = self.fabric(side).accept(now, pd, request, LIMITS, private_data);
        let qp = accepted.expect("accept");
        self.open.insert((side, qp), Open::default());
        Port { side, qp, pd: Arc::clone(pd) }
    }

    /// Connects `A` and `B`.
    pub(super) fn pair(&mut self) -> Pair {
        let address = self.listen();
        let (pd_a, pd_b) = (self.pd(Side::A), self.pd(Side::B));
        self.pair_at(address, &pd_a, &pd_b)
    }

    /// Adds a connection to an existing listener.
    pub(super) fn pair_at(
        &mut self,
        address: SocketAddr,
        pd_a: &Arc<dyn ProtectionDomain>,
        pd_b: &Arc<dyn ProtectionDomain>,
    ) -> Pair {
        let params = self.params(address);
        let b = self.start(pd_b, &params);
        let request = self.request();
        let a = self.accept(Side::A, pd_a, request, &PrivateData::EMPTY);
        self.established(Side::A, a.qp);
        self.established(Side::B, b.qp);
        Pair { a, b }
    }

    /// Registers memory filled with one byte.
    pub(super) fn memory(&mut self, port: &Port, len: usize, access: Access, byte: u8) -> Memory {
        let region = Region::new(len).expect("memory");
        region.fill(0, region.len(), byte);
        Memory(port.pd.register(&region, access).expect("a registration"))
    }

    /// Registers memory filled with random bytes.
    pub(super) fn source(&mut self, port: &Port, len: usize) -> Memory {
        let memory = self.memory(port, len, Access::LOCAL, 0);
        let mut bytes = vec![0; memory.len()];
        self.prng.fill(&mut bytes);
        memory.slice(0, bytes.len()).copy_in(0, &bytes);
        memory
    }

    pub(super) fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(super) fn try_post(
        &mut self,
        port: &Port,
        op: WrOp,
        sges: SgeList,
        signaled: bool,
    ) -> Result<u64, FabricError> {
        let wr_id = self.id();
        let wr = WorkRequest { wr_id, op, sges, signaled };
        self.fabric(port.side).post_send(port.qp, wr)?;
        let open = self.open.get_mut(&(port.side, port.qp)).expect("a known queue pair");
        open.sends.insert(wr_id, signaled);
        Ok(wr_id)
    }

    /// Posts a signaled request.
    pub(super) fn post(&mut self, port: &Port, op: WrOp, sges: SgeList) -> u64 {
        self.try_post(port, op, sges, true).expect("post")
    }

    /// Posts a request that completes only if it fails.
    pub(super) fn post_silent(&mut self, port: &Port, op: WrOp, sges: SgeList) -> u64 {
        self.try_post(port, op, sges, false).expect("post")
    }

    pub(super) fn try_recv(&mut self, port: &Port, buf: Option<Sge>) -> Result<u64, FabricError> {
        let wr_id = self.id();
        self.fabric(port.side).post_recv(port.qp, wr_id, buf)?;
        let open = self.open.get_mut(&(port.side, port.qp)).expect("a known queue pair");
        open.receives.insert(wr_id);
        Ok(wr_id)
    }

    /// Posts a receive.
    pub(super) fn recv(&mut self, port: &Port, buf: Option<Sge>) -> u64 {
        self.try_recv(port, buf).expect("post a receive")
    }

    pub(super) fn in_force(&mut self, port: &Port, result: BindResult, wr_id: u64) -> Rkey {
        match result {
            BindResult::Done(key) => key,
            BindResult::Pending(key) => {
                let open = self.open.get_mut(&(port.side, port.qp)).expect("known");
                open.sends.insert(wr_id, true);
                let wc = self.good(port, wr_id);
                assert_eq!(wc.op, WcOp::Bind);
                key
            }
        }
    }

    /// Binds a window and waits until the new key is valid.
    pub(super) fn bind(
        &mut self,
        port: &Port,
        window: &Arc<dyn Window>,
        slice: &MemSlice,
        access: Access,
    ) -> Rkey {
        let wr_id = self.id();
        let bound = self.fabric(port.side).bind(port.qp, window, slice, access, wr_id);
        let key = self.in_force(port, bound.expect("bind"), wr_id);
        assert_eq!(window.rkey(), key);
        key
    }

    /// Revokes a window and waits until its key is invalid.
    pub(super) fn revoke(&mut self, port: &Port, window: &Arc<dyn Window>) -> Rkey {
        let wr_id = self.id();
        let revoked = self.fabric(port.side).revoke(port.qp, window, wr_id);
        self.in_force(port, revoked.expect("revoke"), wr_id)
    }

    pub(super) fn disconnect(&mut self, port: &Port) {
        let now = self.now();
        self.fabric(port.side).disconnect(now, port.qp);
    }

    pub(super) fn abort(&mut self, port: &Port) {
        let now = self.now();
        self.fabric(port.side).abort(now, port.qp);
    }

    /// Checks that both ends close for the right reasons after `offender` did something that
    /// `victim` must refuse.
    pub(super) fn refused(&mut self, offender: &Port, victim: &Port) {
        let reason = self.closed(victim);
        assert!(matches!(reason, CloseReason::Protocol(_)), "{reason:?}");
        let reason = self.closed(offender);
        let ended = matches!(reason, CloseReason::PeerTerminated(_) | CloseReason::Lost(_));
        assert!(ended, "{reason:?}");
    }

    /// Checks that a connection still works by sending in both directions.
    pub(super) fn alive(&mut self, pair: &Pair) {
        let Pair { a, b } = pair;
        for (from, to) in [(a, b), (b, a)] {
            let recv = self.recv(to, None);
            let send = self.post(from, SEND, SgeList::EMPTY);
            self.good(to, recv);
            self.good(from, send);
        }
    }
}
