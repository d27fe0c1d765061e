//! Parts of the manual pages that are not generated from the command line.

use rtrs_base::settings::{FileUse, FormatPage, KeyGroup, Manual, describe};

use crate::settings::Settings;

const FILES: &[FileUse] = &[
    FileUse {
        path: "/etc/rds/node.yaml",
        what: "Configuration of rds-node.service.",
        format: "rds.yaml",
        commands: &["node"],
    },
    FileUse {
        path: "/run/rds, $RDS_DIR",
        what: "Directory of sockets. ADDRESS.sock is the socket of a node.",
        format: "",
        commands: &["node", "ping", "info", "stress", "send", "recv"],
    },
    FileUse {
        path: "/usr/lib/rds/librds_preload.so",
        what: "Library to preload for programs that use AF_RDS.",
        format: "",
        commands: &["node"],
    },
];

const NODE_YAML: &str = "\
address: [10.0.0.1, 10.1.0.1]
socket-mode: '666'
";

pub(super) fn manual() -> Manual {
    Manual {
        version: env!("CARGO_PKG_VERSION"),
        // The tools are for all users, like rds-ping(1) and rds-info(1); the daemon is not.
        section: |command| if command.starts_with("node") { 8 } else { 1 },
        examples: include_str!("examples.txt"),
        files: FILES,
        formats: vec![FormatPage {
            name: "rds.yaml",
            about: "configuration of rds node",
            description: "Configuration file for rds node --config, in YAML. Each key is also a \
                          flag of the command, with the same name; flags override the file, and a \
                          repeatable flag replaces its list. A missing key has its default. An \
                          unknown key is an error, reported with its line.\n\nrds node \
                          --print-config prints a complete file.",
            keys: KeyGroup::by_section(describe::<Settings>()),
            example: NODE_YAML,
        }],
        see_also: &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtrs_base::settings::settings_from_yaml;

    #[test]
    fn the_example_of_a_file_is_valid() {
        let read = settings_from_yaml::<Settings, crate::ErrorKind>;
        assert_eq!(read(NODE_YAML, "node.yaml").unwrap().address.len(), 2);
    }
}
