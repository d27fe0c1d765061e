//! Aliases: names that other tools use for commands, such as `connect` and `disconnect` in nvme,
//! `map` and `unmap` in rbd and rnbd, `mount`, `umount`, `ls`, `show`, `stop` and `shutdown`. The
//! help does not list them; a tip names our command.

use std::ffi::OsString;
use std::io::Write as _;

use rtrs_core::settings::wants_json;

/// Names in other tools, and our equivalent command with its flags.
const ALIASES: &[(&str, &[&str])] = &[
    ("connect", &["attach"]),
    ("map", &["attach"]),
    ("mount", &["attach"]),
    ("disconnect", &["detach"]),
    ("unmap", &["detach"]),
    ("umount", &["detach"]),
    ("stop", &["detach"]),
    ("shutdown", &["detach"]),
    ("disconnect-all", &["detach", "--all"]),
    ("unmap-all", &["detach", "--all"]),
];

/// Names for `list` or, when followed by a volume name, for `status`.
const SHOW: [&str; 2] = ["show", "ls"];

/// Flags, common to all commands, that take a value in the next argument.
const WITH_VALUE: &[&str] = &["-o", "--output", "--run-dir"];

/// Flags common to all commands, which may precede the command.
const OF_ALL: &[&str] = &["-o", "--output", "--run-dir", "-h", "--help", "-V", "--version"];

/// Returns the first flag before the command that should follow the command.
fn misplaced(args: &[OsString]) -> Option<&str> {
    let mut at = 1;
    loop {
        let arg = args.get(at)?.to_str()?;
        if !arg.starts_with('-') {
            return None;
        }
        let name = arg.split_once('=').map_or(arg, |(name, _)| name);
        let joined = arg.starts_with("-o");
        if !OF_ALL.contains(&name) && !joined {
            return Some(name);
        }
        at += 1 + usize::from(WITH_VALUE.contains(&arg));
    }
}

/// Returns the index of the command in the arguments, the first of which is the program.
fn command_at(args: &[OsString]) -> Option<usize> {
    let mut at = 1;
    loop {
        let arg = args.get(at)?.to_str()?;
        if !arg.starts_with('-') {
            return Some(at);
        }
        at += 1 + usize::from(WITH_VALUE.contains(&arg));
    }
}

/// Returns the meaning of an alias.
fn meaning(word: &str, next: Option<&OsString>) -> Option<&'static [&'static str]> {
    if SHOW.contains(&word) {
        let has_name = next.is_some_and(|next| !next.to_string_lossy().starts_with('-'));
        return Some(if has_name { &["status"] } else { &["list"] });
    }
    ALIASES.iter().find(|(alias, _)| *alias == word).map(|(_, words)| *words)
}

/// Replaces an alias in the program's arguments. Returns the alias and its meaning, if any.
fn replace(args: &mut Vec<OsString>) -> Option<(String, String)> {
    let at = command_at(args)?;
    let word = args[at].to_str()?.to_owned();
    let words = meaning(&word, args.get(at + 1))?;
    args.splice(at..=at, words.iter().map(OsString::from));
    Some((word, words.join(" ")))
}

/// Returns the arguments with our command replacing any alias, and prints a tip to stderr unless
/// the output is JSON.
#[must_use]
pub fn without_aliases(mut args: Vec<OsString>) -> Vec<OsString> {
    if let Some(flag) = misplaced(&args).filter(|_| !wants_json(&args)) {
        // A tip that cannot be printed is skipped.
        let _ = writeln!(
            std::io::stderr(),
            "rtrs-client: tip: {flag} must follow the command, and the name of a volume needs no \
             flag: rtrs-client status NAME"
        );
    }
    let replaced = replace(&mut args);
    if let Some((alias, command)) = replaced.filter(|_| !wants_json(&args)) {
        // A tip that cannot be printed is skipped.
        let _ = writeln!(std::io::stderr(), "rtrs-client: tip: {alias} is \"{command}\" here");
    }
    args
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cmd::LowArgs;

    fn replaced(line: &str) -> String {
        let mut args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        replace(&mut args);
        args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn aliases_are_replaced() {
        assert_eq!(replaced("rtrs-client connect vol0"), "rtrs-client attach vol0");
        assert_eq!(replaced("c -o json stop vol0"), "c -o json detach vol0");
        assert_eq!(replaced("c --run-dir map disconnect-all"), "c --run-dir map detach --all");
        assert_eq!(replaced("c show"), "c list");
        assert_eq!(replaced("c show -o json"), "c list -o json");
        assert_eq!(replaced("c show vol0"), "c status vol0");
        assert_eq!(replaced("c ls"), "c list");
        assert_eq!(replaced("c ls vol0"), "c status vol0");
        assert_eq!(replaced("c mount vol0 --device auto"), "c attach vol0 --device auto");
        assert_eq!(replaced("c shutdown vol0"), "c detach vol0");
        for unchanged in ["c", "c -o", "c attach connect", "c detach stop", "c --version"] {
            assert_eq!(replaced(unchanged), unchanged);
        }
    }

    #[test]
    fn flags_before_their_command_are_found() {
        let found = |line: &str| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            misplaced(&args).map(str::to_owned)
        };
        assert_eq!(found("c --name vol0 attach").as_deref(), Some("--name"));
        assert_eq!(found("c -o json --path=x attach").as_deref(), Some("--path"));
        for right in ["c", "c -ojson list --all", "c --run-dir --name list", "c -V", "c list -x"] {
            assert_eq!(found(right), None, "{right}");
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
        assert!(!SHOW.into_iter().any(is_command));
    }
}
