//! Scenario of two clients that prove their identity, a server that is restarted in between, and an
//! intruder that knows the UUIDs of the first client's session and paths.
//!
//! The intruder has what an attacker who reads the network or is a client of the server has: the
//! first client's signatures for other connects, paths, sessions and nonces, a key of its own that
//! the server knows, and a key that the server does not know. The intruder never receives anything
//! but EACCES, and the two clients are not affected: no path ends except through the restart, and
//! each client reads the data that it wrote.
//!
//! The intruder also connects a crowd of unproved paths in the first client's session, whether or
//! not the server knows that session, with the UUIDs and numbers of the client's next connects but
//! a different queue depth. At the end, the first client disconnects permanently: its session
//! must end even though the crowd stays.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rtrs_client::engine::{ClientEngine, Nonces, Prover};
use rtrs_client::{
    DeviceIndex, Failover, HeartbeatSettings, NoPath, PATH_RUN, PathTarget, Policy, SessionConfig,
    SessionDevice, SlowIo,
};
use rtrs_core::block::{BlockDevice, Core, Io, IoFlags, IoOp};
use rtrs_core::fabric::sim::{BindMode, NodeId, World, WorldOptions, sim_ip};
use rtrs_core::fabric::{Fabric, FabricEvent, PdUse};
use rtrs_core::identity::ServerProcess;
use rtrs_core::ids::{CoreIndex, PathUuid, ProviderIndex, SessionId};
use rtrs_core::limits::Limits;
use rtrs_core::mem::Region;
use rtrs_core::prng::Prng;
use rtrs_core::tests::{Answer, PathOptions, PlayedClient, io_header};
use rtrs_core::time::{Duration, Instant, earliest};
use rtrs_core::tls::{
    Clients, PrivateKey, ProofError, ProofFacts, TlsClientConfig, TlsServerConfig,
};
use rtrs_core::wire::{AccessMode, ChallengeRsp, ClientExtensions, Fence, Rw, errno};
use rtrs_server::backend::MemorySource;
use rtrs_server::engine::authenticator::{Authenticator, ProofTask};
use rtrs_server::engine::message::{ControlMessage, Message};
use rtrs_server::{Export, ExportTable, ServerEngine, SessionParams};

use super::crowd::Crowd;
use super::host::volume;

const MS: Duration = Duration::from_millis(1);
const PORT: u16 = 1234;
const PATHS: u8 = 2;
/// Buffer size for the answer to a challenge.
const ROOM: usize = 4096;
/// Keys of the server, of the intruder as a known client, and of the intruder as an unknown one.
const SERVER: u8 = 100;
const INSIDER: u8 = 3;
const UNKNOWN: u8 = 9;
/// Address of the intruder.
const OUTSIDE: u8 = 30;
/// Maximum time for which a path may stay unproved.
const HANDSHAKE: Duration = Duration::from_millis(1000);

/// Counters of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proofs {
    /// Writes that were read back.
    pub ios: u64,
    /// Attempts by the intruder.
    pub attacks: u64,
    /// Refusals sent to the intruder.
    pub refused: u64,
    /// Paths that stayed unproved.
    pub crowd: u64,
    /// Signatures that the server made or checked.
    pub computed: u64,
}

fn key(seed: u8) -> PrivateKey {
    PrivateKey::from_seed([seed; 32]).expect("a key")
}

fn server_config() -> TlsServerConfig {
    let mut clients = Clients::default();
    for n in [1, 2, INSIDER] {
        clients.add(&format!("db{n}"), key(n).public());
    }
    TlsServerConfig::with_keys(&key(SERVER), clients).expect("a key")
}

fn client_config(n: u8) -> TlsClientConfig {
    TlsClientConfig::with_keys(&key(n), &[key(SERVER).public()]).expect("a key")
}

fn draw(prng: &mut Prng) -> [u8; 32] {
    let mut nonce = [0; 32];
    nonce.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&prng.next_u64().to_le_bytes()));
    nonce
}

/// Nonces of a client, drawn from the seed.
#[derive(Debug)]
struct Drawn(Mutex<Prng>);

impl Nonces for Drawn {
    fn next(&self) -> Result<[u8; 32], ProofError> {
        Ok(draw(&mut self.0.lock()))
    }
}

/// Signature tasks of the server, which finish some time later.
#[derive(Clone, Debug, Default)]
struct Tasks(Arc<Mutex<VecDeque<ProofTask>>>);

