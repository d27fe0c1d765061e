//! Tests of two gateways for one Ceph image: fio writes through one session and verifies, while the
//! export moves between the gateways in every way. Then fio writes other data to the same blocks,
//! and the previous gateway's fault ends: its late writes would be detected. The longest IO in each
//! round is printed. `RTRS_GATEWAY_ROUNDS` sets the number of rounds of each kind (1 by default).

use std::time::{Duration, Instant};

use rtrs_core::tests::Ceph;
use rtrs_tests::{
    Cable, Client, Proc, STOP_TIME_MAX, Server, ServerBuilder, requires, skip, wait_for,
};

/// Writes per second; a round consists of 4096.
const RATE: u32 = 500;
/// Time for which a gateway is frozen.
const FROZEN: Duration = Duration::from_secs(20);
/// Maximum time for fio, which verifies what it has written.
const ROUND_MAX: Duration = Duration::from_secs(180);
/// Maximum time for the active gateway to change.
const MOVE_MAX: Duration = Duration::from_secs(60);

fn rounds() -> usize {
    std::env::var("RTRS_GATEWAY_ROUNDS").ok().and_then(|count| count.parse().ok()).unwrap_or(1)
}

/// Two gateways to an image, and a client with a path to each.
struct Pair {
    ceph: &'static Ceph,
    image: &'static str,
    gateways: [Option<Server>; 2],
    portals: [String; 2],
    client: Client,
    cable: Option<Cable>,
    /// Number of the current fio write pass, which is part of the data.
    pass: u8,
}

fn gateway(ceph: &Ceph, image: &str, number: usize) -> ServerBuilder {
    let export = format!("vol0=rbd:rbd/{image},gateway,conf={}", ceph.conf());
    Server::builder().export(export).args(&["--server-id", &format!("gateway{number}")])
}

impl Pair {
    /// Starts the pair. If programs are missing, prints a message and returns None.
    fn start(image: &'static str, options: &[&str]) -> Option<Self> {
        if !Self::can_load() {
            return None;
        }
        Some(Self::over(None, Ceph::get()?, image, options))
    }

    /// Starts the client on its own host, with a cable to each gateway, and the cluster and the
    /// gateways on another host.
    fn start_apart(image: &'static str, options: &[&str]) -> Option<Self> {
        if !Self::can_load() {
            return None;
        }
        let cable = Cable::lay_all(2)?;
        cable.server(&["link", "set", "lo", "up"]);
        // The cluster is stopped when the tests end.
        let ceph = Box::leak(Box::new(Ceph::start_at(cable.hosts()[1].pid())?));
        Some(Self::over(Some(cable), ceph, image, options))
    }

    fn can_load() -> bool {
        if !requires(&["fio"]) {
            return false;
        }
        let engines = Proc::start(command("fio", &["--enghelp"])).wait(MOVE_MAX).stdout;
        if !engines.contains("nbd") {
            skip("fio has no nbd engine");
        }
        engines.contains("nbd")
    }

    fn over(
        cable: Option<Cable>,
        ceph: &'static Ceph,
        image: &'static str,
        options: &[&str],
    ) -> Self {
        ceph.image(image, 16);
        let gateways = [0, 1].map(|number| {
            let gateway = gateway(ceph, image, number);
            let Some(cable) = &cable else { return gateway.start() };
            let listen = format!("tcp://{}:0", Cable::server_address(number));
            gateway.on(cable.hosts()[1]).listen(listen).start()
        });
        let portals = [0, 1].map(|number| gateways[number].portal().to_owned());
        let client = Client::attach("vol0").path(&portals[0]).path(&portals[1]).args(options);
        let client = match &cable {
            Some(cable) => client.on(cable.hosts()[0]),
            None => client,
        };
        let client = client.start();
        Self { ceph, image, gateways: gateways.map(Some), portals, client, cable, pass: 0 }
    }

    fn states(&self) -> Vec<String> {
        let list = self.client.command(&["path", "list", "vol0", "-o", "json"]).ok().json();
        let paths = list.as_array().expect("paths");
        paths.iter().map(|path| path["state"].as_str().expect("a state").to_owned()).collect()
    }

