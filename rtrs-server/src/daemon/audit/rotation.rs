//! Rotation of a full audit log: selection of the lines to keep.
//!
//! As many lines of the full file and of the previous one as fit become the new `FILE.1`. If the
//! oldest lines were simply dropped, one client could remove the records of all others by causing
//! many records itself. Space is therefore shared: first among the operator, clients with names and
//! clients without, then among the names and addresses of each. An owner with less than its share
//! loses nothing; each of the others loses its own oldest lines.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rtrs_core::proto::quota::Source;
use serde::Deserialize;

/// Owner of a line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Operator,
    Named(String),
    Nameless(String),
}

impl Owner {
    const CLASSES: usize = 3;

    const fn class(&self) -> usize {
        match self {
            Self::Operator => 0,
            Self::Named(_) => 1,
            Self::Nameless(_) => 2,
        }
    }

    fn of(line: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Keys {
            event: String,
            identity: Option<String>,
            address: Option<SocketAddr>,
        }
        match serde_json::from_slice(line) {
            Ok(Keys { event, .. }) if matches!(&*event, "evict" | "session-disconnect") => {
                Self::Operator
            }
            Ok(Keys { identity: Some(name), .. }) => Self::Named(name),
            Ok(Keys { address: Some(address), .. }) => {
                Self::Nameless(format!("{:?}", Source::of(address.ip())))
            }
            _ => Self::Operator,
        }
    }
}

/// Combines `file` and `before` into a new `before` of at most `max` bytes, and removes `file`.
/// Either may be missing.
pub(super) fn rotate(file: &Path, before: &Path, max: u64) -> io::Result<()> {
    let mut sizes: BTreeMap<Owner, u64> = BTreeMap::new();
    let found = each_line(&[before, file], |line| {
        *sizes.entry(Owner::of(line)).or_default() += line.len() as u64;
        Ok(())
    })?;
    if found == 0 {
        return Ok(());
    }
    let mut surplus = surplus(sizes, max);
    let mut name = before.to_path_buf().into_os_string();
    name.push(".new");
    let made = Path::new(&name);
    // Removes an unfinished file.
    let _ = fs::remove_file(made);
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o600);
    let mut out = BufWriter::new(options.custom_flags(libc::O_NOFOLLOW).open(made)?);
    let written = each_line(&[before, file], |line| match surplus.get_mut(&Owner::of(line)) {
        Some(surplus) if *surplus > 0 => {
            *surplus = surplus.saturating_sub(line.len() as u64);
            Ok(())
        }
        _ => out.write_all(line),
    });
    let written = written.and_then(|_| out.flush()).and_then(|()| fs::rename(made, before));
    written.inspect_err(|_| drop(fs::remove_file(made)))?;
    match fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Calls a function with each line of the existing files, and returns the number of those files.
fn each_line(files: &[&Path], mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<usize> {
    let mut found = 0;
    for path in files {
        let mut options = File::options();
        let options = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let opened = match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        if !opened.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        found += 1;
        let mut lines = BufReader::with_capacity(1 << 16, opened);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            if line.last() != Some(&b'\n') {
                line.push(b'\n');
            }
            take(&line)?;
            line.clear();
        }
    }
    Ok(found)
}

/// Returns the number of bytes to drop for each owner.
fn surplus(sizes: BTreeMap<Owner, u64>, max: u64) -> BTreeMap<Owner, u64> {
    let mut classes = [0; Owner::CLASSES];
    for (owner, size) in &sizes {
        classes[owner.class()] += size;
    }
    let share = share(&classes, max);
    let shares: [u64; Owner::CLASSES] = std::array::from_fn(|class| {
        let of_class: Vec<u64> = sizes
            .iter()
            .filter(|(owner, _)| owner.class() == class)
            .map(|(_, size)| *size)
            .collect();
        self::share(&of_class, classes[class].min(share))
    });
    let mut surplus = sizes;
    surplus.retain(|owner, size| {
        *size = size.saturating_sub(shares[owner.class()]);
        *size > 0
    });
    surplus
}

/// Returns the largest share for which all sizes, each limited to it, fit in `max`.
fn share(sizes: &[u64], max: u64) -> u64 {
    let mut sorted = sizes.to_vec();
    sorted.sort_unstable();
    let mut left = max;
    for (at, size) in sorted.iter().enumerate() {
        let equal = left / (sorted.len() - at) as u64;
        if *size > equal {
            return equal;
        }
        left -= size;
    }
    u64::MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::AuditKind;

    #[test]
    fn small_files_are_kept_whole_and_large_ones_share_the_rest() {
        assert_eq!(share(&[10, 20, 30], 60), u64::MAX);
        assert_eq!(share(&[10, 100, 1000], 110), 50);
        assert_eq!(share(&[10, 100, 1000], 1000), 890);
        assert_eq!(share(&[5, 5, 5], 9), 3);
        assert_eq!(share(&[], 0), u64::MAX);
        assert_eq!(share(&[7], 0), 0);
    }

    #[test]
    fn lines_about_operator_actions_belong_to_the_operator() {
        let line = |event: &str| format!(r#"{{"event":"{event}","identity":"db1"}}"#);
        for kind in [AuditKind::Evict, AuditKind::SessionDisconnect] {
            let event = serde_json::to_value(kind).unwrap();
            let owner = Owner::of(line(event.as_str().unwrap()).as_bytes());
            assert_eq!(owner, Owner::Operator, "{event}");
        }
        assert_eq!(Owner::of(line("disconnect").as_bytes()), Owner::Named("db1".into()));
    }

    #[test]
    fn nameless_clients_take_no_space_from_others() {
        let mut sizes = BTreeMap::from([
            (Owner::Operator, 300),
            (Owner::Named("db1".into()), 250),
            (Owner::Named("hostile".into()), 10_000),
        ]);
        sizes.extend((0..1000).map(|n| (Owner::Nameless(n.to_string()), 100)));
        let surplus = surplus(sizes, 3000);
        assert_eq!(surplus.get(&Owner::Operator), None);
        assert_eq!(surplus.get(&Owner::Named("db1".into())), None);
        // 3000 minus the operator's 300 leaves 1350 for each of the other classes.
        assert_eq!(surplus.get(&Owner::Named("hostile".into())), Some(&(10_000 - 1100)));
        assert_eq!(surplus.get(&Owner::Nameless("0".into())), Some(&99));
    }
}