impl Authenticator for Tasks {
    fn begin(&self, task: ProofTask) -> bool {
        self.0.lock().push_back(task);
        true
    }
}

struct Server {
    cores: Vec<ServerEngine>,
    fabrics: Vec<Vec<Box<dyn Fabric>>>,
    inboxes: Vec<VecDeque<Message>>,
    tasks: Tasks,
    /// Time at which the next task is done.
    done_at: Instant,
}

/// Client that proves its identity, with one shard and one IO at a time.
struct Client {
    core: ClientEngine,
    fabrics: Vec<Box<dyn Fabric>>,
    device: Option<SessionDevice>,
    region: Arc<Region>,
    written: u64,
    /// Whether the current IO is the read that follows a write.
    reading: bool,
    busy: bool,
    next_at: Instant,
}

/// Event that the intruder is waiting for.
enum Stage {
    Away(Instant),
    Connecting,
    Introduced,
    Challenged,
    Trying(usize),
}

struct Intruder {
    played: Option<PlayedClient>,
    stage: Stage,
    attack: u64,
    until: Instant,
    /// Reconnect count of the path that the intruder connects.
    recon_cnt: u16,
}

struct Run {
    world: World,
    prng: Prng,
    nodes: [NodeId; 2],
    outside: NodeId,
    server: Option<Server>,
    disks: [Arc<MemorySource>; 2],
    clients: Vec<Client>,
    intruder: Intruder,
    crowd: Crowd,
    outcome: Proofs,
}

fn server_ip(path: u8) -> SocketAddr {
    SocketAddr::new(sim_ip(1 + path), PORT)
}

