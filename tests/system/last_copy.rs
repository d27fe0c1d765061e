//! Tests of deleted files that only the server still holds, and of changed exports without a file.

use std::fs;
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Proc, RawNbd, STOP_TIME_MAX, Scratch, Server, sparse_file,
    wait_for,
};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

/// A server with exports in exports.d, whose files contain their names.
struct Host {
    scratch: Scratch,
    server: Server,
}

impl Host {
    fn start(names: &[&str]) -> Self {
        let scratch = Scratch::new();
        fs::create_dir(scratch.path("exports.d")).expect("a directory");
        fs::write(scratch.path("server.yaml"), "insecure-open: true\n").expect("a file");
        for name in names {
            put(&scratch, name, name);
            configure(&scratch, name, "");
        }
        let config = scratch.text("server.yaml");
        let server = Server::builder().args(&["--config", &config]).start();
        Self { scratch, server }
    }

    fn state(&self, name: &str) -> String {
        let list = self.server.command(&["export", "list", "-o", "json"]).ok().json();
        let exports = list["exports"].as_array().expect("a list").clone();
        let found = exports.into_iter().find(|export| export["name"] == name);
        let found = found.unwrap_or_else(|| panic!("no export {name}"));
        found["state"].as_str().expect("a state").to_owned()
    }

    /// Returns the first byte of an export, as a client reads it.
    fn byte(&self, name: &str) -> u8 {
        let client = Client::attach(name).path(self.server.portal()).start();
        let mut found = [0; 512];
        assert_eq!(RawNbd::go(client.front(), name).read(0, &mut found), Ok(()));
        client.detach();
        found[0]
    }
}

/// Replaces an export's file with a new file that has this content.
fn put(scratch: &Scratch, name: &str, content: &str) {
    let fresh = scratch.path("fresh.img");
    fs::write(&fresh, content.repeat(MIB as usize)).expect("a file");
    fs::rename(fresh, scratch.path(&format!("{name}.img"))).expect("a file in its place");
}

fn configure(scratch: &Scratch, name: &str, options: &str) {
    let text = format!("{name}={}{options}\n", scratch.text(&format!("{name}.img")));
    fs::write(scratch.path(&format!("exports.d/{name}.yaml")), text).expect("a file");
}

/// Returns the names and reasons in one part of a reload's report.
fn listed(report: &Value, what: &str) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = report[what].as_array().expect("a list").iter();
    all.map(|one| (text(&one["name"]), text(&one["why"]))).collect()
}

/// Runs the `cp` command that a reason contains.
fn copy_as_told(why: &str, to: &str) -> Finished {
    let (_, command) = why.split_once("with `").expect("a command");
    let (command, _) = command.split_once('`').expect("the end of the command");
    let mut shell = Command::new("sh");
    shell.args(["-c", &command.replace("FILE", to)]);
    Proc::start(shell).wait(COMMAND_TIME_MAX)
}

#[test]
fn a_deleted_file_is_closed_only_by_force() {
    let host = Host::start(&["a", "b"]);
    let Host { scratch, server } = &host;
    fs::remove_file(scratch.path("a.img")).expect("a file");
    fs::remove_file(scratch.path("b.img")).expect("a file");
    assert_eq!((host.state("a"), host.state("b")), ("missing".into(), "missing".into()));
    // Neither a new file at the path nor a changed configuration closes the deleted file.
    put(scratch, "a", "x");
    fs::remove_file(scratch.path("exports.d/b.yaml")).expect("a file");
    for words in [&["reload", "--dry-run", "-o", "json"][..], &["reload", "-o", "json"]] {
        let kept = listed(&server.command(words).ok().json(), "kept");
        let names: Vec<&str> = kept.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["b", "a"], "{words:?}: {kept:?}");
    }
    server.wait_output("not reopened: the open file was deleted");
    assert_eq!(host.byte("a"), b'a');
    let set = ["export", "set", "b", "block-size=4096"];
    let _ = server.command(&set).code(1);
    assert_eq!((host.state("a"), host.state("b")), ("replaced".into(), "missing".into()));
    // The content can be copied as the refusal says.
    let kept = listed(&server.command(&["reload", "-o", "json"]).ok().json(), "kept");
    for ((name, why), content) in kept.iter().zip([b'b', b'a']) {
        let copy = scratch.text("copy.img");
        let _ = copy_as_told(why, &copy).ok();
        let copied = fs::read(&copy).expect("the copy");
        assert_eq!((copied.len() as u64, copied[0]), (MIB, content), "{name}: {why}");
    }
    let report = server.command(&["reload", "--force", "-o", "json"]).ok().json();
    assert_eq!((&report["removed"][0], &report["changed"][0]), (&"b".into(), &"a".into()));
    assert_eq!(host.byte("a"), b'x');
    let _ = host.server.stop(STOP_TIME_MAX);
}

