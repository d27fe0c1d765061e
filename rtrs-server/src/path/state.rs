//! States of a path on the server and their valid transitions.

use std::fmt;

use rtrs_core::proto::Moves;

/// State of a path. Owned by the control shard; every shard reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PathState {
    /// Waiting for its connections and then INFO_REQ, within the handshake timeout.
    Connecting = 0,
    /// INFO_REQ was accepted, and requests are served.
    Connected = 1,
    /// Shutdown: running requests are answered and no new ones are accepted; then the connections
    /// are closed.
    Finishing = 2,
    /// The shards are stopping service and closing the connections.
    Closing = 3,
    /// No new work begins, whatever still arrives. Connections may still be closing, which takes
    /// some drivers up to a minute, and block IO may still be running. The peer may reconnect.
    Draining = 4,
    /// Nothing of the path remains.
    Gone = 5,
}

impl PathState {
    /// Whether the connections are being closed or already have been.
    pub const fn is_ending(self) -> bool {
        matches!(self, Self::Closing | Self::Draining | Self::Gone)
    }
}

impl fmt::Display for PathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Finishing => "finishing",
            Self::Closing => "closing",
            Self::Draining => "draining",
            Self::Gone => "gone",
        })
    }
}

impl Moves for PathState {
    const MOVES: &'static [(Self, &'static [Self])] = &[
        (Self::Connecting, &[Self::Connected, Self::Closing]),
        (Self::Connected, &[Self::Finishing, Self::Closing]),
        (Self::Finishing, &[Self::Closing]),
        (Self::Closing, &[Self::Draining]),
        (Self::Draining, &[Self::Gone]),
    ];
}

impl PathState {
    /// Returns the state with this number.
    pub const fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Connecting,
            1 => Self::Connected,
            2 => Self::Finishing,
            3 => Self::Closing,
            4 => Self::Draining,
            _ => Self::Gone,
        }
    }

    /// Whether new work on the path may still begin.
    pub const fn may_begin(self) -> bool {
        !matches!(self, Self::Draining | Self::Gone)
    }
}

#[cfg(test)]
mod tests {
    use super::PathState;

    #[test]
    fn path_state_transitions() {
        assert_eq!(
            rtrs_core::proto::table::<PathState>(),
            "Connecting: Connected, Closing\n\
             Connected: Finishing, Closing\n\
             Finishing: Closing\n\
             Closing: Draining\n\
             Draining: Gone\n"
        );
        for n in 0..=5 {
            let state = PathState::from_u8(n);
            assert_eq!(
                (state as u8, serde_json::json!(crate::stats::PathStage::new(state, false))),
                (n, state.to_string().into())
            );
        }
    }
}
