//! Explains why the system denies access to a file (EACCES).
//!
//! The system does not report which directory or permission is the cause. [`why_denied`] examines
//! the modes along the path, so it only detects causes visible there; access lists and security
//! modules can deny access too.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::rt::Account;

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// A user and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    uid: u32,
    groups: Vec<u32>,
    /// Name and number for messages, or only the number.
    shown: String,
}

impl User {
    /// Returns the user of this process.
    fn own() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let numbers = |key: &str| -> Option<Vec<u32>> {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().map(|number| number.parse().ok()).collect()
        };
        let mut groups = numbers("Groups:")?;
        // The fields are: real, effective, saved, file system.
        groups.extend(numbers("Gid:")?.get(1));
        let uid = *numbers("Uid:")?.get(1)?;
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let name = name_of(uid, &passwd);
        let shown = name.map_or_else(|| uid.to_string(), |name| format!("{name} ({uid})"));
        Some(Self { uid, groups, shown })
    }

    /// Returns true if the mode of a file grants this user this access.
    fn may(&self, what: u32, file: &Metadata) -> bool {
        let shift = if self.uid == file.uid() {
            6
        } else if self.groups.contains(&file.gid()) {
            3
        } else {
            0
        };
        (file.mode() >> shift) & what == what
    }

    /// Returns the reason why this user was denied access to a file: to read, or to read and write.
    fn obstacle(&self, path: &Path, write: bool) -> Option<String> {
        let path = std::path::absolute(path).ok()?;
        let found = fs::metadata(&path);
        self.denied_by_modes(&path, write).or_else(|| {
            Some(format!(
                "the mode of {} permits access by user {}, so an access list, a security module \
                 (SELinux, AppArmor) or the device cgroup must be the cause",
                shown(&path, &found.ok()?),
                self.shown
            ))
        })
    }

    /// Returns the reason why the modes deny this user access to a file: to read, or to read and
    /// write.
    fn denied_by_modes(&self, path: &Path, write: bool) -> Option<String> {
        let above: Vec<&Path> = path.ancestors().skip(1).collect();
        for dir in above.into_iter().rev() {
            let found = fs::metadata(dir).ok()?;
            if !self.may(SEARCH, &found) {
                let dir = shown(dir, &found);
                return Some(format!("user {} may not enter the directory {dir}", self.shown));
            }
        }
        let found = fs::metadata(path).ok()?;
        let denied = [(READ, "read", true), (WRITE, "write", write)]
            .into_iter()
            .find(|(what, _, wanted)| *wanted && !self.may(*what, &found));
        let (_, what, _) = denied?;
        Some(format!("user {} may not {what} {}", self.shown, shown(path, &found)))
    }
}

/// Describes a file with its mode and owner.
fn shown(path: &Path, file: &Metadata) -> String {
    let (mode, uid, gid) = (file.mode() & 0o7777, file.uid(), file.gid());
    format!("{} (mode {mode:o}, owner {uid}:{gid})", path.display())
}

/// Returns the name of a user from the text of /etc/passwd. Other databases are not queried,
/// because that can take a long time.
fn name_of(uid: u32, passwd: &str) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then_some(name)
    })
}

/// Returns the reason why this process is denied access to a file: to read, or to read and write.
/// Returns None if no reason is visible.
#[must_use]
pub fn why_denied(path: &Path, write: bool) -> Option<String> {
    User::own()?.obstacle(path, write)
}

/// Returns the reason why another user will be denied access to a file or directory: to read, or to
/// read and write. Returns None if the modes grant it or are not visible.
#[must_use]
pub fn why_denied_to(account: &Account, path: &Path, write: bool) -> Option<String> {
    let Account { name, uid, groups, .. } = account;
    let user = User { uid: *uid, groups: groups.clone(), shown: format!("{name} ({uid})") };
    user.denied_by_modes(&std::path::absolute(path).ok()?, write)
}

#[cfg(test)]
mod tests {
    use super::super::unix_socket::tests::Scratch;
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_denied_directory_or_permission_is_named() {
        let scratch = Scratch::new("denied");
        let chmod = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        chmod(&scratch.0, 0o755);
        let dir = scratch.0.join("dir");
        let file = dir.join("file");
        fs::create_dir(&dir).unwrap();
        fs::write(&file, "").unwrap();
        let meta = fs::metadata(&file).unwrap();
        let (uid, gid) = (meta.uid(), meta.gid());
        let user = |uid: u32, groups| User { uid, groups, shown: uid.to_string() };
        let other = user(uid + 1, vec![gid + 1]);
        let group = user(uid + 1, vec![gid + 1, gid]);
        let owner = user(uid, vec![]);
        let why = |user: &User, write| user.obstacle(&file, write).unwrap();

        chmod(&dir, 0o750);
        chmod(&file, 0o640);
        let (shown, dir_shown) = (file.display(), dir.display());
        let text = format!(
            "user {} may not enter the directory {dir_shown} (mode 750, owner {uid}:{gid})",
            uid + 1
        );
        assert_eq!(why(&other, false), text);
        let text = format!("user {} may not write {shown} (mode 640, owner {uid}:{gid})", uid + 1);
        assert_eq!(why(&group, true), text);
        chmod(&dir, 0o755);
        assert!(why(&other, true).starts_with(&format!("user {} may not read ", uid + 1)));
        for user in [&group, &owner] {
            assert!(why(user, false).contains("security module"), "{user:?}");
        }
        assert_eq!(User::own().map(|user| user.uid), Some(uid));
        let account =
            |uid| Account { name: "rtrs".into(), uid, gid: gid + 1, groups: vec![gid + 1] };
        assert_eq!(why_denied_to(&account(uid), &file, true), None);
        let text = format!("user rtrs ({}) may not read {shown} (mode 640,", uid + 1);
        let denied = why_denied_to(&account(uid + 1), &file, false);
        assert!(denied.as_ref().is_some_and(|why| why.starts_with(&text)), "{denied:?}");
    }

    #[test]
    fn a_user_is_shown_by_name() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nshort:x\nrtrs:x:990:985::/:/bin/false\n";
        assert_eq!(name_of(990, passwd), Some("rtrs"));
        assert_eq!(name_of(0, passwd), Some("root"));
        assert_eq!(name_of(985, passwd), None);
    }
}
