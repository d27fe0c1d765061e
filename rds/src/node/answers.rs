//! Answers that users have not read.
//!
//! An answer waits in the user's connection, with memory descriptors. The system counts these
//! against the node, and refuses to pass more than a limit. So a connection receives one answer at
//! a time, and each user has a share of all unread answers. An answer counts until it is read, even
//! after its connection is closed.

use std::collections::BTreeMap;

use rtrs_base::log_limit::LogLimit;
use rtrs_base::rt::{Fd, unacknowledged_bytes};
use rtrs_base::time::Instant;

use super::client::{Client, ClientId};
use crate::proto::{Shares, Use, UserId};

/// Limits on unread answers.
#[derive(Clone, Copy, Debug)]
struct Limits {
    answers: usize,
    /// Bytes of memory passed with unread answers.
    bytes: usize,
}

const LIMITS: Limits = Limits { answers: 1024, bytes: 256 << 20 };

#[derive(Debug)]
struct Unread {
    fd: Fd,
    user: UserId,
    bytes: usize,
}

/// Answers that may be unread.
#[derive(Debug)]
pub(super) struct Answers {
    limits: Limits,
    unread: BTreeMap<ClientId, Unread>,
    counts: Shares,
    bytes: Shares,
    bytes_total: usize,
    log: LogLimit,
}

impl Answers {
    pub(super) fn new() -> Self {
        Self::with(LIMITS)
    }

    fn with(limits: Limits) -> Self {
        Self {
            limits,
            unread: BTreeMap::new(),
            counts: Shares::default(),
            bytes: Shares::default(),
            bytes_total: 0,
            log: LogLimit::default(),
        }
    }

    /// Records an answer that is to be sent. Returns false if the connection must not receive it:
    /// it has not read the previous one, or its user has too many unread answers.
    pub(super) fn begin(&mut self, now: Instant, id: ClientId, client: &Client) -> bool {
        let user = client.user();
        self.forget_if_read(id);
        if !self.has_place(user) {
            self.forget_read(id);
        }
        if self.unread.contains_key(&id) || !self.has_place(user) {
            self.warn(now, client);
            return false;
        }
        self.unread.insert(id, Unread { fd: client.fd.clone(), user, bytes: 0 });
        self.counts.charge(user, 1);
        true
    }

    /// Records memory to be passed with the answer. Returns false if the user would have too much.
    pub(super) fn add_bytes(
        &mut self,
        now: Instant,
        id: ClientId,
        client: &Client,
        bytes: usize,
    ) -> bool {
        let user = client.user();
        if !self.has_memory(user, bytes) {
            self.forget_read(id);
        }
        if !self.has_memory(user, bytes) {
            self.warn(now, client);
            return false;
        }
        if let Some(unread) = self.unread.get_mut(&id) {
            unread.bytes += bytes;
            self.bytes.charge(user, bytes);
            self.bytes_total += bytes;
        }
        true
    }

    /// Forgets the answer to a connection that has become a socket. Messages in the connection
    /// would keep it unread, and the number of sockets has its own limit.
    pub(super) fn forget(&mut self, id: ClientId) {
        if let Some(Unread { user, bytes, .. }) = self.unread.remove(&id) {
            self.counts.discharge(user, 1);
            self.bytes.discharge(user, bytes);
            self.bytes_total -= bytes;
        }
    }

    /// Handles a closed connection.
    pub(super) fn ended(&mut self, id: ClientId) {
        self.forget_if_read(id);
    }

    fn has_place(&self, user: UserId) -> bool {
        let whole = Use { limit: self.limits.answers, total: self.unread.len() };
        whole.total < whole.limit && self.counts.has_room(user, whole, 1)
    }

    fn has_memory(&self, user: UserId, bytes: usize) -> bool {
        let whole = Use { limit: self.limits.bytes, total: self.bytes_total };
        self.bytes.has_room(user, whole, bytes)
    }

    /// Forgets all answers that have been read, except the one about to be sent.
    fn forget_read(&mut self, id: ClientId) {
        let others = self.unread.keys().copied().filter(|other| *other != id);
        for other in others.collect::<Vec<_>>() {
            self.forget_if_read(other);
        }
    }

