//! An RTRS client played by hand over a real transport: it sends exactly the bytes a test wants.
//!
//! [`Peer`] is one path of one session on a fabric of its own ([`Transport`] says which), driven
//! by the test's thread. What it puts into a chunk, which immediate it sends, which keys it uses
//! and in which order is the test's choice; the frames around that are well formed. Malformed
//! frames are the business of [`RawMpa`](crate::RawMpa). Every wait has a bound and a panic that
//! says what did not come.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration as StdDuration, Instant as Deadline};

use rtrs_core::fabric::{
    Access, CloseReason, ConnectFailure, ConnectParams, Fabric, FabricEvent, MemoryRegistration,
    PdUse, PrivateData, ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus,
    WorkCompletion, WorkRequest, WrOp,
};
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, QpNum, Rkey, SessionId};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, Ring};
use rtrs_core::time::Duration;
use rtrs_core::wire::{
    AccessMode, Close, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoHeader, MemBits, Name, Open,
    OpenRsp, ReadMsg, RkeyRsp, SessInfo, SgDesc, WriteMsg,
};

use crate::transport::Transport;

/// Bytes of the peer's memory: requests are built in the first half, results come to the second.
const MEMORY: usize = 1 << 20;
const RESULTS: usize = MEMORY / 2;
/// Where receives lie, 16 bytes each, and the one for INFO_RSP.
const RECV_AT: usize = 256 << 10;
const INFO_AT: usize = 384 << 10;
/// Receives of a connection.
const RECVS: usize = 64;
/// Work request ids: receives of INFO_RSP, of answers, and sends.
const INFO_ID: u64 = 1;
const RECV_ID: u64 = 0x1000;
const SEND_ID: u64 = 1 << 32;
/// Each answer of the server comes within this time.
const ANSWER_TIME_MAX: StdDuration = StdDuration::from_secs(20);

/// What a path is connected with.
#[derive(Clone, Copy, Debug)]
pub struct PeerOptions {
    /// Makes the session's uuid.
    pub session: u8,
    /// Makes the path's uuid.
    pub path: u8,
    /// Connections, the service connection included.
    pub cid_num: u16,
    /// Number of the source address, see [`Transport::source`].
    pub local: u8,
    /// The server may create the session.
    pub first_conn: bool,
    /// Connects of the path so far.
    pub recon_cnt: u16,
}

impl PeerOptions {
    /// A path of two connections from the first source address, which creates its session.
    #[must_use]
    pub fn new(session: u8, path: u8) -> Self {
        Self { session, path, cid_num: 2, local: 1, first_conn: true, recon_cnt: 1 }
    }

    /// The CON_REQ of a connection.
    #[must_use]
    pub fn request(&self, cid: u16) -> ConnReq {
        ConnReq {
            cid: ConnIndex(cid),
            cid_num: self.cid_num,
            recon_cnt: self.recon_cnt,
            path_uuid: PathUuid([self.path; 16]),
            session_id: SessionId([self.session; 16]),
            first_conn: self.first_conn,
            ext: [0; 11],
        }
    }
}

/// What lies before the user header of a request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Nothing.
    None,
    /// So many bytes left free.
    Room(usize),
    /// These bytes.
    Bytes(&'a [u8]),
}

/// An answer of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Connection it came over.
    pub conn: usize,
    /// Its permit.
    pub permit: u16,
    /// 0 or a positive errno.
    pub errno: u16,
}

/// The client's end of one path.
#[derive(Debug)]
pub struct Peer {
    /// Queue pairs by `cid`.
    pub conns: Vec<QpNum>,
    /// The server's chunks, with the keys in force.
    pub chunks: Vec<SgDesc>,
    /// Bytes of a chunk.
    pub chunk_size: u32,
    /// What it connects with.
    pub options: PeerOptions,
    new_rkey: bool,
    mem_bits: MemBits,
    server: SocketAddr,
    memory: Arc<dyn MemoryRegistration>,
    pd: Arc<dyn ProtectionDomain>,
    fabric: Box<dyn Fabric>,
    events: Vec<FabricEvent>,
    posted: u64,
    // Behind the fabric: operations that run hold their memory until the ring ends.
    ring: Rc<Ring>,
}

