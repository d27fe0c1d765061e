//! Reasons why paths end.

use std::net::SocketAddr;

use rtrs_core::fabric::{CloseReason, ConnectFailure, FabricError};
use rtrs_core::ids::ConnIndex;
use rtrs_core::tls::hint;
use rtrs_core::wire::{errno, errno_name};

use super::control::failure::SessionFailure;
use super::control::identity::Mismatch;
use super::prover::AuthError;
use super::session::Unresolved;
use crate::path::fault::ConnectionFault;
use crate::path::refusal::Rejection;

/// Reason why a path ended, or why it does not serve a volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathEnd {
    /// The host has no address.
    #[error("{0}")]
    Unresolved(#[from] Unresolved),
    /// The server refused a connection.
    #[error("{0}")]
    Rejected(Rejection),
    /// A connection could not be established.
    #[error("{}", describe_unconnected(.0))]
    Unconnected(CloseReason),
    /// A connection ended.
    #[error("{0}")]
    Closed(CloseReason),
    /// The server refused the session after INFO_REQ, which carries the session's name.
    #[error("{}", describe_session_refusal(*.errno, .session))]
    SessionRefused { errno: u16, session: String },
    /// A connection ended before INFO_RSP arrived. Servers with the extensions send an answer when
    /// they refuse a name; others only close the connection.
    #[error("{}", describe_info_end(.reason, .session, *.has_extensions))]
    InfoUnanswered { reason: CloseReason, session: String, has_extensions: bool },
    /// A connection other than connection 0 caused the path to end.
    #[error("connection {0}: {1}")]
    Connection(ConnIndex, Box<Self>),
    /// The path ended while it was using this address, one of several.
    #[error("{0}: {1}")]
    At(SocketAddr, Box<Self>),
    /// A connection cannot continue.
    #[error("{0}")]
    Fault(#[from] ConnectionFault),
    /// The local transport refused an operation.
    #[error("{0}")]
    Fabric(String),
    /// The client and the server did not authenticate each other.
    #[error("{0}")]
    Auth(#[from] AuthError),
    /// The server or the export is not the pinned one.
    #[error("{0}")]
    Mismatch(#[from] Mismatch),
    /// The server returned a different device number or cache epoch for an open volume.
    #[error("the server returned another device for a repeated open")]
    AnotherDevice,
    /// The session or the volume has failed.
    #[error("{0}")]
    Session(#[from] SessionFailure),
    /// None of several volumes can be used, each for its own reason.
    #[error("{}", describe_volumes(.0))]
    Volumes(Vec<(String, Self)>),
    /// The server did not complete the handshake in time.
    #[error("no answer in time")]
    ConnectTimeout,
    /// The server did not complete the authentication in time.
    #[error("the server did not authenticate")]
    AuthTimeout,
    /// The server did not answer an open in time.
    #[error("the server did not answer the open of the device")]
    OpenTimeout,
    /// The server did not answer a close in time.
    #[error("the server did not answer the close of the device")]
    CloseTimeout,
    /// The server did not answer a move in time.
    #[error("the server did not answer the move of the device")]
    MoveTimeout,
    /// The server did not answer a fence in time.
    #[error("the server did not answer a fence in time")]
    FenceTimeout,
    /// The requests of a leaving path did not finish in time.
    #[error("the requests of the path did not finish within the time limit")]
    LeaveTimeout,
    /// The server was silent for this time. If `confirmed`, it answered over another path.
    #[error(
        "silent for {ms} ms{}",
        if *.confirmed { " while another path received answers" } else { "" }
    )]
    Silent { ms: u128, confirmed: bool },
    /// A link on this host failed; the text describes the failure.
    #[error("{0}")]
    LinkDown(String),
    /// The server's operator evicted the session, as reported over another path.
    #[error("the session was evicted")]
    Evicted,
    /// The server claims an eviction without proof.
    #[error(
        "cannot connect: the server reports an eviction of this session, but does not prove that \
         it opened the session; if the session was evicted, detach, and attach again"
    )]
    UnprovenEviction,
    /// An impossible state: a bug in this client.
    #[error("internal error: {0}")]
    Internal(&'static str),
}

impl PathEnd {
    /// Whether the path led to a server or export other than the pinned one.
    pub(crate) fn is_mismatch(&self) -> bool {
        match self {
            Self::Mismatch(_) => true,
            Self::At(_, why) => why.is_mismatch(),
            Self::Volumes(volumes) => volumes.iter().any(|(_, why)| why.is_mismatch()),
            _ => false,
        }
    }

    /// Errno with which the server refused the client, if it did.
    pub(crate) fn errno(&self) -> Option<u16> {
        match self {
            Self::Rejected(rejection) => rejection.errno(),
            Self::SessionRefused { errno, .. } | Self::Auth(AuthError::Refused { errno, .. }) => {
                Some(*errno)
            }
            _ => None,
        }
    }
}

impl From<&ConnectFailure> for PathEnd {
    fn from(failure: &ConnectFailure) -> Self {
        match failure {
            ConnectFailure::Rejected(data) => Self::Rejected(Rejection::decode(data.as_bytes())),
            ConnectFailure::Failed(reason) => Self::Unconnected(reason.clone()),
        }
    }
}

impl From<FabricError> for PathEnd {
    fn from(error: FabricError) -> Self {
        Self::Fabric(error.to_string())
    }
}

fn describe_unconnected(reason: &CloseReason) -> String {
    match reason {
        CloseReason::TimedOut => "no answer within the connect timeout".to_owned(),
        // No connection existed yet that could have been lost.
        CloseReason::Lost(why) => match hint(why) {
            Some(hint) => format!("{why}; {hint}"),
            None => why.clone(),
        },
        reason => reason.to_string(),
    }
}

/// Describes why a server refused a session.
fn describe_session_refusal(errno: u16, session: &str) -> String {
    let hint = match errno {
        errno::EEXIST => {
            "another session on the server has this name; choose another name with --session-name, \
             or end the other session"
        }
        errno::EINVAL => {
            "the server does not accept this name; choose another name with --session-name"
        }
        errno::EACCES => "the server's access lists do not admit this client to the session",
        errno::ENOMEM => "the server has no memory for the session; see its log",
        _ => "see the server's log",
    };
    format!("the server refused session {session:?}: {} ({hint})", errno_name(errno))
}

/// Describes a connection that ended before INFO_RSP arrived, with the cause if it is known.
fn describe_info_end(reason: &CloseReason, session: &str, has_extensions: bool) -> String {
    let hint = match reason {
        // The server did not close the connection.
        CloseReason::TimedOut => "",
        _ if has_extensions => "; see the server's log",
        _ => {
            "; perhaps another session on the server has this name (--session-name): see the \
             server's log"
        }
    };
    format!("the connection ended in the handshake of session {session:?}: {reason}{hint}")
}

fn describe_volumes(volumes: &[(String, PathEnd)]) -> String {
    let volumes = volumes.iter().map(|(export, why)| format!("{export}: {why}"));
    volumes.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use rtrs_core::wire::ConnRsp;

    use super::*;

    #[test]
    fn nested_mismatches_are_found() {
        let mismatch = PathEnd::Mismatch(Mismatch::Size { size: 1, had: 2 });
        let other = PathEnd::Session(SessionFailure::Removed);
        let volumes = |whys: [&PathEnd; 2]| {
            PathEnd::Volumes(whys.map(|why| ("vol".to_owned(), why.clone())).to_vec())
        };
        let at = |why| PathEnd::At("10.0.0.2:1234".parse().unwrap(), Box::new(why));
        assert!(at(volumes([&other, &mismatch])).is_mismatch());
        assert!(!at(volumes([&other, &PathEnd::AnotherDevice])).is_mismatch());
    }

    #[test]
    fn texts_name_the_connection_and_the_reason() {
        let reject = ConnRsp::reject(errno::ENOMEM).encode();
        let refused = PathEnd::Rejected(Rejection::decode(&reject));
        assert_eq!(refused.errno(), Some(errno::ENOMEM));
        let refused = PathEnd::Connection(ConnIndex(2), Box::new(refused)).to_string();
        let text = "connection 2: refused by the server: ENOMEM (the session's chunks do not fit";
        assert!(refused.starts_with(text), "{refused}");
        let silent = |confirmed| PathEnd::Silent { ms: 700, confirmed }.to_string();
        assert_eq!(silent(false), "silent for 700 ms");
        assert_eq!(silent(true), "silent for 700 ms while another path received answers");
        let lost = CloseReason::Lost("connection refused".to_owned());
        let failed = ConnectFailure::Failed(lost.clone());
        assert_eq!(PathEnd::from(&failed).to_string(), "connection refused");
        assert_eq!(PathEnd::Closed(lost).to_string(), "connection lost: connection refused");
        let late = ConnectFailure::Failed(CloseReason::TimedOut);
        assert_eq!(PathEnd::from(&late).to_string(), "no answer within the connect timeout");
    }

    #[test]
    fn a_refused_session_is_named_with_the_reason() {
        let session = || "host-vol0".to_owned();
        let refused = |errno| PathEnd::SessionRefused { errno, session: session() };
        let taken = refused(errno::EEXIST);
        assert_eq!(taken.errno(), Some(errno::EEXIST));
        let text = "the server refused session \"host-vol0\": EEXIST (another session on the \
                    server has this name";
        assert!(taken.to_string().starts_with(text), "{taken}");
        let invalid = refused(errno::EINVAL).to_string();
        assert!(invalid.contains("EINVAL (the server does not accept this name"), "{invalid}");
        for (reason, shown) in [
            (CloseReason::Lost("reset".into()), "connection lost: reset"),
            (CloseReason::PeerTerminated("x".into()), "terminated by the peer: x"),
        ] {
            for has_extensions in [false, true] {
                let (reason, session) = (reason.clone(), session());
                let ended = PathEnd::InfoUnanswered { reason, session, has_extensions };
                let ended = ended.to_string();
                let text = "the connection ended in the handshake of session \"host-vol0\": ";
                let text = text.to_owned() + shown;
                assert!(ended.starts_with(&text), "{ended}");
                assert!(ended.ends_with("see the server's log"), "{ended}");
                let is_guessed =
                    ended.contains("perhaps another session on the server has this name");
                assert_eq!(is_guessed, !has_extensions, "{ended}");
            }
        }
        let (reason, session) = (CloseReason::TimedOut, session());
        let silent = PathEnd::InfoUnanswered { reason, session, has_extensions: false };
        assert!(silent.to_string().ends_with(": timed out"), "{silent}");
    }
}
