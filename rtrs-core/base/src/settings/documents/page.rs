//! Text of manual pages.

use std::fs;
use std::io;
use std::path::Path;

use clap::{Arg, ArgAction, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use serde_yaml::Value as Yaml;

use super::manual::{FileUse, FormatPage, Manual};
use crate::settings::declare::Described;
use crate::settings::exit_status::ExitStatus;

/// Section of manual pages about files.
const FORMATS: u8 = 5;

/// Manual pages of a program.
pub(super) struct Pages<'a> {
    program: &'a Command,
    manual: &'a Manual,
    exit_statuses: &'static [ExitStatus],
    examples: Vec<Example>,
}

/// Example of a command line.
struct Example {
    /// Command, such as `export add`.
    command: String,
    caption: String,
    lines: &'static str,
}

impl<'a> Pages<'a> {
    /// Creates the pages of a built program.
    pub(super) fn new(
        program: &'a Command,
        manual: &'a Manual,
        exit_statuses: &'static [ExitStatus],
    ) -> Self {
        let blocks = manual.examples.split("\n\n").filter(|block| !block.trim().is_empty());
        let examples = blocks.map(|block| example(block.trim_matches('\n'), program)).collect();
        Self { program, manual, exit_statuses, examples }
    }

    /// Writes all pages into a directory.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        for format in &self.manual.formats {
            let text = self.format(format).render();
            fs::write(dir.join(format!("{}.{FORMATS}", format.name)), text)?;
        }
        self.write_commands(self.program, dir)
    }

    /// Writes the pages of a command and its subcommands.
    fn write_commands(&self, command: &Command, dir: &Path) -> io::Result<()> {
        let section = (self.manual.section)(words(command));
        let page = self.command(command, section)?;
        fs::write(dir.join(format!("{}.{section}", page_name(command))), page)?;
        shown(command).try_for_each(|below| self.write_commands(below, dir))
    }

    fn command(&self, command: &Command, section: u8) -> io::Result<Vec<u8>> {
        let man = Man::new(command.clone());
        let mut begin = self.title(page_name(command), section);
        let mut page = Vec::new();
        begin.control("SH", ["NAME"]);
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        begin.text([roman(format!("{} - {about}", page_name(command)))]);
        add_synopsis(&mut begin, command);
        begin.to_writer(&mut page)?;
        man.render_description_section(&mut page)?;
        if command.get_arguments().any(|arg| !arg.is_hide_set()) {
            man.render_options_section(&mut page)?;
        }
        self.end(command).to_writer(&mut page)?;
        Ok(page)
    }

    fn title(&self, name: &str, section: u8) -> Roff {
        let mut roff = Roff::new();
        let (section, source) = (section.to_string(), format!("RTRS {}", self.manual.version));
        roff.control("TH", [name, &section, "\"\"", &source, "RTRS"]);
        roff
    }

    /// Returns the sections that follow a command's options.
    fn end(&self, command: &Command) -> Roff {
        let mut roff = Roff::new();
        let words = words(command);
        if shown(command).next().is_some() {
            roff.control("SH", ["COMMANDS"]);
        }
        for below in shown(command) {
            let about = below.get_about().map(ToString::to_string).unwrap_or_default();
            item(&mut roff, [bold(self.page_of(below))], &about);
        }
        self.add_examples(&mut roff, words);
        let files = self.manual.files.iter();
        let files: Vec<&FileUse> = files.filter(|file| uses(file, words)).collect();
        add_files(&mut roff, &files);
        roff.control("SH", ["EXIT STATUS"]);
        for status in self.exit_statuses {
            if words.is_empty() || status.command.is_none_or(|command| command == words) {
                item(&mut roff, [bold(status.code.to_string())], &exit_text(status));
            }
        }
        let mut see_also = self.above(words);
        for format in self.manual.formats.iter().map(|format| format.name) {
            if files.iter().any(|file| file.format == format) {
                see_also.push(format!("{format}({FORMATS})"));
            }
        }
        if words.is_empty() {
            see_also.extend(self.manual.see_also.iter().map(ToString::to_string));
        }
        add_see_also(&mut roff, &see_also);
        roff
    }

    fn add_examples(&self, roff: &mut Roff, words: &str) {
        let own = |example: &&Example| example.command == words;
        let below = |example: &&Example| is_below(&example.command, words);
        let mut shown: Vec<&Example> = self.examples.iter().filter(own).collect();
        if shown.is_empty() {
            shown = self.examples.iter().filter(below).collect();
        }
        if !shown.is_empty() {
            roff.control("SH", ["EXAMPLES"]);
        }
        for example in shown {
            roff.control("PP", []);
            roff.text([roman(&*example.caption)]);
            verbatim(roff, example.lines);
        }
    }

    /// Returns the name of a command's page, with its section.
    fn page_of(&self, command: &Command) -> String {
        format!("{}({})", page_name(command), (self.manual.section)(words(command)))
    }

    /// Returns the pages of the commands above a command, beginning with the program's.
    fn above(&self, words: &str) -> Vec<String> {
        let mut pages = Vec::new();
        let mut command = self.program;
        for word in words.split(' ') {
            let Some(below) = command.find_subcommand(word) else { break };
            pages.push(self.page_of(command));
            command = below;
        }
        pages
    }

    fn format(&self, format: &FormatPage) -> Roff {
        let mut roff = self.title(format.name, FORMATS);
        roff.control("SH", ["NAME"]);
        roff.text([roman(format!("{} - {}", format.name, format.about))]);
        let files = self.manual.files.iter().filter(|file| file.format == format.name);
        let files: Vec<&FileUse> = files.collect();
        roff.control("SH", ["SYNOPSIS"]);
        for file in &files {
            roff.text([italic(file.path)]);
            roff.control("br", []);
        }
        for group in &format.keys {
            let keys = group.keys.iter().map(|one| format!("{}: {}", one.setting.name, value(one)));
            let keys = keys.collect::<Vec<_>>().join(&format!("\n{}", group.indent));
            verbatim(&mut roff, &format!("{}{keys}", group.opening));
        }
        roff.control("SH", ["DESCRIPTION"]);
        paragraphs(&mut roff, format.description);
        paragraphs(&mut roff, UNITS);
        for group in &format.keys {
            roff.control("SH", [&*group.heading]);
            group.keys.iter().for_each(|one| add_key(&mut roff, one));
        }
        roff.control("SH", ["EXAMPLES"]);
        verbatim(&mut roff, format.example);
        add_files(&mut roff, &files);
        let mut see_also = vec![self.page_of(self.program)];
        let commands = files.iter().flat_map(|file| file.commands).copied();
        for words in commands.filter(|words| !words.is_empty()) {
            let pages = self.above(words);
            let command = words
                .split(' ')
                .try_fold(self.program, |command, word| command.find_subcommand(word));
            see_also.extend(pages.into_iter().chain(command.map(|command| self.page_of(command))));
        }
        let others = self.manual.formats.iter().filter(|other| other.name != format.name);
        see_also.extend(others.map(|other| format!("{}({FORMATS})", other.name)));
        add_see_also(&mut roff, &see_also);
        roff
    }
}

