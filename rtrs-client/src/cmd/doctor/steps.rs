//! Steps of the check. Steps that depend on a failed step are skipped.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::PrivateData;
use rtrs_core::fabric::rdma::{Rdma, RdmaPort};
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::proto::ping::{PingClient, PingClientConfig, PingEvent, PingFailure};
use rtrs_core::rt::{Ring, mailbox};
use rtrs_core::settings::{Portal, Scheme};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::tls::hint;
use rtrs_core::wire::{
    ClientExtensions, ConnReq, ConnRsp, Extensions, PingHello, PingMode, PingStatus, errno_name,
};

use super::route::{Route, route};
use super::{Findings, Step, Verdict};
use crate::cmd::discover::listing::prove;
use crate::cmd::link::{Link, LinkOptions, Watch};
use crate::cmd::ping::Tally;
use crate::cmd::reach::{self, Choice};
use crate::control_protocol::Status;
use crate::daemon::config::random_uuid;
use crate::error::{Error, system};
use crate::tls::TlsSources;

const STEPS: [&str; 10] =
    ["name", "route", "device", "gid", "mtu", "port", "connect", "ping", "bandwidth", "handshake"];
/// Finding for an open port whose service does not speak RTRS.
const NOT_RTRS: &str = "the port is open but does not speak RTRS; check that rtrs-server runs \
                        there, and is neither stopped nor hung";
/// Number of ping rounds.
const ROUNDS: u64 = 20;
/// Duration of the bandwidth measurement in each direction.
const FLOW_TIME: Duration = Duration::from_millis(500);
const FLOW_SIZE: u32 = 65536;
/// Maximum number of bytes that RoCE headers take from an Ethernet MTU (`iboe_get_mtu`).
const ROCE_HEADERS: u32 = 96;

/// Server under test.
struct Target<'a> {
    portal: &'a Portal,
    tls: &'a TlsSources,
    /// First of the portal's addresses that answers.
    remote: SocketAddr,
    /// Time limit for each step.
    timeout: Duration,
}

fn step(at: usize, verdict: Verdict, found: impl Into<String>) -> Step {
    Step { step: STEPS[at], verdict, found: found.into(), remedy: None }
}

fn ok(at: usize, found: impl Into<String>) -> Step {
    step(at, Verdict::Ok, found)
}

fn bad(at: usize, verdict: Verdict, found: impl Into<String>, remedy: impl Into<String>) -> Step {
    Step { remedy: Some(remedy.into()), ..step(at, verdict, found) }
}

pub(super) fn walk(
    portal: &Portal,
    tls: &TlsSources,
    timeout: Duration,
    findings: &mut Findings,
) -> Result<(), Error> {
    if let Some(failed) = try_walk(portal, tls, timeout, findings)? {
        findings.add(failed)?;
        for at in findings.steps.len()..STEPS.len() {
            findings.add(step(at, Verdict::Skip, "not tried"))?;
        }
    }
    Ok(())
}

/// Judges what the session has seen of its virtual machine. Returns None if the volume is not
/// served to a virtual machine.
pub(super) fn guest(status: &Status) -> Option<Step> {
    let step = |verdict, found: &str, remedy: Option<&str>| {
        let remedy = remedy.map(str::to_owned);
        Step { step: "guest", verdict, found: found.to_owned(), remedy }
    };
    let split = |text: &str| {
        let (found, remedy) = text.split_once("; ").unwrap_or((text, "see status"));
        step(Verdict::Fail, found, Some(remedy))
    };
    status.is_for_machine().then(|| match (&status.complaint, status.nbd_clients) {
        (Some(complaint), _) => split(complaint),
        (None, 0) => step(Verdict::Skip, "no virtual machine is connected", None),
        (None, _) => step(Verdict::Ok, "nothing is wrong with the virtual machine's queues", None),
    })
}

