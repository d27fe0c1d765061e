//! Tests of two clients that write to one export at the same time, as during a live migration: both
//! write to the same block, and no write is undone.

use std::path::Path;
use std::thread;

use rtrs_tests::{Client, Front, RawNbd, Reply, Scratch, Server, quick, sparse_file};

/// Number of bytes in the blocks that both clients write to.
const SPAN: u64 = 4096;
/// Number of bytes in one write.
const PIECE: u64 = 48;

/// Repeatedly writes every second piece, leaving this byte there in the end.
fn write_every_second(front: &Front, first: u64, byte: u8) {
    let mut nbd = RawNbd::go(front, "v");
    let rounds = if quick() { 4 } else { 20 };
    for round in (0..rounds).rev() {
        for at in (first * PIECE..SPAN - PIECE).step_by(2 * PIECE as usize) {
            let bytes = [byte + round; PIECE as usize];
            assert_eq!(nbd.write(0, at, &bytes), Reply::Error(0), "{at}");
        }
    }
}

#[test]
fn two_clients_change_parts_of_the_same_blocks() {
    let scratch = Scratch::new();
    let image = scratch.text("v.img");
    sparse_file(Path::new(&image), 1 << 20);
    for block in ["512", "4096"] {
        let server = Server::builder().export(format!("v={image},block-size={block}")).start();
        let attach = |access, name| {
            let args = ["--access", access, "--session-name", name];
            Client::attach("v").path(server.portal()).args(&args).start()
        };
        let (one, two) = (attach("rw", "one"), attach("migration", "two"));
        thread::scope(|scope| {
            scope.spawn(|| write_every_second(one.front(), 0, 40));
            scope.spawn(|| write_every_second(two.front(), 1, 80));
        });
        let mut bytes = [0; SPAN as usize];
        for client in [&one, &two] {
            let mut nbd = RawNbd::go(client.front(), "v");
            assert_eq!(nbd.read(0, &mut bytes), Ok(()));
            let pieces = bytes.chunks_exact(PIECE as usize).take((SPAN / PIECE) as usize - 1);
            for (at, piece) in pieces.enumerate() {
                let byte = [40, 80][at % 2];
                assert!(piece.iter().all(|own| *own == byte), "piece {at} in blocks of {block}");
            }
        }
        two.detach();
        one.detach();
    }
}
