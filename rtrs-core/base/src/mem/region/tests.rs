//! Tests of regions and their slices.

use std::os::fd::AsFd;
use std::sync::mpsc;

use super::*;
use crate::mem::IoVecs;

#[test]
fn slices_stay_within_their_region() {
    let region = Region::new(5000).unwrap();
    assert_eq!(region.len(), 8192);
    assert!(region.slice(8192, 0).is_some());
    assert!(region.slice(8192, 1).is_none());
    assert!(region.slice(usize::MAX, 2).is_none());
    let slice = region.slice(100, 10).unwrap();
    assert!(slice.slice(5, 6).is_none());
    slice.copy_in(0, b"0123456789");
    assert_eq!(slice.slice(5, 5).unwrap().to_vec(), b"56789");
    assert_eq!(slice.crc32c(0), crc32c::crc32c(b"0123456789"));
}

#[test]
fn only_a_sole_owner_gets_mutable_bytes() {
    let mut region = Region::new(4096).unwrap();
    let slice = region.slice(0, 1).unwrap();
    assert!(Arc::get_mut(&mut region).is_none());
    drop(slice);
    Arc::get_mut(&mut region).unwrap().bytes_mut()[7] = 9;
    assert_eq!(region.slice(7, 1).unwrap().to_vec(), [9]);
}

/// Owner of foreign memory, which it keeps allocated.
struct Owner {
    _bytes: Box<[u8]>,
    dropped: mpsc::Sender<()>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.dropped.send(()).unwrap();
    }
}

#[test]
fn foreign_memory_is_released_after_its_last_use() {
    let (sender, dropped) = mpsc::channel();
    let mut bytes = vec![7; 1000].into_boxed_slice();
    let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
    // SAFETY: the owner keeps the bytes, which are used only through the region.
    let region = unsafe { Region::foreign(base, 1000, Owner { _bytes: bytes, dropped: sender }) };
    assert_eq!((region.len(), region.is_empty()), (1000, false));
    assert!(region.slice(1, 1000).is_none());
    let mut vecs = IoVecs::new(1);
    vecs.push(region.slice(100, 900).unwrap());
    drop(region);
    let mut seen = [0; 900];
    assert_eq!((vecs.take_into(&mut seen), seen), (900, [7; 900]));
    assert!(dropped.try_recv().is_err(), "an operation names the memory");
    vecs.clear();
    dropped.try_recv().unwrap();
}

#[test]
fn an_alias_keeps_its_owner_as_long_as_its_slices() {
    let (sender, dropped) = mpsc::channel();
    let region = Region::new(8192).unwrap();
    let alias = |at: usize| {
        let owner = Owner { _bytes: Box::default(), dropped: sender.clone() };
        Region::alias(&region, owner).slice(at, 100).unwrap()
    };
    let (first, second) = (alias(0), alias(100));
    first.copy_in(0, b"abc");
    assert_eq!(region.slice(0, 3).unwrap().to_vec(), b"abc");
    assert_eq!(first.region().id(), region.id());
    // The slices follow each other in memory.
    let mut vecs = IoVecs::new(2);
    vecs.push(first);
    vecs.push(second);
    assert!(dropped.try_recv().is_err(), "an operation names the memory");
    vecs.clear();
    assert_eq!(dropped.try_iter().count(), 2);
    assert_eq!(Arc::strong_count(&region), 1);
}

#[test]
fn shared_memory_is_a_part_of_its_file() {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 3 * 4096).unwrap();
    let mut region = Region::shared(file.as_fd(), 4096, 8192).unwrap();
    region.copy_in(8190, b"ab");
    let mut seen = [0; 2];
    rustix::io::pread(&file, &mut seen, 3 * 4096 - 2).unwrap();
    assert_eq!(&seen, b"ab");
    rustix::io::pwrite(&file, b"c", 4096).unwrap();
    assert_eq!(region.slice(0, 1).unwrap().to_vec(), b"c");
    assert!(Region::shared(file.as_fd(), 1, 4096).is_err(), "no page begins there");
    assert!(Region::shared(file.as_fd(), 0, 0).is_err());
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Arc::get_mut(&mut region).unwrap().bytes_mut();
    }));
    assert!(panic.is_err(), "others write to it");
}
