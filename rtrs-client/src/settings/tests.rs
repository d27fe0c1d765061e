//! Tests of the configuration file: errors with their line, and old names.

use std::path::Path;

use rtrs_core::settings::settings_from_file;

use super::*;
use crate::error::ErrorKind;

fn from_file(path: &Path) -> Result<Settings, Error> {
    settings_from_file(path)
}

#[test]
fn empty_files_set_nothing() {
    for text in ["", "# only a comment\n", "---\n", "{}\n", "path:\nsocket:\nbench:\n"] {
        assert_eq!(Settings::from_yaml(text, "c").unwrap(), Settings::default(), "{text:?}");
    }
}

#[test]
fn errors_name_the_line_and_a_remedy() {
    for (text, expected) in [
        ("\nsokcet: /s\n", "c.yaml:2: unknown key \"sokcet\"; did you mean \"socket\"?"),
        (
            "banana: 1\n",
            "c.yaml:1: unknown key \"banana\"; the keys are path, tls-dir, tls-hostname",
        ),
        ("bench:\n  io-depth: 3\n", "c.yaml:2: bench: unknown key \"io-depth\"; did you mean"),
        ("path:\n- tcp://a\n- b\n", "c.yaml:3: path[1]: portal \"b\" has no scheme"),
        ("log: info\npoll: x\n", "c.yaml:2: poll: time \"x\" does not begin with a digit"),
        ("io-timeout: 30\n", "io-timeout: time \"30\" has no unit; write 30s or 30ms"),
        ("io-timeout: 0\n", "time \"0\" is out of range; use 10ms to 1h"),
        ("heartbeat: 9ms\n", "time \"9ms\" is out of range; use 10ms to 10m, or auto"),
        ("heartbeat-missed-max: 0\n", "number \"0\" is out of range; use 1 to 1000, or auto"),
        ("reconnect-max-ms: 600001\n", "reconnect-max-ms: time \"600001ms\" is out of range"),
        ("queue-depth-limit: 65536\n", "number \"65536\" is out of range; use 1 to 65535"),
        ("device-timeout: 86401s\n", "time \"86401s\" is out of range; use 1s to 24h"),
        ("log: inof\n", "has an unknown level \"inof\"; did you mean \"info\"?"),
        ("bench: {iodepth: 0}\n", "iodepth: number \"0\" is out of range; use 1 to 65535"),
        ("bench: {runtime: 500ms}\n", "runtime: time \"500ms\" is out of range; use 1s to 24h"),
        ("bench: {rwmixread: 101}\n", "number \"101\" is out of range; use 0 to 100"),
        (
            "policy: best\n",
            "policy: policy \"best\" is not valid; use round-robin, min-inflight or min",
        ),
        ("listen: localhost\n", "c.yaml:1: listen: address \"localhost\" is not a numeric address"),
        (
            "device: /dev/sda\n",
            "c.yaml:1: device: device \"/dev/sda\" is not an NBD device; use auto",
        ),
        ("foreground: 3\n", "c.yaml:1: foreground: switch \"3\" is not valid; use on or off"),
        ("socket: [\n", "c.yaml:"),
    ] {
        let error = Settings::from_yaml(text, "c.yaml").unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
        let error = error.to_string();
        assert!(error.contains(expected), "{error}\nlacks\n{expected}");
        assert!(!error.contains(" at line"), "{error}");
    }
}

#[test]
fn a_byte_order_mark_is_ignored() {
    let path = std::env::temp_dir().join(format!("rtrs-bom-client-{}.yaml", std::process::id()));
    std::fs::write(&path, "\u{feff}crc: no\n").unwrap();
    let read = from_file(&path);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read.unwrap(), Settings::from_yaml("crc: off\n", "s").unwrap());
}

#[test]
fn unreadable_files_are_named() {
    let missing = from_file(Path::new("/nonexistent/client.yaml")).unwrap_err();
    assert_eq!((missing.kind(), missing.exit_code()), (ErrorKind::ConfigFile, 1));
    let text = missing.chain().to_string();
    assert!(text.contains("configuration file /nonexistent/client.yaml: No such file"), "{text}");
    let endless = from_file(Path::new("/dev/zero")).unwrap_err();
    assert!(endless.to_string().contains("larger than 1 MiB"), "{endless}");
}

#[test]
fn old_setting_names_keep_their_units() {
    let old = "heartbeat-ms: auto\nconnect-timeout-ms: 101\nreconnect-min-ms: 102\n\
        reconnect-max-ms: 103\nio-timeout-ms: 104\npoll-us: 7\ndevice-timeout-s: 9\n\
        device-dead-timeout-s: 8\n";
    let new = "heartbeat: auto\nconnect-timeout: 101ms\nreconnect-min: 102ms\n\
        reconnect-max: 103ms\nio-timeout: 104ms\npoll: 7us\ndevice-timeout: 9s\n\
        device-dead-timeout: 8s\n";
    let (old, new) = (Settings::from_yaml(old, "o").unwrap(), Settings::from_yaml(new, "n"));
    assert_eq!(old, new.unwrap());
    assert_ne!(old, Settings::default());
}
