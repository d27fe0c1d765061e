//! Receiving: messages that the node puts into the ring of a socket.
//!
//! The connection carries only tokens, which make it readable while the ring has messages
//! (`rds/src/channel/ring.rs`). A call that takes the last message, or finds a token without
//! messages, takes the tokens.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use rtrs_base::mem::is_older_token;
use rtrs_base::time::Duration;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::net::{RecvFlags, recv};

use super::access::{Binding, is_nonblocking};
use super::transfer::{Arrival, How, Incoming};
use crate::channel::{PACKET_LEN, Packet, PacketKind};

/// Number of times that a call yields its CPU for messages whose token has arrived. On a busy
/// system, each yield takes as long as other threads run.
const YIELDS: usize = 5;
/// Maximum wait for messages whose token has arrived: a poll has reported them. The node publishes
/// them right after the token, unless it was killed or stopped in between.
const MESSAGE_WAIT: Duration = Duration::from_millis(500);
/// Pause between looks for such messages.
const PAUSE: Duration = Duration::from_micros(50);
/// Maximum wait for a token that the node is about to send. Left in the connection, the token would
/// make polls report a message that is not there. The node of a test can be slower.
const TOKEN_WAIT: Timespec =
    Timespec { tv_sec: if cfg!(test) { 60 } else { 0 }, tv_nsec: 500_000_000 };
/// Maximum number of attempts to take tokens. The next call takes the rest.
const TOKEN_TRIES: usize = 100;

/// Receives the next message or notification. Users receive congestion updates only with a monitor;
/// for others, an update has served its purpose once it wakes a poll.
///
/// # Errors
/// EAGAIN or ETIMEDOUT if there is nothing to receive, EINTR, ENETDOWN if the node has ended.
/// EPROTO if the program has overwritten the memory of the ring.
pub fn receive(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> io::Result<Arrival> {
    let mut call = Call { binding, socket, waiting_since: None };
    loop {
        let mut arrival = call.next(to, how)?;
        if !matches!(arrival.incoming, Incoming::Cleared(_)) || binding.monitors() {
            return Ok(arrival);
        }
        if how.peek {
            // The update is taken, although a peek leaves a message in place.
            arrival = call.next(to, How { dontwait: true, peek: false })?;
            if !matches!(arrival.incoming, Incoming::Cleared(_)) {
                return Ok(arrival);
            }
        }
    }
}

/// A call that receives.
#[derive(Debug)]
struct Call<'a> {
    binding: &'a Binding,
    socket: BorrowedFd<'a>,
    /// Start of the first wait.
    waiting_since: Option<Instant>,
}

