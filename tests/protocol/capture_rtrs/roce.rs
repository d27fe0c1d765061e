//! RoCE v2 packets from a pcap file: Ethernet, IPv4, UDP to port 4791, BTH and its extensions.

/// Kind of a packet, with the relevant header fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Connection manager datagram: its attribute and 232 bytes of data.
    Management { attribute: u16 },
    /// Part of a reliable send or RDMA write.
    Request { is_write: bool, first: bool, last: bool },
    /// Acknowledgement or any other packet.
    Other,
}

/// One packet.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// Whether the packet came from the end that sent the first one.
    pub(crate) from_client: bool,
    pub(crate) to_qp: u32,
    pub(crate) psn: u32,
    pub(crate) kind: Kind,
    /// Address, key and length of an RDMA write's first part.
    pub(crate) remote: Option<(u64, u32, u32)>,
    imm: Option<u32>,
    /// Key in a send with invalidate.
    pub(crate) invalidate: Option<u32>,
    /// The captured part of the payload, and the full length of the payload.
    pub(crate) payload: Vec<u8>,
    pub(crate) payload_len: usize,
}

impl Packet {
    pub(crate) fn imm(&self) -> Option<u32> {
        self.imm
    }

    /// Changes the permit in an answer or request, or turns a heartbeat into an unknown kind.
    pub(crate) fn spoil_immediate(&mut self) {
        self.imm = self.imm.map(|imm| if imm >> 31 == 1 { 0xf000_0000 } else { imm ^ 0x7_0009 });
    }
}

/// Reads big-endian numbers from a slice; returns `None` past its end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn number(&mut self, len: usize) -> Option<u64> {
        self.take(len).map(|b| b.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    fn u32(&mut self) -> Option<u32> {
        self.number(4).and_then(|n| u32::try_from(n).ok())
    }
}

/// Returns the packets in a little-endian pcap file with Ethernet frames, skipping other frames.
pub(crate) fn packets(file: &[u8]) -> Vec<Packet> {
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap_or_default()) as usize;
    let mut packets = Vec::new();
    let mut client = None;
    let Some((head, mut rest)) = file.split_at_checked(24) else { return packets };
    if word(&head[..4]) != 0xa1b2_c3d4 || word(&head[20..]) != 1 {
        return packets;
    }
    while let Some((head, tail)) = rest.split_at_checked(16) {
        let (kept, whole) = (word(&head[8..12]), word(&head[12..]));
        let Some((frame, tail)) = tail.split_at_checked(kept) else { break };
        rest = tail;
        if let Some((source, mut packet)) = parse(frame, whole) {
            packet.from_client = *client.get_or_insert(source) == source;
            packets.push(packet);
        }
    }
    packets
}

/// Returns the sender's address and the packet, whose frame was `whole` bytes long.
fn parse(frame: &[u8], whole: usize) -> Option<(u32, Packet)> {
    let mut bytes = Reader(frame);
    bytes.take(12)?;
    if bytes.number(2)? != 0x0800 {
        return None;
    }
    let ip = bytes.take(20)?;
    let source = u32::from_be_bytes(ip[12..16].try_into().ok()?);
    if ip[0] != 0x45 || ip[9] != 17 {
        return None;
    }
    bytes.take(2)?;
    if bytes.number(2)? != 4791 {
        return None;
    }
    bytes.take(4)?;
    let opcode = bytes.number(1)?;
    let pad = usize::try_from(bytes.number(1)? >> 4 & 3).ok()?;
    bytes.take(2)?;
    let to_qp = bytes.u32()? & 0xff_ffff;
    let psn = bytes.u32()? & 0xff_ffff;
    let mut packet = Packet {
        from_client: false,
        to_qp,
        psn,
        kind: Kind::Other,
        remote: None,
        imm: None,
        invalidate: None,
        payload: Vec::new(),
        payload_len: 0,
    };
    match opcode {
        // UD send: DETH, then a datagram with its class and attribute.
        0x64 => {
            bytes.take(8)?;
            let mad = bytes.take(24)?;
            if mad[1] == 7 {
                let attribute = u16::from_be_bytes([mad[16], mad[17]]);
                packet.kind = Kind::Management { attribute };
            }
        }
        0x00..=0x0b | 0x16 | 0x17 => {
            let is_write = (0x06..=0x0b).contains(&opcode);
            let first = matches!(opcode, 0x00 | 0x04..=0x06 | 0x0a | 0x0b | 0x17);
            let last = !matches!(opcode, 0x00 | 0x01 | 0x06 | 0x07);
            packet.kind = Kind::Request { is_write, first, last };
            if is_write && first {
                packet.remote = Some((bytes.number(8)?, bytes.u32()?, bytes.u32()?));
            }
            match opcode {
                0x03 | 0x05 | 0x09 | 0x0b => packet.imm = Some(bytes.u32()?),
                0x16 | 0x17 => packet.invalidate = Some(bytes.u32()?),
                _ => {}
            }
        }
        _ => {}
    }
    let headers = frame.len() - bytes.0.len();
    // After the payload: padding and the checksum.
    packet.payload_len = whole.checked_sub(headers + 4 + pad)?;
    packet.payload = bytes.0[..bytes.0.len().min(packet.payload_len)].to_vec();
    Some((source, packet))
}
