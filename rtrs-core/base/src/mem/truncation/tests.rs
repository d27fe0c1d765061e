//! Tests of files that are truncated while they are mapped.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::*;
use crate::mem::Region;

const LEN: usize = 8 * PAGE;
/// Environment variable that is set in the child process of a test that may kill its process.
const CHILD: &str = "RTRS_TEST_TRUNCATION_CHILD";
/// Maximum number of mappings that a test creates in its process.
const MAPPINGS_MAX: usize = 300_000;

/// Runs a test in a child process, where this function returns None. In the parent process, it
/// returns the child's status.
fn in_child(name: &str) -> Option<ExitStatus> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let name = format!("mem::truncation::tests::{name}");
    command.args(["--exact", &name, "--nocapture"]).env(CHILD, "1");
    Some(command.status().unwrap())
}

fn memory() -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, LEN as u64).unwrap();
    file
}

#[test]
fn lost_pages_are_zeroes_and_set_the_alarm() {
    survive_truncations().unwrap();
    let file = memory();
    let alarms = [0; 2].map(|_| TruncationAlarm::new().unwrap());
    let map = |alarm: &Arc<_>| Region::watched(file.as_fd(), 0, LEN, alarm).unwrap();
    let [region, other] = [&alarms[0], &alarms[1]].map(map);
    region.fill(0, LEN, 7);
    ftruncate(&file, PAGE as u64 + 5).unwrap();
    assert!(!region.is_truncated(), "no page was used");
    assert_eq!(region.slice(PAGE - 1, 7).unwrap().to_vec(), [7, 7, 7, 7, 7, 7, 0]);
    assert!(!region.is_truncated(), "the page still exists");
    assert_eq!(region.slice(3 * PAGE - 1, 2).unwrap().to_vec(), [0; 2]);
    assert!(region.is_truncated() && alarms[0].is_set());
    let mut count = [0; 8];
    rustix::io::read(alarms[0].event(), &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1, "one fault for all pages from there on");
    region.copy_in(LEN - 3, b"abc");
    region.copy_in(2 * PAGE, b"x");
    assert_eq!(region.slice(LEN - 3, 3).unwrap().to_vec(), b"abc");
    assert_eq!(region.slice(0, 1).unwrap().to_vec(), [7]);
    assert!(!other.is_truncated());
    drop(region);
    // The entry in the table is reused.
    let region = map(&alarms[0]);
    drop(other);
    assert_eq!(region.slice(PAGE, 1).unwrap().to_vec(), [7]);
}

/// Returns the line of the process's mappings that contains this memory.
fn mapping(region: &Region, offset: usize) -> String {
    let address = region.address(offset).expose_provenance();
    let lines = fs::read_to_string("/proc/self/maps").unwrap();
    let mut lines = lines.lines().filter(|line| {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|at| usize::from_str_radix(at, 16).unwrap());
        (start..end).contains(&address)
    });
    lines.next().unwrap().to_owned()
}

/// The kernel counts a private mapping as a whole against the limit on committed memory, and may
/// refuse one that is as large as a guest. It counts shared ones by the page.
#[test]
fn zeroes_are_shared_memory_that_is_freed_with_their_region() {
    let name = "zeroes_are_shared_memory_that_is_freed_with_their_region";
    if let Some(status) = in_child(name) {
        return assert!(status.success(), "{status}");
    }
    survive_truncations().unwrap();
    let (file, alarm) = (memory(), TruncationAlarm::new().unwrap());
    let map = || Region::watched(file.as_fd(), 0, LEN, &alarm).unwrap();
    let region = map();
    ftruncate(&file, PAGE as u64).unwrap();
    region.copy_in(3 * PAGE, b"x");
    let line = mapping(&region, 3 * PAGE);
    assert!(line.contains("rw-s") && line.contains("rtrs-zeroes"), "{line}");
    assert!(!mapping(&region, 0).contains("rtrs-zeroes"));
    assert_eq!(zeroes::used_bytes(), PAGE as u64);
    drop(region);
    assert_eq!(zeroes::used_bytes(), 0);
}

#[test]
fn a_process_that_has_used_up_its_mappings_survives() {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    if limit > MAPPINGS_MAX {
        eprintln!("SKIPPED: vm.max_map_count is {limit}, too many mappings for a test");
        return;
    }
    if let Some(status) = in_child("a_process_that_has_used_up_its_mappings_survives") {
        return assert!(status.success(), "{status}");
    }
    survive_truncations().unwrap();
    let alarms = [0; 3].map(|_| TruncationAlarm::new().unwrap());
    let files = [0; 3].map(|_| memory());
    let regions = [0, 1, 2].map(|at| {
        let region = Region::watched(files[at].as_fd(), 0, LEN, &alarms[at]).unwrap();
        region.fill(0, LEN, 7);
        region
    });
    let pages = zeroes::use_up_mappings();
    for (region, file) in regions.iter().zip(&files) {
        ftruncate(file, PAGE as u64).unwrap();
        region.copy_in(5 * PAGE, b"x");
    }
    // Memory may be needed from here on.
    zeroes::unmap_all(&pages);
    assert!(pages.len() > limit / 2, "{} mappings", pages.len());
    for region in &regions {
        assert!(region.is_truncated());
        let bytes = [5 * PAGE, LEN - 1].map(|at| region.slice(at, 1).unwrap().to_vec()[0]);
        assert_eq!(bytes, [b'x', 0]);
    }
    // The reserve is restored with the next region.
    let region = Region::watched(memory().as_fd(), 0, LEN, &alarms[0]).unwrap();
    assert_eq!(zeroes::reserved(), zeroes::RESERVED);
    drop(region);
}

/// There may be no memory for a page of zeroes.
#[test]
fn zeroes_that_are_lost_themselves_are_replaced() {
    if let Some(status) = in_child("zeroes_that_are_lost_themselves_are_replaced") {
        return assert!(status.success(), "{status}");
    }
    survive_truncations().unwrap();
    let (file, alarm) = (memory(), TruncationAlarm::new().unwrap());
    let region = Region::watched(file.as_fd(), 0, LEN, &alarm).unwrap();
    ftruncate(&file, 0).unwrap();
    region.copy_in(PAGE, b"x");
    zeroes::lose();
    region.copy_in(2 * PAGE, b"y");
    region.copy_in(LEN - 1, b"z");
    let bytes = [2 * PAGE, LEN - 1].map(|at| region.slice(at, 1).unwrap().to_vec()[0]);
    assert_eq!(bytes, [b'y', b'z']);
}

#[test]
fn other_memory_has_the_default_action() {
    if let Some(status) = in_child("other_memory_has_the_default_action") {
        return assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
    survive_truncations().unwrap();
    let file = memory();
    let region = Region::shared(file.as_fd(), 0, LEN).unwrap();
    ftruncate(&file, 0).unwrap();
    region.slice(0, 1).unwrap().to_vec();
}

#[test]
fn a_signal_without_a_fault_has_the_default_action() {
    if let Some(status) = in_child("a_signal_without_a_fault_has_the_default_action") {
        return assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
    survive_truncations().unwrap();
    zeroes::raise_bus_error();
}
