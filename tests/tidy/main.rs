//! Rules for the tree, checked by reading its files: which files may use `unsafe`, names that
//! engines must not use, dependencies between crates, lengths of lines and files, and links in
//! documents.
//!
//! A failed rule names each file and line. Exceptions are listed here with their reasons. The
//! checks on a single file are in `judge.rs`, on links in `links.rs`, and on third-party crates in
//! `dependencies.rs`.
#![forbid(unsafe_code)]

mod conformance;
mod dependencies;
mod english;
mod judge;
mod links;
mod modules;
mod parts;
mod words;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use judge::{
    LINE_MAX, engine_breaches, foreign_places, long_lines, own_dependencies, references,
    unfinished, unproven_lines, unsafe_lines,
};

/// Files that may contain `unsafe`; the header of their crate's `lib.rs` names the same files. The
/// verbs provider's files form one module, split by type. `rtrs-capi` has a C interface: it
/// receives pointers from the program and uses the program's memory. `rds-preload` replaces
/// functions of the C library: it exports their names, calls the originals, and accesses memory
/// that programs point to.
const UNSAFE_FILES: &[&str] = &[
    "rds/preload/src/controls.rs",
    "rds/preload/src/descriptors.rs",
    "rds/preload/src/hooks.rs",
    "rds/preload/src/memory.rs",
    "rds/preload/src/real.rs",
    "rtrs-client/capi/src/abi.rs",
    "rtrs-client/capi/src/memory.rs",
    "rtrs-client/capi/src/pointer.rs",
    "rtrs-client/vhost-bridge/src/memory.rs",
    "rtrs-core/src/fabric/verbs/sys/cm.rs",
    "rtrs-core/src/fabric/verbs/sys/cq.rs",
    "rtrs-core/src/fabric/verbs/sys/device.rs",
    "rtrs-core/src/fabric/verbs/sys/qp.rs",
    "rtrs-core/src/fabric/verbs/sys/queue.rs",
    "rtrs-core/base/src/mem/iovecs.rs",
    "rtrs-core/base/src/mem/mapping.rs",
    "rtrs-core/base/src/mem/owned.rs",
    "rtrs-core/base/src/mem/region.rs",
    "rtrs-core/base/src/mem/region/tests.rs",
    "rtrs-core/base/src/mem/truncation.rs",
    "rtrs-core/base/src/mem/truncation/zeroes.rs",
    "rtrs-core/src/rbd.rs",
    "rtrs-core/src/rbd/lock.rs",
    "rtrs-core/base/src/rt/affinity.rs",
    "rtrs-core/base/src/rt/blkdev.rs",
    "rtrs-core/base/src/rt/clock.rs",
    "rtrs-core/base/src/rt/mailbox.rs",
    "rtrs-core/base/src/rt/process.rs",
    "rtrs-core/base/src/rt/ring.rs",
    "rtrs-core/base/src/rt/socket.rs",
    "scripts/bench/vhost-load/src/main.rs",
];

/// Roots of the crates with files that may contain `unsafe`. The roots deny `unsafe_code`, and
/// their headers name the files.
const UNSAFE_ROOTS: &[&str] = &[
    "rds/preload/src/",
    "rtrs-client/capi/src/",
    "rtrs-core/base/src/",
    "rtrs-core/src/",
    "rtrs-client/vhost-bridge/src/",
];

/// Crate roots that forbid `unsafe`; those of `tests/*/main.rs` are added by the rule itself.
const FORBIDDING_ROOTS: &[&str] = &[
    "nbd-bridge/src/lib.rs",
    "rds/src/lib.rs",
    "rds/src/main.rs",
    "rtrs-client/lib/src/lib.rs",
    "rtrs-client/src/lib.rs",
    "rtrs-client/src/main.rs",
    "rtrs-server/src/lib.rs",
    "rtrs-server/src/main.rs",
    "tests/kit/lib.rs",
];

