//! Tests of copies and comparisons of files, and of ends in memory that fail or lie.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use rtrs_core::extents::Extent;
use rtrs_core::status::IoStatus;

use super::failure::Failure;
use super::progress::Progress;
use super::run::{Ends, Mode, Outcome, run};
use super::side::{Answer, End, Limits, Op, Request, Results, Side, Sizes, Wake, Which};
use super::work::{CompareTask, Compared, Copied, CopyTask, compare_until, copy_until};
use crate::error::{Error, ErrorKind};

const PIECE: u32 = 16 << 10;
const SIZES: Sizes = Sizes { requests: 4, io_max: PIECE };

/// Directory that is removed with its files.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rtrs-copy-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 + 1).collect()
}

fn task(source: &str, destination: &str) -> CopyTask {
    CopyTask {
        source: source.to_owned(),
        destination: destination.to_owned(),
        sizes: SIZES,
        destination_is_zero: false,
        flush: true,
        verify: true,
    }
}

fn copy(source: &str, destination: &str) -> Result<Copied, Error> {
    copy_until(&task(source, destination), &mut Progress::silent(), Ok)
}

fn compare(one: &str, other: &str, bytes: Option<u64>) -> Result<Compared, Error> {
    let (source, destination) = (one.to_owned(), other.to_owned());
    let task = CompareTask { source, destination, sizes: SIZES, bytes };
    compare_until(&task, &mut Progress::silent(), Ok)
}

#[test]
fn a_file_is_copied_with_its_holes_and_its_unaligned_end() {
    let dir = Dir::new();
    let data = pattern(100_001);
    let (from, to) = (dir.path("a"), dir.write("b", &[7; 300_000]));
    let file = File::create(&from).unwrap();
    file.set_len(64 << 20).unwrap();
    file.write_all_at(&data, (64 << 20) - 3000).unwrap();
    let copied = copy(&from, &to).unwrap();
    assert_eq!(copied.size, (64 << 20) - 3000 + 100_001);
    assert_eq!((copied.zeroes, copied.unchanged), (0, 0), "the file is new");
    assert!(copied.data >= 100_001 && copied.data + copied.skipped == copied.size, "{copied:?}");
    assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
    assert!(fs::metadata(&to).unwrap().blocks() * 512 < 1 << 20, "holes stay holes");
    let equal = compare(&from, &to, None).unwrap();
    assert_eq!(equal, Compared { difference: None, size: copied.size });
}

#[test]
fn an_empty_file_is_copied() {
    let dir = Dir::new();
    let (from, to) = (dir.write("a", &[]), dir.path("b"));
    assert_eq!(copy(&from, &to).unwrap().size, 0);
    assert_eq!(fs::read(&to).unwrap(), [0; 0]);
}

#[test]
fn the_lowest_difference_is_found() {
    let dir = Dir::new();
    let (data, mut other) = (pattern(300_000), pattern(300_000));
    for at in [299_999, 200_000, 77_777] {
        other[at] ^= 1;
        let (one, two) = (dir.write("a", &data), dir.write("b", &other));
        let expected = Compared { difference: Some(at as u64), size: 300_000 };
        assert_eq!(compare(&one, &two, None).unwrap(), expected);
    }
    let (one, two) = (dir.path("a"), dir.path("b"));
    assert_eq!(compare(&one, &two, Some(77_777)).unwrap().difference, None);
    // First, one file is longer; then a hole is compared with zeroes and with data.
    let two = dir.write("b", &data[..123_456]);
    assert_eq!(compare(&one, &two, None).unwrap().difference, Some(123_456));
    assert_eq!(compare(&two, &one, None).unwrap().difference, Some(123_456));
    File::create(&one).unwrap().set_len(123_456).unwrap();
    let mut zeroes = vec![0; 123_456];
    let two = dir.write("b", &zeroes);
    assert_eq!(compare(&one, &two, None).unwrap().difference, None);
    zeroes[99_999] = 1;
    let two = dir.write("b", &zeroes);
    assert_eq!(compare(&one, &two, None).unwrap().difference, Some(99_999));
    assert_eq!(compare(&two, &one, None).unwrap().difference, Some(99_999));
}

#[test]
fn ends_that_cannot_be_used_are_refused_before_anything_is_written() {
    let dir = Dir::new();
    let one = dir.write("a", b"content");
    let link = dir.path("link");
    std::os::unix::fs::symlink(&one, &link).unwrap();
    let error = copy(&one, &link).unwrap_err();
    assert!(error.kind() == ErrorKind::Usage && error.to_string().contains("same"), "{error}");
    assert_eq!(fs::read(&one).unwrap(), b"content");
    let missing = dir.path("missing");
    let error = copy(&missing, &one).unwrap_err();
    assert!(error.to_string().contains(&missing), "{error}");
    assert_eq!(fs::read(&one).unwrap(), b"content");
    for (from, to) in [("/dev/null", &*one), (&*one, "/dev/null")] {
        let error = copy(from, to).unwrap_err().to_string();
        assert!(error.contains("neither a regular file nor a block device"), "{error}");
    }
    let error = copy("-", &one).unwrap_err();
    assert!(error.to_string().contains("--verify"), "{error}");
    let error = compare(&one, "-", None).unwrap_err();
    assert!(error.to_string().contains("first"), "{error}");
    assert_eq!(fs::read(&one).unwrap(), b"content");
}

