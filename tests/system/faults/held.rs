//! Tests of writes that the disk holds while their path dies: the client's copy of such a write
//! waits for the held write, so that a newer write runs last. If all paths die, the client reports
//! the write as failed; later IO to the same blocks then also waits for the held write, and other
//! IO does not. The server is `rtrs-held`, which is `rtrs-server` with such a disk. The simulator
//! runs a thousand variations of this (`rtrs-sim --held`).

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtrs_tests::{
    Client, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, fill_pattern, quick, wait_for,
};
use serde_json::Value;

use super::EIO;
use super::proxy::{BOTH, Proxy, Way};
use super::scene::{PATH_TIME_MAX, addresses, ask};

/// The way in which a path dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    Closed,
    Silent(&'static [Way]),
}

const DEATHS: [Death; 4] =
    [Death::Closed, Death::Silent(&BOTH), Death::Closed, Death::Silent(&[Way::ToClient])];

impl Death {
    fn strike(self, proxy: &Proxy) {
        match self {
            Self::Closed => proxy.close_all(),
            Self::Silent(ways) => proxy.shut(ways),
        }
    }
}

/// Returns the data of an older and a newer write.
fn two_blocks(offset: u64, seed: u64) -> [[u8; 4096]; 2] {
    let mut data = [[0; 4096]; 2];
    for (data, seed) in data.iter_mut().zip(seed..) {
        fill_pattern(data, offset, seed);
    }
    data
}

struct Stand {
    client: Client,
    proxies: Vec<Proxy>,
    server: Server,
    dir: Scratch,
}

impl Stand {
    fn start(args: &[&str]) -> Self {
        let (dir, ips) = (Scratch::new(), addresses(2));
        let builder = Server::builder().program("rtrs-held").export("vol0=mem:1M");
        let builder = builder.env("RTRS_HELD_DIR", dir.dir().to_str().expect("a plain path"));
        let any_port = |ip: &String| format!("tcp://{ip}:0");
        let server = ips.iter().fold(builder, |builder, ip| builder.listen(any_port(ip))).start();
        let ends = ips.iter().zip(server.portals());
        let proxies: Vec<Proxy> = ends.map(|(ip, portal)| Proxy::start(ip, portal)).collect();
        let client = Client::attach("vol0").args(args);
        let client = proxies.iter().fold(client, |client, proxy| client.path(proxy.portal()));
        Self { client: client.start(), proxies, server, dir }
    }

    fn command(&self, name: &str) {
        let _ = File::create(self.dir.path(name)).expect("create a file");
    }

    /// Waits until the disk has created or removed a file.
    fn wait_file(&self, name: &str, there: bool) {
        wait_for(&format!("the file {name}: {there}"), PATH_TIME_MAX, || {
            (self.dir.path(name).exists() == there).then_some(())
        });
    }

    fn paths(&self, what: &str) -> Vec<Value> {
        let shown = ask(&self.client, what);
        let path = |proxy: &Proxy| {
            let paths = shown["paths"].as_array().expect("paths").iter();
            paths.clone().find(|path| path["path"] == proxy.portal()).expect("a path").clone()
        };
        self.proxies.iter().map(path).collect()
    }

    fn wait_connected(&self) {
        wait_for("both paths", PATH_TIME_MAX, || {
            let paths = self.paths("status");
            paths.iter().all(|path| path["state"] == "connected").then_some(())
        });
    }

    /// Returns one of the session's counters on the server.
    fn count(&self, what: &str) -> u64 {
        self.server.sessions()[0]["io"][what].as_u64().expect("a number")
    }

