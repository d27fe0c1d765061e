//! Exit codes of the programs, each declared once: for processes, `--help`, manual pages and
//! docs/reference/exit-codes.md.

/// Exit code of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus {
    /// Exit code of the process.
    pub code: u8,
    /// Meaning in a few words.
    pub meaning: &'static str,
    /// Details, in whole sentences.
    pub more: &'static str,
    /// The only command that ends with this code; `None` for all commands.
    pub command: Option<&'static str>,
}

impl ExitStatus {
    /// Success.
    pub const SUCCESS: Self = Self { code: 0, meaning: "success", more: "", command: None };
    /// Failure that has no other code.
    pub const FAILURE: Self = Self {
        code: 1,
        meaning: "failure",
        more: "The message says what failed, why, and what to do. This includes a configuration \
               file that cannot be read.",
        command: None,
    };
    /// Wrong usage or configuration. clap uses the same code.
    pub const USAGE: Self = Self {
        code: 2,
        meaning: "wrong usage or a wrong configuration file",
        more: "For an unknown key, the message gives the line number.",
        command: None,
    };
}

/// Returns a line with the exit codes of a program, for its help.
#[must_use]
pub fn exit_codes(statuses: &[ExitStatus]) -> String {
    let codes: Vec<String> = statuses
        .iter()
        .map(|status| match status.command {
            Some(command) => format!("{} {command}: {}", status.code, status.meaning),
            None => format!("{} {}", status.code, status.meaning),
        })
        .collect();
    format!("Exit codes: {}.", codes.join(", "))
}
