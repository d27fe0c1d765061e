//! Scripted server: one session, one in-memory device, further exports, any number of paths.
//!
//! The server asserts every rule that a client must follow (order of connections, fields, permits
//! not used twice, lengths) and records what it saw. [`How`] determines its answers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rtrs_core::fabric::{
    Access, BindResult, CloseReason, ConnRequest, Fabric, FabricEvent, MemoryRegistration, PdUse,
    PrivateData, ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus, Window,
    WorkCompletion, WorkRequest, WrOp,
};
use rtrs_core::ids::{ConnIndex, PathUuid, PermitId, QpNum, Rkey};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{
    AccessMode, ChunkRequest, ConnReq, ConnRsp, Extensions, Fence, Imm, InfoReq, InfoRsp, MemBits,
    Message, OpenFlags, OpenRspTail, RkeyRsp, SessInfoRsp, SgDesc, UserMessage, errno,
};

use super::exports::{More, open_rsp, run_io};
use super::fixture::SECRET;
pub(super) use super::how::{How, Rewrite};
pub(super) use super::seen::{Request, Seen};
use crate::engine::device_table::NO_DEVICE;

/// Space for the user header, message and descriptors.
pub(super) const HDR: u32 = 4096;
/// `wr_id` of the receive for INFO_REQ.
const INFO: u64 = 1;
const EMPTY: u64 = 2;
const OTHER: u64 = 3;
/// Minimum round-trip time of the world's links.
const ROUND_TRIP: Duration = Duration::from_micros(20);
/// Contents of chunks before the client writes to them.
pub(super) const BLANK: u8 = 0xee;

struct Con {
    qp: QpNum,
    accepted: Instant,
    closed: bool,
}

/// Server's end of a path.
pub(super) struct Path {
    pub(super) uuid: PathUuid,
    pub(super) recon_cnt: u16,
    cid_num: u16,
    pd: Arc<dyn ProtectionDomain>,
    memory: Arc<dyn MemoryRegistration>,
    windows: Vec<Arc<dyn Window>>,
    cons: Vec<Con>,
    introduced: bool,
    ending: bool,
    busy: Vec<bool>,
    chunk: usize,
    depth: usize,
}

impl Path {
    fn answers_at(&self) -> usize {
        self.chunk * self.depth
    }

    fn info_req_at(&self) -> usize {
        self.answers_at() + 16 * self.depth
    }

    fn info_rsp_at(&self) -> usize {
        self.info_req_at() + 512
    }

    /// Checks that a round trip has passed since each accept, so that the client has received it.
    fn check_accepts(&self, now: Instant) {
        let heard = |con: &Con| now.since(con.accepted) >= ROUND_TRIP;
        assert!(self.cons.iter().all(heard), "one after the other");
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        let slice = self.memory.region().slice(at, len).expect("inside the region");
        Sge { slice, lkey: self.memory.lkey() }
    }
}

pub(super) struct Server {
    fabric: Box<dyn Fabric>,
    pub(super) how: How,
    pub(super) paths: Vec<Path>,
    pub(super) seen: Vec<Seen>,
    pub(super) disk: Vec<u8>,
    pub(super) held: Vec<Request>,
    /// ID of the device while the device is open.
    pub(super) device: Option<u32>,
    /// Other exports.
    pub(super) more: More,
    pub(super) opens: u32,
    /// Access and flags of the last open of `vol0`.
    pub(super) last_open: Option<(AccessMode, OpenFlags)>,
    pub(super) fences: Vec<Fence>,
    posted: u32,
}

impl Server {
    pub(super) fn new(mut fabric: Box<dyn Fabric>, addresses: &[SocketAddr], how: How) -> Self {
        for &address in addresses {
            fabric.listen(address).expect("a free address");
        }
        let disk = (0..how.size).map(|i| (i / 512 * 7 + i) as u8).collect();
        let (paths, seen, held, fences) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (more, device, opens, posted) = (More::default(), None, 0, 0);
        Self {
            fabric,
            how,
            paths,
            seen,
            disk,
            held,
            device,
            more,
            opens,
            last_open: None,
            fences,
            posted,
        }
    }

    /// IO requests seen so far.
    pub(super) fn ios(&self) -> impl Iterator<Item = &Request> {
        self.requests().filter(|r| r.io.is_some())
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.seen.iter().filter_map(|seen| match seen {
            Seen::Request(request) => Some(&**request),
            _ => None,
        })
    }

