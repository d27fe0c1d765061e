//! The directory `exports-dir`, whose files contain exports.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtrs_core::settings::{config_text, deserialize_list, yaml_error};

use super::ExportSpec;
use crate::error::{Error, ErrorKind};

/// Name of the directory next to the configuration file.
pub(crate) const DEFAULT: &str = "exports.d";

/// Lists the files in the directory that contain exports, sorted. Hidden files, which editors
/// create next to the file they edit, are ignored.
///
/// # Errors
/// Fails with [`ErrorKind::ConfigFile`], naming the directory.
pub(crate) fn files(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let unreadable = |source| {
        let text = format!("cannot read the directory {} (exports-dir)", dir.display());
        Error::with_source(ErrorKind::ConfigFile, text, source)
    };
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut files: Vec<PathBuf> =
        entries.map_err(unreadable)?.iter().map(fs::DirEntry::path).collect();
    let is_hidden = |file: &Path| {
        file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
    };
    files.retain(|file| file.extension().is_some_and(|end| end == "yaml") && !is_hidden(file));
    files.sort_unstable();
    Ok(files)
}

/// Whether a file in the directory is a symbolic link whose target does not exist.
pub(crate) fn leads_nowhere(file: &Path) -> bool {
    let is_missing = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    file.is_symlink() && fs::metadata(file).is_err_and(is_missing)
}

/// Describes a symbolic link whose target does not exist.
pub(crate) fn describe_dangling(link: &Path) -> String {
    let target = fs::read_link(link).unwrap_or_default();
    format!("{} is a symbolic link to {}, which does not exist", link.display(), target.display())
}

/// Warns about files in the directory that look like export files but are not read, and about empty
/// files, which may have been truncated by mistake.
pub(crate) fn warnings(dir: &Path) -> Vec<String> {
    // A directory that cannot be read is reported as an error.
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut unread: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|file| file.extension().is_some_and(|end| end == "yml"))
        .collect();
    unread.sort_unstable();
    let text = |file: PathBuf| {
        let file = file.display();
        format!("{file} is ignored: file names in exports-dir must end with .yaml; rename it")
    };
    let is_empty = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|meta| meta.is_file())
            && fs::read_to_string(file).is_ok_and(|text| text.trim().is_empty())
    };
    let empty = files(dir).unwrap_or_default().into_iter().filter(is_empty);
    let empty = empty.map(|file| {
        format!(
            "{} is empty and defines no export; restore its content or delete it",
            file.display()
        )
    });
    unread.into_iter().map(text).chain(empty).collect()
}

/// Reads the exports in a file. An empty file has none.
///
/// # Errors
/// Fails with [`ErrorKind::ConfigFile`] or [`ErrorKind::Config`], with the name, line and remedy.
pub(crate) fn read(file: &Path) -> Result<Vec<ExportSpec>, Error> {
    // Reading a pipe would wait for a writer. Other errors are reported by the read.
    if fs::metadata(file).is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
        let text = format!("{} is not a regular file; remove it from exports-dir", file.display());
        return Err(Error::new(ErrorKind::ConfigFile, text));
    }
    parse(&config_text(file)?, file)
}

/// Parses the text of a file with exports.
///
/// # Errors
/// Fails with [`ErrorKind::Config`], with the name, line and remedy.
pub(crate) fn parse(text: &str, file: &Path) -> Result<Vec<ExportSpec>, Error> {
    let exports = deserialize_list(serde_yaml::Deserializer::from_str(text));
    let exports = exports.map_err(|error| yaml_error(&error, &file.display().to_string()))?;
    Ok(exports.unwrap_or_default())
}

/// Finds the file in the directory that defines an export.
///
/// # Errors
/// Fails as [`files`] and [`read`] do.
pub(crate) fn file_of(dir: &Path, name: &str) -> Result<Option<PathBuf>, Error> {
    for file in files(dir)? {
        if read(&file)?.iter().any(|spec| spec.resolved_name().is_ok_and(|its| its == name)) {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Emacs keeps its lock next to the edited file, as a dangling link.
    #[test]
    fn hidden_files_and_other_endings_are_ignored() {
        let scratch = format!("rtrs-exports-dir-{}", std::process::id());
        let dir = std::env::temp_dir().join(scratch);
        fs::create_dir(&dir).unwrap();
        symlink("root@host.123:456", dir.join(".#a.yaml")).unwrap();
        for name in ["b.yaml", "a.yaml", "a.yaml~", ".c.yaml", "d.yml"] {
            fs::write(dir.join(name), if name == "a.yaml" { "[]" } else { "" }).unwrap();
        }
        let (found, warnings) = (files(&dir).unwrap(), warnings(&dir));
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(warnings.len(), 2);
        assert!(warnings[0].contains("d.yml is ignored"), "{warnings:?}");
        assert!(warnings[1].contains("b.yaml is empty"), "{warnings:?}");
        assert_eq!(found, [dir.join("a.yaml"), dir.join("b.yaml")]);
    }

    #[test]
    fn only_links_that_lead_nowhere_are_dangling() {
        let dir = std::env::temp_dir().join(format!("rtrs-exports-link-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        fs::write(path("a"), "").unwrap();
        symlink("a", path("link.yaml")).unwrap();
        symlink("b", path("dangling.yaml")).unwrap();
        let found =
            ["a", "link.yaml", "dangling.yaml", "none"].map(|name| leads_nowhere(&path(name)));
        let text = describe_dangling(&path("dangling.yaml"));
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, [false, false, true, false]);
        assert!(
            text.ends_with("dangling.yaml is a symbolic link to b, which does not exist"),
            "{text}"
        );
    }

    /// Reading the pipe would wait for a writer.
    #[test]
    fn a_pipe_is_refused() {
        let path = std::env::temp_dir().join(format!("rtrs-pipe-{}.yaml", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        let why = read(&path).unwrap_err().to_string();
        fs::remove_file(&path).unwrap();
        assert!(made.success() && why.contains("is not a regular file"), "{why}");
    }
}
