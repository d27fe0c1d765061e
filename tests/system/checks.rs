//! Tests of `--check` in both daemons: problems that a start would run into.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::net::TcpListener;

use rtrs_tests::{
    COMMAND_TIME_MAX, Finished, STOP_TIME_MAX, Scratch, Server, bin, free_port, is_root, requires,
    run, skip,
};

fn check(args: &[&str]) -> Finished {
    let words = ["--export", "v=mem:1M", "--listen", "tcp://127.0.0.1:0", "--check"];
    run(bin("rtrs-server"), &[&words[..], args].concat(), COMMAND_TIME_MAX)
}

#[test]
fn a_check_tests_the_metrics_address_and_the_directories() {
    let scratch = Scratch::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = taken.local_addr().expect("its address").to_string();
    let socket = scratch.text("m.sock");
    let unix = format!("unix:{socket}");
    let refused = format!("cannot serve metrics at {at}: Address already in use");
    let _ = check(&["--metrics", &at]).code(1).says(&refused);
    let _ = check(&["--metrics", &unix]).ok();
    let attach = |at: &str| {
        let nbd = scratch.text("nbd.sock");
        let words = ["attach", "v", "--path", "tcp://127.0.0.1", "--socket", &nbd, "--check"];
        run(bin("rtrs-client"), &[&words[..], &["--metrics", at]].concat(), COMMAND_TIME_MAX)
    };
    let _ = attach(&at).code(1).says(&refused);
    let _ = attach(&unix).ok();
    File::create(scratch.path("file")).expect("a file");
    let state = |name: &str| check(&["--state-dir", &scratch.text(name)]).ok().stderr;
    let warning = state("file");
    assert!(warning.contains("warning: cannot use the state directory: "), "{warning}");
    assert!(!state("new").contains("state directory"));
    let below = scratch.text("file/x");
    let _ = check(&["--run-dir", &below]).code(1).says("file");
    // Checks leave nothing behind.
    let left = fs::read_dir(scratch.dir())
        .expect("the directory")
        .map(|entry| entry.expect("an entry").file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["file"]);
}

