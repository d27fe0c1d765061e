//! Values that are one of a few words.
//!
//! [`choices!`](crate::choices!) declares such a type with its words;
//! [`text_values!`](crate::text_values!) makes types with a text usable in files. [`Switch`] and
//! [`AutoSwitch`] are the choices that both daemons share. In a configuration file `true` and
//! `false` mean `on` and `off`.

/// Makes types that parse and print their text [values](super::Value) of settings. Arguments: the
/// type, its placeholder in usage texts, and the text after "expected" in the error of a file.
#[macro_export]
macro_rules! text_values {
    ($($type:ty, $name:literal, $expecting:literal;)+) => {$(
        impl $crate::settings::Value for $type {
            const NAME: &'static str = $name;
        }
        $crate::text_values!(serde $type, $expecting);
    )+};
    (serde $type:ty, $expecting:literal) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::settings::deserialize_text(deserializer, $expecting)
            }
        }
    };
}

/// Declares an enum whose values are words. Errors use the text after its name; a variant may have
/// further words, which are accepted and never printed.
#[macro_export]
macro_rules! choices {
    ($(#[$about:meta])+ $vis:vis enum $type:ident as $what:literal {
        $($(#[$meta:meta])+ $variant:ident = $word:literal $(| $also:literal)*,)+
    }) => {
        $(#[$about])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        $vis enum $type { $($(#[$meta])+ $variant,)+ }

        impl std::str::FromStr for $type {
            type Err = $crate::settings::ValueError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word $(| $also)* => Ok(Self::$variant),)+
                    _ => Err($crate::settings::unknown_choice($what, text, &[$($word),+])),
                }
            }
        }
        impl $type {
            /// Returns the word.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }
        impl $crate::settings::Value for $type {
            const NAME: &'static str = "WORD";
            fn range() -> String {
                $crate::settings::either(&[$($word),+])
            }
        }
        $crate::text_values!(serde $type, $what);
    };
}

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

use super::ValueError;

choices! {
    /// `on` or `off`.
    pub enum Switch as "switch" {
        /// Switched on.
        On = "on" | "true",
        /// Switched off.
        Off = "off" | "false",
    }
}

impl Switch {
    /// Whether the switch is on.
    #[must_use]
    pub const fn is_on(self) -> bool {
        matches!(self, Self::On)
    }
}

choices! {
    /// `on`, `off`, or `auto`: the program decides.
    #[derive(Default)]
    pub enum AutoSwitch as "switch" {
        /// The program decides.
        #[default]
        Auto = "auto",
        /// Switched on, or an error.
        On = "on" | "true",
        /// Switched off.
        Off = "off" | "false",
    }
}

impl From<bool> for AutoSwitch {
    fn from(on: bool) -> Self {
        if on { Self::On } else { Self::Off }
    }
}

text_values! {
    super::ByteSize, "SIZE", "a size such as 128k";
    super::Portal, "PORTAL", "a portal such as tcp://127.0.0.1:1234";
    crate::identity::Identity, "ID", "an identity, SERVER/EXPORT";
}

impl super::Value for String {
    const NAME: &'static str = "TEXT";
}

impl super::Value for std::path::PathBuf {
    const NAME: &'static str = "PATH";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches() {
        for text in ["on", "off"] {
            assert_eq!(text.parse::<Switch>().unwrap().to_string(), text);
            assert_eq!(text.parse::<AutoSwitch>().unwrap().to_string(), text);
        }
        assert_eq!("auto".parse(), Ok(AutoSwitch::Auto));
        assert_eq!("true".parse(), Ok(Switch::On));
        assert_eq!(
            "yes".parse::<Switch>().unwrap_err().to_string(),
            "switch \"yes\" is not valid; use on or off"
        );
        assert_eq!(
            "always".parse::<AutoSwitch>().unwrap_err().to_string(),
            "switch \"always\" is not valid; use auto, on or off"
        );
    }
}
