//! Service connection of a path: INFO_REQ, proofs, opening and closing of devices, heartbeats.
//!
//! Connection 0 is on the control shard. Its first receive is for INFO_RSP; all later ones have the
//! same size. One request is in flight at a time, on one of the control shard's own permits: one is
//! for opens and closes, the other for fences.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rtrs_core::fabric::{
    Access, ConnectParams, Fabric, FabricError, MemoryRegistration, PdUse, PrivateData,
    ProtectionDomain, QpLimits, RemoteMem, Sge, SgeList, WcOp, WcStatus, WorkCompletion,
    WorkRequest, WrOp,
};
use rtrs_core::gateway::Standing;
use rtrs_core::identity::EvictionSecret;
use rtrs_core::ids::{ConnIndex, PathId, PathUuid, PermitId, QpNum, Rkey};
use rtrs_core::mem::Region;
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::{
    AUTH_VERSION, AccessMode, Auth, Challenge, ChallengeRsp, ClientExtensions, Close, ConnReq,
    ConnRsp, Discover, Extensions, Fence, Imm, InfoReq, InfoRsp, MemBits, Move, Name, Open,
    OpenFlags, OpenRefusal, OpenRsp, OpenRspTail, Page, ReadMsg, SessInfo, SessInfoRsp, SgDesc,
    WriteMsg, errno,
};

use super::fault::ConnectionFault;
use super::io::{ANSWER_SLOT, Answer, WrId, answer_len, geometry_of, writes_zeroes};
use crate::engine::device_table::OpenDevice;
use crate::engine::session::{CONTROL, Granted, SessionConfig};

/// Small receives: one answer, heartbeats in both directions, eight CHANGED, and spare ones.
const RECEIVES: u32 = 32;
/// Layout of the control region: outgoing messages, the server's answers, receives, INFO_RSP. Pages
/// of exports later reuse the space of INFO_RSP.
const REQUEST_AT: usize = 0;
const ANSWER_AT: usize = 1024;
const RECEIVES_AT: usize = 2048;
const INFO_RSP_AT: usize = 4096;
const PAGE_AT: usize = INFO_RSP_AT;
/// The server's proof, and then the client's with its message, reuse the space of INFO_RSP too.
const PROOF_AT: usize = INFO_RSP_AT;
const PROOF_ROOM: usize = ChallengeRsp::LEN_MAX + 64;

/// Name of the connect response in errors.
const CONNECT: &str = "connect response";

/// Claims of a connect request about the client and its session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claims {
    /// Whether the server may create the session.
    pub(crate) first_conn: bool,
    /// Queue depth that the server granted the session before; 0 if none yet.
    pub(crate) queue_depth: u16,
    /// Whether the path can authenticate the client.
    pub(crate) proves: bool,
}

/// Addresses of a connection, and the name in the server's certificate.
#[derive(Clone, Debug)]
pub(crate) struct Endpoints {
    /// Source address, if one was chosen.
    pub(crate) local: Option<IpAddr>,
    pub(crate) remote: SocketAddr,
    /// Name that the server's certificate must have; None for its address.
    pub(crate) peer_name: Option<Arc<str>>,
    /// Slot of the path, for the IDs of its work requests.
    pub(crate) path: PathId,
}

/// Private data of one connection of a path.
pub(crate) fn conn_request(
    config: &SessionConfig,
    path: PathUuid,
    recon_cnt: u16,
    cid: ConnIndex,
    claims: Claims,
) -> PrivateData {
    let request = ConnReq {
        cid,
        cid_num: config.shards + 1,
        recon_cnt,
        path_uuid: path,
        session_id: config.id,
        first_conn: claims.first_conn,
        ext: ClientExtensions {
            smaller_depth: true,
            changed: true,
            times: true,
            authenticates: claims.proves,
            gateways: true,
            info_refusals: true,
            queue_depth: claims.queue_depth,
        }
        .encode(),
    };
    PrivateData::new(&request.encode())
}

