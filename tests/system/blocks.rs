//! Tests of the command lines in documents: all commands, options and values in the command lines
//! exist. Lines that start a daemon are also run with `--print-config`, which checks that the
//! settings fit together. The option opens nothing, so these runs work on any machine.
//!
//! The tests check fenced blocks, code spans that begin with the name of a program and an option or
//! command, and the examples of manual pages. In a block with prompts, only the lines with a prompt
//! are command lines. Some lines are checked but not run:
//!
//! - other commands, because they need a daemon or a dedicated machine
//! - lines with `--config` or `--session`, because they need the reader's file or session
//! - lines that attach several volumes, because their settings do not form one file

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};
use rtrs_tests::{COMMAND_TIME_MAX, bin, run};

use super::settings::root;

/// Program whose definition is not in a library; its options are read from `--help`.
const SIMULATOR: &str = "rtrs-sim";

/// Blocks that name a program but contain no command lines: page, text in the block, reason.
const NO_COMMANDS: &[(&str, &str, &str)] =
    &[("docs/explanation/architecture.md", "rtrs-client   frontend/", "a diagram of the parts")];

const EXAMPLES: [&str; 3] = [
    "rtrs-server/src/cmd/examples.txt",
    "rtrs-client/src/cmd/examples.txt",
    "rds/src/cmd/examples.txt",
];

/// Commands that print their settings with `--print-config`; the first has no subcommand.
const STARTS: [&[&str]; 4] =
    [&["rtrs-server"], &["rtrs-client", "attach"], &["rtrs-client", "bench"], &["rds", "node"]];

/// Returns the command line definition of a program.
fn definition(program: &str) -> Option<Command> {
    match program {
        "rtrs-server" => Some(rtrs_server::LowArgs::command()),
        "rtrs-client" => Some(rtrs_client::LowArgs::command()),
        "rds" => Some(rds::LowArgs::command()),
        _ => None,
    }
}

fn is_program(word: &str) -> bool {
    word == SIMULATOR || definition(word).is_some()
}

/// Returns the pages, by path.
pub(super) fn pages() -> BTreeMap<String, String> {
    fn add(dir: &Path, pages: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(dir).expect("a directory of documents") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                add(&path, pages);
            } else if path.extension().is_some_and(|end| end == "md") {
                let name = path.strip_prefix(root()).expect("below the root").display().to_string();
                pages.insert(name, fs::read_to_string(&path).expect("a page"));
            }
        }
    }
    let mut pages = BTreeMap::new();
    add(&root().join("docs"), &mut pages);
    for page in ["README.md", "CONTRIBUTING.md"] {
        pages.insert(page.to_owned(), fs::read_to_string(root().join(page)).expect(page));
    }
    pages
}

/// Fenced blocks and code spans of a page.
#[derive(Debug, Default)]
struct Code {
    blocks: Vec<String>,
    spans: Vec<String>,
}

fn code(text: &str) -> Code {
    let mut code = Code::default();
    let mut prose = String::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            match block.take() {
                Some(block) => code.blocks.push(block),
                None => block = Some(String::new()),
            }
        } else if let Some(block) = &mut block {
            *block += line;
            *block += "\n";
        } else {
            // A code span ends with its paragraph.
            prose += if line.is_empty() { "\0" } else { line };
            prose += " ";
        }
    }
    for paragraph in prose.split('\0') {
        code.spans.extend(paragraph.split('`').skip(1).step_by(2).map(str::to_owned));
    }
    code
}

/// Returns the command lines of a block: the whole block, or only the text after prompts.
fn script(block: &str) -> String {
    let prompts: Vec<&str> = block.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
    if prompts.is_empty() { block.to_owned() } else { prompts.join("\n") }
}

