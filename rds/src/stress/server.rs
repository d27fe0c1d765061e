//! The server of `rds stress`: checks requests and answers each one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use rtrs_base::time::{Duration, Instant};

use super::ends::{Ends, Machine, Refusal};
use super::message::{HEAD_LEN, Head, LEN_MAX};

/// Number of remembered client sockets at which idle sockets are forgotten.
const FLOWS_MAX: usize = 65_536;
/// Idle time after which a client socket may be forgotten.
const QUIET: Duration = Duration::from_secs(600);

/// Requests from one of a client's sockets.
#[derive(Clone, Copy, Debug)]
struct Flow {
    next: u64,
    seen: Instant,
}

/// An answer that waits for room.
#[derive(Clone, Copy, Debug)]
struct Owed {
    to: SocketAddr,
    head: Head,
    len: usize,
}

#[derive(Debug, Default)]
pub(crate) struct StressServer {
    flows: BTreeMap<(SocketAddr, u32, usize), Flow>,
    /// Number of errors in each session.
    wrong: BTreeMap<u32, u64>,
    readable: BTreeSet<usize>,
    /// Answers on each socket that wait for room. While a socket has such answers, its requests
    /// wait.
    owed: BTreeMap<usize, VecDeque<Owed>>,
    may_send: bool,
}

impl StressServer {
    fn request(&mut self, now: Instant, socket: usize, from: SocketAddr, message: &[u8]) {
        let Some(head) = Head::of(message).filter(|head| !head.is_answer) else {
            // The message belongs to no known session, and may not be one of ours at all.
            *self.wrong.entry(0).or_default() += 1;
            return;
        };
        if self.flows.len() >= FLOWS_MAX {
            self.flows.retain(|_, flow| now.since(flow.seen) < QUIET);
        }
        let key = (from, head.session, socket);
        let flow = self.flows.entry(key).or_insert(Flow { next: 0, seen: now });
        let wrong = self.wrong.entry(head.session).or_default();
        *wrong += u64::from(head.number != flow.next);
        (flow.next, flow.seen) = (head.number + 1, now);
        let len = (head.answer_len as usize).clamp(HEAD_LEN, LEN_MAX);
        let lost = self.wrong.get(&0).copied().unwrap_or(0);
        let wrong = self.wrong.get(&head.session).copied().unwrap_or(0) + lost;
        let head = Head { is_answer: true, wrong, ..head };
        self.owed.entry(socket).or_default().push_back(Owed { to: from, head, len });
    }

    /// Sends answers. Returns true if any was sent.
    fn answer(&mut self, ends: &mut dyn Ends) -> bool {
        let mut any = false;
        self.owed.retain(|socket, owed| {
            // Answers to congested clients must not delay those to others.
            let mut stuck: BTreeSet<SocketAddr> = BTreeSet::new();
            let mut later = VecDeque::new();
            while let Some(one) = owed.pop_front() {
                if stuck.contains(&one.to) {
                    later.push_back(one);
                    continue;
                }
                let sent = ends.may_send(*socket, one.to, one.len);
                match sent.and_then(|()| ends.send(*socket, one.to, one.head.message(one.len))) {
                    Ok(()) => any = true,
                    // There is no recipient for an error report.
                    Err(Refusal::Never(_)) => {}
                    Err(Refusal::Congested) => {
                        stuck.insert(one.to);
                        later.push_back(one);
                    }
                    Err(Refusal::Full) => {
                        later.push_back(one);
                        break;
                    }
                }
            }
            later.append(owed);
            *owed = later;
            !owed.is_empty()
        });
        any
    }
}

#[allow(private_interfaces, reason = "`Machine::turn` takes the private `Ends`")]
impl Machine for StressServer {
    fn readable(&mut self, socket: usize) {
        self.readable.insert(socket);
    }

    fn writable(&mut self) {
        self.may_send = true;
    }

    fn turn(&mut self, now: Instant, ends: &mut dyn Ends) -> bool {
        let mut any = false;
        if std::mem::take(&mut self.may_send) {
            any |= self.answer(ends);
        }
        for socket in std::mem::take(&mut self.readable) {
            loop {
                if self.owed.contains_key(&socket) {
                    self.readable.insert(socket);
                    break;
                }
                let mut got = None;
                let mut take = |from: SocketAddr, message: &[u8]| {
                    got = Some(from);
                    self.request(now, socket, from, message);
                };
                if !ends.receive(socket, &mut take) {
                    break;
                }
                any |= got.is_some();
                self.answer(ends);
            }
        }
        any
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn is_blocked(&self) -> bool {
        !self.owed.is_empty()
    }

    fn is_done(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::client::{ClientPlan, StressClient};
    use super::*;

    /// Queues between two machines, without delay; `spoil` corrupts messages in them.
    struct Wire<'a> {
        to_server: VecDeque<Vec<u8>>,
        to_client: VecDeque<Vec<u8>>,
        is_server: bool,
        spoil: &'a mut dyn FnMut(&mut VecDeque<Vec<u8>>),
    }

    fn client_address() -> SocketAddr {
        "10.0.0.1:5000".parse().unwrap()
    }

    fn server_address() -> SocketAddr {
        "10.0.0.2:4000".parse().unwrap()
    }

    impl Ends for Wire<'_> {
        fn may_send(&mut self, _: usize, _: SocketAddr, _: usize) -> Result<(), Refusal> {
            Ok(())
        }

        fn send(&mut self, _: usize, _: SocketAddr, message: Vec<u8>) -> Result<(), Refusal> {
            let queue = if self.is_server { &mut self.to_client } else { &mut self.to_server };
            queue.push_back(message);
            Ok(())
        }

        fn receive(&mut self, _: usize, take: &mut dyn FnMut(SocketAddr, &[u8])) -> bool {
            let (queue, from) = match self.is_server {
                true => (&mut self.to_server, client_address()),
                false => (&mut self.to_client, server_address()),
            };
            let Some(message) = queue.pop_front() else { return false };
            take(from, &message);
            true
        }
    }

