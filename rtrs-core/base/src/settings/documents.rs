//! Manual pages and shell completions for a program, generated from its command line, exit codes
//! and setting declarations.
//!
//! Packages install the files that `documents DIR` writes. The pages contain the text of `--help`,
//! so they cannot become outdated. [`Manual`] adds what a command line lacks: sections, examples
//! and files. `page.rs` writes the pages.

mod manual;
mod page;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::{Shell, generate, generate_to};

pub use self::manual::{FileUse, FormatPage, KeyGroup, Manual};
use self::page::Pages;
use super::command_error::{CommandError, ErrorClass};

/// Arguments of the command `documents`.
#[derive(Debug, Clone, Args)]
pub struct DocumentsArgs {
    /// Output directory; created if it does not exist
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

impl DocumentsArgs {
    /// Writes manual pages for the program, for each of its commands and for the formats of its
    /// files, and completions for bash, zsh and fish.
    ///
    /// # Errors
    /// [`ErrorClass::SYSTEM`] if a file cannot be written.
    pub fn run<K: ErrorClass>(
        &self,
        program: Command,
        manual: &Manual,
    ) -> Result<(), CommandError<K>> {
        let write = || {
            fs::create_dir_all(&self.dir)?;
            // The command `help` needs no page. Completions build the program, so they come last.
            let mut pages = program.clone().disable_help_subcommand(true);
            pages.build();
            Pages::new(&pages, manual, K::EXIT_STATUSES).write(&self.dir)?;
            write_completions(program.version(manual.version), &self.dir)
        };
        write().map_err(|error| {
            let what = format!("cannot write documents to {}", self.dir.display());
            CommandError::with_source(K::SYSTEM, what, error)
        })
    }
}

fn write_completions(mut program: Command, dir: &Path) -> io::Result<()> {
    let name = program.get_name().to_owned();
    for shell in [Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut program, &name, dir)?;
    }
    let mut bash = Vec::new();
    generate(Shell::Bash, &mut program, &name, &mut bash);
    // clap_complete 4.6 writes the name of a program with a dash in two ways, so nothing after a
    // command would be completed.
    let bash = String::from_utf8(bash).map_err(io::Error::other)?;
    let bash = bash.replace(&name.replace('-', "__subcmd__"), &name.replace('-', "__"));
    fs::write(dir.join(format!("{name}.bash")), bash)
}
