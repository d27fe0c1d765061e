//! Tests of metrics: scrapes of both daemons, and whether documents and rules agree with the
//! declarations.
//!
//! To regenerate the tables in docs/reference/metrics.md after changing a declaration:
//! `UPDATE_DOCS=1 cargo test -p rtrs-tests --test system metrics::`

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::metrics::Metric;
use rtrs_core::wire::AccessMode;
use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Exposition, Peer, PeerOptions, RawNbd, Reply, STOP_TIME_MAX, Server,
    quick, requires, scrape, scrape_tcp, wait_for,
};

use super::settings::{holds, root};

/// Page that explains what to do about each alert.
const MONITOR: &str = "docs/how-to/monitor.md";
/// Pages that name metrics.
const PAGES: &[&str] = &[
    MONITOR,
    "docs/how-to/limit.md",
    "docs/how-to/tls.md",
    "docs/how-to/where-time-goes.md",
    "docs/explanation/failed-flushes.md",
    "docs/reference/metrics.md",
];
const SERVER: &[&Metric] = rtrs_server::metrics::ALL;
pub(super) const CLIENT: &[&Metric] = rtrs_client::metrics::ALL;

/// Returns the address at which a daemon serves its metrics.
fn address(server: &Server) -> String {
    wait_for("the address of the metrics", COMMAND_TIME_MAX, || {
        let output = server.output();
        let at = output.split_once("serving metrics address=http://")?.1;
        Some(at.split_once("/metrics")?.0.to_owned())
    })
}

pub(super) fn parse(text: &str) -> Exposition {
    Exposition::parse(text).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// Checks that a text contains only declared metrics, with their types and labels.
pub(super) fn assert_declared(exposition: &Exposition, metrics: &[&Metric]) {
    for family in &exposition.0 {
        let metric = metrics.iter().find(|metric| metric.name == family.name);
        let metric = metric.unwrap_or_else(|| panic!("{} is not declared", family.name));
        assert_eq!(family.kind, metric.kind.name(), "{}", family.name);
        for sample in &family.samples {
            let labels = sample.labels.iter().map(|(name, _)| &**name);
            let labels: Vec<&str> = labels.filter(|name| *name != "le").collect();
            assert_eq!(labels, metric.labels, "{}", family.name);
        }
    }
}

/// Runs `promtool check metrics` on a text, if promtool is installed.
pub(super) fn check_by_promtool(text: &str) {
    if !requires(&["promtool"]) {
        return;
    }
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().expect("promtool");
    let mut input = child.stdin.take().expect("its input");
    std::io::Write::write_all(&mut input, text.as_bytes()).expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    let reported = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && reported.is_empty(), "promtool: {reported}");
}

/// Reply to a successful request.
const DONE: Reply = Reply::Error(0);

/// Names of a volume and its export that need escaping.
const VOLUME: &str = "v\"1";
const EXPORT: &str = "a\"b";
const SESSION: &str = "c\\d";

