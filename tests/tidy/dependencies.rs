//! Rules for the crates that the workspace depends on: licenses, sources, versions and bans.
//!
//! The rules are declared in `.cargo/deny.toml` and applied to the output of `cargo metadata`, so
//! that they are checked without cargo-deny and without a network. `cargo metadata` needs only
//! crates already fetched by a build on Linux.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::process::Command;

use serde::Deserialize;

use super::{Breaches, PUBLIC_INDEX, root};

const RULES: &str = ".cargo/deny.toml";

/// Output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// None for a path.
    source: Option<String>,
}

/// An entry of a list in the rules: quoted values by key. A plain string has an empty key.
type Entry<'a> = BTreeMap<&'a str, &'a str>;

/// Returns the entries of a list in the rules. Each entry is on its own line.
fn list<'a>(rules: &'a str, table: &str, key: &str) -> Vec<Entry<'a>> {
    let opening = format!("{key} = [");
    let lines = rules.lines().map(str::trim).skip_while(|line| *line != table).skip(1);
    let lines = lines.take_while(|line| !line.starts_with('['));
    let lines = lines.skip_while(|line| *line != opening).skip(1).take_while(|line| *line != "]");
    let is_separator = |c: char| !c.is_alphanumeric() && c != '-';
    let entry = |line: &'a str| -> Entry<'a> {
        let parts: Vec<&str> = line.split('"').collect();
        let pairs = parts.chunks_exact(2);
        pairs.map(|pair| (pair[0].trim_matches(is_separator), pair[1])).collect()
    };
    let entries: Vec<_> =
        lines.filter(|line| !line.starts_with('#')).map(entry).filter(|e| !e.is_empty()).collect();
    assert!(!entries.is_empty(), "{RULES}: cannot read `{key}` of {table}: one entry per line");
    entries
}

/// Returns the plain strings of a list in the rules.
fn strings<'a>(rules: &'a str, table: &str, key: &str) -> Vec<&'a str> {
    list(rules, table, key).into_iter().filter_map(|entry| entry.get("").copied()).collect()
}

/// Returns the crates in a list of bans, with the reasons.
fn reasons<'a>(rules: &'a str, key: &str) -> Vec<(&'a str, &'a str)> {
    let fields = |entry: &Entry<'a>| Some((*entry.get("crate")?, *entry.get("reason")?));
    let entries = list(rules, "[bans]", key);
    let fields = entries.iter().map(fields).collect::<Option<Vec<_>>>();
    fields.unwrap_or_else(|| panic!("{RULES}: an entry of `{key}` lacks its crate or reason"))
}

impl Package {
    /// Whether a package specification, `name` or `name@version`, matches this package.
    fn matches(&self, spec: &str) -> bool {
        let (name, version) = spec.split_once('@').unwrap_or((spec, ""));
        let rest = self.version.strip_prefix(version);
        name == self.name
            && (version.is_empty() || rest.is_some_and(|r| r.is_empty() || r.starts_with('.')))
    }
}

/// Whether the allowed licenses satisfy an SPDX expression. `/` means `OR`, as in old manifests.
fn satisfies(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut tokens: Vec<&str> = spaced.split_whitespace().rev().collect();
    any_of(&mut tokens, allowed) && tokens.is_empty()
}

/// Evaluates alternatives. The next token is the last element of `tokens`.
fn any_of(tokens: &mut Vec<&str>, allowed: &[&str]) -> bool {
    let mut result = all_of(tokens, allowed);
    while tokens.pop_if(|token| *token == "OR").is_some() {
        result |= all_of(tokens, allowed);
    }
    result
}

fn all_of(tokens: &mut Vec<&str>, allowed: &[&str]) -> bool {
    let mut result = license(tokens, allowed);
    while tokens.pop_if(|token| *token == "AND").is_some() {
        result &= license(tokens, allowed);
    }
    result
}