    /// Waits until a gateway serves the volume and returns it.
    fn active(&self) -> usize {
        wait_for("an active gateway", MOVE_MAX, || {
            self.states().iter().position(|state| state == "connected")
        })
    }

    fn gateway(&mut self, number: usize) -> &mut Server {
        self.gateways[number].as_mut().expect("a running gateway")
    }

    fn wait_standby(&self, number: usize) {
        wait_for("the other gateway to be standby", MOVE_MAX, || {
            (self.states()[number] == "standby").then_some(())
        });
    }

    /// Returns how often a gateway has logged that the other has taken over.
    fn losses(&mut self, number: usize) -> usize {
        let words = [
            "the cluster has blocklisted this server: another server has taken over; ending its \
             sessions",
            "another server has taken over; ending its sessions",
        ];
        let output = self.gateway(number).output();
        words.iter().map(|words| output.matches(words).count()).sum()
    }

    /// Writes the whole image with data unique to this pass, or verifies that data.
    fn fio(&self, more: &[&str]) -> Proc {
        let (uri, pass) = (self.client.uri(), self.pass);
        let uri = format!("--uri={uri}");
        let data = format!("--verify_pattern={pass:#04x}%o");
        let job = ["--name=v", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=4k", "--size=16M"];
        let check = ["--iodepth=8", "--verify=pattern", &data, "--verify_fatal=1"];
        let out = ["--verify_state_save=0", "--output-format=json"];
        let words = [&job[..], &check, &out, more].concat();
        Proc::start(command("fio", &words))
    }

    /// Runs fio with a `fault` in the middle. The fault ends after fio has written and verified,
    /// and then written other data. Returns the longest write.
    fn round<T>(
        &mut self,
        fault: impl FnOnce(&mut Self, usize) -> T,
        end: impl FnOnce(&mut Self, usize, T),
    ) -> Duration {
        self.pass = self.pass % 250 + 1;
        let rate = format!("--rate_iops={RATE}");
        let fio = self.fio(&[&rate]);
        std::thread::sleep(Duration::from_secs(2));
        let active = self.active();
        let under_way = fault(self, active);
        let done = fio.wait(ROUND_MAX).ok();
        let begin = done.stdout.find('{').expect("the results of fio");
        let results: serde_json::Value =
            serde_json::from_str(&done.stdout[begin..]).expect("the results of fio");
        let job = &results["jobs"][0];
        assert_eq!(job["error"], 0, "{job}");
        assert_eq!(job["write"]["total_ios"], 4096, "{job}");
        self.pass += 1;
        let _ = self.fio(&["--do_verify=0"]).wait(ROUND_MAX).ok();
        end(self, active, under_way);
        // No late write from the previous gateway has landed since.
        let _ = self.fio(&["--verify_only=1"]).wait(ROUND_MAX).ok();
        Duration::from_nanos(job["write"]["clat_ns"]["max"].as_u64().expect("the longest write"))
    }

    /// Runs rounds of one kind and prints their median and maximum.
    fn rounds<T>(
        &mut self,
        what: &str,
        mut fault: impl FnMut(&mut Self, usize) -> T,
        mut end: impl FnMut(&mut Self, usize, T),
    ) {
        let mut longest: Vec<Duration> = Vec::new();
        for _ in 0..rounds() {
            let took = self.round(&mut fault, &mut end);
            eprintln!("{what}: the longest IO took {} ms", took.as_millis());
            longest.push(took);
        }
        longest.sort_unstable();
        let (p50, max) = (longest[longest.len() / 2], longest[longest.len() - 1]);
        eprintln!(
            "{what}: {} rounds: p50 {} ms, longest {} ms",
            longest.len(),
            p50.as_millis(),
            max.as_millis()
        );
    }

    /// Returns the addresses of the gateways that have the image open.
    fn watchers(&self) -> Vec<String> {
        let watchers = self.ceph.watchers(&format!("rbd/{}", self.image));
        assert!(!watchers.is_empty(), "no client has the image open");
        watchers
    }

    /// Waits until another gateway serves the volume.
    fn wait_moved(&self, from: usize) {
        wait_for("the other gateway", MOVE_MAX, || (self.active() != from).then_some(()));
    }

    fn finish(self) {
        drop(self.client);
        for gateway in self.gateways.into_iter().flatten() {
            let _ = gateway.stop(STOP_TIME_MAX);
        }
    }
}

fn command(program: &str, args: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    command.args(args);
    command
}

#[test]
fn planned_moves_and_a_stalled_osd_lose_nothing() {
    let Some(mut pair) = Pair::start("planned", &[]) else { return };
    // Other tests cause their clients to be blocklisted in the same cluster.
    let mut ours = pair.watchers();
    let drain = |pair: &mut Pair, active| {
        let _ = pair.gateway(active).command(&["export", "drain", "vol0"]).ok();
        pair.wait_moved(active);
    };
    pair.rounds("planned move", drain, |pair, active, ()| pair.wait_standby(active));
    ours.extend(pair.watchers());
    let blocklist = pair.ceph.run("ceph", &["osd", "blocklist", "ls"]);
    for gateway in ours {
        assert!(!blocklist.contains(&gateway), "{gateway} is blocklisted: {blocklist}");
    }
    let stop = |pair: &mut Pair, active: usize| {
        pair.ceph.signal_osd("STOP");
        std::thread::sleep(Duration::from_secs(5));
        pair.ceph.signal_osd("CONT");
        assert_eq!(pair.active(), active, "a stalled OSD moves nothing");
    };
    pair.rounds("OSD stopped for 5 s", stop, |_, _, ()| {});
    pair.finish();
}

#[test]
fn a_killed_gateway_loses_nothing() {
    let Some(mut pair) = Pair::start("killed", &[]) else { return };
    let kill = |pair: &mut Pair, active: usize| {
        pair.gateways[active].take().expect("a running gateway").crash();
        pair.wait_moved(active);
    };
    pair.rounds("gateway killed", kill, |pair, active, ()| {
        let portal = pair.portals[active].clone();
        let again = gateway(pair.ceph, pair.image, active).listen(portal).start();
        pair.gateways[active] = Some(again);
        pair.wait_standby(active);
    });
    pair.finish();
}

#[test]
fn a_frozen_gateway_writes_nothing_when_it_resumes() {
    // Heartbeats end the frozen gateway's path while its kernel still acknowledges data.
    let fast = ["--heartbeat", "200ms", "--heartbeat-missed-max", "5"];
    let Some(mut pair) = Pair::start("frozen", &fast) else { return };
    let freeze = |pair: &mut Pair, active| {
        let losses = pair.losses(active);
        pair.gateway(active).signal("STOP");
        let end = Instant::now() + FROZEN;
        pair.wait_moved(active);
        (end, losses)
    };
    pair.rounds("gateway frozen for 20 s", freeze, |pair, active, (end, losses)| {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        pair.gateway(active).signal("CONT");
        wait_for("a logged loss", MOVE_MAX, || (pair.losses(active) > losses).then_some(()));
        pair.wait_standby(active);
    });
    pair.finish();
}

#[test]
fn a_gateway_that_a_client_cannot_reach_loses_nothing() {
    let Some(mut pair) = Pair::start_apart("cut", &[]) else { return };
    let pull = |pair: &mut Pair, active| {
        let losses = pair.losses(active);
        pair.cable.iter().for_each(|cable| cable.pull_one(active));
        pair.wait_moved(active);
        // The gateway can still reach the cluster.
        wait_for("a logged loss", MOVE_MAX, || (pair.losses(active) > losses).then_some(()));
    };
    pair.rounds("client cut off from the gateway", pull, |pair, active, ()| {
        pair.cable.iter().for_each(|cable| cable.plug_one(active));
        pair.wait_standby(active);
    });
    pair.finish();
}
