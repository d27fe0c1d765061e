//! Body of the fuzz target `server_paths`.
//!
//! The input is a small program of client actions. The clients follow none of the protocol's rules,
//! but reach the server only through a fabric that behaves like a real one. They connect with
//! arbitrary private data, send arbitrary bytes, write arbitrary requests into their chunks, drop
//! connections halfway, and fall silent; the disk stalls and resumes; the operator disconnects
//! paths. The server is the daemon's engine, on one or two shards of the simulated fabric. The
//! target fails on a panic, if the server does not become idle, if its tables are inconsistent, if
//! it registers more memory than it may, or if any part of a session remains after its clients have
//! left. The fuzz crate runs the target with new inputs, and the tests with the corpus.

mod proofs;
#[cfg(test)]
mod tests;
mod text;

pub use text::fuzz_text;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rtrs_core::block::{BlockDevice, BlockSource, Completion, Core, Geometry, Io};
use rtrs_core::fabric::sim::{BindMode, NodeId, SimFabric, World, WorldOptions, sim_ip};
use rtrs_core::fabric::{
    Access, ConnectParams, Fabric, FabricEvent, MemoryRegistration, PdUse, PrivateData,
    ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus, WorkCompletion,
    WorkRequest, WrOp,
};
use rtrs_core::identity::ServerProcess;
use rtrs_core::ids::{
    ConnIndex, CoreIndex, PathUuid, PermitId, ProviderIndex, QpNum, Rkey, SessionId,
};
use rtrs_core::limits::Limits;
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::wire::{
    AccessMode, ClientExtensions, Close, ConnReq, Discover, Fence, Imm, InfoReq, InfoRsp, IoHeader,
    Name, Open, OpenFlags, ReadMsg, RkeyRsp, Rw, SessInfo, SgDesc, WriteMsg,
};

use self::proofs::Tasks;
use crate::engine::ServerEngine;
use crate::engine::message::{AdminReplyTo, AdminRequest, ControlMessage, Message};
use crate::engine::session::SessionParams;
use crate::export::{Export, ExportTable};

const DEPTH: u16 = 4;
const CHUNK: u32 = 8192;
const DISK: u64 = 64 << 10;
/// Highest path UUID, counted from 1; each path has up to three connections.
const PATHS: u8 = 3;
const CONNS_MAX: usize = 10;
const PORT: u16 = 1234;
/// Layout of a client's memory: receive buffers, send buffers, results.
const RECVS: usize = 8;
const RECV_LEN: usize = 256;
const SEND_AT: usize = CONNS_MAX * RECVS * RECV_LEN;
const SEND_LEN: usize = 32 << 10;
const RESULT_AT: usize = SEND_AT + SEND_LEN;
const MEMORY: usize = RESULT_AT + CHUNK as usize;
/// Maximum number of turns at one point in time, and of steps in a program.
const TURNS_MAX: usize = 20_000;
const STEPS_MAX: usize = 200;
/// Time within which the server must clean up after vanished clients, and must shut down.
const END: Duration = Duration::from_secs(120);

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes([self.byte()?, self.byte()?]))
    }

    /// Takes up to `len` bytes.
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head.to_vec()
    }
}