/// Performs the steps. Returns the step that failed.
fn try_walk(
    portal: &Portal,
    tls: &TlsSources,
    timeout: Duration,
    findings: &mut Findings,
) -> Result<Option<Step>, Error> {
    let remotes = match portal.resolve() {
        Ok(remotes) => remotes,
        Err(error) => {
            let found = error_text(&error);
            return Ok(Some(bad(0, Verdict::Fail, found, "correct the name, or use an address")));
        }
    };
    let listed: Vec<String> = remotes.iter().map(|a| a.ip().to_string()).collect();
    findings.add(ok(0, format!("{} is {}", portal.host(), listed.join(", "))))?;
    let choice = reach::choose(portal.scheme(), portal.source(), &remotes, timeout)
        .expect("a resolved portal has an address");
    let remote = choice.remote;

    let way = match look_for_route(portal, remote) {
        Ok(way) => way,
        Err(failed) => return Ok(Some(failed)),
    };
    findings.add(way.0)?;
    let way = way.1;

    match portal.scheme() {
        scheme @ (Scheme::Tcp | Scheme::Tls) => {
            findings.add(step(2, Verdict::Skip, format!("{scheme}:// needs no RDMA device")))?;
            findings.add(step(3, Verdict::Skip, format!("{scheme}:// needs no GID")))?;
        }
        Scheme::Rdma => match look_for_device(&way, portal.source()) {
            Err(failed) => return Ok(Some(failed)),
            Ok(steps) => steps.into_iter().try_for_each(|step| findings.add(step))?,
        },
    }
    findings.add(judge_mtu(portal.scheme(), &way))?;

    match portal.scheme() {
        Scheme::Tcp | Scheme::Tls => match judge_port(portal, &choice, timeout) {
            Ok(found) => findings.add(found)?,
            Err(failed) => return Ok(Some(failed)),
        },
        Scheme::Rdma => {
            findings.add(step(5, Verdict::Skip, "rdma:// ports answer connects only"))?
        }
    }
    let mut link = match open_link(portal, tls, timeout) {
        Ok(link) => link,
        Err(failed) => return Ok(Some(failed)),
    };
    let target = Target { portal, tls, remote, timeout };
    if let Some(failed) = ping(&target, &mut link, findings)? {
        return Ok(Some(failed));
    }
    findings.add(handshake(&target, &mut link)?)?;
    Ok(None)
}

/// Opens a provider for the connection, or returns the failed step.
fn open_link(portal: &Portal, tls: &TlsSources, timeout: Duration) -> Result<Link, Step> {
    // Tested separately first, because the error from this call contains the remedy.
    if let Err(error) = Ring::new(1) {
        return Err(bad(6, Verdict::Fail, "cannot set up io_uring", error.to_string()));
    }
    let options = LinkOptions { crc: true, plain: false, timeout };
    Link::open(portal, tls, options).map_err(|error| {
        let remedy = match portal.scheme() {
            Scheme::Tls => "correct the certificates or keys of this client",
            Scheme::Tcp | Scheme::Rdma => "allow this user to use io_uring and RDMA",
        };
        bad(6, Verdict::Fail, error.chain().to_string(), remedy)
    })
}

fn error_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text += &format!(": {cause}");
        next = cause.source();
    }
    text
}

fn look_for_route(portal: &Portal, remote: SocketAddr) -> Result<(Step, Route), Step> {
    let to = remote.ip();
    let way = route(portal.source(), remote).map_err(|error| {
        let (found, remedy) = match portal.source() {
            Some(source) => (
                format!("no route from {source} to {to}: {error}"),
                format!("use a source that this host has (ip addr), or add a route to {to}"),
            ),
            None => {
                (format!("no route to {to}: {error}"), format!("add a route to {to} (ip route)"))
            }
        };
        bad(1, Verdict::Fail, found, remedy)
    })?;
    let from = way.source.map_or_else(|| "an address of the system".into(), |ip| ip.to_string());
    let over = match way.gateway {
        Some(gateway) => format!("{} over {gateway}", way.interface),
        None => way.interface.clone(),
    };
    let found = format!("from {from} via {over}");
    let (rdma, routed) = (portal.scheme() == Scheme::Rdma, way.gateway.is_some());
    let found = if !way.up {
        let remedy = format!("plug the cable in, or ip link set {} up", way.interface);
        return Err(bad(1, Verdict::Fail, format!("{found}, which is down"), remedy));
    } else if rdma && way.interface == "lo" {
        let remedy = "use the addresses of both ends: rdma://SOURCE@HOST";
        bad(1, Verdict::Warn, format!("{found}: RDMA devices carry no loopback traffic"), remedy)
    } else if rdma && routed {
        let remedy = "RoCE v1 is not routable: use RoCE v2 at both ends, or one network";
        bad(1, Verdict::Warn, found, remedy)
    } else {
        ok(1, found)
    };
    Ok((found, way))
}