    pub(super) fn connects(&self) -> Vec<(ConnReq, IpAddr, Instant)> {
        let connect = |seen: &Seen| match seen {
            Seen::Connect { req, local, at } => Some((*req, *local, *at)),
            _ => None,
        };
        self.seen.iter().filter_map(connect).collect()
    }

    pub(super) fn turn(&mut self, now: Instant) -> bool {
        let mut any = self.fabric.poll(now);
        while let Some(event) = self.fabric.next_event() {
            any = true;
            match event {
                FabricEvent::Request(request) => self.on_connect(now, *request),
                // As in verbs, this may arrive after the next connection's request.
                FabricEvent::Established { qp, .. } => assert!(self.find(qp).is_some()),
                FabricEvent::Completion(wc) => self.on_completion(now, &wc),
                FabricEvent::Closed { qp, reason } => self.on_closed(now, qp, &reason),
                FabricEvent::ConnectFailed { .. } => panic!("the server never connects"),
            }
        }
        self.fabric.flush(now);
        any
    }

    fn find(&self, qp: QpNum) -> Option<(usize, usize)> {
        self.paths.iter().enumerate().find_map(|(index, path)| {
            path.cons.iter().position(|con| con.qp == qp).map(|cid| (index, cid))
        })
    }

    fn on_connect(&mut self, now: Instant, request: ConnRequest) {
        let raw = request.private_data.as_bytes();
        assert_eq!(raw[..6], [0, 0, 0xbd, 0x1b, 0x00, 0x02], "CM bytes, magic, version");
        assert!(raw[44] & !1 == 0 && raw[45..49] == *b"RTRX" && raw[52..] == [0; 4]);
        let req = ConnReq::decode(raw).expect("a good CON_REQ");
        self.seen.push(Seen::Connect { req, local: request.local.ip(), at: now });
        if let Some(data) = &self.how.refuse {
            self.fabric.reject(now, request, &PrivateData::new(data));
            return;
        }
        let old = self.paths.iter().position(|path| path.uuid == req.path_uuid);
        let index = match (old, req.cid.0) {
            (Some(old), 0) => {
                // The old connections still exist and have to end first.
                self.end_path(now, old);
                self.fabric.reject(now, request, &PrivateData::new(&ConnRsp::reject(104).encode()));
                return;
            }
            (Some(index), cid) => {
                let path = &self.paths[index];
                if path.ending {
                    drop(request);
                    return;
                }
                assert_eq!(path.cons.len(), usize::from(cid), "connections in order");
                path.check_accepts(now);
                assert_eq!((path.cid_num, path.recon_cnt), (req.cid_num, req.recon_cnt));
                assert!(req.first_conn, "its connection 0 was accepted");
                index
            }
            (None, 0) => {
                assert!(req.first_conn || !self.paths.is_empty(), "the session was not opened");
                self.new_path(&req, &request);
                self.paths.len() - 1
            }
            // The path went down while this request was in transit.
            (None, _) => {
                self.fabric.reject(now, request, &PrivateData::new(&ConnRsp::reject(6).encode()));
                return;
            }
        };
        self.accept(now, index, &req, request);
    }

    fn new_path(&mut self, req: &ConnReq, request: &ConnRequest) {
        let (depth, chunk) = (usize::from(self.how.queue_depth), self.how.max_io + HDR);
        let chunk = chunk as usize;
        let pd = self.fabric.alloc_pd(PdUse::Accept(request)).expect("a domain");
        let region = Region::new(chunk * depth + 32 * depth + 4096).expect("memory");
        if self.how.keep_chunks {
            region.fill(0, chunk * depth, BLANK);
        }
        let access = if self.how.new_rkey { Access::LOCAL } else { Access::REMOTE_WRITE };
        let memory = pd.register(&region, access).expect("a registration");
        let windows = (0..depth).map(|_| pd.window(&memory).expect("a window")).collect();
        self.paths.push(Path {
            uuid: req.path_uuid,
            recon_cnt: req.recon_cnt,
            cid_num: req.cid_num,
            pd,
            memory,
            windows,
            cons: Vec::new(),
            introduced: false,
            ending: false,
            busy: vec![false; depth],
            chunk,
            depth,
        });
    }

