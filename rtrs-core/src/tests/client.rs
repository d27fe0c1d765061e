//! Scripted RTRS client: sends exactly the bytes that a test specifies.
//!
//! [`PlayedClient`] is the client's end of one path, on any fabric. The test chooses the chunk
//! contents, immediates, keys and order; the work requests around them are well formed. The client
//! never waits, so the server engine's tests and the system tests' fixtures can build on it, each
//! with its own clock.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::fabric::{
    Access, BindResult, ConnectFailure, ConnectParams, Fabric, FabricEvent, MemoryRegistration,
    PdUse, PrivateData, ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus,
    Window, WorkCompletion, WorkRequest, WrOp,
};
use crate::ids::{ConnIndex, PathUuid, PermitId, QpNum, Rkey, SessionId};
use crate::mem::Region;
use crate::time::{Duration, Instant};
use crate::wire::{
    AUTH_VERSION, AccessMode, Auth, Challenge, ClientExtensions, Close, ConnReq, ConnRsp, Discover,
    Extensions, Fence, Imm, InfoReq, InfoRsp, IoHeader, MemBits, Move, Name, Open, OpenFlags,
    OpenRsp, ReadMsg, RkeyRsp, Rw, SessInfo, SgDesc, TimedRkeyRsp, WriteMsg,
};

/// Size of the client's memory: requests are built in the first half, results arrive in the second.
const MEMORY: usize = 1 << 20;
const RESULTS: usize = MEMORY / 2;
/// Offset of the receive buffers, 16 bytes each, and of the one for INFO_RSP.
const RECV_AT: usize = 256 << 10;
const INFO_AT: usize = 384 << 10;
/// Number of receives per connection.
const RECVS: usize = 64;
/// Work request IDs: for receiving INFO_RSP, for receiving answers, and for sends.
const INFO_ID: u64 = 1;
const RECV_ID: u64 = 0x1000;
const SEND_ID: u64 = 1 << 32;

/// Parameters with which a path connects.
#[derive(Clone, Copy, Debug)]
pub struct PathOptions {
    /// Number from which the session's UUID is derived.
    pub session: u8,
    /// Number from which the path's UUID is derived.
    pub path: u8,
    /// Number of connections, including the service connection.
    pub cid_num: u16,
    /// Number of the source address; the test's environment maps it to an address.
    pub local: u8,
    /// The server may create the session.
    pub first_conn: bool,
    /// Number of times that the path has connected before.
    pub recon_cnt: u16,
    /// Extensions, for example for the queue depth; the kernel client sends none.
    pub extensions: ClientExtensions,
}

impl Default for PathOptions {
    fn default() -> Self {
        Self { cid_num: 3, local: 0, ..Self::new(1, 1) }
    }
}

impl PathOptions {
    /// Creates the parameters of a path that creates its session, with two connections from the
    /// first source address.
    #[must_use]
    pub fn new(session: u8, path: u8) -> Self {
        let extensions = ClientExtensions::default();
        Self { session, path, cid_num: 2, local: 1, first_conn: true, recon_cnt: 1, extensions }
    }

    /// Returns the CON_REQ of a connection.
    #[must_use]
    pub fn request(&self, cid: u16) -> ConnReq {
        ConnReq {
            cid: ConnIndex(cid),
            cid_num: self.cid_num,
            recon_cnt: self.recon_cnt,
            path_uuid: PathUuid([self.path; 16]),
            session_id: SessionId([self.session; 16]),
            first_conn: self.first_conn,
            ext: self.extensions.encode(),
        }
    }
}

/// Data that precedes the user header of a request.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// No data.
    None,
    /// Free space of this many bytes.
    Room(usize),
    /// These bytes.
    Bytes(&'a [u8]),
}

/// Answer of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Connection on which it arrived.
    pub conn: usize,
    /// Permit.
    pub permit: u16,
    /// 0 or a positive errno.
    pub errno: u16,
    /// The server reports that it invalidated the client's key.
    pub invalidated: bool,
}