/// Finds the RDMA device with the source address, and its GID.
fn look_for_device(way: &Route, source: Option<IpAddr>) -> Result<[Step; 2], Step> {
    let rdma = match Rdma::open() {
        Ok(rdma) => rdma,
        Err(missing) => {
            let found = missing.to_string();
            return Err(bad(2, Verdict::Fail, found, "create a device, or use tcp://"));
        }
    };
    let Some(address) = source.or(way.source) else {
        let found = "the kernel reports no source address";
        return Err(bad(2, Verdict::Fail, found, "set one: rdma://SOURCE@HOST"));
    };
    let ports: Vec<RdmaPort> = rdma.ports().cloned().collect();
    judge_device(way, address, &ports)
}

fn judge_device(way: &Route, address: IpAddr, ports: &[RdmaPort]) -> Result<[Step; 2], Step> {
    let name = |port: &RdmaPort| format!("{} port {}", port.device, port.number);
    let by_address = ports.iter().find(|port| port.addresses.contains(&address));
    let by_netdev = ports.iter().find(|port| port.netdev.as_deref() == Some(&*way.interface));
    let Some(port) = by_address.or(by_netdev) else {
        let all: Vec<String> = ports
            .iter()
            .map(|port| format!("{} on {}", name(port), port.netdev.as_deref().unwrap_or("?")))
            .collect();
        let found = format!("none on {} ({})", way.interface, all.join(", "));
        let remedy = format!(
            "rdma link add rxe0 type rxe netdev {}, or use a path over another interface",
            way.interface
        );
        return Err(bad(2, Verdict::Fail, found, remedy));
    };
    let netdev = port.netdev.as_deref().unwrap_or("?");
    let device = format!("{} on {netdev}, {}", name(port), port.state);
    if port.state != "active" {
        let remedy = format!("bring {netdev} up at both ends (ip link set {netdev} up)");
        return Err(bad(2, Verdict::Fail, device, remedy));
    }
    if by_address.is_none() {
        let found = format!("{} has no GID for {address}", name(port));
        let remedy = format!("give {netdev} the address again (ip addr add), or wait a moment");
        return Err(bad(3, Verdict::Fail, found, remedy));
    }
    let gid = ok(3, format!("{} has a GID for {address}", name(port)));
    let device = if port.netdev.is_some() && netdev != way.interface {
        let remedy = format!("name the source address of the route: rdma://SOURCE@HOST ({netdev})");
        bad(2, Verdict::Warn, format!("{device}; the route is via {}", way.interface), remedy)
    } else {
        ok(2, device)
    };
    Ok([device, gid])
}

fn judge_mtu(scheme: Scheme, way: &Route) -> Step {
    let (mtu, interface) = (way.mtu, &way.interface);
    match scheme {
        Scheme::Tcp | Scheme::Tls if mtu >= 1500 => ok(4, format!("{mtu} on {interface}")),
        Scheme::Tcp | Scheme::Tls => {
            let remedy = format!("ip link set {interface} mtu 1500 or more, at both ends");
            bad(4, Verdict::Warn, format!("{mtu} on {interface} is small"), remedy)
        }
        Scheme::Rdma => {
            let rdma = [4096, 2048, 1024, 512, 256].into_iter().find(|m| m + ROCE_HEADERS <= mtu);
            match rdma {
                Some(4096) => ok(4, format!("{mtu} on {interface}, 4096 for RDMA")),
                Some(rdma) => {
                    let remedy = format!(
                        "ip link set {interface} mtu 4200 or more, at both ends and between"
                    );
                    let found = format!("{mtu} on {interface}, {rdma} of 4096 for RoCE");
                    bad(4, Verdict::Warn, found, remedy)
                }
                None => {
                    let remedy = format!("ip link set {interface} mtu 1500 or more");
                    bad(4, Verdict::Warn, format!("{mtu} on {interface} is too small"), remedy)
                }
            }
        }
    }
}

/// Checks that the port accepts TCP connections.
fn judge_port(portal: &Portal, choice: &Choice, timeout: Duration) -> Result<Step, Step> {
    let remote = choice.remote;
    let skipped: Vec<String> = choice
        .skipped
        .iter()
        .map(|(address, error)| format!("{}: {error}", address.ip()))
        .collect();
    match reach::connect(portal.source(), remote, timeout) {
        Ok(()) if skipped.is_empty() => {
            Ok(ok(5, format!("TCP port {} accepts connections", remote.port())))
        }
        Ok(()) => {
            let (port, ip, failed) = (remote.port(), remote.ip(), skipped.join(", "));
            Ok(ok(5, format!("TCP port {port} accepts connections at {ip}, but not at {failed}")))
        }
        Err(error) => {
            let remedy = match error.kind() {
                io::ErrorKind::ConnectionRefused => format!(
                    "start rtrs-server there, or make it listen on {}://{}:{}",
                    portal.scheme(),
                    portal.host(),
                    remote.port()
                ),
                _ => format!(
                    "allow TCP port {} in firewalls; check that the host is up",
                    remote.port()
                ),
            };
            Err(bad(5, Verdict::Fail, format!("TCP port {}: {error}", remote.port()), remedy))
        }
    }
}

