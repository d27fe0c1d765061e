//! Tests of sockets passed by the service manager: the port is open before the daemon starts and
//! after it ends.

use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::process::Command;

use rtrs_tests::{
    Activation, COMMAND_TIME_MAX, Client, Front, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, bin,
};

/// Returns the `activated` field of each of a server's listeners.
fn activated(server: &Server) -> Vec<bool> {
    let status = server.command(&["status", "-o", "json"]).ok().json();
    let listeners = status["listeners"].as_array().expect("a list");
    listeners.iter().map(|listener| listener["activated"] == true).collect()
}

#[test]
fn a_session_outlives_a_restart_on_the_sockets_of_the_manager() {
    let (manager, v4) = Activation::default().tcp("v4.socket", "127.0.0.1");
    let (manager, v6) = manager.tcp("v6.socket", "::1");
    let portal = |address: SocketAddr| format!("tcp://{address}");
    // Without an ID, the export would be a different volume after each start.
    let builder = || Server::builder().export("vol0=null:16M,id=vol0").activated(&manager, 2);
    let server = builder().start();
    assert_eq!(server.portals(), [portal(v4), portal(v6)]);
    assert_eq!(activated(&server), [true, true]);
    let shown = server.command(&["status"]).ok().stdout;
    assert!(shown.contains(&format!("tcp://{v6} (TCP without TLS, activated)")), "{shown}");

    let client = Client::attach("vol0").path(portal(v4)).path(portal(v6)).start();
    let mut nbd = RawNbd::go(client.front(), "vol0");
    assert_eq!(nbd.write(0, 0, &[7; 4096]), Reply::Error(0));
    // A drain ends the server without closing the sockets.
    let _ = server.command(&["drain"]).ok();
    let _ = server.wait(STOP_TIME_MAX).ok();
    let server = builder().start();
    assert_eq!(nbd.write(0, 0, &[8; 4096]), Reply::Error(0));
    let _ = server.stop(STOP_TIME_MAX);

    // No server is running, but the connection is not refused.
    let early = std::net::TcpStream::connect(v4).expect("a connection");
    let server = builder().start();
    assert_eq!(nbd.write(0, 0, &[9; 4096]), Reply::Error(0));
    drop((early, nbd));
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn sockets_belong_to_portals_with_their_addresses() {
    let (manager, used) = Activation::default().tcp("used.socket", "127.0.0.1");
    let (manager, left) = manager.tcp("left.socket", "127.0.0.1");
    let server = Server::builder()
        .export("vol0=null:16M")
        .listen("tcp://127.0.0.2:0")
        .listen(format!("tcp://{used}"))
        .activated(&manager, 0)
        .start();
    assert_eq!(activated(&server), [false, true]);
    let output = server.wait_output("the server is ready");
    for words in [
        format!(
            "connections to {left} (\\\"left.socket\\\") of the service manager are not served"
        ),
        format!("listening on a socket of the service manager portal=tcp://{used}"),
    ] {
        assert!(output.contains(&words), "no {words:?} in {output}");
    }
    assert!(!output.contains("used.socket"), "{output}");

    // A reload leaves the sockets alone.
    let _ = server.command(&["reload"]).ok();
    let client = Client::attach("vol0").path(format!("tcp://{used}")).start();
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn sockets_that_cannot_be_used_are_refused() {
    let (manager, at) = Activation::default().tcp("rtrs-server.socket", "127.0.0.1");
    let server = |listen: String| {
        Server::builder().export("vol0=null:16M").listen(listen).activated(&manager, 0).run()
    };
    let refused = server(format!("tcp://0.0.0.0:{}", at.port())).code(1);
    let _ = refused
        .says(&format!("the service manager passes {at} (\"rtrs-server.socket\")"))
        .says("write the same address in listen and in ListenStream=");
    let file = std::fs::File::open("/dev/null").expect("a file");
    let manager = Activation::default().descriptor("rdma", file);
    let refused = Server::builder().export("vol0=null:16M").activated(&manager, 0).run().code(1);
    let _ = refused.says("descriptor 3 (\"rdma\")").says("RDMA listeners cannot be passed");
}

#[test]
fn nbd_clients_use_the_socket_of_the_manager() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let scratch = Scratch::new();
    let path = scratch.path("nbd.sock");
    let manager = Activation::default().unix("rtrs-client@vol0.socket", &path);
    let front = Front::Unix(path.clone());
    // The client whose connection starts the process has already connected.
    let mut first = UnixStream::connect(&path).expect("a connection");
    first.set_read_timeout(Some(COMMAND_TIME_MAX)).expect("a timeout");
    for round in 0..2 {
        let builder = Client::attach("vol0").path(server.portal()).front(front.clone());
        let mut client = builder.activated(&manager).start_foreground();
        if round == 0 {
            let mut greeting = [0; 8];
            first.read_exact(&mut greeting).expect("a greeting");
            assert_eq!(&greeting, b"NBDMAGIC");
        }
        let mut nbd = RawNbd::go(&front, "vol0");
        assert_eq!(nbd.write(0, 0, &[7; 4096]), Reply::Error(0));
        let process = client.take_foreground();
        client.detach();
        let _ = process.wait(STOP_TIME_MAX).ok();
        assert!(path.exists(), "the path belongs to the manager");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_volume_without_a_configured_socket_is_served_at_the_only_one() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (manager, at) = Activation::default().tcp("nbd", "127.0.0.1");
    let scratch = Scratch::new();
    let attach = |args: &[&str]| {
        let mut command = Command::new(bin("rtrs-client"));
        command.args(["attach", "vol0", "--path", server.portal()]).args(args);
        command.arg("--run-dir").arg(scratch.path("run"));
        manager.start(&command)
    };
    let mut process = attach(&["--foreground"]);
    let _ = process.wait_lines("ready ", 1, COMMAND_TIME_MAX);
    let mut nbd = RawNbd::go(&Front::Tcp(at.port()), "vol0");
    assert_eq!(nbd.write(0, 0, &[7; 4096]), Reply::Error(0));
    drop(nbd);
    let _ = process.terminate(STOP_TIME_MAX).ok();

    let _ = attach(&[]).wait(COMMAND_TIME_MAX).code(2).says("add --foreground");
    // The warning is about a socket with a different address.
    let mut process = attach(&["--foreground", "--listen", "127.0.0.1:0"]);
    let _ = process.wait_lines("ready ", 1, COMMAND_TIME_MAX);
    let output = process.terminate(STOP_TIME_MAX).ok();
    let _ = output.says(&format!("connections to {at} (\"nbd\") of the service manager are not"));
    let _ = server.stop(STOP_TIME_MAX);
}
