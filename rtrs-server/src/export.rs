//! What is exported: names and the block sources behind them.
//!
//! Owns [`Export`] and [`ExportTable`], made once at start and shared by all cores. An export is
//! known by its [`ExportIndex`] everywhere but in an OPEN message. Names match exactly; a leading
//! slash, which kernel clients write as part of a device path, is left out of the comparison.

use std::sync::Arc;

use rtrs_core::block::{BlockSource, Geometry};

/// A place in the [`ExportTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportIndex(pub u16);

impl ExportIndex {
    /// The number as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One name and what is behind it.
#[derive(Clone, Debug)]
pub struct Export {
    /// What clients open, 1 to 254 bytes.
    pub name: String,
    /// What serves it.
    pub source: Arc<dyn BlockSource>,
    /// Refuse every change, whatever the source can do.
    pub read_only: bool,
}

impl Export {
    /// Size, limits and abilities as clients see them.
    pub fn geometry(&self) -> Geometry {
        let mut geometry = self.source.geometry();
        geometry.read_only |= self.read_only;
        geometry
    }
}

/// All exports of a server, at most 65535.
#[derive(Debug, Default)]
pub struct ExportTable {
    exports: Vec<Export>,
}

impl ExportTable {
    /// A table of these exports. Exports past the 65535th are left out.
    pub fn new(mut exports: Vec<Export>) -> Arc<Self> {
        exports.truncate(usize::from(u16::MAX));
        Arc::new(Self { exports })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.exports.len()
    }

    /// True when nothing is exported.
    pub fn is_empty(&self) -> bool {
        self.exports.is_empty()
    }

    /// The export at a place.
    pub fn get(&self, index: ExportIndex) -> Option<&Export> {
        self.exports.get(index.index())
    }

    /// The export of a name.
    pub fn find(&self, name: &[u8]) -> Option<ExportIndex> {
        let bare = |name: &[u8]| -> usize { name.iter().take_while(|&&b| b == b'/').count() };
        let wanted = &name[bare(name)..];
        if wanted.is_empty() {
            return None;
        }
        let at = self.exports.iter().position(|export| {
            let have = export.name.as_bytes();
            &have[bare(have)..] == wanted
        })?;
        u16::try_from(at).ok().map(ExportIndex)
    }
}
