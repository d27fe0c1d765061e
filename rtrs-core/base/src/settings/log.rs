//! Filter and format of the log.
//!
//! The filter parser in `tracing` accepts any word as a module name, so a mistyped level would
//! silence the log. [`LogFilter`] refuses such words.

use std::fmt;
use std::str::FromStr;

use tracing_subscriber::EnvFilter;

use super::error::ValueError;
use super::suggest::nearest;

/// Words that set the level for all modules.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// Modules that may be written without a level, to enable all their messages.
const CRATES: [&str; 5] = ["nbd_bridge", "rtrs_base", "rtrs_client", "rtrs_core", "rtrs_server"];

/// Log filter. Each comma-separated word is a level, a module of this project, or a directive with
/// `=` or brackets, which is left to the parser in `tracing`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter(String);

impl LogFilter {
    /// Returns the filter as it was written.
    #[must_use]
    pub fn get(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

crate::text_values! {
    LogFilter, "FILTER", "a log filter such as info";
}

impl FromStr for LogFilter {
    type Err = ValueError;

    fn from_str(filter: &str) -> Result<Self, ValueError> {
        let words: Vec<&str> = filter.split(',').map(str::trim).collect();
        for &word in &words {
            let known =
                |names: &[&str], word: &str| names.iter().any(|n| n.eq_ignore_ascii_case(word));
            let root = word.split("::").next().unwrap_or(word);
            let fine = word.contains(['=', '[', '{'])
                || known(&LEVELS, word)
                || matches!(word.as_bytes(), [b'0'..=b'5'])
                || CRATES.contains(&root);
            if fine {
                continue;
            }
            let near = nearest(&word.to_ascii_lowercase(), LEVELS.iter().copied());
            let hint = near.map(|near| format!("did you mean {near:?}? ")).unwrap_or_default();
            return Err(ValueError::new(
                "log filter",
                filter,
                format!("has an unknown level {word:?}"),
                format!("{hint}use error, warn, info, debug, trace or off, or MODULE=LEVEL"),
            ));
        }
        let text = words.join(",");
        if let Err(error) = EnvFilter::try_new(&text) {
            let problem = format!("is not valid ({error})");
            return Err(ValueError::new("log filter", filter, problem, "use info or debug"));
        }
        Ok(Self(text))
    }
}

crate::choices! {
    /// Format of log lines.
    #[derive(Default)]
    pub enum LogFormat as "log format" {
        /// For people: time, level, module, message, fields.
        #[default]
        Text = "text",
        /// For collectors: one JSON object per line.
        Json = "json",
        /// For the systemd journal, which records time and level itself.
        Journald = "journald",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_modules_and_directives_are_accepted() {
        for good in [
            "info",
            "DEBUG",
            "off",
            "3",
            "rtrs_server",
            "rtrs_base",
            "rtrs_core::fabric",
            "warn,rtrs_client::session=debug",
            "info, nbd_bridge=trace",
            "[span]=info",
            "hyper=warn",
        ] {
            good.parse::<LogFilter>().unwrap_or_else(|error| panic!("{good}: {error}"));
        }
    }

    #[test]
    fn an_invalid_filter_is_refused_with_the_parsers_reason() {
        let text = "rtrs_core=loud".parse::<LogFilter>().unwrap_err().to_string();
        assert!(text.starts_with("log filter \"rtrs_core=loud\" is not valid ("), "{text}");
    }

    #[test]
    fn a_mistyped_level_is_refused_with_the_valid_levels() {
        for (bad, word, hint) in [
            ("inof", "inof", ""),
            ("infoo", "infoo", "did you mean \"info\"? "),
            ("", "", ""),
            ("info,debgu", "debgu", "did you mean \"debug\"? "),
            ("7", "7", ""),
            ("verbose", "verbose", ""),
        ] {
            let text = bad.parse::<LogFilter>().unwrap_err().to_string();
            let problem = format!("has an unknown level {word:?}; ");
            assert!(text.contains(&problem), "{text}");
            let levels = "use error, warn, info, debug, trace or off, or MODULE=LEVEL";
            assert!(text.ends_with(levels), "{text}");
            if !hint.is_empty() {
                assert!(text.contains(hint), "{text}");
            }
        }
    }
}
