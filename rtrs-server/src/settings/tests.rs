//! Tests of the configuration file: its forms, errors with their lines, and old names.

use std::fs;
use std::path::Path;

use rtrs_core::settings::settings_from_file;

use super::*;
use crate::error::ErrorKind;

fn from_file(path: &Path) -> Result<Settings, Error> {
    settings_from_file(path)
}

fn error(text: &str) -> String {
    let error = Settings::from_yaml(text, "s.yaml").unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
    error.to_string()
}

#[test]
fn empty_files_set_nothing() {
    for text in ["", "# only a comment\n", "---\n", "{}\n", "export:\nlisten:\n"] {
        assert_eq!(Settings::from_yaml(text, "s").unwrap(), Settings::default(), "{text:?}");
    }
}

#[test]
fn every_form_of_a_list_is_parsed() {
    let one = Settings::from_yaml("export: v=/x\nlisten: tcp://h\n", "s").unwrap();
    assert_eq!(one.export, vec!["v=/x".parse().unwrap()]);
    assert_eq!(one.listen, vec!["tcp://h:1234".parse().unwrap()]);
    let map = Settings::from_yaml("export:\n  name: v\n  target: /x\n", "s").unwrap();
    assert_eq!(map.export, one.export);
    let mixed =
        Settings::from_yaml("export:\n- v=/x\n- target: mem:1M\n  ro: true\n", "s").unwrap();
    assert_eq!(mixed.export.len(), 2);
}

#[test]
fn scalars_are_parsed_as_on_the_command_line() {
    let text = "chunk-size: 64k\ncrc: off\nalways-invalidate: false\nshards: 2\npin: on\n";
    let settings = Settings::from_yaml(text, "s").unwrap();
    assert_eq!(settings.chunk_size, ByteSize::new(65536));
    assert_eq!(settings.crc, Switch::Off);
    assert_eq!(settings.always_invalidate, AutoSwitch::Off);
    assert_eq!(settings.shards.count(), 2);
    assert_eq!(settings.pin, AutoSwitch::On);
    let number = Settings::from_yaml("chunk-size: 65536", "s").unwrap();
    assert_eq!(number.chunk_size, settings.chunk_size);
}

#[test]
fn errors_name_the_line_and_a_remedy() {
    for (text, expected) in [
        (
            "\n\nque-depth: 5\n",
            "s.yaml:3: unknown key \"que-depth\"; did you mean \"queue-depth\"?",
        ),
        ("queue_depth: 5\n", "s.yaml:1: unknown key \"queue_depth\"; did you mean"),
        (
            "log: info\nbanana: 5\n",
            "s.yaml:2: unknown key \"banana\"; the keys are export, exports-dir",
        ),
        (
            "export:\n- target: /x\n  dircet: on\n",
            "s.yaml:3: export[0]: unknown key \"dircet\"; did you mean \"direct\"?",
        ),
        ("export:\n- name: x\n", "missing field `target`"),
        ("export:\n- v=/x\n- /x,row\n", "s.yaml:3: export[1]: export \"/x,row\" has the unknown"),
        ("log: info\nqueue-depth: many\n", "s.yaml:2: queue-depth: number \"many\" is not a whole"),
        ("queue-depth: -1\n", "s.yaml:1: queue-depth: number \"-1\" is not a whole number; use 1"),
        ("queue-depth: 65536\n", "number \"65536\" is out of range; use 1 to 65535"),
        ("heartbeat: 9ms\n", "heartbeat: time \"9ms\" is out of range; use 10ms to 10m"),
        (
            "\nheartbeat: 500\n",
            "s.yaml:2: heartbeat: time \"500\" has no unit; write 500s or 500ms",
        ),
        ("heartbeat-ms: 9\n", "s.yaml:1: heartbeat-ms: time \"9ms\" is out of range; use 10ms to"),
        ("heartbeat-missed-max: 0\n", "number \"0\" is out of range; use 1 to 1000"),
        ("shutdown-grace: 601s\n", "time \"601s\" is out of range; use 0s to 10m"),
        ("poll: 11ms\n", "time \"11ms\" is out of range; use 0s to 10ms"),
        ("export: 'n=memory:1M'\n", "has an unknown scheme; write mem:SIZE for memory"),
        ("export: 'n=null:1M,delay=11m'\n", "has a bad delay: time \"11m\" is out of range"),
        ("log: inof\n", "has an unknown level \"inof\"; did you mean \"info\"?"),
        ("name: ''\n", "s.yaml:1: name: id \"\" is empty"),
        ("crc: on\nchunk-size: 12q\n", "s.yaml:2: chunk-size: size \"12q\" has the unknown unit"),
        ("listen: 127.0.0.1\n", "s.yaml:1: listen: portal \"127.0.0.1\" has no scheme"),
        ("crc: on\ncrc: off\n", "duplicate"),
        ("- a\n", "s.yaml:1: invalid type: sequence"),
        ("crc: [\n", "s.yaml:"),
        ("a: b: c\n", "s.yaml:1:"),
    ] {
        let error = error(text);
        assert!(error.contains(expected), "{error}\nlacks\n{expected}");
        assert!(!error.contains(" at line"), "{error}");
    }
}

#[test]
fn a_byte_order_mark_is_ignored() {
    let path = std::env::temp_dir().join(format!("rtrs-bom-server-{}.yaml", std::process::id()));
    fs::write(&path, "\u{feff}crc: no\n").unwrap();
    let read = from_file(&path);
    fs::remove_file(&path).unwrap();
    assert_eq!(read.unwrap(), Settings::from_yaml("crc: off\n", "s").unwrap());
}

#[test]
fn unreadable_files_are_named() {
    let missing = from_file(Path::new("/nonexistent/server.yaml")).unwrap_err();
    assert_eq!((missing.kind(), missing.exit_code()), (ErrorKind::ConfigFile, 1));
    assert!(
        missing.chain().to_string().starts_with(
            "cannot read the configuration file /nonexistent/server.yaml: No such file"
        )
    );
    let directory = from_file(Path::new("/")).unwrap_err();
    assert_eq!(directory.kind(), ErrorKind::ConfigFile);
    let endless = from_file(Path::new("/dev/zero")).unwrap_err();
    assert!(endless.to_string().contains("larger than 1 MiB"), "{endless}");
}

#[test]
fn a_binary_file_is_refused() {
    let path = std::env::temp_dir().join(format!("rtrs-latin1-{}.yaml", std::process::id()));
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = from_file(&path).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
        error.chain().to_string()
    };
    let text = read(b"crc: off\nname: caf\xe9\n");
    assert!(text.ends_with(".yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"), "{text}");
    // A character that the size limit would cut must not cause another error.
    let text = read(&"\u{e9}".repeat(600_000).into_bytes());
    assert!(text.contains("larger than 1 MiB"), "{text}");
    fs::remove_file(&path).unwrap();
}

#[test]
fn old_setting_names_keep_their_units() {
    let text = "heartbeat-ms: 250\nhandshake-timeout-ms: 3000\nshutdown-grace-ms: 0\npoll-us: 7\n";
    let old = Settings::from_yaml(text, "s").unwrap();
    let text = "heartbeat: 250ms\nhandshake-timeout: 3s\nshutdown-grace: 0\npoll: 7us\n";
    assert_eq!(old, Settings::from_yaml(text, "s").unwrap());
    assert_eq!(Settings::from_yaml("heartbeat-ms: 1s\npoll-us:\n", "s").unwrap().heartbeat, {
        Settings::from_yaml("heartbeat: 1s\n", "s").unwrap().heartbeat
    });
}
