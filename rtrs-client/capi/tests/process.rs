//! Tests of processes that use `librtrs`: forks, unloading, many opens, memory errors.

use std::path::Path;
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Proc, STOP_TIME_MAX, Scratch, Server, quick, requires, run,
    send_signal,
};

use super::{HEADER, Installed, passed, root, server, uri};

/// 1,000 opens; 100 if `RTRS_QUICK` is set.
#[test]
fn many_opens_leave_nothing() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let server = server();
    let mut command = Command::new(installed.compile("tests/process.c"));
    let rounds = if quick() { "100" } else { "1000" };
    command.args(["opens", &format!("{}?retry-for=60s", uri(&server)), rounds]);
    // One arena and no cached thread stacks: their number would depend on thread timing.
    command.env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.pthread.stack_cache_size=0");
    passed(Proc::start(command).wait(3 * COPY_TIME_MAX));
    let _ = server.stop(STOP_TIME_MAX);
}

/// The child keeps the sockets of the killed process open, so only heartbeats reveal that the
/// process is gone.
#[test]
fn a_child_does_not_keep_the_volume_of_its_killed_parent() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("tests/process.c");
    let server = server();
    let writer = format!("{}?access=rw", uri(&server));
    let mut command = Command::new(&program);
    command.args(["forks", &writer]);
    let mut parent = Proc::start(command);
    let child = parent.wait_starts("child ", 1, COMMAND_TIME_MAX).remove(0);
    let refused = run(&program, &["writes", &writer], COMMAND_TIME_MAX).code(1);
    let _ = refused.says("another session has it open for writing");
    parent.signal("KILL");
    let _ = parent.wait(COMMAND_TIME_MAX);
    let next = run(&program, &["writes", &format!("{writer}&retry-for=60s")], COMMAND_TIME_MAX);
    let lives = Path::new("/proc").join(&child).join("fd").exists();
    let killed = send_signal("KILL", &child);
    passed(next);
    assert!(lives && killed, "the child has already exited");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_library_can_be_loaded_again() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile_unlinked("tests/loads.c");
    let server = server();
    let words = [format!("{}?retry-for=60s", uri(&server)), installed.0.text("lib/librtrs.so.0")];
    passed(run(program, &words, COPY_TIME_MAX));
    let _ = server.stop(STOP_TIME_MAX);
}

/// Returns the valgrind command, which exits with code 9 after an invalid access or a leak. It does
/// not check whether values are initialized: valgrind does not know which bytes the kernel has
/// written through a ring.
fn valgrind() -> Command {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--error-exitcode=9", "--undef-value-errors=no"]);
    valgrind.args(["--leak-check=full", "--show-leak-kinds=definite"]);
    valgrind.arg("--errors-for-leak-kinds=definite");
    let suppressions = root().join("rtrs-client/capi/tests/valgrind.supp");
    valgrind.arg(format!("--suppressions={}", suppressions.display()));
    valgrind
}

#[test]
fn valgrind_finds_no_memory_error() {
    if !requires(&["valgrind"]) {
        return;
    }
    let Some(installed) = Installed::new(HEADER) else { return };
    let loses = installed.0.path("loses.c");
    let text = "#include <stdlib.h>\nint main(void) { return !calloc(1, 100); }\n";
    std::fs::write(&loses, text).expect("a file");
    let mut wrong = valgrind();
    wrong.arg(installed.compile_file(&loses));
    let _ = Proc::start(wrong).wait(COMMAND_TIME_MAX).code(9).says("definitely lost");

    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    // Under valgrind, a thread in io_uring_enter keeps all other threads from running, so no thread
    // may sleep long: frequent heartbeats wake it. Late heartbeats matter to neither end.
    let patient = ["--heartbeat-missed-max=1000", "--heartbeat-idle-max=10ms"];
    let server = server.args(&patient).export("vol0=mem:64M").start();
    let settings = "retry-for=60s&heartbeat=10ms&heartbeat-missed-max=1000";
    let uri = format!("{}?{settings}", uri(&server));
    for (file, words) in [
        ("tests/api.c", vec!["operations", &*uri]),
        ("tests/stats.c", vec![&*uri]),
        ("tests/registered.c", vec![&*uri, &held.text("")]),
    ] {
        let mut right = valgrind();
        right.arg(installed.compile(file)).args(words);
        passed(Proc::start(right).wait(COPY_TIME_MAX));
    }
    let _ = server.stop(STOP_TIME_MAX);
}