fn uuid(client: u8, path: u8) -> u8 {
    client * 16 + path
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut prng = Prng::new(seed);
        let bind = if seed.is_multiple_of(2) { BindMode::Done } else { BindMode::Pending };
        let options = WorldOptions { bind, ..WorldOptions::default() };
        let world = World::with_options(prng.next_u64(), options);
        let (there, here) = (world.node(sim_ip(1)), world.node(sim_ip(11)));
        world.add_address(there, sim_ip(2));
        (12..15).for_each(|n| world.add_address(here, sim_ip(n)));
        let outside = world.node(sim_ip(OUTSIDE));
        world.add_address(outside, sim_ip(OUTSIDE + 1));
        let from = [sim_ip(OUTSIDE), sim_ip(OUTSIDE + 1)];
        let crowd = Crowd::new(outside, from, server_ip(0), 1, [uuid(1, 0), uuid(1, 1)]);
        let disk = || Arc::new(MemorySource::new(1 << 16, 512));
        let mut run = Self {
            nodes: [here, there],
            outside,
            server: None,
            disks: [disk(), disk()],
            clients: Vec::new(),
            intruder: Intruder {
                played: None,
                stage: Stage::Away(Instant::ZERO + 100 * MS),
                attack: seed,
                until: Instant::ZERO,
                recon_cnt: 1000,
            },
            crowd,
            outcome: Proofs::default(),
            world,
            prng,
        };
        run.start_server();
        for n in [1, 2] {
            let client = run.client(n);
            run.clients.push(client);
        }
        run
    }

    fn start_server(&mut self) {
        let exports = [("vol1", 0), ("vol2", 1)];
        let exports = exports.map(|(name, at)| Export::new(name, Arc::clone(&self.disks[at]) as _));
        let exports = ExportTable::new(exports.into());
        let limits = Limits::new(16, 16 << 10).expect("bounds");
        let params = SessionParams {
            limits,
            cores: 2,
            handshake_timeout: HANDSHAKE,
            ..SessionParams::default()
        };
        let tasks = Tasks::default();
        let core = |at| {
            let mut core = ServerEngine::new(params, Core::without_ring(CoreIndex(at)), &exports);
            core.set_authenticator(Arc::new(tasks.clone()));
            core
        };
        let fabric = |_| vec![Box::new(self.world.fabric(self.nodes[1])) as Box<dyn Fabric>];
        let mut server = Server {
            cores: (0..2).map(core).collect(),
            fabrics: (0..2).map(fabric).collect(),
            inboxes: vec![VecDeque::new(), VecDeque::new()],
            tasks: tasks.clone(),
            done_at: Instant::ZERO,
        };
        for path in 0..PATHS {
            server.fabrics[0][0].listen(server_ip(path)).expect("a free address");
        }
        self.server = Some(server);
    }

    fn client(&mut self, n: u8) -> Client {
        let heartbeat = HeartbeatSettings {
            interval: 100 * MS,
            missed_max: 5,
            confirmed_missed_max: 5,
            idle_max: 1000 * MS,
        };
        let path = |path: u8| PathTarget {
            name: format!("path{path}"),
            local: Some(sim_ip(9 + 2 * n + path)),
            remotes: vec![server_ip(path)],
            unresolved: None,
            peer_name: None,
            transport: "sim",
            provider: ProviderIndex(0),
            invalidate_reads: true,
            heartbeat,
            proves: true,
        };
        let nonces = Arc::new(Drawn(Mutex::new(self.prng.fork())));
        let config = Arc::new(SessionConfig {
            name: format!("client{n}"),
            volumes: vec![volume(&format!("vol{n}"))],
            open_patience: Duration::ZERO,
            resent_for: Duration::ZERO,
            id: SessionId([n; 16]),
            paths: (0..PATHS).map(path).collect(),
            shards: 1,
            policy: Policy::RoundRobin,
            path_run: PATH_RUN,
            heartbeat,
            connect_timeout: 1000 * MS,
            reconnect_min: 10 * MS,
            reconnect_max: 100 * MS,
            io_timeout: 5000 * MS,
            slow_io: SlowIo::Wait,
            no_path: NoPath::Queue,
            failover: Failover::Strict,
            queue_depth_limit: u16::MAX,
            prover: Some(Prover::new(client_config(n), nonces)),
            seed: self.prng.next_u64(),
        });
        let uuids: Vec<[u8; 16]> = (0..PATHS).map(|path| [uuid(n, path); 16]).collect();
        Client {
            core: ClientEngine::new(self.world.now(), CoreIndex(0), &config, &uuids),
            fabrics: vec![Box::new(self.world.fabric(self.nodes[0]))],
            device: None,
            region: Region::new(1024).expect("memory"),
            written: 0,
            reading: false,
            busy: false,
            next_at: Instant::ZERO,
        }
    }

    /// Runs one turn of every part. Returns whether anything happened.
    fn turn(&mut self) -> Result<bool, String> {
        let mut any = self.turn_server();
        for at in 0..self.clients.len() {
            any |= self.turn_client(at)?;
        }
        any |= self.crowd.turn(&self.world, &mut self.prng);
        Ok(any | self.turn_intruder()?)
    }

    fn turn_server(&mut self) -> bool {
        let now = self.world.now();
        let Some(server) = &mut self.server else { return false };
        let mut any = false;
        if now >= server.done_at {
            let task = server.tasks.0.lock().pop_front();
            if let Some(task) = task {
                let done = task.run(&server_config(), draw(&mut self.prng));
                let done = Message::Control(ControlMessage::Proof(Box::new(done)));
                server.inboxes[0].push_back(done);
                server.done_at = now + self.prng.duration(Duration::ZERO..=2 * MS);
                self.outcome.computed += 1;
                any = true;
            }
        }
        let mut mail = Vec::new();
        for at in 0..server.cores.len() {
            let (core, fabrics) = (&mut server.cores[at], &mut server.fabrics[at]);
            while let Some(message) = server.inboxes[at].pop_front() {
                any = true;
                core.handle_message(now, message, fabrics);
            }
            any |= fabrics[0].poll(now);
            while let Some(event) = fabrics[0].next_event() {
                any = true;
                core.handle_event(now, ProviderIndex(0), event, fabrics);
            }
            any |= core.poll(now, fabrics);
            mail.extend(std::iter::from_fn(|| core.take_message()));
            fabrics[0].flush(now);
            core.check();
        }
        any |= !mail.is_empty();
        mail.into_iter().for_each(|(to, one)| server.inboxes[to.index()].push_back(one));
        any
    }

    fn turn_client(&mut self, at: usize) -> Result<bool, String> {
        let now = self.world.now();
        let Client { core, fabrics, .. } = &mut self.clients[at];
        let mut any = fabrics[0].poll(now);
        while let Some(event) = fabrics[0].next_event() {
            any = true;
            core.handle_event(now, ProviderIndex(0), event, fabrics);
        }
        any |= core.poll(now, fabrics);
        if let Some(failure) = core.failure() {
            return Err(format!("client {at} gave up: {failure}"));
        }
        any |= self.use_device(at)?;
        let Client { core, fabrics, .. } = &mut self.clients[at];
        any |= core.pump(now, fabrics);
        fabrics[0].flush(now);
        core.check();
        Ok(any)
    }

    /// Writes a number to the client's disk, then reads it back.
    fn use_device(&mut self, at: usize) -> Result<bool, String> {
        let now = self.world.now();
        let client = &mut self.clients[at];
        if client.device.is_none() {
            client.device = client.core.device(DeviceIndex::FIRST);
            let region = Arc::clone(&client.region);
            if let Some(device) = &mut client.device {
                device.attach_region(&region).map_err(|error| error.to_string())?;
            }
        }
        let Some(device) = &mut client.device else { return Ok(false) };
        device.poll(now);
        let mut any = false;
        while let Some(done) = device.reap() {
            (any, client.busy) = (true, false);
            if !done.status.is_ok() {
                return Err(format!("IO of client {at} failed: {:?}", done.status));
            }
            if client.reading {
                let mut bytes = [0; 512];
                client.region.copy_out(512, &mut bytes);
                if bytes[..8] != client.written.to_le_bytes() {
                    return Err(format!("client {at} reads {:?}", &bytes[..8]));
                }
                self.outcome.ios += 1;
            }
            client.reading = !client.reading;
            client.next_at = now + self.prng.duration(Duration::ZERO..=6 * MS);
        }
        if client.busy || now < client.next_at {
            return Ok(any);
        }
        let (op, from) = if client.reading { (IoOp::Read, 512) } else { (IoOp::Write, 0) };
        if !client.reading {
            client.written += 1;
            client.region.copy_in(0, &client.written.to_le_bytes());
        }
        let buf = client.region.slice(from, 512);
        let io = Io { tag: 1, op, flags: IoFlags::default(), offset: 0, len: 512, buf };
        client.busy = device.submit(io).is_ok();
        Ok(true)
    }

    /// Takes the intruder's next step if the event that it is waiting for has happened.
    fn turn_intruder(&mut self) -> Result<bool, String> {
        let now = self.world.now();
        if let Stage::Away(until) = self.intruder.stage {
            if now >= until {
                self.intrude();
                return Ok(true);
            }
            return Ok(false);
        }
        let Some(mut played) = self.intruder.played.take() else { return Ok(false) };
        played.fabric.poll(now);
        played.drain();
        let ended = |event: &FabricEvent| {
            matches!(event, FabricEvent::Closed { .. } | FabricEvent::ConnectFailed { .. })
        };
        let over = played.events.iter().any(ended) || now >= self.intruder.until;
        let went_on = !over && self.step(&mut played)?;
        if over || matches!(self.intruder.stage, Stage::Away(_)) {
            // The intruder's process ends, and the next one starts.
            let pause = self.prng.duration(Duration::ZERO..=40 * MS);
            self.intruder.stage = Stage::Away(now + pause);
            return Ok(true);
        }
        self.intruder.played = Some(played);
        Ok(went_on)
    }

    /// Connects a path in the first client's session: an existing path, or a new one.
    fn intrude(&mut self) {
        self.outcome.attacks += 1;
        let owned = self.is_owned();
        let intruder = &mut self.intruder;
        intruder.attack += 1;
        if intruder.attack % 9 == 5 && !owned {
            // With the intruder's own key, the session would belong to the intruder.
            intruder.attack += 1;
        }
        intruder.recon_cnt += 1;
        let path = if self.prng.below(2) == 0 { uuid(1, 0) } else { 0x99 };
        let extensions = ClientExtensions { authenticates: true, ..ClientExtensions::default() };
        let options = PathOptions {
            cid_num: 1,
            recon_cnt: intruder.recon_cnt,
            first_conn: false,
            extensions,
            ..PathOptions::new(1, path)
        };
        let world = self.world.clone();
        let fabric = Box::new(world.fabric(self.outside));
        let pd = PdUse::Connect { local: None, remote: server_ip(0) };
        let mut played = PlayedClient::new(fabric, pd, options, move || world.now());
        played.ask(sim_ip(OUTSIDE), server_ip(0), &options.request(0).encode());
        intruder.played = Some(played);
        intruder.stage = Stage::Connecting;
        intruder.until = self.world.now() + 200 * MS;
    }

    fn step(&mut self, played: &mut PlayedClient) -> Result<bool, String> {
        match self.intruder.stage {
            Stage::Away(_) => return Ok(false),
            Stage::Connecting => {
                let qp = played.events.iter().find_map(|event| match event {
                    FabricEvent::Established { qp, .. } => Some(*qp),
                    _ => None,
                });
                let Some(qp) = qp else { return Ok(false) };
                if played.asked(qp, false) != Some(Ok(())) || !played.proof_wanted {
                    return Err("the server requires no proof of a path".into());
                }
                played.introduce("intruder");
                self.intruder.stage = Stage::Introduced;
            }
            Stage::Introduced => {
                if played.take_info().is_none() {
                    return Ok(false);
                }
                played.send_challenge((0, 0), &self.signer().challenge([7; 32]), ROOM);
                self.intruder.stage = Stage::Challenged;
            }
            Stage::Challenged => {
                let Some(answer) = answer(played) else { return Ok(false) };
                if answer.errno != 0 {
                    return Err(format!("a challenge is answered with errno {}", answer.errno));
                }
                let count = self.attack(played)?;
                self.intruder.stage = Stage::Trying(count);
            }
            Stage::Trying(left) => {
                let Some(answer) = answer(played) else { return Ok(false) };
                if answer.errno != errno::EACCES {
                    let (what, errno) = (self.intruder.attack % 9, answer.errno);
                    return Err(format!("attack {what} is answered with errno {errno}"));
                }
                self.outcome.refused += 1;
                self.intruder.stage = match left {
                    // The path stays as long as the server allows, without a proof.
                    0 | 1 if self.intruder.attack.is_multiple_of(2) => Stage::Trying(0),
                    0 | 1 => Stage::Away(self.world.now()),
                    left => Stage::Trying(left - 1),
                };
            }
        }
        Ok(true)
    }

    /// Returns the configuration of the client whose key the intruder announces.
    fn signer(&self) -> TlsClientConfig {
        client_config(match self.intruder.attack % 9 {
            5 => INSIDER,
            6 => UNKNOWN,
            _ => 1,
        })
    }

    /// Makes one attempt. Returns the number of answers to expect.
    fn attack(&mut self, played: &mut PlayedClient) -> Result<usize, String> {
        let answer =
            ChallengeRsp::decode(&played.result(ROOM)).map_err(|error| error.to_string())?;
        let own = ProofFacts {
            session: SessionId([1; 16]),
            path: PathUuid([played.options.path; 16]),
            client: sim_ip(OUTSIDE),
            server: server_ip(0).ip(),
        };
        let signer = self.signer();
        // Returns the signature that the signer would give a server with this answer.
        let signed = |facts, client_nonce: [u8; 32], server_nonce: [u8; 32]| {
            let challenge = signer.challenge(client_nonce);
            let (answer, _) = server_config()
                .prove(facts, &challenge, server_nonce)
                .map_err(|error| error.to_string())?;
            let proof = signer.answer(facts, None, &challenge, &answer);
            proof.map_err(|error| error.to_string())
        };
        let nonce = answer.nonce;
        let proof = match self.intruder.attack % 9 {
            // Signed for an earlier connect.
            0 => signed(own, [7; 32], [1; 32])?,
            // Signed for a different client address, then for the client's other path.
            1 => signed(ProofFacts { client: sim_ip(11), ..own }, [7; 32], nonce)?,
            2 => signed(ProofFacts { path: PathUuid([uuid(1, 1); 16]), ..own }, [7; 32], nonce)?,
            // Signed for a different session, then for a different server.
            3 => signed(ProofFacts { session: SessionId([2; 16]), ..own }, [7; 32], nonce)?,
            4 => signed(ProofFacts { server: server_ip(1).ip(), ..own }, [7; 32], nonce)?,
            // Another client's correct proof; one with an unknown key; one with the nonces swapped.
            5 | 6 => signed(own, [7; 32], nonce)?,
            7 => signed(own, nonce, [7; 32])?,
            // Any message other than a proof.
            _ => {
                played.send_open(0, "vol1", AccessMode::ReadWrite);
                played.send_fence(
                    1,
                    Fence {
                        path: PathUuid([uuid(1, 1); 16]),
                        recon_cnt: 99,
                        process: ServerProcess::NONE,
                    },
                );
                for permit in 2..8 {
                    let io = io_header(Rw::WRITE, 0, 512);
                    played.send_write((0, permit), io, &[0xbb; 512]);
                }
                played.send_close(8, 0);
                return Ok(9);
            }
        };
        played.send_auth((0, 0), &proof);
        Ok(1)
    }

    /// Returns the next time at which anything is due.
    fn next(&self) -> Option<Instant> {
        let now = self.world.now();
        let mut next = self.world.next_event_time();
        if let Some(server) = &self.server {
            server.cores.iter().for_each(|core| next = earliest(next, core.deadline()));
            if !server.tasks.0.lock().is_empty() {
                next = earliest(next, Some(server.done_at.max(now)));
            }
        }
        for client in &self.clients {
            let idle = client.device.is_some() && !client.busy;
            next = earliest(next, earliest(client.core.deadline(), idle.then_some(client.next_at)));
        }
        let own = match self.intruder.stage {
            Stage::Away(until) => until,
            _ => self.intruder.until,
        };
        earliest(next, Some(own.min(self.crowd.next_at())))
    }

    fn run_until(&mut self, end: Instant) -> Result<(), String> {
        for _ in 0..10_000_000 {
            if self.turn()? {
                continue;
            }
            let now = self.world.now();
            let step = now + Duration::from_nanos(1);
            match self.next() {
                Some(at) if at <= end => self.world.advance_to(at.max(step)),
                _ => {
                    self.world.advance_to(end);
                    return Ok(());
                }
            }
        }
        Err("the run does not end".into())
    }

    /// Checks the paths of both clients after this many restarts of the server.
    fn check(&self, restarts: u64) -> Result<(), String> {
        for (at, client) in self.clients.iter().enumerate() {
            for path in client.core.paths() {
                if !path.is_connected() || path.reconnects != restarts {
                    return Err(format!("client {at} after {restarts} restarts: {path:?}"));
                }
            }
        }
        let Some(server) = &self.server else { return Err("there is no server".into()) };
        for session in server.cores[0].snapshot(self.world.now()) {
            let id = SessionId([1; 16]).to_string();
            let expected = if session.id == id { "key:db1" } else { "key:db2" };
            if session.identity != expected {
                return Err(format!("a session of {expected} is {}", session.identity));
            }
        }
        Ok(())
    }
}

