//! Tests of NBD clients that close their connection with writes on a silent path, reconnect and
//! write the same blocks: acknowledged data stays, even when the path is given up and its requests
//! are resent.

use std::thread::sleep;
use std::time::Duration;

use rtrs_tests::{Client, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, consts, sparse_file};

use super::proxy::{BOTH, Proxy};
use super::scene::{PATH_TIME_MAX, addresses, ask, rounds};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 8;

#[test]
fn a_write_of_a_closed_nbd_connection_does_not_overwrite_a_newer_one() {
    let ips = addresses(2);
    let scratch = Scratch::new();
    sparse_file(&scratch.path("vol0.img"), 16 << 20);
    let builder = Server::builder().export(format!("vol0={}", scratch.text("vol0.img")));
    let listen = |builder: rtrs_tests::ServerBuilder, ip| builder.listen(format!("tcp://{ip}:0"));
    let server = ips.iter().fold(builder, listen).start();
    let ends = ips.iter().zip(server.portals());
    let proxies: Vec<Proxy> = ends.map(|(ip, portal)| Proxy::start(ip, portal)).collect();
    let builder = Client::attach("vol0").args(&["--shards", "2", "--policy", "min-inflight"]);
    let portals = proxies.iter().map(Proxy::portal);
    let client = portals.fold(builder, |builder, path| builder.path(&path)).start();
    let wait_whole = |client: &Client| {
        rtrs_tests::wait_for("both paths", PATH_TIME_MAX, || {
            let status = ask(client, "status");
            let up = |path: &serde_json::Value| path["state"] == "connected";
            status["paths"].as_array().is_some_and(|all| all.iter().all(up)).then_some(())
        });
    };
    for round in 0..rounds(2) as u8 {
        wait_whole(&client);
        let (old, new) = ([2 * round + 1; BLOCK], [2 * round + 2; BLOCK]);
        proxies[0].shut(&BOTH);
        // Connections are assigned to shards in turn: the third shares the first's shard.
        let mut first = RawNbd::go(client.front(), "vol0");
        for block in 0..BLOCKS {
            let offset = block * BLOCK as u64;
            let _ = first.send_request(0, consts::CMD_WRITE, offset, BLOCK as u32);
            first.send(&old);
        }
        // Gives the shard time to post the writes.
        sleep(Duration::from_millis(20));
        drop(first);
        let mut others = [(), ()].map(|()| RawNbd::go(client.front(), "vol0"));
        for block in 0..BLOCKS {
            let other = &mut others[1 - block as usize / 6];
            assert_eq!(other.write(0, block * BLOCK as u64, &new), Reply::Error(0));
        }
        let mut look = |when: &str| {
            for block in 0..BLOCKS {
                let mut got = [0; BLOCK];
                others[0].read(block * BLOCK as u64, &mut got).expect("a read");
                assert!(got == new, "round {round}, {when}: block {block} holds {}", got[0]);
            }
        };
        look("at once");
        sleep(Duration::from_millis(200));
        proxies[0].open();
        wait_whole(&client);
        sleep(Duration::from_millis(1500));
        wait_whole(&client);
        look("when the path is back");
    }
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