    fn accept(&mut self, now: Instant, index: usize, req: &ConnReq, request: ConnRequest) {
        let how = &self.how;
        let rsp = ConnRsp {
            queue_depth: how.queue_depth,
            max_io_size: how.max_io,
            max_hdr_size: HDR,
            new_rkey: how.new_rkey,
            ext: Extensions {
                lengths: how.keeps_lengths,
                fence: how.fence,
                cache_id: how.cache_id != 0,
                identity: how.gateways.as_ref().map_or(how.server_id, |g| g.id(req.path_uuid)),
                gateways: how.gateways.is_some(),
                changed: true,
                ..Extensions::default()
            }
            .encode(),
            ..ConnRsp::default()
        };
        let lie = how.con_rsp.as_ref();
        let mut data = lie.map_or_else(|| rsp.encode().to_vec(), |lie| lie(req, rsp));
        if data.len() == ConnRsp::LEN {
            // RDMA CM returns an accept padded to its full capacity.
            data.resize(PrivateData::CAPACITY, 0);
        }
        let path = &mut self.paths[index];
        let limits = QpLimits { send_max: 4096, recv_max: 2048 };
        let qp = self
            .fabric
            .accept(now, &path.pd, request, limits, &PrivateData::new(&data))
            .expect("the request still exists");
        path.cons.push(Con { qp, accepted: now, closed: false });
        if req.cid.0 == 0 {
            let sge = path.sge(path.info_req_at(), InfoReq::LEN);
            self.fabric.post_recv(qp, INFO, Some(sge)).expect("room");
        }
        for _ in 0..path.depth + 32 {
            self.fabric.post_recv(qp, EMPTY, None).expect("room");
        }
    }

    fn on_completion(&mut self, now: Instant, wc: &WorkCompletion) {
        if wc.status != WcStatus::Success || !matches!(wc.op, WcOp::Recv | WcOp::RecvRdmaWithImm) {
            return;
        }
        let Some((index, cid)) = self.find(wc.qp) else { return };
        let path = &mut self.paths[index];
        if path.ending {
            return;
        }
        assert_eq!(path.cons.len(), usize::from(path.cid_num), "not before all are up");
        path.check_accepts(now);
        if wc.wr_id == INFO {
            assert_eq!((cid, wc.op, wc.byte_len), (0, WcOp::Recv, 272), "INFO_REQ comes first");
            self.on_info(index);
            return;
        }
        assert!(path.introduced, "nothing but INFO_REQ before INFO_RSP");
        assert_eq!(wc.op, WcOp::RecvRdmaWithImm, "no client sends after INFO_REQ");
        self.fabric.post_recv(wc.qp, EMPTY, None).expect("room");
        let imm = wc.imm.expect("an immediate");
        match Imm::decode_with(imm, MemBits::for_depth(path.depth as u16)) {
            Imm::Heartbeat { next_ms } => {
                assert_eq!(cid, 0);
                self.seen.push(Seen::Heartbeat { at: now, next_ms });
                if self.how.heartbeats {
                    self.immediate(index, 0, Imm::HeartbeatAck.encode());
                }
            }
            Imm::HeartbeatAck => {
                assert_eq!((cid, imm), (0, 0x9000_0000));
                self.seen.push(Seen::HeartbeatAck { at: now });
            }
            Imm::Request { permit, offset } => {
                self.on_request(index, cid, imm, permit, offset);
            }
            other => panic!("{other:?} on connection {cid}"),
        }
    }

    fn on_info(&mut self, index: usize) {
        let path = &mut self.paths[index];
        assert!(!std::mem::replace(&mut path.introduced, true), "INFO_REQ twice");
        let raw = path.sge(path.info_req_at(), InfoReq::LEN).slice.to_vec();
        let req = InfoReq::decode(&raw).expect("a good INFO_REQ");
        let name = req.session_name.as_bytes().to_vec();
        assert_eq!(raw[..2], [0, 0]);
        assert_eq!(raw[2..2 + name.len()], name[..]);
        assert!(raw[2 + name.len()..].iter().all(|&b| b == 0), "reserved bytes");
        self.seen.push(Seen::Info { name });
        let (qp, chunk, base) = (path.cons[0].qp, path.chunk, path.memory.base());
        let descs = if self.how.new_rkey {
            (0..path.depth)
                .map(|permit| SgDesc {
                    addr: base + (permit * chunk) as u64,
                    key: open_chunk(path, permit, self.fabric.as_mut(), qp),
                    len: chunk as u32,
                })
                .collect()
        } else {
            let len = (chunk * path.depth) as u32;
            vec![SgDesc { addr: base, key: path.memory.rkey(), len }]
        };
        let mut bytes = vec![0; InfoRsp::len_for(descs.len())];
        InfoRsp { descs }.encode(&mut bytes);
        if let Some(lie) = &self.how.info_rsp {
            bytes = lie(bytes);
        }
        if bytes.is_empty() {
            return;
        }
        let sge = path.sge(path.info_rsp_at(), bytes.len());
        sge.slice.copy_in(0, &bytes);
        self.post(index, 0, WrOp::Send { imm: None, invalidate: None }, SgeList::one(sge));
    }