#[test]
fn both_daemons_count_their_work() {
    let server = Server::builder()
        .export(format!("{EXPORT}=mem:16M,delay=2ms"))
        .export("bad=mem:16M,error-rate=1")
        .export("unused=null:1M")
        .args(&["--metrics", "127.0.0.1:0", "--shards", "2"])
        .start();
    let at = address(&server);
    let socket = format!("{}/metrics.sock", server.run_dir().display());
    let metrics = format!("unix:{socket}");
    let args = ["--as", VOLUME, "--metrics", &metrics, "--session-name", SESSION, "--shards", "2"];
    let portal = server.portal();
    let client = Client::attach(EXPORT).path(portal).args(&args).start();
    let mut raw = RawNbd::go(client.front(), VOLUME);
    for at in 0..5 {
        assert_eq!(raw.write(0, at * 8192, &[7; 8192]), DONE);
        raw.read(at * 8192, &mut [0; 4096]).expect("a read");
    }
    assert_eq!(raw.call(0, 3, 0, 0), DONE, "a flush");

    let bad = Client::attach("bad").path(portal).start();
    let mut failing = RawNbd::go(bad.front(), "bad");
    assert_ne!(failing.write(0, 0, &[7; 4096]), DONE);

    let text = scrape_tcp(&at);
    check_by_promtool(&text);
    let all = parse(&text);
    assert_declared(&all, SERVER);
    let io = |op| [("role", "server"), ("export", EXPORT), ("op", op)];
    assert_eq!(all.value("rtrs_io_seconds_count", &io("write")), 5.0);
    assert_eq!(all.value("rtrs_io_seconds_count", &io("read")), 5.0);
    assert_eq!(all.value("rtrs_io_seconds_count", &io("flush")), 1.0);
    assert!(all.value("rtrs_io_seconds_sum", &io("write")) >= 0.01);
    let millisecond = [&io("write")[..], &[("le", "0.001")]].concat();
    assert_eq!(all.value("rtrs_io_seconds_bucket", &millisecond), 0.0);
    assert_eq!(all.value("rtrs_io_bytes_total", &io("write")), 40960.0);
    assert_eq!(all.value("rtrs_io_bytes_total", &io("read")), 20480.0);
    assert_eq!(all.value("rtrs_io_errors_total", &io("write")), 0.0);
    assert!(!text.contains("rtrs_io_seconds_count{role=\"server\",export=\"unused\""), "{text}");
    assert_eq!(all.value("rtrs_server_device_errors_total", &[("export", "unused")]), 0.0);
    let bad_io = [("role", "server"), ("export", "bad"), ("op", "write")];
    assert!(all.value("rtrs_io_errors_total", &bad_io) >= 1.0);
    assert_eq!(all.value("rtrs_io_bytes_total", &bad_io), 0.0);
    assert!(all.value("rtrs_server_device_errors_total", &[("export", "bad")]) >= 1.0);
    let session = [("session", SESSION)];
    assert_eq!(all.value("rtrs_server_session_paths", &session), 1.0);
    let writes = [("session", SESSION), ("op", "write")];
    assert_eq!(all.value("rtrs_server_session_requests_total", &writes), 5.0);
    assert_eq!(all.value("rtrs_server_session_bytes_total", &writes), 40960.0);
    let open = [("session", SESSION), ("export", EXPORT)];
    assert_eq!(all.value("rtrs_server_session_open", &open), 1.0);
    assert_eq!(all.value("rtrs_server_sessions", &[("state", "up")]), 2.0);
    assert!(all.value("rtrs_receive_bytes_total", &[("transport", "tcp")]) > 40960.0);
    assert!(all.value("rtrs_server_memory_bytes", &[]) > 0.0);
    assert_eq!(all.value("rtrs_server_refused_total", &[("reason", "memory-max")]), 0.0);

    // The command prints the same metrics.
    let printed = parse(&server.command(&["metrics"]).ok().stdout);
    assert_declared(&printed, SERVER);
    assert_eq!(printed.value("rtrs_io_seconds_count", &io("write")), 5.0);
    let names = |all: &Exposition| -> Vec<String> {
        all.0.iter().map(|family| family.name.clone()).collect()
    };
    assert_eq!(names(&printed), names(&all));
    let _ = server.command(&["metrics", "-o", "json"]).code(2).says("drop -o json");

    let text = scrape(UnixStream::connect(&socket).expect("a connection"));
    check_by_promtool(&text);
    let all = parse(&text);
    assert_declared(&all, CLIENT);
    let io = |op| [("role", "client"), ("volume", VOLUME), ("export", EXPORT), ("op", op)];
    assert_eq!(all.value("rtrs_io_seconds_count", &io("write")), 5.0);
    assert_eq!(all.value("rtrs_io_seconds_count", &io("flush")), 1.0);
    assert_eq!(all.value("rtrs_io_bytes_total", &io("read")), 20480.0);
    let this = [("volume", VOLUME), ("export", EXPORT)];
    assert_eq!(all.value("rtrs_client_up", &this), 1.0);
    assert_eq!(all.value("rtrs_client_size_bytes", &this), f64::from(16 << 20));
    assert_eq!(all.value("rtrs_client_inflight", &this), 0.0);
    assert_eq!(all.value("rtrs_client_nbd_connections", &this), 1.0);
    let info = [&this[..], &[("session", SESSION), ("device", "")]].concat();
    assert_eq!(all.value("rtrs_client_info", &info), 1.0);
    let path = [("volume", VOLUME), ("path", portal)];
    assert_eq!(all.value("rtrs_client_path_up", &path), 1.0);
    assert_eq!(all.value("rtrs_client_path_requests_total", &path), 11.0);

    // Metrics of all sessions in the run directory, or of one.
    let _ = client.command(&["path", "disconnect", VOLUME, portal, "--force"]).ok();
    let text = client.command(&["metrics"]).ok().stdout;
    check_by_promtool(&text);
    let all = parse(&text);
    assert_declared(&all, CLIENT);
    assert_eq!(all.value("rtrs_client_up", &this), 0.0);
    assert_eq!(all.value("rtrs_client_path_up", &path), 0.0);
    assert_eq!(all.value("rtrs_client_path_disabled", &path), 1.0);
    assert_eq!(all.count("rtrs_client_up"), 1);
    let one = parse(&bad.command(&["metrics", "bad"]).ok().stdout);
    assert_eq!(one.value("rtrs_client_up", &[("volume", "bad")]), 1.0);
    let _ = client.command(&["metrics", "none"]).code(1).says("is not attached");
    let _ = client.command(&["metrics", "-o", "json"]).code(2).says("drop -o json");
    drop((raw, failing));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn sessions_of_one_directory_are_printed_together() {
    // The label `volume` distinguishes exports of two servers that have the same name.
    let servers = [(); 2].map(|()| Server::builder().export("vol0=mem:1M").start());
    let client = Client::attach("vol0").path(servers[0].portal()).start();
    let socket = client.run_dir().join("second.sock").display().to_string();
    let words = ["attach", "vol0", "--as", "vol1", "--path", servers[1].portal()];
    let _ = client.command(&[&words[..], &["--socket", &socket]].concat()).ok();
    let text = client.command(&["metrics"]).ok().stdout;
    check_by_promtool(&text);
    let all = parse(&text);
    for volume in ["vol0", "vol1"] {
        assert_eq!(all.value("rtrs_client_up", &[("volume", volume), ("export", "vol0")]), 1.0);
    }
    let _ = client.command(&["detach", "vol1"]).ok();
    client.detach();
    servers.into_iter().for_each(|server| drop(server.stop(STOP_TIME_MAX)));
}

#[test]
fn an_address_in_use_is_refused_and_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("its address").to_string();
    let server = Server::builder().export("vol0=mem:1M").start();
    let reported = Server::builder()
        .export("vol0=mem:1M")
        .args(&["--listen", "tcp://127.0.0.1:0", "--metrics", &at])
        .run();
    let _ = reported.code(1).says(&format!("cannot serve metrics at {at}"));
    let attach = Client::attach("vol0").path(server.portal()).args(&["--metrics", &at]);
    let (client, reported) = attach.try_start();
    let _ = reported.code(1).says(&format!("cannot serve metrics at {at}"));
    client.wait_gone(STOP_TIME_MAX);
    let reported = Server::builder().export("vol0=mem:1M").args(&["--metrics", "9823"]).run();
    let _ = reported.code(2).says("is not a numeric address with a port");
    let _ = server.stop(STOP_TIME_MAX);
}

