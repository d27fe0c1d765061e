//! Body of the fuzz target `client_paths`.
//!
//! The input is a small program: the actions of a server that follows none of the protocol's rules,
//! and the concurrent requests of the device's users. The server answers correctly unless the
//! program says otherwise. The program can make it send invalid accepts, INFO_RSP and OPEN_RSP,
//! arbitrary bytes and immediates, write to any client memory that it was ever given access to,
//! withhold answers, repeat them, drop connections and fall silent. The client is that of the
//! daemon, on one or two shards of the simulated fabric. The target fails on a panic, if the client
//! does not become idle, if its tables are inconsistent, if an IO completes twice or never, or if a
//! detached session does not end or leaves memory registered. The fuzz crate runs it on new inputs,
//! and the tests on the corpus.

mod answers;
mod input;
mod setup;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rtrs_core::block::{BlockDevice, Io, IoFlags, IoOp};
use rtrs_core::fabric::sim::{NodeId, SimFabric, World, WorldOptions, sim_ip};
use rtrs_core::fabric::{
    Access, ConnRequest, Fabric, FabricEvent, Listener, MemoryRegistration, PdUse, PrivateData,
    ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus, WorkCompletion,
    WorkRequest, WrOp,
};
use rtrs_core::ids::{CoreIndex, PermitId, ProviderIndex, QpNum};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::tls::ProofFacts;
use rtrs_core::wire::{
    Challenge, ChunkRequest, ConnReq, ConnRsp, Extensions, Imm, InfoReq, InfoRsp, MemBits, RkeyRsp,
    SessInfoRsp, SgDesc, TimedRkeyRsp, UserMessage,
};

use self::answers::{Asked, challenge_rsp, check_auth, open_rsp, proves};
use self::input::{Input, changed};
use self::setup::{config, tuning};
use crate::engine::{
    Change, ClientEngine, ClientMessage, DeviceIndex, Leaving, SessionDevice, VolumeConfig,
};

const DEPTH: u16 = 8;
const MAX_IO: u32 = 8192;
const HEADER: u32 = 4096;
const CHUNK: usize = (MAX_IO + HEADER) as usize;
const SECTORS: u64 = 128;
const PORT: u16 = 1234;
/// Export of the second volume.
const SECOND: &str = "vol2";
const CONNS_MAX: usize = 24;
/// Layout of the server's memory: chunks, then what it sends, then INFO_REQs.
const SEND_AT: usize = CHUNK * DEPTH as usize;
const SEND_LEN: usize = 64 << 10;
const INFO_AT: usize = SEND_AT + SEND_LEN;
const MEMORY: usize = INFO_AT + CONNS_MAX * 512;
const RECVS: u64 = 32;
/// Size of the IO buffers on each of the client's shards: 16 times the largest IO.
const BUFFERS: usize = 16 * MAX_IO as usize;
const TURNS_MAX: usize = 20_000;
const STEPS_MAX: usize = 200;
/// Time within which a client without a server completes all IO and, after a detach, exits.
const END: Duration = Duration::from_secs(30);

/// Messages that the server sends once in place of correct ones.
#[derive(Default)]
struct Lies {
    accept: Option<Vec<u8>>,
    reject: Option<Vec<u8>>,
    info: Option<Vec<u8>>,
    open: Option<Vec<u8>>,
}

struct Conn {
    qp: QpNum,
    slot: usize,
    facts: ProofFacts,
    /// Pending proof from the client.
    asked: Option<Asked>,
}

/// Request that the server has received.
#[derive(Clone, Copy)]
struct Taken {
    qp: QpNum,
    permit: PermitId,
}

struct Server {
    fabric: SimFabric,
    pd: Arc<dyn ProtectionDomain>,
    memory: Arc<dyn MemoryRegistration>,
    conns: Vec<Conn>,
    lies: Lies,
    new_rkey: bool,
    /// Whether the server's answers contain times.
    timed: bool,
    extensions: Extensions,
    /// Value that corrupts the server's proofs; 0 for none.
    spoil: u8,
    /// Whether answers are held until the program releases them.
    holds: bool,
    heartbeats: bool,
    held: VecDeque<Taken>,
    answered: Option<Taken>,
    /// Last writable range that the client gave on each connection.
    descs: BTreeMap<QpNum, SgDesc>,
    posted: u64,
    sent: usize,
}

