//! Checks that doc comments stand alone and that no parameter is a tuple.

use super::{Breaches, Source, sources};

/// Openings of doc comments that cannot be understood without the line above or the item's name.
const FRAGMENTS: &[&str] = &[
    "As",
    "Beside",
    "By",
    "By which",
    "For what",
    "From where",
    "In which",
    "It",
    "Of",
    "Of which",
    "On which",
    "Over",
    "Says",
    "Tells",
    "The same",
    "To whom",
    "Under",
    "Under which",
    "What",
    "Where",
    "Who",
    "Whose",
    "With what",
];

/// Returns the opening of a text that needs its context.
fn fragment(text: &str) -> Option<&'static str> {
    let after = |opening: &&&str| {
        let rest = text.strip_prefix(**opening);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    FRAGMENTS.iter().rev().find(after).copied()
}

/// Whether a line of code destructures a tuple in a parameter: `(a, b): (A, B)`.
fn has_tuple_parameter(line: &str) -> bool {
    let line = line.trim_start();
    let is_pattern = |start: usize| {
        let open = line[..start].rfind('(');
        open.is_some_and(|open| {
            let inner = &line[open + 1..start];
            let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | ',' | ' ');
            inner.contains(',') && inner.chars().all(plain)
        })
    };
    !line.starts_with("let ") && line.match_indices("): (").any(|(at, _)| is_pattern(at))
}

/// Returns all Rust files but this one, which contains examples.
fn rust() -> impl Iterator<Item = Source> {
    let others = |source: &Source| source.is_rust() && source.path != "tests/tidy/english.rs";
    sources().into_iter().filter(others)
}

#[test]
fn doc_comments_stand_alone() {
    let mut breaches = Breaches::default();
    for source in rust() {
        let mut inside = false;
        for (line, text) in (1..).zip(source.text.lines()) {
            let doc = text.trim_start().strip_prefix("/// ");
            if let Some(opening) = doc.filter(|_| !inside).and_then(fragment) {
                breaches.add(&source.path, line, format!("a doc comment begins with `{opening}`"));
            }
            inside = text.trim_start().starts_with("///");
        }
    }
    breaches.none("doc comments stand alone");
}

#[test]
fn parameters_have_names() {
    let mut breaches = Breaches::default();
    for source in rust() {
        for (line, text) in (1..).zip(source.text.lines()) {
            if !text.trim_start().starts_with("//") && has_tuple_parameter(text) {
                breaches.add(&source.path, line, "a parameter is a tuple: name its parts");
            }
        }
    }
    breaches.none("parameters have names");
}

#[test]
fn fragments_and_tuples_are_detected() {
    assert_eq!(fragment("Of a flush."), Some("Of"));
    assert_eq!(fragment("Under which name it is found."), Some("Under which"));
    assert_eq!(fragment("Offset of the first byte."), None);
    for (line, has) in [
        ("fn f((a, b): (u8, u8)) {", true),
        ("    (now, deadline): (Instant, Instant),", true),
        ("let (a, b): (Vec<_>, Vec<_>) = x.unzip();", false),
        ("fn f(a: u8, b: (u8, u8)) {", false),
    ] {
        assert_eq!(has_tuple_parameter(line), has, "{line}");
    }
}