/// Opens a session with one path.
fn peer(portal: SocketAddr, number: u64) -> Peer {
    let options = PeerOptions::new(1, 1);
    let mut peer = Peer::new(portal, options);
    for cid in 0..options.cid_num {
        let mut request = options.request(cid);
        let id = (u128::from(number) + 1).to_be_bytes();
        (request.session_id, request.path_uuid) = (SessionId(id), PathUuid(id));
        peer.connect_raw(&request.encode()).expect("a connection");
    }
    peer.introduce(&format!("host-{number}"));
    peer
}

/// The server has a thousand exports and 1,200 sessions, each with an export open.
#[test]
fn a_large_server_answers_scrapes() {
    let (exports, sessions) = if quick() { (100_u64, 120_u64) } else { (1000, 1200) };
    let many = sessions.to_string();
    let builder = (0..exports).fold(Server::builder(), |builder, number| {
        builder.export(format!("volume-{number}=null:1M"))
    });
    let server = builder
        .args(&["--metrics", "127.0.0.1:0", "--shards", "1", "--queue-depth", "16"])
        .args(&["--chunk-size", "8k", "--sessions-max", &many, "--half-open-max", "8192"])
        .args(&["--heartbeat", "10m", "--handshake-timeout", "10m", "--open-timeout", "10m"])
        .start();
    let at = address(&server);
    let portal: SocketAddr = server.address().parse().expect("an address");
    let mut peers = Vec::new();
    for number in 0..sessions {
        let mut peer = peer(portal, number);
        let export = format!("volume-{}", number % exports);
        peer.open(&export, AccessMode::ReadOnly).expect("an open export");
        peers.push(peer);
    }
    let text = scrape_tcp(&at);
    let all = parse(&text);
    assert_eq!(all.count("rtrs_server_device_errors_total") as u64, exports);
    assert_eq!(all.count("rtrs_server_session_paths") as u64, sessions);
    assert_eq!(all.count("rtrs_server_session_open") as u64, sessions);
    assert_eq!(all.value("rtrs_server_sessions", &[("state", "up")]), sessions as f64);
    check_by_promtool(&text);
    // The control socket also has a limit.
    let printed = parse(&server.command(&["metrics"]).ok().stdout);
    assert_eq!(printed.count("rtrs_server_session_paths") as u64, sessions);
    drop(peers);
    server.crash();
}