    fn on_request(&mut self, index: usize, cid: usize, imm: u32, permit: PermitId, offset: u32) {
        let path = &mut self.paths[index];
        let slot = permit.index();
        assert!(slot < path.depth, "permit {permit} of {}", path.depth);
        assert!(!std::mem::replace(&mut path.busy[slot], true), "permit {permit} is in flight");
        let key = if self.how.new_rkey {
            let (qp, window) = (path.cons[cid].qp, &path.windows[slot]);
            let key = window.rkey();
            let _ = self.fabric.revoke(qp, window, OTHER);
            key
        } else {
            path.memory.rkey()
        };
        let chunk = path.sge(slot * path.chunk, path.chunk).slice.to_vec();
        let range = ChunkRequest::message_range(offset, path.chunk as u32).expect("in the chunk");
        let message = &chunk[range];
        let parsed = ChunkRequest::parse(offset, message).expect("a good RTRS message");
        let length = match &parsed.message {
            Message::Read(read) => read.encoded_len(),
            Message::Write(_) => 4,
        };
        let user = parsed.user(&chunk[parsed.user_range()], 2).expect("a good user header");
        let io = match user {
            UserMessage::Io(op, header) => Some((op, header)),
            _ => None,
        };
        let probe = matches!(user, UserMessage::Close(close) if close.device_id == NO_DEVICE);
        let belongs = if io.is_some() || probe { cid > 0 } else { cid == 0 };
        assert!(belongs, "IO on IO connections, control on connection 0");
        let fence = matches!(user, UserMessage::Fence(_));
        let opened = match user {
            UserMessage::Open { dev_name, .. } => Some(dev_name),
            _ => None,
        };
        let held_open = self.how.hold_volume.is_some_and(|name| opened == Some(name.as_bytes()));
        let control = if self.how.fence { 2 } else { 1 };
        assert_eq!(permit.0 < control, cid == 0, "permit {permit} over connection {cid}");
        assert_eq!(fence, cid == 0 && permit.0 == 1, "permit 1 is for fences");
        assert!(parsed.invalidate().is_none(), "user space asks for no invalidation");
        let tail = chunk[parsed.data_len as usize..offset as usize + length].to_vec();
        let request = Request {
            path: path.uuid,
            recon_cnt: path.recon_cnt,
            cid: ConnIndex(cid as u16),
            permit,
            imm,
            key,
            parsed,
            tail,
            io,
            chunk: if self.how.keep_chunks { chunk } else { Vec::new() },
        };
        self.seen.push(Seen::Request(Box::new(request.clone())));
        let hold = match request.io {
            Some(_) => self.how.hold,
            None if cid > 0 => self.how.hold_probes,
            None => self.how.hold_control || held_open || fence && self.how.hold_fences,
        };
        if hold {
            self.held.push(request);
        } else {
            self.serve(&request);
        }
    }

    /// Serves all held requests.
    pub(super) fn release(&mut self) {
        for request in std::mem::take(&mut self.held) {
            self.serve(&request);
        }
    }

    fn path_of(&self, request: &Request) -> Option<usize> {
        self.paths.iter().position(|path| {
            path.uuid == request.path && path.recon_cnt == request.recon_cnt && !path.ending
        })
    }

    /// Executes a request and answers it.
    pub(super) fn serve(&mut self, request: &Request) {
        let Some(index) = self.path_of(request) else { return };
        let errno = self.execute(index, request);
        self.answer(request, errno);
    }