impl Call<'_> {
    /// Receives the next message or notification.
    fn next(&mut self, to: &mut [IoSliceMut<'_>], how: How) -> io::Result<Arrival> {
        loop {
            if let Some(arrival) = self.take(to, how.peek)? {
                return Ok(arrival);
            }
            let waits = !how.dontwait && !is_nonblocking(self.socket);
            let token = match waits {
                true => self.wait_for_token()?,
                false => Some(self.peek_token(RecvFlags::DONTWAIT)?),
            };
            if let Some(token) = token {
                self.await_messages(token)?;
            }
        }
    }

    /// Takes the next message or notification from the ring, and with the last one, the tokens.
    fn take(&self, to: &mut [IoSliceMut<'_>], peek: bool) -> io::Result<Option<Arrival>> {
        let ring = &self.binding.flow.incoming;
        let taken = ring.take(peek, |delivery| {
            let mut head = [0; PACKET_LEN];
            delivery.read(0, &mut head);
            let mut at = PACKET_LEN;
            for part in to.iter_mut() {
                at += delivery.read(at, part);
            }
            (Packet::decode(&head), at - PACKET_LEN)
        });
        let Some(((packet, len), taken)) = taken.map_err(|_| Errno::PROTO)? else {
            return Ok(None);
        };
        let packet = packet.ok_or(Errno::PROTO)?;
        let incoming = match packet.kind {
            PacketKind::Update => Incoming::Cleared(packet.wide()),
            PacketKind::Completed => Incoming::Completed(packet.value),
            _ => {
                if !peek {
                    self.binding.taken(self.socket, packet.len);
                }
                let from = SocketAddr::new(packet.address, packet.port);
                Incoming::Message { len, total: packet.len as usize, from }
            }
        };
        if taken.is_wanted {
            self.binding.report(self.socket, PacketKind::Taken);
        }
        if taken.is_last
            && let Some(token) = self.claim_newest()
        {
            self.take_claimed(token);
        }
        let is_message = packet.kind == PacketKind::Data;
        let time = if is_message { Duration::from_nanos(packet.wide()) } else { Duration::ZERO };
        Ok(Some(Arrival { incoming, time, times: packet.times }))
    }

    /// Waits until the connection is readable. Returns the number of the token there, unless
    /// another reader has taken it.
    ///
    /// One reader at a time waits in a receive: the system restarts it after signals if the program
    /// wants that, and wakes only one of several. Others poll: each token wakes all of them.
    fn wait_for_token(&mut self) -> io::Result<Option<u32>> {
        let is_first = self.waiting_since.is_none();
        let since = *self.waiting_since.get_or_insert_with(Instant::now);
        let alone = self.binding.flow.incoming.try_wait_alone();
        // On the first wait, the receive itself applies the whole time limit.
        let has_limit = !is_first || alone.is_none();
        let limit = match has_limit {
            true => socket_timeout(self.socket, Timeout::Recv)?,
            false => None,
        };
        if alone.is_some() && limit.is_none() {
            return match self.peek_token(RecvFlags::empty()) {
                Err(Errno::AGAIN) => Err(Errno::TIMEDOUT.into()),
                token => Ok(Some(token?)),
            };
        }
        drop(alone);
        let left = limit.map(|limit| limit.saturating_sub(since.elapsed()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        if poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], left.as_ref())? == 0 {
            return Err(Errno::TIMEDOUT.into());
        }
        match self.peek_token(RecvFlags::DONTWAIT) {
            Err(Errno::AGAIN) => Ok(None),
            token => Ok(Some(token?)),
        }
    }

    /// Waits for messages whose token has arrived. Takes the token if there are none.
    fn await_messages(&self, token: u32) -> Result<(), Errno> {
        let ring = &self.binding.flow.incoming;
        let mut since = None;
        for attempt in 0.. {
            if !ring.is_empty() {
                return Ok(());
            }
            if attempt < YIELDS {
                std::thread::yield_now();
                continue;
            }
            // If the token is gone, another reader has taken it.
            let is_there = match self.peek_token(RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => false,
                next => next? == token,
            };
            if !is_there {
                return Ok(());
            }
            // Unless a reader has claimed it, the node has yet to publish its messages.
            let since = *since.get_or_insert_with(Instant::now);
            if ring.is_token_taken(token) || since.elapsed() > MESSAGE_WAIT {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        if ring.claim_tokens(token) {
            self.take_claimed(token);
        }
        Ok(())
    }

    /// Claims the newest token. Returns its number, unless it announces messages.
    fn claim_newest(&self) -> Option<u32> {
        let ring = &self.binding.flow.incoming;
        Some(ring.newest_token()).filter(|number| ring.claim_tokens(*number))
    }

    /// Takes all tokens up to a claimed one.
    fn take_claimed(&self, number: u32) {
        let ring = &self.binding.flow.incoming;
        let mut has_waited = false;
        for _ in 0..TOKEN_TRIES {
            let is_sent = ring.is_token_sent(number);
            match self.take_token() {
                Some(token) if is_older_token(token, number) => {}
                Some(token) => {
                    // This call was late: another reader had taken its token.
                    if token != number && !ring.claim_tokens(token) {
                        self.binding.report(self.socket, PacketKind::Token);
                    }
                    return;
                }
                None if is_sent || has_waited => return,
                None => {
                    has_waited = true;
                    // If this fails, the next attempt finds no token.
                    let _ =
                        poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&TOKEN_WAIT));
                }
            }
        }
    }

    /// Takes the next token from the connection.
    fn take_token(&self) -> Option<u32> {
        let mut head = [0; PACKET_LEN];
        // Errors are reported by the next call.
        recv(self.socket, &mut head, RecvFlags::DONTWAIT).ok()?;
        token_of(&head)
    }

    /// Returns the number of the next token, which stays in the connection.
    fn peek_token(&self, flags: RecvFlags) -> Result<u32, Errno> {
        let mut head = [0; PACKET_LEN];
        let mut next = |flags| recv(self.socket, &mut head, flags);
        let got = match next(flags | RecvFlags::PEEK) {
            // The node was killed with unread input. The system reports that once, before the
            // tokens that the node had sent.
            Err(Errno::CONNRESET) => next(flags | RecvFlags::PEEK),
            got => got,
        };
        match got {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(Errno::NETDOWN),
            Ok(_) => {}
            Err(error) => return Err(error),
        }
        if let Some(number) = token_of(&head) {
            return Ok(number);
        }
        // A packet that is left would keep the socket readable.
        recv(self.socket, &mut head, RecvFlags::DONTWAIT)?;
        Err(Errno::PROTO)
    }
}

fn token_of(head: &[u8; PACKET_LEN]) -> Option<u32> {
    let packet = Packet::decode(head)?;
    (packet.kind == PacketKind::Token).then_some(packet.value)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::Arc;
    use std::thread::ScopedJoinHandle;

    use rustix::net::sockopt::set_socket_timeout;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::channel::{Flow, NodeFlow};
    use crate::socket::access::AtPath;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A socket whose node does what the test tells it to.
    struct Stand {
        binding: Arc<Binding>,
        socket: Arc<OwnedFd>,
        node: NodeFlow,
        /// The node's end of the connection.
        peer: OwnedFd,
    }

    impl Stand {
        fn new() -> Self {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (socket, peer) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT)).unwrap();
            let node = NodeFlow::create().unwrap();
            let flow = Flow::open(node.fd()).unwrap();
            let binding = Binding::of_test(Box::new(AtPath("/".into())), flow);
            Self { binding: Arc::new(binding), socket: Arc::new(socket), node, peer }
        }

        fn call(&self) -> Call<'_> {
            Call { binding: &self.binding, socket: self.socket.as_fd(), waiting_since: None }
        }

        /// Returns the length of the next message, or an error.
        fn receive(&self, how: How) -> Result<usize, Errno> {
            let mut buffer = vec![0; 2 << 20];
            let to = &mut [IoSliceMut::new(&mut buffer)];
            let arrival = receive(&self.binding, self.socket.as_fd(), to, how);
            let arrival = arrival.map_err(|error| Errno::from_io_error(&error).unwrap())?;
            let Incoming::Message { len, .. } = arrival.incoming else { panic!("{arrival:?}") };
            assert!(buffer[..len].iter().all(|byte| *byte == len as u8));
            Ok(len)
        }

        fn try_receive(&self) -> Result<usize, Errno> {
            self.receive(How { dontwait: true, peek: false })
        }

        fn is_readable(&self) -> bool {
            poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&Timespec::default()))
                .unwrap()
                > 0
        }

        fn write(&mut self, len: usize) {
            let packet = Packet { len: len as u32, ..Packet::new(PacketKind::Data) };
            assert!(self.node.outgoing.write(&packet.encode(), &vec![len as u8; len]));
        }

        /// Sends a token if one is needed. Returns its number.
        fn send_token(&mut self) -> Option<u32> {
            let ring = &mut self.node.outgoing;
            let number = ring.needs_token().then(|| ring.next_token()).flatten()?;
            self.send(Packet { value: number, ..Packet::new(PacketKind::Token) });
            self.node.outgoing.token_sent();
            Some(number)
        }

        fn send(&self, packet: Packet) {
            let flags = rustix::net::SendFlags::empty();
            rustix::net::send(&self.peer, &packet.encode(), flags).unwrap();
        }

        /// Delivers a message as nodes do. Returns the number of its last token.
        fn deliver(&mut self, len: usize) -> Option<u32> {
            self.write(len);
            let first = self.send_token();
            self.node.outgoing.publish();
            self.send_token().or(first)
        }

        /// Returns the next report from the program.
        fn report(&self) -> Option<PacketKind> {
            let mut head = [0; PACKET_LEN];
            recv(&self.peer, &mut head, RecvFlags::DONTWAIT).ok()?;
            Packet::decode(&head).map(|packet| packet.kind)
        }

        /// Answers reports as nodes do, until all threads have ended.
        fn serve<T>(&mut self, threads: &[ScopedJoinHandle<'_, T>]) {
            let begun = Instant::now();
            while !threads.iter().all(ScopedJoinHandle::is_finished) {
                assert!(begun.elapsed() < LIMIT / 2, "a call waits beside messages");
                if self.report() == Some(PacketKind::Token) {
                    self.send_token();
                }
                let moment = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
                poll(&mut [PollFd::new(&self.peer, PollFlags::IN)], Some(&moment)).unwrap();
            }
        }
    }

    #[test]
    fn messages_of_all_lengths_arrive_in_order_with_many_buffers_too() {
        let mut stand = Stand::new();
        for len in [0, 1, 65_536, 65_537, 1 << 20] {
            stand.deliver(len);
        }
        for len in [0, 1, 65_536, 65_537, 1 << 20] {
            assert!(stand.is_readable());
            assert_eq!(stand.receive(How { dontwait: true, peek: true }), Ok(len));
            assert_eq!(stand.receive(How::default()), Ok(len));
        }
        assert!(!stand.is_readable() && stand.try_receive() == Err(Errno::AGAIN));
        // More buffers than a system call accepts.
        stand.deliver(100_000);
        let mut bytes = vec![0; 2000];
        let mut to: Vec<_> = bytes.chunks_mut(1).map(IoSliceMut::new).collect();
        let got = receive(&stand.binding, stand.socket.as_fd(), &mut to, How::default()).unwrap();
        let from = SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), 0);
        assert_eq!(got.incoming, Incoming::Message { len: 2000, total: 100_000, from });
        assert!(bytes.iter().all(|byte| *byte == 100_000_u32 as u8));
    }

    /// The node sends a token and is slow to publish its message.
    #[test]
    fn a_call_that_takes_its_token_early_misses_no_message() {
        let mut stand = Stand::new();
        stand.write(7);
        assert_eq!(stand.send_token(), Some(1));
        assert_eq!(stand.try_receive(), Err(Errno::AGAIN));
        assert!(!stand.is_readable(), "the call has taken the token");
        stand.node.outgoing.publish();
        assert_eq!(stand.send_token(), Some(2));
        assert!(stand.is_readable());
        assert_eq!((stand.receive(How::default()), stand.is_readable()), (Ok(7), false));
    }

    /// Otherwise the token makes polls report a message that is not there.
    #[test]
    fn a_call_that_takes_the_last_message_waits_for_a_token_that_is_announced() {
        let mut stand = Stand::new();
        stand.write(7);
        let number = stand.node.outgoing.next_token().unwrap();
        stand.node.outgoing.publish();
        let (binding, socket) = (Arc::clone(&stand.binding), Arc::clone(&stand.socket));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 8];
            receive(&binding, socket.as_fd(), &mut [IoSliceMut::new(&mut bytes)], How::default())
        });
        let begun = Instant::now();
        while !stand.node.outgoing.is_empty() {
            assert!(begun.elapsed() < LIMIT / 2, "the message is not taken");
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        stand.send(Packet { value: number, ..Packet::new(PacketKind::Token) });
        stand.node.outgoing.token_sent();
        let arrival = reader.join().unwrap().unwrap();
        assert!(matches!(arrival.incoming, Incoming::Message { len: 7, .. }));
        assert!(!stand.is_readable());
    }

    #[test]
    fn an_unexpected_packet_fails_one_call() {
        let mut stand = Stand::new();
        stand.send(Packet::new(PacketKind::Bound));
        assert_eq!(stand.try_receive(), Err(Errno::PROTO));
        assert_eq!((stand.try_receive(), stand.is_readable()), (Err(Errno::AGAIN), false));
        assert_eq!(stand.deliver(3), Some(1));
        assert_eq!(stand.receive(How::default()), Ok(3));
    }

    /// The call finds the token of a message that is not its own.
    #[test]
    fn a_call_that_takes_its_token_late_misses_no_message() {
        let mut stand = Stand::new();
        assert_eq!(stand.deliver(1), Some(1));
        assert!(stand.binding.flow.incoming.take(false, |_| ()).unwrap().is_some());
        let number = stand.call().claim_newest().unwrap();
        // Another call takes that token while this one is stopped, and the next message arrives.
        assert_eq!(stand.try_receive(), Err(Errno::AGAIN));
        assert_eq!(stand.deliver(2), Some(2));
        stand.call().take_claimed(number);
        assert!(!stand.is_readable(), "it has taken the second token");
        assert_eq!(stand.report(), Some(PacketKind::Token));
        assert_eq!(stand.send_token(), Some(3));
        assert_eq!((stand.receive(How::default()), stand.is_readable()), (Ok(2), false));
        // Without a message, the call asks for nothing.
        assert_eq!(stand.deliver(3), Some(4));
        assert_eq!(stand.receive(How::default()), Ok(3));
        stand.call().take_claimed(number);
        assert_eq!(stand.report(), None);
    }

    #[test]
    fn a_token_that_a_killed_reader_has_left_is_taken_by_the_next_call() {
        for claims in [false, true] {
            let mut stand = Stand::new();
            stand.deliver(1);
            assert!(stand.binding.flow.incoming.take(false, |_| ()).unwrap().is_some());
            if claims {
                stand.call().claim_newest().unwrap();
            }
            assert!(stand.is_readable());
            assert_eq!((stand.try_receive(), stand.is_readable()), (Err(Errno::AGAIN), false));
            assert_eq!(stand.deliver(2), Some(2));
            assert!(stand.is_readable());
            assert_eq!((stand.receive(How::default()), stand.is_readable()), (Ok(2), false));
        }
    }

    /// Calls wait in both ways. A killed call keeps the right to wait alone.
    #[test]
    fn all_calls_that_wait_get_a_message() {
        for (round, is_killed) in [false, true].repeat(20).into_iter().enumerate() {
            let mut stand = Stand::new();
            let (binding, socket) = (Arc::clone(&stand.binding), stand.socket.clone());
            if is_killed {
                std::mem::forget(binding.flow.incoming.try_wait_alone());
            }
            let count = round % 4 + 1;
            let read = || {
                let mut bytes = [0; 8];
                let to = &mut [IoSliceMut::new(&mut bytes)];
                let arrival = receive(&binding, socket.as_fd(), to, How::default()).unwrap();
                let Incoming::Message { len, .. } = arrival.incoming else { panic!("{arrival:?}") };
                len
            };
            let lens = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..count).map(|_| scope.spawn(read)).collect();
                for len in 1..=count {
                    stand.deliver(len);
                }
                stand.serve(&threads);
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<BTreeSet<_>>()
            });
            assert_eq!(lens, (1..=count).collect());
            assert_eq!((stand.try_receive(), stand.is_readable()), (Err(Errno::AGAIN), false));
        }
    }
}
