//! A disk that holds a write up while its path dies: what the client sends again waits for it, so
//! that the write which follows the first is the last one to run. The server is `rtrs-held`, all of
//! `rtrs-server` with such a disk. The simulator runs this in a thousand variations
//! (`rtrs-sim --held`).

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtrs_tests::{
    Client, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, fill_pattern, quick, wait_for,
};
use serde_json::Value;

use super::proxy::{BOTH, Proxy, Way};
use super::scene::{PATH_TIME_MAX, addresses, ask};

/// How a path dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    Closed,
    Silent(&'static [Way]),
}

const DEATHS: [Death; 4] =
    [Death::Closed, Death::Silent(&BOTH), Death::Closed, Death::Silent(&[Way::ToClient])];

struct Stand {
    client: Client,
    proxies: Vec<Proxy>,
    server: Server,
    dir: Scratch,
}

impl Stand {
    fn start() -> Self {
        let (dir, ips) = (Scratch::new(), addresses(2));
        let builder = Server::builder().program("rtrs-held").export("vol0=mem:1M");
        let builder = builder.env("RTRS_HELD_DIR", dir.dir().to_str().expect("a plain path"));
        let any_port = |ip: &String| format!("tcp://{ip}:0");
        let server = ips.iter().fold(builder, |builder, ip| builder.listen(any_port(ip))).start();
        let ends = ips.iter().zip(server.portals());
        let proxies: Vec<Proxy> = ends.map(|(ip, portal)| Proxy::start(ip, portal)).collect();
        let client = Client::attach("vol0");
        let client = proxies.iter().fold(client, |client, proxy| client.path(proxy.portal()));
        Self { client: client.start(), proxies, server, dir }
    }

    fn command(&self, name: &str) {
        let _ = File::create(self.dir.path(name)).expect("make a file");
    }

    /// Waits until the disk has made a file, or taken it away.
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

    /// A counter of the session at the server.
    fn told(&self, what: &str) -> u64 {
        self.server.sessions()[0]["io"][what].as_u64().expect("a number")
    }

    /// One write is held, its path dies, the copy comes, the disk lets go, a newer write follows.
    fn round(&self, round: u64, death: Death) {
        self.wait_connected();
        let (offset, replays) = (4096 * round, self.told("replays"));
        let mut data = [[0; 4096]; 2];
        for (data, seed) in data.iter_mut().zip(2 * round..) {
            fill_pattern(data, offset, seed);
        }
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
            match death {
                Death::Closed => proxy.close_all(),
                Death::Silent(ways) => proxy.shut(ways),
            }
            wait_for("the copy to be at the server", PATH_TIME_MAX, || {
                (self.told("replays") > replays).then_some(())
            });
            // Time for what must not happen: the copy runs, is answered, and the newer one runs.
            std::thread::sleep(Duration::from_millis(200));
            assert!(!answered.load(Ordering::Relaxed), "{death:?}: answered beside the original");
            // Half the time what is late on the dead path comes before the disk lets go.
            if round.is_multiple_of(2) {
                proxy.open();
            }
            self.command("release");
            assert!(writer.join().is_ok(), "{death:?}: the writer has panicked");
            proxy.open();
        });
        self.wait_file("release", false);
        wait_for("the server to be done", PATH_TIME_MAX, || {
            (self.told("inflight") == 0).then_some(())
        });
        assert_eq!(self.told("replays"), replays + 1, "{death:?}: one write, one copy");
        let mut found = [0; 4096];
        let read = RawNbd::go(self.client.front(), "vol0").read(offset, &mut found);
        assert_eq!(read, Ok(()));
        assert!(found == data[1], "{death:?}: the older write is on the disk");
    }
}

#[test]
fn the_newest_data_stays_when_the_disk_held_an_older_write() {
    let stand = Stand::start();
    let deaths = if quick() { &DEATHS[..1] } else { &DEATHS };
    for (round, death) in (1..).zip(deaths) {
        stand.round(round, *death);
    }
    stand.wait_connected();
    stand.client.detach();
    let _ = stand.server.stop(STOP_TIME_MAX);
}
