//! Tests of daemons as services: the messages that they send to the service manager (sd_notify(3)).

use std::os::unix::net::UnixDatagram;
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Proc, STOP_TIME_MAX, Scratch, Server, bin, free_port, wait_for,
};

/// A service manager that receives a daemon's messages.
struct Manager {
    scratch: Scratch,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let scratch = Scratch::new();
        let socket = UnixDatagram::bind(scratch.path("notify")).expect("bind a socket");
        socket.set_nonblocking(true).expect("do not wait");
        Self { scratch, socket }
    }

    fn address(&self) -> String {
        self.scratch.text("notify")
    }

    /// Returns the next message, if there is one.
    fn next_message(&self) -> Option<String> {
        let mut buffer = [0; 1024];
        let length = self.socket.recv(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Waits for a message with this prefix.
    fn wait_message(&self, start: &str) -> String {
        wait_for(start, COMMAND_TIME_MAX, || {
            self.next_message().filter(|message| message.starts_with(start))
        })
    }
}

#[test]
fn a_server_notifies_readiness_watchdog_and_stop() {
    let manager = Manager::new();
    let mut server = Server::builder()
        .export("vol0=mem:1M")
        .env("NOTIFY_SOCKET", manager.address())
        .env("WATCHDOG_USEC", "200000")
        .start();
    let ready = manager.wait_message("READY=1");
    assert_eq!(ready, format!("READY=1\nSTATUS=listening on {}", server.portal()));
    for _ in 0..3 {
        let _ = manager.wait_message("WATCHDOG=1");
    }
    server.signal("TERM");
    let _ = manager.wait_message("STOPPING=1");
    let _ = server.wait(STOP_TIME_MAX).ok();
}

#[test]
fn a_session_in_the_foreground_notifies_readiness() {
    let manager = Manager::new();
    let server = Server::builder().export("vol0=mem:1M").start();
    let mut client = Client::attach("vol0")
        .path(server.portal())
        .env("NOTIFY_SOCKET", manager.address())
        .start_foreground();
    let _ = manager.wait_message("EXTEND_TIMEOUT_USEC=90000000");
    assert_eq!(manager.wait_message("READY=1"), format!("READY=1\nSTATUS={}", client.uri()));
    let _ = client.take_foreground().terminate(STOP_TIME_MAX).ok();
    let _ = manager.wait_message("STOPPING=1");
    assert_eq!(manager.next_message(), None, "no watchdog was requested");

    // The notification socket is meant for the command, not for the background process that it
    // starts.
    let background = Client::attach("vol0")
        .path(server.portal())
        .env("NOTIFY_SOCKET", manager.address())
        .start();
    background.detach();
    assert_eq!(manager.next_message(), None);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_rds_daemon_notifies_readiness_watchdog_and_stop() {
    let manager = Manager::new();
    let dir = manager.scratch.text("");
    let port = free_port().to_string();
    let mut command = Command::new(bin("rds"));
    command.args(["node", "--address", "127.0.0.1", "--socket-dir", &dir]);
    command.args(["--listen-port", &port, "--peer-port", &port]);
    command.env("NOTIFY_SOCKET", manager.address()).env("WATCHDOG_USEC", "200000");
    let mut node = Proc::start(command);
    let ready = manager.wait_message("READY=1");
    assert!(ready.starts_with("READY=1\nSTATUS=node 127.0.0.1 is ready at "), "{ready}");
    for _ in 0..3 {
        let _ = manager.wait_message("WATCHDOG=1");
    }
    node.signal("TERM");
    let _ = manager.wait_message("STOPPING=1");
    let _ = node.wait(STOP_TIME_MAX).ok();
}
