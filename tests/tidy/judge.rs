//! Checks of `main.rs`: each takes text and returns the lines and words that violate a rule.
//!
//! Comments, strings and character literals are blanked out before code is checked ([`code_of`]).
//! The tests below give each check a violation and a near miss, so that a check that finds nothing
//! fails.

/// Maximum number of columns in a line.
pub(crate) const LINE_MAX: usize = 100;
/// Crates of the workspace that have product code.
const CRATES: &[&str] = &[
    "nbd-bridge",
    "rds",
    "rds/preload",
    "rtrs",
    "rtrs-base",
    "rtrs-capi",
    "rtrs-client",
    "rtrs-core",
    "rtrs-server",
    "vhost-bridge",
];

/// Names that engines must not use, and the reasons.
const ENGINE_BANS: &[(&str, &str)] = &[
    ("std::time::Instant", "time is an argument: crate::time::Instant"),
    ("std::time::SystemTime", "time is an argument"),
    ("SystemTime", "time is an argument"),
    ("std::thread", "an engine runs on the caller's thread"),
    ("std::net::TcpStream", "an engine has no sockets"),
    ("std::net::TcpListener", "an engine has no sockets"),
    ("std::net::UdpSocket", "an engine has no sockets"),
    ("std::os::unix::net", "an engine has no sockets"),
    ("HashMap", "the order of a hash map differs from run to run"),
    ("HashSet", "the order of a hash set differs from run to run"),
    ("RandomState", "differs from run to run"),
    ("crate::rt", "the runtime belongs to the driver"),
    ("super::rt", "the runtime belongs to the driver"),
    ("rtrs_base::rt", "the runtime belongs to the driver"),
    ("rtrs_core::rt", "the runtime belongs to the driver"),
    ("std::{", "write one path per line, so that this check can read it"),
    ("rtrs_base::{", "write one path per line, so that this check can read it"),
    ("rtrs_core::{", "write one path per line, so that this check can read it"),
];

/// Returns Rust text with comments and the insides of literals blanked out; line numbers do not
/// change.
pub(crate) fn code_of(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    let blank = |out: &mut String, c: char| out.push(if c == '\n' { '\n' } else { ' ' });
    while at < chars.len() {
        let c = chars[at];
        let next = chars.get(at + 1).copied();
        let in_word = at > 0 && is_word(chars[at - 1]);
        if c == '/' && next == Some('/') {
            while at < chars.len() && chars[at] != '\n' {
                out.push(' ');
                at += 1;
            }
        } else if c == '/' && next == Some('*') {
            let mut depth = 0;
            while at < chars.len() {
                let pair = (chars[at], chars.get(at + 1).copied());
                let step = match pair {
                    ('/', Some('*')) => {
                        depth += 1;
                        2
                    }
                    ('*', Some('/')) => {
                        depth -= 1;
                        2
                    }
                    _ => 1,
                };
                for _ in 0..step {
                    blank(&mut out, chars[at]);
                    at += 1;
                }
                if depth == 0 {
                    break;
                }
            }
        } else if let Some(hashes) = raw_string_hashes(&chars[at..]).filter(|_| !in_word) {
            let open = chars[at..].iter().position(|c| *c == '"').expect("an opening quote") + 1;
            for _ in 0..open {
                blank(&mut out, chars[at]);
                at += 1;
            }
            while at < chars.len() {
                let closes = chars[at] == '"'
                    && chars[at + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
                let step = if closes { 1 + hashes } else { 1 };
                for _ in 0..step {
                    blank(&mut out, chars[at]);
                    at += 1;
                }
                if closes {
                    break;
                }
            }
        } else if c == '"' {
            out.push('"');
            at += 1;
            while at < chars.len() && chars[at] != '"' {
                let step = if chars[at] == '\\' { 2 } else { 1 };
                for _ in 0..step.min(chars.len() - at) {
                    blank(&mut out, chars[at]);
                    at += 1;
                }
            }
            if at < chars.len() {
                out.push('"');
                at += 1;
            }
        } else if c == '\'' && (next == Some('\\') || chars.get(at + 2) == Some(&'\'')) {
            // A character literal; anything else after an apostrophe is a lifetime.
            let end = if next == Some('\\') { at + 3 } else { at + 2 };
            while at < chars.len() && (at < end || chars[at] != '\'') {
                blank(&mut out, chars[at]);
                at += 1;
            }
            out.push(' ');
            at += 1;
        } else {
            out.push(c);
            at += 1;
        }
    }
    out
}

/// Returns the number of hashes of the raw string that starts at the beginning of `chars`.
fn raw_string_hashes(chars: &[char]) -> Option<usize> {
    let (['b' | 'c', 'r', rest @ ..] | ['r', rest @ ..]) = chars else { return None };
    let hashes = rest.iter().take_while(|c| **c == '#').count();
    (rest.get(hashes) == Some(&'"')).then_some(hashes)
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `line` contains `word` with no letter, digit or underscore next to it.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let open = |c: Option<char>, edge: Option<char>| {
            !(c.is_some_and(is_word) && edge.is_some_and(is_word))
        };
        open(before, word.chars().next()) && open(after, word.chars().next_back())
    })
}