/// User of a volume on a shard.
#[derive(Default)]
struct User {
    device: Option<SessionDevice>,
    waiting: BTreeSet<u64>,
}

struct Host {
    engine: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    inbox: VecDeque<ClientMessage>,
    /// Users by volume.
    users: Vec<User>,
    region: Arc<Region>,
}

struct Rig {
    world: World,
    client: NodeId,
    hosts: Vec<Host>,
    server: Server,
    next_tag: u64,
    setup: u8,
}

fn server_ip(path: usize) -> IpAddr {
    sim_ip(1 + path as u8)
}

fn client_ip(path: usize) -> IpAddr {
    sim_ip(11 + path as u8)
}

impl Rig {
    fn new(setup: u8) -> Option<Self> {
        let world = World::with_options(7, WorldOptions::default());
        let (there, client) = (world.node(server_ip(0)), world.node(client_ip(0)));
        world.add_address(there, server_ip(1));
        world.add_address(client, client_ip(1));
        let config = Arc::new(config(setup));
        let uuids: Vec<[u8; 16]> = (0..config.paths.len()).map(|at| [at as u8; 16]).collect();
        let host = |at| {
            let shard = CoreIndex(at);
            Some(Host {
                engine: ClientEngine::new(world.now(), shard, &config, &uuids),
                fabrics: vec![Box::new(world.fabric(client))],
                inbox: VecDeque::new(),
                users: vec![User::default()],
                region: Region::new(BUFFERS).ok()?,
            })
        };
        let hosts = (0..config.shards).map(host).collect::<Option<Vec<_>>>()?;
        let mut fabric = world.fabric(there);
        for path in 0..config.paths.len() {
            fabric.listen(SocketAddr::new(server_ip(path), PORT)).ok()?;
        }
        let remote = SocketAddr::new(client_ip(0), PORT);
        let pd = fabric.alloc_pd(PdUse::Connect { local: None, remote }).ok()?;
        let memory = pd.register(&Region::new(MEMORY).ok()?, Access::REMOTE_WRITE).ok()?;
        let ours = if setup & 128 == 0 { Extensions::OURS } else { Extensions::default() };
        let server = Server {
            fabric,
            pd,
            memory,
            conns: Vec::new(),
            lies: Lies::default(),
            new_rkey: setup & 64 == 0,
            timed: setup & (64 | 128) == 0,
            extensions: Extensions { times: setup & 128 == 0, authenticate: proves(setup), ..ours },
            spoil: 0,
            holds: false,
            heartbeats: true,
            held: VecDeque::new(),
            answered: None,
            descs: BTreeMap::new(),
            posted: 0,
            sent: 0,
        };
        Some(Self { world, client, hosts, server, next_tag: 1, setup })
    }

    fn turn(&mut self) -> bool {
        let (now, mut busy, mut messages) = (self.world.now(), false, Vec::new());
        for host in &mut self.hosts {
            busy |= host.turn(now);
            while let Some(message) = host.engine.take_message() {
                messages.push(message);
            }
        }
        for (to, message) in messages {
            busy = true;
            self.hosts[to.index()].inbox.push_back(message);
        }
        busy | self.server.turn(now)
    }

    fn rest(&mut self, turns: &mut usize) {
        while self.turn() {
            *turns += 1;
            assert!(*turns < TURNS_MAX, "the client does not become idle");
        }
    }

    /// Runs everything that happens within this time.
    fn pass(&mut self, time: Duration) {
        let end = self.world.now() + time;
        let (mut turns, mut at) = (0, self.world.now());
        loop {
            self.rest(&mut turns);
            let timers = self.hosts.iter().fold(None, |at, host| {
                let devices = host.users.iter().filter_map(|user| user.device.as_ref()?.deadline());
                earliest(
                    devices.fold(at, |at, due| earliest(at, Some(due))),
                    host.engine.deadline(),
                )
            });
            let next = earliest(timers, self.world.next_event_time());
            let Some(next) = next.filter(|next| *next <= end) else { break };
            let next = next.max(self.world.now() + Duration::from_nanos(1)).min(end);
            if next == self.world.now() {
                break;
            }
            if next > at + Duration::from_millis(1) {
                (turns, at) = (0, next);
            }
            turns += 1;
            assert!(turns < TURNS_MAX, "the client does not become idle");
            self.world.advance_to(next);
        }
        self.world.advance_to(end);
        self.rest(&mut turns);
        // Receive buffers of each path's connections, and the IO buffers.
        let bound = 3 * (self.hosts.len() * BUFFERS + 4 * (512 << 10));
        let registered = self.world.registered(self.client);
        assert!(registered <= bound, "{registered} bytes registered, the bound is {bound}");
    }