    /// Holds a write, ends its path, lets the copy arrive, releases the write, and sends a newer
    /// one.
    fn round(&self, round: u64, death: Death) {
        self.wait_connected();
        let (offset, replays) = (4096 * round, self.count("replays"));
        let data = two_blocks(offset, 2 * round);
        let answered = AtomicBool::new(false);
        self.command("hold");
        self.wait_file("armed", true);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut raw = RawNbd::go(self.client.front(), "vol0");
                assert_eq!(raw.write(0, offset, &data[0]), Reply::Error(0));
                answered.store(true, Ordering::Relaxed);
                assert_eq!(raw.write(0, offset, &data[1]), Reply::Error(0));
            });
            self.wait_file("holding", true);
            let busy = |path: &Value| path["inflight"] == 1;
            let on = wait_for("the path of the write", PATH_TIME_MAX, || {
                self.paths("stats").iter().position(busy)
            });
            let proxy = &self.proxies[on];
            death.strike(proxy);
            wait_for("the copy to reach the server", PATH_TIME_MAX, || {
                (self.count("replays") > replays).then_some(())
            });
            // Time for violations: the copy would run and be answered, and the newer write run.
            std::thread::sleep(Duration::from_millis(200));
            assert!(!answered.load(Ordering::Relaxed), "{death:?}: answered before the original");
            // In half of the rounds, late requests from the dead path arrive before the release.
            if round.is_multiple_of(2) {
                proxy.open();
            }
            self.command("release");
            assert!(writer.join().is_ok(), "{death:?}: the writer has panicked");
            proxy.open();
        });
        self.wait_file("release", false);
        wait_for("the server to be done", PATH_TIME_MAX, || {
            (self.count("inflight") == 0).then_some(())
        });
        assert_eq!(self.count("replays"), replays + 1, "{death:?}: one write, one copy");
        let mut found = [0; 4096];
        let read = RawNbd::go(self.client.front(), "vol0").read(offset, &mut found);
        assert_eq!(read, Ok(()));
        assert!(found == data[1], "{death:?}: the older write is on the disk");
    }

    /// Holds a write, ends all paths until it fails, restores them, and sends newer writes.
    fn failed_round(&self, round: u64, death: Death) {
        self.wait_connected();
        let offset = 8192 * round;
        let data = two_blocks(offset, 2 * round);
        // The session's cores accept connections in turn, and each core has its own permits.
        let mut one = RawNbd::go(self.client.front(), "vol0");
        let mut other = RawNbd::go(self.client.front(), "vol0");
        self.command("hold");
        self.wait_file("armed", true);
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| one.write(0, offset, &data[0]));
            self.wait_file("holding", true);
            // All paths are silenced, including new connections, before the first dies: otherwise
            // the write may be resent over the next path.
            self.proxies.iter().for_each(|proxy| proxy.shut(&BOTH));
            self.proxies.iter().for_each(|proxy| death.strike(proxy));
            assert_eq!(failing.join().ok(), Some(Reply::Error(EIO)), "{death:?}");
        });
        self.proxies.iter().for_each(Proxy::open);
        self.wait_connected();
        // A read does not wait. It returns the old data, because the write has not run.
        let mut found = [1; 4096];
        for raw in [&mut one, &mut other] {
            wait_for("IO to resume", PATH_TIME_MAX, || raw.read(offset, &mut found).ok());
        }
        assert!(found == [0; 4096], "{death:?}: the disk holds the write, and it has run");
        let replays = self.count("replays");
        let answered = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let newer = scope.spawn(|| {
                let reply = other.write(0, offset, &data[1]);
                answered.store(true, Ordering::Relaxed);
                reply
            });
            wait_for("the newer write to wait", PATH_TIME_MAX, || {
                (self.count("blocked") == 1).then_some(())
            });
            assert_eq!(self.count("replays"), replays, "{death:?}: it has another permit");
            // This write uses the permit of the failed one.
            assert_eq!(one.write(0, offset + 4096, &data[0]), Reply::Error(0), "elsewhere");
            std::thread::sleep(Duration::from_millis(200));
            assert!(!answered.load(Ordering::Relaxed), "{death:?}: answered before the older one");
            self.command("release");
            assert_eq!(newer.join().ok(), Some(Reply::Error(0)), "{death:?}");
        });
        self.wait_file("release", false);
        wait_for("the server to be done", PATH_TIME_MAX, || {
            (self.count("inflight") == 0).then_some(())
        });
        assert_eq!((self.count("blocked"), self.count("replays")), (0, replays), "{death:?}");
        for (at, wanted) in [(offset, data[1]), (offset + 4096, data[0])] {
            assert_eq!(one.read(at, &mut found), Ok(()));
            assert!(found == wanted, "{death:?}: not the newest data at {at}");
        }
    }
}

#[test]
fn the_newest_data_survives_a_failed_older_write() {
    let stand = Stand::start(&["--shards", "2", "--no-path", "queue-for=500ms"]);
    let deaths = if quick() { &DEATHS[..1] } else { &DEATHS };
    for (round, death) in (1..).zip(deaths) {
        stand.failed_round(round, *death);
    }
    stand.wait_connected();
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}

#[test]
fn the_newest_data_survives_an_older_write_held_by_the_disk() {
    let stand = Stand::start(&[]);
    let deaths = if quick() { &DEATHS[..1] } else { &DEATHS };
    for (round, death) in (1..).zip(deaths) {
        stand.round(round, *death);
    }
    stand.wait_connected();
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}
