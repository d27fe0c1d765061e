//! Log lines of a front end. Each kind has a limit of its own: a guest can neither flood the log
//! nor hide one fault behind another.

use std::mem::{Discriminant, discriminant};

use crate::fault::Fault;

/// Kind of a log line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Fault of a ring, regardless of the numbers in it.
    Fault(Discriminant<Fault>),
    /// Error in a monitor's message, identified by the error's text.
    Message(String),
    Connected,
    Disconnected,
    /// A connection was refused.
    Refused,
    /// A connection could not be accepted or served.
    NotServed,
    /// A ring could not be served.
    RingNotServed,
    /// The memory of the guest is not shared.
    NotShared,
    /// Requests of an earlier process are not repeated.
    LeftOut,
    /// Requests in flight did not end in time.
    Failed,
    /// The monitor did not take the message about a new size.
    SizeNotTold,
}

impl From<Fault> for Line {
    fn from(fault: Fault) -> Self {
        Self::Fault(discriminant(&fault))
    }
}
