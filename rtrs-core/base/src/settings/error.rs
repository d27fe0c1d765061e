//! Error for a value that a user wrote.
//!
//! [`ValueError`] is the error of every parser in this folder and of the daemons' parsers. It keeps
//! its four parts (kind of value, value, problem, hint) separate until it is printed.

use std::borrow::Cow;
use std::fmt;

/// Maximum number of characters of a refused value that an error repeats.
const SHOWN_CHARS_MAX: usize = 80;

/// Value that does not parse: its kind, the value, the problem and the hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueError {
    what: &'static str,
    value: String,
    problem: Cow<'static, str>,
    hint: Cow<'static, str>,
}

impl ValueError {
    /// Creates the error. `problem` continues the sentence "`what` "`value`" ...", `hint` is an
    /// instruction to the user: "use ...", "write ...".
    #[must_use]
    pub fn new(
        what: &'static str,
        value: &str,
        problem: impl Into<Cow<'static, str>>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { what, value: value.to_owned(), problem: problem.into(), hint: hint.into() }
    }

    /// Adds `word` as an alternative to the hint.
    #[must_use]
    pub fn or(self, word: &str) -> Self {
        Self { hint: format!("{}, or {word}", self.hint).into(), ..self }
    }

    /// Returns the whole refused value.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: String = self.value.chars().take(SHOWN_CHARS_MAX).collect();
        let more = if shown.len() < self.value.len() { "..." } else { "" };
        write!(f, "{} {shown:?}{more} {}; {}", self.what, self.problem, self.hint)
    }
}

impl std::error::Error for ValueError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_value_problem_and_hint() {
        let error = ValueError::new("size", "12q", "has no known unit", "use k, M, G or T");
        assert_eq!(error.to_string(), "size \"12q\" has no known unit; use k, M, G or T");
    }

    #[test]
    fn long_and_unusual_values_are_cut_and_escaped() {
        let error = ValueError::new("size", &"\n".repeat(500), "is odd", "use less");
        let text = error.to_string();
        assert!(text.len() < 250, "{text}");
        assert!(!text.contains('\n') && text.contains("\\n\"..."), "{text}");
    }
}
