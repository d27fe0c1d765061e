//! Tests of a client that was away while another client wrote: its old requests change nothing.

use std::fs;
use std::path::Path;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, free_port,
    sparse_file, wait_for,
};

const BLOCK: usize = 4096;
/// NBD commands.
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// Attaches a client whose paths end soon after it stops.
fn attach(server: &Server, name: &str) -> Client {
    let args = ["--session-name", name, "--heartbeat", "100ms", "--retry-for", "1m"];
    Client::attach("v").path(server.portal()).args(&args).start()
}

/// Attaches the other side of a migration.
fn join(server: &Server) -> Client {
    let args = ["--session-name", "target", "--access", "migration", "--retry-for", "1m"];
    Client::attach("v").path(server.portal()).args(&args).start()
}

/// Writes a byte to the first block, and flushes.
fn write(client: &Client, byte: u8) {
    let mut nbd = RawNbd::go(client.front(), "v");
    assert_eq!(nbd.write(0, 0, &[byte; BLOCK]), Reply::Error(0));
    assert_eq!(nbd.call(0, FLUSH, 0, 0), Reply::Error(0));
}

/// The first client's writes stop with its process, and are sent when the process continues, after
/// another client has written.
#[test]
fn a_client_that_returns_changes_nothing_after_another_writer() {
    return_after_another_writer(false);
}

#[test]
fn a_restarted_server_knows_who_has_written_before() {
    return_after_another_writer(true);
}

fn return_after_another_writer(restarts: bool) {
    let scratch = Scratch::new();
    let image = scratch.text("v.img");
    sparse_file(Path::new(&image), 1 << 20);
    let start = |portal: &str| {
        let args = ["--state-dir", &scratch.text("state")];
        Server::builder().export(format!("v={image}")).listen(portal).args(&args).start()
    };
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let mut server = start(&portal);
    let first = attach(&server, "first");
    write(&first, 3);
    let mut late = RawNbd::go(first.front(), "v");
    first.signal("STOP");
    let cookie = late.send_request(0, WRITE, 0, BLOCK as u32);
    late.send(&[4; BLOCK]);
    // Attaches once the server has ended the session of the first client.
    let second = attach(&server, "second");
    write(&second, 8);
    second.detach();
    if restarts {
        let _ = server.stop(STOP_TIME_MAX);
        server = start(&portal);
    }
    first.signal("CONT");
    let reply = late.simple_reply(cookie);
    let bytes = fs::read(&image).unwrap();
    assert_eq!(bytes[..BLOCK], [8; BLOCK], "{reply:?} {}", first.status());
    assert_ne!(reply, Reply::Error(0), "{}", first.status());
    let reason = wait_for("the reason", COMMAND_TIME_MAX, || {
        let status = first.status().to_string();
        status.contains("another client has opened the export for writing").then_some(status)
    });
    assert!(reason.contains("attach again"), "{reason}");
    drop(late);
    first.detach();
    let again = attach(&server, "first");
    write(&again, 5);
    again.detach();
}

/// The server cannot know in which order the two sides of a migration return.
#[test]
fn a_restart_during_a_migration_ends_neither_side() {
    let scratch = Scratch::new();
    let image = scratch.text("v.img");
    sparse_file(Path::new(&image), 1 << 20);
    let start = |portal: &str| {
        let args = ["--state-dir", &scratch.text("state")];
        Server::builder().export(format!("v={image}")).listen(portal).args(&args).start()
    };
    let portal = format!("tcp://127.0.0.1:{}", free_port());
    let server = start(&portal);
    let source = attach(&server, "source");
    write(&source, 1);
    let target = join(&server);
    write(&target, 2);
    let _ = server.stop(STOP_TIME_MAX);
    let _server = start(&portal);
    write(&target, 3);
    target.detach();
    write(&source, 4);
    source.detach();
}
