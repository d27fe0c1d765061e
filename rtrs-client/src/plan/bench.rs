//! Plan for `bench`: a session, and the requests to run on it.
//!
//! This module owns [`BenchPlan`].

use rtrs_core::local::RunDir;
use rtrs_core::settings::Output;

use super::session::SessionPlan;
use crate::error::{Error, usage};
use crate::settings::{Access, AttachSettings, BenchSettings, PlaceSettings, Settings};

const BLOCK_BYTES_MAX: u64 = 32 << 20;
const SECTOR_BYTES: u64 = 512;

/// Validated settings of `bench`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchPlan {
    /// Session to use; its shards are the jobs.
    pub session: SessionPlan,
    /// Measurements to make.
    pub settings: BenchSettings,
    /// Bytes per request, a multiple of 512.
    pub block_bytes: u32,
    /// Run directory, used only by `attach`.
    pub run_dir: RunDir,
    /// Output format: for people or for programs.
    pub output: Output,
}

impl BenchPlan {
    pub(crate) fn new(name: &str, settings: Settings, output: Output) -> Result<Self, Error> {
        let (set, run_dir) = (settings.bench, RunDir::new(settings.place.run_dir)?);
        let bs = set.bs;
        let block_bytes = u32::try_from(bs.bytes())
            .ok()
            .filter(|bytes| {
                let bytes = u64::from(*bytes);
                bytes > 0 && bytes <= BLOCK_BYTES_MAX && bytes.is_multiple_of(SECTOR_BYTES)
            })
            .ok_or_else(|| {
                usage(format!("bs {bs} is not usable; use a multiple of 512 up to 32M, such as 4k"))
            })?;
        if let Some(size) = set.size
            && size < bs
        {
            return Err(usage(format!("size {size} is less than one request of {bs}; raise it")));
        }
        let access = if set.rw.writes() { Access::Rw } else { Access::Ro };
        let export = settings.attach.export.filter(|export| export != name);
        let session = SessionPlan::new(name, settings.session, set.numjobs, access)?
            .with_export(export.as_deref())?;
        if set.rw.writes() && session.access == Access::Ro {
            return Err(usage("rw writes, but access is ro; use --rw read or randread"));
        }
        Ok(Self { session, settings: set, block_bytes, run_dir, output })
    }

    /// Returns the settings from which this plan can be recreated, given the same name and output.
    pub(crate) fn printed(&self) -> Settings {
        let SessionPlan { name, export_name, .. } = &self.session;
        let export = Some(export_name.clone()).filter(|export| export != name);
        Settings {
            attach: AttachSettings { export, ..AttachSettings::default() },
            session: self.session.settings.clone(),
            bench: self.settings.clone(),
            place: PlaceSettings { run_dir: Some(self.run_dir.path().to_path_buf()) },
        }
    }
}
