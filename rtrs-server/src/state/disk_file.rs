//! A file of the state directory as the medium of an [`EpochFile`](super::EpochFile).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rtrs_core::rt::blkdev;

use crate::engine::epoch_file::Medium;

/// A file on disk as the medium of an [`EpochFile`].
#[derive(Debug)]
pub(super) struct DiskFile {
    path: PathBuf,
    pub(super) open: Option<File>,
}

impl DiskFile {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), open: None }
    }

    /// Opens the file for writing, unless it is already open.
    pub(super) fn file(&mut self) -> io::Result<&File> {
        match &mut self.open {
            Some(file) => Ok(file),
            empty => Ok(empty.insert(File::options().write(true).open(&self.path)?)),
        }
    }
}

/// Makes the name of a file durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

impl Medium for DiskFile {
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        // A server was killed while it replaced the file: the old file lacks the last save.
        if self.path.with_extension("new").try_exists()? {
            return Ok(Some(Vec::new()));
        }
        match fs::read(&self.path) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn replace(&mut self, content: &[u8]) -> io::Result<()> {
        let fresh = self.path.with_extension("new");
        let written = File::create(&fresh).and_then(|file| {
            // Not supported everywhere; where it is not, the sync below detects a full disk.
            let _ = blkdev::fallocate(&file, 0, 0, content.len() as u64);
            file.write_all_at(content, 0)?;
            file.sync_all()?;
            fs::rename(&fresh, &self.path)?;
            Ok(file)
        });
        match written {
            Ok(file) => {
                self.open = Some(file);
                sync_directory(&self.path)
            }
            Err(error) => {
                // If the new file remained, the next server would distrust the old one.
                let _ = fs::remove_file(&fresh);
                Err(error)
            }
        }
    }

    fn overwrite(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
        let file = self.file()?;
        file.write_all_at(bytes, at as u64)?;
        file.sync_data()
    }

    fn clear(&mut self) -> io::Result<()> {
        let emptied = self.file().and_then(|file| {
            file.set_len(0)?;
            file.sync_all()
        });
        emptied.or_else(|_| {
            self.open = None;
            match fs::remove_file(&self.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => sync_directory(&self.path),
            }
        })
    }
}
