//! Deleted files that only the server still holds open. Their content is lost when the export is
//! closed.
//!
//! Without `--force`, commands that would close such a file are refused with an explanation of how
//! to copy the file. If the file was deleted before a new file appeared at its path, no reload or
//! reopening closes the deleted file unless forced, because the new file may be unrelated. A file
//! that was replaced by another (`mv new.img vol.img`) is closed once no session has the file open,
//! because replacing the file has already discarded its content.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::backend::FileId;
use crate::export::Export;

/// Hint for a refused command that would close a deleted file.
pub(in crate::daemon) const LAST_COPY_HINT: &str = "; --force continues without a copy";

/// Returns the reason not to close an export that is, or may be, the only copy of its content. The
/// caller must have examined the target.
pub(super) fn last_copy(export: &Export) -> Option<String> {
    let Export { name, backing, .. } = export;
    if export.source.is_deleted() {
        return Some(format!(
            "{backing} of export {name:?} was deleted, and its content is lost when the file is \
             closed; {}",
            how_to_copy(export)
        ));
    }
    export.is_unexamined().then(|| {
        format!(
            "cannot determine whether {backing} of export {name:?} was deleted: its file system \
             does not respond; closing a deleted file loses its content; try again when the file \
             system responds"
        )
    })
}

/// Returns the reason not to reopen an export whose file was deleted and then replaced by a new
/// file.
pub(super) fn orphan(export: &Export) -> String {
    format!(
        "the open file was deleted and replaced by a new file; the deleted file is still exported, \
         and its content is lost when it is closed; {}; `reload --force` exports the new file",
        how_to_copy(export)
    )
}

/// Explains how to copy an export's deleted file.
fn how_to_copy(export: &Export) -> String {
    let pid = std::process::id();
    let number = export.file.and_then(|file| descriptor(Path::new("/proc/self/fd"), file));
    let from = match number {
        Some(number) => format!("/proc/{pid}/fd/{number}"),
        None => format!("/proc/{pid}/fd/N, where `ls -l` shows the deleted file,"),
    };
    format!("first copy it through a client, or with `cp --sparse=always {from} FILE`")
}

/// Finds the descriptor number of a deleted file in the descriptor directory `all` of /proc.
/// Several deleted files may have had the same path.
fn descriptor(all: &Path, file: FileId) -> Option<String> {
    let is_wanted = |entry: &fs::DirEntry| {
        let path = entry.path();
        // Other files are not examined, because they can hang.
        let is_deleted =
            fs::read_link(&path).is_ok_and(|to| to.as_os_str().as_bytes().ends_with(b" (deleted)"));
        is_deleted && fs::metadata(&path).is_ok_and(|meta| FileId::of(&meta) == file)
    };
    let found = fs::read_dir(all).ok()?.flatten().find(is_wanted)?;
    found.file_name().into_string().ok()
}

#[cfg(test)]
mod tests {
    use rtrs_core::tests::certificates::TestDir;

    use super::*;
    use crate::backend::{OpenedTarget, open_target_at};

    #[test]
    fn the_advice_names_the_file_of_the_export_and_not_another_deleted_one() {
        let dir = TestDir::new("last-copy");
        let path = dir.0.join("a.img");
        // Both deleted files had the same path.
        let exports = [(1, ""), (2, ",delay=1ms")].map(|(blocks, options)| {
            fs::write(&path, vec![0; blocks * 4096]).unwrap();
            let spec = format!("{}{options}", path.display()).parse().unwrap();
            let OpenedTarget { source, file } = open_target_at(&spec, None).unwrap();
            fs::remove_file(&path).unwrap();
            let backing = path.display().to_string();
            (blocks as u64 * 4096, Export { backing, file, ..Export::new("a", source) })
        });
        for (size, export) in exports {
            let number = export.source.examine_name();
            while !export.source.is_examined(number) {
                std::thread::yield_now();
            }
            let advice = last_copy(&export).unwrap();
            let from = advice.split_whitespace().find(|word| word.starts_with("/proc/")).unwrap();
            assert_eq!(fs::metadata(from).unwrap().len(), size, "{advice}");
        }
    }
}
