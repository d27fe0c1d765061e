//! Tests of link events on the client: when the kernel reports that a link is up again, a path that
//! is down is retried immediately, however long it still had to wait. The tests need root, because
//! they run on two simulated hosts with a cable between them.

use std::time::{Duration, Instant};

use rtrs_tests::{
    Cable, Client, Innocent, Proc, STOP_TIME_MAX, Scratch, Server, quick, sparse_file, wait_for,
};
use serde_json::Value;

/// Maximum time, on a fully loaded machine, for an event that normally takes well under a second.
const SOON: Duration = Duration::from_secs(60);
/// Waits between attempts that are longer than any test: from 5 to 10 minutes.
const LONG_WAITS: [&str; 2] = ["--reconnect-min=10m", "--reconnect-max=10m"];
/// Log message for a path whose wait was cut short.
const TRYING: &str = "link cable0 is up: trying at once";

/// A server on one host, and a session that uses it on the other.
struct Hosts {
    load: Option<Innocent>,
    process: Proc,
    client: Client,
    server: Server,
    cable: Cable,
    scratch: Scratch,
}

impl Hosts {
    fn server(scratch: &Scratch, cable: &Cable, port: &str) -> Server {
        let export = format!("vol0={}", scratch.text("vol0.img"));
        let listen = format!("tcp://{}:{port}", Cable::SERVER);
        Server::builder().on(cable.hosts()[1]).export(export).listen(listen).start()
    }

    fn start(args: &[&str]) -> Option<Self> {
        let cable = Cable::lay()?;
        let scratch = Scratch::new();
        sparse_file(&scratch.path("vol0.img"), 16 << 20);
        let server = Self::server(&scratch, &cable, "0");
        let mut client = Client::attach("vol0")
            .path(server.portal())
            .on(cable.hosts()[0])
            .args(&["--no-path=queue"])
            .args(args)
            .start_foreground();
        let process = client.take_foreground();
        let load = Innocent::start(client.front(), "vol0");
        Some(Self { load: Some(load), process, client, server, cable, scratch })
    }

    fn path(&self) -> Value {
        let list = self.client.command(&["path", "list", "vol0", "-o", "json"]).ok().json();
        list[0].clone()
    }

    fn wait_state(&self, state: &str) {
        wait_for(state, SOON, || (self.path()["state"] == state).then_some(()));
    }

    /// Waits until the path has ended on the server. Otherwise the server would refuse the attempt,
    /// and the next one would be minutes away.
    fn wait_forgotten(&self) {
        let gone = || self.server.sessions().is_empty().then_some(());
        wait_for("the server's end of the path", SOON, gone);
    }

    /// Returns the number of failed attempts and connections that ended.
    fn ends(&self) -> u64 {
        self.path()["ends"].as_u64().expect("a count")
    }

    fn logged(&self, words: &str) -> usize {
        self.process.output().matches(words).count()
    }

    /// Waits until the log contains this text `count` times; lines may arrive slightly late.
    fn wait_logged(&self, words: &str, count: usize) {
        wait_for(words, SOON, || (self.logged(words) >= count).then_some(()));
    }

    /// Checks that IO continues, and that there has been no error.
    fn check_load(&mut self) {
        let load = self.load.take();
        load.unwrap_or_else(|| Innocent::start(self.client.front(), "vol0")).check();
    }

    fn end(mut self) {
        self.check_load();
        self.client.detach();
        let ended = self.process.wait(STOP_TIME_MAX).ok();
        assert!(!ended.stderr.contains("panicked at"), "{ended:#?}");
        let _ = self.server.stop(STOP_TIME_MAX);
    }
}

#[test]
fn a_path_reconnects_immediately_when_its_link_comes_up() {
    let Some(hosts) = Hosts::start(&LONG_WAITS) else { return };
    for round in 0..3 {
        hosts.cable.pull();
        hosts.wait_state("waiting");
        hosts.wait_forgotten();
        let (ends, tried) = (hosts.ends(), hosts.logged(TRYING));
        hosts.cable.plug();
        hosts.wait_state("connected");
        hosts.wait_logged(TRYING, tried + 1);
        // The link's own addresses and routes cause further events.
        let failed = hosts.ends() - ends;
        assert!(failed <= 3, "{failed} attempts failed in round {round}");
        hosts.load.iter().for_each(Innocent::progress);
    }
    hosts.end();
}

#[test]
fn a_link_switched_off_and_on_triggers_a_reconnect() {
    let Some(hosts) = Hosts::start(&LONG_WAITS) else { return };
    hosts.cable.client(&["link", "set", Cable::LINK, "down"]);
    hosts.wait_state("waiting");
    hosts.wait_forgotten();
    let ends = hosts.ends();
    hosts.cable.client(&["link", "set", Cable::LINK, "up"]);
    hosts.wait_state("connected");
    let failed = hosts.ends() - ends;
    assert!(failed <= 4, "{failed} attempts failed");
    // An address is removed and added again.
    hosts.cable.client(&["addr", "del", "10.99.0.1/24", "dev", Cable::LINK]);
    hosts.wait_state("waiting");
    hosts.wait_forgotten();
    hosts.cable.client(&["addr", "add", "10.99.0.1/24", "dev", Cable::LINK]);
    hosts.wait_state("connected");
    hosts.end();
}

