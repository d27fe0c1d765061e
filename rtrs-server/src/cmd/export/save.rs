//! The command `export save`.

use rtrs_core::settings::print;
use serde_yaml::Mapping;

use crate::cmd::server::{Server, ServerArgs};
use crate::control_protocol::{Request, SavedExports};
use crate::error::{Error, ErrorKind};
use crate::settings::ExportSpec;

pub(super) fn run(args: &ServerArgs) -> Result<(), Error> {
    let saved: SavedExports = Server::find(args)?.request(&Request::ExportSave)?;
    let exports: Vec<Mapping> = saved.exports.iter().map(without_defaults).collect();
    let yaml = serde_yaml::to_string(&exports).map_err(|error| {
        Error::with_source(ErrorKind::System, "cannot print the exports", error)
    })?;
    args.output.print(&exports, |_| yaml)
}

/// Map form of an export, without default values.
pub(super) fn without_defaults(spec: &ExportSpec) -> Mapping {
    let defaults = print(&ExportSpec::default());
    let mut map = print(spec);
    map.retain(|name, value| defaults.get(name) != Some(value));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_exports_are_read_back() {
        for text in ["vol0=mem:1M", "v=/srv/a b,ro,block-size=4096,direct=on", "null:4k"] {
            let spec: ExportSpec = text.parse().unwrap();
            let yaml = serde_yaml::to_string(&without_defaults(&spec)).unwrap();
            assert_eq!(serde_yaml::from_str::<ExportSpec>(&yaml).unwrap(), spec, "{yaml}");
            assert!(!yaml.contains("no-lock"), "{yaml}");
        }
    }
}
