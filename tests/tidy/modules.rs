//! Import graph of a crate's modules, built from the paths in its files.

use std::collections::{BTreeMap, BTreeSet};

use super::judge::code_of;

/// Path of a module in the crate: `["engine", "io"]`.
type Module = Vec<String>;

/// Returns the module of a file in `src/`, e.g. `engine/io/mod.rs`.
fn module_of(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let mut parts: Module = path.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

/// Returns the code before its inline test module, which is the last item by convention in this
/// tree.
fn without_tests(code: &str) -> &str {
    let mut items = code.match_indices("\n#[cfg(").map(|(at, _)| at);
    let end = items.find(|at| {
        let mut lines = code[*at..].lines().skip(1);
        let gate = lines.next().unwrap_or("");
        let item = lines.find(|line| !line.starts_with("#[")).unwrap_or("");
        gate.contains("test") && item.contains("mod ") && item.ends_with('{')
    });
    &code[..end.unwrap_or(code.len())]
}

/// Returns every path in the code before its test module: expanded `use` trees, and other paths
/// that begin with `crate::`, `self::` or `super::`.
fn paths_in(text: &str) -> Vec<Vec<String>> {
    let code = code_of(text);
    let code = without_tests(&code);
    let mut paths = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let (before, tree) = (&rest[..at], &rest[at + 4..]);
        let starts = before.trim_end_matches(' ').chars().next_back();
        let tree = tree.split(';').next().unwrap_or("");
        if starts.is_none_or(|c| "\n;}{)".contains(c)) || before.ends_with("pub ") {
            take_apart("", tree, &mut paths);
        }
        rest = &rest[at + 4..];
    }
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut words = ["", ""];
    for word in code.split(|c| !is_path(c)).filter(|word| !word.is_empty()) {
        let is_import = ["crate::", "self::", "super::"].iter().any(|root| word.starts_with(root));
        // The head of a `use` group was expanded above; `pub(in path)` imports nothing.
        if is_import && !word.ends_with("::") && words != ["pub", "in"] {
            take_apart("", word, &mut paths);
        }
        words = [words[1], word];
    }
    paths
}

/// Expands `a::{b, c::{d, e}}` to `a::b`, `a::c::d`, `a::c::e`.
fn take_apart(before: &str, tree: &str, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some((head, group)) = tree.split_once('{') else {
        let path = format!("{before}{}", tree.split(" as ").next().unwrap_or(""));
        let parts = path.split("::").map(|part| part.trim().to_owned());
        return paths.push(parts.filter(|part| !part.is_empty()).collect());
    };
    let (mut depth, mut item, head) = (0, String::new(), format!("{before}{head}"));
    for c in group.strip_suffix('}').unwrap_or(group).chars().chain([',']) {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            take_apart(&head, &std::mem::take(&mut item), paths);
        } else {
            item.push(c);
        }
    }
}

/// Returns the file that a path in a module refers to, if it is in this crate.
fn file_of<'a>(
    own: &[String],
    path: &[String],
    modules: &BTreeMap<Module, &'a str>,
) -> Option<&'a str> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    let mut to = match path.first()?.as_str() {
        "crate" => path[1..].to_vec(),
        "self" => [own, &path[1..]].concat(),
        "super" => [&own[..own.len().checked_sub(ups)?], &path[ups..]].concat(),
        // A child module, or an item from another crate.
        _ => {
            let child = [own, &path[..1]].concat();
            modules.get(&child)?;
            [own, path].concat()
        }
    };
    loop {
        match modules.get(&to) {
            Some(file) => return Some(file),
            None => to.pop()?,
        };
    }
}

/// Returns the imports of each file, by path below `src/`.
fn graph<'a>(files: &[(&'a str, &str)]) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let modules: BTreeMap<Module, &str> =
        files.iter().map(|(path, _)| (module_of(path), *path)).collect();
    let mut graph = BTreeMap::new();
    for (file, text) in files {
        let own = module_of(file);
        let paths = paths_in(text);
        let imports = paths.iter().filter_map(|path| file_of(&own, path, &modules));
        graph.insert(*file, imports.filter(|other| other != file).collect());
    }
    graph
}

/// Returns all files that a file imports directly or indirectly.
fn reached<'a>(from: &'a str, graph: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(at) = open.pop() {
        let next = graph.get(at).into_iter().flatten().copied();
        open.extend(next.filter(|next| seen.insert(*next)));
    }
    seen
}

/// Returns groups of files that import each other in a cycle.
pub(crate) fn cycles(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let graph = graph(files);
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        graph.keys().map(|file| (*file, reached(file, &graph))).collect();
    let mut found = BTreeSet::new();
    for (file, all) in reached.iter().filter(|(file, all)| all.contains(*file)) {
        let back = all.iter().filter(|other| reached[*other].contains(file));
        found.insert(back.map(|other| (*other).to_owned()).collect::<Vec<_>>());
    }
    found.into_iter().collect()
}

#[test]
fn cycles_are_detected() {
    let a =
        ("a.rs", "use crate::b::{self, X};\n#[cfg(test)]\npub mod tests {\n use crate::c;\n}\n");
    let b = ("b.rs", "fn f() -> crate::c::d::Y { todo() }\n// use crate::a;\n");
    let c = ("c/mod.rs", "mod d;\n#[cfg(test)]\nmod tests;\npub use d::Y;\nuse std::{fmt, io};\n");
    let d = ("c/d.rs", "use super::super::e::{f::G, h};\npub(in crate::c) fn i() {}\n");
    let e = ("e.rs", "");
    assert!(cycles(&[a, b, c, d, e]).is_empty());
    let expected = [vec!["a.rs", "b.rs", "c/d.rs", "e.rs"]];
    assert_eq!(cycles(&[a, b, c, d, ("e.rs", "use crate::{z, a::{T, U}};")]), expected);
    let up = ("c/d.rs", "use super::Z;\n");
    assert_eq!(cycles(&[a, b, c, up, e]), [vec!["c/d.rs", "c/mod.rs"]]);
}