    fn forget_if_read(&mut self, id: ClientId) {
        let is_read =
            |unread: &Unread| unacknowledged_bytes(&unread.fd).map_or(true, |len| len == 0);
        if self.unread.get(&id).is_some_and(is_read) {
            self.forget(id);
        }
    }

    fn warn(&mut self, now: Instant, client: &Client) {
        if let Some(left_out) = self.log.admit(now) {
            let uid = client.credentials.uid;
            let pid = client.credentials.pid.unwrap_or(0);
            tracing::warn!(uid, pid, left_out, "user disconnected: its answers are not being read");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rtrs_base::rt::{PeerCredentials, receive_passed};
    use socket2::{Domain, Socket, Type};

    use super::*;
    use crate::channel::{PACKET_LEN, Packet, PacketKind};

    /// The test's connections and the records of their answers.
    struct Scene {
        answers: Answers,
        clients: Vec<(Client, OwnedFd)>,
    }

    impl Scene {
        /// Connects a user. Returns the number of the connection.
        fn connect(&mut self, uid: u32) -> usize {
            let (ours, theirs) = Socket::pair(Domain::UNIX, Type::SEQPACKET, None).unwrap();
            let credentials = PeerCredentials { pid: Some(1), uid };
            let client = Client::passed(ours.into(), credentials).unwrap();
            self.clients.push((client, theirs.into()));
            self.clients.len() - 1
        }

        /// Sends a connection an answer with this many bytes, if it may receive one.
        fn answer(&mut self, number: usize, bytes: usize) -> bool {
            let (now, id) = (Instant::ZERO, number as ClientId);
            let client = &self.clients[number].0;
            let is_admitted = self.answers.begin(now, id, client)
                && self.answers.add_bytes(now, id, client, bytes);
            if is_admitted {
                client.write(&Packet::new(PacketKind::Done), &[]).unwrap();
            } else {
                self.answers.ended(id);
            }
            is_admitted
        }

        fn read(&self, number: usize) {
            let mut room = [0; PACKET_LEN];
            let parts = &mut [std::io::IoSliceMut::new(&mut room)];
            assert_eq!(receive_passed(&self.clients[number].1, parts).unwrap().0, PACKET_LEN);
        }
    }

    fn scene() -> Scene {
        let limits = Limits { answers: 16, bytes: 1000 };
        Scene { answers: Answers::with(limits), clients: Vec::new() }
    }

    #[test]
    fn a_connection_gets_an_answer_once_it_has_read_the_previous_one() {
        let mut scene = scene();
        let one = scene.connect(1000);
        for _ in 0..20 {
            assert!(scene.answer(one, 10));
            assert!(!scene.answer(one, 10));
            scene.read(one);
        }
    }

    #[test]
    fn a_user_that_reads_no_answers_leaves_some_for_others() {
        let mut scene = scene();
        let count = (0..50).filter(|_| {
            let number = scene.connect(1000);
            scene.answer(number, 0)
        });
        assert_eq!(count.count(), 12);
        // They still count after their connections are closed.
        (0..50).for_each(|id| scene.answers.ended(id));
        let (again, other) = (scene.connect(1000), scene.connect(1001));
        assert!(!scene.answer(again, 0) && scene.answer(other, 0));
        scene.read(3);
        scene.read(4);
        assert!(scene.answer(again, 0));
        // The process has ended.
        scene.clients.clear();
        scene.answers.forget_read(ClientId::MAX);
        assert!(scene.answers.unread.is_empty() && scene.answers.bytes_total == 0);
    }

    #[test]
    fn memory_of_unread_answers_is_bounded() {
        let mut scene = scene();
        let numbers = [1000, 1000, 1000, 1001].map(|uid| scene.connect(uid));
        assert!(scene.answer(numbers[0], 700), "one is always possible");
        assert!(!scene.answer(numbers[1], 51) && scene.answer(numbers[2], 50));
        assert!(scene.answer(numbers[3], 2000));
        scene.read(numbers[0]);
        scene.read(numbers[3]);
        assert!(scene.answer(numbers[1], 51));
        assert_eq!(scene.answers.bytes_total, 101);
    }
}
