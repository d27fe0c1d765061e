//! Tests of local volume names: exports with the same name on two servers, attached side by side.

use std::fs;

use rtrs_tests::{
    COMMAND_TIME_MAX, Finished, Front, RawNbd, Reply, STOP_TIME_MAX, Scratch, Server, bin, run,
    wait_for,
};
use serde_json::{Value, json};

const DONE: Reply = Reply::Error(0);

/// Run directory with the sockets of its volumes.
struct Host(Scratch);

impl Host {
    fn run(&self, words: &[&str]) -> Finished {
        let run_dir = self.0.text("run");
        run(bin("rtrs-client"), &[words, &["--run-dir", &run_dir]].concat(), COMMAND_TIME_MAX)
    }

    fn attach(&self, server: &Server, words: &[&str]) -> Finished {
        let socket = self.0.text("{name}.nbd");
        let place = ["--path", server.portal(), "--socket", &socket, "--shards=1"];
        self.run(&[&["attach"], words, &place].concat())
    }

    /// Detaches a volume whose NBD clients have closed their connections.
    fn detach(&self, name: &str) -> Finished {
        wait_for("the NBD clients to be gone", COMMAND_TIME_MAX, || {
            let done = self.run(&["detach", name]);
            Some(done).filter(|done| !done.is_refused_for_users())
        })
    }

    fn nbd(&self, name: &str) -> RawNbd {
        RawNbd::go(&Front::Unix(self.0.text(&format!("{name}.nbd")).into()), name)
    }

    /// Returns the names of the volumes on this host and of their exports, with their sizes.
    fn list(&self) -> Vec<Value> {
        let list = self.run(&["list", "-o", "json"]).ok().json();
        let row = |one: &Value| json!([one["name"], one["export"], one["size"]]);
        list.as_array().expect("a list").iter().map(row).collect()
    }
}

#[test]
fn exports_with_the_same_name_at_two_servers_are_attached_side_by_side() {
    let (one, two) = (
        Server::builder().export("vol0=mem:1M").export("x=mem:4M").start(),
        Server::builder().export("vol0=mem:2M").start(),
    );
    let host = Host(Scratch::new());
    let attached = host.attach(&one, &["vol0", "--as", "a", "-o", "json"]).ok().json();
    assert_eq!((&attached["name"], &attached["export"]), (&json!("a"), &json!("vol0")));
    let _ = host.attach(&two, &["vol0", "--as", "a"]).code(1).says("--as NAME");
    let _ = host.attach(&two, &["vol0", "--as", ""]).code(2).says("--as \"\" is empty");
    let _ = host.attach(&two, &["vol0", "--as", "b"]).ok().says("b attached");
    // Attach export x, which has no local name yet, as another volume of a's session.
    let socket = host.0.text("c.nbd");
    let _ = host.run(&["attach", "x", "--as", "c", "--session", "a", "--socket", &socket]).ok();
    let all =
        [json!(["a", "vol0", 1 << 20]), json!(["b", "vol0", 2 << 20]), json!(["c", "x", 4 << 20])];
    assert_eq!(host.list(), all);
    let _ = host.run(&["list"]).ok().says("  export: vol0");
    let _ = host.run(&["status", "b"]).ok().says("export           vol0");
    for command in ["get", "stats", "logs"] {
        let _ = host.run(&[command, "b"]).ok();
        let _ = host.run(&[command, "vol0"]).code(1);
    }
    let _ = host.run(&["set", "b", "io-timeout=9s"]).ok();

    for (at, name) in ["a", "b", "c"].iter().enumerate() {
        let byte = u8::try_from(at).expect("a few volumes") + 1;
        assert_eq!(host.nbd(name).write(0, 0, &[byte; 512]), DONE, "{name}");
    }
    let writes = |server: &Server, export: &str| {
        let list = server.command(&["export", "list", "-o", "json"]).ok().json();
        let exports = list["exports"].as_array().expect("a list").clone();
        let export = exports.into_iter().find(|one| one["name"] == export).expect("the export");
        export["io"]["writes"].clone()
    };
    let written = [writes(&one, "vol0"), writes(&two, "vol0"), writes(&one, "x")];
    assert_eq!(written, [json!(1), json!(1), json!(1)], "each server has its own write");
    for (at, name) in ["a", "b", "c"].iter().enumerate() {
        let mut block = [0; 512];
        host.nbd(name).read(0, &mut block).expect("a read");
        assert_eq!(block.map(usize::from), [at + 1; 512], "{name}");
    }

    // As after a restart of the host.
    let file = host.0.text("saved.yaml");
    let _ = host.run(&["save", "--output-file", &file]).ok();
    let saved = fs::read_to_string(&file).expect("the saved file");
    let _ = host.detach("b").ok();
    assert_eq!(host.list(), [all[0].clone(), all[2].clone()]);
    let _ = host.detach("c").ok();
    let _ = host.run(&["diff", "-f", &file]).code(1);
    let _ = host.run(&["detach", "--all"]).ok();
    let _ = host.run(&["apply", "-f", &file]).ok();
    assert_eq!(host.list(), all);
    let _ = host.run(&["diff", "-f", &file]).code(0);
    assert_eq!(host.run(&["save"]).ok().stdout, saved);
    let _ = host.run(&["detach", "--all"]).ok();
    for server in [one, two] {
        let _ = server.stop(STOP_TIME_MAX);
    }
}

#[test]
fn bench_measures_the_export_of_a_local_name() {
    let server = Server::builder().export("vol0=mem:1M").start();
    let host = Host(Scratch::new());
    let _ = host.attach(&server, &["vol0", "--as", "a"]).ok();
    let file = host.0.path("b.yaml");
    fs::write(&file, format!("export: vol0\npath: ['{}']\n", server.portal())).expect("a file");
    let file = file.display().to_string();
    let measured = |words: &[&str]| {
        let bench = ["--rw", "randread", "--runtime", "1s", "-o", "json"];
        host.run(&[&["bench"], words, &bench].concat()).ok().json()
    };
    for words in [&["a"][..], &["b", "--config", &file]] {
        let result = measured(words);
        assert_eq!((&result["name"], &result["errors"]), (&json!("vol0"), &json!(0)), "{result}");
        assert_eq!(result["paths"], json!([server.portal()]), "{result}");
    }
    let printed = host.run(&["bench", "b", "--config", &file, "--print-config"]).ok();
    let _ = printed.says("export: vol0");
    // With a path, the name is that of an export.
    let refused = host.run(&["bench", "a", "--path", server.portal(), "--runtime", "1s"]);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    let _ = host.run(&["bench", "vol0", "--as", "c"]).code(2).says("bench attaches nothing");
    let _ = host.run(&["bench", "none"]).code(2).says("path");
    let _ = host.run(&["detach", "a", "--force"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}
