//! Checks a session's path packet by packet: connections, requests, answers and their keys. Any
//! message not allowed by the protocol is an error.

use std::collections::BTreeMap;

use rtrs_core::ids::PermitId;
use rtrs_core::wire::{
    ChunkRequest, ConnReq, ConnRsp, Extensions, Imm, InfoReq, InfoRsp, MemBits, Message, OpenRsp,
    RkeyRsp, RwOp, SessInfoRsp, SgDesc, UserMessage,
};

use super::roce::{Kind, Packet};

const REQ: u16 = 0x10;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;

/// The contents of a capture.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) connections: usize,
    pub(crate) accepts: usize,
    /// Connections with a DREQ and a DREP.
    pub(crate) ends: usize,
    pub(crate) session_name: String,
    pub(crate) new_rkey: bool,
    pub(crate) keeps_lengths: bool,
    pub(crate) chunks: usize,
    pub(crate) descriptors: usize,
    pub(crate) opens: usize,
    pub(crate) closes: usize,
    pub(crate) reads: usize,
    pub(crate) writes: usize,
    pub(crate) flushes: usize,
    pub(crate) discards: usize,
    pub(crate) write_zeroes: usize,
    pub(crate) fua: usize,
    pub(crate) reads_with_data: usize,
    pub(crate) invalidates: usize,
    pub(crate) answers: usize,
    pub(crate) fresh_keys: usize,
    pub(crate) heartbeats: usize,
    pub(crate) heartbeat_acks: usize,
}

/// A connection, by its client's ID in the connection manager.
#[derive(Debug)]
struct Connection {
    request: ConnReq,
    client_qp: u32,
    server_qp: Option<u32>,
    dreq: bool,
    drep: bool,
}

/// A send or write that may consist of several packets; missing data is zero.
#[derive(Debug, Default)]
struct Assembly {
    bytes: Vec<u8>,
    known: Vec<bool>,
    remote: Option<(u64, u32, u32)>,
}

/// A request that has not been answered yet.
#[derive(Debug)]
struct Running {
    cid: usize,
    desc: Option<SgDesc>,
    need_inval: bool,
    invalidated: bool,
    /// Data written to the memory named by the descriptor.
    data: Option<Vec<u8>>,
    is_info: bool,
    is_open: bool,
}

#[derive(Debug, Default)]
struct Path {
    counts: Counts,
    connections: BTreeMap<u32, Connection>,
    granted: Option<(ConnRsp, u32)>,
    table: Vec<SgDesc>,
    /// Next packet number by destination queue pair; the two ends may use the same numbers.
    next_psn: BTreeMap<(bool, u32), u32>,
    parts: BTreeMap<(bool, u32), Assembly>,
    running: BTreeMap<u16, Running>,
    introduced: bool,
}

/// Checks a path from its first connect to its end.
pub(crate) fn judge(packets: &[Packet]) -> Result<Counts, String> {
    let mut path = Path::default();
    for (index, packet) in packets.iter().enumerate() {
        path.take(packet).map_err(|fault| format!("packet {index}: {fault}: {packet:?}"))?;
    }
    if !path.running.is_empty() {
        return Err(format!("{:?} got no answer", path.running));
    }
    let ended = |connection: &&Connection| connection.dreq && connection.drep;
    path.counts.ends = path.connections.values().filter(ended).count();
    Ok(path.counts)
}

fn be32(bytes: &[u8], at: usize) -> Result<u32, String> {
    let word = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    word.map(u32::from_be_bytes).ok_or_else(|| "a truncated datagram".into())
}

