//! Deleted files that only the server still holds: their content ends when the export is closed.
//!
//! Commands that would close one refuse without `--force`, and say how to copy it. If the file was
//! deleted before anything took its path, no reload and no reopening closes it unasked: what is at
//! the path then may be anything. A file that was replaced by another (`mv new.img vol.img`) is
//! closed once no session has it open, because the replacement has ended its content already.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{self, Path};

use crate::export::Export;

/// Hint for a refused command that would close a deleted file.
pub(in crate::daemon) const LAST_COPY_HINT: &str = ", or use --force";

/// Returns why an export should not be closed if it has the only copy of its content.
pub(super) fn last_copy(export: &Export) -> Option<String> {
    let Export { name, backing, .. } = export;
    export.source.is_deleted().then(|| {
        format!(
            "{backing} of export {name:?} was deleted, and its content ends when it is closed; {}",
            how_to_copy(backing)
        )
    })
}

/// Returns why an export whose file was deleted before another one took its path is not reopened.
pub(super) fn orphan(export: &Export) -> String {
    format!(
        "the open file was deleted, and then another one took its path; the deleted one is still \
         exported, and its content ends when it is closed; {}; `reload --force` exports the new \
         one",
        how_to_copy(&export.backing)
    )
}

/// Explains how to copy a deleted file.
fn how_to_copy(backing: &str) -> String {
    let pid = std::process::id();
    let from = match descriptor(Path::new("/proc/self/fd"), Path::new(backing)) {
        Some(number) => format!("/proc/{pid}/fd/{number}"),
        None => format!("/proc/{pid}/fd/N, where `ls -l` shows the deleted file,"),
    };
    format!("copy it through a client, or with `cp --sparse=always {from} FILE`, first")
}

/// Number of a descriptor of a deleted file, from the directory of descriptors in /proc.
fn descriptor(all: &Path, path: &Path) -> Option<String> {
    let path = path::absolute(path).ok()?;
    let wanted = [path.as_os_str().as_bytes(), b" (deleted)"].concat();
    let is_wanted = |entry: &fs::DirEntry| {
        fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str().as_bytes() == wanted)
    };
    let found = fs::read_dir(all).ok()?.flatten().find(is_wanted)?;
    found.file_name().into_string().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rtrs_core::tests::certificates::TestDir;

    use super::*;

    #[test]
    fn the_descriptor_of_a_deleted_file_is_found_by_its_whole_path() {
        let dir = TestDir::new("last-copy");
        for (number, to) in
            [("3", "/srv/a.img"), ("4", "/srv/b/a.img (deleted)"), ("5", "/srv/a.img (deleted)")]
        {
            symlink(to, dir.0.join(number)).unwrap();
        }
        let found = |path: &str| descriptor(&dir.0, Path::new(path));
        assert_eq!(found("/srv/a.img").as_deref(), Some("5"));
        assert_eq!(found("/srv/b/a.img").as_deref(), Some("4"));
        assert_eq!(found("/srv/c.img"), None);
    }
}