/// Observer that counts without output.
#[derive(Default)]
struct Silent {
    tally: Tally,
    connected: Option<Duration>,
}

impl Watch for Silent {
    fn event(&mut self, _now: Instant, at: usize, event: PingEvent) {
        if let PingEvent::Connected { after } = event {
            self.connected = Some(after);
        }
        self.tally.take(at, event);
    }

    fn tick(&mut self, _now: Instant, _clients: &[PingClient]) {}

    fn tick_every(&self) -> Option<Duration> {
        None
    }
}

fn run_ping(
    target: &Target<'_>,
    link: &mut Link,
    hello: PingHello,
    limit: Option<Duration>,
) -> Result<(PingClient, Silent), Error> {
    let config = PingClientConfig {
        local: target.portal.source(),
        remote: target.remote,
        hello,
        rping: false,
        count: if limit.is_some() { 0 } else { ROUNDS },
        interval: Duration::ZERO,
        validate: true,
        timeout: target.timeout,
    };
    let mut clients = [PingClient::new(config)];
    let mut watch = Silent::default();
    let (_, stop) = mailbox().map_err(system("cannot create a mailbox"))?;
    link.ping(&mut clients, &mut watch, stop, limit).map_err(system("the ping's thread failed"))?;
    let [client] = clients;
    Ok((client, watch))
}

/// Performs the connect, ping and bandwidth steps. Returns the step that failed.
fn ping(
    target: &Target<'_>,
    link: &mut Link,
    findings: &mut Findings,
) -> Result<Option<Step>, Error> {
    let hello = PingHello {
        mode: PingMode::PingPong,
        duplex: false,
        server_invalidate: false,
        read_invalidate: false,
        depth: 16,
        size: 64,
    };
    let (client, watch) = run_ping(target, link, hello, None)?;
    match judge_connect(target, &watch) {
        Ok(connected) => findings.add(connected)?,
        Err(failed) => return Ok(Some(failed)),
    }
    if let Some(missing) = missing_ping(&watch) {
        findings.add(missing)?;
        findings.add(step(8, Verdict::Skip, "needs the ping"))?;
        return Ok(None);
    }
    match judge_rounds(&client, &watch) {
        Ok(rounds) => findings.add(rounds)?,
        Err(failed) => return Ok(Some(failed)),
    }
    match bandwidth(target, link, hello)? {
        Ok(speeds) => findings.add(speeds)?,
        Err(failed) => return Ok(Some(failed)),
    }
    Ok(None)
}

/// Judges whether the server answered the connect of a ping. A refusal is an answer too.
fn judge_connect(target: &Target<'_>, watch: &Silent) -> Result<Step, Step> {
    let &Target { portal, tls, .. } = target;
    let scheme = portal.scheme();
    let failure = watch.tally.failures.first().map(|(_, failure)| failure);
    let found = match (watch.connected, failure) {
        (Some(after), _) => format!("{scheme}:// in {:.3} ms", after.as_secs_f64() * 1e3),
        (None, Some(PingFailure::Refused(_) | PingFailure::NoPing(_))) => {
            format!("{scheme}:// answers")
        }
        (None, failure) => {
            let found = failure.map_or_else(|| "no connection".into(), ToString::to_string);
            let remedy = match scheme {
                Scheme::Tcp | Scheme::Tls => hint(&found).unwrap_or(NOT_RTRS),
                Scheme::Rdma => {
                    "check that rtrs-server listens there on rdma:// and UDP port 4791 is open"
                }
            };
            return Err(bad(6, Verdict::Fail, found, remedy));
        }
    };
    Ok(match tls.unused_by(portal) {
        Some(why) => {
            let found = format!("{found}; {why}");
            bad(
                6,
                Verdict::Warn,
                found,
                "make the server listen on tls://, and connect with tls://",
            )
        }
        None => ok(6, found),
    })
}

