//! Scene: a server and a session under load, with a proxy on each path if the test wants proxies.
//! Each scene has its own addresses in 127.0.0.0/8, so that no other process can take a server's
//! port while the server is down.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use rtrs_tests::{
    Client, STOP_TIME_MAX, Scratch, Server, ServerBuilder, quick, sparse_file, wait_for,
};
use serde_json::Value;

use super::load::Load;
use super::proxy::Proxy;

/// Maximum time to detect a dead path or to reconnect it: many times what is needed.
pub(crate) const PATH_TIME_MAX: Duration = Duration::from_secs(60);

/// Number of the next scene. It distinguishes scenes of one process; the process ID distinguishes
/// those of different processes.
static SCENES: AtomicU8 = AtomicU8::new(1);

/// Scene under load.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) load: Load,
    pub(crate) client: Client,
    pub(crate) proxies: Vec<Proxy>,
    server: Option<Server>,
    /// Portals that the client's paths connect to.
    paths: Vec<String>,
    /// Portals that the server listens on.
    listens: Vec<String>,
    scratch: Scratch,
}

/// Returns addresses in 127.0.0.0/8 that no other scene on this machine uses.
pub(crate) fn addresses(count: usize) -> Vec<String> {
    let scene = SCENES.fetch_add(1, Ordering::Relaxed);
    let [.., high, low] = std::process::id().to_be_bytes();
    let network = |path| 64 + 32 * path + usize::from(high % 32);
    (0..count).map(|path| format!("127.{}.{low}.{scene}", network(path))).collect()
}

impl Scene {
    /// Starts a session whose paths connect directly to the server.
    pub(crate) fn direct(paths: usize, args: &[&str]) -> Self {
        Self::start(paths, false, args)
    }

    /// Starts a session whose paths each use a proxy.
    pub(crate) fn proxied(paths: usize, args: &[&str]) -> Self {
        Self::start(paths, true, args)
    }

    fn start(count: usize, proxied: bool, args: &[&str]) -> Self {
        let ips = addresses(count);
        let scratch = Scratch::new();
        sparse_file(&scratch.path("vol0.img"), 16 << 20);
        let any_port = |ip: &String| format!("tcp://{ip}:0");
        let server = server(&scratch, &ips.iter().map(any_port).collect::<Vec<_>>()).start();
        let listens = server.portals().to_vec();
        let ends = ips.iter().zip(&listens).filter(|_| proxied);
        let proxies: Vec<Proxy> = ends.map(|(ip, portal)| Proxy::start(ip, portal)).collect();
        let paths =
            if proxied { proxies.iter().map(Proxy::portal).collect() } else { listens.clone() };
        let builder = Client::attach("vol0").args(&["--shards", "2"]).args(args);
        let client = paths.iter().fold(builder, |builder, path| builder.path(path)).start();
        let load = Load::start(&client);
        let scene = Self { load, client, proxies, server: Some(server), paths, listens, scratch };
        scene.wait_connected();
        scene
    }

    pub(crate) fn server(&self) -> &Server {
        self.server.as_ref().expect("a server")
    }

    /// Sends the server a signal.
    pub(crate) fn signal(&mut self, name: &str) {
        self.server.as_mut().expect("a server").signal(name);
    }

    /// Kills the server.
    pub(crate) fn crash(&mut self) {
        self.server.take().expect("a server").crash();
    }

    /// Starts the server again, with the same file on the same addresses.
    pub(crate) fn restart(&mut self) {
        self.server = Some(server(&self.scratch, &self.listens).start());
    }

    fn ask(&self, what: &str) -> Value {
        ask(&self.client, what)
    }

    pub(crate) fn status(&self) -> Value {
        self.ask("status")
    }

    pub(crate) fn stats(&self) -> Value {
        self.ask("stats")
    }