/// The server starts without the file, unless that could open other exports to everyone.
#[test]
fn a_link_of_exports_dir_that_leads_nowhere_is_a_failed_export() {
    let scratch = Scratch::new();
    let (dir, file) = (scratch.text("exports.d"), scratch.path("b"));
    fs::create_dir(&dir).expect("a directory");
    fs::write(format!("{dir}/a.yaml"), "a=mem:1M\n").expect("a file");
    std::os::unix::fs::symlink(&file, format!("{dir}/b.yaml")).expect("a link");
    let why = format!("b.yaml is a symbolic link to {}, which does not exist", file.display());
    let own = ["--listen", "tcp://127.0.0.1:0", "--exports-dir", &dir];
    let listed = ["--access", "anyone@127.0.0.0/8:rw"];
    let none: &[&str] = &[];
    for more in [none, &["--check"], &["--strict"], &["--print-config"]] {
        let list = if more.is_empty() { none } else { &listed[..] };
        let words = [&own[..], list, more].concat();
        let _ = run(bin("rtrs-server"), &words, COMMAND_TIME_MAX).code(1).says(&why);
    }
    let server = Server::builder().args(&["--exports-dir", &dir]).args(&listed).start();
    let states = || {
        let list = server.command(&["export", "list", "-o", "json"]).ok().json();
        let all = list["exports"].as_array().expect("a list").iter();
        all.map(|one| format!("{} {}", one["name"], one["state"])).collect::<Vec<_>>()
    };
    assert_eq!(states(), ["\"a\" \"unused\"", "\"b\" \"failed\""]);
    let _ = server.command(&["export", "list"]).ok().says(&why);
    let _ = server.command(&["metrics"]).ok().says("rtrs_server_export_failed{export=\"b\"} 1");
    let _ = server.command(&["reload"]).code(1).says(&why);
    fs::write(&file, "b=mem:1M\n").expect("a file");
    let _ = server.command(&["reload"]).ok();
    assert_eq!(states(), ["\"a\" \"unused\"", "\"b\" \"unused\""]);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn relative_paths_in_a_removed_directory_are_named() {
    let scratch = Scratch::new();
    let in_removed = |program: &str, words: &[&str]| {
        let (dir, program) = (scratch.text("removed"), bin(program));
        fs::create_dir(&dir).expect("a directory");
        let script = "cd \"$0\" && rmdir \"$0\" && exec \"$@\"";
        let shell = ["-c", script, &dir, program.to_str().expect("a plain path")];
        run("sh", &[&shell[..], words].concat(), COMMAND_TIME_MAX)
    };
    let why = |path: &str| {
        format!("\"{path}\" is a relative path, and the current directory was removed; ")
    };
    let refused = in_removed("rtrs-server", &["--export", "v=disk.img", "--check"]).code(2);
    let _ = refused.says(&format!("cannot use export: {}", why("disk.img")));
    let refused = in_removed("rtrs-server", &["--config", "s.yaml", "--check"]).code(1);
    let _ = refused.says(&format!("the configuration file s.yaml: {}", why("s.yaml")));
    let attach = ["attach", "v", "--path", "tcp://127.0.0.1", "--check", "--socket"];
    let refused = in_removed("rtrs-client", &[&attach[..], &["s.sock"]].concat()).code(2);
    let _ = refused.says(&format!("cannot use socket: {}", why("s.sock")));
    let socket = scratch.text("nbd.sock");
    for (flag, what) in [("--run-dir", "run-dir"), ("--tls-dir", "tls-dir or key-file")] {
        let words = [&attach[..], &[&socket, flag, "here"]].concat();
        let refused = in_removed("rtrs-client", &words).code(2);
        let _ = refused.says(&format!("cannot use {what}: {}", why("here")));
    }
}

#[test]
fn a_check_next_to_the_running_server_does_not_try_its_metrics_address() {
    let metrics = format!("127.0.0.1:{}", free_port());
    let listen = format!("tcp://127.0.0.1:{}", free_port());
    let words = ["--metrics", &metrics];
    let server = Server::builder().export("v=mem:1M").listen(&*listen).args(&words).start();
    let run_dir = server.run_dir();
    let run_dir = run_dir.to_str().expect("a plain path");
    let same = ["--export", "v=mem:1M", "--listen", &listen, "--run-dir", run_dir, "--check"];
    let same = [&same[..], &words].concat();
    let held = format!("{listen}, http://{metrics}/metrics, which were not tested");
    let _ = run(bin("rtrs-server"), &same, COMMAND_TIME_MAX).ok().says(&held);
    // A second server cannot use the address.
    let scratch = Scratch::new();
    let elsewhere = scratch.text("run");
    let other = [&words[..], &["--run-dir", &elsewhere]].concat();
    let _ = check(&other).code(1).says("cannot serve metrics at");
    let _ = server.stop(STOP_TIME_MAX);
}

/// Whether the kernel charges rings to the limit on locked memory (since Linux 6.14).
fn charges_rings() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let mut numbers = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(14))
}

/// Runs one of the programs as root, limited to 64 KiB of locked memory.
fn limited(program: &str, args: &[&str]) -> Finished {
    let program = bin(program);
    let limits = ["--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock"];
    let words = limits.iter().map(OsStr::new).chain([program.as_os_str()]);
    let words: Vec<&OsStr> = words.chain(args.iter().map(OsStr::new)).collect();
    run("prlimit", &words, COMMAND_TIME_MAX)
}

#[test]
fn a_check_names_the_limit_of_locked_memory_and_a_failed_attach_ends_at_once() {
    if !is_root() || !requires(&["prlimit", "setpriv"]) {
        return;
    }
    if !charges_rings() {
        skip("the kernel does not charge rings to the limit of locked memory");
        return;
    }
    let why = "cannot set up io_uring: io_uring needs locked memory, but the limit of this user is \
               64 KiB: raise the limit";
    let words = ["--export", "v=mem:1M", "--listen", "tcp://127.0.0.1:0", "--check"];
    let shards = ["--shards", "4"];
    let _ = limited("rtrs-server", &[&words[..], &shards].concat()).code(1).says(why);
    let scratch = Scratch::new();
    let server = Server::builder().export("v=mem:1M").start();
    let (socket, run_dir) = (scratch.text("nbd.sock"), scratch.text("run"));
    let words = ["attach", "v", "--path", server.portal(), "--socket", &socket];
    let words = [&words[..], &["--run-dir", &run_dir], &shards].concat();
    let _ = limited("rtrs-client", &[&words[..], &["--check"]].concat()).code(1).says(why);
    let _ = limited("rtrs-client", &words).code(1).says(why);
    // The failed session has left nothing in the way.
    let _ = run(bin("rtrs-client"), &words, COMMAND_TIME_MAX).ok();
    let _ = run(bin("rtrs-client"), &["detach", "v", "--run-dir", &run_dir], STOP_TIME_MAX).ok();
    let _ = server.stop(STOP_TIME_MAX);
}
