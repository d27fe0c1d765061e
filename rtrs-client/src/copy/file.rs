//! A regular file or block device as the source or destination; requests run on a few threads.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread;

use parking_lot::Mutex;
use rtrs_core::extents::Extent;
use rtrs_core::rt::blkdev::{self, OpenMode};

use super::failure::Failure;
use super::side::{Answer, Limits, Op, Request, Results, Setup, Side};
use crate::error::{Error, ErrorKind, system};

/// Maximum number of threads, each with one request.
const THREADS_MAX: u16 = 8;
/// Maximum length of a write of zeroes to a block device.
const ZEROES_MAX: u64 = 64 << 20;
/// Size of the zeroed memory for devices to which zeroes must be written.
const ZEROES_LEN: usize = 256 << 10;
/// Maximum number of extents in an answer.
const EXTENTS_MAX: usize = 512;

/// Identity of a file, or of a block device regardless of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileIdentity {
    File { device: u64, inode: u64 },
    Device(u64),
}

/// Open file or block device.
#[derive(Debug)]
pub(super) struct OpenFile {
    file: File,
    path: PathBuf,
    /// Size. That of a block device cannot change.
    pub(super) size: u64,
    is_device: bool,
    pub(super) identity: FileIdentity,
    /// Whether the file did not exist before.
    is_new: bool,
    is_writable: bool,
}

/// Returns the metadata of a file that can be copied from or to; None if there is no such file.
fn usable(path: &Path) -> Result<Option<Metadata>, Error> {
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        found => found.map_err(system(format!("cannot use {}", path.display())))?,
    };
    if !metadata.is_file() && !metadata.file_type().is_block_device() {
        let text = format!(
            "cannot use {}: it is neither a regular file nor a block device; for a pipe, use - and \
             a redirection",
            path.display()
        );
        return Err(Error::new(ErrorKind::System, text));
    }
    Ok(Some(metadata))
}

impl OpenFile {
    /// Opens a file for reading.
    pub(super) fn source(path: &Path) -> Result<Self, Error> {
        // Checked first because opening a pipe may wait for its other end.
        usable(path)?;
        let opened = blkdev::open(path, OpenMode::default());
        let file = opened.map_err(system(format!("cannot open {}", path.display())))?;
        Self::new(file, path)
    }

    /// Opens a file for reading and writing. Creates the file if it does not exist; otherwise keeps
    /// its content. A block device must not be mounted.
    pub(super) fn destination(path: &Path) -> Result<Self, Error> {
        let found = usable(path)?;
        let is_device = found.as_ref().is_some_and(|metadata| !metadata.is_file());
        let opened = match is_device {
            true => blkdev::open(path, OpenMode { write: true, exclusive: true, direct: false }),
            false => File::options().read(true).write(true).create(true).truncate(false).open(path),
        };
        let file = opened.map_err(system(format!("cannot open {} for writing", path.display())))?;
        Ok(Self { is_new: found.is_none(), is_writable: true, ..Self::new(file, path)? })
    }

    fn new(file: File, path: &Path) -> Result<Self, Error> {
        let failed = || system(format!("cannot use {}", path.display()));
        let metadata = file.metadata().map_err(failed())?;
        let is_device = metadata.file_type().is_block_device();
        let (size, identity) = if is_device {
            let size = blkdev::device_size(&file).map_err(failed())?;
            (size, FileIdentity::Device(metadata.rdev()))
        } else {
            let (device, inode) = (metadata.dev(), metadata.ino());
            (metadata.len(), FileIdentity::File { device, inode })
        };
        let path = path.to_owned();
        Ok(Self { file, path, size, is_device, identity, is_new: false, is_writable: false })
    }

    /// Number of bytes that can be read or will fit; None if the file can grow.
    pub(super) fn limit(&self) -> Option<u64> {
        (self.is_device || !self.is_writable).then_some(self.size)
    }

    /// Empties a regular file and sets its size, if known. The file then reads as zeroes.
    pub(super) fn empty(&mut self, size: Option<u64>) -> Result<(), Error> {
        if self.is_device {
            return Ok(());
        }
        let emptied = self.file.set_len(0).and_then(|()| self.file.set_len(size.unwrap_or(0)));
        emptied.map_err(system(format!("cannot set the size of {}", self.path.display())))?;
        self.size = size.unwrap_or(0);
        Ok(())
    }
}

/// Source or destination that is a file or block device.
#[derive(Debug)]
pub(super) struct FileSide {
    limits: Limits,
    jobs: mpsc::Sender<Request>,
    results: Results,
}