impl Answer {
    /// Returns the answer that an immediate on connection `conn` carries, if any.
    #[must_use]
    pub fn from_immediate(conn: usize, imm: Imm) -> Option<Self> {
        match imm {
            Imm::Response { permit, errno, invalidated } => {
                Some(Self { conn, permit: permit.0, errno, invalidated })
            }
            _ => None,
        }
    }
}

/// The client's end of one path.
pub struct PlayedClient {
    /// Queue pairs by `cid`.
    pub conns: Vec<QpNum>,
    /// The server's chunks, with their current keys.
    pub chunks: Vec<SgDesc>,
    /// Queue depth granted by the server.
    pub queue_depth: u16,
    /// Chunk size in bytes.
    pub chunk_size: u32,
    /// Answers contain a new key for their chunk.
    pub new_rkey: bool,
    /// Answers also contain the server's times.
    pub timed: bool,
    /// The server first requires proof of the client's identity.
    pub proof_wanted: bool,
    /// Errno with which the server refused INFO_REQ, if it did.
    pub info_refused: Option<u16>,
    /// Last answer with times.
    pub times: Option<TimedRkeyRsp>,
    /// Parameters of the path.
    pub options: PathOptions,
    /// The client's fabric.
    pub fabric: Box<dyn Fabric>,
    /// Events not yet taken.
    pub events: Vec<FabricEvent>,
    mem_bits: MemBits,
    memory: Arc<dyn MemoryRegistration>,
    pd: Arc<dyn ProtectionDomain>,
    posted: u64,
    clock: Box<dyn Fn() -> Instant>,
}

impl fmt::Debug for PlayedClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlayedClient").field("options", &self.options).finish_non_exhaustive()
    }
}

impl PlayedClient {
    /// Creates a client that has not connected yet. `clock` returns its fabric's time.
    ///
    /// # Panics
    /// Panics if the fabric refuses a domain or memory.
    #[must_use]
    pub fn new(
        mut fabric: Box<dyn Fabric>,
        pd: PdUse<'_>,
        options: PathOptions,
        clock: impl Fn() -> Instant + 'static,
    ) -> Self {
        let pd = fabric.alloc_pd(pd).expect("a protection domain");
        let region = Region::new(MEMORY).expect("memory");
        let memory = pd.register(&region, Access::REMOTE_WRITE).expect("a registration");
        Self {
            conns: Vec::new(),
            chunks: Vec::new(),
            queue_depth: 0,
            chunk_size: 0,
            new_rkey: false,
            timed: false,
            proof_wanted: false,
            info_refused: None,
            times: None,
            options,
            fabric,
            events: Vec::new(),
            mem_bits: MemBits::for_depth(1),
            memory,
            pd,
            posted: 0,
            clock: Box::new(clock),
        }
    }

    /// Collects the fabric's events.
    pub fn drain(&mut self) {
        self.events.extend(std::iter::from_fn(|| self.fabric.next_event()));
    }

    /// Takes the first event for which `pick` returns a value.
    pub fn take<T>(&mut self, pick: impl Fn(&FabricEvent) -> Option<T>) -> Option<T> {
        let (at, value) =
            self.events.iter().enumerate().find_map(|(at, event)| Some((at, pick(event)?)))?;
        self.events.remove(at);
        Some(value)
    }

    /// Requests a connection with arbitrary private data.
    ///
    /// # Panics
    /// Panics if the fabric cannot start the attempt.
    pub fn ask(&mut self, local: IpAddr, remote: SocketAddr, private_data: &[u8]) -> QpNum {
        let params = ConnectParams {
            local: Some(local),
            remote,
            private_data: PrivateData::new(private_data),
            limits: QpLimits { send_max: 256, recv_max: 256 },
            timeout: Duration::from_secs(30),
            peer_name: None,
        };
        let now = (self.clock)();
        let qp = self.fabric.connect(now, &self.pd, &params).expect("start connecting");
        self.fabric.flush(now);
        qp
    }