/// Returns the finding for a server that answers connects but not pings.
fn missing_ping(watch: &Silent) -> Option<Step> {
    let (_, failure) = watch.tally.failures.first().filter(|_| watch.connected.is_none())?;
    let (found, remedy) = match failure {
        PingFailure::Refused(status) => {
            let remedy = match status {
                PingStatus::Off => "start rtrs-server without --no-ping to run this step",
                PingStatus::Busy => "try again later",
                _ => "see the server's log",
            };
            (failure.to_string(), remedy)
        }
        PingFailure::NoPing(text) => (
            format!("no answer to a ping: {text}"),
            "upgrade the rtrs-server; a kernel server never answers pings",
        ),
        _ => return None,
    };
    Some(bad(7, Verdict::Warn, found, remedy))
}

fn judge_rounds(client: &PingClient, watch: &Silent) -> Result<Step, Step> {
    let failure = watch.tally.failures.first().map(|(_, failure)| failure);
    match (failure, watch.tally.round_mean()) {
        (None, Some(mean)) => Ok(ok(
            7,
            format!(
                "{} of {ROUNDS} rounds of 64 bytes, {:.3} ms each, data correct",
                client.answered(),
                mean.as_secs_f64() * 1e3
            ),
        )),
        (failure, _) => {
            let found = failure.map_or_else(|| "no round".into(), ToString::to_string);
            let remedy = "RDMA reads or writes fail: see the server's log and dmesg";
            Err(bad(7, Verdict::Fail, found, remedy))
        }
    }
}

/// Measures the bandwidth of writes and reads.
fn bandwidth(
    target: &Target<'_>,
    link: &mut Link,
    hello: PingHello,
) -> Result<Result<Step, Step>, Error> {
    let mut speeds = Vec::new();
    for (mode, what) in [(PingMode::WriteBandwidth, "written"), (PingMode::ReadBandwidth, "read")] {
        let hello = PingHello { mode, size: FLOW_SIZE, ..hello };
        let (client, watch) = run_ping(target, link, hello, Some(FLOW_TIME))?;
        if let Some((_, failure)) = watch.tally.failures.first() {
            let found = format!("{what} {} times 64 KiB, then: {failure}", client.answered());
            let remedy = "large packets may be lost: check that all MTUs on the route are equal";
            return Ok(Err(bad(8, Verdict::Fail, found, remedy)));
        }
        let bytes = client.answered() as f64 * f64::from(FLOW_SIZE);
        let seconds = client.flight_time().as_secs_f64().max(1e-9);
        speeds.push(format!("{what} {:.0} MiB/s", bytes / 1_048_576.0 / seconds));
    }
    Ok(Ok(ok(8, format!("{} with 64 KiB, 16 in flight", speeds.join(", ")))))
}

/// Remedy for EACCES.
const NOT_LISTED: &str = "no access list on the server names this client: ask its operator to add \
                          NAME:rw (the name in this client's certificate or in clients-file) or \
                          anyone@ADDRESS:rw (this client's address) to access; the server's log \
                          shows both";

/// Creates the private data of the first connection of a new session.
fn first_connect(link: &Link) -> Result<PrivateData, Error> {
    let uuid = || random_uuid().map_err(system("cannot get random numbers"));
    let request = ConnReq {
        cid_num: 1,
        recon_cnt: 1,
        path_uuid: PathUuid(uuid()?),
        session_id: SessionId(uuid()?),
        first_conn: true,
        ext: ClientExtensions {
            authenticates: link.prover().is_some(),
            ..ClientExtensions::default()
        }
        .encode(),
        ..ConnReq::default()
    };
    Ok(PrivateData::new(&request.encode()))
}

fn judge_refusal(response: &ConnRsp) -> Step {
    let errno = response.errno.unsigned_abs();
    let found = format!("no session: the server answers {}", errno_name(errno));
    let remedy = match errno {
        _ if Extensions::decode(&response.ext).authenticate => {
            "use certificates or keys: --tls-dir, or --key-file and --server-key"
        }
        rtrs_core::wire::errno::EOPNOTSUPP => {
            "start rtrs-server without --ping-only; over RDMA, see its --always-invalidate"
        }
        rtrs_core::wire::errno::EACCES => NOT_LISTED,
        rtrs_core::wire::errno::ENOMEM => {
            "raise memory-max at the server, or see its log for the cause"
        }
        rtrs_core::wire::errno::EUSERS => "raise sessions-max at the server, or end sessions there",
        rtrs_core::wire::errno::EDQUOT => {
            "raise half-open-max at the server, or see its log for the limit"
        }
        _ => "see the server's log",
    };
    bad(9, Verdict::Fail, found, remedy)
}

