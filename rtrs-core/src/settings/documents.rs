//! Manual pages and shell completions of a program, generated from its command line.
//!
//! Packages install the files that `documents DIR` writes. The pages have the text of `--help`, so
//! neither can be outdated.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::{Shell, generate, generate_to};
use clap_mangen::Man;

use super::command_error::{CommandError, ErrorClass};

/// Arguments of the command `documents`.
#[derive(Debug, Clone, Args)]
pub struct DocumentsArgs {
    /// Output directory; created if it does not exist
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

impl DocumentsArgs {
    /// Writes a manual page for the program and one for each of its commands, and completions for
    /// bash, zsh and fish. `version` is the release.
    ///
    /// # Errors
    /// [`ErrorClass::SYSTEM`] when a file cannot be written.
    pub fn run<K: ErrorClass>(
        &self,
        program: Command,
        version: &'static str,
    ) -> Result<(), CommandError<K>> {
        write(program.version(version), version, &self.dir).map_err(|error| {
            let what = format!("cannot write documents to {}", self.dir.display());
            CommandError::with_source(K::SYSTEM, what, error)
        })
    }
}

fn write(mut program: Command, version: &str, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let name = program.get_name().to_owned();
    // The command `help` needs no page. This must precede the completions, which build the program.
    let mut pages = program.clone().disable_help_subcommand(true);
    pages.build();
    for shell in [Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut program, &name, dir)?;
    }
    let mut bash = Vec::new();
    generate(Shell::Bash, &mut program, &name, &mut bash);
    // clap_complete 4.6 writes the name of a program with a dash in two ways, so that nothing is
    // completed after a command.
    let bash = String::from_utf8(bash).map_err(io::Error::other)?;
    let bash = bash.replace(&name.replace('-', "__subcmd__"), &name.replace('-', "__"));
    fs::write(dir.join(format!("{name}.bash")), bash)?;
    write_page(&pages, None, version, dir)
}

/// Writes the page of a command and those of its subcommands.
fn write_page(command: &Command, above: Option<&str>, version: &str, dir: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut file = BufWriter::new(File::create(dir.join(format!("{name}.1")))?);
    let source = format!("RTRS {version}");
    Man::new(command.clone()).source(source).manual("RTRS").render(&mut file)?;
    if let Some(above) = above {
        write!(file, ".SH \"SEE ALSO\"\n\\fB{}\\fR(1)\n", above.replace('-', "\\-"))?;
    }
    file.flush()?;
    let below = command.get_subcommands().filter(|command| !command.is_hide_set());
    below.into_iter().try_for_each(|below| write_page(below, Some(name), version, dir))
}
