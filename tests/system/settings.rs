//! Checks that docs/reference/settings.md, docs/reference/exit-codes.md and the annotated
//! configs/*.yaml agree with the declared settings and exit codes.
//!
//! To regenerate them after changing a declaration:
//! `UPDATE_DOCS=1 cargo test -p rtrs-tests --test system settings::`

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use rds::settings as rds;
use rtrs_client::settings as client;
use rtrs_core::settings::{Described, ErrorClass, ExitStatus, describe, settings_from_file};
use rtrs_server::settings as server;

const REGENERATE: &str = "UPDATE_DOCS=1 cargo test -p rtrs-tests --test system settings::";

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_path_buf()
}

/// Returns the full help text as one paragraph.
fn meaning(one: &Described) -> String {
    let setting = &one.setting;
    let stop = if setting.help.ends_with('.') { "" } else { "." };
    let more = setting.more.replace("\n\n", " ");
    format!("{}{stop} {more}", setting.help).trim_end().to_owned()
}

/// Returns a Markdown table of the settings of a section; "" stands for settings outside sections.
fn table(described: &[Described], section: &str) -> String {
    let mut rows = String::from("| setting | default | values | meaning |\n|---|---|---|---|\n");
    for one in described.iter().filter(|one| one.section == section) {
        let row = [one.default(), &one.range, &meaning(one)];
        let row = row.map(|cell| cell.replace('|', "\\|").replace('\n', " ")).join(" | ");
        writeln!(rows, "| `{}` | {row} |", one.setting.name).expect("room");
    }
    rows
}

/// Returns comment lines of at most 100 columns.
fn comment(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut line = format!("{indent}#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > 100 {
            lines += &line;
            lines += "\n";
            line = format!("{indent}#");
        }
        line += " ";
        line += word;
    }
    lines + &line + "\n"
}

/// Returns a configuration file in which every setting has its default.
fn annotated(described: &[Described]) -> String {
    let mut text = String::new();
    let mut section = "";
    for one in described {
        if one.section != section {
            section = one.section;
            writeln!(text, "\n# Settings of `{section}` only.\n{section}:").expect("room");
        } else {
            text += "\n";
        }
        let indent = if section.is_empty() { "" } else { "  " };
        let value = serde_yaml::to_string(&one.value).expect("a value").trim().to_owned();
        let (value, unset) = match &*value {
            "null" => (String::new(), true),
            list if list.starts_with("- ") => (list[2..].to_owned(), false),
            _ => (value, false),
        };
        let mut about = meaning(one);
        if !one.range.is_empty() {
            about += &format!(" Values: {}.", one.range);
        }
        if unset && !one.default().is_empty() {
            about += &format!(" Default: {}.", one.default());
        }
        text += &comment(&about, indent);
        text += format!("{indent}{}: {value}", one.setting.name).trim_end();
        text += "\n";
    }
    text
}

/// Compares the part of `file` from `begin` to `end` with `text`, or replaces it.
pub(crate) fn holds(file: &str, begin: &str, end: Option<&str>, text: &str) {
    let path = root().join(file);
    let old = fs::read_to_string(&path).expect(file);
    let from = old.find(begin).unwrap_or_else(|| panic!("{file} lacks {begin:?}")) + begin.len();
    let to = end.map_or(old.len(), |end| from + old[from..].find(end).expect(end));
    let new = format!("{}\n{text}{}", &old[..from], &old[to..]);
    if new == old {
        return;
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, new).expect(file);
        return;
    }
    let differs = new.lines().zip(old.lines()).find(|(new, old)| new != old);
    panic!("{file} differs from the declarations ({differs:?}); regenerate it with\n{REGENERATE}");
}

#[test]
fn the_setting_tables_match_the_declarations() {
    let tables = [
        ("export", table(&describe::<server::ExportSpec>(), "")),
        ("server", table(&describe::<server::Settings>(), "")),
        ("client", table(&describe::<client::Settings>(), "")),
        ("bench", table(&describe::<client::Settings>(), "bench")),
    ];
    let begin = "<!-- settings of rds, written by tests/system/settings.rs -->";
    holds("docs/RDS.md", begin, Some("<!-- end -->"), &table(&describe::<rds::Settings>(), ""));
    for (name, table) in tables {
        let begin = format!("<!-- settings of {name}, written by tests/system/settings.rs -->");
        holds("docs/reference/settings.md", &begin, Some("<!-- end -->"), &table);
    }
}

/// Returns a Markdown table of the exit codes of all programs; equal codes share a row.
fn exit_codes() -> String {
    let programs = [
        ("rtrs-server", rtrs_server::ErrorKind::EXIT_STATUSES),
        ("rtrs-client", rtrs_client::ErrorKind::EXIT_STATUSES),
        ("rds", ::rds::ErrorKind::EXIT_STATUSES),
    ];
    let mut all: Vec<(ExitStatus, Vec<String>)> = Vec::new();
    for (program, statuses) in programs {
        for status in statuses {
            let command = status.command.map(|command| format!(" {command}")).unwrap_or_default();
            let name = format!("`{program}{command}`");
            match all.iter_mut().find(|(known, _)| known == status) {
                Some((_, names)) => names.push(name),
                None => all.push((*status, vec![name])),
            }
        }
    }
    all.sort_by_key(|(status, _)| status.code);
    let mut rows = String::from("| exit code | program | meaning |\n|---|---|---|\n");
    for (status, names) in all {
        let stop = if status.more.is_empty() { "" } else { ". " };
        let meaning = format!("{}{stop}{}", status.meaning, status.more);
        writeln!(rows, "| {} | {} | {meaning} |", status.code, names.join(", ")).expect("room");
    }
    rows
}

#[test]
fn the_exit_code_table_matches_the_declarations() {
    let begin = "<!-- exit codes, written by tests/system/settings.rs -->";
    holds("docs/reference/exit-codes.md", begin, Some("<!-- end -->"), &exit_codes());
}

#[test]
fn the_annotated_files_show_the_defaults() {
    const BEGIN: &str = "# The settings below are generated by tests/system/settings.rs.";
    holds("configs/server.yaml", BEGIN, None, &annotated(&describe::<server::Settings>()));
    holds("configs/client.yaml", BEGIN, None, &annotated(&describe::<client::Settings>()));
    holds("configs/rds.yaml", BEGIN, None, &annotated(&describe::<rds::Settings>()));
    let path = |name| root().join("configs").join(name);
    let read = settings_from_file::<server::Settings, rtrs_server::ErrorKind>;
    assert_eq!(read(&path("server.yaml")).expect("good"), server::Settings::default());
    let read = settings_from_file::<rds::Settings, ::rds::ErrorKind>;
    assert_eq!(read(&path("rds.yaml")).expect("good"), rds::Settings::default());
    let read = settings_from_file::<client::Settings, rtrs_client::ErrorKind>;
    assert_eq!(read(&path("client.yaml")).expect("good"), client::Settings::default());
}