impl FileSide {
    /// Starts threads for the requests. A destination must have been [emptied](OpenFile::empty).
    pub(super) fn new(open: OpenFile, Setup { sizes, results }: Setup) -> Result<Self, Error> {
        let limits = Limits {
            size: open.limit(),
            block: 1,
            io_max: sizes.io_max,
            zeroes_max: if open.is_device { ZEROES_MAX } else { u64::MAX },
            extents: !open.is_device,
            is_zero: !open.is_device && open.is_writable,
        };
        let (jobs, queue) = mpsc::channel();
        let queue = Arc::new(Mutex::new(queue));
        let file = Arc::new(open);
        for _ in 0..sizes.requests.min(THREADS_MAX) {
            let (queue, file, results) = (Arc::clone(&queue), Arc::clone(&file), results.clone());
            let work = move || {
                loop {
                    let job = queue.lock().recv();
                    let Ok(mut request) = job else { return };
                    let result = file.run(&mut request).map_err(Failure::from);
                    if !results.send(request, result) {
                        return;
                    }
                }
            };
            let spawned = thread::Builder::new().name("rtrs-file".into()).spawn(work);
            spawned.map_err(system("cannot start a thread"))?;
        }
        Ok(Self { limits, jobs, results })
    }
}

impl Side for FileSide {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, request: Request) {
        if let Err(mpsc::SendError(request)) = self.jobs.send(request) {
            let failure = Failure::Other("its threads have ended".into());
            self.results.send(request, Err(failure));
        }
    }
}

impl OpenFile {
    fn run(&self, request: &mut Request) -> io::Result<Answer> {
        let Request { op, offset, len, buffer, .. } = request;
        let (op, offset, len) = (*op, *offset, *len);
        let bytes = usize::try_from(len).ok();
        let memory = bytes.and_then(|bytes| buffer.as_mut()?.get_mut(..bytes));
        match (op, memory) {
            (Op::Read, Some(memory)) => {
                self.file.read_exact_at(memory, offset).map_err(shorter)?;
            }
            (Op::Write, Some(memory)) => self.file.write_all_at(memory, offset)?,
            (Op::Read | Op::Write, None) => return Err(io::ErrorKind::InvalidInput.into()),
            (Op::Zero, _) => self.zero(offset, len)?,
            (Op::Extents, _) => return Ok(Answer { len, extents: self.extents(offset, len) }),
            (Op::Finish { durable }, _) => self.finish(len, durable)?,
        }
        Ok(Answer { len, extents: Vec::new() })
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        if blkdev::fallocate(&self.file, blkdev::ZERO_RANGE, offset, len).is_ok() {
            return Ok(());
        }
        let zeroes = vec![0; ZEROES_LEN];
        let mut done = 0;
        while done < len {
            let part = (len - done).min(ZEROES_LEN as u64);
            let bytes = usize::try_from(part).unwrap_or(ZEROES_LEN);
            self.file.write_all_at(&zeroes[..bytes], offset + done)?;
            done += part;
        }
        Ok(())
    }

    /// Extents of a range, from its start. The whole range is data if the file system does not
    /// support holes.
    fn extents(&self, offset: u64, len: u64) -> Vec<Extent> {
        let (end, mut at, mut extents) = (offset + len, offset, Vec::new());
        while at < end && extents.len() < EXTENTS_MAX {
            let data = match blkdev::next_data(&self.file, at) {
                Ok(found) => found.unwrap_or(end).clamp(at, end),
                Err(_) => at,
            };
            if data > at {
                extents.push(Extent { len: data - at, hole: true });
            }
            if data < end {
                let hole = blkdev::next_hole(&self.file, data).ok().flatten().unwrap_or(end);
                let hole = hole.min(end);
                // The results may be inconsistent if the file changes in the meantime.
                let hole = if hole > data { hole } else { end };
                extents.push(Extent { len: hole - data, hole: false });
                at = hole;
            } else {
                at = end;
            }
        }
        extents
    }

    fn finish(&self, size: u64, durable: bool) -> io::Result<()> {
        if !self.is_device && self.file.metadata()?.len() != size {
            self.file.set_len(size)?;
        }
        if durable {
            self.file.sync_all()?;
            if self.is_new {
                let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
                File::open(parent.unwrap_or_else(|| Path::new(".")))?.sync_all()?;
            }
        }
        Ok(())
    }
}

/// Explains that a file has become shorter.
fn shorter(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::other("the file has become shorter during the copy")
        }
        _ => error,
    }
}
