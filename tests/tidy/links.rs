//! Checks that the targets and anchors of links in documents exist, that pages in docs/ are short,
//! and that the index of docs/ lists every page.
//!
//! Code blocks and code spans contain no links. Targets with a scheme are not checked.

use std::collections::{BTreeMap, BTreeSet};

use super::{Breaches, root, sources};

/// Page that lists all pages in docs/.
const INDEX: &str = "docs/README.md";

const PAGE_LINES_MAX: usize = 400;

/// Pages longer than [`PAGE_LINES_MAX`] lines, and the reasons.
const LONG_PAGES: &[(&str, &str)] =
    &[("docs/PROTOCOL.md", "reference of all bytes on the wire; scripts write its tables")];

/// The text before a target and the character after it, for Markdown links and HTML images.
const TARGETS: &[(&str, char)] = &[("](", ')'), ("src=\"", '"'), ("srcset=\"", '"')];

/// Returns the lines outside code blocks, with their line numbers, starting at 1.
fn unfenced(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((number, line));
        }
    }
    lines
}

/// Returns the targets of relative links, with their line numbers.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (number, line) in unfenced(text) {
        // A code span ends with its paragraph, list item or row.
        let start = line.trim_start();
        in_code &= !start.is_empty() && !start.starts_with(['|', '#', '-']);
        let mut prose = String::with_capacity(line.len());
        for c in line.chars() {
            if c == '`' {
                in_code = !in_code;
            } else if !in_code {
                prose.push(c);
            }
        }
        for (before, after) in TARGETS {
            for (at, _) in prose.match_indices(before) {
                let target = prose[at + before.len()..].split(*after).next().unwrap_or("");
                if !target.contains("://") {
                    found.push((number, target.to_owned()));
                }
            }
        }
    }
    found
}

/// Returns the text of a heading as displayed: without the targets of its links.
fn shown(heading: &str) -> String {
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text.push_str(before);
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    text + rest
}

/// Returns the anchor of a heading as GitHub generates it: in lower case, with hyphens for spaces,
/// and without other punctuation except underscores.
fn slug(heading: &str) -> String {
    let mut slug = String::new();
    for c in shown(heading).trim().chars() {
        match c {
            ' ' => slug.push('-'),
            '-' | '_' => slug.push(c),
            c if c.is_alphanumeric() => slug.extend(c.to_lowercase()),
            _ => {}
        }
    }
    slug
}

/// Returns the anchors of a page. Repeated headings are numbered, starting with the second.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in unfenced(text) {
        let heading = line.trim_start_matches('#');
        if heading == line || !heading.starts_with(' ') {
            continue;
        }
        let base = slug(heading);
        let mut anchor = base.clone();
        let mut number = 0;
        while !anchors.insert(anchor) {
            number += 1;
            anchor = format!("{base}-{number}");
        }
    }
    anchors
}

/// Returns the path of a target relative to the root of the tree.
fn resolve(page: &str, target: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns all documents, by path.
fn documents() -> BTreeMap<String, String> {
    let documents = sources().into_iter().filter(|source| source.path.ends_with(".md"));
    documents.map(|source| (source.path, source.text)).collect()
}

#[test]
fn links_of_documents_resolve() {
    let mut breaches = Breaches::default();
    let documents = documents();
    for (page, text) in &documents {
        for (line, target) in links(text) {
            let target = target.as_str();
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if path.is_empty() { page.clone() } else { resolve(page, path) };
            if !root().join(&file).exists() {
                breaches.add(page, line, format!("there is no {target}"));
            } else if let Some(text) = documents.get(&file)
                && !anchor.is_empty()
                && !anchors(text).contains(anchor)
            {
                breaches.add(page, line, format!("no heading has the anchor of {target}"));
            }
        }
    }
    breaches.none("links of documents resolve");
}

#[test]
fn pages_are_short() {
    let mut breaches = Breaches::default();
    let documents = documents();
    for (page, text) in documents.iter().filter(|(page, _)| page.starts_with("docs/")) {
        let lines = text.lines().count();
        let excused = LONG_PAGES.iter().any(|(path, why)| path == page && !why.is_empty());
        if lines > PAGE_LINES_MAX && !excused {
            breaches.add(page, lines, format!("more than {PAGE_LINES_MAX} lines"));
        }
        if lines <= PAGE_LINES_MAX && excused {
            breaches.add(page, lines, "is short now: remove it from the list");
        }
    }
    for (page, _) in LONG_PAGES.iter().filter(|(page, _)| !documents.contains_key(*page)) {
        breaches.add(page, 0, "listed here, but there is no such page");
    }
    breaches.none("pages are short");
}

#[test]
fn the_index_links_every_page() {
    let mut breaches = Breaches::default();
    let documents = documents();
    let named = links(&documents[INDEX]).into_iter().map(|(_, target)| {
        let path = target.split('#').next().unwrap_or("");
        resolve(INDEX, path)
    });
    let named: BTreeSet<String> = named.collect();
    for page in documents.keys().filter(|page| page.starts_with("docs/") && *page != INDEX) {
        if !named.contains(page) {
            breaches.add(INDEX, 0, format!("does not name {page}"));
        }
    }
    breaches.none("the index names every page");
}

#[test]
fn broken_links_and_anchors_are_detected() {
    let text = "# One `two`\n## One two\n### [Three](x.md), 4!\n```\n# no\n[n](n.md)\n```\n\
                [a](b.md#c) `[d](e.md)` [w](https://e.org)\n![f](../g.svg), `a\n[h](i.md)`\n\
                <img src=\"j.svg\">\n";
    let found = links(text);
    let found: Vec<(usize, &str)> = found.iter().map(|(n, target)| (*n, &**target)).collect();
    assert_eq!(found, [(3, "x.md"), (8, "b.md#c"), (9, "../g.svg"), (11, "j.svg")]);
    let expected = ["one-two", "one-two-1", "three-4"].map(str::to_owned);
    assert_eq!(anchors(text), BTreeSet::from(expected));
    assert_eq!(slug(" What do I do when ..."), "what-do-i-do-when-");
    assert_eq!(resolve("docs/how-to/a.md", "../b/./c.md"), "docs/b/c.md");
    assert_eq!(resolve("README.md", "docs/a.md"), "docs/a.md");
}