/// An in-memory disk that stalls while `held` is set.
#[derive(Debug)]
struct Disk {
    geometry: Geometry,
    held: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Queue {
    geometry: Geometry,
    held: Arc<AtomicBool>,
    taken: VecDeque<Io>,
    done: VecDeque<Completion>,
}

impl BlockSource for Disk {
    fn geometry(&self) -> Geometry {
        self.geometry.clone()
    }
    fn open(&self, _core: &Core) -> std::io::Result<Box<dyn BlockDevice>> {
        Ok(Box::new(Queue {
            geometry: self.geometry.clone(),
            held: Arc::clone(&self.held),
            taken: VecDeque::new(),
            done: VecDeque::new(),
        }))
    }
}

impl BlockDevice for Queue {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    fn submit(&mut self, io: Io) -> Result<(), Io> {
        if self.inflight() >= 3 {
            return Err(io);
        }
        self.taken.push_back(io);
        Ok(())
    }
    fn poll(&mut self, _now: Instant) -> bool {
        if self.held.load(Ordering::Relaxed) || self.taken.is_empty() {
            return false;
        }
        for io in self.taken.drain(..) {
            let status = self.geometry.check(&io);
            self.done.push_back(Completion::new(io.tag, status));
        }
        true
    }
    fn reap(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }
    fn inflight(&self) -> usize {
        self.taken.len() + self.done.len()
    }
}

struct Host {
    core: ServerEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: VecDeque<Message>,
}

/// A client connection, and the path to which it claims to belong.
struct Conn {
    qp: QpNum,
    path: u8,
    slot: usize,
    up: bool,
}

/// All clients: one process with several addresses.
struct Clients {
    fabric: SimFabric,
    pd: Arc<dyn ProtectionDomain>,
    memory: Arc<dyn MemoryRegistration>,
    conns: Vec<Conn>,
    /// Chunks that each path was last given.
    chunks: BTreeMap<u8, Vec<SgDesc>>,
    posted: u64,
    sent: usize,
    /// Number of messages received from the server.
    received: u64,
}

struct Rig {
    world: World,
    node: NodeId,
    hosts: Vec<Host>,
    clients: Clients,
    held: Arc<AtomicBool>,
    params: SessionParams,
    tasks: Tasks,
}

impl Rig {
    fn new(setup: u8) -> Option<Self> {
        let bind = if setup & 1 == 0 { BindMode::Done } else { BindMode::Pending };
        let world = World::with_options(7, WorldOptions { bind, ..WorldOptions::default() });
        let (node, client) = (world.node(sim_ip(1)), world.node(sim_ip(2)));
        let params = SessionParams {
            limits: Limits::new(u32::from(DEPTH), CHUNK).ok()?,
            always_invalidate: (setup & 2 == 0).into(),
            heartbeat_interval: Duration::from_millis(if setup & 4 == 0 { 500 } else { 20_000 }),
            cores: if setup & 8 == 0 { 1 } else { 2 },
            ..SessionParams::default()
        };
        let held = Arc::new(AtomicBool::new(false));
        let geometry = Geometry {
            discard: true,
            discard_granularity: 512,
            write_zeroes: true,
            ..Geometry::plain(DISK)
        };
        let export = |name: &str, read_only| {
            let disk = Disk { geometry: geometry.clone(), held: Arc::clone(&held) };
            Export { read_only, ..Export::new(name, Arc::new(disk)) }
        };
        let exports = ExportTable::new(vec![export("vol", false), export("fixed", true)]);
        let mut hosts: Vec<Host> = (0..params.cores)
            .map(|at| Host {
                core: ServerEngine::new(params, Core::without_ring(CoreIndex(at)), &exports),
                fabrics: vec![Box::new(world.fabric(node))],
                inbox: VecDeque::new(),
            })
            .collect();
        let tasks = Tasks::default();
        if setup & 16 != 0 {
            hosts[0].core.set_authenticator(Arc::new(tasks.clone()));
        }
        let remote = SocketAddr::new(sim_ip(1), PORT);
        hosts[0].fabrics[0].listen(remote).ok()?;
        let mut fabric = world.fabric(client);
        let pd = fabric.alloc_pd(PdUse::Connect { local: None, remote }).ok()?;
        let memory = pd.register(&Region::new(MEMORY).ok()?, Access::REMOTE_WRITE).ok()?;
        let (conns, chunks) = (Vec::new(), BTreeMap::new());
        let clients =
            Clients { fabric, pd, memory, conns, chunks, posted: 0, sent: 0, received: 0 };
        Some(Self { world, node, hosts, clients, held, params, tasks })
    }

