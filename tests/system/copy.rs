//! Tests of `copy` and `compare`: volumes, files and streams, through the server as users run it.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Stdio};

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Exposition, Finished, Proc, STOP_TIME_MAX, Scratch, Server,
    bin, equal_prefix, fill_pattern, free_port, pattern_file, run, sparse_file, wait_for,
};
use serde_json::json;

const MIB: u64 = 1 << 20;

fn client(words: &[&str]) -> Finished {
    run(bin("rtrs-client"), words, COPY_TIME_MAX)
}

fn uri(server: &Server, export: &str) -> String {
    format!("{}/{export}", server.portal())
}

/// Creates a sparse file with a pattern in these ranges, each an offset and a length.
fn file_with_data(path: &Path, size: u64, places: &[(u64, usize)]) {
    sparse_file(path, size);
    let file = File::options().write(true).open(path).expect("the file");
    for (offset, len) in places {
        let mut data = vec![0; *len];
        fill_pattern(&mut data, *offset, 5);
        file.write_all_at(&data, *offset).expect("a write");
    }
}

/// Number of IOs that a server has answered for an export.
fn ios(server: &Server, export: &str) -> f64 {
    let metrics = server.command(&["metrics"]).ok().stdout;
    let metrics = Exposition::parse(&metrics).unwrap_or_else(|why| panic!("{why}\n{metrics}"));
    let family = metrics.0.iter().find(|family| family.name == "rtrs_io_seconds");
    let samples = &family.unwrap_or_else(|| panic!("{metrics:?}")).samples;
    let counts = samples.iter().filter(|one| one.name.ends_with("_count"));
    counts.filter(|one| one.label("export") == Some(export)).map(|one| one.value).sum()
}

