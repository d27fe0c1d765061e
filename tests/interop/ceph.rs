//! Tests of the `rbd:` backend on a Ceph cluster on this machine: Ceph's tools, qemu and fio read
//! and write the same images, each image has one writer, and the cluster refuses a blocklisted
//! server.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rtrs_core::tests::Ceph;
use rtrs_tests::{
    COPY_TIME_MAX, Client, Proc, STOP_TIME_MAX, Scratch, Server, ServerBuilder, Stand,
    equal_prefix, pattern_file, requires, run, skip, wait_for,
};

const MIB: u64 = 1 << 20;
/// Maximum wait for a dead client's lock, which becomes free after 30 s.
const LOCK_TIME_MAX: Duration = Duration::from_secs(60);

/// Returns a server of one image as `vol0`.
fn server(ceph: &Ceph, target: &str) -> ServerBuilder {
    Server::builder().export(format!("vol0=rbd:{target},conf={}", ceph.conf()))
}

#[test]
fn ceph_tools_and_clients_read_each_others_writes() {
    if !requires(&["nbdcopy", "qemu-img", "fio"]) {
        return;
    }
    let Some(ceph) = Ceph::get() else { return };
    let files = Scratch::new();
    let (ours, theirs) = (files.text("ours.img"), files.text("theirs.img"));
    pattern_file(Path::new(&ours), 24 * MIB, 3);
    pattern_file(Path::new(&theirs), 24 * MIB, 4);
    let copied = files.text("copied.img");
    let check = |expected: &str| equal_prefix(Path::new(expected), Path::new(&copied), 24 * MIB);

    ceph.image("tools", 24);
    let stand = Stand::start(Scratch::new(), server(ceph, "rbd/tools"), |client| client);
    let uri = stand.uri();
    let _ = run("nbdcopy", &["--flush", &ours, &uri], COPY_TIME_MAX).ok();
    ceph.run("rbd", &["export", "--no-progress", "rbd/tools", &copied]);
    check(&ours);
    let image = format!("rbd:rbd/tools:conf={}", ceph.conf());
    let compare = ["compare", "-f", "raw", "-F", "raw", &ours, &image];
    if fs::exists("/usr/lib/x86_64-linux-gnu/qemu/block-rbd.so").unwrap() {
        assert!(ceph.run("qemu-img", &compare).contains("identical"));
    } else {
        skip("no qemu-block-extra");
    }
    // Only reads, because other clients cannot write: the server holds the lock.
    let job = ["--name=r", "--ioengine=rbd", "--pool=rbd", "--rbdname=tools", "--clientname=admin"];
    let read = ["--rw=read", "--bs=64k", "--size=8M"];
    ceph.run("fio", &[&job[..], &read].concat());
    // A snapshot stays unchanged while the server writes.
    ceph.run("rbd", &["snap", "create", "rbd/tools@ours"]);
    let _ = run("nbdcopy", &["--flush", &theirs, &uri], COPY_TIME_MAX).ok();
    let snapshot = Stand::start(Scratch::new(), server(ceph, "rbd/tools@ours"), |client| client);
    let _ = run("nbdcopy", &[&snapshot.uri(), &copied], COPY_TIME_MAX).ok();
    check(&ours);
    let text = run("nbdinfo", &[&snapshot.uri()], COPY_TIME_MAX).ok().stdout;
    assert!(text.contains("is_read_only: true"), "{text}");
    snapshot.finish();
    stand.finish();

    // The server reads data that fio has written.
    let verify = ["--bs=64k", "--size=8M", "--verify=crc32c", "--verify_state_save=0"];
    ceph.run("fio", &[&job[..], &verify, &["--rw=write", "--do_verify=0"]].concat());
    let stand = Stand::start(Scratch::new(), server(ceph, "rbd/tools"), |client| client);
    let job = ["--name=r", "--ioengine=nbd", "--rw=read"];
    if run("fio", &["--enghelp"], COPY_TIME_MAX).stdout.contains("nbd") {
        let uri = format!("--uri={}", stand.uri());
        let _ = run("fio", &[&job[..], &verify, &[&uri[..]]].concat(), COPY_TIME_MAX).ok();
    }
    stand.finish();
    ceph.run("rbd", &["import", "--no-progress", &theirs, "rbd/imported"]);
    let stand = Stand::start(Scratch::new(), server(ceph, "rbd/imported,ro"), |client| client);
    let _ = run("nbdcopy", &[&stand.uri(), &copied], COPY_TIME_MAX).ok();
    check(&theirs);
    stand.finish();
}

#[test]
fn an_image_has_one_writer() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("single", 16);
    let first = server(ceph, "rbd/single").start();
    let listen = ["--listen", "tcp://127.0.0.1:0"];
    let refused = server(ceph, "rbd/single").args(&listen).run().code(1);
    let _ = refused.says("rbd:rbd/single is in use").says("or export it with `ro`");
    // Reading is allowed. A tool that requests the lock does not get it.
    let reader = server(ceph, "rbd/single,ro").start();
    let bench = ["bench", "--io-type", "write", "--io-total", "4M", "rbd/single"];
    let (written, text) = ceph.try_run("timeout", &[&["5", "rbd"], &bench[..]].concat());
    assert!(!written, "{text}");
    drop((reader, first.stop(STOP_TIME_MAX)));
    // The lock becomes free at once, or when the cluster notices that its holder has ended: the
    // tool may have got it just before it was ended.
    for end in ["KILL", "TERM"] {
        let scratch = Scratch::new();
        let mut command = server(ceph, "rbd/single").args(&listen).command();
        command.args(["--run-dir", &scratch.text("run"), "--state-dir", &scratch.text("state")]);
        let mut next = Proc::start(command);
        next.wait_lines("listening on ", 1, LOCK_TIME_MAX);
        next.signal(end);
        let ended = next.wait(STOP_TIME_MAX);
        if end == "TERM" {
            let _ = ended.ok();
        }
    }
}

#[test]
fn a_blocklisted_server_reports_it_and_exits() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("refused", 8);
    let server = server(ceph, "rbd/refused").start();
    let client = Client::attach("vol0").path(server.portal()).start();
    let write = |offset: &str| {
        let command = format!("write -P 7 {offset} 4k");
        let done = run("qemu-io", &["-f", "raw", "-c", &command, &client.uri()], COPY_TIME_MAX);
        done.stdout + &done.stderr
    };
    assert!(write("0").contains("wrote 4096/4096"));
    ceph.run("ceph", &["osd", "blocklist", "add", &ceph.watcher("rbd/refused"), "600"]);
    wait_for("a refused write", COPY_TIME_MAX, || {
        write("4k").contains("write failed").then_some(())
    });
    let _ = server.wait_output("the cluster has blocklisted this server");
    drop(client);
    let _ = server.stop(STOP_TIME_MAX);
}