    fn plan() -> ClientPlan {
        ClientPlan {
            to: vec![server_address()],
            depth: 8,
            request_len: 100,
            answer_len: 60,
            time: Duration::from_secs(1),
            grace: Duration::from_secs(10),
            count: Some(1000),
            is_checked: true,
            session: 3,
            stop: Arc::default(),
        }
    }

    fn run(spoil: &mut dyn FnMut(&mut VecDeque<Vec<u8>>)) -> StressClient {
        run_plan(plan(), spoil)
    }

    fn run_plan(plan: ClientPlan, spoil: &mut dyn FnMut(&mut VecDeque<Vec<u8>>)) -> StressClient {
        let (mut client, mut server) = (StressClient::new(plan), StressServer::default());
        let (to_server, to_client) = (VecDeque::new(), VecDeque::new());
        let mut wire = Wire { to_server, to_client, is_server: false, spoil };
        let mut now = Instant::ZERO;
        while !client.is_done() {
            wire.is_server = false;
            client.readable(0);
            client.turn(now, &mut wire);
            (wire.spoil)(&mut wire.to_server);
            wire.is_server = true;
            server.readable(0);
            server.turn(now, &mut wire);
            now = now + Duration::from_millis(10);
        }
        client
    }

    #[test]
    fn every_request_is_answered() {
        let client = run(&mut |_| {});
        let tally = client.tally();
        assert_eq!((tally.sent, tally.answered, tally.wrong, tally.wrong_there), (800, 800, 0, 0));
        assert_eq!(tally.times.len(), 800);
    }

    #[test]
    fn a_silent_server_is_detected() {
        let plan = ClientPlan { time: Duration::from_secs(10), ..plan() };
        let slow = ClientPlan { grace: Duration::from_secs(100), ..plan.clone() };
        for (plan, seconds) in [(plan, 3), (slow, 30)] {
            let client = run_plan(plan, &mut |queue| queue.clear());
            let tally = client.tally();
            assert_eq!((tally.answered, tally.took.as_secs()), (0, seconds), "{tally:?}");
        }
    }

    #[test]
    fn signals_end_requests_and_then_the_wait_for_replies() {
        // After the first signal, all requests in flight are answered.
        let plan = ClientPlan { time: Duration::from_secs(10), count: None, ..plan() };
        let stop = Arc::clone(&plan.stop);
        let mut turns = 0;
        let client = run_plan(plan.clone(), &mut |_| {
            turns += 1;
            stop.store(u32::from(turns >= 20), Ordering::Relaxed);
        });
        let tally = client.tally();
        assert!(tally.sent > 0 && tally.answered == tally.sent, "{tally:?}");
        assert!(tally.took < Duration::from_secs(1), "{tally:?}");
        // After the second signal, the client waits for nothing.
        let mut turns = 0;
        plan.stop.store(0, Ordering::Relaxed);
        let client = run_plan(plan, &mut |queue| {
            turns += 1;
            if turns >= 20 {
                queue.clear();
                stop.store(2, Ordering::Relaxed);
            }
        });
        assert!(client.tally().took < Duration::from_secs(1), "{:?}", client.tally());
    }

    #[test]
    fn errors_are_counted() {
        let mut left = 5;
        let mut once = |queue: &mut VecDeque<Vec<u8>>| {
            left -= 1;
            left == 0 && queue.len() > 3
        };
        let client = run(&mut |queue| {
            if once(queue) {
                queue.swap(1, 2);
            }
        });
        let tally = client.tally();
        assert!(tally.wrong >= 2 && tally.wrong_there >= 2, "{tally:?}");
        left = 5;
        let mut once = |queue: &mut VecDeque<Vec<u8>>| {
            left -= 1;
            left == 0 && queue.len() > 3
        };
        let client = run(&mut |queue| {
            if once(queue) {
                queue[1][90] ^= 1;
            }
        });
        let tally = client.tally();
        assert!(tally.wrong_there >= 1 && tally.answered < tally.sent, "{tally:?}");
    }
}
