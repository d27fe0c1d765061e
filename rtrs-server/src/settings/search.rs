//! The value of `search-path`: where to look up names that are not exported.
//!
//! Defines [`SearchSpec`]: `off`, or an absolute directory, which may end with `%SESSNAME%`.
//! `search.rs` looks up names under it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use rtrs_core::settings::ValueError;

/// Placeholder for the name of the session, as in the kernel's `dev_search_path`.
const BY_SESSION: &str = "%SESSNAME%";

/// Directory in which names are looked up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum SearchSpec {
    /// No directory: only named exports can be opened.
    #[default]
    Off,
    /// A directory.
    Below {
        /// Path of the directory.
        prefix: PathBuf,
        /// Whether each session uses the subdirectory named after it.
        by_session: bool,
    },
}

impl FromStr for SearchSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem, hint| Err(ValueError::new("search-path", text, problem, hint));
        if text == "off" {
            return Ok(Self::Off);
        }
        if !text.starts_with('/') || text.contains('\0') {
            let hint = "write an absolute path such as /srv/volumes, or off";
            return refuse("is not an absolute path", hint);
        }
        let (prefix, by_session) = match text.split_once(BY_SESSION) {
            Some((prefix, "" | "/")) if prefix.ends_with('/') => (prefix, true),
            Some(_) => {
                let hint = "write it as the last part, as in /srv/%SESSNAME%";
                return refuse("has %SESSNAME% in the middle", hint);
            }
            None => (text, false),
        };
        let bare = prefix.trim_end_matches('/');
        let prefix = PathBuf::from(if bare.is_empty() { "/" } else { bare });
        Ok(Self::Below { prefix, by_session })
    }
}

impl fmt::Display for SearchSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Below { prefix, by_session: false } => write!(f, "{}", prefix.display()),
            Self::Below { prefix, by_session: true } => {
                write!(f, "{}", prefix.join(BY_SESSION).display())
            }
        }
    }
}

rtrs_core::settings::text_values! {
    SearchSpec, "DIR|off", "off, or an absolute path such as /srv/volumes";
}

#[cfg(test)]
mod tests {
    use super::*;

    fn below(prefix: &str, by_session: bool) -> SearchSpec {
        SearchSpec::Below { prefix: prefix.into(), by_session }
    }

    #[test]
    fn a_search_path_is_parsed_and_printed() {
        for (text, spec, again) in [
            ("off", SearchSpec::Off, "off"),
            ("/", below("/", false), "/"),
            ("/srv/vols//", below("/srv/vols", false), "/srv/vols"),
            ("/srv/%SESSNAME%", below("/srv", true), "/srv/%SESSNAME%"),
            ("/srv/%SESSNAME%/", below("/srv", true), "/srv/%SESSNAME%"),
            ("/%SESSNAME%", below("/", true), "/%SESSNAME%"),
        ] {
            assert_eq!(text.parse::<SearchSpec>().unwrap(), spec, "{text}");
            assert_eq!(spec.to_string(), again);
        }
    }

    #[test]
    fn malformed_search_paths_are_refused() {
        for (text, part) in [
            ("", "is not an absolute path"),
            ("srv", "is not an absolute path"),
            ("/srv\0", "is not an absolute path"),
            ("/srv/%SESSNAME%/vols", "as the last part"),
            ("/srv/x%SESSNAME%", "as the last part"),
            ("%SESSNAME%", "is not an absolute path"),
        ] {
            let error = text.parse::<SearchSpec>().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
