//! What the server played by hand exports besides its first device.

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ExportId;
use rtrs_core::mem::MemSlice;
use rtrs_core::wire::{IoHeader, OpenRsp, OpenRspTail, RwOp};

use super::fixture::SECRET;
use super::server::How;

/// Another export.
pub(super) struct Export {
    pub(super) name: String,
    pub(super) disk: Vec<u8>,
    /// Its id while it is open.
    pub(super) device: Option<u32>,
    /// The id that it gets when it is opened next; none: one that no device had.
    pub(super) next_id: Option<u32>,
    /// Refuses to open it.
    pub(super) open_errno: u16,
    /// Fails its IO.
    pub(super) io_errno: u16,
    /// Fails its flushes.
    pub(super) flush_errno: u16,
    /// The epoch of its cache; the server's where this is 0.
    pub(super) cache_id: u64,
    pub(super) export_id: Option<ExportId>,
    /// Times it was opened, and closed.
    pub(super) opens: u32,
    pub(super) closes: u32,
}

/// The other exports.
#[derive(Default)]
pub(super) struct More(pub(super) Vec<Export>);

impl More {
    /// Another export of so many bytes.
    pub(super) fn add(&mut self, name: &str, size: usize) {
        self.0.push(Export {
            name: name.to_owned(),
            disk: vec![0; size],
            device: None,
            next_id: None,
            open_errno: 0,
            io_errno: 0,
            flush_errno: 0,
            cache_id: 0,
            export_id: None,
            opens: 0,
            closes: 0,
        });
    }

    pub(super) fn named(&mut self, name: &str) -> &mut Export {
        self.0.iter_mut().find(|export| export.name == name).expect("an export")
    }

    /// Opens one under the next number.
    pub(super) fn open(
        &mut self,
        name: &[u8],
        numbers: &mut u32,
        (how, standing): (&How, Option<Standing>),
    ) -> Result<[u8; OpenRspTail::LONG_LEN], u16> {
        let export =
            self.0.iter_mut().find(|export| export.name.as_bytes() == name).ok_or(2_u16)?;
        export.opens += 1;
        if export.open_errno != 0 {
            return Err(export.open_errno);
        }
        let device = *export.device.get_or_insert_with(|| {
            export.next_id.take().unwrap_or_else(|| {
                *numbers += 1;
                *numbers - 1
            })
        });
        let cache_id = if export.cache_id > 0 { export.cache_id } else { how.cache_id };
        let rsp = open_rsp(device, export.disk.len(), cache_id);
        let export = export.export_id;
        Ok(OpenRspTail { export, secret: SECRET, standing }.encode(&rsp))
    }

    pub(super) fn close(&mut self, device: u32) {
        for export in self.0.iter_mut().filter(|export| export.device == Some(device)) {
            (export.device, export.closes) = (None, export.closes + 1);
        }
    }

    /// The session has ended.
    pub(super) fn close_all(&mut self) {
        self.0.iter_mut().for_each(|export| export.device = None);
    }

    pub(super) fn io(&mut self, op: RwOp, header: &IoHeader, chunk: &MemSlice) -> u16 {
        let mut exports = self.0.iter_mut();
        let Some(export) = exports.find(|export| export.device == Some(header.device_id)) else {
            return 107;
        };
        match (op, export.flush_errno, export.io_errno) {
            (RwOp::Flush, 0, 0) => 0,
            (RwOp::Flush, errno, 0) | (_, _, errno @ 1..) => errno,
            _ => run_io(&mut export.disk, op, header, chunk),
        }
    }
}

/// Does an IO; what it reads is put at the start of its chunk.
pub(super) fn run_io(disk: &mut [u8], op: RwOp, header: &IoHeader, chunk: &MemSlice) -> u16 {
    if op == RwOp::Flush {
        return 0;
    }
    let from = header.sector as usize * 512;
    let Some(place) = disk.get_mut(from..from + header.bi_size as usize) else { return 22 };
    match op {
        RwOp::Read => chunk.copy_in(0, place),
        RwOp::Write => chunk.copy_out(0, place),
        RwOp::Extents => rtrs_core::extents::all_data(chunk, header.bi_size),
        _ => place.fill(0),
    }
    0
}

/// What the server says of a device.
pub(super) fn open_rsp(device_id: u32, size: usize, cache_id: u64) -> OpenRsp {
    OpenRsp {
        device_id,
        nsectors: size as u64 / 512,
        max_write_zeroes_sectors: 1 << 20,
        max_discard_sectors: 1 << 20,
        discard_granularity: 4096,
        physical_block_size: 4096,
        logical_block_size: 512,
        max_segments: 128,
        fua: true,
        write_cache: true,
        // Without the extension what a kernel's memory held.
        cache_id: if cache_id > 0 { cache_id } else { !0 },
        ..OpenRsp::default()
    }
}
