//! Unit tests of sockets and their shares of memory.

use rtrs_base::time::Instant;

use super::*;

const BUFFERS: Buffers = Buffers { sndbuf: 1000, rcvbuf: 1000 };

fn ports(max: usize) -> Ports {
    let limits = PortLimits { sockets: max, port_memory: 10_000, memory: 10_000 };
    Ports::new(limits, Prng::new(1))
}

fn message(len: usize) -> Received {
    let times = ArrivalTimes::at(Instant::ZERO);
    Received { from: [10, 0, 0, 1].into(), port: 7, payload: vec![0; len], times }
}

/// Returns a message with a payload of this length.
fn sent(id: SocketId, len: usize) -> Message {
    Message {
        owner: Owner::Socket(id),
        user: UserId::NODE,
        sport: id.port,
        dport: 1,
        payload: vec![0; len],
        extensions: [0; 16],
        sequence: None,
        is_begun: false,
        completion: None,
    }
}

#[test]
fn a_port_is_bound_once() {
    let mut ports = ports(4);
    assert_eq!(ports.bind(UserId::NODE, 1, BUFFERS), Err(BindError::Reserved));
    let first = ports.bind(UserId::NODE, 4000, BUFFERS).unwrap();
    assert_eq!(ports.bind(UserId::NODE, 4000, BUFFERS), Err(BindError::InUse(4000)));
    let any = [0; 3].map(|port| ports.bind(UserId::NODE, port, BUFFERS).unwrap().port);
    assert!(any.iter().all(|port| *port >= EPHEMERAL_MIN && *port != 4000), "{any:?}");
    assert_eq!(ports.bind(UserId::NODE, 0, BUFFERS), Err(BindError::TooMany(4)));
    ports.close(first).unwrap();
    let second = ports.bind(UserId::NODE, 4000, BUFFERS).unwrap();
    assert_ne!(first, second);
    assert!(ports.get(first).is_none() && ports.pass(first).is_none());
}

#[test]
fn congestion_starts_above_the_buffer_and_ends_below_half() {
    let mut ports = ports(4);
    let id = ports.bind(UserId::NODE, 4000, BUFFERS).unwrap();
    assert_eq!(ports.deliver(4000, message(500)), Some(false));
    assert_eq!(ports.deliver(4000, message(0)), Some(false));
    assert_eq!(ports.deliver(4000, message(500)), Some(false), "only payload counts");
    assert_eq!(ports.deliver(4000, message(1)), Some(true));
    assert_eq!(ports.deliver(4000, message(0)), Some(false));
    assert_eq!(ports.take_event(), Some(Event::Readable(id)));
    assert_eq!(ports.take_event(), None, "it is reported once");
    assert!(ports.congested().get(4000));
    // Messages that were passed on count until the user takes them.
    let passed: Vec<_> = (0..5).map(|_| ports.pass(id).unwrap().payload.len()).collect();
    assert_eq!(passed, [500, 0, 500, 1, 0]);
    assert_eq!(ports.memory, Memory::default());
    assert!(!ports.taken(id, 500) && !ports.taken(id, 1));
    assert!(ports.taken(id, 1), "below half");
    assert!(!ports.congested().get(4000));
    assert_eq!(ports.deliver(4001, message(0)), None);
    ports.deliver(4000, message(2000));
    assert!(ports.close(id).unwrap().map_changed, "a closed port is not congested");
    assert_eq!(ports.memory, Memory::default());
}

#[test]
fn a_refused_socket_is_notified_when_there_is_room() {
    let mut ports = ports(4);
    let id = ports.bind(UserId::NODE, 4000, BUFFERS).unwrap();
    let other = ports.bind(UserId::NODE, 4001, Buffers { sndbuf: 20_000, ..BUFFERS }).unwrap();
    assert!(ports.has_room(id));
    ports.charge(id, &sent(id, 999));
    assert!(ports.has_room(id), "only payload counts");
    ports.charge(id, &sent(id, 1));
    assert!(!ports.has_room(id) && ports.has_room(other) && ports.freed.is_empty());
    ports.discharge(id, Amount::one(1));
    assert_eq!(ports.take_event(), Some(Event::Writable(id)));
    assert_eq!(ports.take_freed(), [id].into());
    // The node as a whole is full.
    ports.charge(other, &sent(other, 8_700));
    assert!(!ports.has_room(id) && !ports.has_room(other) && ports.has_refused());
    ports.release(&sent(other, 100));
    assert_eq!(ports.take_event(), Some(Event::Writable(id)));
    assert_eq!(ports.take_event(), Some(Event::Writable(other)));
    assert!(ports.has_room(id) && !ports.has_refused());
}