/// Checks the fields common to all accepts; the limits matter only on connection 0.
pub(crate) fn check_accept(private_data: &[u8]) -> Result<ConnRsp, ConnectionFault> {
    let rsp = ConnRsp::decode(private_data).map_err(ConnectionFault::message(CONNECT))?;
    if rsp.errno != 0 {
        return Err(ConnectionFault::AcceptedWithError(rsp.errno));
    }
    Ok(rsp)
}

/// Checks the answer to connection 0, and returns the server's limits and extensions.
pub(crate) fn conn_response(private_data: &[u8]) -> Result<(Granted, Extensions), ConnectionFault> {
    let rsp = check_accept(private_data)?;
    let chunk_size = rsp.chunk_size().map_err(ConnectionFault::message(CONNECT))?;
    let ConnRsp { queue_depth, max_io_size, max_hdr_size, .. } = rsp;
    if queue_depth == 0 || max_io_size < 4096 || max_hdr_size < 512 {
        return Err(ConnectionFault::Bounds { queue_depth, max_io_size, max_hdr_size });
    }
    let mut extensions = Extensions::decode(&rsp.ext);
    // Without fresh keys, there is no message that could carry times.
    extensions.times &= rsp.new_rkey;
    let granted = Granted {
        queue_depth,
        max_io_size,
        chunk_size,
        keeps_lengths: extensions.lengths,
        fences: extensions.fence,
    };
    Ok((granted, extensions))
}

/// Event on a service connection.
#[derive(Debug)]
pub(crate) enum ServiceEvent {
    Nothing,
    /// The server sent a heartbeat, which must be answered immediately.
    HeartbeatAsked,
    /// The server answered a heartbeat.
    HeartbeatAnswered,
    /// The size of this device has changed on the server, or its export was removed there.
    Changed {
        device: u32,
    },
    /// INFO_RSP arrived, with the server's chunks, or with the errno of a refusal.
    Info(Result<Arc<[RemoteMem]>, u16>),
    /// A step of the mutual authentication.
    Proof(Proof),
    /// The device is open.
    Opened(Opened),
    /// The server refused to open the device, with this errno.
    OpenRefused(u16, Option<OpenRefusal>),
    /// The device is closed.
    Closed,
    /// The server has begun to move a device, or refuses with this errno.
    Moves(u16),
    /// The server's process cannot answer for the process to which the dead path led.
    FenceRefused,
    /// The requested path is fenced off.
    Fenced,
    /// A page of exports arrived.
    Discovered(Page),
    /// The server refused to list exports, with this errno.
    DiscoverRefused(u16),
}

/// Server's answer to a successful open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) device: OpenDevice,
    /// The server's standing, if the export moves between servers.
    pub(crate) standing: Option<Standing>,
    /// Secret that the server repeats when it evicts the session.
    pub(crate) secret: Option<EvictionSecret>,
}

/// Server's answer to a proof.
#[derive(Debug)]
pub(crate) enum Proof {
    /// The server's own proof.
    Server(Box<ChallengeRsp>),
    /// The server has authenticated the client.
    Accepted,
    /// The server gave no proof or rejected the client's, with this errno.
    Refused(u16),
}

/// Current use of the control permit.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Idle,
    Info,
    Challenge,
    Auth,
    SessInfo { export: String, access: AccessMode, flags: OpenFlags },
    Open,
    Close,
    Move,
    Fence,
    Discover,
}

#[derive(Debug)]
pub(crate) struct ServiceConnection {
    path: PathId,
    qp: QpNum,
    pd: Arc<dyn ProtectionDomain>,
    region: Option<Arc<dyn MemoryRegistration>>,
    granted: Option<Granted>,
    extensions: Extensions,
    /// Chunks of the control shard's permits; None before INFO_RSP.
    chunks: [Option<RemoteMem>; 2],
    step: Step,
    /// Permit of the request in flight, or of the last one.
    permit: PermitId,
    ending: bool,
    posted: u32,
}

