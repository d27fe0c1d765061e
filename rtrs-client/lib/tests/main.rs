//! Tests of the library `rtrs` with real server processes.
#![forbid(unsafe_code)]

#[path = "../examples/copy.rs"]
#[allow(dead_code, reason = "its main function")]
mod copy;

use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use rtrs::{Buffer, Builder, Completion, ErrorKind, Event, Memory, Queue, Request, Volume};
use rtrs_tests::{COMMAND_TIME_MAX, STOP_TIME_MAX, Scratch, Server, sparse_file, wait_for};

const MIB: u64 = 1 << 20;
const GRACE: Duration = Duration::from_secs(10);

fn open(server: &Server, export: &str) -> (Volume, Vec<Queue>) {
    builder(server, export).open().expect("an open volume")
}

fn builder(server: &Server, export: &str) -> Builder {
    Builder::new(export).path(server.portal())
}

/// Polls until `count` completions have arrived.
fn complete(queue: &mut Queue, count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    let polled = queue.poll(&mut done, count, count, COMMAND_TIME_MAX).expect("a poll");
    assert_eq!(polled, count, "{done:?}");
    done
}

/// Waits for an event that matches `fits`.
fn await_event(volume: &Volume, fits: impl Fn(&Event) -> bool) -> Event {
    wait_for("an event", COMMAND_TIME_MAX, || {
        volume.next_event(Duration::from_secs(1)).expect("this process").filter(&fits)
    })
}

/// Bytes that differ from block to block.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at + seed) % 251) as u8).collect()
}

