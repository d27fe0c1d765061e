//! System calls on files and block devices for which io_uring has no operation.
//!
//! These are the ioctls of `linux/fs.h` (sizes, discard), the file system's type, the alignment
//! that O_DIRECT requires, the lookup of a file under a directory, and the flags for opening. Each
//! call is a safe function on a descriptor that the caller holds; no state is kept between calls. A
//! discard blocks until the device is done, and a search for holes may wait for the file system, so
//! these must run on separate threads, never on a shard. Used by the server's file backend when it
//! opens a target, and by those threads.

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::syscall::check;
use crate::mem::Region;

/// `fallocate` mode: the range becomes a hole that reads as zeroes; the size does not change.
pub const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// `fallocate` mode: the range reads as zeroes and remains allocated; the size does not change.
pub const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Mode in which a target is opened, in addition to close-on-exec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenMode {
    /// Open for reading and writing; otherwise read-only.
    pub write: bool,
    /// Bypass the page cache (O_DIRECT).
    pub direct: bool,
    /// For block devices: refuse one that is mounted or otherwise claimed (O_EXCL).
    pub exclusive: bool,
}

/// Opens an existing file or device.
///
/// # Errors
/// The system's error; `InvalidInput` (EINVAL) if the file does not support O_DIRECT, `EBUSY` if
/// the device is claimed and `exclusive` is set.
pub fn open(path: &Path, mode: OpenMode) -> io::Result<File> {
    let direct = if mode.direct { libc::O_DIRECT } else { 0 };
    let exclusive = if mode.exclusive { libc::O_EXCL } else { 0 };
    File::options().read(true).write(mode.write).custom_flags(direct | exclusive).open(path)
}

/// Finds a file under a directory without opening it (openat2 with RESOLVE_BENEATH). `path` is
/// relative and must not contain symbolic links: a link that appears in the meantime is refused.
/// The result refers to the file through `/proc/self/fd`, even if the path changes.
///
/// # Errors
/// The system's error; `ELOOP` for a link, `EXDEV` for a path that leads out of the directory,
/// `ENOSYS` or `EPERM` if a sandbox forbids openat2.
pub fn find_beneath(dir: impl AsFd, path: &Path) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: open_how is plain data, for which all zeroes is valid.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = u64::from((libc::O_PATH | libc::O_CLOEXEC).cast_unsigned());
    how.resolve = libc::RESOLVE_BENEATH | libc::RESOLVE_NO_SYMLINKS;
    // SAFETY: the path is a C string, and the kernel reads no more of `how` than the size passed.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            dir.as_fd().as_raw_fd(),
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    };
    let fd = i32::try_from(fd).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Finds a directory in the same way as [`find_beneath`]; the last part of its path must not be a
/// symbolic link.
///
/// # Errors
/// The system's error.
pub fn find_directory(path: &Path) -> io::Result<File> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    File::options().read(true).custom_flags(flags).open(path)
}

fn unsigned(value: libc::c_int) -> io::Result<u32> {
    u32::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns the size of a block device in bytes (BLKGETSIZE64).
///
/// # Errors
/// The system's error; `ENOTTY` if the descriptor does not refer to a block device.
pub fn device_size(fd: impl AsFd) -> io::Result<u64> {
    let request = libc::_IOR::<libc::size_t>(0x12, 114);
    let mut size = 0u64;
    // SAFETY: BLKGETSIZE64 stores one u64, for which `size` has room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, &raw mut size) })?;
    Ok(size)
}

/// Returns true if a block device refuses writes (BLKROGET). Opening it for writing may still work.
///
/// # Errors
/// See [`device_size`].
pub fn is_read_only(fd: impl AsFd) -> io::Result<bool> {
    let mut flag: libc::c_int = 0;
    // SAFETY: BLKROGET stores one int, for which `flag` has room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::_IO(0x12, 94), &raw mut flag) })?;
    Ok(flag != 0)
}

/// Returns a block device's smallest unit of IO in bytes (BLKSSZGET).
///
/// # Errors
/// See [`device_size`].
pub fn logical_block(fd: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: BLKSSZGET stores one int, for which `bytes` has room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::BLKSSZGET, &raw mut bytes) })?;
    unsigned(bytes)
}

/// Returns the unit, in bytes, that a block device writes without reading it first (BLKPBSZGET).
///
/// # Errors
/// See [`device_size`].
pub fn physical_block(fd: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_uint = 0;
    // SAFETY: BLKPBSZGET stores one unsigned int, for which `bytes` has room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::BLKPBSZGET, &raw mut bytes) })?;
    Ok(bytes)
}

