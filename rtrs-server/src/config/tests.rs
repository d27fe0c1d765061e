//! The configuration file: errors with their line, layering, and the annotated defaults.

use super::*;
use crate::error::ErrorKind;

fn error(text: &str) -> String {
    let error = Settings::from_yaml(text, "s.yaml").unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
    error.to_string()
}

#[test]
fn empty_files_say_nothing() {
    for text in ["", "# only a comment\n", "---\n", "{}\n", "export:\nlisten:\n"] {
        assert_eq!(Settings::from_yaml(text, "s").unwrap(), Settings::default(), "{text:?}");
    }
}

#[test]
fn reads_every_form_of_a_list() {
    let one = Settings::from_yaml("export: v=/x\nlisten: tcp://h\n", "s").unwrap();
    assert_eq!(one.export, Some(vec!["v=/x".parse().unwrap()]));
    assert_eq!(one.listen, Some(vec!["tcp://h:1234".parse().unwrap()]));
    let map = Settings::from_yaml("export:\n  name: v\n  target: /x\n", "s").unwrap();
    assert_eq!(map.export, one.export);
    let mixed =
        Settings::from_yaml("export:\n- v=/x\n- target: mem:1M\n  ro: true\n", "s").unwrap();
    assert_eq!(mixed.export.map(|list| list.len()), Some(2));
}

#[test]
fn scalars_read_as_on_the_command_line() {
    let text = "chunk-size: 64k\ncrc: off\nalways-invalidate: false\nshards: 2\npin: on\n";
    let settings = Settings::from_yaml(text, "s").unwrap();
    assert_eq!(settings.chunk_size, Some(ByteSize::new(65536)));
    assert_eq!(settings.crc, Some(Switch::Off));
    assert_eq!(settings.always_invalidate, Some(Switch::Off));
    assert_eq!(settings.shards.map(Shards::count), Some(2));
    assert_eq!(settings.pin, Some(AutoSwitch::On));
    let number = Settings::from_yaml("chunk-size: 65536", "s").unwrap();
    assert_eq!(number.chunk_size, settings.chunk_size);
}

#[test]
fn errors_name_line_and_remedy() {
    for (text, expected) in [
        (
            "\n\nque-depth: 5\n",
            "s.yaml:3: unknown key \"que-depth\"; did you mean \"queue-depth\"?",
        ),
        ("queue_depth: 5\n", "s.yaml:1: unknown key \"queue_depth\"; did you mean"),
        (
            "log: info\nbanana: 5\n",
            "s.yaml:2: unknown key \"banana\"; the keys are export, search-path",
        ),
        (
            "export:\n- target: /x\n  dircet: on\n",
            "s.yaml:3: export[0]: unknown key \"dircet\"; did you mean \"direct\"?",
        ),
        ("export:\n- name: x\n", "missing field `target`"),
        ("export:\n- v=/x\n- /x,rw\n", "s.yaml:3: export[1]: export \"/x,rw\" has the unknown"),
        ("log: info\nqueue-depth: many\n", "s.yaml:2: queue-depth: invalid type: string \"many\""),
        (
            "queue-depth: -1\n",
            "s.yaml:1: queue-depth: invalid type: integer `-1`, expected a whole",
        ),
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
fn unreadable_files_are_named() {
    let missing = Settings::from_file(Path::new("/nonexistent/server.yaml")).unwrap_err();
    assert_eq!((missing.kind(), missing.exit_code()), (ErrorKind::ConfigFile, 1));
    assert!(
        missing.chain().to_string().starts_with(
            "cannot read the configuration file /nonexistent/server.yaml: No such file"
        )
    );
    let directory = Settings::from_file(Path::new("/")).unwrap_err();
    assert_eq!(directory.kind(), ErrorKind::ConfigFile);
    let endless = Settings::from_file(Path::new("/dev/zero")).unwrap_err();
    assert!(endless.to_string().contains("larger than 1 MiB"), "{endless}");
}

#[test]
fn a_file_that_is_no_text_is_a_wrong_file() {
    let path = std::env::temp_dir().join(format!("rtrs-latin1-{}.yaml", std::process::id()));
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let error = Settings::from_file(&path).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Config, 2));
        error.chain().to_string()
    };
    let text = read(b"crc: off\nname: caf\xe9\n");
    assert!(text.ends_with(".yaml:2: byte 0xe9 is not UTF-8; save the file as UTF-8"), "{text}");
    // A character that the bound would cut is no other fault.
    let text = read(&"\u{e9}".repeat(600_000).into_bytes());
    assert!(text.contains("larger than 1 MiB"), "{text}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn flags_lie_over_the_file_and_the_file_over_defaults() {
    let flags = Settings { queue_depth: Some(8), ..Settings::default() };
    let file = Settings { queue_depth: Some(9), crc: Some(Switch::Off), ..Settings::default() };
    let settings = flags.over(file).over(Settings::defaults());
    assert_eq!(settings.queue_depth, Some(8));
    assert_eq!(settings.crc, Some(Switch::Off));
    assert_eq!(settings.poll_us, Settings::defaults().poll_us);
    // Every field is carried by `over`: the defaults survive below nothing.
    assert_eq!(Settings::default().over(Settings::defaults()), Settings::defaults());
    assert_eq!(Settings::defaults().over(Settings::default()), Settings::defaults());
}

#[test]
fn the_annotated_file_holds_the_defaults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/server.yaml");
    assert_eq!(Settings::from_file(&path).unwrap(), Settings::defaults());
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let defaults = serde_yaml::to_value(Settings::defaults()).unwrap();
    for key in defaults.as_mapping().unwrap().keys() {
        let key = key.as_str().unwrap();
        let at = lines.iter().position(|line| line.starts_with(&format!("{key}:")));
        let at = at.unwrap_or_else(|| panic!("configs/server.yaml lacks {key}"));
        assert!(at > 0 && lines[at - 1].starts_with('#'), "{key} has no comment above it");
    }
}
