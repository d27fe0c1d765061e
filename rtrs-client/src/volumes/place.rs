//! Locations of errors in a file: the steps to the invalid entry, and its line in the text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Step from an entry in the file to an entry within that entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Item(usize),
}

/// An error in the contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) what: String,
    /// Steps to the invalid entry.
    at: Vec<Step>,
}

impl From<String> for Wrong {
    fn from(what: String) -> Self {
        Self { what, at: Vec::new() }
    }
}

impl From<&str> for Wrong {
    fn from(what: &str) -> Self {
        what.to_owned().into()
    }
}

impl Wrong {
    /// Error in the entry with this key.
    pub(super) fn of_key(key: &str, what: impl Into<String>) -> Self {
        Self { what: what.into(), at: vec![Step::Key(key.to_owned())] }
    }

    /// Returns the error with its location extended by the list item that contains it.
    pub(super) fn in_item(mut self, list: &str, item: usize) -> Self {
        let outer = vec![Step::Key(list.to_owned()), Step::Item(item)];
        self.at = [outer, self.at].concat();
        self
    }

    /// Returns the error with the name of the part of the file to which it belongs.
    pub(super) fn in_part(mut self, part: &str) -> Self {
        self.what = format!("{part}: {}", self.what);
        self
    }

    /// Line of the error in the file's text.
    pub(super) fn line(&self, text: &str) -> usize {
        line_of(text, &self.at)
    }
}

/// Line of an entry, or of the nearest non-empty entry that contains it.
pub(super) fn line_of(text: &str, steps: &[Step]) -> usize {
    let line = |count: usize| {
        let found = Locate(&steps[..count]).deserialize(serde_yaml::Deserializer::from_str(text));
        found.err()?.location().map(|place| place.line())
    };
    (0..=steps.len()).rev().find_map(line).unwrap_or(1)
}

/// Deserializes up to an entry and fails there, because only errors report a line.
struct Locate<'a>(&'a [Step]);

impl<'de> DeserializeSeed<'de> for Locate<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Locate<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another entry")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let wanted = self.0.first();
        let is_last = self.0.len() <= 1;
        while let Some(is_found) = map.next_key_seed(LocateKey { wanted, is_last })? {
            match is_found {
                true => map.next_value_seed(Locate(&self.0[1..]))?,
                false => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Some((Step::Item(wanted), inner)) = self.0.split_first() else {
            return Err(A::Error::custom("here"));
        };
        for _ in 0..*wanted {
            items.next_element::<IgnoredAny>()?;
        }
        items.next_element_seed(Locate(inner))?;
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

/// Fails at a key that is the last step, or at any key if no steps are left. Otherwise returns
/// whether this is the wanted key.
struct LocateKey<'a> {
    wanted: Option<&'a Step>,
    is_last: bool,
}

impl<'de> DeserializeSeed<'de> for LocateKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for LocateKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        let is_wanted = match self.wanted {
            None => true,
            Some(step) => matches!(step, Step::Key(wanted) if wanted == key),
        };
        if is_wanted && self.is_last {
            return Err(E::custom("here"));
        }
        Ok(is_wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_line_of_its_key_or_item() {
        let text = "# sessions\nsessions:\n- path: [a,\n    b]\n  volumes:\n  - export: v\n\
                    \x20   7: x\n- volumes: [{export: w,\n    access: x}]\n- {}\n- 3\n";
        let key = |key: &str| Step::Key(key.to_owned());
        let (sessions, volumes, item) = (key("sessions"), key("volumes"), Step::Item);
        for (steps, line) in [
            (&[][..], 2),
            (std::slice::from_ref(&sessions), 2),
            (&[sessions.clone(), item(0)], 3),
            (&[sessions.clone(), item(0), key("path"), item(1)], 4),
            (&[sessions.clone(), item(0), volumes.clone(), item(0), key("7")], 7),
            (&[sessions.clone(), item(1)], 8),
            (&[sessions.clone(), item(1), volumes, item(0), key("access")], 9),
            (&[sessions.clone(), item(2)], 2),
            (&[sessions.clone(), item(3)], 11),
            (&[sessions.clone(), item(0), key("none")], 3),
        ] {
            assert_eq!(line_of(text, steps), line, "{steps:?}");
        }
    }
}