    /// Runs one turn of every shard and of the clients. Returns whether anything happened.
    fn turn(&mut self) -> bool {
        let (now, mut busy, mut messages) = (self.world.now(), false, Vec::new());
        self.hosts[0].inbox.extend(self.tasks.next());
        for host in &mut self.hosts {
            while let Some(message) = host.inbox.pop_front() {
                busy = true;
                host.core.handle_message(now, message, &mut host.fabrics);
                host.core.check();
            }
            busy |= host.fabrics[0].poll(now);
            while let Some(event) = host.fabrics[0].next_event() {
                busy = true;
                host.core.handle_event(now, ProviderIndex(0), event, &mut host.fabrics);
                host.core.check();
            }
            busy |= host.core.poll(now, &mut host.fabrics);
            host.core.check();
            while let Some(message) = host.core.take_message() {
                messages.push(message);
            }
            host.fabrics[0].flush(now);
        }
        for (to, message) in messages {
            busy = true;
            self.hosts[to.index()].inbox.push_back(message);
        }
        busy | self.clients.turn(now)
    }

    /// Advances the clock by `time` and runs everything that is due.
    fn pass(&mut self, time: Duration) {
        let end = self.world.now() + time;
        let (mut turns, mut at) = (0, self.world.now());
        loop {
            while self.turn() {
                turns += 1;
                assert!(turns < TURNS_MAX, "the server does not become idle");
            }
            let timers = self.hosts.iter().fold(None, |at, h| earliest(at, h.core.deadline()));
            let next = earliest(timers, self.world.next_event_time());
            let Some(next) = next.filter(|next| *next <= end) else { break };
            let next = next.max(self.world.now() + Duration::from_nanos(1)).min(end);
            if next > at + Duration::from_millis(1) {
                (turns, at) = (0, next);
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "the server does not become idle");
            if next == self.world.now() {
                break;
            }
            self.world.advance_to(next);
        }
        self.world.advance_to(end);
        while self.turn() {
            turns += 1;
            assert!(turns < TURNS_MAX, "the server does not become idle");
        }
        // One pool for each path of each possible session, and four more.
        let pool = usize::from(DEPTH) * CHUNK as usize + (256 << 10);
        let bound = (usize::from(PATHS) * 2 + 4) * pool;
        let registered = self.world.registered(self.node);
        assert!(registered <= bound, "{registered} bytes registered, the bound is {bound}");
    }

    fn settle(&mut self) {
        self.pass(Duration::from_millis(1));
    }

    fn post(&mut self, message: ControlMessage) {
        self.hosts[0].inbox.push_back(Message::Control(message));
    }