#[test]
fn a_signal_ends_a_copy() {
    let dir = Dir::new();
    let (from, to) = (dir.write("a", &pattern(1 << 20)), dir.path("b"));
    let interrupt = |wakes: mpsc::Sender<Wake>| {
        wakes.send(Wake::Signal).unwrap();
        Ok(())
    };
    let error = copy_until(&task(&from, &to), &mut Progress::silent(), interrupt).unwrap_err();
    assert!(error.to_string().contains("signal"), "{error}");
}

/// End in memory, with faults.
#[derive(Clone)]
struct Memory(Arc<Mutex<Content>>);

struct Content {
    limits: Limits,
    bytes: Vec<u8>,
    /// Whether the content is a stream: reads stop at the end of the content.
    is_stream: bool,
    extents: Result<Vec<Extent>, IoStatus>,
    /// Offset at which a bit of a write is inverted.
    corrupt: Option<usize>,
    /// Operation that fails, with the lowest offset at which it does.
    fails: Option<(Op, u64)>,
    ops: Vec<Op>,
    results: Option<Results>,
}

impl Memory {
    fn new(bytes: Vec<u8>) -> Self {
        let limits = Limits {
            size: Some(bytes.len() as u64),
            block: 512,
            io_max: PIECE,
            zeroes_max: 1 << 20,
            extents: true,
            is_zero: false,
        };
        Self(Arc::new(Mutex::new(Content {
            limits,
            extents: Ok(vec![Extent { len: bytes.len() as u64, hole: false }]),
            bytes,
            is_stream: false,
            corrupt: None,
            fails: None,
            ops: Vec::new(),
            results: None,
        })))
    }

    fn with(self, change: impl FnOnce(&mut Content)) -> Self {
        change(&mut self.0.lock());
        self
    }

    fn stream(bytes: Vec<u8>) -> Self {
        Self::new(bytes).with(|content| {
            content.is_stream = true;
            (content.limits.size, content.limits.extents) = (None, false);
        })
    }

    fn count(&self, op: Op) -> usize {
        self.0.lock().ops.iter().filter(|one| **one == op).count()
    }
}

impl Content {
    fn run(&mut self, request: &mut Request) -> Result<Answer, Failure> {
        let Request { op, offset, len, buffer, .. } = request;
        let (op, offset, mut len) = (*op, *offset, *len);
        self.ops.push(op);
        if self.fails.is_some_and(|(fails, from)| fails == op && offset + len > from) {
            return Err(IoStatus::Io.into());
        }
        if self.is_stream {
            len = len.min((self.bytes.len() as u64).saturating_sub(offset));
        }
        let range = offset as usize..(offset + len) as usize;
        let mut extents = Vec::new();
        match op {
            Op::Read if range.is_empty() => {}
            Op::Read => {
                buffer.as_mut().unwrap()[..range.len()].copy_from_slice(&self.bytes[range]);
            }
            Op::Write => {
                let data = &buffer.as_ref().unwrap()[..range.len()];
                self.bytes[range.clone()].copy_from_slice(data);
                if let Some(at) = self.corrupt.filter(|at| range.contains(at)) {
                    self.bytes[at] ^= 4;
                }
            }
            Op::Zero => self.bytes[range].fill(0),
            Op::Extents => extents = self.extents.clone().map_err(Failure::from)?,
            Op::Finish { .. } => {}
        }
        Ok(Answer { len, extents })
    }
}

struct MemorySide {
    limits: Limits,
    memory: Memory,
}

impl Side for MemorySide {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, mut request: Request) {
        let mut content = self.memory.0.lock();
        let result = content.run(&mut request);
        assert!(content.results.as_ref().unwrap().send(request, result));
    }
}

fn ends(source: &Memory, destination: &Memory) -> Ends {
    let (wakes, inbox) = mpsc::channel();
    let end = |memory: &Memory, side, name: &str| {
        let mut content = memory.0.lock();
        content.results = Some(Results { side, wakes: wakes.clone() });
        let side = MemorySide { limits: content.limits.clone(), memory: memory.clone() };
        End { side: Box::new(side), name: name.to_owned() }
    };
    let source = end(source, Which::Source, "SRC");
    Ends::new(source, end(destination, Which::Destination, "DST"), inbox, SIZES)
}

fn run_all(source: &Memory, destination: &Memory, mode: Mode) -> Result<Outcome, Error> {
    let limit = source.0.lock().limits.size.unwrap_or(u64::MAX);
    run(&mut ends(source, destination), mode, limit, &mut Progress::silent())
}

