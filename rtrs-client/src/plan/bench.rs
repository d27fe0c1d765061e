//! The plan of `bench`: a session, and the requests to run on it.
//!
//! Owns [`BenchPlan`].

use rtrs_core::config::ByteSize;

use super::session::SessionPlan;
use super::{in_range, unsaid, usage};
use crate::cli::Output;
use crate::config::{Access, BenchMode, BenchSettings, RunTime, Settings};
use crate::error::Error;

const BLOCK_BYTES_MAX: u64 = 32 << 20;
const SECTOR_BYTES: u64 = 512;

/// `bench`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchPlan {
    /// The session; its shards are the jobs.
    pub session: SessionPlan,
    /// What to do.
    pub mode: BenchMode,
    /// Bytes per request, a multiple of 512.
    pub block_bytes: u32,
    /// Requests in flight per job.
    pub iodepth: u16,
    /// How long to run, in milliseconds.
    pub runtime_ms: u64,
    /// Bytes of the export to use from its start, at least one request; `None` for all.
    pub size_bytes: Option<u64>,
    /// Percentage of reads in [`BenchMode::RandRw`].
    pub read_percent: u8,
    /// For people or programs.
    pub output: Output,
}

impl BenchPlan {
    /// Judges settings, laid over [`Settings::defaults`].
    pub(super) fn new(name: &str, settings: Settings, output: Output) -> Result<Self, Error> {
        let mut settings = settings.over(Settings::defaults());
        let Some(BenchSettings {
            rw: Some(mode),
            bs: Some(bs),
            iodepth: Some(iodepth),
            numjobs: Some(numjobs),
            runtime: Some(runtime),
            size,
            rwmixread: Some(rwmixread),
        }) = settings.bench.take()
        else {
            return Err(unsaid());
        };
        settings.shards = Some(numjobs);
        let block_bytes = u32::try_from(bs.bytes())
            .ok()
            .filter(|bytes| {
                let bytes = u64::from(*bytes);
                bytes > 0 && bytes <= BLOCK_BYTES_MAX && bytes.is_multiple_of(SECTOR_BYTES)
            })
            .ok_or_else(|| {
                usage(format!("bs {bs} is not usable; use a multiple of 512 up to 32M, as in 4k"))
            })?;
        if let Some(size) = size
            && size < bs
        {
            return Err(usage(format!("size {size} is less than one request of {bs}; raise it")));
        }
        let access = if mode.writes() { Access::Rw } else { Access::Ro };
        let session = SessionPlan::new(name, settings, access)?;
        if mode.writes() && session.access == Access::Ro {
            return Err(usage("rw writes and the access is ro; use --rw read or randread"));
        }
        if !(1000..=86_400_000).contains(&runtime.millis()) {
            return Err(usage(format!("runtime {runtime} is out of range; use 1s to 24h")));
        }
        Ok(Self {
            session,
            mode,
            block_bytes,
            iodepth: in_range("iodepth", u64::from(iodepth), 1..=65535)?,
            runtime_ms: runtime.millis(),
            size_bytes: size.map(ByteSize::bytes),
            read_percent: in_range("rwmixread", u64::from(rwmixread), 0..=100)?,
            output,
        })
    }

    /// The settings that make this plan again, given the same name and output.
    pub(super) fn settings(&self) -> Settings {
        let session = self.session.settings();
        let bench = BenchSettings {
            rw: Some(self.mode),
            bs: Some(ByteSize::new(u64::from(self.block_bytes))),
            iodepth: Some(u32::from(self.iodepth)),
            numjobs: session.shards,
            runtime: Some(RunTime::from_millis(self.runtime_ms)),
            size: self.size_bytes.map(ByteSize::new),
            rwmixread: Some(u32::from(self.read_percent)),
        };
        Settings { shards: None, bench: Some(bench), ..session }
    }
}
