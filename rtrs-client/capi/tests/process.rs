//! Life of a process that uses `librtrs`: forks, unloading, many opens.

use std::path::Path;
use std::process::Command;

use rtrs_tests::{COMMAND_TIME_MAX, COPY_TIME_MAX, Proc, STOP_TIME_MAX, run, send_signal};

use super::{HEADER, Installed, passed, server, uri};

#[test]
fn a_thousand_opens_leave_nothing() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let server = server();
    let mut command = Command::new(installed.compile("tests/process.c"));
    command.args(["thousand", &format!("{}?retry-for=60s", uri(&server))]);
    // Neither arenas nor stacks of ended threads, whose number depends on the order of threads.
    command.env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.pthread.stack_cache_size=0");
    passed(Proc::start(command).wait(COPY_TIME_MAX));
    let _ = server.stop(STOP_TIME_MAX);
}

/// The child of a killed process keeps the sockets open, so only heartbeats reveal its end.
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
    assert!(lives && killed, "the child has ended before");
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
