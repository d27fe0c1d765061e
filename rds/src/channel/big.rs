//! Payloads too long for a unix socket: the rest is passed in a memfd.
//!
//! The limit on a send buffer is often 208 KiB, while a message can be up to 1 MiB long. The first
//! part always passes through the socket, so that long messages fill the socket like any other.

use std::fs::File;
use std::io;
use std::io::{IoSlice, IoSliceMut, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals};

/// Maximum length of a payload that passes through the socket alone.
pub(crate) const INLINE_MAX: usize = 64 << 10;
/// Length of the part of a longer payload that passes through the socket.
pub(crate) const INLINE_FIRST: usize = 32 << 10;

/// Writes a payload without its first part to a memfd.
///
/// # Errors
/// The system's error.
pub(crate) fn put_rest(payload: &[IoSlice<'_>]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("rds-message", flags)?);
    let mut skip = INLINE_FIRST;
    for part in payload {
        let (_, rest) = part.split_at(skip.min(part.len()));
        skip -= part.len() - rest.len();
        file.write_all(rest)?;
    }
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Reads the rest of a payload of `len` bytes into `to`, after its first part, as far as it fits.
///
/// # Errors
/// The system's error; `InvalidData` for anything but a memfd that cannot shrink, since other files
/// could block the reader.
pub(crate) fn take_rest(fd: OwnedFd, len: usize, to: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    let sealed = fcntl_get_seals(fd.as_fd()).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if !sealed {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a sealed memfd"));
    }
    let file = File::from(fd);
    let (mut skip, mut at) = (INLINE_FIRST, 0);
    let mut left = len.saturating_sub(INLINE_FIRST);
    for part in to {
        let begin = skip.min(part.len());
        skip -= begin;
        let part = &mut part[begin..];
        let count = part.len().min(left);
        file.read_exact_at(&mut part[..count], at)?;
        (at, left) = (at + count as u64, left - count);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_arrives_in_any_number_of_parts() {
        let payload: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let (a, b) = payload.split_at(40_000);
        for parts in [vec![IoSlice::new(&payload)], vec![IoSlice::new(a), IoSlice::new(b)]] {
            for room in [100_000, 120_000, 50_000, 10_000] {
                let fd = put_rest(&parts).unwrap();
                let mut got = vec![0; room];
                let inline = INLINE_FIRST.min(room);
                got[..inline].copy_from_slice(&payload[..inline]);
                let (first, second) = got.split_at_mut(5_000);
                let mut to = [IoSliceMut::new(first), IoSliceMut::new(second)];
                take_rest(fd, payload.len(), &mut to).unwrap();
                let len = room.min(payload.len());
                assert!(got[..len] == payload[..len], "{room}");
            }
        }
    }

    #[test]
    fn descriptors_that_could_block_are_refused() {
        let file = File::open("/proc/self/status").unwrap();
        let error = take_rest(file.into(), 100_000, &mut []).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        // The memfd must not be shorter than announced either.
        let fd = put_rest(&[IoSlice::new(&[1; 70_000])]).unwrap();
        let mut to = vec![0; 100_000];
        assert!(take_rest(fd, 100_000, &mut [IoSliceMut::new(&mut to)]).is_err());
    }
}
