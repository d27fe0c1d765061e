//! Extension headers: up to 16 bytes of typed values at the end of a header.
//!
//! A value's type determines its length, so nothing after an unknown type can be parsed. Types that
//! concern RDMA have no meaning over TCP and are skipped.

const NPATHS: u8 = 5;
const GEN_NUM: u8 = 6;
const PATH: u8 = 8;

/// Values that nodes exchange over TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// Number of connections supported between a pair of nodes; sent in probes, answers and maps.
    pub npaths: Option<u16>,
    /// Random number that a node draws at startup, never 0; a different number means a different
    /// run of the node.
    pub generation: Option<u32>,
    /// Number of the path that a connection belongs to, starting at 0; sent in maps.
    pub path: Option<u8>,
}

impl Extensions {
    /// Encodes the values for a header.
    pub fn encode(self) -> [u8; 16] {
        let mut out = [0; 16];
        let mut at = 0;
        if let Some(npaths) = self.npaths {
            out[0] = NPATHS;
            out[1..3].copy_from_slice(&npaths.to_be_bytes());
            at = 3;
        }
        if let Some(generation) = self.generation {
            out[at] = GEN_NUM;
            out[at + 1..at + 5].copy_from_slice(&generation.to_be_bytes());
            at += 5;
        }
        if let Some(path) = self.path {
            out[at] = PATH;
            out[at + 1] = path;
        }
        out
    }

    /// Decodes a header's values, up to the end or to the first type that is unknown or truncated.
    pub fn decode(bytes: &[u8; 16]) -> Self {
        let mut found = Self::default();
        let mut rest = bytes.as_slice();
        while let Some((&kind, body)) = rest.split_first() {
            let Some(len) = body_len(kind).filter(|len| *len <= body.len()) else { break };
            match (kind, body) {
                (NPATHS, [a, b, ..]) => found.npaths = Some(u16::from_be_bytes([*a, *b])),
                (GEN_NUM, [a, b, c, d, ..]) => {
                    let number = u32::from_be_bytes([*a, *b, *c, *d]);
                    found.generation = Some(number).filter(|number| *number != 0);
                }
                (PATH, [path, ..]) => found.path = Some(*path),
                _ => {}
            }
            rest = &body[len..];
        }
        found
    }
}

/// Returns the body length of a type. `None` ends the list: type 0, and types of unknown length.
const fn body_len(kind: u8) -> Option<usize> {
    match kind {
        // Version, key of an RDMA operation, capabilities.
        1 | 2 | 7 => Some(4),
        // Destination and size of an RDMA operation.
        3 | 4 => Some(8),
        NPATHS => Some(2),
        GEN_NUM => Some(4),
        PATH => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(bytes: &[u8]) -> [u8; 16] {
        let mut out = [0; 16];
        out[..bytes.len()].copy_from_slice(bytes);
        out
    }

    #[test]
    fn lists_are_read_up_to_the_first_unknown_entry() {
        let both =
            Extensions { npaths: Some(8), generation: Some(0x0102_0304), ..Extensions::default() };
        let all = Extensions { path: Some(7), ..both };
        for (bytes, expected) in [
            (&[5, 0, 8, 6, 1, 2, 3, 4][..], both),
            (&[6, 1, 2, 3, 4, 8, 7, 5, 0, 8], all),
            (&[2, 9, 9, 9, 9, 5, 0, 8, 6, 1, 2, 3, 4], both),
            (&[5, 0, 8, 99, 6, 1, 2, 3, 4], Extensions { generation: None, ..both }),
            (&[0, 5, 0, 8], Extensions::default()),
            // 0 is not a valid generation.
            (&[6, 0, 0, 0, 0, 5, 0, 1], Extensions { npaths: Some(1), ..Extensions::default() }),
            // Truncated at the end of the field.
            (&[3, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 5, 0], Extensions::default()),
            (&[3, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 5], Extensions::default()),
        ] {
            assert_eq!(Extensions::decode(&room(bytes)), expected, "{bytes:?}");
        }
        assert_eq!(both.encode(), room(&[5, 0, 8, 6, 1, 2, 3, 4]));
        assert_eq!(all.encode(), room(&[5, 0, 8, 6, 1, 2, 3, 4, 8, 7]));
    }
}