/// Engines: time and events are inputs, work and decisions are outputs. A folder ends with a slash.
const ENGINES: &[&str] = &[
    "nbd-bridge/src/proto/",
    "nbd-bridge/src/status.rs",
    "rds/src/proto/",
    "rds/src/wire/",
    "rtrs-client/src/engine/",
    "rtrs-client/src/path/",
    "rtrs-core/src/fabric/iwarp/batch.rs",
    "rtrs-core/src/fabric/iwarp/ddp.rs",
    "rtrs-core/src/fabric/iwarp/mpa.rs",
    "rtrs-core/src/fabric/iwarp/progress.rs",
    "rtrs-core/src/fabric/iwarp/qp.rs",
    "rtrs-core/src/fabric/iwarp/rdmap.rs",
    "rtrs-core/src/fabric/iwarp/rx.rs",
    "rtrs-core/src/fabric/iwarp/sender.rs",
    "rtrs-core/src/fabric/iwarp/tls.rs",
    "rtrs-core/src/fabric/iwarp/tx.rs",
    "rtrs-core/src/fabric/sim/",
    "rtrs-core/src/ids.rs",
    "rtrs-core/src/limits.rs",
    "rtrs-core/base/src/prng.rs",
    "rtrs-core/src/proto/",
    "rtrs-core/src/status.rs",
    "rtrs-core/base/src/time.rs",
    "rtrs-core/src/tls/handshake.rs",
    "rtrs-core/src/wire/",
    "rtrs-server/src/engine/",
    "rtrs-server/src/path/",
    "rds/tests/system/sim/",
    "tests/sim/",
];

/// Files among the engines that are not engines, with the reasons.
const NOT_ENGINES: &[(&str, &str)] = &[
    (
        "tests/sim/machine/mod.rs",
        "the front end works on a ring, which the simulator drives within its own turn",
    ),
    (
        "tests/sim/nbd.rs",
        "the bridge works on a ring and a socket, which the simulator drives within its own turn",
    ),
    ("rtrs-server/src/engine/tests/reloads.rs", "a thread of the daemon asks the control shard"),
];

/// Files that bind an engine to a ring, providers and a front end, and nothing more: the simulator
/// runs the same engines.
const DRIVERS: &[&str] = &["rtrs-client/src/daemon/driver.rs", "rtrs-server/src/daemon/driver.rs"];

/// Names reserved for engines, which drivers must not use.
const ENGINE_ONLY: &[&str] =
    &["FabricEvent", "engine::control", "engine::io", "::path::", "::wire::", "::proto::"];

/// Files of the client that work with every kind of front end.
const ANY_FRONT_END: &[&str] = &[
    "rtrs-client/src/control_protocol.rs",
    "rtrs-client/src/daemon/attached.rs",
    "rtrs-client/src/daemon/control_socket.rs",
    "rtrs-client/src/daemon/driver.rs",
    "rtrs-client/src/daemon/fronts.rs",
    "rtrs-client/src/daemon/launch.rs",
    "rtrs-client/src/daemon/notices.rs",
    "rtrs-client/src/daemon/report.rs",
    "rtrs-client/src/daemon/volume.rs",
    "rtrs-client/src/frontend/client.rs",
    "rtrs-client/src/frontend/front_end.rs",
    "rtrs-client/src/frontend/mod.rs",
];

/// Crates for a particular kind of front end, which [`ANY_FRONT_END`] must not name.
const ONE_FRONT_END: &[&str] = &["nbd_bridge", "vhost_bridge"];

/// Crates whose files must not import each other in cycles.
const ACYCLIC: &[&str] = &[
    "nbd-bridge",
    "rds",
    "rtrs-client",
    "rtrs-client/vhost-bridge",
    "rtrs-core",
    "rtrs-core/base",
    "rtrs-server",
];

const FILE_LINES_MAX: usize = 700;

/// Files longer than [`FILE_LINES_MAX`] lines, with the reasons.
const LONG_FILES: &[(&str, &str)] = &[];

/// Workspace crates that each crate may depend on, and those that only its tests may use.
const ARROWS: &[(&str, &[&str], &[&str])] = &[
    ("rtrs-core/base", &[], &["rtrs-base"]),
    ("rtrs-core", &["rtrs-base"], &["rtrs-core"]),
    ("nbd-bridge", &["rtrs-core"], &["rtrs-core"]),
    ("rds", &["rtrs-base"], &["rtrs-base"]),
    ("rds/preload", &["rds"], &[]),
    ("rtrs-client", &["nbd-bridge", "rtrs-core", "vhost-bridge"], &["rtrs-core"]),
    ("rtrs-client/capi", &["rtrs", "rtrs-core"], &[]),
    ("rtrs-client/lib", &["rtrs-client", "rtrs-core"], &[]),
    ("rtrs-client/vhost-bridge", &["rtrs-core"], &["rtrs-core"]),
    ("rtrs-server", &["nbd-bridge", "rtrs-core"], &["rtrs-core"]),
    (
        "tests",
        &["nbd-bridge", "rds", "rtrs", "rtrs-client", "rtrs-core", "rtrs-server", "vhost-bridge"],
        &[],
    ),
    (
        "fuzz",
        &["nbd-bridge", "rds", "rtrs-client", "rtrs-core", "rtrs-server", "vhost-bridge"],
        &[],
    ),
];

