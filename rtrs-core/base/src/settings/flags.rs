//! Command-line flags for settings.
//!
//! [`Flags`] adds a flag for each setting of a struct to a command line made with clap.

use std::io::{self, Write};
use std::marker::PhantomData;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, FromArgMatches};

use super::command_error::{CommandError, ErrorClass};
use super::declare::{Field, Setting, Settings, Visitor};

/// Flags given for the settings `S`. Use with `#[command(flatten)]`.
#[derive(Debug, Clone)]
pub struct Flags<S> {
    matches: ArgMatches,
    settings: PhantomData<fn() -> S>,
}

impl<S: Settings> Flags<S> {
    /// Returns true if one of these flags was given.
    #[must_use]
    pub fn any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| is_given(&self.matches, name))
    }

    /// Applies the flags to `settings`. A list replaces the existing one.
    ///
    /// # Errors
    /// [`ErrorClass::USAGE`] for the value of a flag with an old name; clap validated the others.
    pub fn apply<K: ErrorClass>(&self, settings: &mut S) -> Result<(), CommandError<K>> {
        let mut given = Given { matches: &self.matches, result: Ok(()) };
        settings.visit(&mut given);
        given.result.map_err(|text| CommandError::new(K::USAGE, text))
    }
}

/// Returns true if the flag was given. A flag without a value is off by default.
fn is_given(matches: &ArgMatches, name: &str) -> bool {
    let known = matches!(matches.try_contains_id(name), Ok(true));
    known && matches.value_source(name) == Some(ValueSource::CommandLine)
}

struct Given<'a> {
    matches: &'a ArgMatches,
    result: Result<(), String>,
}

impl Visitor for Given<'_> {
    fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
        let old = setting.old.and_then(|old| {
            let text = self.matches.try_get_one::<String>(old).ok().flatten()?;
            Some((old, setting.with_unit(text)))
        });
        if let Some((old, text)) = old {
            warn_of_old(&format!("--{old}"), &format!("--{} {text}", setting.name));
            match F::parse(&text) {
                Ok(read) => *value = read,
                Err(error) => self.result = Err(format!("--{old}: {error}")),
            }
        }
        if is_given(self.matches, &setting.name)
            && let Some(given) = F::given(self.matches, &setting.name)
        {
            *value = given;
        }
    }

    fn section<S: Settings>(&mut self, _: &'static str, settings: &mut S) {
        settings.visit(self);
    }
}

/// Warns on stderr about an old name. A failure to print is ignored.
pub(super) fn warn_of_old(old: &str, new: &str) {
    let _ = writeln!(io::stderr(), "warning: {old} is deprecated; use {new}");
}

impl<S: Settings> clap::Args for Flags<S> {
    fn augment_args(command: Command) -> Command {
        struct Add(Command);
        impl Visitor for Add {
            fn setting<F: Field>(&mut self, setting: &Setting, _: &mut F) {
                let Setting { name, more, default, .. } = setting;
                let mut help = setting.help.clone();
                let range = F::range();
                if !range.is_empty() {
                    help += &format!(": {range}");
                }
                if !["", "false"].contains(default) {
                    help += &format!(" [default: {default}]");
                }
                let arg = Arg::new(name.clone()).long(name.clone());
                let arg = F::flag(arg.long_help(format!("{help}\n\n{more}")).help(help));
                let old = setting.old.map(|old| Arg::new(old).long(old).hide(true).num_args(1));
                let command = std::mem::take(&mut self.0);
                self.0 = command.arg(arg).args(old);
            }
            fn section<S: Settings>(&mut self, _: &'static str, settings: &mut S) {
                settings.visit(self);
            }
        }
        let mut add = Add(command);
        S::default().visit(&mut add);
        add.0
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Settings> FromArgMatches for Flags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { matches: matches.clone(), settings: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.matches = matches.clone();
        Ok(())
    }
}
