//! The 48-byte header of every message.

use super::map::MAP_LEN;

/// A violation that closes the connection, because the start of the next message is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A payload longer than the maximum.
    #[error("a message of {0} bytes; the maximum is {max}", max = PAYLOAD_MAX)]
    TooLong(u32),
    /// A congestion map of the wrong size.
    #[error("a congestion map of {0} bytes; the size must be {len}", len = MAP_LEN)]
    MapLength(u32),
}

/// TCP port for RDS, for both address families.
pub const TCP_PORT: u16 = 16385;
/// Header length in bytes.
pub const HEADER_LEN: usize = 48;
/// Maximum payload length in bytes.
pub const PAYLOAD_MAX: usize = 1 << 20;
/// Destination port of pings, and source port of their answers.
pub const PING_PORT: u16 = 0;
/// Source port of probes, and destination port of their answers.
pub const PROBE_PORT: u16 = 1;

/// Flag of a congestion map, which carries no other flags.
pub const CONG_BITMAP: u8 = 1;
/// Flag by which InfiniBand transports request an acknowledgment; harmless over TCP.
pub const ACK_REQUIRED: u8 = 2;
/// Flag of a message that may already have arrived.
pub const RETRANSMITTED: u8 = 4;

/// Header of a message. Other fields on the wire are zero when sent and ignored when received: the
/// acknowledgment, credits, padding and checksum are for other transports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Sequence number, starting at 1 for each direction of a pair of nodes; 0 for congestion maps.
    pub sequence: u64,
    /// Length of the payload in bytes.
    pub len: u32,
    /// Source port.
    pub sport: u16,
    /// Destination port.
    pub dport: u16,
    /// Combination of [`CONG_BITMAP`], [`ACK_REQUIRED`] and [`RETRANSMITTED`].
    pub flags: u8,
    /// Extension headers, see [`Extensions`](super::Extensions).
    pub extensions: [u8; 16],
}

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A congestion map.
    Map,
    /// Any message with a sequence number: data, pings, probes and their answers.
    Message,
}

impl Header {
    /// Encodes the header.
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

    /// Decodes a header; [`Header::kind`] validates it.
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

    /// Returns the kind of the message. A map is a message whose flags are exactly [`CONG_BITMAP`].
    ///
    /// # Errors
    /// Returns an error if a message of this kind cannot have the header's length.
    pub fn kind(&self) -> Result<Kind, WireError> {
        match (self.flags, self.len as usize) {
            (CONG_BITMAP, MAP_LEN) => Ok(Kind::Map),
            (CONG_BITMAP, _) => Err(WireError::MapLength(self.len)),
            (_, len) if len > PAYLOAD_MAX => Err(WireError::TooLong(self.len)),
            _ => Ok(Kind::Message),
        }
    }

    /// Whether the message may already have arrived.
    pub fn is_retransmitted(&self) -> bool {
        self.flags & RETRANSMITTED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_lengths_are_refused() {
        let header = |flags, len| Header { flags, len, ..Header::default() }.kind();
        assert_eq!(header(0, 1 << 20), Ok(Kind::Message));
        assert_eq!(header(0, (1 << 20) + 1), Err(WireError::TooLong((1 << 20) + 1)));
        assert_eq!(header(RETRANSMITTED, u32::MAX), Err(WireError::TooLong(u32::MAX)));
        assert_eq!(header(CONG_BITMAP, 8192), Ok(Kind::Map));
        assert_eq!(header(CONG_BITMAP, 8191), Err(WireError::MapLength(8191)));
        assert_eq!(header(CONG_BITMAP, 0), Err(WireError::MapLength(0)));
        // The flags are compared as a whole, as in the kernel.
        assert_eq!(header(CONG_BITMAP | RETRANSMITTED, 8192), Ok(Kind::Message));
    }
}
