//! Processes of a virtual machine's front end that die between the steps of a request.

use rtrs_core::prng::Prng;
use rtrs_core::time::{Duration, Instant};

use super::super::faults::Act;
use super::super::machine::{Machine, MachineStats};
use super::super::options::{MS, Options};
use super::Cluster;

/// Longest time until a supervisor starts the next process.
const AWAY_MAX: Duration = Duration::from_millis(30);

impl Cluster {
    /// Creates the virtual machine of a run that has one.
    pub(super) fn machine(options: &Options) -> Option<Machine> {
        let prng = Prng::new(options.seed ^ 0x6d61_6368_696e_655f);
        options.extra.machine.map(|machine| Machine::new(machine, options.client_cores, prng))
    }

    /// Whether the client has died between the steps of a request.
    pub(super) fn is_torn(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::is_dead)
    }

    /// Ends a client that has died between the steps of a request, and plans the start of the next
    /// one.
    pub(super) fn end_torn(&mut self, now: Instant) {
        if !self.is_torn() || self.client.is_empty() {
            return;
        }
        self.log.event(now, "torn", [0, 0], String::new);
        self.faults += 1;
        self.stop_client(false);
        let at = now + self.prng.duration(MS / 10..=AWAY_MAX);
        let before = self.plan.iter().take_while(|(planned, _)| *planned <= at).count();
        self.plan.insert(before, (at, Act::StartClient));
        self.wake_all();
    }

    /// Returns the counters of the virtual machine.
    pub(in super::super) fn machine_stats(&self) -> MachineStats {
        self.machine.as_ref().map(Machine::stats).unwrap_or_default()
    }
}
