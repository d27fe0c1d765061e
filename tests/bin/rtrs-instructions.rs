//! Counts the instructions of hot paths with valgrind, and compares them with a stored baseline: a
//! measure of speed that does not depend on other load on the machine.
//!
//! A scene runs in its own process under callgrind, once with few requests and once with more; the
//! difference is the cost of the requests. The baseline (`tests/golden/instructions.json`) holds
//! one set of counts for each combination of compiler, C library and kind of processor, since all
//! of these affect the counts.
//!
//! Exit codes: 0 all counts agree, 1 a count differs or a scene failed, 2 usage error, 3 this
//! machine cannot be compared: valgrind is missing, or the baseline lacks this toolchain.
#![forbid(unsafe_code)]

#[path = "rtrs-instructions/iwarp.rs"]
mod iwarp;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::{Parser, ValueEnum};
use rtrs_core::block::IoOp;
use rtrs_tests::sim::run_fixed;
use serde::Serialize;

/// Numbers of requests in a scene's two runs.
const FEW: u64 = 256;
const MANY: u64 = 1280;
/// Maximum number of times that a scene is measured.
const ROUNDS_MAX: u32 = 3;
/// Difference from the baseline above which a scene fails, in percent.
const DIFFERENCE_PERCENT: f64 = 3.0;

type Counts = BTreeMap<String, u64>;

/// Counts the instructions of hot paths with valgrind, per request of 4 KiB.
#[derive(Clone, Debug, Parser)]
#[command(name = "rtrs-instructions", version)]
struct Args {
    /// Run one scene without counting, with this number of requests.
    #[arg(long, value_name = "SCENE", requires = "requests")]
    scene: Option<Scene>,
    /// Requests of the scene.
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Store the counts as the baseline of this toolchain.
    #[arg(long, conflicts_with = "scene")]
    update: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Requests whose instructions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scene {
    /// Engines of the client and the server: permits, retries, checks, immediate data.
    SessionRead,
    SessionWrite,
    /// NBD front end, with its requests to the session.
    NbdRead,
    NbdWrite,
    /// iWARP over TCP on loopback, both ends: a write with immediate data, with CRC32C.
    IwarpWrite,
}

impl Scene {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Functions whose instructions are counted, including those they call; if empty, the whole
    /// program is counted. The functions must not call each other.
    fn functions(self) -> &'static [&'static str] {
        match self {
            Self::SessionRead | Self::SessionWrite => &[
                "*ClientHost*begin_turn*",
                "*ClientHost*end_turn*",
                "*SessionDevice*BlockDevice*submit*",
                "*SessionDevice*BlockDevice*reap*",
                "*ServerHost*turn*",
            ],
            Self::NbdRead | Self::NbdWrite => &["*nbd_bridge*Bridge*turn*"],
            Self::IwarpWrite => &[],
        }
    }

    fn run(self, requests: u64) -> Result<(), String> {
        let session = |nbd, op| {
            run_fixed(nbd, op, requests)
                .map_err(|error| format!("{}: {}", error.checker, error.text))
        };
        match self {
            Self::SessionRead => session(false, IoOp::Read),
            Self::SessionWrite => session(false, IoOp::Write),
            Self::NbdRead => session(true, IoOp::Read),
            Self::NbdWrite => session(true, IoOp::Write),
            Self::IwarpWrite => iwarp::run(requests).map_err(|error| error.to_string()),
        }
    }
}

/// Instructions per request, measured and stored.
#[derive(Debug, Serialize)]
struct Line {
    scene: String,
    instructions: u64,
    baseline: Option<u64>,
    /// Difference from the baseline.
    percent: Option<f64>,
}

impl Line {
    /// Measures a scene. A busy machine can only add iterations that find nothing to do, so the
    /// lowest of several counts is the most accurate.
    fn measure(scene: Scene, baseline: Option<u64>) -> Result<Self, String> {
        let mut line =
            Self { scene: scene.name(), instructions: u64::MAX, baseline, percent: None };
        for _ in 0..ROUNDS_MAX {
            let (few, many) = (count(scene, FEW)?, count(scene, MANY)?);
            line.instructions = line.instructions.min(many.saturating_sub(few) / (MANY - FEW));
            let percent = |before: u64| (line.instructions as f64 / before as f64 - 1.0) * 100.0;
            line.percent = baseline.filter(|before| *before > 0).map(percent);
            if line.agrees() {
                break;
            }
        }
        Ok(line)
    }

