//! Access to the NBD unix socket: its mode and its owner.
//!
//! Defines [`SocketOwner`], and looks up its names in /etc/passwd and /etc/group.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::str::FromStr;

use rtrs_core::settings::{SocketMode, ValueError, text_values};

/// A user and a group, by name or number: `USER`, `USER:GROUP` or `:GROUP`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SocketOwner {
    user: Option<String>,
    group: Option<String>,
}

impl FromStr for SocketOwner {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let is_name = |name: &str| !name.is_empty() && !name.contains([':', '\n', '\0']);
        let user = Some(user).filter(|user| !user.is_empty());
        if user.into_iter().chain(group).all(is_name) && (user.is_some() || group.is_some()) {
            let owned = |name: &str| name.to_owned();
            return Ok(Self { user: user.map(owned), group: group.map(owned) });
        }
        Err(ValueError::new("owner", text, "is not an owner", "use USER, USER:GROUP or :GROUP"))
    }
}

impl fmt::Display for SocketOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.user.as_deref().unwrap_or_default())?;
        self.group.as_ref().map_or(Ok(()), |group| write!(f, ":{group}"))
    }
}

text_values! {
    SocketOwner, "USER:GROUP", "an owner such as qemu:kvm";
}

impl SocketOwner {
    /// Returns the IDs of the user and the group.
    ///
    /// # Errors
    /// `NotFound` for a name that is not in the system's files.
    pub(crate) fn numbers(&self) -> io::Result<(Option<u32>, Option<u32>)> {
        let number = |name: &Option<String>, file| match name {
            None => Ok(None),
            Some(name) => number_of(name, file).map(Some),
        };
        Ok((number(&self.user, "/etc/passwd")?, number(&self.group, "/etc/group")?))
    }
}

/// Returns the ID of a name in a file with lines `NAME:x:NUMBER:...`.
fn number_of(name: &str, file: &str) -> io::Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let text = fs::read_to_string(file)?;
    let found = text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    });
    let missing = || format!("{name} is not in {file}; use its number");
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, missing()))
}

/// Sets the owner and mode of a socket.
///
/// # Errors
/// The system's error; `NotFound` for an unknown name.
pub(crate) fn give_socket(
    path: &Path,
    owner: Option<&SocketOwner>,
    mode: Option<SocketMode>,
) -> io::Result<()> {
    if let Some(owner) = owner {
        let (user, group) = owner.numbers()?;
        chown(path, user, group)?;
    }
    match mode {
        Some(mode) => fs::set_permissions(path, fs::Permissions::from_mode(mode.get())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_names_or_numbers() {
        for (text, numbers) in [
            ("root", (Some(0), None)),
            ("root:root", (Some(0), Some(0))),
            (":7", (None, Some(7))),
            ("12:34", (Some(12), Some(34))),
        ] {
            let owner: SocketOwner = text.parse().unwrap();
            assert_eq!(owner.to_string(), text);
            assert_eq!(owner.numbers().unwrap(), numbers);
        }
        for text in ["", ":", "a:", "a:b:c"] {
            assert!(text.parse::<SocketOwner>().is_err(), "{text}");
        }
        let error = "no-such-user".parse::<SocketOwner>().unwrap().numbers().unwrap_err();
        assert!(error.to_string().contains("is not in /etc/passwd; use its number"), "{error}");
    }
}
