//! Words of a log filter.
//!
//! Owns [`check_log_filter`]. The filter's own parser takes any word for the name of a module, so
//! that a mistyped level would silence the log; here it is refused. What the words mean is the
//! parser's business.

use super::{ValueError, nearest};

/// Words that set how much is logged everywhere.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// Modules that may stand alone, which turns all of them on.
const CRATES: [&str; 4] = ["nbd_bridge", "rtrs_client", "rtrs_core", "rtrs_server"];

/// Refuses a filter with a word that is neither a level nor one of our modules. Parts with `=` or
/// brackets are left to the filter's own parser.
///
/// # Errors
/// [`ValueError`] with the levels there are.
pub fn check_log_filter(filter: &str) -> Result<(), ValueError> {
    for word in filter.split(',').map(str::trim) {
        let known = |names: &[&str], word: &str| names.iter().any(|n| n.eq_ignore_ascii_case(word));
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
            format!("has the word {word:?}, which is no level"),
            format!("{hint}use error, warn, info, debug, trace or off, or MODULE=LEVEL"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_modules_and_pairs_are_filters() {
        for good in [
            "info",
            "DEBUG",
            "off",
            "3",
            "rtrs_server",
            "rtrs_core::fabric",
            "warn,rtrs_client::session=debug",
            "info, nbd_bridge=trace",
            "[span]=info",
            "hyper=warn",
        ] {
            check_log_filter(good).unwrap_or_else(|error| panic!("{good}: {error}"));
        }
    }

    #[test]
    fn a_mistyped_level_is_refused_with_the_levels() {
        for (bad, word, hint) in [
            ("inof", "inof", ""),
            ("infoo", "infoo", "did you mean \"info\"? "),
            ("", "", ""),
            ("info,debgu", "debgu", "did you mean \"debug\"? "),
            ("7", "7", ""),
            ("verbose", "verbose", ""),
        ] {
            let text = check_log_filter(bad).unwrap_err().to_string();
            let said = format!("has the word {word:?}, which is no level; ");
            assert!(text.contains(&said), "{text}");
            let levels = "use error, warn, info, debug, trace or off, or MODULE=LEVEL";
            assert!(text.ends_with(levels), "{text}");
            if !hint.is_empty() {
                assert!(text.contains(hint), "{text}");
            }
        }
    }
}
