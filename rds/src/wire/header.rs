//! The 48 bytes in front of every message.

use super::map::MAP_LEN;

/// A violation that ends the connection: behind it nobody knows where the next message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A payload longer than a message may have.
    #[error("a message of {0} bytes; the longest has {max}", max = PAYLOAD_MAX)]
    TooLong(u32),
    /// A congestion map of another size than all have.
    #[error("a congestion map of {0} bytes; each has {len}", len = MAP_LEN)]
    MapLength(u32),
}

/// The TCP port of RDS, for both families.
pub const TCP_PORT: u16 = 16385;
/// Bytes of a header.
pub const HEADER_LEN: usize = 48;
/// Most bytes of a payload.
pub const PAYLOAD_MAX: usize = 1 << 20;
/// The port of pings; answers to pings come from it.
pub const PING_PORT: u16 = 0;
/// The port that probes come from and that their answers go to.
pub const PROBE_PORT: u16 = 1;

/// Flag of a congestion map, which has no other.
pub const CONG_BITMAP: u8 = 1;
/// Flag by which InfiniBand transports ask for an acknowledgment; harmless over TCP.
pub const ACK_REQUIRED: u8 = 2;
/// Flag of a message that may have arrived before.
pub const RETRANSMITTED: u8 = 4;

/// What stands in front of a payload. Other fields of the wire are zero when sent and ignored when
/// received: acknowledgment, credits, padding and checksum serve other transports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// From 1 on in each direction of a pair of nodes; 0 for congestion maps.
    pub sequence: u64,
    /// Bytes of the payload.
    pub len: u32,
    /// Source port.
    pub sport: u16,
    /// Destination port.
    pub dport: u16,
    /// [`CONG_BITMAP`], [`ACK_REQUIRED`], [`RETRANSMITTED`].
    pub flags: u8,
    /// Extension headers, see [`Extensions`](super::Extensions).
    pub extensions: [u8; 16],
}

/// What a header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A congestion map.
    Map,
    /// Anything with a sequence number: data, pings, probes and their answers.
    Message,
}

impl Header {
    /// As the wire has it.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..8].copy_from_slice(&self.sequence.to_be_bytes());
        out[16..20].copy_from_slice(&self.len.to_be_bytes());
        out[20..22].copy_from_slice(&self.sport.to_be_bytes());
        out[22..24].copy_from_slice(&self.dport.to_be_bytes());
        out[24] = self.flags;
        out[32..].copy_from_slice(&self.extensions);
        out
    }

    /// What the wire has; see [`Header::kind`] for whether it makes sense.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        fn at<const N: usize>(bytes: &[u8; HEADER_LEN], from: usize) -> [u8; N] {
            let mut out = [0; N];
            out.copy_from_slice(&bytes[from..from + N]);
            out
        }
        Self {
            sequence: u64::from_be_bytes(at(bytes, 0)),
            len: u32::from_be_bytes(at(bytes, 16)),
            sport: u16::from_be_bytes(at(bytes, 20)),
            dport: u16::from_be_bytes(at(bytes, 22)),
            flags: bytes[24],
            extensions: at(bytes, 32),
        }
    }

    /// What it announces. A map is one whose flags are exactly [`CONG_BITMAP`].
    ///
    /// # Errors
    /// A length that this kind cannot have.
    pub fn kind(&self) -> Result<Kind, WireError> {
        match (self.flags, self.len as usize) {
            (CONG_BITMAP, MAP_LEN) => Ok(Kind::Map),
            (CONG_BITMAP, _) => Err(WireError::MapLength(self.len)),
            (_, len) if len > PAYLOAD_MAX => Err(WireError::TooLong(self.len)),
            _ => Ok(Kind::Message),
        }
    }

    /// True for a message that may have arrived before.
    pub fn is_retransmitted(&self) -> bool {
        self.flags & RETRANSMITTED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_no_message_has_are_refused() {
        let header = |flags, len| Header { flags, len, ..Header::default() }.kind();
        assert_eq!(header(0, 1 << 20), Ok(Kind::Message));
        assert_eq!(header(0, (1 << 20) + 1), Err(WireError::TooLong((1 << 20) + 1)));
        assert_eq!(header(RETRANSMITTED, u32::MAX), Err(WireError::TooLong(u32::MAX)));
        assert_eq!(header(CONG_BITMAP, 8192), Ok(Kind::Map));
        assert_eq!(header(CONG_BITMAP, 8191), Err(WireError::MapLength(8191)));
        assert_eq!(header(CONG_BITMAP, 0), Err(WireError::MapLength(0)));
        // Flags are compared as a whole, as the kernel does.
        assert_eq!(header(CONG_BITMAP | RETRANSMITTED, 8192), Ok(Kind::Message));
    }
}
