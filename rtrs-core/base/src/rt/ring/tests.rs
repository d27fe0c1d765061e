//! Tests of operations on sockets and files, cancellation, sleep and registered memory.

use std::os::unix::net::UnixStream;

use super::*;
use crate::mem::IoVecs;
use crate::rt::Fd;
use crate::rt::mailbox;

fn wait(ring: &Rc<Ring>, port: &mut Port) -> Completed {
    for _ in 0..1200 {
        if let Some(done) = port.take() {
            return done;
        }
        ring.turn_or_sleep(Some(Duration::from_millis(50))).unwrap();
    }
    panic!("nothing completed within a minute");
}

#[test]
fn data_crosses_a_socket_and_returns_to_its_port() {
    let ring = Ring::new(8).unwrap();
    let (mut left, mut right) = (ring.port(), ring.port());
    let (a, b) = UnixStream::pair().unwrap();
    let region = Region::new(4096).unwrap();
    let mut iov = IoVecs::new(4);
    region.copy_in(0, b"hello");
    iov.push(region.slice(0, 2).unwrap());
    iov.push(region.slice(2, 3).unwrap());
    left.submit(Op::SendMsg { fd: Fd::new(a), iov }, 7);
    right.submit(Op::Recv { fd: Fd::new(b), buf: region.slice(100, 50).unwrap() }, 9);
    let sent = wait(&ring, &mut left);
    assert_eq!((sent.token, sent.count().unwrap()), (7, 5));
    let got = wait(&ring, &mut right);
    assert_eq!((got.token, got.count().unwrap()), (9, 5));
    assert_eq!(region.slice(100, 5).unwrap().to_vec(), b"hello");
    assert!(left.take().is_none() && right.take().is_none());
}

#[test]
fn a_dropped_port_cancels_its_operations() {
    let ring = Ring::new(8).unwrap();
    let (a, _b) = UnixStream::pair().unwrap();
    let region = Region::new(4096).unwrap();
    let port = ring.port();
    port.submit(Op::Recv { fd: Fd::new(a), buf: region.slice(0, 8).unwrap() }, 0);
    ring.turn().unwrap();
    assert_eq!(ring.running(), 1);
    drop(port);
    for _ in 0..100 {
        if ring.running() == 0 {
            break;
        }
        ring.turn_or_sleep(Some(Duration::from_millis(20))).unwrap();
    }
    assert_eq!(ring.running(), 0);
    assert_eq!(Arc::strong_count(&region), 1, "the operation has released its memory");
}

#[test]
fn operations_of_a_dropped_port_do_not_complete_on_a_later_one() {
    let ring = Ring::new(8).unwrap();
    let (a, _b) = UnixStream::pair().unwrap();
    let region = Region::new(4096).unwrap();
    let port = ring.port();
    port.submit(Op::Recv { fd: Fd::new(a), buf: region.slice(0, 8).unwrap() }, 0);
    ring.turn().unwrap();
    drop(port);
    // The ports are created before the cancellation is passed to the kernel.
    let mut later: Vec<Port> = (0..4).map(|_| ring.port()).collect();
    for _ in 0..100 {
        if ring.running() == 0 {
            break;
        }
        ring.turn_or_sleep(Some(Duration::from_millis(20))).unwrap();
    }
    assert_eq!(ring.running(), 0);
    assert!(later.iter_mut().all(|port| port.take().is_none()));
}

#[test]
fn a_sleep_submits_everything_that_exceeds_one_call() {
    use std::io::Write;
    let ring = Ring::new(8).unwrap();
    let mut port = ring.port();
    let region = Region::new(4096).unwrap();
    let (a, mut b) = UnixStream::pair().unwrap();
    let (c, mut d) = UnixStream::pair().unwrap();
    let quiet = Fd::new(a);
    for _ in 0..8 {
        let buf = region.slice(0, 8).unwrap();
        port.submit(Op::Recv { fd: quiet.clone(), buf }, 0);
    }
    port.submit(Op::Recv { fd: Fd::new(c), buf: region.slice(8, 1).unwrap() }, 1);
    assert!(ring.has_backlog());
    d.write_all(b"x").unwrap();
    // The sleep must end although the ninth operation was not submitted before the sleep began.
    let (over, ended) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let _ = ended.recv_timeout(Duration::from_secs(45));
        b.write_all(b"too late").unwrap();
    });
    for _ in 0..2 {
        ring.turn_or_sleep(Some(Duration::from_secs(60))).unwrap();
    }
    assert_eq!(port.take().map(|done| done.token), Some(1));
    drop(over);
    watch.join().unwrap();
}

