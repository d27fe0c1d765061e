//! A client played by hand: it sends exactly the bytes a test wants.

use std::sync::Arc;

use rtrs_core::fabric::sim::SimFabric;
use rtrs_core::fabric::{
    Access, BindResult, ConnectFailure, ConnectParams, Fabric, FabricEvent, MemoryRegistration,
    PdUse, PrivateData, ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, Window,
    WorkCompletion, WorkRequest, WrOp,
};
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, QpNum, Rkey, SessionId};
use rtrs_core::mem::Region;
use rtrs_core::time::Duration;
use rtrs_core::wire::{
    AccessMode, Close, ConnReq, ConnRsp, Fence, Imm, InfoReq, InfoRsp, IoHeader, Name, Open,
    OpenRsp, ReadMsg, RkeyRsp, Rw, SessInfo, SgDesc, WriteMsg,
};

use super::stand::{Stand, client_ip};

/// Bytes of the client's memory: requests are built in the first half, results come to the
/// second.
const MEMORY: usize = 256 << 10;
const RESULTS: usize = MEMORY / 2;
/// Where receives lie: 16 bytes each, and the one for INFO_RSP.
const RECV_AT: usize = 64 << 10;
const INFO_AT: usize = 96 << 10;

/// What a path is connected with.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerOptions {
    pub(super) session: u8,
    pub(super) path: u8,
    pub(super) cid_num: u16,
    /// Which of the client's addresses.
    pub(super) local: u8,
    pub(super) first_conn: bool,
    pub(super) recon_cnt: u16,
}

impl Default for PeerOptions {
    fn default() -> Self {
        Self { session: 1, path: 1, cid_num: 3, local: 0, first_conn: true, recon_cnt: 1 }
    }
}

impl PeerOptions {
    pub(super) fn request(&self, cid: u16) -> ConnReq {
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

/// An answer of the server as the client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) conn: usize,
    pub(super) permit: u16,
    pub(super) errno: u16,
    pub(super) invalidated: bool,
}

/// The client's end of one path.
pub(super) struct Peer {
    pub(super) fabric: SimFabric,
    pub(super) conns: Vec<QpNum>,
    pub(super) chunks: Vec<SgDesc>,
    pub(super) new_rkey: bool,
    pub(super) options: PeerOptions,
    pd: Arc<dyn ProtectionDomain>,
    memory: Arc<dyn MemoryRegistration>,
    events: Vec<FabricEvent>,
    posted: u64,
}

/// The errno of a rejected connection.
fn errno_of(failure: &ConnectFailure) -> i16 {
    match failure {
        ConnectFailure::Rejected(data) => {
            assert_eq!(data.as_bytes().len(), 56);
            ConnRsp::decode(data.as_bytes()).unwrap().errno
        }
        ConnectFailure::Failed(reason) => panic!("no answer: {reason}"),
    }
}

impl Peer {
    pub(super) fn new(stand: &Stand, options: PeerOptions) -> Self {
        let mut fabric = stand.client_fabric();
        let pd = fabric.alloc_pd(PdUse::Connect { local: None, remote: stand.address }).unwrap();
        let region = Region::new(MEMORY).unwrap();
        let memory = pd.register(&region, Access::REMOTE_WRITE).unwrap();
        Self {
            fabric,
            conns: Vec::new(),
            chunks: Vec::new(),
            new_rkey: false,
            options,
            pd,
            memory,
            events: Vec::new(),
            posted: 0,
        }
    }

    /// Connects all connections and introduces the session as `name`.
    pub(super) fn up(stand: &mut Stand, options: PeerOptions, name: &str) -> Self {
        let mut peer = Self::new(stand, options);
        for cid in 0..options.cid_num {
            peer.connect(stand, cid).unwrap();
        }
        peer.info(stand, name);
        assert_eq!(peer.chunks.len(), usize::from(stand.params.limits.queue_depth()));
        peer
    }

    /// As `up`, with `vol` open for reading and writing as device 0.
    pub(super) fn open(stand: &mut Stand, options: PeerOptions) -> Self {
        let mut peer = Self::up(stand, options, "sess");
        peer.send_open(stand, 0, "vol", AccessMode::ReadWrite);
        assert_eq!(peer.reply(stand).errno, 0);
        peer
    }

    pub(super) fn connect(&mut self, stand: &mut Stand, cid: u16) -> Result<(), i16> {
        let request = self.options.request(cid).encode();
        self.connect_raw(stand, &request)
    }

    /// Connects with any private data. The error is the errno of the reject.
    pub(super) fn connect_raw(
        &mut self,
        stand: &mut Stand,
        private_data: &[u8],
    ) -> Result<(), i16> {
        let qp = self.ask(stand, private_data);
        self.answer(stand, qp).expect("no answer")
    }

