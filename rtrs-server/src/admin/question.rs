//! What is asked on the control socket of a running server.

use serde::{Deserialize, Serialize};

/// A question on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "command")]
pub(crate) enum Question {
    /// Who is there.
    Status,
    /// Which sessions there are.
    SessionList,
    /// End paths of a session.
    SessionDisconnect {
        /// Its name or number.
        session: String,
        /// This path only.
        #[serde(default)]
        path: Option<u32>,
    },
    /// End a session for good.
    SessionEvict {
        /// Its name or number.
        session: String,
    },
    /// End the server in order; the answer comes when that is done.
    Drain {
        /// Time for it, in milliseconds.
        within_ms: u64,
    },
}

/// Longest time a command waits for requests, in milliseconds.
pub(crate) const WITHIN_MS_MAX: u64 = 600_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_what_the_manual_says() {
        for (text, question) in [
            (r#"{"command":"status"}"#, Question::Status),
            (r#"{"command":"session-list"}"#, Question::SessionList),
            (
                r#"{"command":"session-disconnect","session":"s","path":3}"#,
                Question::SessionDisconnect { session: "s".into(), path: Some(3) },
            ),
            (
                r#"{"command":"session-disconnect","session":"s"}"#,
                Question::SessionDisconnect { session: "s".into(), path: None },
            ),
            (
                r#"{"command":"session-evict","session":"s"}"#,
                Question::SessionEvict { session: "s".into() },
            ),
            (r#"{"command":"drain","within_ms":5000}"#, Question::Drain { within_ms: 5000 }),
        ] {
            assert_eq!(serde_json::from_str::<Question>(text).unwrap(), question);
        }
        serde_json::from_str::<Question>(r#"{"command":"stop"}"#).unwrap_err();
    }
}