/// Marker in a document where a program's output is still missing. Spelled in two parts, as
/// elsewhere, so that the rule does not report this file.
const OUTPUT_MARK: &str = concat!("OUT", "PUT: ");

/// Source of every dependency.
const PUBLIC_INDEX: &str = concat!("registry+https://github.com/rust-lang/crates", ".io-index");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

/// Text file in the tree.
struct Source {
    /// Path relative to the root, with slashes.
    path: String,
    text: String,
}

impl Source {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// Returns the paths that git tracks or would add; without git, all paths except build output.
fn paths() -> Vec<String> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    let mut paths: Vec<String> = match listed {
        Ok(out) if out.status.success() => {
            String::from_utf8_lossy(&out.stdout).split_terminator('\0').map(str::to_owned).collect()
        }
        _ => {
            let mut found = Vec::new();
            walk(&root(), "", &mut found);
            found
        }
    };
    paths.retain(|path| root().join(path).is_file());
    paths.sort();
    paths.dedup();
    paths
}

fn walk(dir: &Path, prefix: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).expect("a readable tree") {
        let entry = entry.expect("a readable tree");
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().expect("a readable tree");
        if kind.is_dir() && ![".git", "target", "artifacts"].contains(&name.as_str()) {
            walk(&entry.path(), &format!("{path}/"), found);
        } else if kind.is_file() {
            found.push(path);
        }
    }
}

/// Returns all text files in the tree. A fuzzing corpus is bytes, not text.
fn sources() -> Vec<Source> {
    let all: Vec<Source> = paths()
        .into_iter()
        .filter(|path| !path.starts_with("fuzz/corpus/"))
        .filter_map(|path| {
            let text = fs::read_to_string(root().join(&path)).ok()?;
            Some(Source { path, text })
        })
        .collect();
    assert!(all.iter().filter(|s| s.is_rust()).count() > 50, "the tree was not found");
    all
}

/// Violations of a rule, one line each.
#[derive(Default)]
struct Breaches(String, usize);

impl Breaches {
    fn add(&mut self, path: &str, line: usize, what: impl AsRef<str>) {
        writeln!(self.0, "  {path}:{line}: {}", what.as_ref()).expect("a string takes any text");
        self.1 += 1;
    }

    #[track_caller]
    fn none(self, rule: &str) {
        assert!(self.1 == 0, "{rule}: {} breaches\n{}", self.1, self.0);
    }
}

// Rules.

#[test]
fn unsafe_code_is_only_in_listed_files() {
    let mut breaches = Breaches::default();
    let sources = sources();
    for source in sources.iter().filter(|s| s.is_rust()) {
        if !UNSAFE_FILES.contains(&source.path.as_str()) {
            for line in unsafe_lines(&source.text) {
                breaches.add(&source.path, line, "unsafe outside the listed files");
            }
        }
    }
    for name in UNSAFE_FILES {
        match sources.iter().find(|s| s.path == *name) {
            None => breaches.add(name, 0, "listed here, but there is no such file"),
            Some(file) if unsafe_lines(&file.text).is_empty() => {
                breaches.add(name, 0, "listed here, but has no unsafe: remove it from the list");
            }
            Some(_) => {}
        }
    }
    for root in UNSAFE_ROOTS {
        let header = format!("{root}lib.rs");
        let lib = sources.iter().find(|s| s.path == header).expect("the crate's root");
        let head: String = lib.text.lines().take_while(|line| line.starts_with("//!")).collect();
        for short in UNSAFE_FILES.iter().filter_map(|name| name.strip_prefix(root)) {
            if !head.contains(short.trim_end_matches(".rs")) {
                breaches.add(&header, 1, format!("the header does not name {short}"));
            }
        }
        if !lib.text.contains("#![deny(unsafe_code)]") {
            breaches.add(&header, 1, "does not deny unsafe_code");
        }
    }
    // The load program of a benchmark is one file.
    let roots = UNSAFE_ROOTS.iter().chain(&["scripts/bench/"]);
    let has_root = |name: &&&str| roots.clone().any(|root| name.starts_with(root));
    for name in UNSAFE_FILES.iter().filter(|name| !has_root(name)) {
        breaches.add(name, 0, "belongs to a crate that is not among the roots");
    }
    breaches.none("unsafe code is only in the listed files");
}