impl ServiceConnection {
    /// Starts connecting.
    pub(crate) fn connect(
        now: Instant,
        endpoints: Endpoints,
        private_data: PrivateData,
        timeout: Duration,
        fabric: &mut dyn Fabric,
    ) -> Result<Self, FabricError> {
        let Endpoints { local, remote, peer_name, path } = endpoints;
        let pd = fabric.alloc_pd(PdUse::Connect { local, remote })?;
        let limits = QpLimits { send_max: 64, recv_max: RECEIVES + 1 };
        let params = ConnectParams { local, remote, private_data, limits, timeout, peer_name };
        let qp = fabric.connect(now, &pd, &params)?;
        Ok(Self {
            path,
            qp,
            pd,
            region: None,
            granted: None,
            extensions: Extensions::default(),
            chunks: [None; 2],
            step: Step::Idle,
            permit: CONTROL,
            ending: false,
            posted: 0,
        })
    }

    pub(crate) fn qp(&self) -> QpNum {
        self.qp
    }

    /// Protection domain of the path, for its other connections.
    pub(crate) fn domain(&self) -> Arc<dyn ProtectionDomain> {
        Arc::clone(&self.pd)
    }

    /// Records the server's limits and extensions from its answer to this connection.
    pub(crate) fn granted(&mut self, granted: Granted, extensions: Extensions) {
        (self.granted, self.extensions) = (Some(granted), extensions);
    }

    /// Whether the server announced extensions; kernel servers announce none.
    pub(crate) fn has_extensions(&self) -> bool {
        self.extensions != Extensions::default()
    }

    /// Whether answers on this path carry the server's times.
    pub(crate) fn is_timed(&self) -> bool {
        self.extensions.times
    }

    /// Size of this server's OPEN_RSP in bytes.
    fn open_rsp_len(&self) -> usize {
        if self.extensions.identity.is_some() { OpenRspTail::LONG_LEN } else { OpenRsp::LEN }
    }