/// Splits shell text into commands, and commands into words. Shell expansions are replaced with
/// `1`.
fn split(script: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut is_target = false;
    let mut chars = script.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\\' if chars.next_if_eq(&'\n').is_some() => {}
            '\\' => word.get_or_insert_default().extend(chars.next()),
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                word.extend(chars.by_ref().take_while(|next| *next != char));
            }
            '$' if chars.next_if_eq(&'(').is_some() => {
                word.get_or_insert_default().push('1');
                chars.by_ref().find(|next| *next == ')');
            }
            '$' => {
                word.get_or_insert_default().push('1');
                while chars.next_if(|next| next.is_alphanumeric() || *next == '_').is_some() {}
            }
            '#' if word.is_none() => while chars.next_if(|next| *next != '\n').is_some() {},
            ' ' | '\n' | ';' | '&' | '|' | '(' | ')' | '<' | '>' => {
                let is_redirection = matches!(char, '<' | '>');
                let number = |word: &String| word.bytes().all(|byte| byte.is_ascii_digit());
                let done = word.take().filter(|word| !(is_redirection && number(word)));
                if let Some(word) = done
                    && !std::mem::take(&mut is_target)
                {
                    commands.last_mut().expect("a command").push(word);
                }
                if is_redirection {
                    is_target = true;
                    chars.next_if(|next| matches!(next, '&' | '>'));
                } else if char != ' ' {
                    is_target = false;
                    commands.push(Vec::new());
                }
            }
            char => word.get_or_insert_default().push(char),
        }
    }
    if let Some(word) = word.filter(|_| !is_target) {
        commands.last_mut().expect("a command").push(word);
    }
    commands
}

/// Returns the part of a command that starts with our program's name, without its directory.
fn own(command: &[String]) -> Option<Vec<String>> {
    let is_before = |word: &&String| {
        ["sudo", "exec", "do", "then"].contains(&word.as_str())
            || word.split_once('=').is_some_and(|(name, _)| !name.contains(['-', '/']))
    };
    let at = command.iter().take_while(is_before).count();
    let (first, rest) = command[at..].split_first()?;
    let name = first.rsplit('/').next()?;
    is_program(name).then(|| [vec![name.to_owned()], rest.to_vec()].concat())
}

/// Removes the brackets around optional parts and the ellipses after repeatable parts.
fn without_notation(word: &str) -> String {
    if word.contains("...") {
        return word.replace(['[', ']'], "").replace("...", "");
    }
    let word = word.strip_prefix("[").filter(|rest| rest.starts_with('-')).unwrap_or(word);
    word.strip_suffix(']').filter(|rest| !rest.contains('[')).unwrap_or(word).to_owned()
}

/// Whether a value is a placeholder: its last part has capitals and no lowercase letters.
fn is_placeholder(value: &str) -> bool {
    let value = value.rsplit([':', '=', '@']).next().unwrap_or(value);
    !value.is_empty()
        && !value.contains(|char: char| char.is_lowercase())
        && value.contains(char::is_uppercase)
}

/// Accepts every value, so that a rejected value does not mask other errors.
fn relaxed(command: Command) -> Command {
    let of_arg = |arg: clap::Arg| match arg.get_action().takes_values() {
        true => arg.value_parser(clap::value_parser!(String)),
        false => arg,
    };
    command.mut_args(of_arg).mut_subcommands(relaxed)
}

/// Checks a command line. With `is_part`, an incomplete command line is accepted.
fn check(words: &[String], is_part: bool) -> Result<(), String> {
    let words: Vec<String> = words.iter().map(|word| without_notation(word)).collect();
    let Some(definition) = definition(&words[0]) else {
        let help = run(bin(&words[0]), &["--help"], COMMAND_TIME_MAX).ok().stdout;
        let known: Vec<&str> = help.split([' ', ',', '=', '\n', '[']).collect();
        let unknown =
            words[1..].iter().find(|w| w.starts_with('-') && !known.contains(&w.as_str()));
        return unknown.map_or(Ok(()), |word| Err(format!("{word} is not in --help")));
    };
    let mut args: Vec<OsString> = words.iter().map(OsString::from).collect();
    if words[0] == "rtrs-server" {
        args = rtrs_server::LowArgs::arguments(args);
    }
    for definition in [relaxed(definition.clone()), definition] {
        let Err(error) = definition.try_get_matches_from(&args) else { continue };
        let value = match error.get(ContextKind::InvalidValue) {
            Some(ContextValue::String(value)) => value.as_str(),
            _ => "",
        };
        let is_good = match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
            ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => is_part,
            ErrorKind::ValueValidation | ErrorKind::InvalidValue => {
                is_placeholder(value) || is_part && value.is_empty()
            }
            _ => false,
        };
        if !is_good {
            return Err(error.to_string());
        }
    }
    Ok(())
}

/// Whether a command line is run with `--print-config`.
fn is_run(words: &[String]) -> bool {
    let has = |text: &str| words.iter().any(|word| word.contains(text));
    let starts = STARTS.iter().any(|start| {
        let is_same = words.len() >= start.len() && words.iter().zip(*start).all(|(a, b)| a == b);
        // `rtrs-server` and `rds node` start a daemon only without a subcommand: the next word, if
        // any, is an option.
        let has_own_word = start[0] == "rtrs-client";
        is_same && (has_own_word || words.get(start.len()).is_none_or(|word| word.starts_with('-')))
    });
    let has_several =
        words.get(1..4).is_some_and(|of| of[0] == "attach" && !of[2].starts_with('-'));
    starts && !has_several && !has("--config") && !has("--session") && !has("...")
}

