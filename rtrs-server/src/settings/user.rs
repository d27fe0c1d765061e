//! The user that a server runs as after startup: the value of `user`.
//!
//! Owns [`UserSpec`], a text `NAME[:GROUP]`. At startup the server checks whether the user exists
//! (`daemon/privileges.rs`).

use std::fmt;
use std::str::FromStr;

use rtrs_core::settings::ValueError;

/// A user, and a group if it is not the user's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSpec {
    /// Name of the user.
    pub name: String,
    /// Name of the group.
    pub group: Option<String>,
}

impl FromStr for UserSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let unusable = |part: &str| {
            part.is_empty() || part.contains(|c: char| c == ':' || c.is_whitespace() || c == '\0')
        };
        if unusable(name) || group.is_some_and(unusable) {
            let hint = "use NAME or NAME:GROUP, for example rtrs";
            return Err(ValueError::new("user", text, "is not a user", hint));
        }
        Ok(Self { name: name.to_owned(), group: group.map(str::to_owned) })
    }
}

impl fmt::Display for UserSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match &self.group {
            Some(group) => write!(f, ":{group}"),
            None => Ok(()),
        }
    }
}

rtrs_core::settings::text_values! {
    UserSpec, "NAME[:GROUP]", "a user such as rtrs, or a user and a group such as rtrs:disk";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_parsed_and_printed() {
        for (text, name, group) in [("rtrs", "rtrs", None), ("rtrs:disk", "rtrs", Some("disk"))] {
            let spec: UserSpec = text.parse().unwrap();
            assert_eq!((&*spec.name, spec.group.as_deref()), (name, group));
            assert_eq!(spec.to_string(), text);
        }
        for text in ["", ":", "rtrs:", ":disk", "a b", "a:b:c", "a\0"] {
            let error = text.parse::<UserSpec>().unwrap_err().to_string();
            assert!(error.contains("is not a user; use NAME or NAME:GROUP"), "{error}");
        }
    }
}