#[test]
fn an_attempt_that_lost_its_first_packet_is_restarted() {
    let Some(hosts) = Hosts::start(&["--connect-timeout=5m"]) else { return };
    hosts.cable.know_server();
    hosts.cable.pull();
    hosts.wait_state("connecting");
    // TCP retransmits after 1, 3, 7 and 15 seconds.
    std::thread::sleep(Duration::from_millis(if quick() { 3500 } else { 8000 }));
    let path = hosts.path();
    assert_eq!(path["state"], "connecting", "{path}");
    hosts.cable.plug();
    hosts.wait_state("connected");
    hosts.wait_logged("link cable0 is up: restarting the attempt", 1);
    let ends = hosts.ends() - path["ends"].as_u64().expect("a count");
    assert_eq!(ends, 1, "the abandoned attempt");
    hosts.end();
}

#[test]
fn a_flapping_network_causes_no_storm_of_attempts() {
    let Some(mut hosts) = Hosts::start(&LONG_WAITS) else { return };
    let port = hosts.server.address().rsplit_once(':').expect("a port").1.to_owned();
    hosts.check_load();
    hosts.server.signal("KILL");
    hosts.wait_state("waiting");
    let (ends, begin) = (hosts.ends(), Instant::now());
    let rounds = if quick() { 60 } else { 200 };
    for _ in 0..rounds {
        hosts.cable.client(&["addr", "add", "10.99.0.77/24", "dev", Cable::LINK]);
        hosts.cable.client(&["addr", "del", "10.99.0.77/24", "dev", Cable::LINK]);
    }
    let attempts = hosts.ends() - ends;
    // The first two attempts are 0.2 s apart, and the interval doubles up to 3.2 s.
    let most = 6 + begin.elapsed().as_millis() / 3200;
    assert!(attempts >= 2, "{attempts} attempts for {rounds} addresses");
    assert!(u128::from(attempts) <= most, "{attempts} attempts, {most} at most");
    hosts.server = Hosts::server(&hosts.scratch, &hosts.cable, &port);
    hosts.cable.client(&["addr", "add", "10.99.0.77/24", "dev", Cable::LINK]);
    hosts.wait_state("connected");
    hosts.end();
}

#[test]
fn a_path_has_a_link_local_source_with_its_zone() {
    let Some(cable) = Cable::lay() else { return };
    let zone = Cable::LINK;
    cable.client(&["addr", "add", "fe80::99:1/64", "dev", zone, "nodad"]);
    cable.server(&["addr", "add", "fe80::99:2/64", "dev", "cable1", "nodad"]);
    let server =
        Server::builder().on(cable.hosts()[1]).export("vol0=mem:1M").listen("tcp://[::]:0").start();
    let (_, port) = server.portal().rsplit_once(':').expect("a port");
    let portal = format!("tcp://[fe80::99:1%{zone}]@[fe80::99:2%{zone}]:{port}");
    let client = Client::attach("vol0").path(&portal).on(cable.hosts()[0]).start();
    let list = client.command(&["path", "list", "vol0", "-o", "json"]).ok().json();
    assert_eq!((&list[0]["path"], &list[0]["state"]), (&portal.into(), &"connected".into()));
    drop(client);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn access_rules_and_pings_name_the_interface_of_a_link_local_address() {
    let Some(cable) = Cable::lay() else { return };
    let zone = Cable::LINK;
    cable.client(&["addr", "add", "fe80::99:1/64", "dev", zone, "nodad"]);
    cable.server(&["addr", "add", "fe80::99:2/64", "dev", "cable1", "nodad"]);
    let server = |access: &str| {
        let builder = Server::builder().on(cable.hosts()[1]).export("vol0=mem:1M");
        builder.listen("tcp://[::]:0").args(&["--access", access]).start()
    };
    let attach = |server: &Server| {
        let (_, port) = server.portal().rsplit_once(':').expect("a port");
        let portal = format!("tcp://[fe80::99:2%{zone}]:{port}");
        Client::attach("vol0").path(&portal).on(cable.hosts()[0]).try_start()
    };
    let here = server("anyone@fe80::%cable1/64:rw");
    let (client, attached) = attach(&here);
    let _ = attached.ok();
    let (_, port) = here.portal().rsplit_once(':').expect("a port");
    let to = format!("tcp://[fe80::99:2%{zone}]:{port}");
    let source = format!("fe80::99:1%{zone}");
    let _ = client.command(&["ping", &to, "-c", "1", "-I", &source]).ok().says("1 answered");
    let refused = client.command(&["ping", &to, "-c", "1", "-I", "fe80::99:1%lo"]).code(2);
    let _ = refused.says("has the zone \"lo\" in its source");
    client.detach();
    drop(client);
    let _ = here.stop(STOP_TIME_MAX);

    // The same address on a different interface, and on one that does not exist.
    for (interface, warned) in [("lo", false), ("none9", true)] {
        let other = server(&format!("anyone@fe80::%{interface}/64:rw"));
        let (client, refused) = attach(&other);
        assert_ne!(refused.code, Some(0), "{refused:?}");
        drop(client);
        if warned {
            other.wait_output("there is no interface none9");
        }
        let _ = other.stop(STOP_TIME_MAX);
    }
}
