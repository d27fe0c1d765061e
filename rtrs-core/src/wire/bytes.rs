//! Bytewise little-endian loads and stores in fixed arrays and checked prefixes.
//!
//! Every decoder first converts its input to an array of the message's fixed length with [`fixed`];
//! from then on offsets are constants and no access can be out of bounds. Alignment does not
//! matter, and no struct is ever overlaid on memory.
//!
//! `message!` declares a fixed-length message as a list of fields with their offsets; `codes!`
//! declares an enum with its wire codes.

use super::error::WireError;
use crate::identity::ServerProcess;
use crate::ids::{ConnIndex, PathUuid, PermitId, Rkey, SessionId};

/// Returns the first `N` bytes of a message.
pub(super) fn fixed<'a, const N: usize>(
    message: &'static str,
    bytes: &'a [u8],
) -> Result<&'a [u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or_else(|| WireError::short(message, N, bytes.len()))
}

/// Returns `N` bytes at a constant offset of an array. Panics if they are out of bounds, which is a
/// bug in the caller.
pub(super) fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

/// Stores an array at a constant offset.
pub(super) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// Checks the type field at the start of every message after the handshake.
pub(super) fn expect_type(
    message: &'static str,
    bytes: &[u8],
    expected: (u16, &'static str),
) -> Result<(), WireError> {
    let found = u16_at(bytes, 0);
    if found == expected.0 {
        Ok(())
    } else {
        Err(WireError::value(message, 0, "type", u64::from(found), expected.1))
    }
}

/// Field of a message: an integer (little-endian), bytes, or a newtype of an integer.
pub(super) trait Field: Sized {
    /// Reads the field at an offset.
    fn load(bytes: &[u8], at: usize) -> Self;
    /// Writes the field at an offset.
    fn store(&self, out: &mut [u8], at: usize);
}

impl Field for bool {
    fn load(bytes: &[u8], at: usize) -> Self {
        bytes[at] != 0
    }
    fn store(&self, out: &mut [u8], at: usize) {
        out[at] = u8::from(*self);
    }
}

impl<const N: usize> Field for [u8; N] {
    fn load(bytes: &[u8], at: usize) -> Self {
        take(bytes, at)
    }
    fn store(&self, out: &mut [u8], at: usize) {
        put(out, at, *self);
    }
}

macro_rules! fields {
    (integers $($type:ty)+) => {$(
        impl Field for $type {
            fn load(bytes: &[u8], at: usize) -> Self {
                Self::from_le_bytes(take(bytes, at))
            }
            fn store(&self, out: &mut [u8], at: usize) {
                put(out, at, self.to_le_bytes());
            }
        }
    )+};
    (newtypes $($type:ty)+) => {$(
        impl Field for $type {
            fn load(bytes: &[u8], at: usize) -> Self {
                Self(Field::load(bytes, at))
            }
            fn store(&self, out: &mut [u8], at: usize) {
                self.0.store(out, at);
            }
        }
    )+};
}
fields! { integers u8 u16 i16 u32 u64 }
fields! { newtypes Rkey PermitId ConnIndex PathUuid SessionId ServerProcess }

/// Declares a message: its length in bytes, its name in docs/PROTOCOL.md, its fields with their
/// offsets. `at & mask` is a flag in a byte. If a type number precedes the fields, it is stored in
/// bytes 0 and 1, and the message has `encode` and `decode`; otherwise the message has `store` and
/// `load`, on which its module builds `encode` and `decode`.
macro_rules! message {
    ($(#[$meta:meta])+ pub struct $name:ident[$len:literal] = $text:literal, type $kind:literal {
        $($fields:tt)+
    }) => {
        message! { $(#[$meta])+ pub struct $name[$len] = $text { $($fields)+ } }
        impl $name {
            pub(super) const TYPE: u16 = $kind;
            /// Encodes the message.
            pub fn encode(&self) -> [u8; Self::LEN] {
                let mut out = self.store();
                super::bytes::put(&mut out, 0, Self::TYPE.to_le_bytes());
                out
            }
            /// Decodes the message. The caller must validate its values.
            ///
            /// # Errors
            /// If the message is too short or has the wrong type.
            pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
                let bytes: &[u8; Self::LEN] = super::bytes::fixed(Self::NAME, bytes)?;
                let expected = concat!(stringify!($kind), " (", $text, ")");
                super::bytes::expect_type(Self::NAME, bytes, (Self::TYPE, expected))?;
                Ok(Self::load(bytes))
            }
        }
    };
    ($(#[$meta:meta])+ pub struct $name:ident[$len:literal] = $text:literal {
        $($(#[$doc:meta])+ $at:literal $(& $mask:literal)? $field:ident: $type:ty,)+
    }) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$doc])+ pub $field: $type,)+ }
        impl $name {
            /// Length of the message in bytes.
            pub const LEN: usize = $len;
            const NAME: &str = $text;
            fn store(&self) -> [u8; Self::LEN] {
                let mut out = [0; Self::LEN];
                $(message!(store self, out, $at $(& $mask)?, $field);)+
                out
            }
            fn load(bytes: &[u8; Self::LEN]) -> Self {
                Self { $($field: message!(load bytes, $at $(& $mask)?),)+ }
            }
        }
    };
    (store $self:ident, $out:ident, $at:literal & $mask:literal, $field:ident) => {
        $out[$at] |= if $self.$field { $mask } else { 0 }
    };
    (store $self:ident, $out:ident, $at:literal, $field:ident) => {
        super::bytes::Field::store(&$self.$field, &mut $out, $at)
    };
    (load $bytes:ident, $at:literal & $mask:literal) => { $bytes[$at] & $mask != 0 };
    (load $bytes:ident, $at:literal) => { super::bytes::Field::load($bytes, $at) };
}

/// Declares an enum with the wire code of each value.
macro_rules! codes {
    ($(#[$meta:meta])+ pub enum $name:ident {
        $($(#[$doc:meta])+ $variant:ident = $code:literal,)+
    }) => {
        $(#[$meta])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$doc])+ $variant = $code,)+ }
        impl $name {
            /// Returns the wire code.
            pub const fn to_wire(self) -> u8 {
                self as u8
            }
            /// Returns the value for a code, or None if the code is unknown.
            pub const fn from_wire(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}
