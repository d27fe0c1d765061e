//! Tests of `rtrs-client exporter`: one address for the metrics of all sessions of a host.

use std::os::unix::net::UnixStream;
use std::process::Command;

use rtrs_tests::{
    Activation, COMMAND_TIME_MAX, Client, Exposition, STOP_TIME_MAX, Server, bin, run, scrape_tcp,
    wait_for,
};

use super::metrics::{CLIENT, assert_declared, check_by_promtool, parse};

const UP: &str = "rtrs_client_session_up";

/// Two sessions of one run directory, vol0 and vol1.
struct Host {
    client: Client,
    server: Server,
}

impl Host {
    fn new() -> Self {
        let server = Server::builder().export("vol0=mem:1M").export("vol1=mem:1M").start();
        let client = Client::attach("vol0").path(server.portal()).start();
        let host = Self { client, server };
        host.attach_second();
        host
    }

    fn attach_second(&self) {
        let socket = self.client.run_dir().join("second.sock").display().to_string();
        let words = ["attach", "vol1", "--path", self.server.portal(), "--socket", &socket];
        let _ = self.client.command(&words).ok();
    }

    fn pid_of_second(&self) -> String {
        let status = self.client.command(&["status", "vol1", "-o", "json"]).ok().json();
        status["pid"].as_u64().expect("a process").to_string()
    }
}

fn signal(name: &str, pid: &str) {
    let _ = run("kill", &["-s", name, pid], COMMAND_TIME_MAX).ok();
}

/// Scrapes, and checks the text.
fn scraped(at: &str) -> Exposition {
    let text = scrape_tcp(at);
    check_by_promtool(&text);
    let all = parse(&text);
    assert_declared(&all, CLIENT);
    all
}

fn up(all: &Exposition, name: &str) -> f64 {
    all.value(UP, &[("volume", name)])
}

#[test]
fn a_hung_or_dead_session_is_shown_as_down() {
    let host = Host::new();
    let mut exporter = host.client.spawn(&["exporter", "--listen", "127.0.0.1:0"]);
    let at = exporter.wait_lines("serving metrics address=http://", 1, COMMAND_TIME_MAX);
    let at = at[0].strip_suffix("/metrics").expect("an address");

    let all = wait_for("both to be up", COMMAND_TIME_MAX, || {
        let all = scraped(at);
        ["vol0", "vol1"].iter().all(|name| up(&all, name) == 1.0).then_some(all)
    });
    for name in ["vol0", "vol1"] {
        assert_eq!(all.value("rtrs_client_up", &[("volume", name)]), 1.0);
    }
    assert_eq!(all.count(UP), 2);

    let pid = host.pid_of_second();
    signal("STOP", &pid);
    let all = wait_for("only vol1 to be down", COMMAND_TIME_MAX, || {
        let all = scraped(at);
        ((up(&all, "vol0"), up(&all, "vol1")) == (1.0, 0.0)).then_some(all)
    });
    assert_eq!(all.value("rtrs_client_up", &[("volume", "vol0")]), 1.0);
    assert_eq!(all.count("rtrs_client_up"), 1, "vol1 has no other samples");
    // The command prints the same metrics, and names the session.
    let printed = host.client.command(&["metrics"]).ok().says("vol1: the reply took longer than");
    assert_eq!(up(&parse(&printed.stdout), "vol1"), 0.0);

    signal("CONT", &pid);
    wait_for("vol1 to be up", COMMAND_TIME_MAX, || (up(&scraped(at), "vol1") == 1.0).then_some(()));
    // One line for each change, however many scrapes there were. On a busy machine there may be
    // more changes than these two.
    let _ = exporter.wait_lines("session \"vol1\" is responding again", 1, COMMAND_TIME_MAX);
    let output = exporter.output();
    let mut is_down = false;
    for line in output.lines().filter(|line| line.contains("session \"vol1\"")) {
        assert_eq!(line.contains("responding again"), is_down, "{output}");
        is_down = !is_down;
    }

    // A scrape shows the current state, even right after another scrape.
    let _ = scraped(at);
    signal("KILL", &pid);
    let socket = host.client.run_dir().join("vol1.ctl");
    wait_for("vol1 to die", COMMAND_TIME_MAX, || UnixStream::connect(&socket).err());
    assert_eq!(up(&scraped(at), "vol1"), 0.0);
    host.attach_second();
    wait_for("vol1 to be back", COMMAND_TIME_MAX, || {
        (up(&scraped(at), "vol1") == 1.0).then_some(())
    });
    let _ = host.client.command(&["detach", "vol1"]).ok();
    assert_eq!(scraped(at).count(UP), 1, "vol1 is gone");

    let _ = exporter.terminate(STOP_TIME_MAX).ok();
    host.client.detach();
    let _ = host.server.stop(STOP_TIME_MAX);
}

#[test]
fn the_socket_of_the_service_manager_is_used_and_stays_open() {
    let host = Host::new();
    let (manager, at) = Activation::default().tcp("metrics", "127.0.0.1");
    let at = at.to_string();
    let exporter = |manager: &Activation, args: &[&str]| {
        let mut command = Command::new(bin("rtrs-client"));
        command.arg("exporter").args(args).arg("--run-dir").arg(host.client.run_dir());
        manager.start(&command)
    };
    // The second process shows that the first has not shut down the socket.
    for _ in 0..2 {
        let mut exporter = exporter(&manager, &[]);
        let serving = exporter.wait_lines("serving metrics address=", 1, COMMAND_TIME_MAX);
        assert_eq!(serving[0], format!("http://{at}/metrics"));
        assert_eq!(up(&scraped(&at), "vol1"), 1.0);
        let _ = exporter.terminate(STOP_TIME_MAX).ok();
    }

    let refused = exporter(&manager, &["--listen", "127.0.0.1:0"]).wait(COMMAND_TIME_MAX);
    let _ = refused.code(2).says("--listen 127.0.0.1:0 cannot be used with socket activation");
    let file = std::fs::File::open("/dev/null").expect("a file");
    let manager_of_file = Activation::default().descriptor("file", file);
    let refused = exporter(&manager_of_file, &[]).wait(COMMAND_TIME_MAX);
    let _ = refused.code(1).says("descriptor 3 (\"file\") from LISTEN_FDS");
    // Without that socket, an address in use by another process is an error.
    let words = ["exporter", "--listen", &at];
    let _ = host.client.command(&words).code(1).says(&format!("cannot serve metrics at {at}"));
    let _ = host.client.command(&["exporter", "-o", "json"]).code(2).says("drop -o json");
    let _ = host.client.command(&["detach", "vol1"]).ok();
    host.client.detach();
    let _ = host.server.stop(STOP_TIME_MAX);
}
