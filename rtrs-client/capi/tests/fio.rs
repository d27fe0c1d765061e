//! Tests of the fio engine, built from the source of this machine's fio.

use std::path::{Path, PathBuf};
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Finished, Proc, STOP_TIME_MAX, Server, requires, skip,
    wait_for,
};

use super::{HEADER, Installed, root, server, uri};

/// Exit code of build.sh if the machine lacks something that the build needs.
const IS_MISSING: i32 = 3;

/// The engine, with the library that it uses.
struct Engine {
    installed: Installed,
    path: PathBuf,
}

impl Engine {
    /// Builds the engine. Returns None, with a message, if fio or its source is missing.
    fn new() -> Option<Self> {
        if !requires(&["fio"]) {
            return None;
        }
        let installed = Installed::new(HEADER)?;
        let path = installed.0.path("rtrs.so");
        let mut build = Command::new(root().join("rtrs-client/fio/build.sh"));
        build.env("PKG_CONFIG_PATH", installed.0.path("lib/pkgconfig"));
        build.arg("--output").arg(&path);
        // Kept for the next run.
        build.arg("--cache").arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("fio"));
        let finished = Proc::start(build).wait(COPY_TIME_MAX);
        if finished.code == Some(IS_MISSING) {
            skip(finished.stderr.lines().last().unwrap_or("no source of fio"));
            return None;
        }
        let _ = finished.ok();
        Some(Self { installed, path })
    }

    /// Returns the fio command for a job on a volume, with these whitespace-separated options.
    fn fio(&self, uri: &str, options: &str) -> Command {
        let mut fio = Command::new("fio");
        fio.current_dir(self.installed.0.dir());
        fio.args(["--name=job", &format!("--ioengine=external:{}", self.path.display())]);
        fio.arg(format!("--uri={uri}"));
        fio.args(options.split_whitespace().map(|option| format!("--{option}")));
        fio
    }

    fn run(&self, uri: &str, options: &str) -> Finished {
        Proc::start(self.fio(uri, options)).wait(COPY_TIME_MAX)
    }

    /// Runs fio and checks that it fails with this message.
    fn fails(&self, uri: &str, options: &str, message: &str) {
        let finished = self.run(uri, options);
        assert_ne!(finished.code, Some(0), "{finished:#?}");
        let _ = finished.says(message);
    }
}

/// Two jobs verify their writes, and a verification fails after another write.
fn verifies(engine: &Engine, uri: &str) {
    let jobs = "rw=randrw bs=4k iodepth=16 numjobs=2 size=8M offset_increment=8M fsync=32 \
                verify=crc32c output-format=json";
    let report = engine.run(uri, jobs).ok().json();
    let jobs = report["jobs"].as_array().expect("jobs");
    assert_eq!(jobs.len(), 2, "{report:#}");
    for job in jobs {
        assert_eq!(job["error"], 0, "{report:#}");
        for way in ["read", "write", "sync"] {
            let count = job[way]["total_ios"].as_u64().expect("a number");
            assert!(count > 0, "no {way} in {report:#}");
        }
    }

    let writes = "rw=randwrite bs=64k iodepth=8 size=4M sync=1 verify=crc32c do_verify=0";
    let _ = engine.run(uri, writes).ok();
    let reads = "rw=read bs=64k iodepth=8 size=4M verify=crc32c";
    let _ = engine.run(uri, reads).ok();
    let _ = engine.run(uri, "rw=write bs=4k offset=1M size=4k").ok();
    engine.fails(uri, reads, "verify");
}