    fn settle(&mut self) {
        self.pass(Duration::from_millis(1));
    }

    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let now = self.world.now();
        match input.byte()? % 17 {
            0 => self.pass(Duration::from_millis(u64::from(input.short()?) % 4000)),
            1..=4 => {
                let (shard, op) = (usize::from(input.byte()?), input.byte()?);
                self.submit(shard, op, input.byte()?, input.byte()?);
            }
            5 => {
                let mode = input.byte()?;
                self.server.holds = mode & 1 != 0;
                self.server.heartbeats = mode & 2 == 0;
                self.server.new_rkey ^= mode & 4 != 0;
                self.server.timed ^= mode & 8 != 0;
                self.server.spoil = if mode & 16 == 0 { 0 } else { mode >> 5 };
            }
            6 => {
                let (at, errno) = (usize::from(input.byte()?), u16::from(input.byte()?));
                self.server.release(at, errno);
            }
            7 => {
                let (conn, len) = (usize::from(input.byte()?), usize::from(input.byte()?));
                let bytes = input.bytes(len);
                let imm = if len & 1 == 0 { None } else { Some(u32::from(input.short()?)) };
                self.server.send(conn, &bytes, imm);
            }
            8 => {
                let conn = usize::from(input.byte()?);
                let imm = u32::from(input.short()?) << 16 | u32::from(input.short()?);
                self.server.immediate(conn, imm);
            }
            9 => self.server.end(now, usize::from(input.byte()?), input.byte()? & 1 == 0),
            10 => {
                // Writes inside the permitted range, outside it, or after the permission has ended.
                let conn = usize::from(input.byte()?);
                let (offset, len) = (u64::from(input.short()?), usize::from(input.byte()?));
                self.server.write_back(conn, offset.wrapping_sub(256), &vec![0x5a; len]);
            }
            11 => {
                let lie = self.server.accept();
                let lie = changed(lie.encode().to_vec(), input)?;
                self.server.lies.accept = Some(lie);
            }
            12 => {
                let errno = i16::from_be_bytes([input.byte()?, input.byte()?]);
                let lie = ConnRsp::reject(errno.unsigned_abs() % 512).encode().to_vec();
                self.server.lies.reject = Some(changed(lie, input)?);
            }
            13 => {
                let lie = changed(self.server.info(), input)?;
                self.server.lies.info = Some(lie);
            }
            14 => {
                let lie = changed(open_rsp(0), input)?;
                self.server.lies.open = Some(lie);
            }
            15 => {
                let (path, what) = (usize::from(input.byte()? & 1), input.byte()?);
                let (a, b) = (server_ip(path), client_ip(path));
                match what % 6 {
                    0 => self.world.silence(a, b),
                    1 => self.world.silence(b, a),
                    2 => self.world.unsilence(a, b),
                    3 => self.world.unsilence(b, a),
                    4 => self.world.link_down(a, b),
                    _ => self.world.link_up(a, b),
                }
            }
            _ => {
                let fields = input.byte()?;
                if fields >> 4 & 7 >= 6 {
                    self.second(fields & 16 == 0);
                    self.settle();
                    return Some(());
                }
                let leaving = Leaving {
                    path: format!("path{}", fields & 1),
                    within: Duration::from_millis(100),
                    force: fields & 2 == 0,
                };
                let change = match fields >> 2 & 3 {
                    0 => Change::Disconnect(leaving),
                    1 | 2 => Change::Reconnect(leaving),
                    _ => Change::Tune(Box::new(tuning(self.setup, input.byte()?))),
                };
                let host = &mut self.hosts[0];
                // Impossible changes are refused.
                let _ = host.engine.change(now, change, &mut host.fabrics);
            }
        }
        // Does not always settle, so that the next action can hit the client while it is busy.
        if input.byte()? & 3 != 0 {
            self.settle();
        }
        Some(())
    }

    /// Adds a second volume to the session, or removes it with its IO in flight.
    fn second(&mut self, add: bool) {
        let (now, config) = (self.world.now(), config(self.setup));
        let volume = VolumeConfig { export: SECOND.into(), ..config.volumes[0].clone() };
        let change = match add {
            true => Change::AddVolume(volume),
            false => Change::CloseVolume { export: SECOND.into() },
        };
        let host = &mut self.hosts[0];
        if host.engine.change(now, change, &mut host.fabrics).is_ok() {
            let users = 1 + usize::from(add);
            self.hosts.iter_mut().for_each(|host| host.users.resize_with(users, User::default));
        }
    }

    fn submit(&mut self, shard: usize, op: u8, place: u8, len: u8) {
        let at = shard % self.hosts.len();
        let host = &mut self.hosts[at];
        let at = usize::from(op) / 5 % host.users.len();
        let User { device: Some(device), waiting } = &mut host.users[at] else { return };
        let tag = self.next_tag;
        let len = 512 * (1 + u32::from(len) % (MAX_IO / 512));
        let op = [IoOp::Read, IoOp::Write, IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes]
            [usize::from(op) % 5];
        let at = usize::from(place) % 16 * MAX_IO as usize;
        let buf = matches!(op, IoOp::Read | IoOp::Write)
            .then(|| host.region.slice(at, len as usize).expect("inside the buffers"));
        let (offset, len) = match op {
            IoOp::Flush => (0, 0),
            _ => (u64::from(place) % SECTORS * 512, len),
        };
        let flags = IoFlags { fua: place & 64 != 0 && op == IoOp::Write, ..IoFlags::default() };
        // Users of a full device try again.
        if device.submit(Io { tag, op, flags, offset, len, buf }).is_ok() {
            waiting.insert(tag);
            self.next_tag += 1;
        }
    }

    /// Stops the server permanently. All IO must complete, and a detach must end everything else.
    fn end(mut self) {
        let now = self.world.now();
        for conn in (0..self.server.conns.len()).rev() {
            self.server.end(now, conn, false);
        }
        self.server.fabric.stop_listening();
        for path in 0..2 {
            let (a, b) = (server_ip(path), client_ip(path));
            self.world.unsilence(a, b);
            self.world.unsilence(b, a);
            self.world.link_up(a, b);
        }
        self.pass(END);
        for host in &self.hosts {
            let waiting = host.users.iter().flat_map(|user| &user.waiting).collect::<Vec<_>>();
            assert!(waiting.is_empty(), "IO that never ends: {waiting:?}");
            assert_eq!(host.engine.permits_held(), 0, "permits are held at rest");
        }
        let now = self.world.now();
        let host = &mut self.hosts[0];
        host.engine.detach(now, &mut host.fabrics);
        self.pass(END);
        assert!(self.hosts[0].engine.is_done(), "a detach does not end");
        self.hosts.clear();
        let registered = self.world.registered(self.client);
        assert_eq!(registered, 0, "registered memory is left");
    }
}

