//! Aliases: words that other tools use for our commands. They are not in the help; a tip names our
//! command.

use std::ffi::OsString;
use std::io::Write as _;

use rtrs_core::settings::wants_json;

/// Words used by other tools, and our commands.
const ALIASES: &[(&str, &[&str])] = &[
    ("stop", &["drain"]),
    ("shutdown", &["drain"]),
    ("ls", &["export", "list"]),
    ("list", &["export", "list"]),
    ("show", &["status"]),
];

/// Words for attaching, which a server does not do.
const OF_CLIENT: [&str; 4] = ["mount", "attach", "map", "connect"];

/// Replaces an alias as the first argument after the program. Returns a tip for a known word that
/// is not one of our commands.
fn replace(args: &mut Vec<OsString>) -> Option<String> {
    let word = args.get(1)?.to_str()?.to_owned();
    if OF_CLIENT.contains(&word.as_str()) {
        return Some(format!(
            "{word} is not a server command; run \"rtrs-client attach\" on the host that uses the \
             export"
        ));
    }
    let (_, words) = ALIASES.iter().find(|(alias, _)| *alias == word)?;
    args.splice(1..=1, words.iter().map(OsString::from));
    Some(format!("{word} is \"{}\" here", words.join(" ")))
}

/// Returns the arguments with our command in place of an alias, and prints a tip to stderr, unless
/// the output is JSON.
pub(super) fn without_aliases(mut args: Vec<OsString>) -> Vec<OsString> {
    let tip = replace(&mut args);
    if let Some(tip) = tip.filter(|_| !wants_json(&args)) {
        // A failure to print a tip changes nothing.
        let _ = writeln!(std::io::stderr(), "rtrs-server: tip: {tip}");
    }
    args
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cmd::LowArgs;

    #[test]
    fn aliases_are_replaced() {
        let replaced = |line: &str| {
            let mut args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let tip = replace(&mut args).is_some();
            let words: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
            (words.join(" "), tip)
        };
        for (line, ours) in [
            ("s stop --name n", "s drain --name n"),
            ("s shutdown", "s drain"),
            ("s ls -o json", "s export list -o json"),
            ("s mount vol0", "s mount vol0"),
        ] {
            assert_eq!(replaced(line), (ours.to_owned(), true));
        }
        for unchanged in ["s", "s --export x", "s export list", "s drain stop"] {
            assert_eq!(replaced(unchanged), (unchanged.to_owned(), false));
        }
    }

    #[test]
    fn aliases_are_not_commands_but_stand_for_commands() {
        let program = LowArgs::command();
        let is_command = |name: &str| program.get_subcommands().any(|one| one.get_name() == name);
        for (alias, words) in ALIASES {
            assert!(!is_command(alias), "{alias} is a command");
            assert!(is_command(words[0]), "{} is not a command", words[0]);
        }
        assert!(!OF_CLIENT.into_iter().any(is_command));
    }
}
