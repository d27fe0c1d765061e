//! Where the time of an IO goes: its parts, counted per path.
//!
//! An IO is counted once for each request that carries it. A request that was sent again is counted
//! for its last attempt: all time before counts as queueing at the client. The parts of a request
//! add up to the time from the submit of its IO to its answer, whatever the server says.

use rtrs_core::choices;
use rtrs_core::metrics::FineTimes;
use rtrs_core::time::Duration;

choices! {
    /// A part of the time of an IO.
    pub(crate) enum Part as "part" {
        /// From its submit until the request was sent: it waited for a permit, a path or a fence.
        ClientQueue = "client_queue",
        /// On the network, and in the sockets and queues of both ends.
        Network = "network",
        /// At the server and not at its disk.
        ServerQueue = "server_queue",
        /// At the disk or file.
        Backend = "backend",
        /// The last three together, on a path whose answers do not tell them apart.
        RoundTrip = "round_trip",
    }
}

impl Part {
    /// All parts, in the order of [`Parts`].
    const ALL: [Self; 5] =
        [Self::ClientQueue, Self::Network, Self::ServerQueue, Self::Backend, Self::RoundTrip];
}

/// How long a request was at the server, as that says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerTimes {
    /// Microseconds there and not at the disk.
    pub(crate) queue_us: u32,
    /// Microseconds at the disk or file.
    pub(crate) backend_us: u32,
}

/// How long requests were where.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts([FineTimes; Part::ALL.len()]);

impl Parts {
    /// A request was answered: after so long in the queue and so long from send to answer, of which
    /// it was at the server as long as that says.
    pub(crate) fn record(
        &mut self,
        queued: Duration,
        round_trip: Duration,
        server: Option<ServerTimes>,
    ) {
        let [client_queue, network, server_queue, backend, undivided] = &mut self.0;
        client_queue.record(nanos(queued));
        let round_trip = nanos(round_trip);
        let Some(times) = server else { return undivided.record(round_trip) };
        // A server that lies shifts time between these three and cannot add any.
        let at_backend = round_trip.min(u64::from(times.backend_us) * 1000);
        let at_server = (round_trip - at_backend).min(u64::from(times.queue_us) * 1000);
        backend.record(at_backend);
        server_queue.record(at_server);
        network.record(round_trip - at_backend - at_server);
    }

    /// Adds those of another shard or path.
    pub(crate) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| mine.add(theirs));
    }

    /// The parts that requests had.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Part, &FineTimes)> {
        Part::ALL.into_iter().zip(&self.0).filter(|(_, times)| times.count() > 0)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn max_us(parts: &Parts) -> Vec<(Part, u64)> {
        parts.iter().map(|(part, times)| (part, times.max_us())).collect()
    }

    #[test]
    fn parts_add_up() {
        let mut parts = Parts::default();
        let times = ServerTimes { queue_us: 2000, backend_us: 5000 };
        parts.record(MS, 10 * MS, Some(times));
        use Part::{Backend, ClientQueue, Network, RoundTrip, ServerQueue};
        let expected = [(ClientQueue, 1000), (Network, 3000), (ServerQueue, 2000), (Backend, 5000)];
        assert_eq!(max_us(&parts), expected);
        let mut undivided = Parts::default();
        undivided.record(MS, 10 * MS, None);
        assert_eq!(max_us(&undivided), [(ClientQueue, 1000), (RoundTrip, 10_000)]);
        undivided.add(&parts);
        assert_eq!(undivided.iter().map(|(_, times)| times.count()).sum::<u64>(), 6);
    }

    #[test]
    fn a_server_cannot_add_time() {
        for (queue_us, backend_us) in [(u32::MAX, u32::MAX), (0, u32::MAX), (u32::MAX, 3)] {
            let mut parts = Parts::default();
            parts.record(Duration::ZERO, MS, Some(ServerTimes { queue_us, backend_us }));
            let sum: u64 = max_us(&parts).iter().map(|(_, us)| us).sum();
            assert_eq!(sum, 1000, "{queue_us} {backend_us}");
        }
    }
}