#[test]
fn other_crates_forbid_unsafe() {
    let mut breaches = Breaches::default();
    for source in sources() {
        let test_root = source.path.starts_with("tests/") && source.path.ends_with("/main.rs");
        let forbids = source.text.lines().any(|line| line == "#![forbid(unsafe_code)]");
        if (test_root || FORBIDDING_ROOTS.contains(&source.path.as_str())) && !forbids {
            breaches.add(&source.path, 1, "lacks #![forbid(unsafe_code)]");
        }
    }
    for path in FORBIDDING_ROOTS {
        assert!(root().join(path).is_file(), "{path} does not exist: correct the list");
    }
    breaches.none("other crates forbid unsafe");
}

#[test]
fn every_unsafe_block_has_a_safety_comment() {
    let mut breaches = Breaches::default();
    for source in sources().iter().filter(|s| UNSAFE_FILES.contains(&s.path.as_str())) {
        for line in unproven_lines(&source.text) {
            breaches.add(&source.path, line, "unsafe without a SAFETY comment");
        }
    }
    breaches.none("every unsafe block has a SAFETY comment");
}

#[test]
fn engines_use_no_clock_thread_socket_or_hash_order() {
    let mut breaches = Breaches::default();
    let mut seen = 0;
    for source in sources().iter().filter(|s| s.is_rust()) {
        let is = |engine: &&&str| match engine.strip_suffix('/') {
            Some(_) => source.path.starts_with(**engine),
            None => source.path == **engine,
        };
        let is_none = NOT_ENGINES.iter().any(|(path, _)| *path == source.path);
        if ENGINES.iter().any(|engine| is(&engine)) && !is_none {
            seen += 1;
            for (line, what) in engine_breaches(&source.text) {
                breaches.add(&source.path, line, what);
            }
        }
    }
    assert!(seen >= 40, "only {seen} files of engines found: correct the list");
    for engine in ENGINES.iter().filter(|m| !m.starts_with("rtrs-server/")) {
        assert!(root().join(engine).exists(), "{engine} does not exist: correct the list");
    }
    breaches.none("engines use no clock, thread, socket or hash order");
}

#[test]
fn drivers_do_not_know_the_protocol() {
    let mut breaches = Breaches::default();
    let mut seen = 0;
    for source in sources().iter().filter(|s| DRIVERS.contains(&s.path.as_str())) {
        seen += 1;
        for (line, text) in (1..).zip(source.text.lines()) {
            for word in ENGINE_ONLY.iter().filter(|word| text.contains(**word)) {
                breaches.add(&source.path, line, format!("`{word}` belongs in the engine"));
            }
        }
    }
    assert_eq!(seen, DRIVERS.len(), "a driver does not exist: correct the list");
    breaches.none("drivers do not know the protocol");
}

#[test]
fn the_daemon_depends_on_no_kind_of_front_end() {
    let mut breaches = Breaches::default();
    let mut seen = 0;
    for source in sources().iter().filter(|s| ANY_FRONT_END.contains(&s.path.as_str())) {
        seen += 1;
        for (line, text) in (1..).zip(source.text.lines()) {
            for name in ONE_FRONT_END.iter().filter(|name| text.contains(**name)) {
                let what = format!("`{name}` belongs in the file of its front end");
                breaches.add(&source.path, line, what);
            }
        }
    }
    assert_eq!(seen, ANY_FRONT_END.len(), "a file does not exist: correct the list");
    breaches.none("the daemon depends on no kind of front end");
}