#[test]
fn sighup_does_not_close_a_deleted_file() {
    let mut host = Host::start(&["a", "b"]);
    fs::remove_file(host.scratch.path("a.img")).expect("a file");
    assert_eq!(host.state("a"), "missing");
    fs::remove_file(host.scratch.path("exports.d/a.yaml")).expect("a file");
    configure(&host.scratch, "b", ",block-size=4096");
    host.server.signal("HUP");
    host.server.wait_output("configuration reloaded");
    assert_eq!((host.state("a"), host.state("b")), ("missing".into(), "unused".into()));
    let _ = host.server.command(&["export", "remove", "a", "--force"]).ok();
    let _ = host.server.stop(STOP_TIME_MAX);
}

/// The file of an export may be on a file system that is not mounted; other changes still apply.
#[test]
fn a_changed_export_without_a_file_does_not_stop_a_reload() {
    let host = Host::start(&["a", "b"]);
    let Host { scratch, server } = &host;
    let moved = scratch.path("moved.img");
    fs::rename(scratch.path("a.img"), &moved).expect("a file");
    configure(scratch, "a", ",block-size=4096");
    configure(scratch, "b", ",block-size=4096");
    fs::write(scratch.path("exports.d/c.yaml"), "c=mem:1M\n").expect("a file");
    let report = server.command(&["reload", "-o", "json"]).code(1).json();
    assert_eq!((&report["added"][0], &report["changed"][0]), (&"c".into(), &"b".into()));
    let failed = listed(&report, "failed");
    assert_eq!((failed.len(), &*failed[0].0), (1, "a"));
    assert!(failed[0].1.contains("a.img does not exist"), "{report}");
    assert!(failed[0].1.contains("the export keeps its old options"), "{report}");
    assert_eq!(host.byte("a"), b'a');
    fs::rename(&moved, scratch.path("a.img")).expect("a file");
    let report = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(report["changed"][0], "a", "{report}");
    let _ = host.server.stop(STOP_TIME_MAX);
}

#[test]
fn files_that_are_not_read_and_names_in_two_files_are_reported() {
    let host = Host::start(&["a"]);
    let Host { scratch, server } = &host;
    sparse_file(&scratch.path("c.img"), MIB);
    fs::write(scratch.path("exports.d/c.yml"), "c=mem:1M\n").expect("a file");
    let _ = server.command(&["reload"]).ok().says("c.yml is ignored: ").says(".yaml");
    fs::write(scratch.path("exports.d/z.yaml"), "[b=mem:1M, a=mem:1M]\n").expect("a file");
    let refused = server.command(&["reload"]).code(1).says("two exports have the name \"a\": ");
    let _ = refused.says("exports.d/a.yaml").says("exports.d/z.yaml");
    fs::remove_file(scratch.path("exports.d/z.yaml")).expect("a file");
    fs::write(scratch.path("server.yaml"), "export: [a=mem:1M]\n").expect("a file");
    let refused = server.command(&["reload"]).code(1).says("server.yaml");
    let _ = refused.says("exports.d/a.yaml");
    wait_for("the export", COMMAND_TIME_MAX, || (host.state("a") == "unused").then_some(()));
    let _ = host.server.stop(STOP_TIME_MAX);
}

/// Another program has shrunk the file, so a flush fails.
#[test]
fn a_removal_is_saved_although_the_last_flush_fails() {
    let host = Host::start(&["a", "b"]);
    let file = fs::File::options().write(true).open(host.scratch.path("a.img"));
    file.and_then(|file| file.set_len(4096)).expect("a shorter file");
    wait_for("the server to notice", COMMAND_TIME_MAX, || (host.state("a") == "cut").then_some(()));
    let remove = ["export", "remove", "a", "--save"];
    let _ = host.server.command(&remove).code(1).says("could not be flushed");
    assert!(!host.scratch.path("exports.d/a.yaml").exists());
    let reloaded = host.server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(reloaded["added"], json!([]));
    let _ = host.server.stop(STOP_TIME_MAX);
}
