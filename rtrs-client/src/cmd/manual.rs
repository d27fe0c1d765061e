//! Parts of the manual pages that do not follow from the command-line definitions.

use rtrs_core::settings::{FileUse, FormatPage, KeyGroup, Manual, describe};

use crate::settings::Settings;
use crate::volumes::key_groups;

/// Commands that use the sockets or logs of sessions.
const SESSIONS: &[&str] = &[
    "attach", "apply", "diff", "save", "list", "status", "stats", "top", "metrics", "exporter",
    "logs", "detach", "path", "set", "get", "policy",
];

const FILES: &[FileUse] = &[
    FileUse {
        path: "/etc/rtrs/NAME.yaml",
        what: "Settings of the session of rtrs-client@NAME.service.",
        format: "rtrs-client.yaml",
        commands: &["attach", "bench"],
    },
    FileUse {
        path: "/etc/rtrs/volumes.yaml",
        what: "Sessions of this host, which rtrs-apply.service applies at boot.",
        format: "volumes.yaml",
        commands: &["apply", "diff", "save"],
    },
    FileUse {
        path: "/run/rtrs, $XDG_RUNTIME_DIR/rtrs, /tmp/rtrs-UID",
        what: "Run directory of root, of other users, and of users without XDG_RUNTIME_DIR. \
               NAME.ctl is the control socket of a session, and NAME.log its log.",
        format: "",
        commands: SESSIONS,
    },
    FileUse {
        path: "/dev/rtrs/NAME",
        what: "Link to the block device of a volume.",
        format: "",
        commands: &["attach"],
    },
    FileUse {
        path: "/usr/share/doc/rtrs-client",
        what: "Documents and examples.",
        format: "",
        commands: &[],
    },
];

const CLIENT_YAML: &str = "\
path: [tcp://10.0.0.1@10.0.0.2, tcp://10.1.0.1@10.1.0.2]
no-path: queue
device: auto
takeover: true
";

pub(super) fn manual() -> Manual {
    Manual {
        version: env!("CARGO_PKG_VERSION"),
        // As for nbd-client and qemu-nbd: attaching a device is the work of an administrator.
        section: |_| 8,
        examples: include_str!("examples.txt"),
        files: FILES,
        formats: vec![
            FormatPage {
                name: "rtrs-client.yaml",
                about: "settings of a session of rtrs-client",
                description: "A file of rtrs-client attach --config or rtrs-client bench --config, \
                    in YAML. Each key is also a flag of these commands, with the same name; flags \
                    override the file, and a repeatable flag replaces its list. A missing key has \
                    its default. An unknown key is an error, reported with its line.\n\n\
                    rtrs-client attach --print-config prints a complete file.",
                keys: KeyGroup::by_section(describe::<Settings>()),
                example: CLIENT_YAML,
            },
            FormatPage {
                name: "volumes.yaml",
                about: "sessions and volumes of a host, for rtrs-client apply",
                description: "The file lists the sessions of a host, in YAML. Each has one or more \
                    volumes, and each volume its export and one of device, socket, listen and \
                    vhost-user. A volume has the name of its export on this host, unless the key \
                    name gives another. The first volume may have all keys of a volume; a later \
                    one has only: access, device, export, identity, insecure-open, listen, name, \
                    nbd-tls, nbd-tls-dir, queues, read-only, socket, socket-mode, socket-owner \
                    and vhost-user. The name of a session may be left out; it is that of the first \
                    volume. A missing key has its default.\n\n\
                    rtrs-client diff prints how the running sessions differ from the file, apply \
                    makes them match it, and save writes it from the running sessions.",
                keys: key_groups(),
                example: include_str!("../../../configs/volumes.yaml"),
            },
        ],
        see_also: &["rtrs-server(8)"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_a_file_is_valid() {
        assert_eq!(Settings::from_yaml(CLIENT_YAML, "vol0.yaml").unwrap().session.path.len(), 2);
    }
}
