//! Tests of exports that are resized while clients use them: clients notice by themselves.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Innocent, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, consts,
    sparse_file, wait_for,
};
use serde_json::{Value, json};

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const MIB: u64 = 1 << 20;

fn attach(server: &Server, export: &str, args: &[&str]) -> Client {
    let name = format!("sess-{export}");
    let args = [&["--session-name", &name, "--shards", "2"], args].concat();
    Client::attach(export).path(server.portal()).args(&args).start()
}

/// Heartbeat for both ends that ends no path even on a busy machine.
const LONG_SILENCE: [&str; 2] = ["--heartbeat", "1m"];

fn set_len(path: &Path, size: u64) {
    let file = OpenOptions::new().write(true).open(path).expect("the file");
    file.set_len(size).expect("another length");
}

/// Waits until the client shows this size.
fn await_size(client: &Client, size: u64) {
    let export = client.status()["name"].clone();
    wait_for(&format!("{export} to have {size} bytes"), COMMAND_TIME_MAX, || {
        (client.status()["size"] == size).then_some(())
    });
}

fn resize(server: &Server, words: &[&str]) -> Value {
    let words = [&["export", "resize", "vol0", "-o", "json"], words].concat();
    server.command(&words).ok().json()
}

/// Returns the entry of vol0 in `export list`.
fn export(server: &Server) -> Value {
    let list = server.command(&["export", "list", "-o", "json"]).ok().json();
    let all = list["exports"].as_array().expect("exports");
    all.iter().find(|export| export["name"] == "vol0").expect("vol0").clone()
}

fn size_in_list(server: &Server) -> Value {
    export(server)["size"].clone()
}

