//! Structures and constants from the header.

use std::ffi::c_char;

use rtrs::{Event, Extent, Geometry, OpStats, Stats};

/// Flags in `struct rtrs_geometry`.
mod capability {
    pub(super) const READ_ONLY: u32 = 1;
    pub(super) const WRITE_CACHE: u32 = 2;
    pub(super) const FUA: u32 = 4;
    pub(super) const DISCARD: u32 = 8;
    pub(super) const ZEROES: u32 = 16;
    pub(super) const EXTENTS: u32 = 32;
}

/// Flags of a request.
pub(crate) mod flag {
    pub(crate) const FUA: u32 = 1;
    pub(crate) const NO_UNMAP: u32 = 2;
    pub(crate) const COPY: u32 = 4;
}

/// Completion flag: the failed request certainly had no effect.
pub(crate) const NO_EFFECT: u32 = 1;

/// A structure without padding that a call writes to the program's memory, up to the size passed by
/// the program.
pub(crate) trait Growing: Copy {
    /// Size of the structure's first version in bytes.
    const BYTES_MIN: usize;
}

impl Growing for CGeometry {
    const BYTES_MIN: usize = 32;
}
impl Growing for CEvent {
    const BYTES_MIN: usize = 256;
}
impl Growing for CStats {
    const BYTES_MIN: usize = 176;
}

/// `struct rtrs_geometry`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CGeometry {
    size: u64,
    logical_block: u32,
    physical_block: u32,
    io_max: u32,
    discard_max: u32,
    zeroes_max: u32,
    flags: u32,
}

impl From<&Geometry> for CGeometry {
    fn from(geometry: &Geometry) -> Self {
        let flags = [
            (geometry.read_only, capability::READ_ONLY),
            (geometry.write_cache, capability::WRITE_CACHE),
            (geometry.fua, capability::FUA),
            (geometry.discard, capability::DISCARD),
            (geometry.write_zeroes, capability::ZEROES),
            (geometry.extents, capability::EXTENTS),
        ];
        Self {
            size: geometry.size,
            logical_block: geometry.logical_block,
            physical_block: geometry.physical_block,
            io_max: geometry.io_max,
            discard_max: geometry.discard_max,
            zeroes_max: geometry.zeroes_max,
            flags: flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum(),
        }
    }
}

/// `struct rtrs_op_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct COpStats {
    count: u64,
    bytes: u64,
    errors: u64,
}

impl From<OpStats> for COpStats {
    fn from(stats: OpStats) -> Self {
        Self { count: stats.count, bytes: stats.bytes, errors: stats.errors }
    }
}

/// `struct rtrs_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CStats {
    read: COpStats,
    write: COpStats,
    flush: COpStats,
    discard: COpStats,
    write_zeroes: COpStats,
    extents: COpStats,
    inflight: u64,
    paths: u64,
    paths_connected: u64,
    failovers: u64,
    bounced: u64,
}

impl From<&Stats> for CStats {
    fn from(stats: &Stats) -> Self {
        let connected = stats.paths.iter().filter(|path| path.connected);
        Self {
            read: stats.read.into(),
            write: stats.write.into(),
            flush: stats.flush.into(),
            discard: stats.discard.into(),
            write_zeroes: stats.write_zeroes.into(),
            extents: stats.extents.into(),
            inflight: stats.inflight as u64,
            paths: stats.paths.len() as u64,
            paths_connected: connected.count() as u64,
            failovers: stats.paths.iter().map(|path| path.failovers).sum(),
            bounced: stats.paths.iter().map(|path| path.bounced).sum(),
        }
    }
}

const EVENT_TEXT: usize = 232;

/// `struct rtrs_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CEvent {
    kind: u32,
    reserved: u32,
    value: u64,
    total: u64,
    text: [c_char; EVENT_TEXT],
}

impl CEvent {
    /// Converts an event. Returns None for events that are not in the header.
    pub(crate) fn new(event: &Event) -> Option<Self> {
        let number = |count: usize| count as u64;
        let (kind, value, total, why) = match event {
            Event::Resized { bytes } => (1, *bytes, 0, ""),
            Event::ReadOnly { read_only } => (2, u64::from(*read_only), 0, ""),
            Event::Paths { connected, total } => (3, number(*connected), number(*total), ""),
            Event::Failed { why } => (4, 0, 0, why.as_str()),
            _ => return None,
        };
        let mut text = [0; EVENT_TEXT];
        // The last byte remains 0.
        let end = why.floor_char_boundary(EVENT_TEXT - 1);
        for (to, from) in text.iter_mut().zip(why[..end].bytes()) {
            *to = from.cast_signed();
        }
        Some(Self { kind, reserved: 0, value, total, text })
    }
}

/// `struct rtrs_completion`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CCompletion {
    /// An address or other value chosen by the program.
    pub(crate) user_data: usize,
    pub(crate) result: i32,
    pub(crate) flags: u32,
    pub(crate) reserved: u64,
}

/// `struct rtrs_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CExtent {
    bytes: u64,
    hole: u32,
    reserved: u32,
}

impl From<&Extent> for CExtent {
    fn from(extent: &Extent) -> Self {
        Self { bytes: extent.len, hole: extent.hole.into(), reserved: 0 }
    }
}

// Sizes according to the header, without padding.
const _: () = {
    assert!(size_of::<CGeometry>() == 32);
    assert!(size_of::<CEvent>() == 256);
    assert!(size_of::<CStats>() == 184);
    assert!(size_of::<CCompletion>() == 24);
    assert!(size_of::<CExtent>() == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_texts_are_cut_between_characters() {
        let why = "x".repeat(EVENT_TEXT - 2) + "é";
        let event = CEvent::new(&Event::Failed { why }).unwrap();
        assert_eq!((event.kind, event.text[EVENT_TEXT - 3]), (4, b'x'.cast_signed()));
        assert_eq!(event.text[EVENT_TEXT - 2..], [0, 0]);
        let event = CEvent::new(&Event::Paths { connected: 1, total: 2 }).unwrap();
        assert_eq!((event.kind, event.value, event.total), (3, 1, 2));
    }
}