/// Paragraph in every page about a file.
const UNITS: &str = "Times need a unit, as in 30s, 500ms or 1m. Sizes take k, M, G or T; without a \
                     suffix they are bytes.";

/// Returns the command of a command line, such as `export add`.
fn command_of(line: &str, program: &Command) -> String {
    let mut command = program;
    let mut words = Vec::new();
    for word in line.split_whitespace().skip(1) {
        let Some(below) = command.find_subcommand(word) else { break };
        command = below;
        words.push(word);
    }
    words.join(" ")
}

/// Reads an example: lines that begin with a number sign, then command lines.
fn example(block: &'static str, program: &Command) -> Example {
    let at = block.find("\nrtrs-").or_else(|| block.find("\nrds")).map_or(0, |at| at + 1);
    let (comment, lines) = block.split_at(at);
    let caption = comment.lines().map(|line| line.trim_start_matches(['#', ' ']));
    let command = command_of(lines, program);
    Example { command, caption: caption.collect::<Vec<_>>().join(" "), lines }
}

/// Returns the words of a command after the program's name, such as `export add`.
fn words(command: &Command) -> &str {
    let all = command.get_bin_name().unwrap_or_else(|| command.get_name());
    all.split_once(' ').map_or("", |(_, words)| words)
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

/// Returns the subcommands that help shows.
fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

/// Whether a command is `other`, or one of its subcommands.
fn is_below(words: &str, other: &str) -> bool {
    let rest = words.strip_prefix(other);
    other.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// Whether the page of a command shows a file.
fn uses(file: &FileUse, words: &str) -> bool {
    let mut commands = file.commands.iter().filter(|listed| !listed.is_empty());
    words.is_empty() || commands.any(|listed| is_below(words, listed))
}

/// Adds the forms of a command, with the placeholders of all values.
fn add_synopsis(roff: &mut Roff, command: &Command) {
    roff.control("SH", ["SYNOPSIS"]);
    // Disables hyphenation and justification.
    roff.control("nh", []).control("ad", ["l"]);
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let mut line = vec![bold(name)];
    let arguments = || command.get_arguments().filter(|arg| !arg.is_hide_set());
    let (flags, positionals) = (
        arguments().filter(|arg| !arg.is_positional()),
        arguments().filter(|arg| arg.is_positional()),
    );
    for arg in flags.chain(positionals) {
        line.push(roman(" "));
        line.extend(usage(arg));
    }
    let has_subcommands = shown(command).next().is_some();
    if has_subcommands && !command.is_subcommand_required_set() {
        roff.text(line);
        roff.control("br", []);
        line = vec![bold(name)];
    }
    if has_subcommands {
        line.extend([roman(" "), italic("COMMAND"), roman(" ...")]);
    }
    roff.text(line);
    roff.control("ad", []).control("hy", []);
}

/// Returns an argument with its placeholders, in brackets if it is optional.
fn usage(arg: &Arg) -> Vec<Inline> {
    let mut parts = match (arg.get_short(), arg.get_long()) {
        (Some(short), Some(long)) => vec![bold(format!("-{short}")), roman("|"), flag(long)],
        (Some(short), None) => vec![bold(format!("-{short}"))],
        (None, Some(long)) => vec![flag(long)],
        (None, None) => Vec::new(),
    };
    let takes_value = arg.get_num_args().is_some_and(|number| number.takes_values());
    if takes_value {
        let names = arg.get_value_names().unwrap_or_default();
        let name = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(" ");
        if !parts.is_empty() {
            parts.push(roman(" "));
        }
        parts.push(italic(name));
    }
    if !arg.is_required_set() {
        parts.insert(0, roman("["));
        parts.push(roman("]"));
    }
    let many = arg.get_num_args().is_some_and(|number| number.max_values() > 1);
    if takes_value && (many || matches!(arg.get_action(), ArgAction::Append)) {
        parts.push(roman("..."));
    }
    parts
}

fn flag(long: &str) -> Inline {
    bold(format!("--{long}"))
}

/// Returns the placeholder of a key's value.
fn value(one: &Described) -> String {
    match one.value {
        Yaml::Sequence(_) => format!("[{}, ...]", one.placeholder),
        Yaml::Bool(_) => "true|false".to_owned(),
        _ => one.placeholder.to_owned(),
    }
}

fn add_key(roff: &mut Roff, one: &Described) {
    let setting = &one.setting;
    let mut help = setting.help.clone();
    if !one.range.is_empty() {
        help += &format!(": {}", one.range);
    }
    if !one.default().is_empty() {
        help += &format!(" [default: {}]", one.default());
    }
    item(roff, [bold(&*setting.name), roman(": "), italic(value(one))], &help);
    for paragraph in setting.more.split("\n\n").filter(|text| !text.is_empty()) {
        roff.control("IP", []);
        roff.text([roman(paragraph)]);
    }
}

fn exit_text(status: &ExitStatus) -> String {
    let ExitStatus { meaning, more, .. } = status;
    let stop = if more.is_empty() { "" } else { ". " };
    format!("{meaning}{stop}{more}").replace('`', "")
}

fn add_files(roff: &mut Roff, files: &[&FileUse]) {
    if !files.is_empty() {
        roff.control("SH", ["FILES"]);
    }
    for file in files {
        item(roff, [italic(file.path)], file.what);
    }
}

fn add_see_also(roff: &mut Roff, pages: &[String]) {
    let mut line = Vec::new();
    for (at, page) in pages.iter().enumerate() {
        if pages[..at].contains(page) {
            continue;
        }
        if at > 0 {
            line.push(roman(", "));
        }
        line.push(bold(page));
    }
    roff.control("SH", ["SEE ALSO"]);
    roff.text(line);
}

/// Adds a labelled paragraph.
fn item(roff: &mut Roff, label: impl Into<Vec<Inline>>, text: &str) {
    roff.control("TP", []);
    roff.text(label);
    roff.text([roman(text)]);
}

fn paragraphs(roff: &mut Roff, text: &str) {
    for paragraph in text.split("\n\n") {
        roff.control("PP", []);
        roff.text([roman(paragraph)]);
    }
}

/// Adds lines verbatim.
fn verbatim(roff: &mut Roff, text: &str) {
    roff.control("PP", []).control("RS", ["4"]).control("nf", []);
    for line in text.trim_end().lines() {
        roff.text([roman(if line.is_empty() { " " } else { line })]);
    }
    roff.control("fi", []).control("RE", []);
}
