//! Tests of queues whose session is played by the test.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::thread;

use rtrs_client::embed::{Outcome, Pieces};
use rtrs_core::block::IoOp;
use rtrs_core::rt::{EventSender, Inbox, Ring, event_queue, mailbox};

use super::*;
use crate::{Buffer, Volume};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(1);
const IO_MAX: u32 = 8192;

/// Session's end of a queue.
struct Session {
    submissions: Inbox<Submission>,
    outcomes: EventSender<Outcome>,
    _ring: Rc<Ring>,
}

impl Session {
    /// Takes the next submission, which must already be queued.
    fn take(&mut self) -> Submission {
        self.submissions.take().expect("a submission")
    }

    /// Completes the next submission, which must already be queued.
    fn end_next(&mut self) {
        let slot = self.take().slot;
        self.end(slot, IoStatus::Ok);
    }

    /// Completes a request.
    fn end(&self, slot: u32, status: IoStatus) {
        self.outcomes.send(Outcome { slot, status }).expect("room for each request");
    }
}

fn queue_of(process: Process, depth: u16) -> (Queue, Session) {
    let ring = Ring::new(8).unwrap();
    let (submissions, inbox) = mailbox().unwrap();
    let (outcomes, receiver) = event_queue(depth.into()).unwrap();
    let shared = Arc::new(Shared { process, closing: AtomicBool::new(false) });
    let user = QueueUser { submissions, outcomes: receiver };
    let submissions = inbox.arm(&ring).unwrap();
    (Queue::new(&shared, user, depth, IO_MAX), Session { submissions, outcomes, _ring: ring })
}

fn queue(depth: u16) -> (Queue, Session) {
    queue_of(Process::current(), depth)
}

fn poll(queue: &mut Queue, min: usize, max: usize, timeout: Duration) -> Vec<Completion> {
    let mut completions = Vec::new();
    let count = queue.poll(&mut completions, min, max, timeout).unwrap();
    assert_eq!(count, completions.len());
    completions
}

fn tokens(completions: &[Completion]) -> Vec<u64> {
    completions.iter().map(|completion| completion.token).collect()
}

fn kind(rejected: Result<(), Rejected>) -> ErrorKind {
    rejected.unwrap_err().error.kind()
}

#[test]
fn a_queue_may_move_and_a_volume_may_be_shared() {
    fn moves<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}
    moves::<Queue>();
    is_shared::<Volume>();
}

#[test]
fn completions_arrive_in_any_order_with_their_memory() {
    let (mut queue, mut session) = queue(4);
    for token in [10, 11] {
        queue.submit(token, Request::read(0, Buffer::zeroed(4096))).unwrap();
    }
    queue.submit(12, Request::flush()).unwrap();
    let [first, second, flush] = [(); 3].map(|()| session.take());
    assert_eq!((first.op, first.len, flush.op, flush.len), (IoOp::Read, 4096, IoOp::Flush, 0));
    let Pieces::One(memory) = second.memory else { panic!("no memory") };
    memory.fill(7);
    drop(memory);
    session.end(second.slot, IoStatus::Ok);
    session.end(flush.slot, IoStatus::Io);
    let mut done = poll(&mut queue, 2, 9, LONG);
    assert_eq!((tokens(&done), queue.inflight()), (vec![11, 12], 1));
    assert_eq!(done.pop().unwrap().result.unwrap_err().errno(), 5);
    assert_eq!(&done.pop().unwrap().into_buffer().unwrap()[..], [7; 4096]);
    assert!(poll(&mut queue, 1, 9, SHORT).is_empty(), "one is in flight");
    session.end(first.slot, IoStatus::Ok);
    assert_eq!(tokens(&poll(&mut queue, 5, 9, LONG)), [10], "no more can come");
    assert!(poll(&mut queue, 1, 9, LONG).is_empty(), "nothing is in flight");
}

#[test]
fn memory_that_the_session_still_uses_is_not_returned() {
    let (mut queue, mut session) = queue(1);
    queue.submit(0, Request::write(0, Buffer::from(vec![3; 512]))).unwrap();
    let Submission { slot, memory: Pieces::One(late), .. } = session.take() else { panic!() };
    session.end(slot, IoStatus::Ok);
    let buffer = poll(&mut queue, 1, 1, LONG).pop().unwrap().into_buffer().unwrap();
    late.fill(9);
    assert_eq!(&buffer[..], [3; 512]);
}