#[test]
fn a_file_goes_to_a_volume_and_back() {
    let scratch = Scratch::new();
    // The file has an odd size, data at both ends, and a hole between them.
    let places = [(0, 3 << 20), (20 * MIB + 4096, 300_000), (31 * MIB, (1 << 20) - 1000)];
    file_with_data(&scratch.path("a"), 32 * MIB - 1000, &places);
    let (a, b) = (scratch.text("a"), scratch.text("b"));
    fs::write(scratch.path("vol0.img"), vec![0xee; 48 << 20]).expect("a file");
    let server = Server::builder().export(format!("vol0={}", scratch.text("vol0.img"))).start();
    let volume = uri(&server, "vol0");
    let copied = client(&["copy", &a, &volume, "--verify", "-o", "json"]).ok();
    // The bytes after the last whole block that the file covers.
    let said = format!("its last {} bytes are unchanged", 16 * MIB + 512);
    assert!(copied.stderr.contains(&said), "{copied:?}");
    let copied = copied.json();
    assert_eq!(copied["size"], 32 * MIB - 1000);
    assert_eq!((&copied["verified"], &copied["flushed"]), (&json!(true), &json!(true)));
    let bytes = |name: &str| copied[name].as_u64().expect(name);
    assert!(bytes("data_bytes") < 8 * MIB, "{copied}");
    assert_eq!(bytes("data_bytes") + bytes("zero_bytes"), 32 * MIB - 1000, "{copied}");

    let differs = client(&["compare", &a, &volume]).code(1);
    assert!(differs.stderr.contains("equal up to offset 33553432"), "{differs:?}");
    let size = (32 * MIB - 1000).to_string();
    let _ =
        client(&["compare", &a, &volume, "--bytes", &size]).ok().says("33553432 bytes are equal");
    let _ = client(&["copy", &volume, &b]).ok().says("copied 48.0 MiB");
    equal_prefix(&scratch.path("a"), &scratch.path("b"), 32 * MIB - 1000);
    let _ = client(&["compare", &volume, &b]).ok();
    let taken = fs::metadata(scratch.path("b")).expect("b").blocks() * 512;
    assert!(taken < 30 * MIB, "holes stay holes: {taken}");

    let file = File::options().write(true).open(scratch.path("b")).expect("b");
    file.write_all_at(&[0x5a], 20 * MIB + 4097).expect("a write");
    let different = client(&["compare", &volume, &b, "-o", "json"]).code(1).json();
    assert_eq!(different["first_difference"], 20 * MIB + 4097);
    assert_eq!(different["equal"], false);
    let _ = client(&["compare", &uri(&server, "none"), &b]).code(2).says("ENOENT");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn holes_of_a_large_volume_cost_few_requests() {
    const TIB: u64 = 1 << 40;
    let scratch = Scratch::new();
    file_with_data(&scratch.path("a.img"), TIB, &[(700 << 30, 3 << 20), (TIB - MIB, 1 << 20)]);
    sparse_file(&scratch.path("b.img"), TIB);
    let export = |name: &str| format!("{name}={}", scratch.text(&format!("{name}.img")));
    let server = Server::builder().export(export("a")).export(export("b")).start();
    let words = [&uri(&server, "a"), &uri(&server, "b")];
    let copied = client(&["copy", words[0], words[1], "--verify", "-o", "json"]).ok().json();
    let bytes = |name: &str| copied[name].as_u64().expect(name);
    assert!(bytes("data_bytes") < 8 * MIB && bytes("zero_bytes") == 0, "{copied}");
    assert_eq!(bytes("skipped_bytes") + bytes("data_bytes"), TIB, "{copied}");
    let _ = client(&["compare", words[0], words[1]]).ok();
    // Expected requests: extents of 2 GiB in each of three passes, and the data.
    let counts = ["a", "b"].map(|name| ios(&server, name));
    assert!(counts.iter().all(|count| (1.0..2000.0).contains(count)), "{counts:?}");
    let taken = fs::metadata(scratch.path("b.img")).expect("b").blocks() * 512;
    assert!(taken < 16 * MIB, "{taken}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn streams_are_copied_in_order() {
    let scratch = Scratch::new();
    pattern_file(&scratch.path("a"), 5 * MIB + 8, 3);
    let server = Server::builder().export("vol0=mem:8M").export("small=mem:4M").start();
    let volume = uri(&server, "vol0");
    let from_stdin = |words: &[&str]| {
        let mut command = Command::new(bin("rtrs-client"));
        command.args(words);
        let input = File::open(scratch.path("a")).expect("a");
        Proc::start_with_streams(command, Some(Stdio::from(input)), None).wait(COPY_TIME_MAX)
    };
    let copied = from_stdin(&["copy", "-", &volume, "-o", "json"]).ok().json();
    assert_eq!((&copied["size"], &copied["data_bytes"]), (&json!(5 * MIB + 8), &copied["size"]));
    let size = (5 * MIB + 8).to_string();
    let _ = from_stdin(&["compare", "-", &volume, "--bytes", &size]).ok();
    let _ = from_stdin(&["compare", "-", &volume]).code(1).says("up to offset 5242888");
    let too_long = from_stdin(&["copy", "-", &uri(&server, "small")]).code(1);
    let _ = too_long.says("cannot copy all of stdin");

    let shell = "\"$0\" copy \"$1\" - --requests 7 --request-size 64k | cat >\"$2\"";
    let program = bin("rtrs-client");
    let program = program.to_str().expect("a path");
    let words = ["-c", shell, program, &volume, &scratch.text("b")];
    let done = run("sh", &words, COPY_TIME_MAX).ok();
    assert_eq!((&*done.stdout, &*done.stderr), ("", ""));
    assert_eq!(fs::metadata(scratch.path("b")).expect("b").len(), 8 * MIB);
    equal_prefix(&scratch.path("a"), &scratch.path("b"), 5 * MIB + 8);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_copy_that_cannot_be_correct_is_refused_or_detected() {
    let scratch = Scratch::new();
    pattern_file(&scratch.path("a"), 2 * MIB, 4);
    let a = scratch.text("a");
    // The disk drops writes, and reads as zeroes.
    let server = Server::builder().export("lost=null:2M").export("small=mem:1M");
    let server = server.export(format!("vol0={a},ro")).start();
    let _ = client(&["copy", &a, &uri(&server, "lost")]).ok();
    let wrong = client(&["copy", &a, &uri(&server, "lost"), "--verify"]).code(1);
    let _ = wrong.says("the copy is wrong").says("at offset 0");
    let small = uri(&server, "small");
    let zeroes = scratch.text("zeroes");
    let refused = client(&["copy", &a, &small]).code(1);
    let _ = refused.says("it has 1048576 bytes, and 2097152 are needed");
    sparse_file(&scratch.path("zeroes"), MIB);
    let _ = client(&["compare", &small, &zeroes]).ok();
    let volume = uri(&server, "vol0");
    let _ = client(&["copy", &zeroes, &volume]).code(1);
    let _ = client(&["copy", &small, &small]).code(2).says("both are the same");
    let _ = client(&["copy", "ftp://h/v", &zeroes]).code(2).says("ftp");
    let _ = client(&["copy", "tcp://h", &zeroes]).code(2).says("SCHEME://HOST");
    let _ = client(&["copy", &a, &zeroes, "--request-size", "5k"]).code(2).says("4k to 32M");
    let deep = format!("{volume}?queue-depth=7");
    let _ = client(&["copy", &deep, &zeroes]).code(2).says("use --requests");
    let large = ["--requests", "1000", "--request-size", "32M"];
    let _ = client(&[&["copy", &a, &*zeroes], &large[..]].concat()).code(2).says("use fewer");
    assert_eq!(fs::metadata(scratch.path("zeroes")).expect("zeroes").len(), MIB);
    let _ = server.stop(STOP_TIME_MAX);
}

/// Server whose disk holds a write on command, and its port.
struct Held {
    dir: Scratch,
    listen: String,
}

impl Held {
    fn new() -> Self {
        Self { dir: Scratch::new(), listen: format!("tcp://127.0.0.1:{}", free_port()) }
    }

    fn start(&self) -> Server {
        let export = format!("vol0={}", self.dir.text("vol0.img"));
        let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", self.dir.text(""));
        server.export(export).listen(&*self.listen).start()
    }

    fn wait_file(&self, name: &str) {
        let exists = || self.dir.path(name).exists().then_some(());
        wait_for(name, COMMAND_TIME_MAX, exists);
    }

    /// Starts a copy to the volume, and waits until one of its writes is held.
    fn start_copy(&self, settings: &str) -> Proc {
        fs::write(self.dir.path("hold"), "").expect("a file");
        self.wait_file("armed");
        let mut command = Command::new(bin("rtrs-client"));
        let volume = format!("{}/vol0?{settings}", self.listen);
        command.args(["copy", &self.dir.text("a"), &volume, "--verify"]);
        let copy = Proc::start(command);
        self.wait_file("holding");
        copy
    }
}

#[test]
fn a_copy_continues_after_its_server_crashes() {
    let held = Held::new();
    pattern_file(&held.dir.path("a"), 16 * MIB, 6);
    sparse_file(&held.dir.path("vol0.img"), 16 * MIB);
    let server = held.start();
    let copy = held.start_copy("no-path=queue-for=10m");
    server.crash();
    fs::remove_file(held.dir.path("holding")).expect("the report of the held write");
    let server = held.start();
    let copied = copy.wait(COPY_TIME_MAX);
    // Unless no write was acknowledged before the crash, the server may have lost one.
    if copied.code != Some(0) {
        let _ = copied.code(1).says("cannot flush").says("EIO");
    }
    let _ = server.stop(STOP_TIME_MAX);
    equal_prefix(&held.dir.path("a"), &held.dir.path("vol0.img"), 16 * MIB);
}

#[test]
fn a_copy_without_its_server_or_with_a_signal_ends() {
    let held = Held::new();
    pattern_file(&held.dir.path("a"), 16 * MIB, 6);
    sparse_file(&held.dir.path("vol0.img"), 16 * MIB);
    let server = held.start();
    let mut copy = held.start_copy("no-path=fail");
    copy.signal("INT");
    let _ = copy.wait(COMMAND_TIME_MAX).code(1).says("ended by a signal");
    fs::write(held.dir.path("release"), "").expect("a file");
    wait_for("the disk to be free", COMMAND_TIME_MAX, || {
        (!held.dir.path("release").exists()).then_some(())
    });
    let copy = held.start_copy("no-path=fail&retry-for=1m");
    server.crash();
    let _ = copy.wait(COPY_TIME_MAX).code(1).says("vol0?no-path=fail").says(" at offset ");
}