    /// Returns the result of a connection request, if there is one; the error is the errno in the
    /// reject. `padded` means that the fabric pads private data with zeroes, as RDMA CM does.
    ///
    /// # Panics
    /// Panics if the answer is not a CON_RSP.
    pub fn asked(&mut self, qp: QpNum, padded: bool) -> Option<Result<(), i16>> {
        let answer = self.take(|event| match event {
            FabricEvent::Established { qp: of, private_data } if *of == qp => {
                Some(Ok(**private_data))
            }
            FabricEvent::ConnectFailed { qp: of, failure } if *of == qp => {
                Some(Err(failure.clone()))
            }
            _ => None,
        })?;
        let response = |data: &PrivateData| {
            let bytes = data.as_bytes();
            let good =
                if padded { bytes.len() >= ConnRsp::LEN } else { bytes.len() == ConnRsp::LEN };
            assert!(good, "an answer of {} bytes", bytes.len());
            ConnRsp::decode(bytes).expect("a CON_RSP")
        };
        Some(match answer {
            Ok(data) => {
                let response = response(&data);
                assert_eq!(response.errno, 0);
                self.new_rkey = response.new_rkey;
                let says = Extensions::decode(&response.ext);
                (self.timed, self.proof_wanted) = (says.times, says.authenticate);
                self.queue_depth = response.queue_depth;
                self.mem_bits = MemBits::for_depth(response.queue_depth);
                self.chunk_size = response.chunk_size().expect("bounds");
                self.conns.push(qp);
                Ok(())
            }
            Err(ConnectFailure::Rejected(data)) => {
                let errno = response(&data).errno;
                assert!(errno < 0, "a reject without an error");
                Err(errno)
            }
            Err(ConnectFailure::Failed(reason)) => panic!("no answer to CON_REQ: {reason}"),
        })
    }

    /// Sends INFO_REQ.
    ///
    /// # Panics
    /// Panics if the name is too long.
    pub fn introduce(&mut self, name: &str) {
        let info = InfoReq { session_name: Name::new(name.as_bytes()).expect("a name") };
        self.send_info(&info.encode());
    }

    /// Sends arbitrary bytes as the first message of connection 0.
    pub fn send_info(&mut self, bytes: &[u8]) {
        let room = self.sge(INFO_AT, RESULTS - INFO_AT);
        // On a second attempt, the connection may have ended; in that case nothing is posted.
        let _ = self.fabric.post_recv(self.conns[0], INFO_ID, Some(room));
        self.send(0, bytes, None);
    }

    /// Takes INFO_RSP if it has arrived, and posts receives on all connections.
    ///
    /// # Panics
    /// Panics if the message is invalid.
    pub fn take_info(&mut self) -> Option<()> {
        let wc = self.take(|event| match event {
            FabricEvent::Completion(wc) if wc.wr_id == INFO_ID => Some(*wc),
            _ => None,
        })?;
        assert_eq!(wc.status, WcStatus::Success);
        let bytes = self.sge(INFO_AT, wc.byte_len as usize).slice.to_vec();
        self.info_refused = InfoRsp::refused(&bytes);
        if self.info_refused.is_some() {
            return Some(());
        }
        let message = InfoRsp::decode(&bytes).expect("an INFO_RSP");
        let depth = u16::try_from(bytes.len() / SgDesc::LEN).expect("a depth");
        self.chunks = message.chunks(depth, self.chunk_size).expect("chunks");
        for place in 0..self.conns.len() * RECVS {
            self.post_recv(place);
        }
        Some(())
    }

    fn post_recv(&mut self, place: usize) {
        let sge = self.sge(RECV_AT + place * 16, 16);
        // The connection may have ended.
        let qp = self.conns[place / RECVS];
        let _ = self.fabric.post_recv(qp, RECV_ID + place as u64, Some(sge));
    }

