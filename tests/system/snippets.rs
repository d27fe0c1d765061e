//! Tests of configuration files in the documentation. A fenced block with such a file is marked
//! with its kind, as in `yaml server`. The product's parser must accept it, as well as the files
//! that command lines write with `printf`.

use std::fs;

use rtrs_core::settings::settings_from_yaml;
use rtrs_tests::{COMMAND_TIME_MAX, Finished, Scratch, bin, run};
use serde_yaml::Value;

use super::blocks::pages;

/// Top-level keys; every configuration file has at least one of them.
const OWN_KEYS: [&str; 5] = ["address", "export", "path", "sessions", "target"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Server,
    Client,
    Rds,
    /// A file in `exports-dir`.
    Exports,
    /// The file for `apply`.
    Volumes,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Server, Self::Client, Self::Rds, Self::Exports, Self::Volumes];

    /// Kind of a marked block.
    fn of_mark(mark: &str) -> Option<Self> {
        Some(match mark {
            "yaml server" => Self::Server,
            "yaml client" => Self::Client,
            "yaml rds" => Self::Rds,
            "yaml exports" => Self::Exports,
            "yaml volumes" => Self::Volumes,
            _ => return None,
        })
    }

    /// Kind of a file written by a command line.
    fn of_path(path: &str) -> Self {
        match path {
            "/etc/rtrs/server.yaml" => Self::Server,
            path if path.starts_with("/etc/rds/") => Self::Rds,
            _ => Self::Client,
        }
    }

    /// Parses a file. Returns the product's error if the file is invalid.
    fn parse(self, text: &str) -> Result<(), String> {
        match self {
            Self::Server => rtrs_server::settings::Settings::from_yaml(text, "snippet")
                .map(drop)
                .map_err(|error| error.chain().to_string()),
            Self::Client => rtrs_client::settings::Settings::from_yaml(text, "snippet")
                .map(drop)
                .map_err(|error| error.chain().to_string()),
            Self::Rds => {
                settings_from_yaml::<rds::settings::Settings, rds::ErrorKind>(text, "snippet")
                    .map(drop)
                    .map_err(|error| error.chain().to_string())
            }
            Self::Exports => {
                let read = |dir: &str| {
                    let words = ["--exports-dir", dir, "--print-config"];
                    run(bin("rtrs-server"), &words, COMMAND_TIME_MAX)
                };
                accepted(text, read, |done| done.code == Some(0))
            }
            Self::Volumes => {
                let read = |dir: &str| {
                    let file = format!("{dir}/snippet.yaml");
                    let words = ["apply", "--dry-run", "--file", &file, "--run-dir", dir];
                    run(bin("rtrs-client"), &words, COMMAND_TIME_MAX)
                };
                // This host may lack the devices.
                accepted(text, read, |done| done.stdout.contains("RESULT"))
            }
        }
    }
}

/// Checks that a program accepts a file that is the only one in its directory.
fn accepted(
    text: &str,
    read: impl Fn(&str) -> Finished,
    is_good: impl Fn(&Finished) -> bool,
) -> Result<(), String> {
    let scratch = Scratch::new();
    fs::write(scratch.path("snippet.yaml"), text).expect("a file");
    let done = read(scratch.dir().to_str().expect("a plain path"));
    if is_good(&done) { Ok(()) } else { Err(done.stderr) }
}

/// Returns a page's fenced blocks, each with the mark after its fence.
fn blocks(page: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    let mut block: Option<(String, String)> = None;
    for line in page.lines() {
        match (line.trim_start().strip_prefix("```"), &mut block) {
            (Some(_), Some(_)) => blocks.extend(block.take()),
            (Some(mark), None) => block = Some((mark.trim().to_owned(), String::new())),
            (None, Some((_, text))) => {
                *text += line;
                *text += "\n";
            }
            (None, None) => {}
        }
    }
    blocks
}

/// Returns the files written by a block's command lines.
fn printed(block: &str) -> Vec<(Kind, String)> {
    let file = |line: &str| {
        let (_, rest) = line.split_once("printf ")?;
        let quote = rest.chars().next().filter(|char| ['\'', '"'].contains(char))?;
        let (text, rest) = rest.strip_prefix(quote)?.split_once(quote)?;
        let path = rest.trim_start().strip_prefix('>')?.split_whitespace().next()?;
        path.ends_with(".yaml").then(|| (Kind::of_path(path), text.replace("\\n", "\n")))
    };
    block.lines().filter_map(file).collect()
}

/// Whether an unmarked block looks like a configuration file. JSON blocks are output.
fn looks_like_ours(block: &str) -> bool {
    if block.starts_with('{') {
        return false;
    }
    let Ok(Value::Mapping(map)) = serde_yaml::from_str(block) else { return false };
    map.keys().filter_map(Value::as_str).any(|key| OWN_KEYS.contains(&key))
}

#[test]
fn files_in_documents_are_accepted() {
    let (mut wrong, mut kinds) = (Vec::new(), Vec::new());
    for (page, text) in pages() {
        for (mark, block) in blocks(&text) {
            let mut files = printed(&block);
            match Kind::of_mark(&mark) {
                Some(kind) => files.push((kind, block)),
                None if mark.starts_with("yaml") => {
                    wrong.push(format!("{page}: unknown mark {mark:?}"));
                }
                None if looks_like_ours(&block) => {
                    wrong.push(format!("{page}: mark this block with its kind:\n{block}"));
                }
                None => {}
            }
            for (kind, text) in files {
                kinds.push(kind);
                if let Err(why) = kind.parse(&text) {
                    wrong.push(format!("{page}: {kind:?}: {why}\n{text}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(Kind::ALL.iter().all(|kind| kinds.contains(kind)), "only {kinds:?} were found");
    assert!(kinds.len() >= 11, "only {kinds:?} were found");
}

#[test]
fn files_are_found_and_wrong_ones_refused() {
    let page =
        "```yaml server\nexport: [a=/b]\n```\n```\nprintf 'path: x\\n' >/etc/rtrs/v.yaml\n```";
    let found = blocks(page);
    let [(mark, block), (none, shell)] = &found[..] else { panic!("two blocks") };
    assert_eq!((Kind::of_mark(mark), &**block), (Some(Kind::Server), "export: [a=/b]\n"));
    assert!(looks_like_ours(block) && !looks_like_ours(shell) && Kind::of_mark(none).is_none());
    assert_eq!(printed(shell), [(Kind::Client, "path: x\n".to_owned())]);
    for (kind, good, bad) in [
        (Kind::Server, "export: [a=/b]\n", "exprt: [a=/b]\n"),
        (Kind::Client, "path: tcp://127.0.0.1\n", "path: udp://127.0.0.1\n"),
        (Kind::Rds, "address: [127.0.0.1]\n", "adress: [127.0.0.1]\n"),
        (Kind::Exports, "name: a\ntarget: /b\n", "name: a\n"),
        (
            Kind::Volumes,
            "sessions: [{path: tcp://127.0.0.1, volumes: [{export: v, socket: /s}]}]\n",
            "sessions: [{path: tcp://127.0.0.1, volumes: [{export: v, sokcet: /s}]}]\n",
        ),
    ] {
        assert_eq!(kind.parse(good), Ok(()));
        assert!(kind.parse(bad).is_err_and(|why| !why.is_empty()), "{kind:?}: {bad}");
    }
}
