//! States of a path on the control shard and the transitions between them.
//!
//! ```text
//! Waiting -> Connecting -> InfoExchange -> Opening -> Connected -> Closing -> Waiting
//!                 |            |   \-> Authenticating -/  |         |     \---> Gone
//!                 \____________\_____________\___________/_________/
//!                                    Waiting <- Disconnected <------------/
//! ```

use rtrs_core::proto::{Moves, step};
use serde::{Deserialize, Serialize};

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PathState {
    /// Waiting between attempts.
    Waiting,
    /// Connections are being established, one after the other.
    Connecting,
    /// All connections are up; INFO_REQ is about to be sent or was sent.
    #[serde(rename = "introducing")]
    InfoExchange,
    /// The two ends are authenticating each other without TLS, using certificates or keys.
    Authenticating,
    /// The path's first device is being opened.
    Opening,
    /// The path carries IO.
    Connected,
    /// In listings only: connected, but serving nothing, because another gateway is active.
    Standby,
    /// Connections are being closed.
    Closing,
    /// Disconnected manually, until a reconnect is requested.
    Disconnected,
    /// Permanently ended: detached, or refused for a reason that a retry cannot fix.
    Gone,
}

impl Moves for PathState {
    const MOVES: &'static [(Self, &'static [Self])] = &[
        (Self::Waiting, &[Self::Connecting, Self::Disconnected, Self::Gone]),
        (Self::Connecting, &[Self::InfoExchange, Self::Closing]),
        (Self::InfoExchange, &[Self::Authenticating, Self::Opening, Self::Closing]),
        (Self::Authenticating, &[Self::Opening, Self::Closing]),
        (Self::Opening, &[Self::Connected, Self::Closing]),
        (Self::Connected, &[Self::Closing]),
        (Self::Closing, &[Self::Waiting, Self::Disconnected, Self::Gone]),
        (Self::Disconnected, &[Self::Waiting, Self::Gone]),
    ];
}

impl PathState {
    /// Whether the path is connecting or connected.
    pub(crate) fn is_up(self) -> bool {
        use PathState::{Authenticating, Connected, Connecting, InfoExchange, Opening};
        matches!(self, Connecting | InfoExchange | Authenticating | Opening | Connected)
    }

    /// Whether connection 0 accepts requests.
    pub(crate) fn has_service(self) -> bool {
        matches!(self, Self::Authenticating | Self::Opening | Self::Connected)
    }

    /// Enters a new state. Panics on a transition that is not in the table, which is a bug.
    #[track_caller]
    pub(crate) fn advance(&mut self, to: Self) {
        step(self, to);
    }
}

impl std::fmt::Display for PathState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waiting",
            Self::Connecting => "connecting",
            Self::InfoExchange => "introducing",
            Self::Authenticating => "authenticating",
            Self::Opening => "opening",
            Self::Connected => "connected",
            Self::Standby => "standby",
            Self::Closing => "closing",
            Self::Disconnected => "disconnected",
            Self::Gone => "gone",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_can_reach_the_end() {
        let all = [
            PathState::Waiting,
            PathState::Connecting,
            PathState::InfoExchange,
            PathState::Authenticating,
            PathState::Opening,
            PathState::Connected,
            PathState::Closing,
            PathState::Disconnected,
        ];
        for start in all {
            let mut reached = vec![start];
            for _ in 0..all.len() + 1 {
                let from = PathState::MOVES.iter().filter(|(from, _)| reached.contains(from));
                let next: Vec<_> = from.flat_map(|(_, next)| next.iter().copied()).collect();
                reached.extend(next);
            }
            assert!(reached.contains(&PathState::Gone), "{start:?} is a dead end");
        }
    }

    #[test]
    #[should_panic(expected = "illegal move from")]
    fn an_illegal_move_panics() {
        let mut state = PathState::Waiting;
        state.advance(PathState::Connected);
    }
}
