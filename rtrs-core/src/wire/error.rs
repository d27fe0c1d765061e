//! Decoding errors, with the position of the error.
//!
//! All decoders share one small `Copy` error, so that refusing a message costs no more than
//! accepting it. Positions are relative to the start of the named message, unless the text refers
//! to a chunk. Apart from one number, the error contains none of the message's content.

use std::fmt;

use super::errno;

/// Reason why bytes are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireError {
    /// Name of the message in docs/PROTOCOL.md.
    pub message: &'static str,
    /// Offset of the error: the first byte of the wrong field, or the actual length.
    pub at: usize,
    /// Kind of error.
    pub fault: Fault,
}

/// Kind of error in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The message ends before the end of its fixed part.
    Short {
        /// Required number of bytes.
        need: usize,
        /// Actual number of bytes.
        have: usize,
    },
    /// A field has an invalid value.
    Value {
        /// Name of the field.
        field: &'static str,
        /// Actual value.
        found: u64,
        /// Valid values, in words.
        expected: &'static str,
    },
    /// Two fields are inconsistent.
    Mismatch {
        /// Name of the wrong field.
        field: &'static str,
        /// Actual value.
        found: u64,
        /// Name of the limit.
        against: &'static str,
        /// Value of the limit.
        bound: u64,
    },
    /// A name is not terminated by a NUL within its field.
    Unterminated,
    /// Unknown operation.
    UnknownOp(u8),
}

impl WireError {
    pub(crate) const fn short(message: &'static str, need: usize, have: usize) -> Self {
        Self { message, at: have, fault: Fault::Short { need, have } }
    }

    pub(crate) const fn value(
        message: &'static str,
        at: usize,
        field: &'static str,
        found: u64,
        expected: &'static str,
    ) -> Self {
        Self { message, at, fault: Fault::Value { field, found, expected } }
    }

    /// Returns the errno for answering a request with this error, if it is answered.
    pub const fn errno(&self) -> u16 {
        match self.fault {
            Fault::UnknownOp(_) => errno::EOPNOTSUPP,
            _ => errno::EINVAL,
        }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, byte {}: ", self.message, self.at)?;
        match self.fault {
            Fault::Short { need, have } => {
                write!(f, "ends after {have} bytes, at least {need} are required")
            }
            Fault::Value { field, found, expected } => {
                write!(f, "{field} is {found:#x}, expected {expected}")
            }
            Fault::Mismatch { field, found, against, bound } => {
                write!(f, "{field} {found} does not fit {against} {bound}")
            }
            Fault::Unterminated => f.write_str("the name is not terminated within its field"),
            Fault::UnknownOp(op) => write!(f, "unknown operation {op}"),
        }
    }
}

impl std::error::Error for WireError {}