impl Host {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(message) = self.inbox.pop_front() {
            busy = true;
            self.engine.handle_message(now, message, &mut self.fabrics);
            self.engine.check();
        }
        busy |= self.fabrics[0].poll(now);
        while let Some(event) = self.fabrics[0].next_event() {
            busy = true;
            self.engine.handle_event(now, ProviderIndex(0), event, &mut self.fabrics);
            self.engine.check();
        }
        busy |= self.engine.poll(now, &mut self.fabrics);
        for (at, User { device, waiting }) in DeviceIndex::all().zip(&mut self.users) {
            if device.is_none()
                && let Some(mut open) = self.engine.device(at)
            {
                open.attach_region(&self.region).expect("its first region");
                *device = Some(open);
            }
            let Some(device) = device else { continue };
            busy |= device.poll(now);
            while let Some(done) = device.reap() {
                busy = true;
                assert!(waiting.remove(&done.tag), "IO {} ended twice", done.tag);
            }
        }
        busy |= self.engine.pump(now, &mut self.fabrics);
        self.engine.check();
        self.fabrics[0].flush(now);
        busy
    }
}

impl Server {
    fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).expect("inside the memory");
        Sge { slice, lkey: self.memory.lkey() }
    }

    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            busy = true;
            match event {
                FabricEvent::Request(request) => self.connected(now, *request),
                FabricEvent::Completion(wc) => self.received(&wc),
                FabricEvent::Closed { qp, .. } | FabricEvent::ConnectFailed { qp, .. } => {
                    self.conns.retain(|conn| conn.qp != qp);
                    self.held.retain(|taken| taken.qp != qp);
                    self.descs.remove(&qp);
                }
                FabricEvent::Established { .. } => {}
            }
        }
        self.fabric.flush(now);
        busy
    }

    fn accept(&self) -> ConnRsp {
        ConnRsp {
            queue_depth: DEPTH,
            max_io_size: MAX_IO,
            max_hdr_size: HEADER,
            new_rkey: self.new_rkey,
            ext: self.extensions.encode(),
            ..ConnRsp::default()
        }
    }

    fn connected(&mut self, now: Instant, request: ConnRequest) {
        let asked = ConnReq::decode(request.private_data.as_bytes());
        assert!(asked.is_ok(), "the client sends a valid CON_REQ");
        let (client, server) = (request.peer.ip(), request.local.ip());
        let facts = asked.ok().map(|asked| {
            let (session, path) = (asked.session_id, asked.path_uuid);
            ProofFacts { session, path, client, server }
        });
        let free = (0..CONNS_MAX).find(|slot| self.conns.iter().all(|conn| conn.slot != *slot));
        if let Some(lie) = self.lies.reject.take() {
            self.fabric.reject(now, request, &PrivateData::new(&lie));
            return;
        }
        let Some(slot) = free else { return };
        let Some(facts) = facts else { return };
        let good = self.accept().encode().to_vec();
        let answer = PrivateData::new(&self.lies.accept.take().unwrap_or(good));
        let limits = QpLimits { send_max: 256, recv_max: 64 };
        let Ok(qp) = self.fabric.accept(now, &self.pd, request, limits, &answer) else { return };
        self.conns.push(Conn { qp, slot, facts, asked: None });
        for id in 0..RECVS {
            let sge = (id == 0).then(|| self.sge(INFO_AT + slot * 512, 512));
            self.fabric.post_recv(qp, id, sge).expect("room for its receives");
        }
    }

    fn received(&mut self, wc: &WorkCompletion) {
        if wc.status != WcStatus::Success || !matches!(wc.op, WcOp::Recv | WcOp::RecvRdmaWithImm) {
            return;
        }
        let Some(at) = self.conns.iter().position(|conn| conn.qp == wc.qp) else { return };
        if wc.op == WcOp::Recv {
            let bytes = self.sge(INFO_AT + self.conns[at].slot * 512, wc.byte_len as usize);
            let good = InfoReq::decode(&bytes.slice.to_vec()).is_ok();
            assert!(good, "the client sends a valid INFO_REQ");
            let good = self.info();
            let answer = self.lies.info.take().unwrap_or(good);
            self.send(at, &answer, None);
        } else {
            match Imm::decode_with(wc.imm.unwrap_or(0), MemBits::for_depth(DEPTH)) {
                Imm::Heartbeat { .. } if self.heartbeats => {
                    self.immediate(at, Imm::HeartbeatAck.encode());
                }
                Imm::Request { permit, offset } => self.requested(wc.qp, permit, offset),
                _ => {}
            }
        }
        // The connection may have ended after the message.
        let _ = self.fabric.post_recv(wc.qp, wc.wr_id.max(1), None);
    }

    fn info(&self) -> Vec<u8> {
        let (addr, key) = (self.memory.base(), self.memory.rkey());
        let descs = (0..u64::from(DEPTH))
            .map(|at| SgDesc { addr: addr + at * CHUNK as u64, key, len: CHUNK as u32 })
            .collect();
        let mut bytes = vec![0; InfoRsp::len_for(usize::from(DEPTH))];
        InfoRsp { descs }.encode(&mut bytes);
        bytes
    }

    /// Executes a request, except for its answer.
    fn requested(&mut self, qp: QpNum, permit: PermitId, offset: u32) {
        let taken = Taken { qp, permit };
        // A false depth results in other permits and offsets.
        if permit.0 < DEPTH
            && let Ok(range) = ChunkRequest::message_range(offset, CHUNK as u32)
        {
            let chunk = self.sge(permit.index() * CHUNK, CHUNK).slice.to_vec();
            if let Ok(parsed) = ChunkRequest::parse(offset, &chunk[range]) {
                let result = match parsed.user(&chunk[parsed.user_range()], 2) {
                    Ok(UserMessage::SessInfo(info)) => SessInfoRsp::answer(info).encode().to_vec(),
                    Ok(UserMessage::Open { dev_name, .. }) => {
                        let device = u32::from(dev_name == SECOND.as_bytes());
                        self.lies.open.take().unwrap_or_else(|| open_rsp(device))
                    }
                    Ok(UserMessage::Io(_, io)) => vec![0; io.bi_size.min(MAX_IO) as usize],
                    Ok(UserMessage::Challenge(challenge)) => self.challenged(qp, &challenge),
                    Ok(UserMessage::Auth(_)) => {
                        let conn = self.conns.iter_mut().find(|conn| conn.qp == qp);
                        let asked = conn.and_then(|conn| conn.asked.take());
                        let asked = asked.expect("an AUTH answers a challenge");
                        check_auth(&asked, &chunk[..parsed.data_len as usize]);
                        Vec::new()
                    }
                    _ => Vec::new(),
                };
                if let Some(desc) = parsed.desc() {
                    self.descs.insert(qp, desc);
                    let len = result.len().min(desc.len as usize);
                    let at = self.conns.iter().position(|conn| conn.qp == qp);
                    self.write_back(at.unwrap_or(0), 0, &result[..len]);
                }
            }
        }
        self.held.push_back(taken);
        if !self.holds {
            self.release(self.held.len() - 1, 0);
        }
    }

    fn challenged(&mut self, qp: QpNum, challenge: &Challenge) -> Vec<u8> {
        let conn = self.conns.iter_mut().find(|conn| conn.qp == qp);
        let Some(conn) = conn else { return Vec::new() };
        let answer = challenge_rsp(conn.facts, challenge, self.spoil);
        let (bytes, asked) = answer.expect("a valid challenge");
        conn.asked = Some(asked);
        bytes
    }

    /// Answers a held request, or repeats the previous answer.
    fn release(&mut self, at: usize, errno: u16) {
        let at = at.checked_rem(self.held.len());
        let Some(taken) = at.and_then(|at| self.held.remove(at)).or(self.answered) else { return };
        self.answered = Some(taken);
        let Some(conn) = self.conns.iter().position(|conn| conn.qp == taken.qp) else { return };
        let permit = taken.permit;
        let imm = Imm::Response { permit, errno, invalidated: false }.encode();
        if self.new_rkey {
            let (rkey, queue_us, backend_us) = (self.memory.rkey(), u32::from(errno), u32::MAX);
            let bytes = TimedRkeyRsp { permit, rkey, queue_us, backend_us }.encode();
            let len = if self.timed { TimedRkeyRsp::LEN } else { RkeyRsp::LEN };
            self.send(conn, &bytes[..len], Some(imm));
        } else {
            self.immediate(conn, imm);
        }
    }

    fn post(&mut self, conn: usize, op: WrOp, sges: SgeList) {
        let Some(at) = conn.checked_rem(self.conns.len()) else { return };
        self.posted += 1;
        let wr = WorkRequest { wr_id: 1 << 32 | self.posted, op, sges, signaled: false };
        // The queue may be full, or the connection not up yet.
        let _ = self.fabric.post_send(self.conns[at].qp, wr);
    }

    /// Copies bytes to be sent into memory that will not be reused soon.
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

    fn immediate(&mut self, conn: usize, imm: u32) {
        let remote = RemoteMem { addr: 0, rkey: self.memory.rkey() };
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, SgeList::EMPTY);
    }

    /// Writes near the start of the last writable range that the client provided.
    fn write_back(&mut self, conn: usize, offset: u64, bytes: &[u8]) {
        let Some(at) = conn.checked_rem(self.conns.len()) else { return };
        let Some(desc) = self.descs.get(&self.conns[at].qp).copied() else { return };
        let sges = self.bytes(bytes);
        let remote = RemoteMem { addr: desc.addr.wrapping_add(offset), rkey: desc.key };
        self.post(at, WrOp::RdmaWrite { remote, imm: None }, sges);
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
}

/// Runs a server program against a client.
///
/// # Panics
/// Panics if the client misbehaves.
#[doc(hidden)]
pub fn fuzz_paths(data: &[u8]) {
    let mut input = Input(data);
    let Some(mut rig) = input.byte().and_then(Rig::new) else { return };
    // Invalid first accepts come before this, and those during a session after it.
    if input.byte().is_none_or(|first| first & 1 == 0) {
        rig.pass(Duration::from_millis(50));
    }
    for _ in 0..STEPS_MAX {
        if rig.step(&mut input).is_none() {
            break;
        }
    }
    rig.settle();
    rig.end();
}