#[test]
fn a_canceled_operation_completes_once_with_an_error() {
    let ring = Ring::new(8).unwrap();
    let (a, _b) = UnixStream::pair().unwrap();
    let region = Region::new(4096).unwrap();
    let mut port = ring.port();
    let id = port.submit(Op::Recv { fd: Fd::new(a), buf: region.slice(0, 8).unwrap() }, 3);
    ring.turn().unwrap();
    port.cancel(id);
    port.cancel(id);
    let done = wait(&ring, &mut port);
    assert_eq!(done.result, -libc::ECANCELED);
    port.cancel(id);
    ring.turn().unwrap();
    assert!(port.take().is_none());
}

#[test]
fn a_message_ends_a_sleep() {
    let ring = Ring::new(8).unwrap();
    let (sender, inbox) = mailbox::<u32>().unwrap();
    let mut inbox = inbox.arm(&ring).unwrap();
    for round in 0..3 {
        assert!(inbox.prepare_sleep());
        let remote = sender.clone();
        let thread = std::thread::spawn(move || remote.send(round));
        let mut slept = 0;
        while inbox.is_empty() {
            ring.turn_or_sleep(Some(Duration::from_millis(200))).unwrap();
            slept += 1;
            assert!(slept < 300, "the message did not arrive");
        }
        inbox.awake();
        thread.join().unwrap();
        assert_eq!(inbox.take(), Some(round));
    }
    sender.send(9);
    assert!(!inbox.prepare_sleep(), "a message that came first keeps the shard awake");
}

#[test]
fn memory_is_registered_piece_by_piece_on_use() {
    use crate::rt::fixed::PIECE;
    let ring = Ring::new(8).unwrap();
    let mut port = ring.port();
    let region = Region::new(4 * PIECE).unwrap();
    ring.attach_region(&region);
    let path = std::env::temp_dir().join(format!("rtrs-ring-{}", std::process::id()));
    let file = std::fs::File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    let fd = Fd::new(file);
    let slot = |at: usize| ring.inner.borrow_mut().fixed.slot(&region.slice(at, 6).unwrap());
    // A piece is not registered on its first use, but is on its second.
    for round in 0..2 {
        for at in [0, PIECE, 2 * PIECE] {
            region.copy_in(at, b"stored");
            let offset = at as u64;
            let buf = region.slice(at, 6).unwrap();
            port.submit(Op::Write { fd: fd.clone(), buf, offset, dsync: true }, 1);
            assert_eq!(wait(&ring, &mut port).count().unwrap(), 6);
            region.copy_in(at, b"------");
            let buf = region.slice(at, 6).unwrap();
            port.submit(Op::Read { fd: fd.clone(), buf: buf.clone(), offset }, 2);
            assert_eq!(wait(&ring, &mut port).count().unwrap(), 6);
            assert_eq!(buf.to_vec(), b"stored", "round {round}");
            port.run_inline(Op::Read { fd: fd.clone(), buf, offset: offset + 1 }, 3);
            assert!(wait(&ring, &mut port).count().unwrap() >= 5);
        }
    }
    let Some(first) = slot(0) else { return }; // Refused here (RLIMIT_MEMLOCK).
    let all = [slot(0), slot(PIECE), slot(2 * PIECE)];
    assert!(all.iter().all(Option::is_some) && all[1] != Some(first), "{all:?}");
    // A turn registers only one piece, even if many are requested.
    let many = Region::new(20 * PIECE).unwrap();
    ring.attach_region(&many);
    let registered = || {
        let pieces = (0..20).map(|n| many.slice(n * PIECE, 1).unwrap());
        let mut inner = ring.inner.borrow_mut();
        pieces.filter(|buf| inner.fixed.slot(buf).is_some()).count()
    };
    assert_eq!(registered(), 0);
    for turn in 1..=20 {
        ring.turn().unwrap();
        assert_eq!(registered(), turn);
    }
    // Released pieces are unregistered in a few steps, for which a sleep does not wait.
    ring.detach_region(many.id());
    let start = std::time::Instant::now();
    while !ring.inner.borrow().fixed.is_settled() {
        ring.turn_or_sleep(Some(Duration::from_secs(60))).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(30), "it slept");
    assert!(slot(0).is_some(), "the other stays");
}

#[test]
fn the_requested_number_of_workers_is_used() {
    let ring = Ring::new(8).unwrap();
    let max = || {
        let mut max = [0, 0];
        ring.inner.borrow().uring.submitter().register_iowq_max_workers(&mut max).unwrap();
        max[0]
    };
    assert_eq!((ring.add_workers(40).unwrap(), max()), (40, 40));
    assert_eq!((ring.add_workers(40).unwrap(), max()), (80, 80));
    assert_eq!((ring.add_workers(-40).unwrap(), max()), (40, 40));
}