#[test]
fn completions_are_reported_and_limited() {
    let mut ports = ports(4);
    let id = ports.bind(UserId::NODE, 4000, Buffers { sndbuf: 10_000, ..BUFFERS }).unwrap();
    let message = |cookie| {
        let completion = Some(Completion { socket: id, cookie });
        Message { completion, ..sent(id, 200) }
    };
    ports.charge(id, &message(7));
    assert!(ports.awaits_acks() && ports.pending(id).is_none());
    // A canceled message no longer has an owner, but its sender still waits.
    ports.discharge(id, Amount::one(200));
    ports.release(&Message { owner: Owner::Nobody, ..message(7) });
    assert_eq!(ports.take_event(), Some(Event::Readable(id)));
    assert!(!ports.awaits_acks());
    assert_eq!(ports.pending(id), Some(Pending::Completion(7)));
    assert_eq!(ports.take_completion(id), Some(7));
    // A user that does not read its completions must stop sending.
    for cookie in 0..16 << 10 {
        ports.complete(Completion { socket: id, cookie });
    }
    assert!(!ports.has_room(id));
    assert_eq!(ports.take_completion(id), Some(0));
    let events: Vec<_> = std::iter::from_fn(|| ports.take_event()).collect();
    assert_eq!(events, [Event::Readable(id), Event::Writable(id)]);
    ports.close(id).unwrap();
    ports.complete(Completion { socket: id, cookie: 9 });
    assert_eq!(ports.pending(id), None, "the socket is closed");
}

/// Binds a socket for a user, and fills it with as many messages as fit.
fn fill(ports: &mut Ports, user: UserId, port: u16) -> usize {
    ports.bind(user, port, BUFFERS).unwrap();
    let mut count = 0;
    while ports.fits(port, 72) {
        ports.deliver(port, message(72)).unwrap();
        count += 1;
    }
    count
}

#[test]
fn unread_sockets_of_a_user_leave_memory_for_others() {
    let limits = PortLimits { sockets: 10, port_memory: 2_500, memory: 10_000 };
    let mut ports = Ports::new(limits, Prng::new(1));
    let counts = [4000, 4001, 4002, 4003].map(|port| fill(&mut ports, UserId(1000), port));
    assert_eq!(counts, [12, 12, 12, 1], "three quarters of the node's memory");
    assert!(ports.bind(UserId(1001), 5000, BUFFERS).is_ok_and(|id| ports.fits(id.port, 1000)));
    assert_eq!(fill(&mut ports, UserId(1001), 5001), 9, "three quarters of what is left");
    // The memory of a closed socket becomes free again.
    let id = SocketId { port: 4000, serial: 1 };
    ports.close(id).unwrap();
    assert!(ports.fits(4003, 72) && ports.fits(5000, 72));
}

#[test]
fn unacknowledged_messages_of_a_user_leave_memory_for_others() {
    let mut ports = ports(4);
    let large = Buffers { sndbuf: 20_000, ..BUFFERS };
    let greedy = [4000, 4001].map(|port| ports.bind(UserId(1000), port, large).unwrap());
    let modest = ports.bind(UserId(1001), 5000, large).unwrap();
    let of = |user, id| Message { user: UserId(user), ..sent(id, 72) };
    let mut count = 0;
    while ports.has_room(greedy[count % 2]) {
        ports.charge(greedy[count % 2], &of(1000, greedy[count % 2]));
        count += 1;
    }
    assert_eq!(count, 38);
    assert!(!ports.has_room(greedy[0]) && !ports.has_room(greedy[1]));
    assert!(!ports.may_exceed(greedy[0]) && ports.may_exceed(modest));
    assert!(ports.has_room(modest));
    ports.charge(modest, &of(1001, modest));
    ports.release(&of(1001, modest));
    assert_eq!(ports.take_event(), None);
    // The socket of an acknowledged message may send immediately. Other sockets of its user may
    // send again once part of the share is free.
    ports.release(&of(1000, greedy[0]));
    assert_eq!(ports.take_event(), Some(Event::Writable(greedy[0])));
    assert_eq!(ports.take_event(), None);
    (0..5).for_each(|_| ports.release(&of(1000, greedy[0])));
    assert_eq!(ports.take_event(), Some(Event::Writable(greedy[1])));
    // Messages of closed sockets still count.
    while ports.has_room(greedy[1]) {
        ports.charge(greedy[1], &of(1000, greedy[1]));
    }
    ports.close(greedy[1]).unwrap();
    assert!(!ports.has_room(greedy[0]) && ports.has_room(modest));
}

#[test]
fn unread_completions_are_bounded_even_when_the_buffer_may_be_exceeded() {
    let mut ports = ports(4);
    let id = ports.bind(UserId(1000), 4000, BUFFERS).unwrap();
    let mut count = 0;
    while ports.may_exceed(id) {
        assert!(count <= 2 * COMPLETED_MAX, "it grows without bound");
        ports.complete(Completion { socket: id, cookie: 7 });
        count += 1;
    }
    assert!(count > COMPLETED_MAX);
}
