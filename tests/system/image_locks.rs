//! Tests of the locks on exported images against the real qemu programs.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use rtrs_core::rt::blkdev::{is_byte_locked, lock_byte};
use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Proc, STOP_TIME_MAX, Scratch, Server, bin, requires, run,
    sparse_file, wait_for,
};

const MIB: u64 = 1 << 20;
const START_TIME_MAX: Duration = Duration::from_secs(60);

/// Opens an image with qemu-io and reads from it; if `write` is set, also writes to it.
fn qemu_io(image: &str, write: bool) -> Finished {
    let (mode, command) = if write { (&[][..], "write 0 4k") } else { (&["-r"][..], "read 0 4k") };
    let words = [mode, &["-f", "raw", "-c", command, image]].concat();
    run("qemu-io", &words, COMMAND_TIME_MAX)
}

/// Starts a qemu server that keeps the image open until it ends.
fn hold(image: &str, scratch: &Scratch, writable: &str) -> Proc {
    let pid_file = scratch.path("pid");
    let mut command = Command::new("qemu-storage-daemon");
    command.args(["--blockdev", &format!("driver=file,node-name=f,filename={image}")]);
    let socket = scratch.text("qemu.sock");
    command.args(["--nbd-server", &format!("addr.type=unix,addr.path={socket}")]);
    let export = format!("type=nbd,id=e,node-name=f,writable={writable}");
    command.args(["--export", &export, "--pidfile", &scratch.text("pid")]);
    let qemu = Proc::start(command);
    // The pid file is written once the export is open.
    wait_for("qemu's pid file", START_TIME_MAX, || pid_file.exists().then_some(()));
    qemu
}

fn check(export: &str) -> Finished {
    let words = ["--export", export, "--listen", "tcp://127.0.0.1:0", "--check"];
    run(bin("rtrs-server"), &words, COMMAND_TIME_MAX)
}