#[test]
fn the_strict_parser_refuses_errors() {
    let good = "# HELP a_total Help.\n# TYPE a_total counter\na_total{x=\"\\\\ \\\" \\n ,}\"} 1\n";
    let all = parse(good);
    assert_eq!(all.0[0].samples[0].label("x"), Some("\\ \" \n ,}"));
    let counter = |line: &str| format!("# HELP a_total H.\n# TYPE a_total counter\n{line}\n");
    let times = |lines: &str| format!("# HELP a_seconds H.\n# TYPE a_seconds histogram\n{lines}");
    let bucket = |le: &str, count: u32| format!("a_seconds_bucket{{le=\"{le}\"}} {count}\n");
    let end = "a_seconds_sum 1.5\na_seconds_count 2\n";
    parse(&times(&format!("{}{}{end}", bucket("1e-05", 1), bucket("+Inf", 2))));
    for bad in [
        String::new(),
        "a_total 1".into(),
        "a_total 1\n".into(),
        good[..good.len() - 1].into(),
        format!("{good}{good}"),
        "# HELP a_total H.\na_total 1\n".into(),
        "# TYPE a_total counter\na_total 1\n".into(),
        "# HELP a_total H.\n# TYPE a_total counter\n".into(),
        "# HELP a H.\n# TYPE a counter\na 1\n".into(),
        "# HELP a_total H.\n# TYPE a_total gauge\na_total 1\n".into(),
        "# HELP a_total H.\n# TYPE a_total number\na_total 1\n".into(),
        counter("b_total 1"),
        counter("a_total -1"),
        counter("a_total NaN"),
        counter("a_total inf"),
        counter("a_total 1 2"),
        counter("a_total  1"),
        counter("a_total{} 1"),
        counter("a_total{x=1} 1"),
        counter("a_total{x=\"1\",} 1"),
        counter("a_total{x=\"1\",x=\"2\"} 1"),
        counter("a_total{x=\"\\t\"} 1"),
        counter("a_total{x=\"a\"b\"} 1"),
        counter("a_total{2x=\"1\"} 1"),
        counter("a_total{x=\"1\"} 1\na_total{x=\"1\"} 2"),
        counter("a_total{x=\"1\"} 1\na_total{y=\"1\"} 2"),
        counter("a_total 1\n"),
        times(end),
        times(&format!("{}{end}", bucket("1", 2))),
        times(&format!("{}{end}", bucket("+Inf", 1))),
        times(&format!("{}{}{end}", bucket("1", 3), bucket("+Inf", 2))),
        times(&format!("{}{}{}{end}", bucket("2", 1), bucket("1", 1), bucket("+Inf", 2))),
    ] {
        assert!(Exposition::parse(&bad).is_err(), "was accepted: {bad:?}");
    }
}