/// Sections of a job file run sequentially or concurrently, in one session.
fn runs_sections(engine: &Engine, uri: &str) {
    let file = engine.installed.0.path("jobs.fio");
    let text = format!(
        "[global]\nioengine=external:{}\nuri={uri}\nrtrs_set=retry-for=60s,no-path=fail\n\
         size=4M\n[a]\nrw=write\nbs=1M\niodepth=4\nnumjobs=2\noffset_increment=4M\n\
         [b]\nstonewall\nrw=randread\nbs=512\niodepth=64\nio_size=1M\n\
         [c]\nrw=trim\nbs=64k\noffset=16M\nunlink=1\n",
        engine.path.display()
    );
    std::fs::write(&file, text).expect("a job file");
    let mut fio = Command::new("fio");
    fio.current_dir(engine.installed.0.dir()).arg("--output-format=json").arg(&file);
    let finished = Proc::start(fio).wait(COPY_TIME_MAX).ok();
    assert_eq!(finished.stderr, "", "no path was lost");
    let report = finished.json();
    let jobs = report["jobs"].as_array().expect("jobs").iter();
    let bytes = |job: &serde_json::Value, way: &str| job[way]["io_bytes"].as_u64();
    let done = jobs.map(|job| ["read", "write", "trim"].map(|way| bytes(job, way)));
    let mib = |count: u64| Some(count << 20);
    let none = Some(0);
    assert_eq!(
        done.collect::<Vec<_>>(),
        [[none, mib(4), none], [none, mib(4), none], [mib(1), none, none], [none, none, mib(4)]],
        "{report:#}"
    );
}

fn wait_for_the_end_of_sessions(server: &Server) {
    let ended = || server.sessions().is_empty().then_some(());
    wait_for("the sessions to end", COMMAND_TIME_MAX, ended);
}

/// Writers in two processes exclude each other; readers do not.
fn refuses_a_second_writer(engine: &Engine, server: &Server, uri: &str) {
    wait_for_the_end_of_sessions(server);
    let holds = "rw=randwrite numjobs=2 size=1M time_based runtime=600";
    let holder = Proc::start(engine.fio(uri, holds));
    let is_open = || (server.sessions().first()?["opens"][0]["access"] == "rw").then_some(());
    wait_for("the session of two jobs", COMMAND_TIME_MAX, is_open);
    engine.fails(uri, "rw=randwrite size=1M", "another session has it open for writing");
    let _ = engine.run(uri, "rw=randread size=1M").ok();
    let writers = server.sessions();
    let writers = writers.iter().filter(|session| session["opens"][0]["access"] == "rw");
    assert_eq!(writers.count(), 1, "the jobs share a session");
    // fio stops its jobs, then exits with 128.
    let _ = holder.terminate(COMMAND_TIME_MAX).code(128);
}

/// Invalid options cause errors that state the reason.
fn names_what_is_wrong(engine: &Engine, uri: &str) {
    for (options, message) in [
        ("rw=read bs=1000", "bs=1000 is not a multiple of the logical block size, 512 bytes"),
        ("rw=read bs=64M", "io-max 67108864 is not usable"),
        ("rw=read iodepth=2000", "queue-depth 2000 is not usable"),
        ("rw=read nrfiles=2", "a job uses one volume"),
        ("rw=read create_serialize=0", "create_serialize=0 is not possible"),
        ("rw=read rtrs_set=queues", "'queues', which is not NAME=VALUE"),
        ("rw=read rtrs_set=que=1", "there is no setting que"),
        ("rw=read numjobs=2 rtrs_set=queues=1", "all 1 queues of the session are in use"),
        ("rw=write rtrs_set=access=ro", "the volume is read-only"),
    ] {
        engine.fails(uri, options, message);
    }
    engine.fails("nowhere", "rw=read", "cannot open nowhere: ");
    engine.fails("tcp://127.0.0.1:1/v", "rw=read rtrs_set=retry-for=0s", "127.0.0.1:1");
    let mut fio = Command::new("fio");
    fio.arg(format!("--ioengine=external:{}", engine.path.display()));
    fio.args(["--name=job", "--rw=read"]);
    let finished = Proc::start(fio).wait(COMMAND_TIME_MAX);
    let _ = finished.code(1).says("the option uri is missing");
}

#[test]
fn fio_uses_a_volume() {
    let Some(engine) = Engine::new() else { return };
    let server = server();
    let uri = uri(&server);
    verifies(&engine, &uri);
    runs_sections(&engine, &uri);
    refuses_a_second_writer(&engine, &server, &uri);
    names_what_is_wrong(&engine, &uri);
    wait_for_the_end_of_sessions(&server);
    let _ = server.stop(STOP_TIME_MAX);
}
