//! The heartbeat of a connected path, on the home core: asked after silence, ended when unanswered.
//!
//! Servers of ours are asked more often than kernels and given up sooner. What is judged then is
//! the link: where the provider can tell that the peer's system acknowledges all we send, the link
//! works and only the server's program is slow, which may be for want of a processor; it gets as
//! long as a kernel's. A turn of ours that came late does not count (`Heartbeat`).

use rtrs_core::fabric::Fabric;
use rtrs_core::proto::HeartbeatAction;
use rtrs_core::time::Instant;

use super::control::{Path, SessionControl};
use super::{Rhythm, SessionConfig};

impl SessionControl {
    pub(super) fn poll_heartbeat(
        &mut self,
        now: Instant,
        index: usize,
        fabrics: &mut [Box<dyn Fabric>],
    ) -> bool {
        let provider = self.paths[index].target.provider;
        let path = &mut self.paths[index];
        let Some(heartbeat) = path.heartbeat.as_mut() else { return false };
        let received = path.shared.last_received();
        if received > path.seen {
            path.seen = received;
            heartbeat.on_traffic(received);
        }
        let before = heartbeat.missed();
        let action = heartbeat.poll(now);
        let silent = action == HeartbeatAction::Dead || before > 0 && heartbeat.missed() > before;
        path.heartbeats.missed += u64::from(silent);
        match action {
            HeartbeatAction::None => false,
            HeartbeatAction::Send => {
                path.heartbeats.sent += 1;
                let sent = path
                    .service
                    .as_mut()
                    .map(|service| service.post_heartbeat(false, fabrics[provider].as_mut()));
                if let Some(Err(error)) = sent {
                    self.end_path(now, index, Some(error.to_string()), fabrics);
                }
                true
            }
            HeartbeatAction::Dead => {
                let silent = now.since(path.seen);
                let fabric = fabrics[provider].as_ref();
                if silent < self.config.heartbeat.silence_max()
                    && path
                        .service
                        .as_ref()
                        .is_some_and(|s| fabric.peer_has_all(s.qp()) == Some(true))
                {
                    let ms = silent.as_millis();
                    tracing::debug!(path = %path.target.name, "slow: no answer for {ms} ms");
                    return true;
                }
                let why = format!("silent for {} ms", silent.as_millis());
                self.end_path(now, index, Some(why), fabrics);
                true
            }
        }
    }
}

impl Path {
    /// The heartbeats that its server, as it said last, gets.
    pub(super) fn rhythm(&self, config: &SessionConfig) -> Rhythm {
        if self.fences { self.target.heartbeat } else { config.heartbeat }
    }
}