#[test]
fn every_operation_works() {
    let server = Server::builder().export("vol0=mem:64M").start();
    let (volume, mut queues) = open(&server, "vol0");
    let queue = &mut queues[0];
    let geometry = volume.geometry();
    assert_eq!((geometry.size, geometry.read_only), (64 * MIB, false));
    assert!(volume.identity().expect("a report").is_some_and(|text| text.contains('/')));

    // Written in 128 pieces of different lengths, and read back in two pieces.
    let lens = |at: usize| 512 * (1 + at % 3);
    let data = pattern((0..128).map(lens).sum(), 0);
    let mut rest = &data[..];
    let pieces = (0..128).map(|at| {
        let (piece, after) = rest.split_at(lens(at));
        rest = after;
        Buffer::from(piece.to_vec())
    });
    let pieces = pieces.collect();
    queue.submit(1, Request::write_vectored(4096, pieces).fua()).expect("a write");
    let done = complete(queue, 1).remove(0);
    assert_eq!((done.token, done.result, done.into_buffers().len()), (1, Ok(()), 128));
    let halves = vec![Buffer::zeroed(4096), Buffer::zeroed(data.len() - 4096)];
    queue.submit(2, Request::read_vectored(4096, halves)).expect("a read");
    let done = complete(queue, 1).remove(0);
    assert_eq!(done.result, Ok(()));
    let read: Vec<u8> = done.into_buffers().iter().flat_map(|piece| piece.to_vec()).collect();
    assert!(read == data, "other bytes in pieces");

    // More than one request, at the end of the volume.
    let long = pattern(5 << 19, 7);
    queue.pwrite(64 * MIB - long.len() as u64, &long).expect("a write");
    queue.flush().expect("a flush");
    let mut read = vec![0; long.len()];
    queue.pread(64 * MIB - long.len() as u64, &mut read).expect("a read");
    assert!(read == long, "other bytes");
    queue.submit(3, Request::write_zeroes(0, MIB).no_unmap()).expect("write zeroes");
    assert_eq!(complete(queue, 1)[0].result, Ok(()));
    queue.pread(0, &mut read[..8192]).expect("a read");
    assert!(read[..8192].iter().all(|byte| *byte == 0));
    if geometry.discard {
        queue.submit(4, Request::discard(0, MIB)).expect("a discard");
        assert_eq!(complete(queue, 1)[0].result, Ok(()));
    }

    // Requests that the volume refuses.
    queue.submit(5, Request::read(64 * MIB, Buffer::zeroed(4096))).expect("a read");
    assert!(complete(queue, 1)[0].result.expect_err("a read beyond the end").is_refusal());
    let error = queue.pread(1, &mut [0; 512]).expect_err("a read within a block");
    assert!(matches!(error.kind(), ErrorKind::Io(error) if error.errno() == 22), "{error}");

    let stats = volume.stats().expect("statistics");
    assert_eq!((stats.write.errors, stats.flush.count, stats.inflight), (0, 1, 0), "{stats:?}");
    assert!(stats.paths[0].connected && stats.paths[0].requests > 5, "{stats:?}");
    assert_eq!(volume.close(GRACE), Ok(0));
    assert_eq!(queues[0].flush().expect_err("a closed volume").kind(), ErrorKind::Closed);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn registered_memory_holds_the_data() {
    let server = Server::builder().export("vol0=mem:64M").start();
    let (volume, mut queues) = builder(&server, "vol0").queues(2).open().expect("an open volume");
    let memory = Memory::new(4 << 20).expect("memory");
    volume.register(&memory).expect("a registration");
    volume.register(&memory).expect("the same one");
    let part = |at: usize, len: usize| memory.part(at..at + len).expect("inside");
    for (number, queue) in (0..).zip(&mut queues) {
        let data = pattern(768 << 10, number);
        let (from, to) = (part(number << 20, data.len()), part((2 + number) << 20, data.len()));
        from.copy_from(&data);
        let offset = number as u64 * MIB;
        queue.submit(1, Request::write_from(offset, &from)).expect("a write");
        let done = complete(queue, 1).remove(0);
        assert_eq!((done.token, done.result, done.into_buffers().len()), (1, Ok(()), 0));
        queue.submit(2, Request::read_to(offset, &to)).expect("a read");
        assert_eq!(complete(queue, 1)[0].result, Ok(()));
        let mut read = vec![0; data.len()];
        to.copy_to(&mut read);
        assert!(read == data, "other bytes");
        let long = Request::read_to(0, &part(0, 2 << 20));
        let rejected = queue.submit(3, long).expect_err("more than io-max");
        assert_eq!(rejected.error.kind(), ErrorKind::Invalid);
    }
    volume.unregister(&memory).expect("the end of the registration");
    volume.unregister(&memory).expect("no registration");
    let block = part(0, 4096);
    queues[1].submit(4, Request::read_to(MIB, &block)).expect("a read");
    assert_eq!(complete(&mut queues[1], 1)[0].result, Ok(()));
    let mut read = vec![0; 4096];
    block.copy_to(&mut read);
    assert_eq!(read, pattern(4096, 1));
    let stats = volume.stats().expect("statistics");
    assert_eq!((stats.paths[0].bounced, stats.write.count), (0, 2), "nothing over RDMA");
    drop(volume);
    let server = Server::builder().export("vol0=mem:16M").start();
    let (volume, _queues) = open(&server, "vol0");
    volume.register(&memory).expect("another volume");
    server.crash();
}

#[test]
fn queues_work_on_their_own_threads() {
    let server = Server::builder().export("vol0=mem:64M").start();
    let builder = builder(&server, "vol0").queues(3).queue_depth(16);
    let (volume, queues) = builder.open().expect("an open volume");
    assert_eq!(queues.len(), 3);
    let threads = (0..3_u64).zip(queues).map(|(number, mut queue)| {
        thread::spawn(move || {
            let base = number * 16 * MIB;
            let (mut next, mut done) = (0, Vec::new());
            while next < 1000 || queue.inflight() > 0 {
                while next < 1000 && queue.inflight() < queue.depth() {
                    let data = pattern(4096, next as usize);
                    let write = Request::write(base + next * 4096, data.into());
                    queue.submit(next, write).expect("a write");
                    next += 1;
                }
                queue.poll(&mut done, 1, 100, COMMAND_TIME_MAX).expect("a poll");
                done.drain(..).for_each(|one| assert_eq!(one.result, Ok(()), "{}", one.token));
            }
            let mut block = [0; 4096];
            for number in (0..1000).step_by(97) {
                queue.pread(base + number * 4096, &mut block).expect("a read");
                assert_eq!(block[..], pattern(4096, number as usize));
            }
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
    assert_eq!(volume.stats().expect("statistics").write.count, 3000);
    assert_eq!(volume.close(GRACE), Ok(0));
}

#[test]
fn a_failed_open_gives_a_reason_and_leaves_no_session() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let error = builder(&server, "none").open().expect_err("no such export");
    assert_eq!(error.kind(), ErrorKind::Path, "{error}");
    assert!(error.to_string().contains("ENOENT"), "{error}");
    let (writer, _queues) = open(&server, "vol0");
    let second = builder(&server, "vol0").set("access", "rw");
    let error = second.open().expect_err("a second writer");
    assert_eq!(error.kind(), ErrorKind::Path, "{error}");
    let (reader, mut queues) = builder(&server, "vol0").read_only().open().expect("a reader");
    assert!(reader.geometry().read_only);
    let error = queues[0].pwrite(0, &[0; 512]).expect_err("a write to a reader");
    assert!(matches!(error.kind(), ErrorKind::Io(error) if error.is_refusal()), "{error}");
    drop(writer);
    // The server may still be ending the first session.
    let second = second.retry_for(Duration::from_secs(60));
    let (writer, mut queues) = second.open().expect("the only writer");
    queues[0].pwrite(0, &[0; 512]).expect("a write");
    drop((reader, writer));
    let sessions = || server.sessions().is_empty().then_some(());
    wait_for("the sessions to end", COMMAND_TIME_MAX, sessions);
}

#[test]
fn volume_changes_are_reported_as_events() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("a.img"), 16 * MIB);
    let server = Server::builder().export(format!("vol0={}", scratch.text("a.img"))).start();
    let fails = builder(&server, "vol0").set("no-path", "fail");
    let (volume, mut queues) = fails.open().expect("an open volume");
    queues[0].pwrite(0, &[7; 4096]).expect("a write");
    let _ = server.command(&["export", "resize", "vol0", "--size", "32M"]).ok();
    let resized = Event::Resized { bytes: 32 * MIB };
    await_event(&volume, |event| *event == resized);
    assert_eq!(volume.geometry().size, 32 * MIB);
    queues[0].pwrite(31 * MIB, &[8; 4096]).expect("a write to the new part");
    queues[0].flush().expect("a flush");

    server.crash();
    let lost = Event::Paths { connected: 0, total: 1 };
    await_event(&volume, |event| *event == lost);
    let error = queues[0].pread(0, &mut [0; 4096]).expect_err("no path");
    assert!(matches!(error.kind(), ErrorKind::Io(_)), "{error}");
    let begin = Instant::now();
    assert_eq!(volume.close(Duration::from_secs(1)), Ok(0));
    assert!(begin.elapsed() < STOP_TIME_MAX, "{:?}", begin.elapsed());
    let mut block = [0; 4096];
    let file = std::fs::File::open(scratch.path("a.img")).expect("the file");
    file.read_exact_at(&mut block, 31 * MIB).expect("a read");
    assert_eq!(block, [8; 4096]);
}

#[test]
fn a_close_waits_for_requests_within_its_time_limit() {
    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    let server = server.export("vol0=mem:16M").start();
    let file = |name: &str| held.path(name).exists().then_some(());
    let hold = || {
        std::fs::write(held.path("hold"), "").expect("a file");
        wait_for("the disk to hold writes", COMMAND_TIME_MAX, || file("armed"));
    };
    hold();
    let (volume, mut queues) = open(&server, "vol0");
    queues[0].submit(7, Request::write(0, Buffer::from(vec![5; 4096]))).expect("a write");
    wait_for("the write", COMMAND_TIME_MAX, || file("holding"));
    assert_eq!(volume.close(Duration::from_millis(50)), Ok(1), "it is held");
    let done = complete(&mut queues[0], 1).remove(0);
    assert_eq!((done.token, done.result.expect_err("it was left").errno()), (7, 103));
    assert_eq!(&done.into_buffer().expect("its buffer")[..], [5; 4096]);
    std::fs::write(held.path("release"), "").expect("a file");
    let free = || (!held.path("release").exists()).then_some(());
    wait_for("the disk to be free", COMMAND_TIME_MAX, free);

    // With enough time, the request completes.
    hold();
    let retry = builder(&server, "vol0").retry_for(Duration::from_secs(60));
    let (volume, mut queues) = retry.open().expect("an open volume");
    queues[0].submit(8, Request::write(0, Buffer::from(vec![6; 4096]))).expect("a write");
    wait_for("the write", COMMAND_TIME_MAX, || file("holding"));
    let closing = thread::spawn(move || volume.close(COMMAND_TIME_MAX));
    std::fs::write(held.path("release"), "").expect("a file");
    assert_eq!(closing.join().expect("the close"), Ok(0));
    assert_eq!(complete(&mut queues[0], 1)[0].result, Ok(()));
}

#[test]
fn the_example_copies_a_sparse_volume() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("a.img"), 64 * MIB);
    let file = std::fs::File::options().write(true).open(scratch.path("a.img")).expect("the file");
    let data = pattern(3 << 20, 1);
    file.write_all_at(&data, 17 * MIB).expect("a write");
    std::fs::write(scratch.path("b.img"), vec![0xee; 64 << 20]).expect("a file");
    let export = |name: &str| format!("{name}={}", scratch.text(&format!("{name}.img")));
    let server = Server::builder().export(export("a")).export(export("b")).start();
    let uri = |name: &str| format!("{}/{name}", server.portal());
    let copied = copy::copy(&uri("a"), &uri("b")).expect("a copy");
    assert_eq!(copied.data + copied.holes, 64 * MIB);
    assert!(copied.data >= 3 * MIB && copied.data < 32 * MIB, "{copied:?}");
    let _ = server.stop(STOP_TIME_MAX);
    let same = |name: &str| std::fs::read(scratch.path(name)).expect("a file");
    assert!(same("a.img") == same("b.img"), "the files differ");
}
