//! Files that the tests export and copy: sparse files, files with a pattern in which every block
//! differs, and a real ext4 file system made from part of /usr/share. Comparing files does not load
//! them whole into memory.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use crate::proc::{Proc, run};
use crate::{COMMAND_TIME_MAX, COPY_TIME_MAX};

/// Creates a file of `size` bytes that occupies no disk space.
///
/// # Panics
/// Panics if the file cannot be created.
pub fn sparse_file(path: &Path, size: u64) {
    let file = File::create(path).expect("create a file");
    file.set_len(size).expect("set its size");
}

/// Fills `bytes` so that every 8 bytes encode their position: the offset, mixed with `seed`.
/// `offset` is the position of `bytes`, a multiple of 8.
///
/// # Panics
/// Panics if the offset is not a multiple of 8.
pub fn fill_pattern(bytes: &mut [u8], offset: u64, seed: u64) {
    assert!(offset.is_multiple_of(8), "patterns start at a multiple of 8");
    for (index, word) in bytes.chunks_mut(8).enumerate() {
        let place = offset / 8 + index as u64;
        // An odd factor keeps all values distinct; the seed makes two patterns differ everywhere.
        let value = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
        let length = word.len();
        word.copy_from_slice(&value.to_le_bytes()[..length]);
    }
}

/// Creates a file of `size` bytes filled by [`fill_pattern`].
///
/// # Panics
/// Panics if the file cannot be created.
pub fn pattern_file(path: &Path, size: u64, seed: u64) {
    let mut file = File::create(path).expect("create a file");
    let mut block = vec![0; 1 << 20];
    let mut offset = 0;
    while offset < size {
        let length = (size - offset).min(block.len() as u64) as usize;
        fill_pattern(&mut block[..length], offset, seed);
        file.write_all(&block[..length]).expect("write a pattern");
        offset += length as u64;
    }
}

/// Checks that the first `size` bytes of two files are equal; reports the first difference.
///
/// # Panics
/// Panics if the files differ, or one is too short.
pub fn equal_prefix(one: &Path, two: &Path, size: u64) {
    let mut files = [one, two].map(|path| File::open(path).expect("open to compare"));
    let mut blocks = [vec![0; 1 << 20], vec![0; 1 << 20]];
    let mut offset = 0;
    while offset < size {
        let length = (size - offset).min(1 << 20) as usize;
        for (file, block) in files.iter_mut().zip(&mut blocks) {
            file.read_exact(&mut block[..length]).expect("read to compare");
        }
        let [a, b] = &blocks;
        if a[..length] != b[..length] {
            let place = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(0) as u64;
            panic!("{} and {} differ at byte {}", one.display(), two.display(), offset + place);
        }
        offset += length as u64;
    }
}

/// Creates an ext4 image at `path` from the largest of several directories in /usr/share that hold
/// at most `mib_max` MiB. Returns the image's size in bytes.
///
/// # Panics
/// Panics if there is no such directory or mkfs fails.
pub fn ext4_image(path: &Path, mib_max: u64) -> u64 {
    let mut best: Option<(u64, String)> = None;
    for name in ["doc", "locale", "man", "icons", "vim", "perl", "mime", "zoneinfo", "fio"] {
        let dir = format!("/usr/share/{name}");
        if !Path::new(&dir).is_dir() {
            continue;
        }
        let listed = run("du", &["-sm", "--apparent-size", &dir], COMMAND_TIME_MAX).ok();
        let mib = listed.stdout.split_whitespace().next().and_then(|mib| mib.parse().ok());
        let mib: u64 = mib.expect("a size from du");
        if mib <= mib_max && best.as_ref().is_none_or(|(most, _)| mib > *most) {
            best = Some((mib, dir));
        }
    }
    let (mib, dir) = best.expect("a directory of bounded size under /usr/share");
    // Each small file needs a whole block and an inode, which the sum of the sizes does not
    // include.
    let size = (mib * 2 + 32) << 20;
    sparse_file(path, size);
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", "4096", "-i", "4096", "-d", &dir]).arg(path);
    let _ = Proc::start(command).wait(COPY_TIME_MAX).ok();
    size
}
