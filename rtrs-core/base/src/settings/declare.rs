//! Settings, each declared once, with its name, type and range, default and help.
//!
//! Contains the traits behind [`settings!`](crate::settings!), which builds a struct from a list of
//! declarations. Every operation on settings is a [`Visitor`] that receives each declaration with
//! its value: flags (`flags.rs`), the configuration file (`reading.rs`), `--print-config`
//! ([`print()`]), and the tables in the documentation ([`describe`]).

use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Arg, ArgAction, ArgMatches};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_yaml::{Mapping, Value as Yaml};

use super::file::deserialize_list;

/// Group of declared settings.
pub trait Settings: Default {
    /// Passes each setting to `visitor`, in the order of declaration.
    fn visit(&mut self, visitor: &mut impl Visitor);
}

/// Operation on each setting.
pub trait Visitor {
    /// Visits a setting and its value.
    fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F);

    /// Visits a key that contains settings of its own.
    fn section<S: Settings>(&mut self, name: &'static str, settings: &mut S);
}

/// Declaration of a setting.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Name of the flag and of the key.
    pub name: String,
    /// Summary, in one line without a full stop.
    pub help: String,
    /// Details, in paragraphs of one line each.
    pub more: String,
    /// Default as a user would write it, or the meaning of an unset value.
    pub default: &'static str,
    /// Old name, from before values had units; its last part is the unit for bare numbers.
    pub old: Option<&'static str>,
}

impl Setting {
    /// Creates the declaration of a field from the lines of its comment.
    #[must_use]
    pub fn new(field: &str, lines: &[&str], default: &'static str) -> Self {
        let lines: Vec<&str> = lines.iter().map(|line| line.trim()).collect();
        let mut parts = lines.split(|line| line.is_empty()).map(|part| part.join(" "));
        let help = parts.next().unwrap_or_default();
        let more = parts.collect::<Vec<_>>().join("\n\n");
        Self { name: field.replace('_', "-"), help, more, default, old: None }
    }

    /// Adds the old name of the setting.
    #[must_use]
    pub fn was(self, old: &'static str) -> Self {
        Self { old: Some(old), ..self }
    }

    /// Adds the unit in the old name to a bare number.
    #[must_use]
    pub fn with_unit(&self, text: &str) -> String {
        let bare = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match self.old.and_then(|old| old.rsplit('-').next()) {
            Some(unit) if bare => format!("{text}{unit}"),
            _ => text.to_owned(),
        }
    }
}

/// Type whose values users write as text.
pub trait Value:
    FromStr<Err: Error + Send + Sync + 'static>
    + Serialize
    + DeserializeOwned
    + Clone
    + Send
    + Sync
    + 'static
{
    /// Placeholder of the value in usage texts.
    const NAME: &'static str;

    /// Returns the valid values, such as "1 to 65535"; empty if the help states them.
    #[must_use]
    fn range() -> String {
        String::new()
    }
}

impl Value for String {
    const NAME: &'static str = "TEXT";
}

impl Value for PathBuf {
    const NAME: &'static str = "PATH";
}

/// Type of a setting: a [`Value`], an optional one, a list, or a flag without a value.
pub trait Field: Serialize + Sized {
    /// Type of a single value.
    type Of: Value;

    /// Creates the field from one or more values. Unless the field is a list, the last value
    /// counts.
    fn made(values: Vec<Self::Of>) -> Self;

    /// Returns the default.
    #[must_use]
    fn initial(text: &str) -> Self {
        Self::parse(text).unwrap_or_else(|error| panic!("the default {text:?} is bad: {error}"))
    }

    /// Parses the text of a value.
    ///
    /// # Errors
    /// Returns the value's own error.
    fn parse(text: &str) -> Result<Self, String> {
        let value: Result<Self::Of, _> = text.parse();
        value.map(|value| Self::made(vec![value])).map_err(|error| error.to_string())
    }

