//! Settings of a run, drawn from its seed: nodes, limits, load and faults.

use rtrs_core::prng::Prng;
use rtrs_core::prng::Ratio;
use rtrs_core::time::Duration;

use super::checker::LEN_MAX;

/// Settings of a run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    /// Number of sockets on each node.
    pub(super) sockets: Vec<u16>,
    /// Whether each node announces its current run to peers (GEN_NUM). Those that do not are like
    /// Linux 6.1.
    pub(super) announces: Vec<bool>,
    /// Maximum number of connections from each node to a peer.
    pub(super) paths: Vec<usize>,
    /// Whether each node's readers take messages some time after the node has passed them on, like
    /// readers in other processes.
    pub(super) takes_late: Vec<bool>,
    /// Total number of messages.
    pub(super) messages: usize,
    /// Maximum payload, not counting the checker's bytes.
    pub(super) len_max: u64,
    pub(super) sndbuf: usize,
    pub(super) rcvbuf: usize,
    /// Bytes that the system buffers for a connection, at each end.
    pub(super) window: usize,
    /// Maximum number of bytes moved in one step.
    pub(super) piece: u64,
    /// Maximum delay of data, disconnects and connection attempts.
    pub(super) delay: Duration,
    /// Longest pause of a user between messages.
    pub(super) pause: Duration,
    /// Total number of faults.
    pub(super) faults: usize,
    /// Longest time between faults.
    pub(super) fault_pause: Duration,
    /// Share of faults that restart a node instead of breaking a connection.
    pub(super) restarts: Ratio,
    /// Share of faults that stop a node, but not its system, for a while.
    pub(super) stalls: Ratio,
    /// Longest stall: shorter than the time for which messages wait for a peer's map.
    pub(super) stall: Duration,
    /// Share of broken connections that at first only one end notices.
    pub(super) one_sided: Ratio,
    /// Frequency with which a reading user pauses.
    pub(super) rests: Ratio,
    /// Share of acknowledgment reports that are late.
    pub(super) late_acks: Ratio,
    /// Share of connections that nodes like Linux 6.1 reset unread, as they do until they have seen
    /// the previous connection end.
    pub(super) refusals: Ratio,
}

impl Plan {
    pub(super) fn draw(prng: &mut Prng) -> Self {
        let nodes = match prng.chance(Ratio::new(2, 3)) {
            true => 2,
            false => prng.range(3..=8),
        };
        let sockets = (0..nodes).map(|_| if prng.chance(Ratio::new(1, 2)) { 1 } else { 3 });
        let sockets = sockets.collect();
        let share = [Ratio::ZERO, Ratio::new(1, 2), Ratio::ONE][prng.index(3)];
        let announces = (0..nodes).map(|_| prng.chance(share)).collect();
        let small = prng.chance(Ratio::new(1, 3));
        let micros = |prng: &mut Prng, max| Duration::from_micros(prng.range(10..=max));
        // Drawn from a fork, so that the rest of the plan, and runs with a single path, stay the
        // same.
        let mut own = prng.clone().fork();
        let several = [Ratio::ZERO, Ratio::ZERO, Ratio::new(3, 4), Ratio::ONE][own.index(4)];
        let paths = |own: &mut Prng| if own.chance(several) { 1 + own.index(8) } else { 1 };
        let paths = (0..nodes).map(|_| paths(&mut own)).collect();
        let late = [Ratio::ZERO, Ratio::new(1, 2)][own.index(2)];
        let takes_late = (0..nodes).map(|_| own.chance(late)).collect();
        Self {
            sockets,
            announces,
            paths,
            takes_late,
            messages: usize::try_from(prng.range(60..=240)).unwrap_or(60),
            len_max: if small { 100 } else { prng.range(0..=LEN_MAX as u64) },
            sndbuf: usize::try_from(prng.range(8_000..=40_000)).unwrap_or(8_000),
            rcvbuf: usize::try_from(prng.range(1_000..=20_000)).unwrap_or(1_000),
            window: usize::try_from(prng.range(500..=100_000)).unwrap_or(500),
            piece: prng.range(300..=40_000),
            delay: micros(prng, 3_000),
            pause: micros(prng, 2_000),
            faults: if prng.chance(Ratio::new(1, 8)) { 0 } else { prng.index(24) },
            fault_pause: Duration::from_micros(prng.range(100..=30_000)),
            restarts: [Ratio::ZERO, Ratio::new(1, 4), Ratio::new(1, 2)][prng.index(3)],
            stalls: [Ratio::ZERO, Ratio::new(1, 4), Ratio::new(1, 2)][prng.index(3)],
            stall: micros(prng, 30_000),
            one_sided: [Ratio::ZERO, Ratio::new(1, 2), Ratio::ONE][prng.index(3)],
            rests: [Ratio::ZERO, Ratio::new(1, 20), Ratio::new(1, 3)][prng.index(3)],
            late_acks: [Ratio::ZERO, Ratio::new(1, 4), Ratio::new(3, 4)][prng.index(3)],
            refusals: [Ratio::ZERO, Ratio::new(1, 4), Ratio::new(1, 2)][prng.index(3)],
        }
    }
}