/// Returns lines of code with their numbers, starting at 1.
fn code_lines(code: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(code.lines())
}

pub(crate) fn unsafe_lines(text: &str) -> Vec<usize> {
    let code = code_of(text);
    code_lines(&code).filter(|(_, line)| has_word(line, "unsafe")).map(|(n, _)| n).collect()
}

/// Returns lines with `unsafe` that lack a safety comment: `SAFETY:` in the comment above the
/// statement, or `# Safety` in the docs of an unsafe function or trait.
pub(crate) fn unproven_lines(text: &str) -> Vec<usize> {
    let code = code_of(text);
    let code: Vec<&str> = code.lines().collect();
    let lines: Vec<&str> = text.lines().collect();
    let proven = |at: usize| {
        if lines[at].contains("SAFETY:") {
            return true;
        }
        // Search upwards through the start of the statement and the comment above it.
        let mut in_comment = false;
        for above in (0..at).rev().take(16) {
            let line = lines[above].trim();
            let comment = line.starts_with("//");
            if line.contains("SAFETY:") && comment || line.contains("/// # Safety") {
                return true;
            }
            let ends_statement = code[above].trim_end().ends_with([';', '{', '}']);
            if !comment && (in_comment || ends_statement || line.is_empty()) {
                return false;
            }
            in_comment |= comment;
        }
        false
    };
    unsafe_lines(text).into_iter().filter(|n| !proven(n - 1)).collect()
}

pub(crate) fn engine_breaches(text: &str) -> Vec<(usize, String)> {
    let code = code_of(text);
    let mut found = Vec::new();
    for (number, line) in code_lines(&code) {
        let bans = ENGINE_BANS.iter().filter(|(word, _)| has_word(line, word));
        if let Some((word, why)) = bans.max_by_key(|(word, _)| word.len()) {
            found.push((number, format!("{word}: {why}")));
        }
    }
    found
}

/// Returns markers of unfinished work: macros are looked for in code, words everywhere.
pub(crate) fn unfinished(text: &str) -> Vec<(usize, &'static str)> {
    const MACROS: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];
    const WORDS: [&str; 2] = [concat!("FIX", "ME"), concat!("XX", "X")];
    let code = code_of(text);
    let in_code = code_lines(&code)
        .flat_map(|(n, line)| MACROS.iter().filter(|m| has_word(line, m)).map(move |m| (n, *m)));
    let in_text = (1..)
        .zip(text.lines())
        .flat_map(|(n, line)| WORDS.iter().filter(|w| has_word(line, w)).map(move |w| (n, *w)));
    in_code.chain(in_text).collect()
}

/// Returns lines that are too long. Table rows and links in documents cannot be broken.
pub(crate) fn long_lines(path: &str, text: &str) -> Vec<usize> {
    let document = path.ends_with(".md");
    let breakable = |line: &str| !(document && (line.starts_with('|') || line.contains("](")));
    (1..)
        .zip(text.lines())
        .filter(|(_, line)| line.chars().count() > LINE_MAX && breakable(line))
        .map(|(n, _)| n)
        .collect()
}

/// Returns paths that exist on only one machine, and hosts of package registries.
pub(crate) fn foreign_places(text: &str) -> Vec<(usize, &'static str)> {
    const PATHS: [&str; 3] = [concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/")];
    const HOSTS: [&str; 6] = [
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("npmjs", ".org"),
        concat!("deb.debian", ".org"),
        concat!("proxy.golang", ".org"),
        concat!("docker", ".io"),
    ];
    // A longer path that contains the name is allowed: $dir/work/, target/work/.
    let is_root = |before: &str| !before.ends_with(|c: char| is_word(c) || "}/.-".contains(c));
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for path in PATHS {
            if line.match_indices(path).any(|(at, _)| is_root(&line[..at])) {
                found.push((number, path));
            }
        }
        found.extend(HOSTS.iter().filter(|host| has_word(line, host)).map(|host| (number, *host)));
    }
    found
}