#[test]
fn a_file_grows_under_load() {
    let scratch = Scratch::new();
    let path = scratch.path("a.img");
    sparse_file(&path, 16 * MIB);
    let spec = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(&spec).export("vol1=mem:16M").args(&LONG_SILENCE).start();
    let attach = |export: &str| attach(&server, export, &LONG_SILENCE);
    let (client, beside) = (attach("vol0"), attach("vol1"));
    let loads = [
        Innocent::start(client.front(), "vol0"),
        Innocent::start_at(client.front(), "vol0", MIB),
        Innocent::start(beside.front(), "vol1"),
    ];
    let mut before = RawNbd::go(client.front(), "vol0");
    assert_eq!(before.write(0, 16 * MIB, &[1; 4096]), Reply::Error(ENOSPC));
    // The server notices the new length by itself.
    set_len(&path, 32 * MIB);
    await_size(&client, 32 * MIB);
    assert_eq!(size_in_list(&server), 32 * MIB);
    for shard in 0..2 {
        let mut new = RawNbd::go(client.front(), "vol0");
        assert_eq!(new.write(0, (31 - shard) * MIB, &[2; 4096]), Reply::Error(0));
        let mut bytes = [0; 4096];
        assert_eq!(new.read((31 - shard) * MIB, &mut bytes), Ok(()));
        assert_eq!(bytes, [2; 4096]);
    }
    // A connection opened before the resize can use the new size too.
    assert_eq!(before.write(0, 16 * MIB, &[1; 4096]), Reply::Error(0));
    // The command extends the file.
    let shown = resize(&server, &["--size", "64M"]);
    let (size, size_before) = (64 * MIB, 32 * MIB);
    let expected = json!({
        "export": "vol0", "size": size, "size_before": size_before, "was_cut": null, "saved": null,
    });
    assert_eq!(shown, expected);
    await_size(&client, 64 * MIB);
    assert_eq!(fs::metadata(&path).expect("the file").len(), 64 * MIB);
    let text = server.command(&["export", "resize", "vol0"]).ok();
    let _ = text.says("vol0 has 67108864 bytes already");
    for load in loads {
        load.check();
    }
    let stats = client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    let errors = |op: &Value| op["errors"].as_u64().unwrap_or(0);
    let all: u64 = stats["ops"].as_object().expect("operations").values().map(errors).sum();
    assert_eq!(all, 0, "no IO failed at the server: {stats}");
    let paths = client.status()["paths"].clone();
    assert_eq!(paths[0]["reconnects"], 0, "{paths}");
    drop(before);
    client.detach();
    beside.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_shrink_is_refused_while_open_and_no_loss_is_silent() {
    let scratch = Scratch::new();
    let path = scratch.path("a.img");
    sparse_file(&path, 16 * MIB);
    let spec = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(&spec).start();
    let client = attach(&server, "vol0", &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 12 * MIB, &[1; 4096]), Reply::Error(0));
    let smaller = ["export", "resize", "vol0", "--size", "8M"];
    let refused = server.command(&smaller).code(1);
    let _ = refused
        .says("cannot resize \"vol0\": its target has 16777216 bytes, ")
        .says("and data beyond 8388608 bytes would be lost; it is open; use --force");
    // The export is also found under a different spelling of its name.
    let slash = ["export", "resize", "/vol0", "--size", "8M"];
    let _ = server.command(&slash).code(1).says("would be lost; it is open; use --force");
    assert_eq!(fs::metadata(&path).expect("the file").len(), 16 * MIB);
    let _ = server.command(&[&smaller[..], &["--force"]].concat()).ok().says("from 16777216");
    await_size(&client, 8 * MIB);
    assert_eq!(fs::metadata(&path).expect("the file").len(), 8 * MIB);
    assert_eq!(raw.write(0, 12 * MIB, &[1; 4096]), Reply::Error(ENOSPC));
    assert_eq!(raw.read(12 * MIB, &mut [0; 4096]), Err(Reply::Error(EINVAL)));
    // Lost data that was acknowledged without a flush is reported once.
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(EIO));
    assert_eq!(raw.write(0, 0, &[2; 4096]), Reply::Error(0));
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    // The size stays until a command changes it.
    set_len(&path, 16 * MIB);
    sleep(Duration::from_secs(3));
    assert_eq!(size_in_list(&server), 8 * MIB);
    // Growing the export to a size below the length of its file would truncate the file.
    let between = ["export", "resize", "vol0", "--size", "12M"];
    let refused = "its file has 16777216 bytes and would be truncated";
    let _ = server.command(&between).code(1).says(refused);
    assert_eq!(resize(&server, &[])["size"], 16 * MIB);
    await_size(&client, 16 * MIB);
    let mut bytes = [9; 4096];
    assert_eq!(raw.read(12 * MIB, &mut bytes), Ok(()));
    assert_eq!(bytes, [0; 4096]);
    drop(raw);
    client.detach();
    let _ = server.command(&smaller).code(1).says("would be lost; use --force");
    let _ = server.command(&[&smaller[..], &["--force"]].concat()).ok().says("to 8388608 bytes");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_idle_export_is_truncated_only_by_force() {
    let scratch = Scratch::new();
    let path = scratch.path("a.img");
    sparse_file(&path, 16 * MIB);
    let length = || fs::metadata(&path).expect("the file").len();
    let spec = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(&spec).export("mem=mem:2M").start();
    let try_cut = |name, size, had| {
        let words = ["export", "resize", name, "--size", size];
        let _ = server.command(&words).code(1).says(had).says("would be lost; use --force");
    };
    try_cut("vol0", "5M", "its target has 16777216 bytes, and data beyond 5242880 bytes");
    try_cut("mem", "1M", "its target has 2097152 bytes, and data beyond 1048576 bytes");
    assert_eq!((length(), size_in_list(&server)), (16 * MIB, json!(16 * MIB)));
    // Adopting a truncated file's new length loses nothing; truncating the file further does.
    set_len(&path, 8 * MIB);
    try_cut("vol0", "5M", "its target has 8388608 bytes, and data beyond 5242880 bytes");
    assert_eq!(length(), 8 * MIB);
    assert_eq!(resize(&server, &["--size", "8M"])["size"], 8 * MIB);
    set_len(&path, 4 * MIB);
    assert_eq!(resize(&server, &[])["size"], 4 * MIB);
    // Nor is a file that was truncated and then grew again truncated to its export's size.
    set_len(&path, 2 * MIB);
    wait_for("the cut", COMMAND_TIME_MAX, || (export(&server)["state"] == "cut").then_some(()));
    set_len(&path, 32 * MIB);
    try_cut("vol0", "4M", "its target has 33554432 bytes, and data beyond 4194304 bytes");
    assert_eq!(resize(&server, &[])["size"], 32 * MIB);
    assert_eq!(resize(&server, &["--size", "5M", "--force"])["size_before"], 32 * MIB);
    assert_eq!(length(), 5 * MIB);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_truncated_file_is_accepted_only_by_force() {
    let scratch = Scratch::new();
    let path = scratch.path("a.img");
    sparse_file(&path, 16 * MIB);
    let spec = format!("vol0={}", scratch.text("a.img"));
    let server = Server::builder().export(&spec).start();
    let client = attach(&server, "vol0", &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    assert_eq!(raw.write(0, 12 * MIB, &[1; 4096]), Reply::Error(0));
    set_len(&path, 8 * MIB);
    assert_eq!(raw.read(12 * MIB, &mut [0; 4096]), Err(Reply::Error(EIO)));
    wait_for("the cut", COMMAND_TIME_MAX, || (export(&server)["state"] == "cut").then_some(()));
    set_len(&path, 32 * MIB);
    sleep(Duration::from_secs(3));
    assert_eq!(size_in_list(&server), 16 * MIB, "a truncated file does not grow on its own");
    assert_eq!(export(&server)["state"], "cut");
    let _ = server.command(&["export", "list"]).ok().says(" cut ");
    assert_eq!(raw.write(0, 12 * MIB, &[1; 4096]), Reply::Error(EIO));
    let refused = server.command(&["export", "resize", "vol0"]).code(1);
    let refused =
        refused.says("its target was truncated to ").says(" and has 33554432 bytes again");
    let _ = refused.says(" is lost, and it is open");
    let _ = server.command(&["export", "resize", "vol0", "--force"]).ok();
    assert_eq!(export(&server)["state"], "open");
    await_size(&client, 32 * MIB);
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(EIO));
    assert_eq!(raw.write(0, 12 * MIB, &[1; 4096]), Reply::Error(0));
    assert_eq!(raw.call(0, consts::CMD_FLUSH, 0, 0), Reply::Error(0));
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn exports_in_memory_are_resized_by_command() {
    let server = Server::builder().export("vol0=mem:1000k").export("vol1=null:1M").start();
    let client = attach(&server, "vol0", &[]);
    let mut raw = RawNbd::go(client.front(), "vol0");
    let last = 996 << 10;
    assert_eq!(raw.write(0, last, &[1; 4096]), Reply::Error(0));
    assert_eq!(resize(&server, &["--size", "2M"])["size"], 2 * MIB);
    await_size(&client, 2 * MIB);
    assert_eq!(export(&server)["backing"], "mem:2M");
    let _ = server.command(&["export", "save"]).ok().says("mem:2M");
    // One offset within the last chunk before the change, and one beyond it.
    for offset in [1000 << 10, 2 * MIB - 4096] {
        let mut bytes = [9; 4096];
        assert_eq!(raw.read(offset, &mut bytes), Ok(()));
        assert_eq!(bytes, [0; 4096]);
        assert_eq!(raw.write(0, offset, &[2; 4096]), Reply::Error(0));
    }
    let mut bytes = [0; 4096];
    assert_eq!(raw.read(last, &mut bytes), Ok(()));
    assert_eq!(bytes, [1; 4096]);
    let _ = resize(&server, &["--size", "1000k", "--force"]);
    let _ = resize(&server, &["--size", "2M"]);
    await_size(&client, 2 * MIB);
    assert_eq!(raw.read(1000 << 10, &mut bytes), Ok(()));
    assert_eq!(bytes, [0; 4096], "the truncated bytes read as zeroes");
    let _ = server.command(&["export", "resize", "vol1", "--size", "3M"]).ok().says("vol1 resized");
    for (words, why) in [
        (["vol0", "--size", "1001"], "not a multiple of its block size of 512"),
        (["vol0", "--size", "0"], "its size cannot be 0; use `export remove`"),
        (["vol0", "--size", "15E"], "more than the largest size, 8E"),
        (["none", "--size", "1M"], "there is no export"),
    ] {
        let words = [&["export", "resize"], &words[..]].concat();
        let _ = server.command(&words).code(1).says(why);
    }
    drop(raw);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_idle_client_is_notified_of_a_forced_removal() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let client = attach(&server, "vol0", &["--no-path", "queue"]);
    let _ = server.command(&["export", "remove", "vol0", "--force"]).ok();
    // The client notices even without IO.
    wait_for("the client to notice the removal", COMMAND_TIME_MAX, || {
        let shown = client.command(&["status", "vol0", "-o", "json"]);
        shown.stdout.contains("operator removed the export").then_some(())
    });
    let _ = client.command(&["status", "vol0"]).code(3);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