    /// Whether no control request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.step == Step::Idle && self.chunks[0].is_some()
    }

    /// Whether this permit is in use on this path.
    pub(crate) fn is_using(&self, permit: PermitId) -> bool {
        self.permit == permit && !matches!(self.step, Step::Idle | Step::Info)
    }

    /// Posts receives, then INFO_REQ.
    pub(crate) fn post_info(
        &mut self,
        session_name: &str,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let granted = self.granted.ok_or(FabricError::QpState)?;
        let rsp_len = InfoRsp::len_for(usize::from(granted.queue_depth));
        let proofs = if self.extensions.authenticate { PROOF_ROOM } else { 0 };
        let after = rsp_len.max(Page::LEN_MAX).max(proofs);
        let region = Region::new(INFO_RSP_AT + after)
            .map_err(|e| FabricError::system("memory for the service connection", e))?;
        let registration = self.pd.register(&region, Access::REMOTE_WRITE)?;
        self.region = Some(registration);
        let info = self.sge(INFO_RSP_AT, rsp_len)?;
        fabric.post_recv(self.qp, WrId::Receive(RECEIVES).encode(self.path), Some(info))?;
        for slot in 0..RECEIVES {
            self.post_receive(slot, fabric)?;
        }
        let name = Name::new(session_name.as_bytes())
            .map_err(|_| FabricError::Unsupported("a session name of that length"))?;
        let bytes = InfoReq { session_name: name }.encode();
        let sge = self.store(&bytes)?;
        self.step = Step::Info;
        let op = WrOp::Send { imm: None, invalidate: None };
        self.post(op, SgeList::one(sge), fabric)
    }

    /// Challenges the server to prove its identity.
    pub(crate) fn post_challenge(
        &mut self,
        challenge: &Challenge,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let room = self.proof_room()?;
        self.sge(PROOF_AT, room)?.slice.fill(0);
        self.post_read(&challenge.encode(), PROOF_AT, room, fabric)?;
        self.step = Step::Challenge;
        Ok(())
    }

    /// Sends the proof of the client's identity.
    pub(crate) fn post_auth(
        &mut self,
        proof: &[u8],
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let auth = Auth { version: AUTH_VERSION }.encode();
        let message = WriteMsg { usr_len: auth.len() as u16 }.encode();
        let chunk = self.chunks[CONTROL.index()].ok_or(FabricError::QpState)?;
        if proof.len() > self.proof_room()? {
            return Err(FabricError::Unsupported("certificates larger than the server's chunks"));
        }
        let sge = self.sge(PROOF_AT, proof.len() + auth.len() + message.len())?;
        sge.slice.copy_in(0, &[proof, &auth, &message].concat());
        self.permit = CONTROL;
        self.post_request(chunk, 0, proof.len() + auth.len(), sge, fabric)?;
        self.step = Step::Auth;
        Ok(())
    }

    /// Maximum size in bytes of either end's proof.
    fn proof_room(&self) -> Result<usize, FabricError> {
        let granted = self.granted.ok_or(FabricError::QpState)?;
        Ok(ChallengeRsp::LEN_MAX.min(granted.max_io_size as usize))
    }

    /// Whether the server requires a proof of the client's identity.
    pub(crate) fn is_challenged(&self) -> bool {
        self.extensions.authenticate
    }

    /// Opens the device: sends SESS_INFO first, and OPEN after its answer. A server without room
    /// for the long answer gets no flags.
    pub(crate) fn post_open(
        &mut self,
        export: &str,
        access: AccessMode,
        flags: OpenFlags,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        if self.step != Step::Idle {
            return Err(FabricError::QueueFull);
        }
        let bytes = SessInfo::default().encode();
        self.post_read(&bytes, ANSWER_AT, SessInfoRsp::LEN, fabric)?;
        self.step = Step::SessInfo { export: export.to_owned(), access, flags };
        Ok(())
    }

    /// Requests a page of exports.
    pub(crate) fn post_discover(
        &mut self,
        discover: &Discover,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        if self.step != Step::Idle {
            return Err(FabricError::QueueFull);
        }
        self.post_read(&discover.encode(), PAGE_AT, Page::LEN_MAX, fabric)?;
        self.step = Step::Discover;
        Ok(())
    }

    pub(crate) fn post_close(
        &mut self,
        device_id: u32,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.post_write(CONTROL, &Close { device_id }.encode(), fabric)?;
        self.step = Step::Close;
        Ok(())
    }

    /// Asks this server to take over a device, or to give it up.
    pub(crate) fn post_move(
        &mut self,
        wanted: Move,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.post_write(CONTROL, &wanted.encode(), fabric)?;
        self.step = Step::Move;
        Ok(())
    }

    /// Asks the server to fence off another path, up to its connect number `fence.recon_cnt`.
    pub(crate) fn post_fence(
        &mut self,
        fence: &Fence,
        permit: PermitId,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.post_write(permit, &fence.encode(), fabric)?;
        self.step = Step::Fence;
        Ok(())
    }

    /// Sends a heartbeat that announces the next one; 0 announces nothing.
    pub(crate) fn post_heartbeat(
        &mut self,
        next_ms: u32,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.post_immediate(Imm::Heartbeat { next_ms }, fabric)
    }

    pub(crate) fn post_heartbeat_ack(
        &mut self,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.post_immediate(Imm::HeartbeatAck, fabric)
    }

    fn post_immediate(&mut self, imm: Imm, fabric: &mut dyn Fabric) -> Result<(), FabricError> {
        let remote = RemoteMem { addr: 0, rkey: Rkey(0) };
        let op = WrOp::RdmaWrite { remote, imm: Some(imm.encode()) };
        self.post(op, SgeList::EMPTY, fabric)
    }

    pub(crate) fn end(&mut self, now: Instant, in_order: bool, fabric: &mut dyn Fabric) {
        self.ending = true;
        if in_order {
            fabric.disconnect(now, self.qp);
        } else {
            fabric.abort(now, self.qp);
        }
    }

    /// Handles a completion of this connection.
    pub(crate) fn on_completion(
        &mut self,
        wc: &WorkCompletion,
        fabric: &mut dyn Fabric,
    ) -> Result<ServiceEvent, ConnectionFault> {
        if wc.status != WcStatus::Success || self.ending {
            return Ok(ServiceEvent::Nothing);
        }
        let Some((WrId::Receive(slot), _)) = WrId::decode(wc.wr_id) else {
            return Ok(ServiceEvent::Nothing);
        };
        if slot == RECEIVES {
            return self.on_info(wc.byte_len as usize);
        }
        let mut bytes = [0; ANSWER_SLOT];
        let at = RECEIVES_AT + slot as usize * ANSWER_SLOT;
        self.memory()?.copy_out(at, &mut bytes);
        self.post_receive(slot, fabric).map_err(|error| ConnectionFault::receive(&error))?;
        let Some(imm) = wc.imm else { return Ok(ServiceEvent::Nothing) };
        match Imm::decode(imm) {
            Imm::Heartbeat { .. } => Ok(ServiceEvent::HeartbeatAsked),
            Imm::HeartbeatAck => Ok(ServiceEvent::HeartbeatAnswered),
            Imm::Changed { device } => Ok(ServiceEvent::Changed { device }),
            _ => {
                let len = if wc.op == WcOp::Recv { wc.byte_len as usize } else { 0 };
                let bytes = bytes.get(..len).ok_or(ConnectionFault::AnswerSize(len))?;
                match Answer::decode(imm, bytes, self.is_timed())? {
                    Some(answer) => self.on_answer(&answer, fabric),
                    None => Ok(ServiceEvent::Nothing),
                }
            }
        }
    }

    fn on_info(&mut self, len: usize) -> Result<ServiceEvent, ConnectionFault> {
        let granted = self.granted.ok_or(ConnectionFault::BeforeAccept("INFO_RSP"))?;
        if self.step != Step::Info {
            return Err(ConnectionFault::UnexpectedInfo);
        }
        let mut bytes = vec![0; len.min(InfoRsp::len_for(usize::from(granted.queue_depth)))];
        self.memory()?.copy_out(INFO_RSP_AT, &mut bytes);
        if let Some(errno) = InfoRsp::refused(&bytes) {
            return Ok(ServiceEvent::Info(Err(errno)));
        }
        let table = InfoRsp::decode(&bytes)
            .and_then(|rsp| rsp.chunks(granted.queue_depth, granted.chunk_size))
            .map_err(ConnectionFault::message("INFO_RSP"))?;
        let chunks: Arc<[RemoteMem]> =
            table.iter().map(|c| RemoteMem { addr: c.addr, rkey: c.key }).collect();
        self.chunks = [chunks.first().copied(), chunks.get(1).copied()];
        self.step = Step::Idle;
        Ok(ServiceEvent::Info(Ok(chunks)))
    }

    fn on_answer(
        &mut self,
        answer: &Answer,
        fabric: &mut dyn Fabric,
    ) -> Result<ServiceEvent, ConnectionFault> {
        if answer.permit != self.permit {
            return Err(ConnectionFault::Permit(answer.permit));
        }
        let chunk = self.chunks.get_mut(answer.permit.index()).and_then(Option::as_mut);
        if let (Some(chunk), Some(rkey)) = (chunk, answer.rkey) {
            chunk.rkey = rkey;
        }
        match std::mem::replace(&mut self.step, Step::Idle) {
            Step::Challenge | Step::Auth if answer.errno != 0 => {
                Ok(ServiceEvent::Proof(Proof::Refused(answer.errno)))
            }
            Step::Challenge => {
                let room = self.proof_room()?;
                let answer = ChallengeRsp::decode(&self.answer_bytes(PROOF_AT, room)?);
                let answer = answer.map_err(ConnectionFault::message("CHALLENGE_RSP"))?;
                Ok(ServiceEvent::Proof(Proof::Server(Box::new(answer))))
            }
            Step::Auth => Ok(ServiceEvent::Proof(Proof::Accepted)),
            Step::SessInfo { export, access, flags } => {
                if answer.errno != 0 {
                    return Ok(ServiceEvent::OpenRefused(answer.errno, None));
                }
                let bytes = self.answer_bytes(ANSWER_AT, SessInfoRsp::LEN)?;
                SessInfoRsp::decode(&bytes).map_err(ConnectionFault::message("SESS_INFO_RSP"))?;
                let dev_name = Name::new(export.as_bytes()).map_err(ConnectionFault::ExportName)?;
                let room = self.open_rsp_len();
                let flags = if room < OpenRspTail::LONG_LEN { OpenFlags::default() } else { flags };
                let open = Open { access, flags, dev_name }.encode();
                // A refusal may include the reason.
                self.sge(ANSWER_AT, OpenRspTail::LONG_LEN)?.slice.fill(0);
                self.post_read(&open, ANSWER_AT, room, fabric)?;
                self.step = Step::Open;
                Ok(ServiceEvent::Nothing)
            }
            Step::Open if answer.errno != 0 => {
                let why = OpenRefusal::decode(&self.answer_bytes(ANSWER_AT, self.open_rsp_len())?);
                Ok(ServiceEvent::OpenRefused(answer.errno, why))
            }
            Step::Open => Ok(ServiceEvent::Opened(self.opened()?)),
            Step::Close => Ok(ServiceEvent::Closed),
            Step::Move => Ok(ServiceEvent::Moves(answer.errno)),
            Step::Fence if answer.errno == errno::ENOLCK => Ok(ServiceEvent::FenceRefused),
            Step::Fence if answer.errno != 0 => Err(ConnectionFault::FenceRefused(answer.errno)),
            Step::Fence => Ok(ServiceEvent::Fenced),
            Step::Discover if answer.errno != 0 => Ok(ServiceEvent::DiscoverRefused(answer.errno)),
            Step::Discover => {
                let page = Page::decode(&self.answer_bytes(PAGE_AT, Page::LEN_MAX)?);
                let page = page.map_err(ConnectionFault::message("DISCOVER_RSP"))?;
                Ok(ServiceEvent::Discovered(page))
            }
            step @ (Step::Idle | Step::Info) => {
                self.step = step;
                Ok(ServiceEvent::Nothing)
            }
        }
    }

    /// Decodes the answer to a successful OPEN.
    fn opened(&self) -> Result<Opened, ConnectionFault> {
        let bytes = self.answer_bytes(ANSWER_AT, self.open_rsp_len())?;
        let bad = ConnectionFault::message("OPEN_RSP");
        let rsp = OpenRsp::decode(&bytes).map_err(&bad)?;
        let long = self.extensions.identity.is_some();
        let tail = long.then(|| OpenRspTail::decode(&bytes)).transpose().map_err(bad)?;
        let granted = self.granted.ok_or(ConnectionFault::BeforeAccept("OPEN_RSP"))?;
        let geometry = geometry_of(&rsp, granted.keeps_lengths)?;
        let (block, largest) = (geometry.logical_block, granted.max_io_size);
        if block > largest {
            return Err(ConnectionFault::LargeBlocks { block, largest });
        }
        let supported = self.extensions.cache_id;
        let device = OpenDevice {
            device_id: rsp.device_id,
            geometry,
            writes_zeroes: writes_zeroes(&rsp, granted.keeps_lengths),
            cache_id: if supported { rsp.cache_id } else { 0 },
            volatile: supported && rsp.volatile,
            export_id: tail.and_then(|tail| tail.export),
            is_shared: false,
        };
        let standing = tail.and_then(|tail| tail.standing);
        Ok(Opened { device, standing, secret: tail.map(|tail| tail.secret) })
    }

    /// Posts a user message; the server writes its answer of `answer_len` bytes to `answer_at`.
    fn post_read(
        &mut self,
        user: &[u8],
        answer_at: usize,
        answer_len: usize,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let chunk = self.chunks[CONTROL.index()].ok_or(FabricError::QpState)?;
        let registration = self.region.as_ref().ok_or(FabricError::QpState)?;
        let message = ReadMsg {
            usr_len: user.len() as u16,
            need_inval: false,
            desc: Some(SgDesc {
                addr: registration.base() + answer_at as u64,
                key: registration.rkey(),
                len: answer_len as u32,
            }),
        };
        let mut bytes = [0; 512];
        bytes[..user.len()].copy_from_slice(user);
        let len = user.len() + message.encode(&mut bytes[user.len()..]);
        let sge = self.store(&bytes[..len])?;
        self.permit = CONTROL;
        self.post_request(chunk, answer_len, answer_len + user.len(), sge, fabric)
    }

    /// Posts a user message without data, which is answered by an errno.
    fn post_write(
        &mut self,
        permit: PermitId,
        user: &[u8],
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let chunk = self.chunks.get(permit.index()).copied().flatten();
        let (Some(chunk), Step::Idle) = (chunk, &self.step) else {
            return Err(FabricError::QueueFull);
        };
        let mut bytes = [0; 64];
        let len = user.len() + WriteMsg::LEN;
        bytes[..user.len()].copy_from_slice(user);
        bytes[user.len()..len].copy_from_slice(&WriteMsg { usr_len: user.len() as u16 }.encode());
        let sge = self.store(&bytes[..len])?;
        self.permit = permit;
        self.post_request(chunk, 0, user.len(), sge, fabric)
    }

    fn post_request(
        &mut self,
        chunk: RemoteMem,
        at: usize,
        message_at: usize,
        sge: Sge,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        let granted = self.granted.ok_or(FabricError::QpState)?;
        let bits = MemBits::for_depth(granted.queue_depth);
        let imm = Imm::Request { permit: self.permit, offset: message_at as u32 };
        let remote = RemoteMem { addr: chunk.addr + at as u64, rkey: chunk.rkey };
        let op = WrOp::RdmaWrite { remote, imm: Some(imm.encode_with(bits)) };
        self.post(op, SgeList::one(sge), fabric)
    }

    fn post(
        &mut self,
        op: WrOp,
        sges: SgeList,
        fabric: &mut dyn Fabric,
    ) -> Result<(), FabricError> {
        self.posted += 1;
        let signaled = self.posted.is_multiple_of(16);
        let wr_id = WrId::Request.encode(self.path);
        fabric.post_send(self.qp, WorkRequest { wr_id, op, sges, signaled })
    }

    fn post_receive(&self, slot: u32, fabric: &mut dyn Fabric) -> Result<(), FabricError> {
        let len = answer_len(self.is_timed());
        let sge = self.sge(RECEIVES_AT + slot as usize * ANSWER_SLOT, len)?;
        fabric.post_recv(self.qp, WrId::Receive(slot).encode(self.path), Some(sge))
    }

    fn store(&self, bytes: &[u8]) -> Result<Sge, FabricError> {
        let sge = self.sge(REQUEST_AT, bytes.len())?;
        sge.slice.copy_in(0, bytes);
        Ok(sge)
    }

    fn sge(&self, at: usize, len: usize) -> Result<Sge, FabricError> {
        let registration = self.region.as_ref().ok_or(FabricError::QpState)?;
        let slice = registration.region().slice(at, len).ok_or(FabricError::LocalMemory)?;
        Ok(Sge { slice, lkey: registration.lkey() })
    }

    fn memory(&self) -> Result<&Arc<Region>, ConnectionFault> {
        let registration = self.region.as_ref().ok_or(ConnectionFault::BeforeInfo)?;
        Ok(registration.region())
    }

    fn answer_bytes(&self, at: usize, len: usize) -> Result<Vec<u8>, ConnectionFault> {
        let mut bytes = vec![0; len];
        self.memory()?.copy_out(at, &mut bytes);
        Ok(bytes)
    }
}