const COPY: Mode = Mode::Copy { destination_is_zero: false };

#[test]
fn holes_and_zeroes_are_not_written_where_the_destination_has_them() {
    let mut data = pattern(200 << 10);
    data[64 << 10..128 << 10].fill(0);
    let hole = |from: u64, to: u64| {
        vec![
            Extent { len: from, hole: false },
            Extent { len: to - from, hole: true },
            Extent { len: (200 << 10) - to, hole: false },
        ]
    };
    // The source reports half of the zeroes as a hole, the destination the other half.
    let source = Memory::new(data.clone()).with(|one| one.extents = Ok(hole(64 << 10, 96 << 10)));
    let mut old = vec![9; 200 << 10];
    old[96 << 10..128 << 10].fill(0);
    let destination = Memory::new(old).with(|one| one.extents = Ok(hole(96 << 10, 128 << 10)));
    let totals = run_all(&source, &destination, COPY).unwrap().totals;
    assert_eq!((totals.data, totals.zeroes, totals.skipped), (136 << 10, 32 << 10, 32 << 10));
    assert!(destination.0.lock().bytes == data);
    assert_eq!((destination.count(Op::Zero), source.count(Op::Extents)), (1, 1));

    // The promise that everything is zero makes extents and zeroes unnecessary.
    let empty = Memory::new(vec![0; 200 << 10]);
    let promised = Mode::Copy { destination_is_zero: true };
    let totals = run_all(&source, &empty, promised).unwrap().totals;
    assert_eq!((totals.data, totals.zeroes, totals.skipped), (136 << 10, 0, 64 << 10));
    assert_eq!((empty.count(Op::Zero), empty.count(Op::Extents)), (0, 0));
    assert!(empty.0.lock().bytes == data);
}

#[test]
fn an_end_that_cannot_list_extents_is_treated_as_data() {
    let source = Memory::new(pattern(100 << 10));
    let source = source.with(|one| one.extents = Err(IoStatus::Unsupported));
    let destination = Memory::new(vec![0; 100 << 10]).with(|one| one.extents = Ok(Vec::new()));
    assert_eq!(run_all(&source, &destination, COPY).unwrap().totals.data, 100 << 10);
    assert!(destination.0.lock().bytes == source.0.lock().bytes);
}

#[test]
fn errors_name_the_end_the_offset_and_the_errno() {
    for (op, of_source, text) in [
        (Op::Read, true, "cannot read from SRC at offset 49152: EIO"),
        (Op::Write, false, "cannot write to DST at offset 49152: EIO"),
        (Op::Extents, true, "cannot list the extents of SRC at offset 0: EIO"),
        (Op::Extents, false, "cannot list the extents of DST at offset 0: EIO"),
    ] {
        let (source, destination) =
            (Memory::new(pattern(100 << 10)), Memory::new(vec![0; 100 << 10]));
        let broken = if of_source { &source } else { &destination };
        broken.0.lock().fails = Some((op, 50_000));
        let error = run_all(&source, &destination, COPY).unwrap_err();
        assert!(error.to_string().starts_with(text), "{error}");
    }
    let fails = Some((Op::Finish { durable: true }, 0));
    let destination = Memory::new(vec![0; 4096]).with(|one| one.fails = fails);
    let error = ends(&Memory::new(vec![1; 4096]), &destination).finish(4096, true).unwrap_err();
    assert!(error.to_string().starts_with("cannot flush DST: EIO"), "{error}");
}

#[test]
fn verification_finds_a_changed_byte() {
    let source = Memory::new(pattern(100 << 10));
    let destination = Memory::new(vec![0; 100 << 10]).with(|one| one.corrupt = Some(70_001));
    assert_eq!(run_all(&source, &destination, COPY).unwrap().difference, None);
    let verified = run_all(&source, &destination, Mode::Verify).unwrap();
    assert_eq!(verified.difference, Some(70_001));
}

#[test]
fn a_stream_determines_the_length_of_its_copy() {
    let data = pattern(100_001);
    let destination = Memory::new(vec![9; 200 << 10]);
    let outcome = run_all(&Memory::stream(data.clone()), &destination, COPY).unwrap();
    assert_eq!((outcome.size, outcome.totals.data), (100_001, 100_001));
    assert!(destination.0.lock().bytes[..100_001] == data);
    let small = Memory::new(vec![9; 96 << 10]);
    let error = run_all(&Memory::stream(data.clone()), &small, COPY).unwrap_err();
    assert_eq!(error.to_string(), "cannot copy all of SRC: DST has 98304 bytes");

    let difference = |other: Vec<u8>| {
        let other = Memory::new(other);
        run_all(&Memory::stream(data.clone()), &other, Mode::Compare).unwrap().difference
    };
    assert_eq!(difference(data.clone()), None);
    assert_eq!(difference(data[..98_304].to_vec()), Some(98_304));
    assert_eq!(difference(data[..98_303].to_vec()), Some(98_303));
}
