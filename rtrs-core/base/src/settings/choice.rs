//! Enumerated setting types, whose values are keywords.
//!
//! [`choices!`](crate::choices!) declares such a type with its keywords.
//! [`text_values!`](crate::text_values!) makes types with a text form available to settings files.
//! [`Switch`] and [`AutoSwitch`] are used by both daemons. `true` and `yes` mean `on`; `false` and
//! `no` mean `off`.

use clap::Arg;

use super::declare::{Field, last};
use super::error::ValueError;

/// Joins words as in a sentence: `a, b or c`.
#[must_use]
pub fn either(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// Returns the error for a word that is not one of `words`.
#[must_use]
pub fn unknown_choice(what: &'static str, text: &str, words: &[&str]) -> ValueError {
    ValueError::new(what, text, "is not valid", format!("use {}", either(words)))
}

crate::choices! {
    /// `on` or `off`.
    pub enum Switch as "switch" {
        /// Switched on.
        On = "on" | "true" | "yes",
        /// Switched off.
        Off = "off" | "false" | "no",
    }
}

impl Switch {
    /// Whether the switch is on.
    #[must_use]
    pub const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

impl Field for bool {
    type Of = Switch;

    fn made(values: Vec<Switch>) -> Self {
        last(values).is_on()
    }

    fn flag(arg: Arg) -> Arg {
        Switch::flag(arg).num_args(0).default_missing_value("on")
    }

    fn range() -> String {
        String::new()
    }
}

crate::choices! {
    /// `on`, `off`, or `auto`, which selects automatically.
    #[derive(Default)]
    pub enum AutoSwitch as "switch" {
        /// Selected automatically.
        #[default]
        Auto = "auto",
        /// Switched on; an error if unsupported.
        On = "on" | "true" | "yes",
        /// Switched off.
        Off = "off" | "false" | "no",
    }
}

impl From<bool> for AutoSwitch {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_are_parsed() {
        for text in ["on", "off"] {
            assert_eq!(text.parse::<Switch>().unwrap().to_string(), text);
            assert_eq!(text.parse::<AutoSwitch>().unwrap().to_string(), text);
        }
        assert_eq!("auto".parse(), Ok(AutoSwitch::Auto));
        for (text, is_on) in [("true", true), ("yes", true), ("false", false), ("no", false)] {
            assert_eq!(text.parse::<Switch>().unwrap().is_on(), is_on);
            assert_eq!(text.parse(), Ok(AutoSwitch::from(is_on)));
            let read: Switch = serde_yaml::from_str(text).unwrap();
            assert_eq!(read.is_on(), is_on);
        }
        assert_eq!(
            "maybe".parse::<Switch>().unwrap_err().to_string(),
            "switch \"maybe\" is not valid; use on or off"
        );
        assert_eq!(
            "always".parse::<AutoSwitch>().unwrap_err().to_string(),
            "switch \"always\" is not valid; use auto, on or off"
        );
    }
}