    /// Asks for a connection.
    pub(super) fn ask(&mut self, stand: &Stand, private_data: &[u8]) -> QpNum {
        let params = ConnectParams {
            local: Some(client_ip(self.options.local)),
            remote: stand.address,
            private_data: PrivateData::new(private_data),
            limits: QpLimits { send_max: 256, recv_max: 256 },
            timeout: Duration::from_secs(30),
        };
        let qp = self.fabric.connect(stand.now(), &self.pd, &params).unwrap();
        self.fabric.flush(stand.now());
        qp
    }

    /// What came of asking, if anything did; the error is the errno of the reject.
    pub(super) fn answer(&mut self, stand: &mut Stand, qp: QpNum) -> Option<Result<(), i16>> {
        stand.settle();
        self.drain();
        let at = self.events.iter().position(|event| match event {
            FabricEvent::Established { qp: of, .. } | FabricEvent::ConnectFailed { qp: of, .. } => {
                *of == qp
            }
            _ => false,
        });
        Some(match self.events.remove(at?) {
            FabricEvent::Established { private_data, .. } => {
                let response = ConnRsp::decode(private_data.as_bytes()).unwrap();
                assert_eq!(response.errno, 0);
                self.new_rkey = response.new_rkey;
                self.conns.push(qp);
                Ok(())
            }
            FabricEvent::ConnectFailed { failure, .. } => Err(errno_of(&failure)),
            event => panic!("no answer, but {event:?}"),
        })
    }

    /// Sends INFO_REQ and takes INFO_RSP; then receives are posted on all connections.
    pub(super) fn info(&mut self, stand: &mut Stand, name: &str) {
        let info = InfoReq { session_name: Name::new(name.as_bytes()).unwrap() };
        self.send_info(stand, &info.encode());
        let wc = self.completion(1).expect("no INFO_RSP");
        let bytes = self.sge(INFO_AT, wc.byte_len as usize).slice.to_vec();
        let limits = stand.params.limits;
        let message = InfoRsp::decode(&bytes).unwrap();
        self.chunks = message.chunks(limits.queue_depth(), limits.chunk_size()).unwrap();
        for at in 0..self.conns.len() {
            for slot in 0..64 {
                self.post_recv(at, slot);
            }
        }
    }

    /// Sends any bytes as the first message of connection 0.
    pub(super) fn send_info(&mut self, stand: &mut Stand, bytes: &[u8]) {
        let qp = self.conns[0];
        let room = self.sge(INFO_AT, InfoRsp::len_for(16));
        self.fabric.post_recv(qp, 1, Some(room)).unwrap();
        let sge = self.sge(0, bytes.len());
        sge.slice.copy_in(0, bytes);
        let op = WrOp::Send { imm: None, invalidate: None };
        self.post(stand, 0, op, SgeList::one(sge));
        stand.settle();
        self.drain();
    }

    fn recv_id(conn: usize, slot: usize) -> u64 {
        0x1000 + (conn * 64 + slot) as u64
    }

