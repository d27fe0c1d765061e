//! Requests from other threads to the control shard: sent as messages, and answered within a time
//! limit.

use std::sync::mpsc;

use rtrs_core::rt::Sender;
use rtrs_core::time::Duration;

use crate::control_protocol::Sessions;
use crate::engine::message::{AdminReply, AdminReplyTo, AdminRequest, ControlMessage, Message};

/// Maximum time for the control shard to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Handle for requests to the control shard of a running server.
#[derive(Clone, Debug)]
pub(crate) struct ControlShard(pub(crate) Sender<Message>);

impl ControlShard {
    /// Sends a request.
    pub(crate) fn send(&self, request: AdminRequest) -> mpsc::Receiver<AdminReply> {
        let (answered, answer) = mpsc::channel();
        let reply = AdminReplyTo::new(move |answer| {
            if answered.send(answer).is_err() {
                tracing::debug!("an answer came too late");
            }
        });
        self.0.send(Message::Control(ControlMessage::Admin { request, reply }));
        answer
    }

    /// Sends a request and waits for its answer, from which `pick` extracts the result.
    pub(crate) fn ask<T>(
        &self,
        request: AdminRequest,
        pick: impl FnOnce(AdminReply) -> Option<T>,
    ) -> Result<T, String> {
        match self.send(request).recv_timeout(ANSWER_TIMEOUT) {
            Ok(AdminReply::Refused(why)) => Err(why),
            Ok(answer) => pick(answer).ok_or_else(|| "internal error: unexpected answer".into()),
            Err(_) => Err("the server is stopping, or too busy to answer".into()),
        }
    }

    /// Sessions of the server.
    pub(crate) fn sessions(&self) -> Result<Sessions, String> {
        self.ask(AdminRequest::Sessions, |answer| match answer {
            AdminReply::Sessions { sessions, memory, lost_portals, refused } => {
                Some(Sessions { sessions, memory, lost_portals, refused })
            }
            _ => None,
        })
    }

    /// Logs the sessions as JSON, one per line.
    pub(crate) fn dump(&self) {
        let Sessions { sessions, memory, lost_portals, refused } = match self.sessions() {
            Ok(sessions) => sessions,
            Err(why) => return tracing::warn!("cannot log the state: {why}"),
        };
        let count = sessions.len();
        let json = |value: serde_json::Result<String>| value.unwrap_or_else(|e| e.to_string());
        for mut session in sessions {
            // The UUID is a secret.
            session.id.clone_from(&session.log_id);
            tracing::info!(
                target: concat!(module_path!(), "::state_dump"),
                "state: session {}", json(serde_json::to_string(&session))
            );
        }
        tracing::info!(
            sessions = count,
            memory = json(serde_json::to_string(&memory)),
            lost_portals = json(serde_json::to_string(&lost_portals)),
            refused = json(serde_json::to_string(&refused)),
            "state: server"
        );
    }
}
