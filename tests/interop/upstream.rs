//! Tests of the `nbd:` backend in use: a copy reaches the server behind the backend.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Proc, Scratch, Server, Stand, equal_prefix, pattern_file,
    requires, run, sparse_file, wait_for,
};

const MIB: u64 = 1 << 20;

#[test]
fn an_export_of_an_nbd_server_is_copied() {
    if !requires(&["nbdkit", "nbdcopy"]) {
        return;
    }
    let scratch = Scratch::new();
    let (disk, from, back) = (scratch.text("disk"), scratch.text("from"), scratch.text("back"));
    sparse_file(Path::new(&disk), 24 * MIB);
    pattern_file(Path::new(&from), 24 * MIB, 5);
    let socket = scratch.text("socket");
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U", &socket, "file", &disk]);
    let _upstream = Proc::start(command);
    // The path exists before nbdkit listens there.
    wait_for("nbdkit to listen", COMMAND_TIME_MAX, || UnixStream::connect(&socket).ok());
    let server = Server::builder().export(format!("vol0=nbd+unix:///?socket={socket}"));
    let stand = Stand::start(Scratch::new(), server, |client| client);
    let uri = stand.uri();
    let _ = run("nbdcopy", &["--flush", &from, &uri], COPY_TIME_MAX).ok();
    equal_prefix(Path::new(&from), Path::new(&disk), 24 * MIB);
    let _ = run("nbdcopy", &[&uri, &back], COPY_TIME_MAX).ok();
    equal_prefix(Path::new(&from), Path::new(&back), 24 * MIB);
    stand.finish();
}