impl Run {
    /// Whether the server knows the owner of the first client's session.
    fn is_owned(&self) -> bool {
        let id = SessionId([1; 16]).to_string();
        let sessions =
            self.server.iter().flat_map(|server| server.cores[0].snapshot(self.world.now()));
        sessions.filter(|session| session.id == id).any(|session| session.identity == "key:db1")
    }

    /// Checks that the first client's session and its opens have ended.
    fn check_gone(&self) -> Result<(), String> {
        let Some(server) = &self.server else { return Err("there is no server".into()) };
        let id = SessionId([1; 16]).to_string();
        let sessions = server.cores[0].snapshot(self.world.now());
        let left = sessions.iter().find(|session| session.id == id);
        match left.filter(|session| !session.opens.is_empty() || session.identity != "unproved") {
            Some(session) => {
                Err(format!("the session of a disconnected client remains: {session:?}"))
            }
            None => Ok(()),
        }
    }
}

fn answer(played: &mut PlayedClient) -> Option<Answer> {
    let mut immediates = std::iter::from_fn(|| played.take_immediate());
    immediates.find_map(|(conn, imm)| Answer::from_immediate(conn, imm))
}

/// Runs the scenario with a seed.
///
/// # Errors
/// Returns a description of the violation.
pub fn run_proofs(seed: u64) -> Result<Proofs, String> {
    let mut run = Run::new(seed);
    run.run_until(Instant::ZERO + 3000 * MS)?;
    run.check(0)?;
    // The process ends, and the next one knows no sessions.
    run.server = None;
    let back = run.world.now() + run.prng.duration(10 * MS..=300 * MS);
    run.run_until(back)?;
    run.start_server();
    let end = run.world.now() + 3000 * MS;
    run.run_until(end)?;
    run.check(1)?;
    // The first client ends permanently. Paths of the crowd keep connecting.
    drop(run.clients.remove(0));
    let end = run.world.now() + 3 * HANDSHAKE;
    run.run_until(end)?;
    run.check_gone()?;
    run.outcome.crowd = run.crowd.count();
    Ok(run.outcome)
}
