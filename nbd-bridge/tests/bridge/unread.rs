//! Tests of clients that do not read their replies, alongside others that do.

use std::io::Write;
use std::sync::atomic::Ordering::SeqCst;

use nbd_bridge::BridgeConfig;

use crate::client::{Client, READ, pattern, request};
use crate::fixture::config;
use crate::neighbors::Many;

const MIB: u32 = 1 << 20;

/// Reads of the same length.
#[derive(Clone, Copy, Debug)]
struct Reads {
    len: u32,
    count: u64,
}

/// A client that has read no replies to the requests that it has sent.
struct Deaf {
    client: Client,
    reads: Reads,
}

impl Many {
    /// Fills the disk of a bridge with bytes that depend on their position.
    fn fill(&self, at: usize) -> Vec<u8> {
        let mut disk = self.switches[at].disk.lock().unwrap();
        *disk = pattern(at as u64, disk.len());
        disk.clone()
    }

    /// Connects a client that sends these reads, or as many as the bridge accepts, but reads
    /// nothing.
    fn deaf(&mut self, at: usize, structured: bool, reads: Reads) -> Deaf {
        let Reads { len, count } = reads;
        let client = self.client(at, structured);
        client.stream.set_nonblocking(true).unwrap();
        let requests: Vec<Vec<u8>> =
            (0..count).map(|cookie| request(READ, 0, cookie, offset(cookie, len), len)).collect();
        let mut sent = 0;
        for request in &requests {
            match (&client.stream).write(request) {
                Ok(count) => assert_eq!(count, request.len(), "a small message is not truncated"),
                Err(_) => break,
            }
            sent += 1;
        }
        self.settle();
        client.stream.set_nonblocking(false).unwrap();
        Deaf { client, reads: Reads { len, count: sent } }
    }

    /// Reads the replies of a client that has read none before, and checks their data.
    fn catch_up(&mut self, deaf: Deaf, disk: &[u8]) {
        let Deaf { client: mut reader, reads: Reads { len, count } } = deaf;
        reader.stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let disk = disk.to_vec();
        let thread = std::thread::spawn(move || {
            let mut seen = vec![false; usize::try_from(count).unwrap()];
            for _ in 0..count {
                let reply = reader.reply(|_| len as usize);
                let at = usize::try_from(offset(reply.cookie, len)).unwrap();
                assert_eq!(reply.error, 0);
                assert!(reply.data == disk[at..at + len as usize], "{} differs", reply.cookie);
                let first = !std::mem::replace(&mut seen[reply.cookie as usize], true);
                assert!(first, "{} is answered twice", reply.cookie);
            }
            reader
        });
        self.join(thread);
    }
}

/// Offset of a read, within 64 MiB.
fn offset(cookie: u64, len: u32) -> u64 {
    cookie * u64::from(len) % (64 << 20)
}

#[test]
fn large_reads_of_others_do_not_wait_for_a_client_that_does_not_read() {
    for (len, count) in [(32 * MIB, 3), (MIB, 60), (256 << 10, 300)] {
        for structured in [false, true] {
            let mut many = Many::new(1, config());
            let disk = many.fill(0);
            let deaf = many.deaf(0, structured, Reads { len, count });
            for other in [false, true] {
                let mut client = many.client(0, other);
                let what = format!("{len} {structured} {other}");
                for size in [MIB, 32 * MIB, 4096, 4 * MIB] {
                    assert_eq!(many.read(&mut client, 0, size), Some(0), "{what}: {size}");
                }
            }
            many.catch_up(deaf, &disk);
            many.settle();
        }
    }
}

#[test]
fn many_clients_that_do_not_read_leave_memory_and_rows_for_others() {
    for (len, count) in [(MIB, 60), (4096, 2000), (128 << 10, 200)] {
        let mut many = Many::new(1, BridgeConfig::default());
        let disk = many.fill(0);
        let reads = Reads { len, count };
        let mut deaf: Vec<_> = (0..16).map(|n| many.deaf(0, n % 2 == 0, reads)).collect();
        for other in [false, true] {
            let mut client = many.client(0, other);
            for size in [4096, MIB, 32 * MIB] {
                assert_eq!(many.read(&mut client, 0, size), Some(0), "{len} {other}: {size}");
            }
        }
        // One reads all, one disconnects, the others stay.
        many.catch_up(deaf.swap_remove(3), &disk);
        deaf.swap_remove(4).client.leave();
        many.settle();
        assert_eq!(many.bridges[0].connections(), 14);
        deaf.into_iter().for_each(|deaf| deaf.client.leave());
        many.settle();
        assert_eq!((many.bridges[0].connections(), many.bridges[0].inflight()), (0, 0));
        many.bridges[0].check();
    }
}

/// Devices share the memory, and a bridge's share is less than its clients could hold.
#[test]
fn clients_that_do_not_read_do_not_hold_up_others_where_devices_share_memory() {
    let mut many = Many::new(12, config());
    let disk = many.fill(1);
    let reads = Reads { len: MIB, count: 40 };
    let mut deaf: Vec<_> = (0..6).map(|n| many.deaf(1, n % 2 == 0, reads)).collect();
    let mut client = many.client(1, true);
    for size in [4096, MIB, 32 * MIB] {
        assert_eq!(many.read(&mut client, 0, size), Some(0), "{size}");
    }
    many.catch_up(deaf.swap_remove(0), &disk);
    let mut neighbor = many.client(2, true);
    assert_eq!(many.read(&mut neighbor, 0, MIB), Some(0), "a client of another device");
}

/// Dropped data is reread, which may fail.
#[test]
fn a_read_that_fails_when_it_is_repeated_is_answered_with_an_error() {
    let mut many = Many::new(1, config());
    many.fill(0);
    let Deaf { client: mut deaf, reads } = many.deaf(0, true, Reads { len: MIB, count: 40 });
    let mut client = many.client(0, true);
    assert_eq!(many.read(&mut client, 0, 32 * MIB), Some(0));
    many.switches[0].fail_every.store(1, SeqCst);
    let thread = std::thread::spawn(move || {
        deaf.stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        (0..reads.count).filter(|_| deaf.reply(|_| MIB as usize).error == 5).count()
    });
    assert!(many.join(thread) > 0, "no data was dropped");
}
