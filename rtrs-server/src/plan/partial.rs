//! Partial starts: decides whether a server starts if some of its exports cannot be opened.

use crate::error::Error;
use crate::settings::{ExportSpec, OnMissing, SearchSpec, Settings};

/// The exports that were opened, and the failures of the others.
pub(crate) struct Partial<T> {
    /// Opened exports.
    pub(crate) opened: Vec<T>,
    /// Failed exports, with the reasons.
    pub(crate) failed: Vec<(ExportSpec, Error)>,
}

impl<T> Partial<T> {
    /// Opens each export in the settings.
    pub(crate) fn open(set: &Settings, open: impl FnMut(&ExportSpec) -> Result<T, Error>) -> Self {
        let specs = if set.ping_only { &[][..] } else { &set.export };
        let (mut opened, mut failed) = (Vec::new(), Vec::new());
        for (spec, result) in specs.iter().zip(specs.iter().map(open)) {
            match result {
                Ok(export) => opened.push(export),
                Err(error) => failed.push((spec.clone(), error)),
            }
        }
        Self { opened, failed }
    }

    /// Fails if any export failed.
    ///
    /// # Errors
    /// The failure, or one error that lists all failures.
    pub(crate) fn all(self) -> Result<Vec<T>, Error> {
        let texts: Vec<String> =
            self.failed.iter().map(|(_, error)| error.chain().to_string()).collect();
        let mut failures = self.failed.into_iter().map(|(_, error)| error);
        match (failures.next(), failures.next()) {
            (None, _) => Ok(self.opened),
            (Some(only), None) => Err(only),
            (Some(first), Some(_)) => Err(Error::new(first.kind(), texts.join("; "))),
        }
    }

    /// Accepts failures unless the settings forbid them.
    ///
    /// # Errors
    /// See [`Self::all`].
    pub(crate) fn enough(self, set: &Settings) -> Result<Self, Error> {
        let waits = set.on_missing != OnMissing::Refuse;
        let starts = waits && (!self.opened.is_empty() || starts_without_exports(set));
        if self.failed.is_empty() || starts {
            return Ok(self);
        }
        self.all().map(|opened| Self { opened, failed: Vec::new() })
    }
}

/// Whether a server starts even if no export can be opened.
pub(crate) fn starts_without_exports(set: &Settings) -> bool {
    set.search_path != SearchSpec::Off || set.on_missing == OnMissing::Wait
}