    /// Brings a path up and opens `vol`; most programs start from that state.
    fn come_up(&mut self, path: u8, session: u8) {
        for cid in 0..3 {
            let request = con_req(cid, 3, path, session, true, 1);
            self.clients.connect(self.world.now(), path, &request.encode());
            self.settle();
        }
        let mut up = self.clients.conns.iter().filter(|conn| conn.up);
        let Some(first) = up.position(|conn| conn.path == path) else { return };
        let name = Name::new(b"fuzz").unwrap_or_default();
        self.clients.send(first, &InfoReq { session_name: name }.encode(), None);
        self.settle();
        self.clients.open(first, 0, "vol", AccessMode::ReadWrite);
        self.settle();
    }

    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let now = self.world.now();
        match input.byte()? % 16 {
            0 => {
                let len = usize::from(input.byte()?);
                let bytes = input.bytes(len.min(56));
                self.clients.connect(now, 1, &bytes);
            }
            1 => {
                let (fields, more) = (input.byte()?, input.byte()?);
                let (path, cid) = (1 + (fields & 15) % PATHS, u16::from(more & 3));
                let session = 1 + (fields >> 4 & 1);
                let request = con_req(
                    cid,
                    cid.max(u16::from(more >> 2 & 3)) + 1,
                    path,
                    session,
                    fields & 32 == 0,
                    u16::from(more >> 4),
                );
                self.clients.connect(now, path, &request.encode());
            }
            2 => {
                let fields = input.byte()?;
                self.come_up(1 + (fields & 15) % PATHS, 1 + (fields >> 4 & 1));
            }
            3 => {
                let (conn, len) = (usize::from(input.byte()?), usize::from(input.byte()?));
                let bytes = input.bytes(len);
                let imm = if len & 1 == 0 { None } else { Some(u32::from(input.short()?)) };
                self.clients.send(conn, &bytes, imm);
            }
            4 => {
                let conn = usize::from(input.byte()?);
                let imm = u32::from(input.short()?) << 16 | u32::from(input.short()?);
                self.clients.write(conn, 0, 0, &[], imm);
            }
            5 => {
                let conn = usize::from(input.byte()?);
                self.clients.end(now, conn, input.byte()? & 1 == 0);
            }
            6 => self.pass(Duration::from_millis(u64::from(input.short()?) % 8000)),
            7 => {
                let on = input.byte()? & 1 == 0;
                self.held.store(on, Ordering::Relaxed);
            }
            8 => {
                let (a, b) = (sim_ip(1), sim_ip(2));
                match input.byte()? % 6 {
                    0 => self.world.silence(a, b),
                    1 => self.world.silence(b, a),
                    2 => self.world.unsilence(a, b),
                    3 => self.world.unsilence(b, a),
                    4 => self.world.link_down(a, b),
                    _ => self.world.link_up(a, b),
                }
            }
            9 => {
                let request = match input.byte()? % 4 {
                    0 => AdminRequest::Sessions,
                    1 => AdminRequest::Evict { session: "fuzz".into() },
                    2 => AdminRequest::Disconnect { session: "fuzz".into(), path: Some(1) },
                    _ => AdminRequest::Disconnect { session: "fuzz".into(), path: None },
                };
                self.post(ControlMessage::Admin { request, reply: AdminReplyTo::new(drop) });
            }
            // A request made of raw bytes, with an arbitrary position in the immediate.
            10 => {
                let (conn, permit) = (usize::from(input.byte()?), input.byte()?);
                let (offset, len) = (u32::from(input.short()?), usize::from(input.byte()?));
                let bytes = input.bytes(len);
                let id = PermitId(u16::from(permit) % DEPTH);
                let imm = Imm::Request { permit: id, offset: offset % (2 * CHUNK) };
                let imm = imm.encode_with(self.params.limits.mem_bits());
                self.clients.write(conn, permit, usize::from(input.short()?), &bytes, imm);
            }
            kind => self.request(kind, input)?,
        }
        // Not always, so that the next step may interrupt this one.
        if input.byte()? & 3 != 0 {
            self.settle();
        }
        Some(())
    }