    /// Executes a request; a read puts its data at the start of the chunk.
    fn execute(&mut self, index: usize, request: &Request) -> u16 {
        let path = &self.paths[index];
        let chunk = path.sge(request.permit.index() * path.chunk, path.chunk).slice;
        if let Some((op, header)) = &request.io {
            self.how.gateways.iter().for_each(|gateways| gateways.check_io(request.path));
            if self.device != Some(header.device_id) {
                return self.more.io(*op, header, &chunk);
            }
            let errno = self.how.io_errno.as_ref().map_or(0, |errno| errno(header));
            return if errno == 0 { run_io(&mut self.disk, *op, header, &chunk) } else { errno };
        }
        let user = path.memory.region();
        let mut bytes = vec![0; usize::from(request.parsed.usr_len)];
        user.copy_out(
            request.permit.index() * path.chunk + request.parsed.data_len as usize,
            &mut bytes,
        );
        match request.parsed.user(&bytes, 2).expect("validated before") {
            UserMessage::SessInfo(info) => {
                chunk.copy_in(0, &SessInfoRsp::answer(info).encode());
                0
            }
            UserMessage::Open { access, flags, dev_name } => {
                if dev_name != b"vol0" {
                    let gateways = self.how.gateways.as_ref();
                    if gateways.is_some_and(|gateways| !gateways.has_others(request.path)) {
                        return 2;
                    }
                    let standing = gateways.map(|g| g.standing(request.path));
                    let opened = self.more.open(dev_name, &mut self.opens, &self.how, standing);
                    let rsp = match opened {
                        Ok(rsp) => rsp,
                        Err(errno) => return errno,
                    };
                    chunk.copy_in(0, &rsp[..request.parsed.data_len as usize]);
                    return 0;
                }
                if flags.returns && self.how.displaced {
                    return errno::EBADE;
                }
                self.last_open = Some((access, flags));
                if self.how.open_errno != 0 {
                    return self.how.open_errno;
                }
                if self.how.rw_errno != 0 && access == AccessMode::ReadWrite {
                    return self.how.rw_errno;
                }
                if self.how.read_only && access != AccessMode::ReadOnly {
                    return 13;
                }
                if self.device.is_none() {
                    // The ID differs each time, so that a stale one is noticed.
                    self.device = Some(self.opens);
                    self.opens += 1;
                }
                let (device, size) = (self.device.unwrap_or(0), self.how.size);
                let rsp = open_rsp(device, size, self.how.cache_id);
                let rsp = self.how.open_rsp.as_ref().map_or(rsp, |lie| lie(rsp));
                let standing = self.how.gateways.as_ref().map(|g| g.standing(request.path));
                let export = self.how.export_id;
                let tail = OpenRspTail { export, secret: SECRET, standing }.encode(&rsp);
                let room = request.parsed.data_len as usize;
                let ids = self.how.server_id.is_some() || standing.is_some();
                assert_eq!(room == OpenRspTail::LONG_LEN, ids);
                chunk.copy_in(0, &tail[..room]);
                0
            }
            UserMessage::Close(close) => {
                // Closing a device that is not open succeeds too.
                self.device = self.device.filter(|id| *id != close.device_id);
                self.more.close(close.device_id);
                0
            }
            UserMessage::Fence(fence) => {
                assert!(self.how.fence, "FENCE was sent to a server without support");
                assert_ne!(fence.path, request.path, "a path is fenced off over another");
                self.how.gateways.iter().for_each(|gateways| gateways.check_fence(request.path));
                self.fences.push(fence);
                if self.how.refuse_fences {
                    return errno::ENOLCK;
                }
                for path in &mut self.paths {
                    path.ending |= path.uuid == fence.path && fence.covers(path.recon_cnt);
                }
                0
            }
            UserMessage::Move(wanted) => {
                let gateways = self.how.gateways.as_mut().expect("only gateways are asked");
                gateways.moves(request.path, wanted)
            }
            // A session does not list exports.
            other => unreachable!("served above, or not asked: {other:?}"),
        }
    }

    /// Answers a request: sends the data of a successful read, then the immediate.
    pub(super) fn answer(&mut self, request: &Request, errno: u16) {
        let Some(index) = self.path_of(request) else { return };
        let cid = request.cid.index();
        if let (Some(desc), 0) = (request.parsed.desc(), errno) {
            let path = &self.paths[index];
            let at = request.permit.index() * path.chunk;
            let data = path.sge(at, desc.len as usize);
            let remote = RemoteMem { addr: desc.addr, rkey: desc.key };
            self.post(index, cid, WrOp::RdmaWrite { remote, imm: None }, SgeList::one(data));
        }
        self.finish(request, errno);
    }

