//! The configuration file: errors with their line, layering, and the annotated defaults.

use super::*;
use crate::error::ErrorKind;

#[test]
fn empty_files_say_nothing() {
    for text in ["", "# only a comment\n", "---\n", "{}\n", "path:\nsocket:\nbench:\n"] {
        assert_eq!(Settings::from_yaml(text, "c").unwrap(), Settings::default(), "{text:?}");
    }
}

#[test]
fn errors_name_line_and_remedy() {
    for (text, expected) in [
        ("\nsokcet: /s\n", "c.yaml:2: unknown key \"sokcet\"; did you mean \"socket\"?"),
        ("banana: 1\n", "c.yaml:1: unknown key \"banana\"; the keys are path, socket, listen"),
        ("bench:\n  io-depth: 3\n", "c.yaml:2: bench: unknown key \"io-depth\"; did you mean"),
        ("path:\n- tcp://a\n- b\n", "c.yaml:3: path[1]: portal \"b\" has no scheme"),
        ("log: info\npoll-us: x\n", "poll-us: invalid type: string \"x\", expected a whole number"),
        ("policy: best\n", "policy: unknown variant `best`, expected one of `round-robin`"),
        ("listen: localhost\n", "c.yaml:1: listen: address \"localhost\" is no numeric address"),
        ("device: /dev/sda\n", "c.yaml:1: device: device \"/dev/sda\" is no NBD device; use auto"),
        ("foreground: 3\n", "c.yaml:1: foreground: invalid type: integer `3`"),
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
fn unreadable_files_are_named() {
    let missing = Settings::from_file(Path::new("/nonexistent/client.yaml")).unwrap_err();
    assert_eq!((missing.kind(), missing.exit_code()), (ErrorKind::ConfigFile, 1));
    let text = missing.chain().to_string();
    assert!(text.contains("configuration file /nonexistent/client.yaml: No such file"), "{text}");
    let endless = Settings::from_file(Path::new("/dev/zero")).unwrap_err();
    assert!(endless.to_string().contains("larger than 1 MiB"), "{endless}");
}

/// Settings with every field said, `socket` and `access` among those that exclude each other.
fn full() -> Settings {
    let bench = BenchSettings { size: Some(ByteSize::new(1)), ..BenchSettings::defaults() };
    Settings {
        socket: Some("/s".into()),
        device_timeout_s: Some(100),
        access: Some(Access::Ro),
        session_name: Some("s".into()),
        run_dir: Some("/r".into()),
        bench: Some(bench),
        ..Settings::defaults()
    }
}

#[test]
fn flags_lie_over_the_file() {
    // Every field is carried by `over`, from above and from below.
    assert_eq!(Settings::default().over(full()), full());
    assert_eq!(full().over(Settings::default()), full());
    let flags = Settings { poll_us: Some(7), ..Settings::default() };
    assert_eq!(flags.over(full()).poll_us, Some(7));
    let bench = BenchSettings { iodepth: Some(1), ..BenchSettings::default() };
    let flags = Settings { bench: Some(bench), ..Settings::default() };
    let bench = flags.over(full()).bench.unwrap();
    assert_eq!((bench.iodepth, bench.bs), (Some(1), Some(ByteSize::new(4096))));
}

#[test]
fn flags_replace_what_they_exclude() {
    let listen = Settings { listen: "127.0.0.1".parse().ok(), ..Settings::default() };
    let settings = listen.clone().over(full());
    assert_eq!((settings.socket, settings.listen), (None, listen.listen));
    let device = Settings { device: "auto".parse().ok(), ..Settings::default() };
    let settings = device.clone().over(full());
    assert_eq!((settings.socket, settings.device), (None, device.device));
    assert_eq!(listen.over(device).device, None);
    let read_only = Settings { read_only: Some(true), ..Settings::default() };
    let settings = read_only.over(Settings { access: Some(Access::Rw), ..full() });
    assert_eq!((settings.read_only, settings.access), (Some(true), None));
}

#[test]
fn the_annotated_file_holds_the_defaults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/client.yaml");
    assert_eq!(Settings::from_file(&path).unwrap(), Settings::defaults());
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let defaults = serde_yaml::to_value(Settings::defaults()).unwrap();
    let bench = serde_yaml::to_value(BenchSettings::defaults()).unwrap();
    let top = defaults.as_mapping().unwrap().keys().map(|key| (String::new(), key));
    let below = bench.as_mapping().unwrap().keys().map(|key| ("  ".to_owned(), key));
    for (indent, key) in top.chain(below) {
        let start = format!("{indent}{}:", key.as_str().unwrap());
        let at = lines.iter().position(|line| line.starts_with(&start));
        let at = at.unwrap_or_else(|| panic!("configs/client.yaml lacks {start:?}"));
        let comment = at > 0 && lines[at - 1].trim_start().starts_with('#');
        assert!(comment, "{start:?} has no comment above it");
    }
}