#[test]
fn qemu_does_not_write_to_an_exported_image() {
    if !requires(&["qemu-io", "qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("vm.img");
    sparse_file(&scratch.path("vm.img"), MIB);
    let server = Server::builder().export(format!("vm={image}")).start();
    let refused = qemu_io(&image, true);
    assert!(refused.stderr.contains("Failed to get \"write\" lock"), "{refused:?}");
    let words = ["info", "-U", "-f", "raw", &image];
    let _ = run("qemu-img", &words, COMMAND_TIME_MAX).ok();
    let _ = server.stop(STOP_TIME_MAX);
    let _ = qemu_io(&image, true).ok();
    // A read-only export excludes no writer.
    let server = Server::builder().export(format!("vm={image},ro")).start();
    let _ = qemu_io(&image, false).ok();
    let _ = qemu_io(&image, true).ok();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_export_that_becomes_read_only_gives_up_the_locks_of_a_writer_once_unused() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("vm.img"), MIB);
    let image = File::open(scratch.path("vm.img")).expect("the image");
    let server = Server::builder().export(format!("vm={}", scratch.text("vm.img"))).start();
    // The bytes that mark the holder as a writer and exclude other writers.
    let locked = || [101, 201].map(|byte| is_byte_locked(&image, byte).expect("an answer"));
    let set = |option| server.command(&["export", "set", "vm", option]);
    assert_eq!(locked(), [true, true]);
    let _ = set("ro").ok();
    assert_eq!(locked(), [false, false]);
    image.lock().expect("no server holds it");
    let _ = set("rw").code(1).says("is locked");
    image.unlock().expect("the lock");
    let _ = set("rw").ok();
    assert_eq!(locked(), [true, true]);
    // While in use, the file stays open, and it becomes writable again without a lock.
    let ro = ["--access", "ro", "--session-name", "reader"];
    let reader = Client::attach("vm").path(server.portal()).args(&ro).start();
    let _ = set("ro").ok();
    let _ = set("rw").ok();
    let _ = set("ro").ok();
    assert_eq!(locked(), [true, true]);
    reader.detach();
    wait_for("the end of the locks", START_TIME_MAX, || (locked() == [false, false]).then_some(()));
    let _ = server.stop(STOP_TIME_MAX);
}

/// Returns the state of an export.
fn state(server: &Server, name: &str) -> String {
    let list = server.command(&["export", "list", "-o", "json"]).ok().json();
    let exports = list["exports"].as_array().expect("a list").clone();
    let found = exports.into_iter().find(|export| export["name"] == name).expect("the export");
    found["state"].as_str().expect("a state").to_owned()
}

/// A virtual machine that restarts releases its image briefly.
#[test]
fn an_image_is_opened_once_its_holder_has_released_it_permanently() {
    let scratch = Scratch::new();
    let [waits, reloads] = ["waits.img", "reloads.img"].map(|name| {
        sparse_file(&scratch.path(name), MIB);
        let holder = File::open(scratch.path(name)).expect("the image");
        // The byte that excludes other writers.
        lock_byte(&holder, 201).expect("the lock");
        holder
    });
    let server = Server::builder()
        .export(format!("waits={}", scratch.text("waits.img")))
        .export(format!("reloads={}", scratch.text("reloads.img")))
        .export("other=mem:1M")
        .start();
    let _ = server.command(&["export", "list"]).ok().says("likely a virtual machine");
    drop(reloads);
    let _ = server.command(&["reload"]).code(1);
    assert_eq!(["reloads", "waits"].map(|name| state(&server, name)), ["unused", "failed"]);
    // The image is opened at one of the next checks, without an operator's help.
    drop(waits);
    wait_for("the image", 2 * START_TIME_MAX, || {
        (state(&server, "waits") == "unused").then_some(())
    });
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_preview_finds_what_a_reload_finds() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    std::fs::create_dir(scratch.path("exports.d")).expect("a directory");
    std::fs::write(&config, "insecure-open: true\nexport: [mem=mem:1M]\n").expect("a file");
    let server = Server::builder().args(&["--config", &config]).start();
    sparse_file(&scratch.path("vm.img"), MIB);
    let holder = File::open(scratch.path("vm.img")).expect("the image");
    // The byte that excludes other writers.
    lock_byte(&holder, 201).expect("the lock");
    let text = format!("vm={}\n", scratch.text("vm.img"));
    std::fs::write(scratch.path("exports.d/vm.yaml"), text).expect("a file");
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let _ = server.command(words).code(1).says("likely a virtual machine");
    }
    let text = format!("vm={},no-lock\n", scratch.text("vm.img"));
    std::fs::write(scratch.path("exports.d/vm.yaml"), text).expect("a file");
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let _ = server.command(words).ok().says("added vm");
    }
    // An empty file, as left by a full disk, does not silently remove its exports.
    std::fs::write(scratch.path("exports.d/vm.yaml"), "").expect("a file");
    for words in [&["reload", "--dry-run"][..], &["reload"]] {
        let _ = server.command(words).ok().says("vm.yaml is empty and defines no export");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_image_that_qemu_has_open_is_not_exported_for_writing() {
    if !requires(&["qemu-storage-daemon"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.text("vm.img");
    sparse_file(&scratch.path("vm.img"), MIB);
    let export = format!("vm={image}");
    let qemu = hold(&image, &scratch, "on");
    let _ = check(&export).code(1).says("likely a virtual machine").says("no-lock");
    let _ = check(&format!("{export},ro")).ok();
    let _ = check(&format!("{export},no-lock")).ok();
    // The other exports are served, and so is this one as soon as qemu has ended.
    let server = Server::builder().export(&*export).export("other=mem:1M").start();
    let list = || server.command(&["export", "list", "-o", "json"]).ok().stdout;
    let failed = list();
    assert!(failed.contains("likely a virtual machine"), "{failed}");
    let _ = qemu.terminate(STOP_TIME_MAX);
    let _ = server.command(&["reload"]).ok();
    let served = list();
    assert!(!served.contains("likely a virtual machine"), "{served}");
    let _ = server.stop(STOP_TIME_MAX);
    // Two readers.
    let qemu = hold(&image, &scratch, "off");
    let _ = check(&format!("{export},ro")).ok();
    let _ = qemu.terminate(STOP_TIME_MAX);
}
