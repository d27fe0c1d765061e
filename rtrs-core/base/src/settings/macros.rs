//! Macros that declare settings and the types of their values. They expand to public paths in
//! `settings`.

/// Declares a struct of settings:
///
/// ```
/// use rtrs_base::settings::{Int, Time, MILLISECOND, SECOND};
/// rtrs_base::settings! {
///     /// Settings of the example.
///     pub struct Example {
///         /// Requests in flight
///         ///
///         /// Details, for `--help` and the documentation.
///         queue_depth: Int<u16, 1, 512> = "64",
///         /// Longest wait for an answer
///         ///
///         /// The old name is accepted with a warning; its bare numbers are milliseconds.
///         io_timeout: Time<{ 10 * MILLISECOND }, { 60 * SECOND }> = "30s" was "io-timeout-ms",
///     }
/// }
/// assert_eq!(Example::default().queue_depth.get(), 64);
/// ```
///
/// The flag and the key have the field's name with `-` for `_`. The default is written as a user
/// would write it. For `Option<T>`, unset by default, it describes what unset means.
#[macro_export]
macro_rules! settings {
    ($(#[doc = $about:literal])+ $vis:vis struct $family:ident {
        $($(#[doc = $help:literal])+
        $name:ident: $ty:ty = $default:literal $(was $old:literal)?,)+
    }) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, PartialEq, Eq)]
        $vis struct $family {
            $($(#[doc = $help])+ pub $name: $ty,)+
        }

        impl Default for $family {
            fn default() -> Self {
                Self { $($name: <$ty as $crate::settings::Field>::initial($default),)+ }
            }
        }

        impl $crate::settings::Settings for $family {
            fn visit(&mut self, visitor: &mut impl $crate::settings::Visitor) {
                use $crate::settings::Setting;
                $(visitor.setting(
                    &Setting::new(stringify!($name), &[$($help),+], $default)$(.was($old))?,
                    &mut self.$name,
                );)+
            }
        }
    };
}

/// Lets types that can be parsed and printed be [values](crate::settings::Value) of settings.
/// Arguments: the type, its placeholder in usage texts, and the text after "expected" in errors
/// about a file.
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

/// Declares an enum whose values are words. Error messages use the text after the enum's name; a
/// variant may have additional words, which are accepted but never printed.
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
            /// Returns the word for this value.
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
