//! Parts of the manual pages that do not come from the command line.

use rtrs_core::settings::{FileUse, FormatPage, KeyGroup, Manual, describe};

use crate::settings::{ExportSpec, Settings};

/// Commands that reach a running server through its control socket.
const CONTROL: &[&str] =
    &["status", "set", "get", "session", "top", "metrics", "drain", "export", "reload"];

const FILES: &[FileUse] = &[
    FileUse {
        path: "/etc/rtrs/server.yaml",
        what: "Configuration of rtrs-server.service.",
        format: "rtrs-server.yaml",
        commands: &["reload"],
    },
    FileUse {
        path: "/etc/rtrs/exports.d/*.yaml",
        what: "Exports, in addition to those of the configuration.",
        format: "exports.d",
        commands: &["reload", "export save"],
    },
    FileUse {
        path: "/run/rtrs-server, /run/rtrs, $XDG_RUNTIME_DIR/rtrs",
        what: "Run directory of rtrs-server.service or with --user, of root, and of other users. \
               NAME.srv is the control socket of a server.",
        format: "",
        commands: CONTROL,
    },
    FileUse {
        path: "/var/lib/rtrs, ~/.local/state/rtrs",
        what: "State directory of root and of other users: epochs of failed flushes.",
        format: "",
        commands: &[],
    },
    FileUse {
        path: "/usr/share/doc/rtrs-server",
        what: "Documents and examples.",
        format: "",
        commands: &[],
    },
];

const SERVER_YAML: &str = "\
export:
- vol0=/srv/vol0.img
- name: vol1
  target: /dev/sdb
  access: ['db1:rw', 'anyone@10.0.0.0/24:ro']
listen: [tcp://10.0.0.2:1234, rdma://10.0.0.2]
metrics: 10.0.0.2:9823
";

const EXPORTS: &str = "\
# /etc/rtrs/exports.d/vol2.yaml
- name: vol2
  target: /srv/vol2.img
- name: scratch
  target: mem:256M
  ro: true
";

pub(super) fn manual() -> Manual {
    let export = KeyGroup {
        heading: "KEYS OF AN EXPORT".to_owned(),
        opening: "- ".to_owned(),
        indent: "  ",
        keys: describe::<ExportSpec>(),
    };
    Manual {
        version: env!("CARGO_PKG_VERSION"),
        section: |_| 8,
        examples: include_str!("examples.txt"),
        files: FILES,
        formats: vec![
            FormatPage {
                name: "rtrs-server.yaml",
                about: "configuration of rtrs-server",
                description: "Configuration file for rtrs-server --config, in YAML. Each key is \
                              also a flag of the server, with the same name; flags override the \
                              file, and a repeatable flag replaces its list. A missing key has its \
                              default. An unknown key is an error, reported with its \
                              line.\n\nrtrs-server --print-config prints a complete file. Changed \
                              exports, access lists, certificates and keys apply after rtrs-server \
                              reload; the other keys after a restart.",
                keys: KeyGroup::by_section(describe::<Settings>()),
                example: SERVER_YAML,
            },
            FormatPage {
                name: "exports.d",
                about: "exports of rtrs-server, one file or several",
                description: "Every file NAME.yaml in the directory exports-dir holds one export, \
                    or a list of exports. They are added to the exports of flags and \
                    configuration; a name may appear only once. The default directory is exports.d \
                    next to the configuration file. Files with other endings are ignored.\n\n\
                    An export is a map with the keys below, of which only target is required, or \
                    a string [NAME=]TARGET[,OPTION...] as in rtrs-server --export.\n\n\
                    Changed files apply after rtrs-server reload. rtrs-server export save prints \
                    the exports of a running server as such a file.",
                keys: vec![export],
                example: EXPORTS,
            },
        ],
        see_also: &["rtrs-client(8)"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtrs_core::settings::{deserialize_list, settings_from_yaml};

    #[test]
    fn the_examples_of_files_are_valid() {
        let read = settings_from_yaml::<Settings, crate::ErrorKind>;
        assert_eq!(read(SERVER_YAML, "server.yaml").unwrap().export.len(), 2);
        let exports = deserialize_list(serde_yaml::Deserializer::from_str(EXPORTS));
        let exports: Option<Vec<ExportSpec>> = exports.unwrap();
        assert_eq!(exports.unwrap().len(), 2);
    }
}
