//! Tests of `librtrs.so.0`, using C programs that the tests compile and real server processes.
#![forbid(unsafe_code)]

mod fio;
mod process;

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Finished, Proc, STOP_TIME_MAX, Scratch, Server, requires, run,
    skip, sparse_file, wait_for,
};

const HEADER: &str = include_str!("../include/rtrs.h");
/// Header of the first release of this ABI. It never changes.
const FROZEN: &str = include_str!("../abi/0.h");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// Returns the path of the library next to the daemons.
fn library() -> PathBuf {
    rtrs_tests::bin("librtrs_capi.so")
}

/// The library with its header, installed by `scripts/install-lib.sh`.
struct Installed(Scratch);

impl Installed {
    /// Installs the library with this header. If there is no C compiler, says so and returns None.
    fn new(header: &str) -> Option<Self> {
        if !requires(&["cc", "pkg-config"]) {
            return None;
        }
        let installed = Self::without_compiler();
        std::fs::write(installed.0.path("include/rtrs.h"), header).expect("a header");
        Some(installed)
    }

    fn without_compiler() -> Self {
        let dir = Scratch::new();
        let library = library();
        let from = library.parent().and_then(Path::to_str).expect("a directory");
        let script = root().join("scripts/install-lib.sh");
        let words = ["--prefix", &*dir.text(""), "--from", from];
        let _ = run(script, &words, COMMAND_TIME_MAX).ok();
        Self(dir)
    }

    /// Compiles one of the crate's files.
    fn compile(&self, file: &str) -> PathBuf {
        self.compile_file(&root().join("rtrs-client/capi").join(file))
    }

    /// Compiles a program with the flags from pkg-config.
    fn compile_file(&self, file: &Path) -> PathBuf {
        self.compile_with(file, &["--cflags", "--libs"])
    }

    /// Compiles one of the crate's files that loads the library itself.
    fn compile_unlinked(&self, file: &str) -> PathBuf {
        self.compile_with(&root().join("rtrs-client/capi").join(file), &["--cflags"])
    }

    fn compile_with(&self, file: &Path, words: &[&str]) -> PathBuf {
        let mut config = Command::new("pkg-config");
        config.args(words).arg("rtrs");
        config.env("PKG_CONFIG_PATH", self.0.path("lib/pkgconfig"));
        let words = Proc::start(config).wait(COMMAND_TIME_MAX).ok().stdout;
        let program = self.0.path("program");
        let mut cc = Command::new("cc");
        cc.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]);
        cc.arg("-o").arg(&program).arg(file);
        cc.args(words.split_whitespace());
        cc.arg(format!("-Wl,-rpath,{}", self.0.text("lib")));
        let _ = Proc::start(cc).wait(COMMAND_TIME_MAX).ok();
        program
    }
}

fn server() -> Server {
    Server::builder().export("vol0=mem:64M").start()
}

fn uri(server: &Server) -> String {
    format!("{}/vol0", server.portal())
}

/// Checks that a mode of `api.c` has passed, and that the library has printed nothing.
fn passed(finished: Finished) {
    let finished = finished.ok();
    assert!(finished.stdout.ends_with("passed\n"), "{finished:#?}");
    assert_eq!(finished.stderr, "", "the library prints nothing");
}

/// Runs modes of `api.c`, compiled with this header.
fn run_modes(header: &str, modes: &[&str]) {
    let Some(installed) = Installed::new(header) else { return };
    let program = installed.compile("tests/api.c");
    let server = server();
    for mode in modes {
        passed(run(&program, &[mode, &*uri(&server)], COPY_TIME_MAX));
    }
    let ended = || server.sessions().is_empty().then_some(());
    wait_for("the sessions to end", COMMAND_TIME_MAX, ended);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_program_uses_every_operation() {
    run_modes(HEADER, &["operations"]);
}

#[test]
fn wrong_arguments_have_errors_with_messages() {
    run_modes(HEADER, &["errors"]);
}

#[test]
fn a_child_is_refused_and_changes_nothing() {
    run_modes(HEADER, &["child"]);
}

#[test]
fn a_program_may_end_with_an_open_volume() {
    run_modes(HEADER, &["leaves"]);
}

#[test]
fn fifty_opens_leave_no_descriptor() {
    run_modes(HEADER, &["opens"]);
}

#[test]
fn programs_of_the_first_release_run() {
    run_modes(FROZEN, &["operations", "errors"]);
}

#[test]
fn a_close_ends_requests_that_the_server_holds() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("tests/api.c");
    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    let server = server.export("vol0=mem:64M").start();
    passed(run(&program, &["held", &uri(&server), &held.text("")], COPY_TIME_MAX));
}

#[test]
fn a_lost_server_is_an_event() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("tests/api.c");
    let server = server();
    let mut command = Command::new(program);
    command.args(["events", &uri(&server)]);
    let mut client = Proc::start(command);
    let _ = client.wait_starts("opened", 1, COMMAND_TIME_MAX);
    server.crash();
    passed(client.wait(COPY_TIME_MAX));
}

#[test]
fn statistics_count_requests() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("tests/stats.c");
    let server = server();
    passed(run(program, &[uri(&server)], COPY_TIME_MAX));
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn registered_memory_is_used_in_place() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("tests/registered.c");
    let held = Scratch::new();
    let server = Server::builder().program("rtrs-held").env("RTRS_HELD_DIR", held.text(""));
    let server = server.export("vol0=mem:64M").start();
    let uri = format!("{}?retry-for=60s", uri(&server));
    passed(run(&program, &[uri, held.text("")], COPY_TIME_MAX));
}