    /// Sends the last part of an answer: the fresh key, if keys change, and the immediate.
    pub(super) fn finish(&mut self, request: &Request, errno: u16) {
        let Some(index) = self.path_of(request) else { return };
        let (cid, permit) = (request.cid.index(), request.permit);
        let imm = Imm::Response { permit, errno, invalidated: false }.encode();
        let path = &mut self.paths[index];
        path.busy[permit.index()] = false;
        if !self.how.new_rkey {
            self.immediate(index, cid, imm);
            return;
        }
        let qp = path.cons[cid].qp;
        let rkey = open_chunk(path, permit.index(), self.fabric.as_mut(), qp);
        let rsp = RkeyRsp { permit, rkey };
        let bytes = match &self.how.rkey_rsp {
            Some(lie) => lie(rsp),
            None => rsp.encode().to_vec(),
        };
        let at = path.answers_at() + permit.index() * 16;
        let sge = path.sge(at, bytes.len());
        sge.slice.copy_in(0, &bytes);
        self.post(index, cid, WrOp::Send { imm: Some(imm), invalidate: None }, SgeList::one(sge));
    }

    /// Sends an immediate without data.
    pub(super) fn immediate(&mut self, index: usize, cid: usize, imm: u32) {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        self.post(index, cid, WrOp::RdmaWrite { remote, imm: Some(imm) }, SgeList::EMPTY);
    }

    /// Sends an empty message without an immediate.
    pub(super) fn plain_send(&mut self, index: usize, cid: usize) {
        self.post(index, cid, WrOp::Send { imm: None, invalidate: None }, SgeList::EMPTY);
    }

    /// Writes garbage to the target of a read.
    pub(super) fn write_late(&mut self, request: &Request) {
        let Some(index) = self.path_of(request) else { return };
        let desc = request.parsed.desc().expect("a read");
        let path = &self.paths[index];
        // Not taken from the request's own chunk, whose data may not have been sent yet.
        let data = path.sge(0, desc.len as usize);
        data.slice.fill(0x66);
        let remote = RemoteMem { addr: desc.addr, rkey: desc.key };
        let op = WrOp::RdmaWrite { remote, imm: None };
        self.post(index, request.cid.index(), op, SgeList::one(data));
    }

    fn post(&mut self, index: usize, cid: usize, op: WrOp, sges: SgeList) {
        self.posted += 1;
        let signaled = self.posted.is_multiple_of(8);
        let qp = self.paths[index].cons[cid].qp;
        let _ = self.fabric.post_send(qp, WorkRequest { wr_id: OTHER, op, sges, signaled });
    }

    /// Ends one connection of a path from the server's side.
    pub(super) fn end_connection(&mut self, now: Instant, index: usize, cid: usize) {
        self.paths[index].ending = true;
        self.fabric.abort(now, self.paths[index].cons[cid].qp);
    }

    /// Ends a path from the server's side.
    pub(super) fn end_path(&mut self, now: Instant, index: usize) {
        self.paths[index].ending = true;
        for con in self.paths[index].cons.iter().filter(|con| !con.closed) {
            self.fabric.abort(now, con.qp);
        }
    }

    fn on_closed(&mut self, now: Instant, qp: QpNum, reason: &CloseReason) {
        let Some((index, cid)) = self.find(qp) else { return };
        self.paths[index].cons[cid].closed = true;
        let path = self.paths[index].uuid;
        self.seen.push(Seen::Closed { cid: ConnIndex(cid as u16), reason: reason.clone() });
        if !self.paths[index].ending && *reason != CloseReason::Peer {
            self.end_path(now, index);
        }
        if self.paths[index].cons.iter().all(|con| con.closed) {
            self.held.retain(|request| request.path != path);
            self.paths.remove(index);
        }
        self.device = self.device.filter(|_| !self.paths.is_empty());
        if self.paths.is_empty() {
            self.more.close_all();
        }
    }
}

/// Opens a chunk to the client under a new key.
fn open_chunk(path: &Path, permit: usize, fabric: &mut dyn Fabric, qp: QpNum) -> Rkey {
    let slice = path.sge(permit * path.chunk, path.chunk).slice;
    match fabric.bind(qp, &path.windows[permit], &slice, Access::REMOTE_WRITE, OTHER) {
        Ok(BindResult::Done(key) | BindResult::Pending(key)) => key,
        // The connection has just ended.
        Err(_) => Rkey(0),
    }
}