    /// Returns the log of the session's process.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.client.run_dir().join("vol0.log")).expect("the log")
    }

    /// Returns a path, as `status` or `stats` shows it.
    pub(crate) fn path<'a>(&self, shown: &'a Value, path: usize) -> &'a Value {
        let paths = shown["paths"].as_array().expect("paths");
        let found = paths.iter().find(|one| one["path"] == *self.paths[path]);
        found.unwrap_or_else(|| panic!("no {} in {shown}", self.paths[path]))
    }

    /// Returns the number of reconnects of a path.
    pub(crate) fn reconnects(&self, path: usize) -> u64 {
        self.path(&self.status(), path)["reconnects"].as_u64().expect("a number")
    }

    /// Returns the number of requests that were resent because their path died.
    pub(crate) fn failovers(&self, path: usize) -> u64 {
        self.path(&self.stats(), path)["failovers"].as_u64().expect("a number")
    }

    /// Waits until a path's status satisfies a condition.
    pub(crate) fn wait_path(&self, path: usize, what: &str, is: impl Fn(&Value) -> bool) {
        wait_for(&format!("path {path}: {what}"), PATH_TIME_MAX, || {
            is(self.path(&self.status(), path)).then_some(())
        });
    }

    /// Waits until a path is connected and has reconnected at least this many times.
    pub(crate) fn wait_reconnected(&self, path: usize, times: u64) {
        self.wait_path(path, "to reconnect", |path| {
            path["state"] == "connected" && path["reconnects"].as_u64() >= Some(times)
        });
    }

    /// Waits until all paths are connected.
    pub(crate) fn wait_connected(&self) {
        (0..self.paths.len()).for_each(|path| self.wait_reconnected(path, 0));
    }

    /// Checks that a path has never been disturbed.
    pub(crate) fn check_undisturbed(&self, path: usize) {
        let (status, stats) = (self.status(), self.stats());
        let shown = self.path(&status, path);
        assert_eq!(shown["reconnects"], 0, "{shown}");
        assert_eq!(shown["state"], "connected", "{shown}");
        assert_eq!(self.path(&stats, path)["failovers"], 0, "{stats}");
    }

    /// Checks that no IO of any kind has ended with an error, and shuts everything down.
    pub(crate) fn end(self) {
        assert_eq!(self.load.errors(), 0, "IO errors; the log:\n{}", self.log());
        let stats = self.stats();
        for (op, count) in stats["ops"].as_object().expect("operations") {
            assert_eq!(count["errors"], 0, "{op} in {stats}");
        }
        assert_eq!(stats["nbd"]["failed"], 0, "{stats}");
        self.end_after_errors();
    }

    /// Shuts everything down after a test that expects IO errors.
    pub(crate) fn end_after_errors(mut self) {
        self.wait_connected();
        self.load.end();
        self.client.detach();
        let _ = self.server.take().expect("a server").stop(STOP_TIME_MAX);
    }
}

/// Returns the answer of `status` or `stats`. Paths are missing from the answer if their core has
/// not run for 2 s, as on a starved machine: in that case, the command is repeated.
pub(crate) fn ask(client: &Client, what: &str) -> Value {
    wait_for(&format!("{what} with paths"), PATH_TIME_MAX, || {
        let shown = match what {
            "status" => client.status(),
            _ => client.command(&[what, "vol0", "-o", "json"]).ok().json(),
        };
        shown["paths"].as_array().is_some_and(|paths| !paths.is_empty()).then_some(shown)
    })
}

impl Drop for Scene {
    /// Shows the logs of both ends if the test has failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.client.run_dir().join("vol0.log"));
            eprintln!("the client's log:\n{}", log.unwrap_or_default());
            let output = self.server.as_ref().map(Server::output);
            eprintln!("the server's:\n{}", output.unwrap_or_default());
        }
    }
}

fn server(scratch: &Scratch, listens: &[String]) -> ServerBuilder {
    let builder = Server::builder()
        .export(format!("vol0={}", scratch.text("vol0.img")))
        .args(&["--state-dir", &scratch.text("state")]);
    listens.iter().fold(builder, |builder, listen| builder.listen(listen))
}

/// Returns how many times a fault is injected: `usual` times, once in quick runs, or more often if
/// the environment asks for a table.
pub(crate) fn rounds(usual: usize) -> usize {
    let asked = std::env::var("RTRS_FAULT_ROUNDS").ok();
    let more = asked.map_or(1, |n| n.parse().expect("RTRS_FAULT_ROUNDS: a number"));
    if quick() { more } else { usual * more }
}

/// Prints a line of the table in docs/explanation/testing.md: the fault, its count, and the median
/// and maximum of the longest IO of each round.
pub(crate) fn print_longest(what: &str, mut longest: Vec<Duration>) {
    longest.sort_unstable();
    let (middle, most) = (longest[(longest.len() - 1) / 2], longest[longest.len() - 1]);
    let count = longest.len();
    println!("| {what} | {count} | {} | {} |", middle.as_millis(), most.as_millis());
}
