//! Body of the fuzz target `server_text`: text from users, operators and files.
//!
//! The first byte selects what the rest is: a configuration file, an export or an access rule as
//! text, or a request to the control socket. The target fails on a panic, or if parsed input does
//! not parse to the same value after it is printed.

use std::fmt::Debug;

use rtrs_core::settings::print;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::control_protocol::Request;
use crate::plan::Plan;
use crate::settings::{AccessRule, ExportSpec, Settings};

/// Parses the input, and its printed form.
///
/// # Panics
/// If the two differ.
pub fn fuzz_text(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let Ok(text) = str::from_utf8(rest) else { return };
    match kind % 4 {
        0 => settings(text),
        1 => text.parse::<ExportSpec>().iter().for_each(same_as_json),
        2 => rule(text),
        _ => serde_json::from_str::<Request>(text).iter().for_each(same_as_json),
    }
}

fn settings(text: &str) {
    let Ok(set) = Settings::from_yaml(text, "fuzz") else { return };
    let printed = serde_json::to_string(&print(&set)).expect("settings are JSON");
    // JSON is valid YAML.
    let again = Settings::from_yaml(&printed, "again").expect("what was printed is read");
    assert_eq!(set, again);
    // Accesses no file and opens nothing.
    drop(Plan::new(set));
}

fn rule(text: &str) {
    let Ok(rule) = text.parse::<AccessRule>() else { return };
    let printed = rule.to_string();
    let Ok(again) = printed.parse::<AccessRule>() else { panic!("{printed:?} is not parsed") };
    assert_eq!(rule, again);
}

fn same_as_json<T: Serialize + DeserializeOwned + Debug + PartialEq>(value: &T) {
    let printed = serde_json::to_string(value).expect("it is JSON");
    let again: T = serde_json::from_str(&printed).expect("what was printed is read");
    assert_eq!(*value, again);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_replays() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/server_text");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            fuzz_text(&std::fs::read(entry.unwrap().path()).unwrap());
            seen += 1;
        }
        assert!(seen >= 8, "the corpus is missing");
    }

    #[test]
    fn parsed_settings_print_as_they_are_read() {
        for seed in [
            "\0export: [{name: a, target: 'mem:1M', access: ['db1:rw']}]\nqueue-depth: 64\n",
            "\u{1}v\\,0=/srv/a b,ro,access=kernel@fd00::/8:rw,access=ann:ro",
            "\u{2}anyone@::ffff:10.0.0.0/104:rw",
            "\u{3}{\"command\": \"export-set\", \"name\": \"v\", \"options\": [\"ro\"]}",
            "\u{3}{\"command\": \"export-add\", \"export\": \"v=mem:1M\"}",
        ] {
            fuzz_text(seed.as_bytes());
            for cut in 0..seed.len() {
                fuzz_text(&seed.as_bytes()[..cut]);
            }
        }
    }
}