/// Requests the first connection of a session, and disconnects before the session exists.
fn handshake(target: &Target<'_>, link: &mut Link) -> Result<Step, Error> {
    let &Target { portal, remote, timeout, .. } = target;
    let data = first_connect(link)?;
    let knock = match link.knock(portal.source(), remote, data, timeout) {
        Ok(knock) => knock,
        Err(found) => {
            let remedy = "check that rtrs-server or a kernel server listens there";
            return Ok(bad(9, Verdict::Fail, found, remedy));
        }
    };
    let response = match ConnRsp::decode(knock.private_data.as_bytes()) {
        Ok(response) => response,
        Err(error) => {
            let found = format!("the answer is not RTRS: {error}");
            return Ok(bad(9, Verdict::Fail, found, NOT_RTRS));
        }
    };
    if !knock.accepted {
        return Ok(judge_refusal(&response));
    }
    if let Err(error) = prove(link, portal.source(), remote, timeout) {
        let found = error.to_string();
        let remedy = hint(&found).unwrap_or("compare the keys or certificates of both ends");
        return Ok(bad(9, Verdict::Fail, found, remedy));
    }
    let proved = if link.prover().is_some() { ", both ends authenticated" } else { "" };
    Ok(match response.chunk_size() {
        Err(error) => bad(
            9,
            Verdict::Fail,
            format!("the server's limits are not valid: {error}"),
            "correct --queue-depth and --chunk-size of the server",
        ),
        Ok(_) => ok(
            9,
            format!(
                "RTRS in {:.3} ms: {} requests at once, of up to {} KiB{}{proved}",
                knock.after.as_secs_f64() * 1e3,
                response.queue_depth,
                response.max_io_size / 1024,
                if response.new_rkey { ", a fresh key each" } else { "" }
            ),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(interface: &str, mtu: u32) -> Route {
        let source = Some([10, 0, 0, 1].into());
        Route { source, gateway: None, interface: interface.into(), up: true, mtu }
    }

    fn port() -> RdmaPort {
        RdmaPort {
            device: "rxe0".into(),
            number: 1,
            state: "active".into(),
            netdev: Some("eth0".into()),
            addresses: vec![[10, 0, 0, 1].into()],
        }
    }

    #[test]
    fn the_mtu_is_judged_for_each_transport() {
        for (scheme, mtu, verdict, words) in [
            (Scheme::Tcp, 1500, Verdict::Ok, "1500 on eth0"),
            (Scheme::Tcp, 1280, Verdict::Warn, "1280"),
            (Scheme::Rdma, 9000, Verdict::Ok, "4096 for RDMA"),
            (Scheme::Rdma, 4192, Verdict::Ok, "4096"),
            (Scheme::Rdma, 4191, Verdict::Warn, "2048 of 4096"),
            (Scheme::Rdma, 1500, Verdict::Warn, "1024 of 4096"),
            (Scheme::Rdma, 300, Verdict::Warn, "too small"),
        ] {
            let step = judge_mtu(scheme, &way("eth0", mtu));
            assert_eq!(step.verdict, verdict, "{step:?}");
            assert!(step.found.contains(words), "{step:?}");
            assert_eq!(step.remedy.is_some(), verdict != Verdict::Ok);
        }
    }

    #[test]
    fn the_device_of_an_address_is_found() {
        let address = [10, 0, 0, 1].into();
        let [device, gid] = judge_device(&way("eth0", 1500), address, &[port()]).unwrap();
        assert_eq!((device.verdict, gid.verdict), (Verdict::Ok, Verdict::Ok));
        let [device, _] = judge_device(&way("eth9", 1500), address, &[port()]).unwrap();
        assert_eq!(device.verdict, Verdict::Warn);
        let cases = [
            (vec![], "eth0", "device", "rdma link add rxe0 type rxe netdev eth0"),
            (vec![RdmaPort { state: "down".into(), ..port() }], "eth0", "device", "eth0 up"),
            (vec![RdmaPort { addresses: vec![], ..port() }], "eth0", "gid", "ip addr add"),
            (vec![RdmaPort { addresses: vec![], ..port() }], "eth9", "device", "netdev eth9"),
        ];
        for (ports, interface, step, words) in cases {
            let failed = judge_device(&way(interface, 1500), address, &ports).unwrap_err();
            assert_eq!((failed.step, failed.verdict), (step, Verdict::Fail));
            assert!(failed.remedy.as_ref().is_some_and(|r| r.contains(words)), "{failed:?}");
        }
    }
}