#[test]
fn imports_run_in_one_direction() {
    let mut breaches = Breaches::default();
    let sources = sources();
    for name in ACYCLIC {
        let src = format!("{name}/src/");
        let files: Vec<(&str, &str)> = sources
            .iter()
            .filter(|source| source.is_rust() && !is_for_tests(&source.path))
            .filter_map(|source| Some((source.path.strip_prefix(&src)?, source.text.as_str())))
            .collect();
        assert!(files.len() > 10, "{src} was not found: correct the list");
        for cycle in modules::cycles(&files) {
            breaches.add(&src, 0, format!("import each other: {}", cycle.join(", ")));
        }
    }
    breaches.none("imports run in one direction");
}

/// Whether a file is compiled for tests only.
fn is_for_tests(path: &str) -> bool {
    const PARTS: [&str; 3] = ["tests", "conformance", "fuzz"];
    path.split(['/', '.']).any(|part| PARTS.contains(&part))
}

#[test]
fn lines_are_short() {
    const KINDS: [&str; 7] = [".rs", ".toml", ".yaml", ".sh", ".py", ".md", ".ci/run"];
    let mut breaches = Breaches::default();
    for source in sources() {
        if KINDS.iter().any(|kind| source.path.ends_with(kind)) {
            for line in long_lines(&source.path, &source.text) {
                breaches.add(&source.path, line, format!("longer than {LINE_MAX} columns"));
            }
        }
    }
    breaches.none("lines are short");
}

#[test]
fn files_start_with_a_header_and_have_one_topic() {
    let mut breaches = Breaches::default();
    for source in sources().iter().filter(|s| s.is_rust()) {
        if !source.text.starts_with("//! ") {
            breaches.add(&source.path, 1, "does not open with a `//!` header");
        }
        let lines = source.text.lines().count();
        let excused = LONG_FILES.iter().any(|(path, why)| *path == source.path && !why.is_empty());
        if lines > FILE_LINES_MAX && !excused {
            breaches.add(&source.path, lines, format!("more than {FILE_LINES_MAX} lines"));
        }
        if lines <= FILE_LINES_MAX && excused {
            breaches.add(&source.path, lines, "is short now: remove it from the list");
        }
    }
    breaches.none("files start with a header and have one topic");
}

/// The lab takes the settings of a scenario from these lines, and uses defaults for those that are
/// missing.
#[test]
fn scenarios_of_the_lab_have_complete_headers() {
    const KEYS: [&str; 5] = ["lab", "topology", "paths", "limit", "groups"];
    let mut breaches = Breaches::default();
    let scenarios = sources().into_iter().filter(|source| source.path.contains("lab/scenarios/"));
    for source in scenarios {
        for key in KEYS {
            let prefix = format!("# {key}: ");
            if !source.text.lines().any(|line| line.starts_with(&prefix)) {
                breaches.add(&source.path, 1, format!("has no line `{prefix}`"));
            }
        }
    }
    breaches.none("scenarios of the lab have complete headers");
}

#[test]
fn banned_words_are_not_used() {
    const KINDS: [&str; 5] = [".rs", ".sh", ".py", ".yaml", ".md"];
    let mut breaches = Breaches::default();
    for source in sources() {
        let path = source.path.as_str();
        if path == "tests/tidy/words.rs" || !KINDS.iter().any(|kind| path.ends_with(kind)) {
            continue;
        }
        // The file's name is line 0.
        for (line, text) in (0..).zip(std::iter::once(path).chain(source.text.lines())) {
            for (word, instead) in words::retired_terms(text, words::WORDS) {
                breaches.add(path, line, format!("`{word}`: write {instead}"));
            }
        }
    }
    breaches.none("retired terms are not used");
}

#[test]
fn nothing_is_marked_unfinished() {
    let mut breaches = Breaches::default();
    for source in sources() {
        let marks = if source.is_rust() { unfinished(&source.text) } else { Vec::new() };
        for (line, mark) in marks {
            breaches.add(&source.path, line, mark);
        }
        for (line, text) in (1..).zip(source.text.lines()) {
            if source.path.ends_with(".md") && text.trim_start().starts_with(OUTPUT_MARK) {
                breaches.add(&source.path, line, "paste the program's real output here");
            }
        }
    }
    breaches.none("nothing is left unfinished");
}

#[test]
fn the_tree_names_no_machine_or_registry() {
    let mut breaches = Breaches::default();
    for source in sources().iter().filter(|s| !s.path.ends_with("Cargo.lock")) {
        for (line, place) in foreign_places(&source.text) {
            breaches.add(&source.path, line, format!("names {place}"));
        }
    }
    breaches.none("the tree names no machine and no registry");
}

