//! Exports of the scripted server other than its first device.

use rtrs_core::gateway::Standing;
use rtrs_core::identity::ExportId;
use rtrs_core::mem::MemSlice;
use rtrs_core::wire::{IoHeader, OpenRsp, OpenRspTail, RwOp};

use super::fixture::SECRET;
use super::server::How;

/// An additional export.
pub(super) struct Export {
    pub(super) name: String,
    pub(super) disk: Vec<u8>,
    /// Device ID while it is open.
    pub(super) device: Option<u32>,
    /// Device ID for the next open; None for one that no device has had before.
    pub(super) next_id: Option<u32>,
    /// Error for opens; 0 for none.
    pub(super) open_errno: u16,
    /// Error for IO; 0 for none.
    pub(super) io_errno: u16,
    /// Error for flushes; 0 for none.
    pub(super) flush_errno: u16,
    /// The export's cache epoch; 0 for the server's epoch.
    pub(super) cache_id: u64,
    pub(super) export_id: Option<ExportId>,
    /// Number of opens and closes.
    pub(super) opens: u32,
    pub(super) closes: u32,
}

#[derive(Default)]
pub(super) struct More(pub(super) Vec<Export>);

impl More {
    /// Adds an export of this size in bytes.
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

    /// Opens an export with the next device ID.
    pub(super) fn open(
        &mut self,
        name: &[u8],
        numbers: &mut u32,
        how: &How,
        standing: Option<Standing>,
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

    /// Closes all exports at the end of the session.
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

/// Performs an IO; a read stores its data at the start of the chunk.
pub(super) fn run_io(disk: &mut [u8], op: RwOp, header: &IoHeader, chunk: &MemSlice) -> u16 {
    if op == RwOp::Flush {
        return 0;
    }
    let from = header.sector as usize * 512;
    let Some(place) = disk.get_mut(from..from + header.bi_size as usize) else { return 22 };
    match op {
        RwOp::Read => chunk.copy_in(0, place),
        RwOp::Write => chunk.copy_out(0, place),
        RwOp::Extents => rtrs_core::extents::all_data(chunk, header.bi_size.into()),
        _ => place.fill(0),
    }
    0
}

/// Builds the server's description of a device.
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
        // Without the extension, a kernel server sends uninitialized memory here.
        cache_id: if cache_id > 0 { cache_id } else { !0 },
        ..OpenRsp::default()
    }
}
