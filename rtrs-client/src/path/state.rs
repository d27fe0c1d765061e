//! The states of a path on the home core and the moves between them.
//!
//! ```text
//! Waiting -> Connecting -> Introducing -> Opening -> Connected -> Closing -> Waiting
//!                 \____________\____________\__________________/      \---> Gone
//!                                   Waiting <- Disconnected <------------/
//! ```

use serde::Serialize;

/// Where a path stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PathState {
    /// Between attempts.
    Waiting,
    /// Connections are being made, one after the other.
    Connecting,
    /// All connections are up; INFO_REQ is on its way or was sent.
    Introducing,
    /// Introduced; the device is being opened on it.
    Opening,
    /// Carries IO.
    Connected,
    /// Connections are being ended.
    Closing,
    /// Taken out of use by hand, until it is told to connect again.
    Disconnected,
    /// Ended for good: detached, or refused in a way that a retry cannot mend.
    Gone,
}

/// All legal moves, as data.
pub(crate) const MOVES: &[(PathState, PathState)] = &[
    (PathState::Waiting, PathState::Connecting),
    (PathState::Waiting, PathState::Disconnected),
    (PathState::Waiting, PathState::Gone),
    (PathState::Connecting, PathState::Introducing),
    (PathState::Connecting, PathState::Closing),
    (PathState::Introducing, PathState::Opening),
    (PathState::Introducing, PathState::Closing),
    (PathState::Opening, PathState::Connected),
    (PathState::Opening, PathState::Closing),
    (PathState::Connected, PathState::Closing),
    (PathState::Closing, PathState::Waiting),
    (PathState::Closing, PathState::Disconnected),
    (PathState::Closing, PathState::Gone),
    (PathState::Disconnected, PathState::Waiting),
    (PathState::Disconnected, PathState::Gone),
];

impl PathState {
    /// Moves on. Panics on a move that is not in the table: that is our own fault.
    pub(crate) fn advance(&mut self, to: Self) {
        assert!(MOVES.contains(&(*self, to)), "no path goes from {self:?} to {to:?}");
        *self = to;
    }
}

impl std::fmt::Display for PathState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waiting",
            Self::Connecting => "connecting",
            Self::Introducing => "introducing",
            Self::Opening => "opening",
            Self::Connected => "connected",
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
            PathState::Introducing,
            PathState::Opening,
            PathState::Connected,
            PathState::Closing,
            PathState::Disconnected,
        ];
        for start in all {
            let mut reached = vec![start];
            for _ in 0..all.len() + 1 {
                let next: Vec<_> = MOVES
                    .iter()
                    .filter(|(from, to)| reached.contains(from) && !reached.contains(to))
                    .map(|(_, to)| *to)
                    .collect();
                reached.extend(next);
            }
            assert!(reached.contains(&PathState::Gone), "{start:?} is a dead end");
        }
    }

    #[test]
    #[should_panic(expected = "no path goes from")]
    fn an_illegal_move_is_our_own_fault() {
        let mut state = PathState::Waiting;
        state.advance(PathState::Connected);
    }
}
