//! Events of a ping client, and the errors that terminate it.

use crate::fabric::{FabricError, PrivateData};
use crate::time::Duration;
use crate::wire::{ConnRsp, PingReply, PingStatus, errno_name};

/// Event of a ping client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PingEvent {
    /// The connection was established.
    Connected {
        /// Time taken to connect.
        after: Duration,
    },
    /// A round was answered. Not reported in bandwidth modes, which have too many rounds.
    Round {
        /// Round number, from 0.
        seq: u64,
        /// Time until the server had read the client's data, in modes where it does so, or until
        /// the client's read completed.
        read: Option<Duration>,
        /// Time until the data was written back.
        write: Option<Duration>,
        /// Data without its NUL, for rping's text.
        text: Vec<u8>,
    },
    /// The ping ended, successfully or with this failure.
    Ended(Result<(), PingFailure>),
}

/// Reason why a ping failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PingFailure {
    /// The server refused the connection.
    #[error("{}", refusal(*.0))]
    Refused(PingStatus),
    /// The connection was refused by a server that does not support this kind of ping.
    #[error("{0}")]
    NoPing(String),
    /// The connection could not be established.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The server stopped responding.
    #[error("no {what} within {after:?}")]
    Silent {
        /// Expected event.
        what: &'static str,
        /// Time waited.
        after: Duration,
    },
    /// The server violated the protocol.
    #[error("protocol violation by the server: {0}")]
    Protocol(String),
    /// Returned data differs.
    #[error("data mismatch in round {seq} at byte {at} of {size}")]
    Mismatch {
        /// Number of the round.
        seq: u64,
        /// Offset of the first wrong byte.
        at: usize,
        /// Size of the data.
        size: u32,
    },
    /// The connection ended.
    #[error("the connection ended: {0}")]
    Closed(String),
    /// A local call was refused.
    #[error("{0}")]
    Local(String),
}

fn refusal(status: PingStatus) -> String {
    match status {
        PingStatus::Off => "the server answers no pings (--no-ping)".into(),
        PingStatus::Busy => "the server already answers the maximum number of pings".into(),
        PingStatus::Unusable => "the server does not support pings of this kind or size".into(),
        PingStatus::Memory => "the server has no memory for a ping".into(),
        PingStatus::Good | PingStatus::Other(_) => format!("the server refused: {status:?}"),
    }
}

impl From<FabricError> for PingFailure {
    fn from(error: FabricError) -> Self {
        Self::Local(error.to_string())
    }
}

/// Interprets a rejection.
pub(super) fn rejected(data: &PrivateData, rping: bool) -> PingFailure {
    if let Ok(PingReply { status }) = PingReply::decode(data.as_bytes()) {
        return PingFailure::Refused(status);
    }
    if let Ok(response) = ConnRsp::decode(data.as_bytes()) {
        let errno = response.errno.unsigned_abs();
        let hint =
            if rping { "start it with --rping" } else { "it is too old, or a kernel server" };
        let name = errno_name(errno);
        return PingFailure::NoPing(format!(
            "the RTRS server does not answer such pings ({name}); {hint}"
        ));
    }
    PingFailure::NoPing("the server refused without a reason".into())
}