#[test]
fn command_lines_of_documents_are_valid() {
    let mut wrong = Vec::new();
    let mut checked = 0;
    let mut excused = 0;
    for (page, text) in pages() {
        let Code { blocks, spans } = code(&text);
        let lists = |block: &&String| {
            let excuse =
                NO_COMMANDS.iter().find(|(of, text, _)| *of == page && block.contains(text));
            excused += usize::from(excuse.is_some_and(|(_, _, why)| !why.is_empty()));
            excuse.is_none()
        };
        let blocks = blocks.iter().filter(lists).map(|block| (script(block), false));
        let is_line =
            |span: &&String| span.split_once(' ').is_some_and(|(name, _)| is_program(name));
        let blocks: Vec<(String, bool)> = blocks.collect();
        let spans = spans.iter().filter(is_line).map(|span| (span.clone(), true));
        for (script, is_part) in blocks.into_iter().chain(spans) {
            for words in split(&script).iter().filter_map(|command| own(command)) {
                checked += 1;
                if let Err(why) = check(&words, is_part) {
                    wrong.push(format!("{page}: {}\n  {why}", words.join(" ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(excused, NO_COMMANDS.len(), "an entry in NO_COMMANDS is not needed");
    assert!(checked > 200, "only {checked} command lines were found");
}

#[test]
fn settings_of_command_lines_fit_together() {
    let mut lines: Vec<Vec<String>> = Vec::new();
    for text in pages().into_values() {
        for block in code(&text).blocks {
            lines.extend(split(&script(&block)).iter().filter_map(|command| own(command)));
        }
    }
    lines.retain(|words| is_run(words));
    lines.sort_unstable();
    lines.dedup();
    assert!(lines.len() > 20, "only {} command lines are run", lines.len());
    for words in lines {
        let args: Vec<&str> =
            words[1..].iter().map(String::as_str).chain(["--print-config"]).collect();
        let _ = run(bin(&words[0]), &args, COMMAND_TIME_MAX).ok();
    }
}

#[test]
fn examples_of_manual_pages_are_valid() {
    for file in EXAMPLES {
        let text = fs::read_to_string(root().join(file)).expect(file);
        for command in split(&text).iter().filter(|command| !command.is_empty()) {
            let words = own(command).unwrap_or_else(|| panic!("{file}: {command:?}"));
            check(&words, false).unwrap_or_else(|why| panic!("{file}: {}\n{why}", words.join(" ")));
        }
    }
}

#[test]
fn command_lines_are_found_and_invalid_ones_refused() {
    let text =
        "A `rtrs-client\nlist` and `list`.\n```\n$ a 'b  c' \\\n$ d\nout\n```\n```\nx\n```\n";
    let Code { blocks, spans } = code(text);
    assert_eq!(spans, ["rtrs-client list", "list"]);
    assert_eq!(blocks.len(), 2);
    assert_eq!(script(&blocks[0]), "a 'b  c' \\\nd");
    let line =
        "X=1 sudo target/debug/rds ping h >f 2>&1 & a | rds node\\\n -o \"j k\" # c\nrds <(x)";
    let own: Vec<Vec<String>> = split(line).iter().filter_map(|command| own(command)).collect();
    assert_eq!(own, [vec!["rds", "ping", "h"], vec!["rds", "node", "-o", "j k"], vec!["rds"]]);
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    for (line, is_good) in [
        ("rtrs-server export resize NAME [--size SIZE] [--force]", true),
        ("rtrs-server export add [NAME=]TARGET[,OPTION...]", true),
        ("rtrs-server --run-dir /run/r export list -o json", true),
        ("rtrs-client attach vol0 --path tcp://[::1]:1", true),
        ("rtrs-client attach vol0 --retry-for TIME --pathh tcp://h", false),
        ("rtrs-client attach vol0 --retry-for 3", false),
        ("rtrs-client lists", false),
        ("rtrs-sim --seed 7", true),
        ("rtrs-sim --seeed 7", false),
    ] {
        assert_eq!(check(&words(line), false).is_ok(), is_good, "{line}");
    }
    assert!(check(&words("rtrs-client path add"), true).is_ok());
    assert!(check(&words("rtrs-client path add"), false).is_err());
}
