//! qemu's image locks, which keep virtual machines and this server from writing to the same file.
//!
//! qemu locks individual bytes of the images that it opens, with open file description locks
//! (block/file-posix.c, `raw_apply_lock_bytes` and `raw_check_lock_bytes`). For each permission, a
//! lock on one byte means that the holder uses the permission, and a lock on another byte that the
//! holder does not share it. All of them are shared locks; conflicts are found by looking for other
//! holders' locks.
//!
//! A writable export uses a writer's permissions and shares none of them; a read-only export only
//! reads, alongside any writer. Loop devices take no locks and are found through sysfs.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;
use std::{io, thread};

use parking_lot::Mutex;
use rtrs_core::local::read_text;
use rtrs_core::rt::blkdev::{is_byte_locked, lock_byte};

use super::super::target::BackendError;

/// Maximum time for a search for loop devices, and for waiting until another search finishes.
const SEARCH_MAX: Duration = Duration::from_secs(2);

/// First of the bytes whose locks mean that a holder uses a permission (qemu: RAW_LOCK_PERM_BASE).
const USED: u32 = 100;
/// First of the bytes whose locks mean that a holder does not share a permission (qemu:
/// RAW_LOCK_SHARED_BASE).
const UNSHARED: u32 = 200;

/// Permission in qemu's block layer, with its number (qemu: BLK_PERM_*).
#[derive(Clone, Copy, Debug)]
enum Permission {
    Read = 0,
    Write = 1,
    Resize = 3,
}

use Permission::{Read, Resize, Write};

/// Permissions that an export uses and does not share.
struct Claim {
    used: &'static [Permission],
    unshared: &'static [Permission],
}

const READER: Claim = Claim { used: &[Read], unshared: &[] };
const WRITER: Claim = Claim { used: &[Read, Write, Resize], unshared: &[Write, Resize] };

impl Claim {
    fn of(read_only: bool) -> Self {
        if read_only { READER } else { WRITER }
    }

    /// Takes the locks, then returns whether those of another holder conflict. The locks must be
    /// taken first, so that if two holders begin at the same time, at least one sees the other.
    fn conflicts(&self, file: &File) -> io::Result<bool> {
        for byte in bytes(self.used, USED).chain(bytes(self.unshared, UNSHARED)) {
            match lock_byte(file, byte) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                taken => taken?,
            }
        }
        self.is_denied(file)
    }

    /// Whether another holder's locks conflict. Takes no locks.
    fn is_denied(&self, file: &File) -> io::Result<bool> {
        for byte in bytes(self.used, UNSHARED).chain(bytes(self.unshared, USED)) {
            if is_byte_locked(file, byte)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Bytes for these permissions; `base` is the byte of the permission with number 0.
fn bytes(permissions: &[Permission], base: u32) -> impl Iterator<Item = u32> {
    permissions.iter().map(move |permission| base + *permission as u32)
}

/// Takes qemu's image locks, without waiting. Logs a warning if the file system lacks lock support.
///
/// # Errors
/// If another program's lock conflicts, or a loop device uses the file of a writable export.
pub(super) fn guard(path: &Path, file: &File, read_only: bool) -> Result<(), BackendError> {
    match Claim::of(read_only).conflicts(file) {
        Ok(false) => {}
        Ok(true) => return Err(held_by_program(path, read_only)),
        Err(error) => tracing::warn!(
            path = %path.display(), %error,
            "the file system does not support image locks; a virtual machine could write at the \
             same time"
        ),
    }
    if read_only {
        return Ok(());
    }
    match loop_device_in_time(file) {
        Ok(None) => Ok(()),
        Ok(Some(device)) => Err(held_by_loop_device(path, &device)),
        Err(error) => {
            tracing::warn!(path = %path.display(), "cannot look for loop devices: {error}");
            Ok(())
        }
    }
}

/// Returns the error with which [`guard`] would fail, if another program holds the image. Takes no
/// locks; `file` can be opened read-only.
pub(super) fn holder(
    path: &Path,
    file: &File,
    read_only: bool,
) -> io::Result<Option<BackendError>> {
    if Claim::of(read_only).is_denied(file)? {
        return Ok(Some(held_by_program(path, read_only)));
    }
    let device = if read_only { None } else { loop_device_in_time(file)? };
    Ok(device.map(|device| held_by_loop_device(path, &device)))
}

fn held_by_program(path: &Path, read_only: bool) -> BackendError {
    let problem = "is in use by another program, likely a virtual machine or qemu-nbd (a QEMU \
                   image lock is held)";
    let hint = if read_only {
        "stop the program, or set `no-lock` if the program does not change the file"
    } else {
        "stop the program, export the file with `ro`, or set `no-lock` if only one side writes"
    };
    BackendError::path(path, problem, hint).held()
}

fn held_by_loop_device(path: &Path, device: &str) -> BackendError {
    let problem = format!("is in use by the loop device /dev/{device}");
    let hint = "detach the device (losetup -d), export the device instead, export the file with \
                `ro`, or set `no-lock` if only one side writes";
    BackendError::path(path, problem, hint).held()
}

/// Returns the name of the loop device backed by a file, if there is one. The search examines the
/// files of all loop devices, and one of these files may be on a file system that does not answer;
/// this search and later ones then fail.
fn loop_device_in_time(file: &File) -> io::Result<Option<String>> {
    static SEARCHING: Mutex<()> = Mutex::new(());
    let own = file.metadata()?;
    let (result, found) = mpsc::channel();
    let search = move || {
        let Some(_turn) = SEARCHING.try_lock_for(SEARCH_MAX) else { return };
        // The receiver may have stopped waiting.
        drop(result.send(loop_device(Path::new("/sys/block"), &own)));
    };
    thread::Builder::new().name("loop-devices".into()).spawn(search)?;
    found.recv_timeout(2 * SEARCH_MAX).unwrap_or_else(|_| {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the backing file of a loop device does not respond",
        ))
    })
}