impl Peer {
    /// A peer that has not connected yet.
    ///
    /// # Panics
    /// When the system refuses a ring or memory.
    #[must_use]
    pub fn new(server: SocketAddr, options: PeerOptions) -> Self {
        let ring = Ring::new(64).expect("a ring");
        let mut fabric = Transport::of_environment().fabric(&ring);
        let pd = fabric
            .alloc_pd(PdUse::Connect { local: Some(source(options)), remote: server })
            .expect("a protection domain");
        let region = Region::new(MEMORY).expect("memory");
        let memory = pd.register(&region, Access::REMOTE_WRITE).expect("a registration");
        Self {
            conns: Vec::new(),
            chunks: Vec::new(),
            chunk_size: 0,
            options,
            new_rkey: false,
            mem_bits: MemBits::for_depth(1),
            server,
            memory,
            pd,
            fabric,
            events: Vec::new(),
            posted: 0,
            ring,
        }
    }

    /// A path that is up, its session introduced as `name`.
    ///
    /// # Panics
    /// When the server refuses it.
    #[must_use]
    pub fn up(server: SocketAddr, options: PeerOptions, name: &str) -> Self {
        let mut peer = Self::connected(server, options);
        peer.introduce(name);
        peer
    }

    /// All connections, no INFO_REQ yet.
    ///
    /// # Panics
    /// When the server refuses one.
    #[must_use]
    pub fn connected(server: SocketAddr, options: PeerOptions) -> Self {
        let mut peer = Self::new(server, options);
        for cid in 0..options.cid_num {
            peer.connect(cid).unwrap_or_else(|errno| panic!("connection {cid} refused: {errno}"));
        }
        peer
    }