#[test]
fn a_request_that_cannot_be_submitted_is_returned() {
    let (mut queue, mut session) = queue(1);
    let long = Request::read(0, Buffer::zeroed(IO_MAX as usize + 1));
    let rejected = queue.submit(0, long).unwrap_err();
    assert_eq!(rejected.error.kind(), ErrorKind::Invalid);
    assert_eq!(rejected.request.into_buffers()[0].len(), IO_MAX as usize + 1);
    let pieces = (0..=PIECES_MAX).map(|_| Buffer::zeroed(1)).collect();
    assert_eq!(kind(queue.submit(0, Request::write_vectored(0, pieces))), ErrorKind::Invalid);
    assert_eq!(kind(queue.submit(0, Request::discard(0, 1 << 32))), ErrorKind::Invalid);
    queue.submit(1, Request::flush()).unwrap();
    assert_eq!(kind(queue.submit(2, Request::flush())), ErrorKind::Full);
    session.end_next();
    assert_eq!(tokens(&poll(&mut queue, 1, 1, LONG)), [1]);
    queue.submit(3, Request::flush()).unwrap();
    queue.shared.closing.store(true, Ordering::Release);
    assert_eq!(kind(queue.submit(4, Request::flush())), ErrorKind::Closed);
    assert_eq!(queue.flush().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_child_process_is_refused() {
    let (mut queue, mut session) = queue_of(Process::other(), 1);
    assert_eq!(kind(queue.submit(0, Request::flush())), ErrorKind::Forked);
    let polled = queue.poll(&mut Vec::new(), 0, 1, SHORT);
    assert_eq!(polled.unwrap_err().kind(), ErrorKind::Forked);
    assert_eq!(queue.pread(0, &mut [0; 512]).unwrap_err().kind(), ErrorKind::Forked);
    assert!(session.submissions.take().is_none());
}

#[test]
fn requests_fail_after_the_end_of_the_session() {
    let (mut queue, mut session) = queue(4);
    for token in 0..3 {
        queue.submit(token, Request::flush()).unwrap();
    }
    session.end_next();
    drop(session);
    let done = poll(&mut queue, 2, 2, LONG);
    assert_eq!((tokens(&done), done[0].result), (vec![0, 1], Ok(())));
    assert_eq!(done[1].result.unwrap_err().errno(), 103);
    assert_eq!(tokens(&poll(&mut queue, 9, 9, LONG)), [2]);
    let error = queue.flush().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Io(error) if error.errno() == 103), "{error}");
}

#[test]
fn a_blocking_call_leaves_other_completions_to_the_poll() {
    let (mut queue, mut session) = queue(4);
    queue.submit(5, Request::flush()).unwrap();
    let other = session.take().slot;
    let thread = thread::spawn(move || {
        queue.flush().unwrap();
        let readable = is_readable(&queue);
        let done = poll(&mut queue, 1, 1, LONG);
        (readable, tokens(&done))
    });
    let own = loop {
        match session.submissions.take() {
            Some(submission) => break submission.slot,
            None => thread::yield_now(),
        }
    };
    session.end(other, IoStatus::Ok);
    session.end(own, IoStatus::Ok);
    assert_eq!(thread.join().unwrap(), (true, vec![5]));
}

/// Whether the descriptor of a queue is readable.
fn is_readable(queue: &Queue) -> bool {
    let fd = queue.as_fd().try_clone_to_owned().unwrap();
    let mut word = [0; 8];
    io::Read::read(&mut std::fs::File::from(fd), &mut word).is_ok()
}

#[test]
fn a_blocking_call_is_bounded_and_its_late_completion_is_dropped() {
    let (mut queue, mut session) = queue(2);
    queue.set_wait_max(SHORT);
    assert_eq!(queue.flush().unwrap_err().kind(), ErrorKind::TimedOut);
    let late = session.take().slot;
    assert_eq!(queue.inflight(), 1);
    assert_eq!(queue.flush().unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(queue.flush().unwrap_err().kind(), ErrorKind::TimedOut, "the queue is full");
    session.end(late, IoStatus::Ok);
    session.end_next();
    assert!(poll(&mut queue, 0, 9, SHORT).is_empty());
    assert_eq!(queue.inflight(), 0);
}