/// Discards a range of a block device (BLKDISCARD) and waits for completion.
///
/// # Errors
/// The system's error; `EOPNOTSUPP` if the device does not support discard.
pub fn discard(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    let range: [u64; 2] = [offset, len];
    // SAFETY: BLKDISCARD reads two u64 values.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::_IO(0x12, 119), range.as_ptr()) })
}

/// Runs `fallocate` and waits for completion; used to probe the capabilities of a file system.
///
/// # Errors
/// The system's error; `EOPNOTSUPP` if the file system does not support the mode.
pub fn fallocate(fd: impl AsFd, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    let range =
        |v: u64| libc::off64_t::try_from(v).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    let (offset, len) = (range(offset)?, range(len)?);
    // SAFETY: no pointers are passed.
    check(unsafe { libc::fallocate64(fd.as_fd().as_raw_fd(), mode, offset, len) })
}

/// Returns the description of a lock on one byte.
fn byte_lock(kind: libc::c_int, offset: u32) -> io::Result<libc::flock64> {
    // SAFETY: flock64 is plain data, for which all zeroes is valid.
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    let word = |number: i32| libc::c_short::try_from(number).map_err(io::Error::other);
    (lock.l_type, lock.l_whence) = (word(kind)?, word(libc::SEEK_SET)?);
    (lock.l_start, lock.l_len) = (libc::off64_t::from(offset), 1);
    Ok(lock)
}

/// Takes a shared lock on one byte for the open file description (F_OFD_SETLK), without waiting.
/// The lock is released when the last descriptor of the description is closed.
///
/// # Errors
/// The system's error; `WouldBlock` if another open file description holds an exclusive lock.
pub fn lock_byte(fd: impl AsFd, offset: u32) -> io::Result<()> {
    let lock = byte_lock(libc::F_RDLCK, offset)?;
    // SAFETY: the kernel reads `lock`.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })
}

