//! Tests of the systemd units in configs/: systemd accepts them and rates their exposure.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rtrs_tests::{COMMAND_TIME_MAX, Finished, Scratch, bin, requires, run};

use crate::settings::root;

const TOOL: &str = "systemd-analyze";
const UNITS: [&str; 9] = [
    "rtrs-server.service",
    "rtrs-server.socket",
    "rtrs-client@.service",
    "rtrs-client@.socket",
    "rtrs-apply.service",
    "rtrs-apply-check.service",
    "rtrs-client-exporter.service",
    "rtrs-client-exporter.socket",
    "rds-node.service",
];
/// Units whose programs do not serve IO.
const WITHOUT_IO: [&str; 2] = ["rtrs-apply-check.service", "rtrs-client-exporter.service"];
const DROP_IN: &str = "rtrs-server.service.d/rdma.conf";

/// Copies the units to a directory, with existing program paths; `drop_in` adds the RDMA drop-in.
fn units(drop_in: bool) -> Scratch {
    let scratch = Scratch::new();
    let configs = root().join("configs");
    for name in UNITS {
        let mut text = fs::read_to_string(configs.join(name)).expect("a unit");
        for program in ["rtrs-server", "rtrs-client", "rds"] {
            // The programs may not be installed where systemd looks for them.
            let path = bin(program).display().to_string();
            for prefix in ["=", ":"] {
                text = text.replace(&format!("{prefix}{program} "), &format!("{prefix}{path} "));
            }
        }
        fs::write(scratch.path(name), text).expect("write a unit");
    }
    if drop_in {
        fs::create_dir(scratch.path("rtrs-server.service.d")).expect("create a directory");
        fs::copy(configs.join(DROP_IN), scratch.path(DROP_IN)).expect("copy a drop-in");
    }
    scratch
}

/// Makes systemd rate a unit's exposure, from 0.0 (nothing is exposed) to 10.0; the command fails
/// above 3.0.
fn rate(unit: &Path) -> Finished {
    let unit = unit.to_str().expect("a plain path");
    run(
        TOOL,
        &["security", "--no-pager", "--offline=true", "--threshold=30", unit],
        COMMAND_TIME_MAX,
    )
}

#[test]
fn systemd_accepts_the_units() {
    if !requires(&[TOOL]) {
        return;
    }
    let scratch = units(true);
    for name in UNITS {
        let unit = scratch.text(name);
        let read = run(TOOL, &["verify", "--man=no", &unit], COMMAND_TIME_MAX).ok();
        // Unknown keys and values cause warnings. The host's own units are ignored.
        let is_ours = |line: &&str| line.contains("rtrs-") || line.contains("rds-");
        let ours: Vec<&str> = read.stderr.lines().filter(is_ours).collect();
        assert!(ours.is_empty(), "{name}: {ours:#?}");
    }
}

#[test]
fn the_units_have_a_low_exposure() {
    if !requires(&[TOOL]) {
        return;
    }
    let (with, without) = (units(true), units(false));
    for unit in [
        without.path("rtrs-server.service"),
        with.path("rtrs-server.service"),
        without.path("rtrs-client@.service"),
        without.path("rtrs-apply.service"),
        without.path("rtrs-apply-check.service"),
        without.path("rtrs-client-exporter.service"),
        without.path("rds-node.service"),
    ] {
        let _ = rate(&unit).ok().says("Overall exposure level");
    }
    // The rating includes the drop-in, and the threshold applies.
    let rated = rate(&with.path("rtrs-server.service")).stdout;
    assert!(rated.contains("AF_NETLINK") && rated.contains("infiniband"), "{rated}");
    let open = without.path("open.service");
    fs::write(&open, "[Service]\nExecStart=/bin/true\n").expect("write a unit");
    assert_ne!(rate(&open).code, Some(0));
}

/// Returns the system calls of one of systemd's sets, including those of nested sets.
fn calls_of(set: &str) -> BTreeSet<String> {
    let listed = run(TOOL, &["syscall-filter", "--no-pager", set], COMMAND_TIME_MAX).ok().stdout;
    let mut calls = BTreeSet::new();
    for word in listed.lines().skip(1).map(str::trim).filter(|word| !word.starts_with('#')) {
        match word.strip_prefix('@') {
            Some(_) => calls.extend(calls_of(word)),
            None => calls.extend((!word.is_empty()).then(|| word.to_owned())),
        }
    }
    calls
}

/// Returns the system calls that a unit allows.
fn allowed(unit: &PathBuf) -> BTreeSet<String> {
    let text = fs::read_to_string(unit).expect("a unit");
    let mut allowed = calls_of("@default");
    for line in text.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        let (words, denies) = match line.strip_prefix('~') {
            Some(words) => (words, true),
            None => (line, false),
        };
        for word in words.split(' ') {
            let calls = if word.starts_with('@') {
                calls_of(word)
            } else {
                BTreeSet::from([word.to_owned()])
            };
            if denies {
                allowed.retain(|call| !calls.contains(call));
            } else {
                allowed.extend(calls);
            }
        }
    }
    allowed
}

#[test]
fn the_units_allow_the_system_calls_of_the_daemons() {
    if !requires(&[TOOL]) {
        return;
    }
    let configs = root().join("configs");
    for name in UNITS.iter().filter(|name| name.ends_with(".service")) {
        let allowed = allowed(&configs.join(name));
        let serves_io = !WITHOUT_IO.contains(name);
        for call in CALLS.iter().chain(&["mlockall", "prctl"]).filter(|_| serves_io) {
            assert!(allowed.contains(*call), "{name} denies {call}");
        }
        for call in ["mount", "setuid", "init_module", "ptrace", "bpf", "kexec_load", "reboot"] {
            assert!(!allowed.contains(call), "{name} allows {call}");
        }
    }
}

/// System calls that the daemons need in addition to those that every program makes. openat2 is
/// needed for search-path.
const CALLS: [&str; 13] = [
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "sched_setaffinity",
    "openat2",
    "flock",
    "fdatasync",
    "fallocate",
    "ftruncate",
    "eventfd2",
    "accept4",
    "statx",
    "ioctl",
];
