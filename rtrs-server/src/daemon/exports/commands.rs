//! The commands that add and change exports.

use super::Exports;
use crate::audit::AuditKind;
use crate::control_protocol::{Changed, Losses};
use crate::daemon::warnings::rule_warnings;
use crate::settings::ExportSpec;

impl Exports {
    /// Adds an export.
    pub(crate) fn add(&self, spec: ExportSpec, force: bool) -> Result<Changed, String> {
        let (name, lost) = (spec.name().to_owned(), |added: &Changed| added.lost());
        self.recorded(AuditKind::ExportAdd, &name, self.add_now(spec, force), lost)
    }

    fn add_now(&self, mut spec: ExportSpec, force: bool) -> Result<Changed, String> {
        let _turn = self.begin()?;
        self.check(&mut spec)?;
        let closed = self.check_losses(&spec, force)?;
        let export = self.open(&spec)?;
        // Set before any client can open it.
        self.change_access(|access| access.set(&spec));
        let published = self.publish(&spec, &export, false);
        published.inspect_err(|_| self.change_access(|access| access.forget(spec.name())))?;
        let losses = Losses { closed, revoked: self.check_access()? };
        Ok(self.changed(&spec, Some(losses)))
    }

    /// Changes options of an export.
    pub(crate) fn set(
        &self,
        name: &str,
        options: &[String],
        force: bool,
    ) -> Result<Changed, String> {
        let why = |set: &Changed| {
            let parts = std::iter::once(options.join(" ")).chain(set.lost());
            Some(parts.collect::<Vec<_>>().join("; "))
        };
        self.recorded(AuditKind::ExportSet, name, self.set_now(name, options, force), why)
    }

    fn set_now(&self, name: &str, options: &[String], force: bool) -> Result<Changed, String> {
        let _turn = self.begin()?;
        let Some(entry) = self.entry(name) else {
            return Err(self.unknown(name));
        };
        let mut spec = entry.spec.with_options(options).map_err(|error| error.to_string())?;
        self.check(&mut spec)?;
        let closed = self.check_losses(&spec, force)?;
        let revoked = self.change(&entry, &spec)?;
        Ok(self.changed(&spec, revoked.map(|revoked| Losses { closed, revoked })))
    }

    /// Result of a command on an export, with the losses of clients if it changed.
    fn changed(&self, spec: &ExportSpec, losses: Option<Losses>) -> Changed {
        let warnings = rule_warnings(&self.set, &spec.access);
        let (export, changed) = (spec.name().to_owned(), losses.is_some());
        Changed { export, changed, warnings, losses: losses.unwrap_or_default(), saved: None }
    }
}
