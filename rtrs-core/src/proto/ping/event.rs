//! Events of a pinging queue pair, and the errors that end it.

use crate::fabric::{FabricError, PrivateData};
use crate::time::Duration;
use crate::wire::{ConnRsp, PingReply, PingStatus, errno_name};

/// An event of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PingEvent {
    /// It is up.
    Connected {
        /// Time that took.
        after: Duration,
    },
    /// A round was answered. Not reported in bandwidth modes, where there are too many.
    Round {
        /// From 0.
        seq: u64,
        /// Until the server had read our data, where it does, or we had read.
        read: Option<Duration>,
        /// Until it was written back.
        write: Option<Duration>,
        /// The data, without its NUL: rping's text.
        text: Vec<u8>,
    },
    /// It is over. All went well, or why not.
    Ended(Result<(), PingFailure>),
}

/// Why a ping failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PingFailure {
    /// The connect was answered by a refusal.
    #[error("{}", refusal(*.0))]
    Refused(PingStatus),
    /// It was refused by something that does not know our ping.
    #[error("{0}")]
    NoPing(String),
    /// It did not come about.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The server does not go on.
    #[error("no {what} within {after:?}")]
    Silent {
        /// What was waited for.
        what: &'static str,
        /// How long.
        after: Duration,
    },
    /// The server broke the protocol.
    #[error("protocol error of the server: {0}")]
    Protocol(String),
    /// Data is not what it was.
    #[error("data mismatch in round {seq} at byte {at} of {size}")]
    Mismatch {
        /// The round.
        seq: u64,
        /// The first wrong byte.
        at: usize,
        /// Of so many.
        size: u32,
    },
    /// The connection ended.
    #[error("the connection ended: {0}")]
    Closed(String),
    /// A call was refused here.
    #[error("{0}")]
    Local(String),
}

fn refusal(status: PingStatus) -> String {
    match status {
        PingStatus::Off => "the server answers no pings (--no-ping)".into(),
        PingStatus::Busy => "the server answers as many pings as it may already".into(),
        PingStatus::Unusable => "the server cannot do a ping of this kind or size".into(),
        PingStatus::Memory => "the server has no memory for a ping".into(),
        PingStatus::Good | PingStatus::Other(_) => format!("the server refused: {status:?}"),
    }
}

impl From<FabricError> for PingFailure {
    fn from(error: FabricError) -> Self {
        Self::Local(error.to_string())
    }
}

/// What a reject means.
pub(super) fn rejected(data: &PrivateData, rping: bool) -> PingFailure {
    if let Ok(PingReply { status }) = PingReply::decode(data.as_bytes()) {
        return PingFailure::Refused(status);
    }
    if let Ok(response) = ConnRsp::decode(data.as_bytes()) {
        let errno = response.errno.unsigned_abs();
        let hint = if rping { "start it with --rping" } else { "it is older, or the kernel's" };
        let name = errno_name(errno);
        return PingFailure::NoPing(format!(
            "an RTRS server that answers no such ping ({name}); {hint}"
        ));
    }
    PingFailure::NoPing("the server refused without a reason".into())
}