    fn agrees(&self) -> bool {
        self.percent.is_some_and(|percent| percent.abs() <= DIFFERENCE_PERCENT)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let (Some(scene), Some(requests)) = (args.scene, args.requests) {
        return match scene.run(requests) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&format!("{}: {error}", scene.name())),
        };
    }
    match compare(&args) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

fn fail(error: &str) -> ExitCode {
    eprintln!("rtrs-instructions: {error}");
    ExitCode::FAILURE
}

/// Measures all scenes and compares them with the baseline, or stores them.
fn compare(args: &Args) -> Result<ExitCode, String> {
    let Some(key) = toolchain() else {
        eprintln!("rtrs-instructions: valgrind, rustc or getconf is not installed");
        return Ok(ExitCode::from(3));
    };
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/golden/instructions.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "{}".to_owned());
    let mut stored: BTreeMap<String, Counts> =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    let baseline = stored.get(&key);
    if baseline.is_none() && !args.update {
        eprintln!("rtrs-instructions: there is no baseline for: {key} (--update stores one)");
        return Ok(ExitCode::from(3));
    }
    let mut lines = Vec::new();
    for &scene in Scene::value_variants() {
        let name = scene.name();
        let baseline = baseline.and_then(|counts| counts.get(&name)).copied();
        lines.push(Line::measure(scene, baseline)?);
    }
    print(args.output, &key, &lines);
    if args.update {
        let counts = lines.into_iter().map(|line| (line.scene, line.instructions)).collect();
        stored.insert(key, counts);
        let text = serde_json::to_string_pretty(&stored).map_err(|error| error.to_string())?;
        std::fs::write(&path, text + "\n")
            .map_err(|error| format!("{}: {error}", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(ExitCode::from(u8::from(!lines.iter().all(Line::agrees))))
}

fn print(output: Format, key: &str, lines: &[Line]) {
    if output == Format::Json {
        let all = serde_json::json!({ "toolchain": key, "scenes": lines });
        println!("{all:#}");
        return;
    }
    println!("{key}\n{:16} {:>12} {:>12} {:>8}", "scene", "instructions", "baseline", "change");
    for Line { scene, instructions, baseline, percent } in lines {
        let baseline = baseline.map_or_else(|| "-".to_owned(), |count| count.to_string());
        let percent = percent.map_or_else(|| "-".to_owned(), |it| format!("{it:+.2} %"));
        println!("{scene:16} {instructions:>12} {baseline:>12} {percent:>8}");
    }
}

/// Describes what affects the counts apart from the code. Returns None if a program is missing.
fn toolchain() -> Option<String> {
    let run = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let rustc = run("rustc", &["--version"])?;
    let rustc = rustc.split(" (").next().unwrap_or_default().to_owned();
    let (libc, valgrind) =
        (run("getconf", &["GNU_LIBC_VERSION"])?, run("valgrind", &["--version"])?);
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag: &str| processor.split_whitespace().any(|word| word == flag);
    let processor = if has("avx2") { "avx2" } else { "no avx2" };
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    Some(format!("{rustc}, {libc}, {valgrind}, {processor}, {profile}"))
}

/// Runs a scene under callgrind and returns the instructions of its functions.
fn count(scene: Scene, requests: u64) -> Result<u64, String> {
    let scratch = tempfile::tempdir().map_err(|error| error.to_string())?;
    let report = scratch.path().join("report");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--quiet"]);
    valgrind.arg(format!("--callgrind-out-file={}", report.display()));
    if !scene.functions().is_empty() {
        valgrind.arg("--collect-atstart=no");
    }
    for function in scene.functions() {
        valgrind.arg(format!("--toggle-collect={function}"));
    }
    valgrind.arg(program).args(["--scene", &scene.name(), "--requests", &requests.to_string()]);
    let output = valgrind.output().map_err(|error| format!("valgrind: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{}: {}: {errors}", scene.name(), output.status));
    }
    let text = std::fs::read_to_string(&report).map_err(|error| format!("callgrind: {error}"))?;
    let total = text.lines().find_map(|line| line.strip_prefix("totals: "));
    let total = total.and_then(|total| total.trim().parse().ok());
    total.ok_or_else(|| format!("{}: callgrind gave no total: {errors}", scene.name()))
}
