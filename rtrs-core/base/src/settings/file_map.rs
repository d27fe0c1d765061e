//! Settings as keys of a configuration file.
//!
//! Defines [`Keys`], which serde reads from a map: each key is a declared name or an old name of a
//! setting, and occurs once. A key without a value keeps the default.

use std::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Visitor as Serde};

use super::declare::{Field, Setting, Settings, Visitor, describe};
use super::file::deserialize_text;
use super::flags::warn_of_old;
use super::suggest::nearest;

/// Settings from a map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys<S>(pub S);

impl<'de, S: Settings> Deserialize<'de> for Keys<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KeysVisitor(S::default())).map(Self)
    }
}

struct KeysVisitor<S>(S);

impl<'de, S: Settings> Serde<'de> for KeysVisitor<S> {
    type Value = S;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<S, A::Error> {
        let mut known: Vec<&str> = Vec::new();
        let declared = describe::<S>();
        for one in &declared {
            let name = if one.section.is_empty() { &*one.setting.name } else { one.section };
            if !known.contains(&name) {
                known.push(name);
            }
        }
        let old: Vec<&str> = declared.iter().filter_map(|one| one.setting.old).collect();
        let mut seen = Vec::new();
        while let Some(key) =
            map.next_key_seed(KeySeed { known: &known, old: &old, seen: &mut seen })?
        {
            let mut read = Read { key: &key, map: &mut map, result: Ok(()) };
            self.0.visit(&mut read);
            read.result?;
        }
        Ok(self.0)
    }
}

/// A known key that has not occurred yet.
struct KeySeed<'a> {
    known: &'a [&'a str],
    old: &'a [&'a str],
    seen: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Serde<'_> for KeySeed<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<String, E> {
        if self.seen.iter().any(|seen| seen == key) {
            return Err(E::custom(format!("duplicate key {key:?}; write it once")));
        }
        if !self.known.contains(&key) && !self.old.contains(&key) {
            return Err(E::custom(match nearest(key, self.known.iter().copied()) {
                Some(near) => format!("unknown key {key:?}; did you mean {near:?}?"),
                None => format!("unknown key {key:?}; the keys are {}", self.known.join(", ")),
            }));
        }
        self.seen.push(key.to_owned());
        Ok(key.to_owned())
    }
}

/// Reads the value of one key.
struct Read<'a, A, E> {
    key: &'a str,
    map: &'a mut A,
    result: Result<(), E>,
}

impl<'de, A: MapAccess<'de>> Visitor for Read<'_, A, A::Error> {
    fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
        let read = if self.key == setting.name {
            self.map.next_value().map(|FieldValue(value)| value)
        } else if Some(self.key) == setting.old {
            self.map.next_value::<Option<Text>>().and_then(|text| {
                let Some(Text(text)) = text else { return Ok(None) };
                let text = setting.with_unit(&text);
                warn_of_old(self.key, &format!("{}: {text}", setting.name));
                F::parse(&text).map(Some).map_err(|e| Error::custom(format!("{}: {e}", self.key)))
            })
        } else {
            return;
        };
        match read {
            Ok(Some(read)) => *value = read,
            Ok(None) => {}
            Err(error) => self.result = Err(error),
        }
    }

    fn section<S: Settings>(&mut self, name: &'static str, settings: &mut S) {
        if self.key == name {
            match self.map.next_value::<Option<Keys<S>>>() {
                Ok(Some(Keys(read))) => *settings = read,
                Ok(None) => {}
                Err(error) => self.result = Err(error),
            }
        }
    }
}

struct FieldValue<F>(Option<F>);

impl<'de, F: Field> Deserialize<'de> for FieldValue<F> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        F::read(deserializer).map(Self)
    }
}

/// Text of a value of any type.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a value").map(Self)
    }
}