/// Returns rows of Markdown.
fn table(metrics: &[&Metric]) -> String {
    let mut rows = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for Metric { name, kind, labels, help } in metrics {
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let (kind, labels) = (kind.name(), labels.join(", "));
        writeln!(rows, "| `{name}` | {kind} | {labels} | {help} |").expect("room");
    }
    rows
}

#[test]
fn the_metric_tables_match_the_declarations() {
    let rds = rds::metrics::all();
    for (name, metrics) in [("server", SERVER), ("client", CLIENT), ("rds", &rds)] {
        let begin = format!("<!-- metrics of {name}, written by tests/system/metrics.rs -->");
        holds("docs/reference/metrics.md", &begin, Some("<!-- end -->"), &table(metrics));
    }
    // A metric that both daemons have means the same in both.
    for metric in SERVER {
        let twin = CLIENT.iter().find(|other| other.name == metric.name);
        if let Some(twin) = twin {
            assert_eq!((metric.kind, metric.help), (twin.kind, twin.help), "{}", metric.name);
            assert!(metric.labels.contains(&"role") && twin.labels.contains(&"role"));
        }
    }
}

/// Returns the names of metrics that a text mentions: lower-case words that begin with `rtrs_`.
fn mentioned(text: &str) -> BTreeSet<String> {
    let words = text.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
    words.filter(|word| word.starts_with("rtrs_")).map(str::to_owned).collect()
}

#[test]
fn alerts_use_existing_metrics() {
    let path = root().join("configs/alerts.yaml");
    let text = fs::read_to_string(&path).expect("configs/alerts.yaml");
    let rules: serde_yaml::Value = serde_yaml::from_str(&text).expect("YAML");
    let mut known: BTreeSet<String> = BTreeSet::new();
    for metric in SERVER.iter().chain(CLIENT) {
        known.insert(metric.name.to_owned());
        known.extend(["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", metric.name)));
    }
    let mut alerts = BTreeSet::new();
    for group in rules["groups"].as_sequence().expect("groups") {
        for rule in group["rules"].as_sequence().expect("rules") {
            let name = rule["alert"].as_str().expect("an alert");
            assert!(alerts.insert(name.to_owned()), "{name} is listed twice");
            let metrics = mentioned(rule["expr"].as_str().expect("an expression"));
            let is_down = name == "RtrsDown";
            assert!(is_down || !metrics.is_empty(), "{name} uses no metric of ours");
            let unknown: Vec<_> = metrics.difference(&known).collect();
            assert!(unknown.is_empty(), "{name} uses {unknown:?}, which does not exist");
            for text in ["summary", "description"] {
                let text = rule["annotations"][text].as_str().expect("an annotation");
                assert!(!text.is_empty(), "{name}");
            }
            assert!(
                ["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap())
            );
        }
    }
    let monitor = fs::read_to_string(root().join(MONITOR)).expect(MONITOR);
    for alert in &alerts {
        assert!(monitor.contains(&format!("`{alert}`")), "{MONITOR} does not name {alert}");
    }
    for page in PAGES {
        let text = fs::read_to_string(root().join(page)).expect(page);
        for name in mentioned(&text).iter().filter(|name| {
            name.starts_with("rtrs_server_")
                || name.starts_with("rtrs_client_")
                || name.ends_with("_total")
        }) {
            assert!(known.contains(name), "{page} names {name}, which does not exist");
        }
    }
}

#[test]
fn promtool_accepts_the_rules() {
    if !requires(&["promtool"]) {
        return;
    }
    for (words, file) in [
        (["check", "rules"], "configs/alerts.yaml"),
        (["check", "config"], "configs/prometheus.yaml"),
        (["test", "rules"], "tests/system/alerts.yaml"),
    ] {
        let output = Command::new("promtool").args(words).arg(root().join(file)).output();
        let output = output.expect("promtool");
        let reported = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&reported));
    }
}