/// Returns true if another open file description or process holds a lock on this byte
/// (F_OFD_GETLK).
///
/// # Errors
/// The system's error.
pub fn is_byte_locked(fd: impl AsFd, offset: u32) -> io::Result<bool> {
    let mut lock = byte_lock(libc::F_WRLCK, offset)?;
    // SAFETY: the kernel reads and writes `lock`.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
const HUGETLBFS: u32 = 0x9584_58f6;

/// Returns the type of a file's file system, as its magic number (`linux/magic.h`).
fn filesystem_magic(fd: impl AsFd) -> io::Result<u32> {
    // SAFETY: statfs is plain data, for which all zeroes is valid.
    let mut stat: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` has room for the result.
    check(unsafe { libc::fstatfs64(fd.as_fd().as_raw_fd(), &raw mut stat) })?;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::unnecessary_cast,
        reason = "the magic has 32 bits, in a word whose type differs by platform"
    )]
    let magic = stat.f_type as u32;
    Ok(magic)
}

/// Returns true if the file's content is held in memory: on tmpfs, ramfs or hugetlbfs.
///
/// # Errors
/// The system's error.
pub fn lives_in_memory(fd: impl AsFd) -> io::Result<bool> {
    Ok(matches!(filesystem_magic(fd)?, TMPFS | RAMFS | HUGETLBFS))
}

/// Returns true if a read can fail instead of blocking (RWF_NOWAIT). Where it cannot, as on FUSE
/// and NFS, submitting a read or write to io_uring may block. This function does not block.
pub fn tells_blocking(fd: impl AsFd) -> bool {
    let mut byte = 0u8;
    let iov = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most one byte, to `byte`.
    let read = unsafe { libc::preadv2(fd, &raw const iov, 1, 0, libc::RWF_NOWAIT) };
    read >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EOPNOTSUPP)
}

/// Returns true if the file is on hugetlbfs, where it can be opened for writing and mapped, but not
/// written: `write` fails with EINVAL.
///
/// # Errors
/// The system's error.
pub fn is_on_hugetlbfs(fd: impl AsFd) -> io::Result<bool> {
    Ok(filesystem_magic(fd)? == HUGETLBFS)
}

/// Creates an unnamed file on hugetlbfs, for tests (`memfd_create`). Reserves no pages.
///
/// # Errors
/// The system's error; `EINVAL` or `ENODEV` if there are no huge pages.
#[cfg(any(test, feature = "test-util"))]
pub fn huge_page_file() -> io::Result<File> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_HUGETLB) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Alignment, in bytes, that O_DIRECT requires for every IO; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Alignment of the buffer's address.
    pub memory: u32,
    /// Alignment of the offset and the length.
    pub offset: u32,
}

/// Returns the alignment that O_DIRECT requires on this descriptor, or None if the file cannot be
/// used that way. Calls `statx` (STATX_DIOALIGN, Linux 6.1); if that gives no result, tries reads
/// of increasing size, for which the descriptor must have been opened with O_DIRECT.
///
/// # Errors
/// The system's error.
pub fn direct_align(fd: impl AsFd) -> io::Result<Option<DirectAlign>> {
    let fd = fd.as_fd();
    // SAFETY: statx is plain data, for which all zeroes is valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, which AT_EMPTY_PATH allows; `stat` has room.
    let rc = unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut stat,
        )
    };
    if rc == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0 {
        let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
        let sound = memory.is_power_of_two() && offset.is_power_of_two();
        return Ok(sound.then_some(DirectAlign { memory, offset }));
    }
    let scratch = Region::new(4096)?.whole();
    for bytes in [512, 1024, 2048, 4096] {
        // SAFETY: the scratch memory holds 4096 bytes, page-aligned.
        let got = unsafe { libc::pread64(fd.as_raw_fd(), scratch.address().cast(), bytes, 0) };
        if got >= 0 {
            #[allow(clippy::cast_possible_truncation, reason = "one of four small numbers")]
            let bytes = bytes as u32;
            return Ok(Some(DirectAlign { memory: bytes, offset: bytes }));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) {
            return Err(error);
        }
    }
    Ok(None)
}

/// Returns the generation of a file's inode (FS_IOC_GETVERSION), which changes when the inode
/// number is reused.
///
/// # Errors
/// The system's error; `ENOTTY` if the file system has no generations.
pub fn file_generation(fd: impl AsFd) -> io::Result<u32> {
    // The request number encodes a long, but the kernel stores an int and nothing beyond the long.
    let request = libc::_IOR::<libc::c_long>(u32::from(b'v'), 1);
    let mut generation = [0u32; 2];
    // SAFETY: FS_IOC_GETVERSION stores an int or a long, for which `generation` has room.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request, generation.as_mut_ptr()) })?;
    Ok(generation[0])
}

/// Returns the UUID of a file's file system (FS_IOC_GETFSUUID, Linux 6.9, or ext4's
/// EXT4_IOC_GETFSUUID, Linux 6.0).
///
/// # Errors
/// The system's error; `ENOTTY` if the file system has no UUID or does not support the request.
pub fn filesystem_uuid(fd: impl AsFd) -> io::Result<[u8; 16]> {
    let fd = fd.as_fd().as_raw_fd();
    let mut uuid = [0u8; 17];
    // SAFETY: FS_IOC_GETFSUUID stores a length byte and 16 bytes, for which `uuid` has room.
    let asked =
        check(unsafe { libc::ioctl(fd, libc::_IOR::<[u8; 17]>(0x15, 0), uuid.as_mut_ptr()) });
    let length = match asked {
        Ok(()) => u32::from(uuid[0]),
        Err(_) => {
            // Length and flags, then the UUID.
            let mut of_ext4 = [16u32, 0, 0, 0, 0, 0];
            let request = libc::_IOR::<[u32; 2]>(u32::from(b'f'), 44);
            // SAFETY: EXT4_IOC_GETFSUUID reads two u32 values and, after them, stores as many bytes
            // as the first says: 16, for which `of_ext4` has room.
            check(unsafe { libc::ioctl(fd, request, of_ext4.as_mut_ptr()) })?;
            for (to, word) in uuid[1..].chunks_exact_mut(4).zip(&of_ext4[2..]) {
                to.copy_from_slice(&word.to_ne_bytes());
            }
            of_ext4[0]
        }
    };
    let mut found = [0; 16];
    found.copy_from_slice(&uuid[1..]);
    if length != 16 || found == [0; 16] {
        return Err(io::Error::from_raw_os_error(libc::ENODATA));
    }
    Ok(found)
}

/// Result of `statx` for a file; the buffer for [`Op::Statx`](super::Op::Statx).
pub struct FileFacts(Box<libc::statx>);

impl FileFacts {
    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.0.stx_size
    }

    /// Returns true if the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of hard links to the file.
    pub fn links(&self) -> u32 {
        self.0.stx_nlink
    }

    /// Returns the address of the kernel's result, which does not change when this value is moved.
    pub(super) fn room(&mut self) -> *mut libc::statx {
        &raw mut *self.0
    }
}

impl Default for FileFacts {
    /// Creates an empty result: a length of 0 and no links.
    fn default() -> Self {
        // SAFETY: statx is plain data, for which all zeroes is valid.
        Self(Box::new(unsafe { std::mem::zeroed() }))
    }
}

impl fmt::Debug for FileFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileFacts").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Returns the position of the first byte of a file at or after `at` that is not in a hole; None if
/// only a hole follows. Moves the file's position, and may wait for the file system.
///
/// # Errors
/// The system's error; `InvalidInput` if the file system does not support holes.
pub fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    seek(file, at, libc::SEEK_DATA)
}

/// Returns the position of the first byte of a file at or after `at` that is in a hole; the end of
/// the file counts as a hole. None if `at` is beyond the end. Otherwise like [`next_data`].
///
/// # Errors
/// See [`next_data`].
pub fn next_hole(file: &File, at: u64) -> io::Result<Option<u64>> {
    seek(file, at, libc::SEEK_HOLE)
}

fn seek(file: &File, at: u64, whence: i32) -> io::Result<Option<u64>> {
    let at = i64::try_from(at).map_err(io::Error::other)?;
    // SAFETY: no pointers are passed; the caller holds the descriptor.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// Combines a major and a minor number into a `dev_t`.
pub fn device_number(major: u32, minor: u32) -> u64 {
    libc::makedev(major, minor)
}

/// Returns the major and minor number of a `dev_t`, by which /sys/dev/block names devices.
pub fn device_numbers(dev: u64) -> (u32, u32) {
    (libc::major(dev), libc::minor(dev))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(dir: &Path) -> Option<File> {
        let path = dir.join(format!("rtrs-blkdev-{}", std::process::id()));
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let _ = std::fs::remove_file(&path);
        file.ok()
    }

    #[test]
    fn a_file_is_not_a_device() {
        let file = scratch(&std::env::temp_dir()).unwrap();
        assert_eq!(device_size(&file).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert!(logical_block(&file).is_err() && physical_block(&file).is_err());
        assert!(discard(&file, 0, 4096).is_err());
        assert!(fallocate(&file, PUNCH_HOLE, u64::MAX, 1).is_err());
    }

    #[test]
    fn holes_and_data_are_found() {
        use std::os::unix::fs::FileExt;
        let file = scratch(&std::env::temp_dir()).unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        // If the file system does not support holes, everything is data.
        let data = next_data(&file, 0).unwrap().unwrap();
        assert!(data == 0 || data == 1 << 20, "{data}");
        let hole = next_hole(&file, 1 << 20).unwrap().unwrap();
        assert!((1 << 20 < hole) && hole <= 4 << 20, "{hole}");
        assert_eq!(next_data(&file, 4 << 20).unwrap(), None);
        assert_eq!(next_hole(&file, 4 << 20).unwrap(), None);
        assert!(next_data(&file, u64::MAX).is_err());
    }

    #[test]
    fn the_identity_of_a_file_does_not_change() {
        let here = File::open("/proc/self/exe").unwrap();
        assert_eq!(file_generation(&here).ok(), file_generation(&here).ok());
        assert_eq!(filesystem_uuid(&here).ok(), filesystem_uuid(&here).ok());
        // /proc has neither generations nor UUIDs.
        let none = File::open("/proc/self/stat").unwrap();
        assert!(file_generation(&none).is_err() && filesystem_uuid(&none).is_err());
    }

    #[test]
    fn memory_file_systems_are_recognized() {
        match scratch(Path::new("/dev/shm")) {
            Some(file) => assert!(lives_in_memory(&file).unwrap()),
            None => crate::skip::skip("no /dev/shm"),
        }
        match huge_page_file() {
            Ok(file) => {
                assert!(is_on_hugetlbfs(&file).unwrap() && lives_in_memory(&file).unwrap());
            }
            Err(error) => crate::skip::skip(&format!("no huge pages: {error}")),
        }
        let here = File::open("/proc/self/exe").unwrap();
        assert!(!is_on_hugetlbfs(&here).unwrap());
        assert!(direct_align(&here).is_ok(), "the program's own file can be queried");
    }

    #[test]
    fn device_numbers_are_split() {
        assert_eq!(device_numbers(0x0801), (8, 1));
        assert_eq!(device_numbers(0xfe00), (254, 0));
        assert_eq!(device_numbers(device_number(254, 300)), (254, 300));
    }
}