    /// One turn: what the server sent is taken, what was posted goes out.
    fn turn(&mut self) {
        let now = Clock.now();
        self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            self.events.push(event);
        }
        self.fabric.flush(now);
        self.ring.turn_or_sleep(Some(Duration::from_millis(1))).expect("the ring turns");
    }

    /// Turns for a while, whatever happens.
    pub fn idle(&mut self, time: StdDuration) {
        let start = Deadline::now();
        while start.elapsed() < time {
            self.turn();
        }
    }

    /// Takes the first event that `pick` picks; waits for it.
    fn expect<T>(&mut self, what: &str, pick: impl Fn(&FabricEvent) -> Option<T>) -> T {
        self.expect_within(ANSWER_TIME_MAX, what, pick)
    }

    fn expect_within<T>(
        &mut self,
        limit: StdDuration,
        what: &str,
        pick: impl Fn(&FabricEvent) -> Option<T>,
    ) -> T {
        let start = Deadline::now();
        loop {
            let found = self.events.iter().enumerate().find_map(|(at, e)| Some((at, pick(e)?)));
            if let Some((at, value)) = found {
                self.events.remove(at);
                return value;
            }
            let waited = start.elapsed();
            assert!(waited < limit, "no {what}; what came: {:?}", self.events);
            self.turn();
        }
    }

    /// Connects connection `cid`.
    ///
    /// # Errors
    /// The negative errno of the server's reject.
    pub fn connect(&mut self, cid: u16) -> Result<(), i16> {
        let request = self.options.request(cid).encode();
        self.connect_raw(&request)
    }

    /// Connects with any private data.
    ///
    /// # Errors
    /// The negative errno of the server's reject.
    ///
    /// # Panics
    /// When the server answers in no way at all, or with anything but 56 bytes.
    pub fn connect_raw(&mut self, private_data: &[u8]) -> Result<(), i16> {
        let params = ConnectParams {
            local: Some(source(self.options)),
            remote: self.server,
            private_data: PrivateData::new(private_data),
            limits: QpLimits { send_max: 256, recv_max: 256 },
            timeout: Duration::from_secs(10),
        };
        let qp = self.fabric.connect(Clock.now(), &self.pd, &params).expect("start to connect");
        let answer = self.expect("answer to CON_REQ", |event| match event {
            FabricEvent::Established { qp: of, private_data } if *of == qp => {
                Some(Ok(*private_data))
            }
            FabricEvent::ConnectFailed { qp: of, failure } if *of == qp => {
                Some(Err(failure.clone()))
            }
            _ => None,
        });
        match answer {
            Ok(data) => {
                check_length(data.as_bytes());
                let response = ConnRsp::decode(data.as_bytes()).expect("a CON_RSP");
                assert_eq!(response.errno, 0);
                self.new_rkey = response.new_rkey;
                self.mem_bits = MemBits::for_depth(response.queue_depth);
                self.chunk_size = response.chunk_size().expect("bounds");
                self.conns.push(qp);
                Ok(())
            }
            Err(ConnectFailure::Rejected(data)) => {
                check_length(data.as_bytes());
                let errno = ConnRsp::decode(data.as_bytes()).expect("a CON_RSP").errno;
                assert!(errno < 0, "a reject without an error");
                Err(errno)
            }
            Err(ConnectFailure::Failed(reason)) => panic!("no answer to CON_REQ: {reason}"),
        }
    }

    /// Sends INFO_REQ and takes INFO_RSP; then receives are posted on all connections.
    ///
    /// # Panics
    /// When the server does not answer.
    pub fn introduce(&mut self, name: &str) {
        let info = InfoReq { session_name: Name::new(name.as_bytes()).expect("a name") };
        self.send_info(&info.encode());
        self.take_info_rsp();
    }

    /// Takes INFO_RSP.
    ///
    /// # Panics
    /// When it does not come or makes no sense.
    pub fn take_info_rsp(&mut self) {
        let wc = self.expect("INFO_RSP", |event| match event {
            FabricEvent::Completion(wc) if wc.wr_id == INFO_ID => Some(*wc),
            FabricEvent::Closed { reason, .. } => panic!("no INFO_RSP: {reason}"),
            _ => None,
        });
        assert_eq!(wc.status, WcStatus::Success);
        let bytes = self.sge(INFO_AT, wc.byte_len as usize).slice.to_vec();
        let message = InfoRsp::decode(&bytes).expect("an INFO_RSP");
        let depth = u16::try_from(bytes.len() / SgDesc::LEN).expect("a depth");
        self.chunks = message.chunks(depth, self.chunk_size).expect("chunks");
        for conn in 0..self.conns.len() {
            for slot in 0..RECVS {
                self.post_recv(conn, slot);
            }
        }
    }

    /// Sends any bytes as the first message of connection 0.
    ///
    /// # Panics
    /// When they do not fit the peer's memory.
    pub fn send_info(&mut self, bytes: &[u8]) {
        let room = self.sge(INFO_AT, RESULTS - INFO_AT);
        // A second try on a connection that is gone posts nothing.
        let _ = self.fabric.post_recv(self.conns[0], INFO_ID, Some(room));
        let sge = self.sge(0, bytes.len());
        sge.slice.copy_in(0, bytes);
        self.post(0, WrOp::Send { imm: None, invalidate: None }, SgeList::one(sge));
    }

    fn post_recv(&mut self, conn: usize, slot: usize) {
        let place = conn * RECVS + slot;
        let sge = self.sge(RECV_AT + place * 16, 16);
        let _ = self.fabric.post_recv(self.conns[conn], RECV_ID + place as u64, Some(sge));
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).expect("inside the peer's memory");
        Sge { slice, lkey: self.memory.lkey() }
    }

    /// Posts a work request. One that the connection does not take any more is dropped: the test
    /// then sees it closed.
    pub fn post(&mut self, conn: usize, op: WrOp, sges: SgeList) {
        self.posted += 1;
        let wr = WorkRequest { wr_id: SEND_ID | self.posted, op, sges, signaled: false };
        let _ = self.fabric.post_send(self.conns[conn], wr);
        self.fabric.flush(Clock.now());
    }

    /// A plain send of these bytes.
    pub fn send(&mut self, conn: usize, bytes: &[u8], invalidate: Option<Rkey>) {
        let sge = self.sge(0, bytes.len());
        sge.slice.copy_in(0, bytes);
        let sges = if bytes.is_empty() { SgeList::EMPTY } else { SgeList::one(sge) };
        self.post(conn, WrOp::Send { imm: None, invalidate }, sges);
    }

    /// An RDMA write of these bytes to anywhere at the server, without an immediate.
    pub fn write_remote(&mut self, conn: usize, remote: RemoteMem, bytes: &[u8]) {
        let sge = self.sge(0, bytes.len());
        sge.slice.copy_in(0, bytes);
        self.post(conn, WrOp::RdmaWrite { remote, imm: None }, SgeList::one(sge));
    }

    /// An RDMA read from anywhere at the server.
    pub fn read_remote(&mut self, conn: usize, remote: RemoteMem, len: usize) {
        let sge = self.sge(RESULTS, len);
        self.post(conn, WrOp::RdmaRead { remote }, SgeList::one(sge));
    }

    /// An immediate alone.
    pub fn send_imm(&mut self, conn: usize, imm: u32) {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, SgeList::EMPTY);
    }

    /// The immediate that announces a request.
    #[must_use]
    pub fn request_imm(&self, permit: u16, offset: usize) -> u32 {
        let offset = u32::try_from(offset).expect("an offset");
        Imm::Request { permit: PermitId(permit), offset }.encode_with(self.mem_bits)
    }

    /// Where the server is to write a result of `len` bytes.
    #[must_use]
    pub fn result_desc(&self, len: usize) -> SgDesc {
        let addr = self.memory.base() + RESULTS as u64;
        SgDesc { addr, key: self.memory.rkey(), len: u32::try_from(len).expect("a length") }
    }

    /// What the server wrote there.
    #[must_use]
    pub fn result(&self, len: usize) -> Vec<u8> {
        self.sge(RESULTS, len).slice.to_vec()
    }

    /// Writes data, user header and message into a permit's chunk and announces them.
    pub fn request(
        &mut self,
        (conn, permit): (usize, u16),
        data: Data<'_>,
        header: &[u8],
        message: &[u8],
    ) {
        let (room, bytes) = match data {
            Data::None => (0, &[][..]),
            Data::Room(len) => (len, &[][..]),
            Data::Bytes(bytes) => (0, bytes),
        };
        let all = [bytes, header, message].concat();
        let imm = self.request_imm(permit, room + bytes.len() + header.len());
        self.write_chunk((conn, permit), room, &all, imm);
    }

    /// Writes any bytes into a permit's chunk, with any immediate.
    ///
    /// # Panics
    /// When they do not fit the peer's memory.
    pub fn write_chunk(&mut self, (conn, permit): (usize, u16), at: usize, bytes: &[u8], imm: u32) {
        // Each permit has a place of its own, so that requests can be on their way together.
        let staging = if bytes.len() <= 4096 { usize::from(permit) * 4096 } else { 0 };
        let sge = self.sge(staging, bytes.len());
        sge.slice.copy_in(0, bytes);
        let chunk = self.chunks[usize::from(permit)];
        let remote = RemoteMem { addr: chunk.addr + at as u64, rkey: chunk.key };
        let sges = if bytes.is_empty() { SgeList::EMPTY } else { SgeList::one(sge) };
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, sges);
    }

    /// A write of `data`, as `header` says.
    pub fn send_write(&mut self, at: (usize, u16), header: IoHeader, data: &[u8]) {
        let message = WriteMsg { usr_len: 32 }.encode();
        let data = if data.is_empty() { Data::None } else { Data::Bytes(data) };
        self.request(at, data, &header.encode(), &message);
    }

    /// A read of as much as `header` says.
    pub fn send_read(&mut self, at: (usize, u16), header: IoHeader) {
        let len = header.bi_size as usize;
        let message = read_message(IoHeader::LEN, Some(self.result_desc(len)));
        self.request(at, Data::Room(len), &header.encode(), &message);
    }

    /// Opens an export.
    ///
    /// # Errors
    /// The errno of the answer.
    ///
    /// # Panics
    /// When no answer comes, or a malformed one.
    pub fn open(&mut self, name: &str, access: AccessMode) -> Result<OpenRsp, u16> {
        let open = Open { access, dev_name: Name::new(name.as_bytes()).expect("a name") };
        self.open_raw(&open.encode())
    }

    /// Opens with any OPEN message.
    ///
    /// # Errors
    /// The errno of the answer.
    ///
    /// # Panics
    /// When no answer comes, or a malformed one.
    pub fn open_raw(&mut self, open: &[u8; Open::LEN]) -> Result<OpenRsp, u16> {
        let message = read_message(Open::LEN, Some(self.result_desc(OpenRsp::LEN)));
        self.request((0, 0), Data::Room(OpenRsp::LEN), open, &message);
        match self.answer().errno {
            0 => Ok(OpenRsp::decode(&self.result(OpenRsp::LEN)).expect("an OPEN_RSP")),
            errno => Err(errno),
        }
    }

    /// Closes a device; gives the errno of the answer.
    pub fn close(&mut self, device_id: u32) -> u16 {
        let message = WriteMsg { usr_len: 8 }.encode();
        self.request((0, 0), Data::None, &Close { device_id }.encode(), &message);
        self.answer().errno
    }

    /// Takes the next answer; keys are taken over and receives posted again as a client does it.
    ///
    /// # Panics
    /// When none comes, or a connection ends first.
    pub fn answer(&mut self) -> Answer {
        loop {
            let wc = self.expect("answer", |event| match event {
                FabricEvent::Completion(wc) if is_receive(wc) => Some(*wc),
                FabricEvent::Closed { reason, .. } => panic!("closed, not answered: {reason}"),
                _ => None,
            });
            if let Some(answer) = self.take_receive(wc) {
                return answer;
            }
        }
    }

    fn take_receive(&mut self, wc: WorkCompletion) -> Option<Answer> {
        let place = usize::try_from(wc.wr_id - RECV_ID).expect("a small id");
        let (conn, slot) = (place / RECVS, place % RECVS);
        let imm = Imm::decode(wc.imm.expect("an immediate"));
        let answer = match imm {
            Imm::Response { permit, errno, .. } => {
                let carries = wc.op == WcOp::Recv;
                assert_eq!(carries, self.new_rkey, "the answer's form follows the mode");
                if carries {
                    let bytes = self.sge(RECV_AT + place * 16, wc.byte_len as usize).slice.to_vec();
                    let message = RkeyRsp::decode(&bytes).expect("an RKEY_RSP");
                    assert_eq!(message.permit, permit);
                    self.chunks[permit.index()].key = message.rkey;
                }
                Some(Answer { conn, permit: permit.0, errno })
            }
            Imm::Heartbeat => {
                self.send_imm(0, Imm::HeartbeatAck.encode());
                None
            }
            _ => None,
        };
        self.post_recv(conn, slot);
        answer
    }

    /// Waits until all its connections are closed, at most `limit` each; gives the reasons.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn ended(&mut self, what: &str, limit: StdDuration) -> Vec<CloseReason> {
        let what = format!("end of the path after: {what}");
        let closed = |event: &FabricEvent| match event {
            FabricEvent::Closed { reason, .. } => Some(reason.clone()),
            _ => None,
        };
        (0..self.conns.len()).map(|_| self.expect_within(limit, &what, closed)).collect()
    }

    /// Demands that the path serves: SESS_INFO is answered on each connection.
    ///
    /// # Panics
    /// When it is not.
    pub fn check_alive(&mut self, what: &str) {
        for conn in 0..self.conns.len() {
            let message = read_message(SessInfo::LEN, Some(self.result_desc(SessInfo::LEN)));
            let header = SessInfo { ver: 2 }.encode();
            self.request((conn, 1), Data::Room(SessInfo::LEN), &header, &message);
            let answer = self.answer();
            assert_eq!((answer.conn, answer.errno), (conn, 0), "SESS_INFO after: {what}");
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let mut left = std::mem::take(&mut self.conns);
        for event in &self.events {
            if let FabricEvent::Closed { qp, .. } = event {
                left.retain(|open| open != qp);
            }
        }
        for qp in &left {
            self.fabric.abort(Clock.now(), *qp);
        }
        for _ in 0..200 {
            self.events.clear();
            self.turn();
            for event in &self.events {
                if let FabricEvent::Closed { qp, .. } = event {
                    left.retain(|open| open != qp);
                }
            }
            if left.is_empty() {
                break;
            }
        }
    }
}

fn source(options: PeerOptions) -> IpAddr {
    Transport::of_environment().source(options.local)
}

/// RDMA CM pads private data with zeroes, TCP does not.
fn check_length(answer: &[u8]) {
    if Transport::of_environment().is_tcp() {
        assert_eq!(answer.len(), ConnRsp::LEN);
    } else {
        assert!(answer.len() >= ConnRsp::LEN, "an answer of {} bytes", answer.len());
    }
}

fn is_receive(wc: &WorkCompletion) -> bool {
    (RECV_ID..SEND_ID).contains(&wc.wr_id) && wc.status == WcStatus::Success
}

/// The READ message of a request.
///
/// # Panics
/// When the length does not fit it.
#[must_use]
pub fn read_message(usr_len: usize, desc: Option<SgDesc>) -> Vec<u8> {
    let usr_len = u16::try_from(usr_len).expect("a header");
    let message = ReadMsg { usr_len, need_inval: false, desc };
    let mut bytes = vec![0; message.encoded_len()];
    message.encode(&mut bytes);
    bytes
}
