//! Piecewise reader of the input of `client_paths`.

/// Remaining input.
pub(super) struct Input<'a>(pub(super) &'a [u8]);

impl Input<'_> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub(super) fn short(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes([self.byte()?, self.byte()?]))
    }

    /// Takes up to `len` bytes.
    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head.to_vec()
    }
}

/// Returns the bytes with some changes, or entirely different ones.
pub(super) fn changed(mut bytes: Vec<u8>, input: &mut Input<'_>) -> Option<Vec<u8>> {
    let how = input.byte()?;
    if how & 0x80 != 0 {
        return Some(input.bytes(usize::from(how & 0x7f)));
    }
    for _ in 0..how & 7 {
        let (at, byte) = (usize::from(input.byte()?), input.byte()?);
        let at = at % bytes.len().max(1);
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
    }
    if how & 8 != 0 {
        bytes.truncate(usize::from(input.byte()?));
    }
    Some(bytes)
}
