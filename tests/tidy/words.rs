//! Retired terms, and their replacements.
//!
//! Only unambiguous terms are listed. Many words of the old glossary, such as hold, told and aside,
//! are ordinary in other contexts, so reviewers have to find their misuse.

/// Retired terms with the terms that a Linux storage maintainer expects. Lower case; a space stands
/// for any word boundary within an identifier, so `home core` also matches `HomeCore` and
/// `home_core`.
pub(crate) const WORDS: &[(&str, &str)] = &[
    ("binder", "bind QP"),
    ("desk", "admin server"),
    ("goodbye", "DREQ"),
    ("inherited life", "inherited epoch"),
    ("life of the cache", "cache epoch"),
    ("life of the server s cache", "cache epoch"),
    ("misdeed", "protocol violation"),
    ("misdeeds", "protocol violations"),
    ("pulse", "heartbeat monitor"),
    ("rhythm", "heartbeat configuration"),
    ("server life", "server instance"),
    ("settled life", "settled epoch"),
    ("shard mail", "message"),
    ("spares", "chunk-pool cache"),
    ("stranded", "awaiting fence"),
    ("untold", "unreported"),
    ("vouched", "confirmed alive by another path"),
    ("walk of a request", "request pipeline"),
];

/// Returns the words of a text in lower case, with identifiers split and a space around each word.
fn parts(text: &str) -> String {
    let mut out = String::from(" ");
    let mut before = ' ';
    for c in text.chars() {
        let starts = c.is_uppercase() && (before.is_lowercase() || before.is_ascii_digit());
        if (starts || !c.is_alphanumeric()) && !out.ends_with(' ') {
            out.push(' ');
        }
        if c.is_alphanumeric() {
            out.extend(c.to_lowercase());
        }
        before = c;
    }
    out.push(' ');
    out
}

/// Returns each retired term in a line, with its replacement.
pub(crate) fn retired_terms<'a>(
    line: &str,
    words: &'a [(&'a str, &'a str)],
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let parts = parts(line);
    words.iter().copied().filter(move |(word, _)| parts.contains(&format!(" {word} ")))
}

#[test]
fn terms_are_detected_in_every_spelling() {
    const LIST: &[(&str, &str)] = &[("home core", "control shard"), ("desk", "admin server")];
    let found = |line| retired_terms(line, LIST).map(|(word, _)| word).collect::<Vec<_>>();
    for line in ["the home core asks", "fn home_core()", "HomeCore::new", "a HOME-CORE's queue"] {
        assert_eq!(found(line), ["home core"], "{line}");
    }
    assert_eq!(found("self.desk.ask()"), ["desk"]);
    assert_eq!(found("src/admin/desk.rs"), ["desk"]);
    for line in ["the desktop", "at home, cores", "home cores"] {
        assert!(found(line).is_empty(), "{line}");
    }
}