    /// Adds the value's name and parser to a flag.
    #[must_use]
    fn flag(arg: Arg) -> Arg {
        arg.value_name(Self::Of::NAME).value_parser(|text: &str| text.parse::<Self::Of>())
    }

    /// Returns the values given as flags, if any.
    fn given(matches: &ArgMatches, name: &str) -> Option<Self> {
        let values = matches.try_get_many(name).ok().flatten()?;
        Some(Self::made(values.cloned().collect()))
    }

    /// Reads a value from a file; `None` if the key has no value.
    ///
    /// # Errors
    /// Returns the deserializer's error.
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        let value = Option::<Self::Of>::deserialize(deserializer)?;
        Ok(value.map(|value| Self::made(vec![value])))
    }

    /// Returns the valid values; see [`Value::range`].
    #[must_use]
    fn range() -> String {
        <Self::Of as Value>::range()
    }
}

/// Returns the last value.
pub(super) fn last<T>(mut values: Vec<T>) -> T {
    values.pop().expect("a field is made of at least one value")
}

impl<T: Value> Field for T {
    type Of = T;

    fn made(values: Vec<T>) -> Self {
        last(values)
    }
}

impl<T: Value> Field for Option<T> {
    type Of = T;

    fn made(values: Vec<T>) -> Self {
        Some(last(values))
    }

    fn initial(_: &str) -> Self {
        None
    }
}

impl<T: Value> Field for Vec<T> {
    type Of = T;

    fn made(values: Self) -> Self {
        values
    }

    fn initial(text: &str) -> Self {
        if text.is_empty() { Self::new() } else { vec![T::initial(text)] }
    }

    fn flag(arg: Arg) -> Arg {
        T::flag(arg).action(ArgAction::Append)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        deserialize_list(deserializer)
    }
}

/// Declaration and value of a setting, for the documentation.
#[derive(Debug, Clone)]
pub struct Described {
    /// Section of the setting; empty if it is in none.
    pub section: &'static str,
    /// Declaration.
    pub setting: Setting,
    /// Placeholder of a value; see [`Value::NAME`].
    pub placeholder: &'static str,
    /// Valid values; see [`Value::range`].
    pub range: String,
    /// Value as in a configuration file; null if unset.
    pub value: Yaml,
}

impl Described {
    /// Returns the default as shown to users; empty if there is none.
    #[must_use]
    pub fn default(&self) -> &'static str {
        // A target has no default; its placeholder is not a valid value.
        if self.setting.name == "target" { "" } else { self.setting.default }
    }
}

/// Returns every declaration of `S` with its default.
#[must_use]
pub fn describe<S: Settings>() -> Vec<Described> {
    described(&mut S::default())
}

/// Returns every setting with its value, for YAML or JSON. An unset value is null.
#[must_use]
pub fn print<S: Settings + Clone>(settings: &S) -> Mapping {
    let mut all = Mapping::new();
    for one in described(&mut settings.clone()) {
        let name = one.setting.name.into();
        if one.section.is_empty() {
            all.insert(name, one.value);
        } else {
            let section = all.entry(one.section.into()).or_insert(Mapping::new().into());
            section[name] = one.value;
        }
    }
    all
}

fn described<S: Settings>(settings: &mut S) -> Vec<Described> {
    struct Describe(&'static str, Vec<Described>);
    impl Visitor for Describe {
        fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
            let value = serde_yaml::to_value(value).unwrap_or(Yaml::Null);
            let (section, setting, range) = (self.0, setting.clone(), F::range());
            let placeholder = <F::Of as Value>::NAME;
            self.1.push(Described { section, setting, placeholder, range, value });
        }
        fn section<S: Settings>(&mut self, name: &'static str, settings: &mut S) {
            self.0 = name;
            settings.visit(self);
            self.0 = "";
        }
    }
    let mut all = Describe("", Vec::new());
    settings.visit(&mut all);
    all.1
}