#[test]
fn the_example_copies_a_volume() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let program = installed.compile("examples/copy.c");
    let scratch = Scratch::new();
    sparse_file(&scratch.path("a.img"), 64 << 20);
    let data: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    let file = std::fs::File::options().write(true).open(scratch.path("a.img")).expect("the file");
    file.write_all_at(&data, 17 << 20).expect("a write");
    std::fs::write(scratch.path("b.img"), vec![0xee; 64 << 20]).expect("a file");
    let export = |name: &str| format!("{name}={}", scratch.text(&format!("{name}.img")));
    let server = Server::builder().export(export("a")).export(export("b")).start();
    let of = |name: &str| format!("{}/{name}", server.portal());
    let finished = run(&program, &[of("a"), of("b")], COPY_TIME_MAX).ok();
    assert!(finished.stdout.starts_with("copied 67108864 bytes"), "{finished:#?}");
    let refused = run(&program, &[of("a"), of("none")], COMMAND_TIME_MAX).code(1);
    let _ = refused.says("none").says("ENOENT");
    let _ = server.stop(STOP_TIME_MAX);
    let same = |name: &str| std::fs::read(scratch.path(name)).expect("a file");
    assert!(same("a.img") == same("b.img"), "the files differ");
}

#[test]
fn the_program_of_the_document_compiles() {
    let Some(installed) = Installed::new(HEADER) else { return };
    let blocks = include_str!("../../../docs/how-to/embed.md").split("```\n");
    let programs: Vec<_> = blocks.filter(|block| block.starts_with("#include")).collect();
    let [program] = programs[..] else { panic!("one program, not {programs:#?}") };
    // No server listens at this address.
    let program = program.replace("tcp://10.0.0.2/vol0?path=tcp://10.1.0.2", "tcp://127.0.0.1:1/v");
    let file = installed.0.path("hello.c");
    std::fs::write(&file, program).expect("a file");
    let program = installed.compile_file(&file);
    let _ = run(program, &[""; 0], COMMAND_TIME_MAX).code(1).says("127.0.0.1:1");
}

/// Returns a Python that has the tests' modules. If there is none, says so and returns None.
fn python() -> Option<&'static str> {
    if !requires(&["python3"]) {
        return None;
    }
    // Debian's modules are for its own Python, which may not be the first one in the path.
    let found = ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let is_there = !python.starts_with('/') || Path::new(python).exists();
        let words = ["-c", "import cffi, pytest"];
        is_there && run(python, &words, COMMAND_TIME_MAX).code == Some(0)
    });
    if found.is_none() {
        skip("no python3 with cffi and pytest");
    }
    found
}

#[test]
fn the_python_package_passes_its_tests() {
    let Some(python) = python() else { return };
    let installed = Installed::without_compiler();
    let package = root().join("rtrs-client/python");
    let mut tests = Command::new(python);
    tests.args(["-m", "pytest", "-p", "no:cacheprovider", "--basetemp"]);
    tests.arg(installed.0.path("tests")).arg(package.join("tests"));
    tests.env("PYTHONPATH", package).env("PYTHONDONTWRITEBYTECODE", "1");
    tests.env("RTRS_LIBRARY", installed.0.path("lib/librtrs.so.0"));
    tests.env("RTRS_BIN_DIR", library().parent().expect("a directory"));
    let finished = Proc::start(tests).wait(COPY_TIME_MAX).ok();
    let summary = finished.stdout.lines().last().unwrap_or("");
    assert!(summary.contains(" passed") && !summary.contains("skipped"), "{finished:#?}");
}

#[test]
fn the_python_package_has_this_version_and_header() {
    let config = include_str!("../../python/pyproject.toml");
    let version = format!("version = \"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(config.lines().any(|line| line == version), "no {version:?} in pyproject.toml");
    let same = include_str!("../../python/rtrs/rtrs.h") == HEADER;
    assert!(same, "copy rtrs-client/capi/include/rtrs.h to rtrs-client/python/rtrs/rtrs.h");
}

/// Returns the functions that a header declares.
fn declared(header: &'static str) -> BTreeSet<&'static str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let declarations = header.lines().filter(|line| {
        ["int ", "void ", "const char *"].iter().any(|result| line.starts_with(result))
    });
    let name = |line: &'static str| {
        let end = line.find('(')?;
        let begin = line[..end].rfind(|c| !is_name(c))? + 1;
        Some(&line[begin..end])
    };
    declarations.filter_map(name).collect()
}

#[test]
fn the_library_exports_what_its_header_declares() {
    if !requires(&["nm", "readelf"]) {
        return;
    }
    let (now, frozen) = (declared(HEADER), declared(FROZEN));
    assert!(now.len() > 25, "{now:?}");
    assert!(frozen.is_subset(&now), "{:?} were removed", frozen.difference(&now));
    let path = library();
    let path = path.to_str().expect("a path");
    let symbols = run("nm", &["-D", "--defined-only", path], COMMAND_TIME_MAX).ok();
    let exported = symbols.stdout.lines().filter_map(|line| line.split_whitespace().nth(2));
    assert_eq!(exported.collect::<BTreeSet<_>>(), now);
    let dynamic = run("readelf", &["-d", path], COMMAND_TIME_MAX).ok();
    let _ = dynamic.says("soname: [librtrs.so.0]").says("NODELETE");
}