/// Returns the workspace crates that a manifest names: normal dependencies, and those of tests or
/// build scripts.
pub(crate) fn own_dependencies(manifest: &str) -> (Vec<String>, Vec<String>) {
    let (mut normal, mut dev) = (Vec::new(), Vec::new());
    let mut section = String::new();
    for line in manifest.lines().map(str::trim) {
        let mut key = line.split(['=', '.', ' ']).next().unwrap_or("").trim_matches('"');
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
            // A separate table: [dependencies.rtrs-core].
            let Some((of, on)) = name.trim_end_matches(']').rsplit_once('.') else { continue };
            if !CRATES.contains(&on) {
                continue;
            }
            key = on;
            section = of.to_owned();
        }
        if !CRATES.contains(&key) {
            continue;
        }
        match section.rsplit('.').next() {
            Some("dependencies") if section != "workspace.dependencies" => normal.push(key.into()),
            Some("dev-dependencies" | "build-dependencies") => dev.push(key.into()),
            _ => {}
        }
    }
    (normal, dev)
}

/// Returns references from a document into the tree: targets of links, and paths in backquotes.
pub(crate) fn references(text: &str) -> Vec<(usize, String)> {
    const TOPS: [&str; 10] = [
        "nbd-bridge/",
        "rds/",
        "rtrs-client/",
        "rtrs-core/",
        "rtrs-server/",
        "tests/",
        "fuzz/",
        "configs/",
        "scripts/",
        "docs/",
    ];
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for (at, _) in line.match_indices("](") {
            let target = line[at + 2..].split(')').next().unwrap_or("");
            let target = target.split('#').next().unwrap_or("");
            if !target.is_empty() && !target.contains("://") {
                found.push((number, target.to_owned()));
            }
        }
        for quoted in line.split('`').skip(1).step_by(2) {
            let plain = quoted.chars().all(|c| is_word(c) || "/.-".contains(c));
            if plain && TOPS.iter().any(|top| quoted.starts_with(top)) {
                found.push((number, format!("/{quoted}")));
            }
        }
    }
    found
}

#[test]
fn rules_detect_violations() {
    let code = code_of("a // unsafe\n\"uns\\\"afe\" /* x /* y */ unsafe */ b\nr#\"todo!\"# 'x' 'a");
    assert!(!code.contains("unsafe") && !code.contains("todo") && code.contains("'a"));
    assert!(code.contains('b') && code.lines().count() == 3);
    assert_eq!(code_of("'\\'' + '\"' + \"'\" + x").trim().chars().next_back(), Some('x'));

    assert_eq!(unsafe_lines("ok\nlet a = unsafe { x };\ndeny(unsafe_code)\n// unsafe"), [2]);
    assert_eq!(unproven_lines("let a = unsafe { x };"), [1]);
    assert!(unproven_lines("// SAFETY: good.\nlet a =\n    unsafe { x };").is_empty());
    assert_eq!(unproven_lines("// SAFETY: of b.\nlet b = 1;\nlet a = unsafe { x };"), [3]);
    assert!(unproven_lines("/// # Safety\n/// Think.\nunsafe fn f() {}").is_empty());

    assert_eq!(engine_breaches("use std::time::Instant;").len(), 1);
    assert_eq!(engine_breaches("use rtrs_core::rt::Ring;\nuse crate::rt;").len(), 2);
    assert_eq!(engine_breaches("x: HashMap<u8, u8>,\nstd::thread::spawn(f)").len(), 2);
    assert_eq!(engine_breaches("use std::{thread, time};").len(), 1);
    assert!(engine_breaches("use crate::time::Instant;\nuse crate::rtt;\n// HashMap").is_empty());

    assert_eq!(unfinished("fn f() { todo!() }").len(), 1);
    assert_eq!(unfinished(concat!("// FIX", "ME later")).len(), 1);
    assert!(unfinished("\"todo!\"; the_dbg!(); // a todo!").is_empty());

    assert_eq!(long_lines("a.rs", &"x".repeat(101)), [1]);
    assert!(long_lines("a.rs", &"é".repeat(100)).is_empty());
    assert!(long_lines("a.md", &format!("|{}", "x".repeat(101))).is_empty());
    assert_eq!(long_lines("a.md", &"x ".repeat(60)), [1]);

    assert_eq!(foreign_places(concat!("cd /wo", "rk/main")).len(), 1);
    assert_eq!(foreign_places(concat!("see https://index.crates", ".io/x")).len(), 1);
    assert_eq!(foreign_places(concat!("from crates", ".io")).len(), 1);
    assert!(foreign_places(concat!("$work", "/a and $x/wo", "rk/b")).is_empty());

    let manifest = "[dependencies]\nrtrs-core.workspace = true\nclap = 1\n\
                    [dev-dependencies.rtrs-client]\npath = \"x\"\n\
                    [dev-dependencies]\nrtrs-server = { path = \"x\" }\n";
    let dev = vec!["rtrs-client".into(), "rtrs-server".into()];
    assert_eq!(own_dependencies(manifest), (vec!["rtrs-core".into()], dev));
    assert_eq!(
        references("see [a](b.md#c) and `tests/x.rs`, `a::b`, [w](https://e.org)"),
        [(1, "b.md".into()), (1, "/tests/x.rs".into())]
    );
}