impl Path {
    fn take(&mut self, packet: &Packet) -> Result<(), String> {
        match packet.kind {
            Kind::Management { attribute } => self.manage(attribute, packet),
            Kind::Request { is_write, first, last } => {
                let Some(cid) = self.cid_of(packet) else {
                    return Err("a packet of an unknown connection".into());
                };
                let to = (packet.from_client, packet.to_qp);
                let next = self.next_psn.entry(to).or_insert(packet.psn);
                match packet.psn.wrapping_sub(*next) & 0xff_ffff {
                    0 => *next = (packet.psn + 1) & 0xff_ffff,
                    // A retransmission, because the acknowledgement was late.
                    0x80_0000.. => return Ok(()),
                    _ => return Err(format!("packet {next} is missing")),
                }
                let part = self.parts.entry(to).or_default();
                if first {
                    *part = Assembly { remote: packet.remote, ..Assembly::default() };
                }
                let kept = packet.payload.len();
                part.bytes.extend(&packet.payload);
                part.bytes.resize(part.bytes.len() + packet.payload_len - kept, 0);
                part.known.resize(part.known.len() + kept, true);
                part.known.resize(part.bytes.len(), false);
                if !last {
                    return Ok(());
                }
                let whole = std::mem::take(part);
                if is_write && whole.remote.is_none_or(|r| r.2 as usize != whole.bytes.len()) {
                    return Err("a write is not as long as announced".into());
                }
                if packet.from_client {
                    self.on_request(cid, packet, &whole)
                } else {
                    self.on_answer(cid, packet, &whole)
                }
            }
            Kind::Other => Ok(()),
        }
    }

    fn cid_of(&self, packet: &Packet) -> Option<usize> {
        let is = |c: &&Connection| {
            let qp = if packet.from_client { c.server_qp } else { Some(c.client_qp) };
            qp == Some(packet.to_qp)
        };
        self.connections.values().find(is).map(|c| c.request.cid.index())
    }

