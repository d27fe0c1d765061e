//! `Name`: a session or device name as on the wire, at most 254 bytes, stored inline.
//!
//! As in the kernel, names are bytes in no particular encoding. `Display` formats them for people
//! and logs, with control characters escaped and invalid UTF-8 replaced, since a peer chooses them.

use std::fmt::{self, Write as _};

use super::bytes::take;
use super::error::{Fault, WireError};
use crate::limits::{NAME_FIELD_LEN, NAME_LEN_MAX};

/// A name of 0 to 254 bytes without a NUL, stored inline.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Name {
    /// Bytes after `len` are zero, so the derived equality compares names.
    bytes: [u8; NAME_FIELD_LEN],
    len: u8,
}

/// Reason why bytes are not a valid name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The name does not fit in its field.
    #[error("the name has {0} bytes; the maximum is {NAME_LEN_MAX}")]
    TooLong(usize),
    /// The name contains a NUL.
    #[error("the name has a NUL at byte {0}")]
    Nul(usize),
    /// The name is empty.
    #[error("the name is empty")]
    Empty,
    /// A session name contains a character that servers refuse.
    #[error("the session name has '{character}' at byte {at}; '/' and '.' are not allowed")]
    Character {
        /// The character.
        character: char,
        /// Position in the name.
        at: usize,
    },
}

impl Name {
    /// Creates a name from these bytes.
    ///
    /// # Errors
    /// Fails if there are more than 254 bytes, or one is a NUL.
    pub fn new(name: &[u8]) -> Result<Self, NameError> {
        if name.len() > NAME_LEN_MAX {
            return Err(NameError::TooLong(name.len()));
        }
        if let Some(at) = name.iter().position(|&byte| byte == 0) {
            return Err(NameError::Nul(at));
        }
        let mut bytes = [0; NAME_FIELD_LEN];
        bytes[..name.len()].copy_from_slice(name);
        #[allow(clippy::cast_possible_truncation, reason = "at most 254")]
        Ok(Self { bytes, len: name.len() as u8 })
    }

    /// Returns the bytes of the name, without a NUL.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns true if the name is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Validates the name as a session name: not empty, no `/`, no `.`, as the kernel server
    /// requires (rtrs-srv.c, process_info_req).
    ///
    /// # Errors
    /// Returns the reason if it is invalid.
    pub fn check_session_name(&self) -> Result<(), NameError> {
        if self.is_empty() {
            return Err(NameError::Empty);
        }
        match self.as_bytes().iter().position(|byte| matches!(byte, b'/' | b'.')) {
            Some(at) => Err(NameError::Character { character: char::from(self.bytes[at]), at }),
            None => Ok(()),
        }
    }

    /// Returns the field as on the wire: the name, a NUL and zeroes.
    pub(super) const fn field(&self) -> &[u8; NAME_FIELD_LEN] {
        &self.bytes
    }

    /// Decodes the name in the field at offset `at` of a message. Bytes after the NUL are ignored.
    pub(super) fn from_field(
        message: &'static str,
        bytes: &[u8],
        at: usize,
    ) -> Result<Self, WireError> {
        let mut field: [u8; NAME_FIELD_LEN] = take(bytes, at);
        let len = name_len(&field).ok_or(WireError { message, at, fault: Fault::Unterminated })?;
        field[usize::from(len)..].fill(0);
        Ok(Self { bytes: field, len })
    }
}

/// Returns the number of bytes before the NUL in a field; None if there is no NUL.
#[allow(clippy::cast_possible_truncation, reason = "at most 254")]
pub(super) fn name_len(field: &[u8; NAME_FIELD_LEN]) -> Option<u8> {
    field.iter().position(|&byte| byte == 0).map(|len| len as u8)
}

impl Default for Name {
    fn default() -> Self {
        Self { bytes: [0; NAME_FIELD_LEN], len: 0 }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.as_bytes().utf8_chunks() {
            for character in chunk.valid().chars() {
                if character.is_control() {
                    write!(f, "{}", character.escape_default())?;
                } else {
                    f.write_char(character)?;
                }
            }
            if !chunk.invalid().is_empty() {
                f.write_char(char::REPLACEMENT_CHARACTER)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_limited_to_254_bytes() {
        assert_eq!(Name::new(&[b'x'; 254]).unwrap().as_bytes().len(), 254);
        assert_eq!(Name::new(&[b'x'; 255]), Err(NameError::TooLong(255)));
        assert_eq!(Name::new(b"a\0b"), Err(NameError::Nul(1)));
        assert!(Name::new(b"").unwrap().is_empty());
    }

    #[test]
    fn a_field_requires_a_nul_and_ignores_later_bytes() {
        assert_eq!(
            Name::from_field("OPEN", &[b'x'; 300], 6).unwrap_err(),
            WireError { message: "OPEN", at: 6, fault: Fault::Unterminated }
        );
        let mut field = [0xaa; 300];
        field[6] = b'v';
        field[7] = 0;
        assert_eq!(Name::from_field("OPEN", &field, 6).unwrap(), Name::new(b"v").unwrap());
    }

    #[test]
    fn session_names_are_validated() {
        let check = |name: &[u8]| Name::new(name).unwrap().check_session_name();
        assert_eq!(check(b"goldn"), Ok(()));
        assert_eq!(check(b""), Err(NameError::Empty));
        assert_eq!(check(b"a/b"), Err(NameError::Character { character: '/', at: 1 }));
        assert_eq!(check(b"vol.1"), Err(NameError::Character { character: '.', at: 3 }));
    }

    #[test]
    fn control_bytes_are_escaped() {
        let show = |name: &[u8]| Name::new(name).unwrap().to_string();
        assert_eq!(show("härte".as_bytes()), "härte");
        assert_eq!(show(b"a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(show(b"\xff\xfeok"), "\u{fffd}\u{fffd}ok");
    }
}
