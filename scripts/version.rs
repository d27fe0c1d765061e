//! Build script of the programs: sets `RTRS_VERSION`, the text that `--version` prints.
//!
//! The text names the features, except for `rds`, which has none, and in a release build the git
//! revision. Other builds leave the revision out: it would recompile the programs with each commit.
//! A tree that is not the top of a git work tree, such as an unpacked archive, has no revision.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../scripts/version.rs");
    let text = |name| env::var(name).unwrap_or_default();
    let build = if text("PROFILE") == "release" {
        // Uncommitted changes also affect the text; the daemons are recompiled for these anyway.
        for path in ["src", "../rtrs-core/src", "../nbd-bridge/src", "../Cargo.lock"] {
            println!("cargo::rerun-if-changed={path}");
        }
        let root = Path::new(&text("CARGO_MANIFEST_DIR")).join("..");
        let revision = revision(&root).unwrap_or_else(|| "unknown".to_owned());
        format!("revision {revision}")
    } else {
        "debug build".to_owned()
    };
    let features = match (text("CARGO_PKG_NAME").as_str(), env::var_os("CARGO_FEATURE_VERBS")) {
        ("rds", _) => "",
        (_, Some(_)) => ", features: verbs",
        (_, None) => ", features: none",
    };
    let version = text("CARGO_PKG_VERSION");
    println!("cargo::rustc-env=RTRS_VERSION={version} ({build}{features})");
}

/// Returns the commit of a work tree, and whether files differ from that commit; None without git.
pub(crate) fn revision(root: &Path) -> Option<String> {
    // `logs/HEAD` changes with each commit, `HEAD` when a different branch is checked out.
    let heads = ["--git-path", "HEAD", "--git-path", "logs/HEAD"];
    let places = git(root, &[&["rev-parse", "--show-toplevel"], &heads[..]].concat())?;
    let mut places = places.lines().map(|place| root.join(place));
    if places.next()?.canonicalize().ok()? != root.canonicalize().ok()? {
        return None;
    }
    // A missing file would cause this script to run in every build.
    for place in places.filter(|place| place.exists()) {
        println!("cargo::rerun-if-changed={}", place.display());
    }
    git(root, &["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
}

/// Returns the output of git, if it succeeds.
fn git(root: &Path, args: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("-C").arg(root).args(args).output().ok()?;
    let text = String::from_utf8(out.stdout).ok()?;
    out.status.success().then(|| text.trim_end().to_owned())
}