    /// Sends a well-formed request with arbitrary field values.
    fn request(&mut self, kind: u8, input: &mut Input<'_>) -> Option<()> {
        let at = (usize::from(input.byte()?), input.byte()? % 6);
        let fields = input.byte()?;
        let result = self.clients.result(usize::from(fields) * 64);
        let io = IoHeader {
            device_id: u32::from(fields & 1),
            sector: u64::from(input.byte()?),
            rw: Rw(u32::from(input.byte()? & 7) | u32::from(input.short()?) << 11),
            bi_size: u32::from(input.byte()?) * 128,
            prio: 0,
        };
        let discovers = kind == 14 && fields & 4 != 0;
        let proves = kind == 15 && fields & 0x80 != 0;
        let mut proof = Vec::new();
        let header: Vec<u8> = match kind {
            11 | 12 => io.encode().to_vec(),
            13 => {
                let name = [&b"vol"[..], b"fixed", b"/vol", b"none"][usize::from(fields & 3)];
                let access = AccessMode::from_wire(fields >> 2 & 3).unwrap_or_default();
                let flags = OpenFlags { returns: fields & 16 != 0, waits: fields & 32 != 0 };
                Open { access, flags, dev_name: Name::new(name).ok()? }.encode().to_vec()
            }
            14 if discovers => {
                let after = ["", "fixed", "vol", "/vol"][usize::from(fields & 3)];
                Discover { after: Name::new(after.as_bytes()).ok()? }.encode().to_vec()
            }
            14 => Close { device_id: u32::from(fields & 3) }.encode().to_vec(),
            _ if proves && fields & 1 == 0 => proofs::challenge(fields),
            _ if proves => {
                let path = self.clients.pick(at.0).map_or(0, |(_, path)| path);
                // A session's number is the number of its first path.
                let session = 1 + (fields >> 5 & 1);
                let answer = self.clients.sge(RESULT_AT, 2048).slice.to_vec();
                let (header, data) = proofs::auth(fields, session, path, &answer);
                proof = data;
                header
            }
            _ if fields & 1 == 0 => SessInfo { ver: fields >> 1 }.encode().to_vec(),
            _ => {
                let path = PathUuid([1 + (fields >> 1) % PATHS; 16]);
                let process = ServerProcess::NONE;
                Fence { path, recon_cnt: u16::from(fields >> 4), process }.encode().to_vec()
            }
        };
        // The data precedes the header; a read only reserves space for the data.
        let reads = matches!(kind, 11 | 13) || kind == 15 && fields & 1 == 0 || discovers;
        let room = if kind <= 12 { (io.bi_size as usize).min(4096) } else { 512 };
        let room = if reads || kind == 12 { room } else { 0 };
        let result = if proves { self.clients.result(2048) } else { result };
        let room = if proves && reads { 2048 } else { room };
        let usr_len = header.len() as u16 + u16::from(fields == 0x77);
        let mut message = vec![0; ReadMsg::LEN_MAX];
        if reads {
            let desc = (fields & 0xc0 != 0xc0).then_some(result);
            let read = ReadMsg { usr_len, need_inval: fields & 0x20 != 0, desc };
            message.truncate(read.encoded_len());
            read.encode(&mut message);
        } else {
            message = WriteMsg { usr_len }.encode().to_vec();
        }
        if !proof.is_empty() {
            let all = [&proof[..], &header, &message].concat();
            let offset = u32::try_from(proof.len() + header.len()).unwrap_or(0);
            let imm = Imm::Request { permit: PermitId(u16::from(at.1) % DEPTH), offset };
            self.clients.write(at.0, at.1, 0, &all, imm.encode_with(self.params.limits.mem_bits()));
            return Some(());
        }
        self.clients.request(at, room, &header, &message, self.params.limits);
        Some(())
    }

    /// Disconnects all clients, checks that they left nothing behind, and shuts the server down.
    fn end(mut self) {
        self.held.store(false, Ordering::Relaxed);
        let (a, b) = (sim_ip(1), sim_ip(2));
        self.world.unsilence(a, b);
        self.world.unsilence(b, a);
        self.world.link_up(a, b);
        let now = self.world.now();
        for conn in (0..self.clients.conns.len()).rev() {
            self.clients.end(now, conn, false);
        }
        self.pass(END);
        let sessions = self.hosts[0].core.snapshot(self.world.now());
        assert!(sessions.is_empty(), "sessions without clients: {sessions:?}");
        for host in &self.hosts {
            let left = (host.core.shard().connections(), host.core.shard().inflight());
            assert_eq!(left, (0, 0), "connections and requests are left");
        }
        self.post(ControlMessage::Shutdown);
        self.pass(END);
        assert!(self.hosts.iter().all(|host| host.core.is_done()), "the server does not shut down");
        self.hosts.clear();
        let registered = self.world.registered(self.node);
        assert_eq!(registered, 0, "registered memory is left");
    }
}

