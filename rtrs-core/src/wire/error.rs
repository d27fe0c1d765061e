//! What was wrong with a peer's bytes, and at which byte.
//!
//! One small `Copy` error for every decoder, so that refusing a message costs no more than
//! taking it. The byte counts from the start of the message named, except where the text says
//! that a chunk is meant. It never carries content of the message beyond one number.

use std::fmt;

use super::errno;

/// Why bytes are not the message they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireError {
    /// Which message, by its name in docs/PROTOCOL.md.
    pub message: &'static str,
    /// Which byte is at fault: the first of the wrong field, or the length that was there.
    pub at: usize,
    /// What is wrong there.
    pub fault: Fault,
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The message ends before its fixed part does.
    Short {
        /// Bytes the message needs.
        need: usize,
        /// Bytes that are there.
        have: usize,
    },
    /// A field has a value it must not have.
    Value {
        /// The field.
        field: &'static str,
        /// What it says.
        found: u64,
        /// What it may say, in words.
        expected: &'static str,
    },
    /// Two fields do not fit each other.
    Mismatch {
        /// The field at fault.
        field: &'static str,
        /// What it says.
        found: u64,
        /// What it is held against.
        against: &'static str,
        /// What that says.
        bound: u64,
    },
    /// A name has no NUL inside its field.
    Unterminated,
    /// An operation this version does not know.
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

    pub(crate) const fn mismatch(
        message: &'static str,
        at: usize,
        (field, found): (&'static str, u64),
        (against, bound): (&'static str, u64),
    ) -> Self {
        Self { message, at, fault: Fault::Mismatch { field, found, against, bound } }
    }

    /// The errno to answer a request with that has this fault, where it gets an answer.
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
                write!(f, "ends after {have} bytes, at least {need} are needed")
            }
            Fault::Value { field, found, expected } => {
                write!(f, "{field} is {found:#x}, expected {expected}")
            }
            Fault::Mismatch { field, found, against, bound } => {
                write!(f, "{field} {found} does not fit {against} {bound}")
            }
            Fault::Unterminated => f.write_str("the name has no end inside its field"),
            Fault::UnknownOp(op) => write!(f, "unknown operation {op}"),
        }
    }
}

impl std::error::Error for WireError {}