/// Returns the name of the loop device backed by the file `own`, if there is one. `block` is
/// /sys/block.
fn loop_device(block: &Path, own: &Metadata) -> io::Result<Option<String>> {
    for entry in fs::read_dir(block)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("loop") {
            continue;
        }
        // Absent while the device has no file.
        let Some(backing) = read_text(&entry.path().join("loop/backing_file")) else { continue };
        // The path can belong to another mount namespace, or no longer exist.
        let Ok(found) = fs::metadata(&backing) else { continue };
        if (found.dev(), found.ino()) == (own.dev(), own.ino()) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rtrs_core::tests::certificates::TestDir;

    use super::*;

    fn image(dir: &TestDir) -> impl Fn(bool) -> File {
        let path = dir.0.join("image");
        fs::write(&path, [0; 4096]).unwrap();
        move |write| File::options().read(true).write(write).open(&path).unwrap()
    }

    /// Locks these bytes of the image, as another holder would.
    fn held(file: File, bytes: &[u32]) -> File {
        bytes.iter().for_each(|byte| lock_byte(&file, *byte).unwrap());
        file
    }

    #[test]
    fn locks_of_other_holders_conflict_as_in_qemu() {
        // Permissions that are used or not shared: consistent read (0), write (1), resize (3).
        let cases: [(&[u32], bool, bool); 9] = [
            (&[], false, false),
            (&[100], false, false),
            (&[101], false, true),
            (&[103], false, true),
            (&[102, 202], false, false),
            (&[200], true, true),
            (&[201], false, true),
            (&[203], false, true),
            (&[99, 104, 199, 204], false, false),
        ];
        for (bytes, refuses_reader, refuses_writer) in cases {
            // Each case has its own file: a program started by another test may inherit a copy of
            // the descriptor, and with it the lock.
            let dir = TestDir::new("image-lock");
            let open = image(&dir);
            let _other = held(open(false), bytes);
            let denied = [READER, WRITER].map(|claim| claim.is_denied(&open(false)).unwrap());
            assert_eq!(denied, [refuses_reader, refuses_writer], "{bytes:?}");
            assert_eq!(READER.conflicts(&open(false)).unwrap(), refuses_reader, "{bytes:?}");
            assert_eq!(WRITER.conflicts(&open(true)).unwrap(), refuses_writer, "{bytes:?}");
        }
    }

    #[test]
    fn an_export_holds_the_locks_of_its_kind_until_it_is_closed() {
        let dir = TestDir::new("image-hold");
        let (open, path) = (image(&dir), dir.0.join("image"));
        let is_locked = |byte| is_byte_locked(open(false), byte).unwrap();
        let locked = || (90..=210).filter(|byte| is_locked(*byte)).collect::<Vec<u32>>();
        let (reader, writer) = (open(false), open(true));
        guard(&path, &reader, true).unwrap();
        assert_eq!(locked(), [100]);
        assert!(holder(&path, &open(false), false).unwrap().is_none());
        assert_eq!(locked(), [100], "a probe takes no locks");
        guard(&path, &writer, false).unwrap();
        assert_eq!(locked(), [100, 101, 103, 201, 203]);
        let text = guard(&path, &open(true), false).unwrap_err().to_string();
        assert!(text.contains("likely a virtual machine or qemu-nbd"), "{text}");
        assert!(text.contains("`ro`, or set `no-lock`"), "{text}");
        let probed = holder(&path, &open(false), false).unwrap().unwrap();
        assert!(probed.is_held() && probed.to_string() == text, "{probed}");
        guard(&path, &open(false), true).unwrap();
        // Closing another descriptor of the file does not affect the locks.
        drop((open(true), reader, writer.try_clone().unwrap()));
        assert_eq!(locked(), [100, 101, 103, 201, 203]);
        drop(writer);
        // A program started by another test may briefly hold a copy of the descriptor.
        let end = Instant::now() + Duration::from_secs(60);
        while !locked().is_empty() {
            assert!(Instant::now() < end, "still locked: {:?}", locked());
            thread::sleep(Duration::from_millis(1));
        }
        let other = held(open(false), &[200]);
        let text = guard(&path, &open(false), true).unwrap_err().to_string();
        assert!(text.contains("set `no-lock` if the program does not change the file"), "{text}");
        drop(other);
    }

    #[test]
    fn a_loop_device_over_the_file_is_found() {
        let dir = TestDir::new("image-loop");
        let (open, path) = (image(&dir), dir.0.join("image"));
        let block = dir.0.join("block");
        let back = |name: &str, text: &str| {
            let dir = block.join(name).join("loop");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("backing_file"), format!("{text}\n")).unwrap();
        };
        fs::create_dir_all(block.join("loop0")).unwrap();
        back("sda", path.to_str().unwrap());
        back("loop1", "/nonexistent/x (deleted)");
        assert_eq!(loop_device(&block, &open(true).metadata().unwrap()).unwrap(), None);
        // The same file under another name.
        fs::hard_link(&path, dir.0.join("link")).unwrap();
        back("loop7", dir.0.join("link").to_str().unwrap());
        assert_eq!(loop_device(&block, &open(true).metadata().unwrap()).unwrap().unwrap(), "loop7");
        assert!(loop_device(&dir.0.join("none"), &open(true).metadata().unwrap()).is_err());
    }
}
