//! Breakdown of IO times into parts, counted per path.
//!
//! An IO is counted once for each request that carries it. A repeated request is counted for its
//! last attempt; all time before that counts as queueing at the client. The parts of a request add
//! up to the time from the submission of its IO to its answer, whatever the server reports.

use rtrs_core::choices;
use rtrs_core::metrics::FineTimes;
use rtrs_core::time::Duration;

choices! {
    /// Part of an IO's time.
    pub(crate) enum Part as "part" {
        /// From submission until the request was sent: waiting for a permit, a path or a fence.
        ClientQueue = "client_queue",
        /// On the network, and in the sockets and queues of both ends.
        Network = "network",
        /// At the server, but not at its disk.
        ServerQueue = "server_queue",
        /// At the disk or file.
        Backend = "backend",
        /// The last three parts together, on a path whose answers do not distinguish them.
        RoundTrip = "round_trip",
    }
}

impl Part {
    /// All parts, in the order of [`Parts`].
    const ALL: [Self; 5] =
        [Self::ClientQueue, Self::Network, Self::ServerQueue, Self::Backend, Self::RoundTrip];
}

/// Time that a request spent at the server, as the server reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerTimes {
    /// Microseconds at the server, but not at the disk.
    pub(crate) queue_us: u32,
    /// Microseconds at the disk or file.
    pub(crate) backend_us: u32,
}

/// Times of an answered request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestTimes {
    /// Time from the submission of the IO until the request was sent.
    pub(crate) queued: Duration,
    /// Time from the sending of the request to its answer.
    pub(crate) round_trip: Duration,
    /// Part of the round trip that the server reports.
    pub(crate) server: Option<ServerTimes>,
}

/// Times of requests by part.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts([FineTimes; Part::ALL.len()]);

impl Parts {
    /// Records an answered request.
    pub(crate) fn record(&mut self, times: RequestTimes) {
        let [client_queue, network, server_queue, backend, undivided] = &mut self.0;
        client_queue.record(nanos(times.queued));
        let round_trip = nanos(times.round_trip);
        let Some(times) = times.server else { return undivided.record(round_trip) };
        // A lying server can shift time between these three parts, but cannot add any.
        let at_backend = round_trip.min(u64::from(times.backend_us) * 1000);
        let at_server = (round_trip - at_backend).min(u64::from(times.queue_us) * 1000);
        backend.record(at_backend);
        server_queue.record(at_server);
        network.record(round_trip - at_backend - at_server);
    }

    /// Adds the times of another shard or path.
    pub(crate) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, theirs)| mine.add(theirs));
    }

    /// Returns the parts for which times were recorded.
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
    fn parts_add_up_to_the_total() {
        let mut parts = Parts::default();
        let server = ServerTimes { queue_us: 2000, backend_us: 5000 };
        let times = RequestTimes { queued: MS, round_trip: 10 * MS, server: Some(server) };
        parts.record(times);
        use Part::{Backend, ClientQueue, Network, RoundTrip, ServerQueue};
        let expected = [(ClientQueue, 1000), (Network, 3000), (ServerQueue, 2000), (Backend, 5000)];
        assert_eq!(max_us(&parts), expected);
        let mut undivided = Parts::default();
        undivided.record(RequestTimes { server: None, ..times });
        assert_eq!(max_us(&undivided), [(ClientQueue, 1000), (RoundTrip, 10_000)]);
        undivided.add(&parts);
        assert_eq!(undivided.iter().map(|(_, times)| times.count()).sum::<u64>(), 6);
    }

    #[test]
    fn server_times_cannot_exceed_the_round_trip() {
        for (queue_us, backend_us) in [(u32::MAX, u32::MAX), (0, u32::MAX), (u32::MAX, 3)] {
            let mut parts = Parts::default();
            let server = Some(ServerTimes { queue_us, backend_us });
            parts.record(RequestTimes { queued: Duration::ZERO, round_trip: MS, server });
            let sum: u64 = max_us(&parts).iter().map(|(_, us)| us).sum();
            assert_eq!(sum, 1000, "{queue_us} {backend_us}");
        }
    }
}