fn license(tokens: &mut Vec<&str>, allowed: &[&str]) -> bool {
    match tokens.pop() {
        Some("(") => any_of(tokens, allowed) & (tokens.pop() == Some(")")),
        Some(id) if tokens.pop_if(|token| *token == "WITH").is_some() => {
            let exception = tokens.pop().unwrap_or("");
            allowed.contains(&format!("{id} WITH {exception}").as_str())
        }
        Some(id) => allowed.contains(&id),
        None => false,
    }
}

/// Returns a message for each violation of the rules.
fn violations(rules: &str, metadata: &Metadata) -> Vec<String> {
    let packages = &metadata.packages;
    let mut found = licenses(rules, packages);
    found.extend(versions(rules, packages));
    for package in packages {
        let Package { name, version, .. } = package;
        let allowed = match package.source.as_deref() {
            None => metadata.workspace_members.contains(&package.id),
            Some(source) => source == PUBLIC_INDEX,
        };
        if !allowed {
            let source = package.source.as_deref().unwrap_or("a path outside the workspace");
            found.push(format!("{name} {version} comes from {source}; use the public index"));
        }
    }
    for (spec, reason) in reasons(rules, "deny") {
        for Package { name, version, .. } in packages.iter().filter(|p| p.matches(spec)) {
            let finder = format!("`cargo tree -i {name}@{version}` shows what needs it");
            found.push(format!("{name} {version} is banned: {reason}; remove it: {finder}"));
        }
    }
    found
}

fn licenses(rules: &str, packages: &[Package]) -> Vec<String> {
    let allowed = strings(rules, "[licenses]", "allow");
    let clarified = list(rules, "[licenses]", "clarify");
    let mut found = Vec::new();
    let mut satisfied = Vec::new();
    for package in packages {
        let Package { name, version, .. } = package;
        let applies = |entry: &&Entry<'_>| entry.get("crate").is_some_and(|c| package.matches(c));
        let clarify = || clarified.iter().find(applies)?.get("expression").copied();
        match package.license.as_deref().or_else(clarify) {
            None => found.push(format!(
                "{name} {version} declares no license; read its license file and add the crate to \
                 `clarify` in {RULES}"
            )),
            Some(expression) if satisfies(expression, &allowed) => satisfied.push(expression),
            Some(expression) => found.push(format!(
                "{name} {version} has the license {expression}; use another crate, or add the \
                 license to `allow` in {RULES} if it is compatible with MIT OR Apache-2.0"
            )),
        }
    }
    for license in &allowed {
        let others: Vec<&str> = allowed.iter().copied().filter(|other| other != license).collect();
        if satisfied.iter().all(|expression| satisfies(expression, &others)) {
            found.push(format!("no crate needs the license {license}; remove it from {RULES}"));
        }
    }
    found
}

fn versions(rules: &str, packages: &[Package]) -> Vec<String> {
    let skipped = reasons(rules, "skip");
    let mut found = Vec::new();
    let mut kept: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        if !skipped.iter().any(|(spec, _)| package.matches(spec)) {
            kept.entry(&package.name).or_default().push(&package.version);
        }
    }
    for (name, versions) in kept.iter().filter(|(_, versions)| versions.len() > 1) {
        found.push(format!(
            "{name} has the versions {}; depend on one of them, or add the other to `skip` in \
             {RULES} with a reason",
            versions.join(", ")
        ));
    }
    for (spec, _) in &skipped {
        let name = spec.split('@').next().unwrap_or(spec);
        if !kept.contains_key(name) || !packages.iter().any(|package| package.matches(spec)) {
            found.push(format!("{spec} is not a second version; remove it from `skip` in {RULES}"));
        }
    }
    found
}