fn con_req(cid: u16, cid_num: u16, path: u8, session: u8, first: bool, recon: u16) -> ConnReq {
    ConnReq {
        cid: ConnIndex(cid),
        cid_num,
        recon_cnt: recon,
        path_uuid: PathUuid([path; 16]),
        session_id: SessionId([session; 16]),
        first_conn: first,
        // Some clients accept times or can authenticate; others behave like a kernel client.
        ext: ClientExtensions {
            times: path & 1 == 0,
            authenticates: path == 3,
            info_refusals: path == 2,
            ..ClientExtensions::default()
        }
        .encode(),
    }
}

impl Clients {
    fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).expect("inside the memory");
        Sge { slice, lkey: self.memory.lkey() }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            busy = true;
            match event {
                FabricEvent::Established { qp, .. } => {
                    if let Some(conn) = self.conns.iter_mut().find(|conn| conn.qp == qp) {
                        conn.up = true;
                    }
                }
                FabricEvent::ConnectFailed { qp, .. } | FabricEvent::Closed { qp, .. } => {
                    self.conns.retain(|conn| conn.qp != qp);
                }
                FabricEvent::Completion(wc) => self.received(&wc),
                FabricEvent::Request(_) => {}
            }
        }
        self.fabric.flush(now);
        busy
    }

    /// Stores the chunks and keys that the server sends.
    fn received(&mut self, wc: &WorkCompletion) {
        if wc.status != WcStatus::Success || !matches!(wc.op, WcOp::Recv | WcOp::RecvRdmaWithImm) {
            return;
        }
        let Some(conn) = self.conns.iter().find(|conn| conn.qp == wc.qp) else { return };
        let at = (conn.slot * RECVS + (wc.wr_id as usize) % RECVS) * RECV_LEN;
        let (qp, path) = (conn.qp, conn.path);
        self.received += 1;
        if wc.op == WcOp::Recv {
            let bytes = self.sge(at, (wc.byte_len as usize).min(RECV_LEN)).slice.to_vec();
            if wc.imm.is_none() && InfoRsp::refused(&bytes).is_none() {
                let info = InfoRsp::decode(&bytes).expect("INFO_RSP from our own server");
                let chunks = info.chunks(DEPTH, CHUNK).expect("a chunk for each permit");
                self.chunks.insert(path, chunks);
            } else if wc.imm.is_some() {
                let key = RkeyRsp::decode(&bytes).expect("RKEY_RSP from our own server");
                let chunks = self.chunks.get_mut(&path);
                if let Some(chunk) = chunks.and_then(|all| all.get_mut(key.permit.index())) {
                    chunk.key = key.rkey;
                }
            }
        }
        // The connection may have closed after the message.
        let _ = self.fabric.post_recv(qp, wc.wr_id, Some(self.sge(at, RECV_LEN)));
    }

    fn connect(&mut self, now: Instant, path: u8, private_data: &[u8]) {
        let free = (0..CONNS_MAX).find(|slot| self.conns.iter().all(|conn| conn.slot != *slot));
        let Some(slot) = free else { return };
        let params = ConnectParams {
            local: None,
            remote: SocketAddr::new(sim_ip(1), PORT),
            private_data: PrivateData::new(private_data),
            limits: QpLimits { send_max: 64, recv_max: 64 },
            timeout: Duration::from_secs(3),
            peer_name: None,
        };
        let Ok(qp) = self.fabric.connect(now, &self.pd, &params) else { return };
        self.conns.push(Conn { qp, path, slot, up: false });
        for id in 0..RECVS {
            let sge = self.sge((slot * RECVS + id) * RECV_LEN, RECV_LEN);
            self.fabric.post_recv(qp, id as u64, Some(sge)).expect("room for its receives");
        }
        self.fabric.flush(now);
    }

    fn end(&mut self, now: Instant, conn: usize, gracefully: bool) {
        let Some(at) = conn.checked_rem(self.conns.len()) else { return };
        let qp = self.conns[at].qp;
        if gracefully {
            self.fabric.disconnect(now, qp);
        } else {
            self.fabric.abort(now, qp);
        }
    }

    /// Selects a connection that is up, by a number modulo the number of such connections.
    fn pick(&self, number: usize) -> Option<(QpNum, u8)> {
        let up = || self.conns.iter().filter(|conn| conn.up);
        let at = number.checked_rem(up().count())?;
        up().nth(at).map(|conn| (conn.qp, conn.path))
    }

    fn post(&mut self, conn: usize, op: WrOp, sges: SgeList) {
        let Some((qp, _)) = self.pick(conn) else { return };
        self.posted += 1;
        let wr = WorkRequest { wr_id: 1 << 32 | self.posted, op, sges, signaled: false };
        // A queue overflow is the client's own fault.
        let _ = self.fabric.post_send(qp, wr);
    }

    /// Copies bytes into send memory that will not be reused soon.
    fn bytes(&mut self, bytes: &[u8]) -> SgeList {
        if bytes.is_empty() {
            return SgeList::EMPTY;
        }
        if self.sent + bytes.len() > SEND_LEN {
            self.sent = 0;
        }
        let sge = self.sge(SEND_AT + self.sent, bytes.len());
        self.sent += bytes.len();
        sge.slice.copy_in(0, bytes);
        SgeList::one(sge)
    }

    fn send(&mut self, conn: usize, bytes: &[u8], imm: Option<u32>) {
        let sges = self.bytes(bytes);
        self.post(conn, WrOp::Send { imm, invalidate: None }, sges);
    }

    /// Memory into which results may be written.
    fn result(&self, len: usize) -> SgDesc {
        let addr = self.memory.base() + RESULT_AT as u64;
        SgDesc { addr, key: self.memory.rkey(), len: len.min(CHUNK as usize) as u32 }
    }

    /// Writes bytes into a chunk of the connection's path, with the given immediate.
    fn write(&mut self, conn: usize, permit: u8, at: usize, bytes: &[u8], imm: u32) {
        let sges = self.bytes(bytes);
        let path = self.pick(conn).map_or(0, |(_, path)| path);
        let chunk = self.chunks.get(&path).and_then(|all| all.get(usize::from(permit)));
        let chunk = chunk.copied().unwrap_or(SgDesc { addr: 0, key: Rkey(0), len: 0 });
        let remote = RemoteMem { addr: chunk.addr.wrapping_add(at as u64), rkey: chunk.key };
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, sges);
    }

    fn request(
        &mut self,
        at: (usize, u8),
        room: usize,
        header: &[u8],
        message: &[u8],
        limits: Limits,
    ) {
        let offset = u32::try_from(room + header.len()).unwrap_or(0);
        let imm = Imm::Request { permit: PermitId(u16::from(at.1) % DEPTH), offset };
        let data = [header, message].concat();
        self.write(at.0, at.1, room, &data, imm.encode_with(limits.mem_bits()));
    }

    fn open(&mut self, conn: usize, permit: u8, name: &str, access: AccessMode) {
        let Ok(dev_name) = Name::new(name.as_bytes()) else { return };
        let header = Open { access, flags: OpenFlags::default(), dev_name }.encode();
        let usr_len = Open::LEN as u16;
        let read = ReadMsg { usr_len, need_inval: false, desc: Some(self.result(512)) };
        let mut message = vec![0; read.encoded_len()];
        read.encode(&mut message);
        if let Ok(limits) = Limits::new(u32::from(DEPTH), CHUNK) {
            self.request((conn, permit), 512, &header, &message, limits);
        }
    }
}

/// Runs a program of client actions against a server.
///
/// # Panics
/// Panics if the server misbehaves.
#[doc(hidden)]
pub fn fuzz_paths(data: &[u8]) {
    let mut input = Input(data);
    let Some(mut rig) = input.byte().and_then(Rig::new) else { return };
    for _ in 0..STEPS_MAX {
        if rig.step(&mut input).is_none() {
            break;
        }
    }
    rig.settle();
    rig.end();
}