#[test]
fn lock_files_exist_and_name_only_the_public_index() {
    let tracked = Command::new("git")
        .args(["ls-files", "Cargo.lock", "fuzz/Cargo.lock"])
        .current_dir(root())
        .output();
    let mut breaches = Breaches::default();
    for lock in ["Cargo.lock", "fuzz/Cargo.lock"] {
        let text = fs::read_to_string(root().join(lock)).unwrap_or_default();
        if text.is_empty() {
            breaches.add(lock, 0, "is missing");
        }
        // Outside a clone (in a tarball) nothing is tracked, and only existence is checked.
        if let Ok(out) = &tracked
            && out.status.success()
            && !String::from_utf8_lossy(&out.stdout).lines().any(|line| line == lock)
        {
            breaches.add(lock, 0, "is not tracked");
        }
        for (number, line) in (1..).zip(text.lines()) {
            if let Some(source) = line.strip_prefix("source = ")
                && source.trim_matches('"') != PUBLIC_INDEX
            {
                breaches.add(lock, number, format!("comes from {source}"));
            }
        }
    }
    breaches.none("lock files exist and name only the public index");
}

#[test]
fn crates_depend_in_one_direction() {
    let mut breaches = Breaches::default();
    for (name, allowed, in_tests) in ARROWS {
        let path = format!("{name}/Cargo.toml");
        let manifest = fs::read_to_string(root().join(&path)).expect("a manifest of ours");
        let (normal, dev) = own_dependencies(&manifest);
        for on in normal.iter().filter(|on| !allowed.contains(&on.as_str())) {
            breaches.add(&path, 0, format!("{name} may not depend on {on}"));
        }
        let known =
            |on: &&String| allowed.contains(&on.as_str()) || in_tests.contains(&on.as_str());
        for on in dev.iter().filter(|on| !known(on)) {
            breaches.add(&path, 0, format!("{name}'s tests may not depend on {on}"));
        }
        if *name != "fuzz" && !manifest.contains("[lints]\nworkspace = true") {
            breaches.add(&path, 0, "does not use the workspace's lints");
        }
    }
    breaches.none("crates depend in one direction");
}

/// Mutants (`rtrs-core/base/src/mutant.rs`) must not be part of programs that users run.
#[test]
fn products_have_no_mutants() {
    let mut breaches = Breaches::default();
    for (name, ..) in ARROWS.iter().filter(|(name, ..)| *name != "tests") {
        let path = format!("{name}/Cargo.toml");
        let manifest = fs::read_to_string(root().join(&path)).expect("a manifest of ours");
        let mut section = "";
        for (at, line) in manifest.lines().enumerate() {
            section = if line.starts_with('[') { line } else { section };
            let declared = match *name {
                "rtrs-core/base" => line == "mutants = []",
                "rtrs-core" => line == "mutants = [\"rtrs-base/mutants\"]",
                _ => false,
            };
            if line.contains("mutants") && !declared && section != "[dev-dependencies]" {
                breaches.add(&path, at + 1, "only tests may enable `mutants`");
            }
        }
    }
    let workspace = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    if workspace.contains("mutants") || workspace.contains("debug-assertions") {
        breaches.add("Cargo.toml", 0, "the release profile has no mutants");
    }
    let code = fs::read_to_string(root().join("rtrs-core/base/src/mutant.rs")).expect("mutant.rs");
    let gate = "#[cfg(not(all(feature = \"mutants\", debug_assertions)))]\n#[inline(always)]\n";
    if !code.contains(gate) {
        breaches.add("rtrs-core/base/src/mutant.rs", 0, "is not always false in a release build");
    }
    breaches.none("no product has mutants");
}

#[test]
fn documents_refer_to_existing_items() {
    let mut breaches = Breaches::default();
    for source in sources().iter().filter(|s| s.path.ends_with(".md")) {
        let folder = Path::new(&source.path).parent().unwrap_or_else(|| Path::new(""));
        for (line, target) in references(&source.text) {
            let full = match target.strip_prefix('/') {
                Some(from_root) => root().join(from_root),
                None => root().join(folder).join(&target),
            };
            if !full.exists() {
                breaches.add(&source.path, line, format!("there is no {target}"));
            }
        }
    }
    breaches.none("documents point to what exists");
}