    /// Returns part of the client's memory.
    ///
    /// # Panics
    /// Panics if the range exceeds the memory.
    #[must_use]
    pub fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).expect("inside the client's memory");
        Sge { slice, lkey: self.memory.lkey() }
    }

    /// Copies `bytes` to an offset in the client's memory.
    fn staged(&self, at: usize, bytes: &[u8]) -> SgeList {
        if bytes.is_empty() {
            return SgeList::EMPTY;
        }
        let sge = self.sge(at, bytes.len());
        sge.slice.copy_in(0, bytes);
        SgeList::one(sge)
    }

    /// Posts a work request. A request that the connection no longer accepts is dropped: the test
    /// then sees that the connection is closed.
    pub fn post(&mut self, conn: usize, op: WrOp, sges: SgeList) {
        self.posted += 1;
        let wr = WorkRequest { wr_id: SEND_ID | self.posted, op, sges, signaled: false };
        let _ = self.fabric.post_send(self.conns[conn], wr);
        self.fabric.flush((self.clock)());
    }

    /// Sends `bytes` in a plain send.
    pub fn send(&mut self, conn: usize, bytes: &[u8], invalidate: Option<Rkey>) {
        let sges = self.staged(0, bytes);
        self.post(conn, WrOp::Send { imm: None, invalidate }, sges);
    }

    /// Writes `bytes` by RDMA to arbitrary server memory, without an immediate.
    pub fn write_remote(&mut self, conn: usize, remote: RemoteMem, bytes: &[u8]) {
        let sges = self.staged(0, bytes);
        self.post(conn, WrOp::RdmaWrite { remote, imm: None }, sges);
    }

    /// Reads from arbitrary server memory by RDMA.
    pub fn read_remote(&mut self, conn: usize, remote: RemoteMem, len: usize) {
        let sge = self.sge(RESULTS, len);
        self.post(conn, WrOp::RdmaRead { remote }, SgeList::one(sge));
    }

    /// Sends an immediate without data.
    pub fn send_imm(&mut self, conn: usize, imm: u32) {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, SgeList::EMPTY);
    }

    /// Returns the immediate that announces a request.
    ///
    /// # Panics
    /// Panics if the offset does not fit in an immediate.
    #[must_use]
    pub fn request_imm(&self, permit: u16, offset: usize) -> u32 {
        let offset = u32::try_from(offset).expect("an offset");
        Imm::Request { permit: PermitId(permit), offset }.encode_with(self.mem_bits)
    }

    /// Returns the descriptor for a result of `len` bytes, with a plain key for client memory.
    ///
    /// # Panics
    /// Panics if the length does not fit in a descriptor.
    #[must_use]
    pub fn result_desc(&self, len: usize) -> SgDesc {
        let addr = self.memory.base() + RESULTS as u64;
        SgDesc { addr, key: self.memory.rkey(), len: u32::try_from(len).expect("a length") }
    }

    /// Returns the descriptor for a result of `len` bytes, with a window that the server can
    /// invalidate.
    ///
    /// # Panics
    /// Panics if the fabric refuses a window.
    pub fn window_desc(&mut self, conn: usize, len: usize) -> (SgDesc, Arc<dyn Window>) {
        let window = self.pd.window(&self.memory).expect("a window");
        let slice = self.sge(RESULTS, len).slice;
        let qp = self.conns[conn];
        let bound = self.fabric.bind(qp, &window, &slice, Access::REMOTE_WRITE, 77);
        let (BindResult::Done(key) | BindResult::Pending(key)) = bound.expect("a bind");
        (SgDesc { key, ..self.result_desc(len) }, window)
    }

    /// Returns the result that the server wrote.
    #[must_use]
    pub fn result(&self, len: usize) -> Vec<u8> {
        self.sge(RESULTS, len).slice.to_vec()
    }

    /// Overwrites the memory for results.
    pub fn clear_result(&self) {
        self.sge(RESULTS, 64 << 10).slice.fill(0xee);
    }

    /// Writes data, user header and message into the chunk of a permit and announces them on a
    /// connection; the data area of a read is left free. `at` is the connection and the permit,
    /// here and in the methods below.
    pub fn request(&mut self, at: (usize, u16), data: Data<'_>, header: &[u8], message: &[u8]) {
        let (room, bytes) = match data {
            Data::None => (0, &[][..]),
            Data::Room(len) => (len, &[][..]),
            Data::Bytes(bytes) => (0, bytes),
        };
        let all = [bytes, header, message].concat();
        let imm = self.request_imm(at.1, room + bytes.len() + header.len());
        self.write_chunk(at.0, at.1, room, &all, imm);
    }

    /// Writes arbitrary bytes to an offset in a permit's chunk, with an arbitrary immediate.
    pub fn write_chunk(&mut self, conn: usize, permit: u16, offset: usize, bytes: &[u8], imm: u32) {
        // Each permit has its own staging area, so that requests can be in flight together.
        let staging = if bytes.len() <= 4096 { usize::from(permit) * 4096 } else { 0 };
        let chunk = self.chunks[usize::from(permit)];
        let remote = RemoteMem { addr: chunk.addr + offset as u64, rkey: chunk.key };
        let sges = self.staged(staging, bytes);
        self.post(conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, sges);
    }

    /// Sends a request for a result of `len` bytes.
    pub fn ask_for(&mut self, at: (usize, u16), header: &[u8], len: usize) {
        let message = read_message(header.len(), Some(self.result_desc(len)), false);
        self.request(at, Data::Room(len), header, &message);
    }

    /// Sends a request without data or result.
    fn send_plain(&mut self, at: (usize, u16), header: &[u8]) {
        let usr_len = u16::try_from(header.len()).expect("a header");
        self.request(at, Data::None, header, &WriteMsg { usr_len }.encode());
    }

    /// Sends a read of the length in `io`.
    pub fn send_read(&mut self, at: (usize, u16), io: IoHeader) {
        self.ask_for(at, &io.encode(), io.bi_size as usize);
    }

    /// Sends a write of `data` with the header `io`.
    pub fn send_write(&mut self, at: (usize, u16), io: IoHeader, data: &[u8]) {
        let message = WriteMsg { usr_len: 32 }.encode();
        self.request(at, Data::Bytes(data), &io.encode(), &message);
    }

    /// Sends a flush as the kernel client does.
    pub fn send_flush(&mut self, at: (usize, u16)) {
        let rw = Rw::FLUSH.sync().fua(true);
        let io = IoHeader { sector: u64::MAX, rw, ..IoHeader::default() };
        self.request(at, Data::None, &io.encode(), &read_message(IoHeader::LEN, None, false));
    }

    /// Opens an export.
    pub fn send_open(&mut self, permit: u16, name: &str, access: AccessMode) {
        self.send_open_for(permit, name, access, OpenRsp::LEN);
    }

    /// Opens an export, with `room` bytes for the answer.
    ///
    /// # Panics
    /// Panics if the name is too long.
    pub fn send_open_for(&mut self, permit: u16, name: &str, access: AccessMode, room: usize) {
        let dev_name = Name::new(name.as_bytes()).expect("a name");
        let open = Open { access, flags: OpenFlags::default(), dev_name };
        self.send_open_raw(permit, &open.encode(), room);
    }

    /// Sends an arbitrary OPEN message.
    pub fn send_open_raw(&mut self, permit: u16, open: &[u8; Open::LEN], room: usize) {
        self.ask_for((0, permit), open, room);
    }

    /// Requests the exports that follow a name, with `room` bytes for the answer.
    ///
    /// # Panics
    /// Panics if the name is too long.
    pub fn send_discover(&mut self, at: (usize, u16), after: &str, room: usize) {
        let after = Name::new(after.as_bytes()).expect("a name");
        self.send_discover_raw(at, &Discover { after }.encode(), room);
    }

    /// Sends an arbitrary DISCOVER message, with `room` bytes for the answer.
    pub fn send_discover_raw(&mut self, at: (usize, u16), discover: &[u8], room: usize) {
        self.ask_for(at, discover, room);
    }

    /// Requests the server's proof, with `room` bytes for it.
    pub fn send_challenge(&mut self, at: (usize, u16), challenge: &Challenge, room: usize) {
        self.ask_for(at, &challenge.encode(), room);
    }

    /// Sends the proof of the client's identity.
    ///
    /// # Panics
    /// Never: the message has a fixed length.
    pub fn send_auth(&mut self, at: (usize, u16), proof: &[u8]) {
        let auth = Auth { version: AUTH_VERSION }.encode();
        let usr_len = u16::try_from(auth.len()).expect("a header");
        self.request(at, Data::Bytes(proof), &auth, &WriteMsg { usr_len }.encode());
    }

    /// Closes a device.
    pub fn send_close(&mut self, permit: u16, device_id: u32) {
        self.send_plain((0, permit), &Close { device_id }.encode());
    }

    /// Requests that a device be served by this server, or by a different one.
    pub fn send_move(&mut self, permit: u16, wanted: Move) {
        self.send_plain((0, permit), &wanted.encode());
    }

    /// Fences other paths.
    pub fn send_fence(&mut self, permit: u16, fence: Fence) {
        self.send_plain((0, permit), &fence.encode());
    }

    /// Sends a request for the session's protocol version.
    pub fn send_sess_info(&mut self, at: (usize, u16), ver: u8) {
        self.ask_for(at, &SessInfo { ver }.encode(), SessInfo::LEN);
    }

    /// Takes the next immediate and its connection. Stores a key that arrives with it and reposts
    /// its receive, as a client does.
    ///
    /// # Panics
    /// Panics if the form of the message does not match the session's mode.
    pub fn take_immediate(&mut self) -> Option<(usize, Imm)> {
        loop {
            let wc = self.take(|event| match event {
                FabricEvent::Completion(wc) if is_receive(wc) => Some(*wc),
                _ => None,
            })?;
            let place = usize::try_from(wc.wr_id - RECV_ID).expect("a small id");
            let imm = wc.imm.map(Imm::decode);
            if let Some(Imm::Response { permit, .. }) = imm {
                let carries = wc.op == WcOp::Recv;
                assert_eq!(carries, self.new_rkey, "the answer's form follows the mode");
                if carries {
                    let bytes = self.sge(RECV_AT + place * 16, wc.byte_len as usize).slice.to_vec();
                    let len = if self.timed { TimedRkeyRsp::LEN } else { RkeyRsp::LEN };
                    assert_eq!(bytes.len(), len, "the long form is used exactly where agreed on");
                    let message = RkeyRsp::decode(&bytes).expect("an RKEY_RSP");
                    self.times = TimedRkeyRsp::decode(&bytes).ok();
                    assert_eq!(message.permit, permit);
                    self.chunks[permit.index()].key = message.rkey;
                }
            }
            self.post_recv(place);
            if let Some(imm) = imm {
                return Some((place / RECVS, imm));
            }
        }
    }
}

fn is_receive(wc: &WorkCompletion) -> bool {
    (RECV_ID..SEND_ID).contains(&wc.wr_id) && wc.status == WcStatus::Success
}

/// Returns the READ message of a request.
///
/// # Panics
/// Panics if the length does not fit.
#[must_use]
pub fn read_message(usr_len: usize, desc: Option<SgDesc>, need_inval: bool) -> Vec<u8> {
    let usr_len = u16::try_from(usr_len).expect("a header");
    let message = ReadMsg { usr_len, need_inval, desc };
    let mut bytes = vec![0; message.encoded_len()];
    message.encode(&mut bytes);
    bytes
}

/// Returns an IO header for device 0.
#[must_use]
pub fn io_header(rw: Rw, sector: u64, bi_size: u32) -> IoHeader {
    IoHeader { rw, sector, bi_size, ..IoHeader::default() }
}