    fn manage(&mut self, attribute: u16, packet: &Packet) -> Result<(), String> {
        let bytes = &packet.payload;
        let (local, remote) = (be32(bytes, 0)?, be32(bytes, 4)?);
        match attribute {
            REQ => {
                if self.connections.contains_key(&local) {
                    return Ok(());
                }
                let private = bytes.get(140 + 36..140 + 92).ok_or("a truncated REQ")?;
                let request = ConnReq::decode(private).map_err(|e| e.to_string())?;
                if bytes[35] != 0 || bytes[39] != 0 {
                    return Err("RDMA reads are offered".into());
                }
                if request.cid.index() != self.counts.accepts {
                    return Err("a connect before the previous one was accepted".into());
                }
                let first = self.connections.values().next().map_or(request, |c| c.request);
                let same = (first.path_uuid, first.session_id, first.cid_num)
                    == (request.path_uuid, request.session_id, request.cid_num);
                if !same || request.recon_cnt != 1 || !request.first_conn {
                    return Err(format!("not of this path, or no first connect: {request:?}"));
                }
                self.counts.connections += 1;
                let client_qp = be32(bytes, 32)? >> 8;
                let new =
                    Connection { request, client_qp, server_qp: None, dreq: false, drep: false };
                self.connections.insert(local, new);
            }
            REP => {
                let new =
                    self.connections.get_mut(&remote).ok_or("a connection without a request")?;
                if new.server_qp.is_some() {
                    return Ok(());
                }
                let private = bytes.get(36..232).ok_or("a truncated REP")?;
                let rsp = ConnRsp::decode(private).map_err(|e| e.to_string())?;
                if rsp.errno != 0 {
                    return Err(format!("accepted with {}", rsp.errno));
                }
                new.server_qp = Some(be32(bytes, 12)? >> 8);
                self.counts.accepts += 1;
                if new.request.cid.0 == 0 {
                    let chunk = rsp.chunk_size().map_err(|e| e.to_string())?;
                    self.counts.new_rkey = rsp.new_rkey;
                    self.counts.keeps_lengths = Extensions::decode(&rsp.ext).lengths;
                    self.granted = Some((rsp, chunk));
                }
            }
            REJ => return Err("a connect was refused".into()),
            DREQ | DREP => {
                for (id, connection) in &mut self.connections {
                    if [local, remote].contains(id) {
                        connection.dreq |= attribute == DREQ;
                        connection.drep |= attribute == DREP;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn heartbeat(&mut self, cid: usize, imm: Imm, whole: &Assembly) -> Result<(), String> {
        if cid != 0 || whole.remote != Some((0, 0, 0)) || !self.introduced {
            return Err("a heartbeat where none belongs".into());
        }
        match imm {
            Imm::Heartbeat { .. } => self.counts.heartbeats += 1,
            _ => self.counts.heartbeat_acks += 1,
        }
        Ok(())
    }

    fn on_request(&mut self, cid: usize, packet: &Packet, whole: &Assembly) -> Result<(), String> {
        let (granted, chunk) = self.granted.ok_or("a message before the accept")?;
        if packet.imm().is_none() && whole.remote.is_some_and(|remote| remote.2 == 0) {
            // This message completes posted work requests before a disconnect; it reaches neither
            // memory nor a receive.
            return Ok(());
        }
        let Some(imm) = packet.imm() else {
            let asked = self.connections.values().next().map_or(0, |c| c.request.cid_num);
            if cid != 0 || whole.remote.is_some() || !self.counts.session_name.is_empty() {
                return Err("a message without an immediate".into());
            }
            if usize::from(asked) != self.counts.accepts {
                return Err("INFO_REQ before all connections".into());
            }
            let info = InfoReq::decode(&whole.bytes).map_err(|e| e.to_string())?;
            self.counts.session_name =
                String::from_utf8_lossy(info.session_name.as_bytes()).into_owned();
            return Ok(());
        };
        let (permit, off) = match Imm::decode_with(imm, MemBits::for_depth(granted.queue_depth)) {
            Imm::Request { permit, offset } => (permit, offset),
            beat @ (Imm::Heartbeat { .. } | Imm::HeartbeatAck) => {
                return self.heartbeat(cid, beat, whole);
            }
            other => return Err(format!("{other:?} from a client")),
        };
        let place = *self.table.get(permit.index()).ok_or("a permit that does not exist")?;
        let (addr, key, len) = whole.remote.ok_or("a request other than a write")?;
        let at = addr.checked_sub(place.addr).and_then(|at| u32::try_from(at).ok());
        let at = at.filter(|at| *at <= off).ok_or("a request outside its chunk")?;
        if key != place.key.0 {
            return Err(format!("the key of permit {permit} is {:#x}", place.key.0));
        }
        if self.running.contains_key(&permit.0) {
            return Err(format!("permit {permit} is in use"));
        }
        let bytes = |from: u32, to: u32| {
            let range = (from - at) as usize..(to - at) as usize;
            let known = whole.known.get(range.clone()).is_some_and(|k| k.iter().all(|k| *k));
            if known { Ok(&whole.bytes[range]) } else { Err("the capture is cut too short") }
        };
        ChunkRequest::message_range(off, chunk).map_err(|e| e.to_string())?;
        let message = bytes(off, at + len)?;
        let request = ChunkRequest::parse(off, message).map_err(|e| e.to_string())?;
        let (is_read, message_len) = match request.message {
            Message::Read(read) => (true, read.encoded_len()),
            Message::Write(_) => (false, 4),
        };
        if message.len() != message_len || at != if is_read { request.data_len } else { 0 } {
            return Err("more or less was written than the request needs".into());
        }
        let user = bytes(request.data_len, off)?;
        let user = request.user(user, 2).map_err(|e| e.to_string())?;
        self.count(cid, &user)?;
        self.counts.reads_with_data += usize::from(request.desc().is_some());
        let running = Running {
            cid,
            desc: request.desc(),
            need_inval: request.invalidate().is_some(),
            invalidated: false,
            data: None,
            is_info: matches!(user, UserMessage::SessInfo(_)),
            is_open: matches!(user, UserMessage::Open { .. }),
        };
        self.running.insert(permit.0, running);
        Ok(())
    }

    fn count(&mut self, cid: usize, user: &UserMessage<'_>) -> Result<(), String> {
        let is_io = matches!(user, UserMessage::Io(..));
        if is_io != (cid > 0) {
            return Err(format!("{user:?} on connection {cid}"));
        }
        let counts = &mut self.counts;
        match user {
            UserMessage::SessInfo(info) if info.ver != 2 => {
                return Err(format!("version {}", info.ver));
            }
            UserMessage::SessInfo(_) => {}
            UserMessage::Open { .. } => counts.opens += 1,
            UserMessage::Close(_) => counts.closes += 1,
            UserMessage::Fence(_)
            | UserMessage::Move(_)
            | UserMessage::Discover { .. }
            | UserMessage::Challenge(_)
            | UserMessage::Auth(_) => {
                return Err(format!("not a message for a kernel: {user:?}"));
            }
            UserMessage::Io(op, header) => {
                counts.fua += usize::from(*op == RwOp::Write && header.rw.is_fua());
                match op {
                    RwOp::Read => counts.reads += 1,
                    RwOp::Write => counts.writes += 1,
                    RwOp::Flush if header.sector == u64::MAX => counts.flushes += 1,
                    RwOp::Discard => counts.discards += 1,
                    RwOp::WriteZeroes => counts.write_zeroes += 1,
                    RwOp::Flush | RwOp::SecureErase | RwOp::Extents | RwOp::PartialWrite => {
                        return Err(format!("{header:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn on_answer(&mut self, cid: usize, packet: &Packet, whole: &Assembly) -> Result<(), String> {
        let (granted, chunk) = self.granted.ok_or("a message before the accept")?;
        if let Some(key) = packet.invalidate {
            let mut here = self.running.values_mut().filter(|r| r.cid == cid && r.need_inval);
            let named = here.find(|r| r.desc.is_some_and(|d| d.key.0 == key));
            let running = named.ok_or("an invalidation that was not requested")?;
            running.invalidated = true;
            self.counts.invalidates += 1;
            return Ok(());
        }
        let Some(imm) = packet.imm() else {
            if whole.remote.is_some_and(|remote| remote.2 == 0) {
                return Ok(());
            }
            let Some((addr, key, len)) = whole.remote else {
                // The first message on connection 0, and the server's only plain send.
                if cid != 0 || self.introduced {
                    return Err("a plain send".into());
                }
                let info = InfoRsp::decode(&whole.bytes).map_err(|e| e.to_string())?;
                self.table = info.chunks(granted.queue_depth, chunk).map_err(|e| e.to_string())?;
                self.counts.descriptors = info.descs.len();
                self.counts.chunks = self.table.len();
                self.introduced = true;
                return Ok(());
            };
            let wanted = |r: &&mut Running| {
                r.cid == cid && r.desc.is_some_and(|d| (d.addr, d.key.0, d.len) == (addr, key, len))
            };
            let running = self
                .running
                .values_mut()
                .find(wanted)
                .ok_or("a write outside the memory of every read")?;
            running.data = Some(whole.bytes.clone());
            return Ok(());
        };
        let (permit, errno, invalidated) = match Imm::decode(imm) {
            Imm::Response { permit, errno, invalidated } => (permit, errno, invalidated),
            beat @ (Imm::Heartbeat { .. } | Imm::HeartbeatAck) => {
                return self.heartbeat(cid, beat, whole);
            }
            other => return Err(format!("{other:?} from a server")),
        };
        let running = self.running.remove(&permit.0).ok_or("an answer without a request")?;
        self.counts.answers += 1;
        if running.cid != cid || errno != 0 {
            return Err(format!("errno {errno} on connection {cid}, for {running:?}"));
        }
        if invalidated != running.need_inval || invalidated != running.invalidated {
            return Err(format!("invalidated: {invalidated}, for {running:?}"));
        }
        if running.desc.is_some() != running.data.is_some() {
            return Err(format!("answered without its data: {running:?}"));
        }
        self.check_key(granted.new_rkey, permit, whole)?;
        let data = running.data.unwrap_or_default();
        if running.is_info {
            let rsp = SessInfoRsp::decode(&data).map_err(|e| e.to_string())?;
            if rsp.ver != 2 {
                return Err(format!("answered with version {}", rsp.ver));
            }
        }
        if running.is_open {
            let rsp = OpenRsp::decode(&data).map_err(|e| e.to_string())?;
            if rsp.nsectors == 0 || !rsp.logical_block_size.is_power_of_two() {
                return Err(format!("{rsp:?}"));
            }
        }
        Ok(())
    }

    /// Checks that an answer carries a fresh key or none, depending on the mode.
    fn check_key(
        &mut self,
        new_rkey: bool,
        permit: PermitId,
        whole: &Assembly,
    ) -> Result<(), String> {
        if !new_rkey {
            let bare = whole.remote == Some((0, 0, 0));
            return if bare { Ok(()) } else { Err("an answer other than a bare write".into()) };
        }
        if whole.remote.is_some() || whole.bytes.len() != RkeyRsp::LEN {
            return Err("an answer without a fresh key".into());
        }
        let fresh = RkeyRsp::decode(&whole.bytes).map_err(|e| e.to_string())?;
        fresh.check(permit).map_err(|e| e.to_string())?;
        let chunk = self.table.get_mut(permit.index()).ok_or("a permit that does not exist")?;
        chunk.key = fresh.rkey;
        self.counts.fresh_keys += 1;
        Ok(())
    }
}