    fn post_recv(&mut self, conn: usize, slot: usize) {
        let at = RECV_AT + (conn * 64 + slot) * 16;
        let sge = self.sge(at, 16);
        let qp = self.conns[conn];
        self.fabric.post_recv(qp, Self::recv_id(conn, slot), Some(sge)).unwrap();
    }

    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).unwrap();
        Sge { slice, lkey: self.memory.lkey() }
    }

    pub(super) fn post(&mut self, stand: &Stand, conn: usize, op: WrOp, sges: SgeList) {
        self.posted += 1;
        let wr = WorkRequest { wr_id: 1 << 32 | self.posted, op, sges, signaled: false };
        self.fabric.post_send(self.conns[conn], wr).unwrap();
        self.fabric.flush(stand.now());
    }

    /// Where the server is to write a result of `len` bytes; a plain key of the client's memory.
    pub(super) fn result_desc(&self, len: usize) -> SgDesc {
        let addr = self.memory.base() + RESULTS as u64;
        SgDesc { addr, key: self.memory.rkey(), len: u32::try_from(len).unwrap() }
    }

    /// The same, through a window that the server can invalidate.
    pub(super) fn window_desc(&mut self, conn: usize, len: usize) -> (SgDesc, Arc<dyn Window>) {
        let window = self.pd.window(&self.memory).unwrap();
        let slice = self.memory.region().slice(RESULTS, len).unwrap();
        let qp = self.conns[conn];
        let bound = self.fabric.bind(qp, &window, &slice, Access::REMOTE_WRITE, 77).unwrap();
        let (BindResult::Done(key) | BindResult::Pending(key)) = bound;
        (SgDesc { key, ..self.result_desc(len) }, window)
    }

    pub(super) fn result(&self, len: usize) -> Vec<u8> {
        self.sge(RESULTS, len).slice.to_vec()
    }

    pub(super) fn clear_result(&self) {
        self.sge(RESULTS, 64 << 10).slice.fill(0xee);
    }

    /// Writes `data`, `header` and `message` to the end of a chunk's request and announces it;
    /// a read's data area is only left free.
    pub(super) fn request(
        &mut self,
        stand: &Stand,
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
        let off = room + bytes.len() + header.len();
        let imm = Imm::Request { permit: PermitId(permit), offset: u32::try_from(off).unwrap() };
        let imm = imm.encode_with(stand.params.limits.mem_bits());
        self.write_chunk(stand, (conn, permit), room, &all, imm);
    }

    /// Writes any bytes into a chunk, with any immediate.
    pub(super) fn write_chunk(
        &mut self,
        stand: &Stand,
        (conn, permit): (usize, u16),
        at: usize,
        bytes: &[u8],
        imm: u32,
    ) {
        // Each permit has a place of its own, so that requests can be on their way together.
        let staging = if bytes.len() <= 4096 { usize::from(permit) * 4096 } else { 0 };
        let sge = self.sge(staging, bytes.len());
        sge.slice.copy_in(0, bytes);
        let chunk = self.chunks[usize::from(permit)];
        let remote = RemoteMem { addr: chunk.addr + at as u64, rkey: chunk.key };
        let sges = if bytes.is_empty() { SgeList::EMPTY } else { SgeList::one(sge) };
        self.post(stand, conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, sges);
    }

    pub(super) fn read_message(
        &self,
        usr_len: usize,
        desc: Option<SgDesc>,
        inval: bool,
    ) -> Vec<u8> {
        let message = ReadMsg { usr_len: u16::try_from(usr_len).unwrap(), need_inval: inval, desc };
        let mut bytes = vec![0; message.encoded_len()];
        message.encode(&mut bytes);
        bytes
    }

    pub(super) fn send_read(&mut self, stand: &Stand, at: (usize, u16), io: IoHeader) {
        let desc = self.result_desc(io.bi_size as usize);
        let message = self.read_message(IoHeader::LEN, Some(desc), false);
        self.request(stand, at, Data::Room(io.bi_size as usize), &io.encode(), &message);
    }

    pub(super) fn send_write(
        &mut self,
        stand: &Stand,
        at: (usize, u16),
        io: IoHeader,
        data: &[u8],
    ) {
        let message = WriteMsg { usr_len: 32 }.encode();
        self.request(stand, at, Data::Bytes(data), &io.encode(), &message);
    }

    /// A flush as a kernel client sends it.
    pub(super) fn send_flush(&mut self, stand: &Stand, at: (usize, u16)) {
        let rw = Rw::FLUSH.sync().fua(true);
        let io = IoHeader { sector: u64::MAX, rw, ..IoHeader::default() };
        let message = self.read_message(IoHeader::LEN, None, false);
        self.request(stand, at, Data::None, &io.encode(), &message);
    }

    pub(super) fn send_open(&mut self, stand: &Stand, permit: u16, name: &str, access: AccessMode) {
        self.send_open_for(stand, permit, (name, access), OpenRsp::LEN);
    }

    /// The same, with so much room for the answer.
    pub(super) fn send_open_for(
        &mut self,
        stand: &Stand,
        permit: u16,
        (name, access): (&str, AccessMode),
        room: usize,
    ) {
        let open = Open { access, dev_name: Name::new(name.as_bytes()).unwrap() };
        let desc = self.result_desc(room);
        let message = self.read_message(Open::LEN, Some(desc), false);
        self.request(stand, (0, permit), Data::Room(room), &open.encode(), &message);
    }

    /// Opens and returns the response or the errno.
    pub(super) fn open_device(
        &mut self,
        stand: &mut Stand,
        name: &str,
        access: AccessMode,
    ) -> Result<OpenRsp, u16> {
        self.clear_result();
        self.send_open(stand, 15, name, access);
        match self.reply(stand).errno {
            0 => Ok(OpenRsp::decode(&self.result(OpenRsp::LEN)).unwrap()),
            errno => Err(errno),
        }
    }

    pub(super) fn send_close(&mut self, stand: &Stand, permit: u16, device_id: u32) {
        let close = Close { device_id }.encode();
        let message = WriteMsg { usr_len: 8 }.encode();
        self.request(stand, (0, permit), Data::None, &close, &message);
    }

    pub(super) fn send_fence(&mut self, stand: &Stand, permit: u16, fence: Fence) {
        let message = WriteMsg { usr_len: Fence::LEN as u16 }.encode();
        self.request(stand, (0, permit), Data::None, &fence.encode(), &message);
    }

    pub(super) fn send_sess_info(&mut self, stand: &Stand, permit: u16, ver: u8) {
        let desc = self.result_desc(SessInfo::LEN);
        let message = self.read_message(SessInfo::LEN, Some(desc), false);
        let header = SessInfo { ver }.encode();
        self.request(stand, (0, permit), Data::Room(SessInfo::LEN), &header, &message);
    }

    pub(super) fn send_imm(&mut self, stand: &Stand, conn: usize, imm: u32) {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        self.post(stand, conn, WrOp::RdmaWrite { remote, imm: Some(imm) }, SgeList::EMPTY);
    }

    fn drain(&mut self) {
        while let Some(event) = self.fabric.next_event() {
            self.events.push(event);
        }
    }

    /// Takes the completion of a work request id.
    fn completion(&mut self, wr_id: u64) -> Option<WorkCompletion> {
        let at = self
            .events
            .iter()
            .position(|event| matches!(event, FabricEvent::Completion(wc) if wc.wr_id == wr_id))?;
        match self.events.remove(at) {
            FabricEvent::Completion(wc) => Some(wc),
            _ => None,
        }
    }

    /// Everything received: immediates in order, with keys taken over as a client does it.
    pub(super) fn immediates(&mut self, stand: &mut Stand) -> Vec<(usize, Imm)> {
        stand.settle();
        self.drain();
        let mut seen = Vec::new();
        for event in std::mem::take(&mut self.events) {
            let FabricEvent::Completion(wc) = event else {
                self.events.push(event);
                continue;
            };
            let good = wc.status == rtrs_core::fabric::WcStatus::Success;
            if wc.wr_id < 0x1000 || wc.wr_id >= 1 << 32 || !good {
                continue;
            }
            let place = usize::try_from(wc.wr_id - 0x1000).unwrap();
            let (conn, slot) = (place / 64, place % 64);
            if let Some(imm) = wc.imm {
                let imm = Imm::decode(imm);
                if let Imm::Response { permit, .. } = imm {
                    let carries = wc.op == rtrs_core::fabric::WcOp::Recv;
                    assert_eq!(carries, self.new_rkey, "the answer's form follows the mode");
                    if carries {
                        let bytes = self.sge(RECV_AT + place * 16, wc.byte_len as usize);
                        let message = RkeyRsp::decode(&bytes.slice.to_vec()).unwrap();
                        assert_eq!(message.permit, permit);
                        self.chunks[permit.index()].key = message.rkey;
                    }
                }
                seen.push((conn, imm));
            }
            // The connection may have ended behind the message.
            let again = self.sge(RECV_AT + place * 16, 16);
            let _ = self.fabric.post_recv(self.conns[conn], Self::recv_id(conn, slot), Some(again));
        }
        seen
    }

    pub(super) fn replies(&mut self, stand: &mut Stand) -> Vec<Reply> {
        let reply = |(conn, imm)| match imm {
            Imm::Response { permit, errno, invalidated } => {
                Some(Reply { conn, permit: permit.0, errno, invalidated })
            }
            _ => None,
        };
        self.immediates(stand).into_iter().filter_map(reply).collect()
    }

    /// Exactly one answer.
    pub(super) fn reply(&mut self, stand: &mut Stand) -> Reply {
        let replies = self.replies(stand);
        assert_eq!(replies.len(), 1, "{replies:?}; events: {:?}", self.events);
        replies[0]
    }

    /// Connections that were closed.
    pub(super) fn closed(&mut self, stand: &mut Stand) -> usize {
        stand.settle();
        self.drain();
        let closed = |event: &&FabricEvent| matches!(event, FabricEvent::Closed { .. });
        self.events.iter().filter(closed).count()
    }

    /// Closes all connections in order.
    pub(super) fn leave(&mut self, stand: &mut Stand) {
        for qp in self.conns.clone() {
            self.fabric.disconnect(stand.now(), qp);
        }
        self.fabric.flush(stand.now());
        stand.settle();
    }
}

/// What lies before the user header.
#[derive(Clone, Copy, Debug)]
pub(super) enum Data<'a> {
    None,
    Room(usize),
    Bytes(&'a [u8]),
}

/// An IO header for device 0.
pub(super) fn io(rw: Rw, sector: u64, bi_size: u32) -> IoHeader {
    IoHeader { rw, sector, bi_size, ..IoHeader::default() }
}