#[test]
fn dependencies_obey_the_rules() {
    let rules = fs::read_to_string(root().join(RULES)).expect(RULES);
    let target = strings(&rules, "[graph]", "targets")[0];
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .args(["--filter-platform", target])
        .current_dir(root())
        .output()
        .expect("cargo");
    assert!(
        out.status.success(),
        "cargo metadata failed; build the workspace first, so that its crates are available\n{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let metadata: Metadata = serde_json::from_slice(&out.stdout).expect("JSON from cargo metadata");
    assert!(metadata.packages.len() > 50, "cargo metadata lists too few packages");
    let mut breaches = Breaches::default();
    for violation in violations(&rules, &metadata) {
        breaches.add("Cargo.lock", 0, violation);
    }
    breaches.none("dependencies obey the rules");
}

const EXAMPLE: &str = r#"
[licenses]
allow = [
    "MIT",
    "ISC",
]
clarify = [
    { crate = "unlabeled@1", expression = "ISC", license-files = [
        { path = "LICENSE", hash = 0x1 },
    ] },
]

[bans]
deny = [
    { crate = "banned", reason = "it is bad" },
]
skip = [
    # The older one.
    { crate = "double@1", reason = "an old user" },
]
"#;

fn package(name: &str, version: &str, license: &str) -> Package {
    Package {
        id: format!("{name} {version}"),
        name: name.to_owned(),
        version: version.to_owned(),
        license: (!license.is_empty()).then(|| license.to_owned()),
        source: Some(PUBLIC_INDEX.to_owned()),
    }
}

/// Returns the violations of [`EXAMPLE`] in a graph of `extra` and packages that obey the rules.
fn violations_with(extra: Package) -> String {
    let packages = vec![
        Package { source: None, ..package("own", "0.1.0", "MIT") },
        package("unlabeled", "1.2.0", ""),
        package("double", "1.9.0", "GPL-3.0 OR MIT"),
        package("double", "2.0.0", "MIT"),
        extra,
    ];
    let workspace_members = BTreeSet::from(["own 0.1.0".to_owned()]);
    violations(EXAMPLE, &Metadata { packages, workspace_members }).join("\n")
}

#[test]
fn violations_name_the_crate() {
    assert_eq!(violations_with(package("good", "1.0.0", "MIT")), "");
    assert!(violations_with(package("gpl", "1.0.0", "GPL-3.0")).starts_with("gpl 1.0.0 has"));
    assert!(violations_with(package("unlabeled", "2.0.0", "")).contains("declares no license"));
    let banned = violations_with(package("banned", "1.0.0", "MIT"));
    assert!(banned.starts_with("banned 1.0.0 is banned: it is bad"), "{banned}");
    let third = violations_with(package("double", "2.1.0", "MIT"));
    assert!(third.starts_with("double has the versions 2.0.0, 2.1.0"), "{third}");
    let foreign = Package { source: None, ..package("foreign", "1.0.0", "MIT") };
    assert!(violations_with(foreign).starts_with("foreign 1.0.0 comes from a path"));
    let git = Some("git+https://example.org/git".to_owned());
    let git = violations_with(Package { source: git, ..package("git", "1.0.0", "MIT") });
    assert!(git.starts_with("git 1.0.0 comes from git+https"), "{git}");
}

#[test]
fn rules_without_effect_are_found() {
    let metadata = Metadata {
        packages: vec![package("double", "2.0.0", "MIT")],
        workspace_members: BTreeSet::new(),
    };
    let found = violations(EXAMPLE, &metadata).join("\n");
    assert!(found.contains("no crate needs the license ISC"), "{found}");
    assert!(found.contains("double@1 is not a second version"), "{found}");
}

#[test]
fn license_expressions_are_evaluated() {
    let allowed = ["MIT", "ISC", "A WITH B"];
    let good = ["MIT", "X OR MIT", "X/MIT", "MIT AND ISC", "(X OR MIT) AND ISC", "A WITH B OR X"];
    for expression in good {
        assert!(satisfies(expression, &allowed), "{expression}");
    }
    let bad = ["X", "MIT AND X", "(MIT OR ISC) AND X", "A", "MIT WITH B", "", "(MIT", "MIT ISC"];
    for expression in bad {
        assert!(!satisfies(expression, &allowed), "{expression}");
    }
}
