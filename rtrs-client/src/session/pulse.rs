//! The heartbeat of a connected path, on the home core: asked after silence, ended when unanswered.

use rtrs_core::fabric::Fabric;
use rtrs_core::proto::HeartbeatAction;
use rtrs_core::time::Instant;

use super::control::SessionControl;

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
                let why = format!("silent for {} ms", silent.as_millis());
                self.end_path(now, index, Some(why), fabrics);
                true
            }
        }
    }
}
