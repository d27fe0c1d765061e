//! One export as a user writes it.
//!
//! Owns [`ExportSpec`] and its two forms: the text of `--export`,
//! `[NAME=]TARGET[,ro][,direct=auto|on|off][,block-size=512|4096][,delay=TIME]` with
//! `[,error-rate=RATE][,id=ID]` behind it,
//! and the map of a configuration file with the same names as keys.
//!
//! In the text form a backslash makes the next character ordinary: `\,` and `\=` put a comma or an
//! equals sign into a name or a path, `\\` a backslash. An equals sign after a path that begins
//! with `/`, `./` or `../` needs none. In the map form nothing is escaped.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rtrs_core::config::{AutoSwitch, ByteSize, Millis, ValueError, deserialize_text, nearest};
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Longest export name in bytes: the wire has 255 with the NUL (kernel rnbd-proto.h, `NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 254;

const OPTIONS: [&str; 6] = ["ro", "direct", "block-size", "delay", "error-rate", "id"];

/// Longest id in bytes.
const ID_BYTES_MAX: usize = 255;
const WHAT: &str = "export";

/// What an export is made of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A regular file or a block device. Never begins with `mem:` or `null:`; such a relative path
    /// is kept with `./` in front.
    Path(PathBuf),
    /// Memory, gone when the server ends.
    Memory(ByteSize),
    /// Nothing: writes vanish, reads give zeroes.
    Null(ByteSize),
}

impl FromStr for Target {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let size = |size: &str| match size.parse::<ByteSize>() {
            Ok(size) => Ok(size),
            Err(error) => Err(ValueError::new(
                "target",
                text,
                format!("is refused: {error}"),
                "write mem:SIZE or null:SIZE, or ./ in front of a path of that name",
            )),
        };
        if text.is_empty() {
            return Err(ValueError::new(
                "target",
                text,
                "is empty",
                "write a path, mem:SIZE or null:SIZE",
            ));
        }
        if text.contains('\0') {
            return Err(ValueError::new(
                "target",
                text,
                "holds a NUL",
                "write the path without it",
            ));
        }
        if let Some(rest) = text.strip_prefix("mem:") {
            size(rest).map(Self::Memory)
        } else if let Some(rest) = text.strip_prefix("null:") {
            size(rest).map(Self::Null)
        } else {
            Ok(Self::Path(PathBuf::from(text)))
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Memory(size) => write!(f, "mem:{size}"),
            Self::Null(size) => write!(f, "null:{size}"),
        }
    }
}

/// The logical block size of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BlockSize {
    /// The block device's own; 512 bytes for everything else.
    #[default]
    Auto,
    /// 512 bytes.
    B512,
    /// 4096 bytes.
    B4096,
}

impl BlockSize {
    /// The size in bytes, or `None` if the target decides.
    #[must_use]
    pub const fn bytes(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::B512 => Some(512),
            Self::B4096 => Some(4096),
        }
    }
}

impl FromStr for BlockSize {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            "512" => Ok(Self::B512),
            "4096" | "4k" => Ok(Self::B4096),
            _ => Err(ValueError::new(
                "block-size",
                text,
                "is not supported",
                "use auto, 512 or 4096",
            )),
        }
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes() {
            None => f.write_str("auto"),
            Some(bytes) => write!(f, "{bytes}"),
        }
    }
}

/// The share of requests that fail on purpose, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ErrorRate(u32);

impl ErrorRate {
    /// The rate in failures per million requests, 0 to 1,000,000.
    #[must_use]
    pub const fn per_million(self) -> u32 {
        self.0
    }
}

impl FromStr for ErrorRate {
    type Err = ValueError;

    /// Reads a decimal fraction from 0 to 1 with up to six places: `0`, `0.001`, `1`.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = || {
            ValueError::new(
                "error-rate",
                text,
                "is not a fraction of requests",
                "use 0 to 1 with up to six decimal places, as in 0.001",
            )
        };
        let (whole, places) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(places) || places.len() > 6 || whole.len() > 1 {
            return Err(refuse());
        }
        let whole: u32 = whole.parse().map_err(|_| refuse())?;
        let millionths: u32 = format!("{places:0<6}").parse().map_err(|_| refuse())?;
        let rate = whole * 1_000_000 + millionths;
        if rate > 1_000_000 { Err(refuse()) } else { Ok(Self(rate)) }
    }
}

impl fmt::Display for ErrorRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// One export: a name for clients, what is behind it, and how it behaves.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ExportSpec {
    /// The name clients open; `None` takes the file name, or `mem` or `null`.
    pub name: Option<String>,
    /// What is behind the export.
    pub target: Target,
    /// Refuse writes.
    pub ro: bool,
    /// Whether a path is opened past the page cache (`O_DIRECT`).
    pub direct: AutoSwitch,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Time each request waits before it runs; 0 for none.
    pub delay: Millis,
    /// Share of requests that fail with EIO.
    pub error_rate: ErrorRate,
    /// What tells clients that it is this disk or file; `None` takes what the system knows.
    pub id: Option<String>,
}

impl ExportSpec {
    /// An export of `target` with every option at its default.
    #[must_use]
    pub const fn new(name: Option<String>, target: Target) -> Self {
        Self {
            name,
            target,
            ro: false,
            direct: AutoSwitch::Auto,
            block_size: BlockSize::Auto,
            delay: Millis::new(0),
            error_rate: ErrorRate(0),
            id: None,
        }
    }

    /// The name clients open: the one written, else the path's file name, else `mem` or `null`.
    ///
    /// # Errors
    /// [`ValueError`] if the name is empty, too long or holds a NUL, or the path has no file name.
    pub fn resolved_name(&self) -> Result<String, ValueError> {
        let name = match (&self.name, &self.target) {
            (Some(name), _) => name.clone(),
            (None, Target::Memory(_)) => "mem".to_owned(),
            (None, Target::Null(_)) => "null".to_owned(),
            (None, Target::Path(path)) => file_name(path)?,
        };
        let refuse = |problem: String| {
            Err(ValueError::new(
                "export name",
                &name,
                problem,
                "use 1 to 254 bytes without NUL, as in vol0=/srv/vol0.img",
            ))
        };
        match name.len() {
            0 => refuse("is empty".into()),
            len if len > NAME_BYTES_MAX => refuse(format!("is {len} bytes long")),
            _ if name.contains('\0') => refuse("holds a NUL".into()),
            _ => Ok(name),
        }
    }
}

fn file_name(path: &Path) -> Result<String, ValueError> {
    path.file_name().and_then(|name| name.to_str()).map(str::to_owned).ok_or_else(|| {
        ValueError::new(
            WHAT,
            &path.display().to_string(),
            "has no file name to be exported under",
            "write NAME=PATH",
        )
    })
}

/// A character of the text form, and whether a backslash stood before it.
type Written = (char, bool);

/// Splits at commas without a backslash.
fn split_fields(text: &str) -> Result<Vec<Vec<Written>>, ValueError> {
    let mut fields = vec![Vec::new()];
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let written = match c {
            ',' => {
                fields.push(Vec::new());
                continue;
            }
            '\\' => match chars.next() {
                Some(next) => (next, true),
                None => {
                    return Err(ValueError::new(
                        WHAT,
                        text,
                        "ends with a backslash that escapes nothing",
                        "write \\\\ for a backslash",
                    ));
                }
            },
            _ => (c, false),
        };
        if let Some(field) = fields.last_mut() {
            field.push(written);
        }
    }
    Ok(fields)
}

fn plain(field: &[Written]) -> String {
    field.iter().map(|(c, _)| *c).collect()
}

/// Whether the text before an equals sign is the beginning of a path, not a name.
fn begins_path(field: &[Written]) -> bool {
    let begins = |start: &str| {
        start.chars().enumerate().all(|(at, c)| field.get(at).is_some_and(|w| *w == (c, false)))
    };
    ["/", "./", "../"].into_iter().any(begins)
}

/// Splits a field at its first bare equals sign.
fn split_pair(field: &[Written]) -> Option<(&[Written], &[Written])> {
    let at = field.iter().position(|written| *written == ('=', false))?;
    Some((&field[..at], &field[at + 1..]))
}

impl FromStr for ExportSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem: String, remedy: &'static str| {
            Err(ValueError::new(WHAT, text, problem, remedy))
        };
        let fields = split_fields(text)?;
        let (head, options) = fields.split_first().map_or((&[][..], &[][..]), |(h, o)| (&**h, o));
        let (name, target) = match split_pair(head) {
            Some((name, target)) if !begins_path(name) => (Some(plain(name)), target),
            _ => (None, head),
        };
        if name.as_ref().is_some_and(String::is_empty) {
            return refuse("has an empty name".into(), "write NAME=TARGET, or only TARGET");
        }
        // An escaped first letter says that `mem:` or `null:` is the beginning of a file name.
        let literal = target.first().is_some_and(|(_, escaped)| *escaped);
        let target = plain(target);
        let target = if literal && (target.starts_with("mem:") || target.starts_with("null:")) {
            format!("./{target}")
        } else {
            target
        };
        if target.is_empty() {
            return refuse("has no target".into(), "write [NAME=]PATH, mem:SIZE or null:SIZE");
        }
        let target = match target.parse() {
            Ok(target) => target,
            Err(error) => {
                return refuse(
                    format!("is refused: {error}"),
                    "write [NAME=]PATH, mem:SIZE or null:SIZE",
                );
            }
        };
        let mut spec = Self::new(name, target);
        let mut seen: Vec<String> = Vec::new();
        for option in options {
            let (key, value) = match split_pair(option) {
                Some((key, value)) => (plain(key), Some(plain(value))),
                None => (plain(option), None),
            };
            if seen.contains(&key) {
                return refuse(format!("says {key:?} twice"), "say it once");
            }
            spec.set(text, &key, value.as_deref())?;
            seen.push(key);
        }
        Ok(spec)
    }
}

impl ExportSpec {
    /// Sets one option of the text form; `text` is the whole specification, for errors.
    fn set(&mut self, text: &str, key: &str, value: Option<&str>) -> Result<(), ValueError> {
        if !OPTIONS.contains(&key) {
            let remedy = match nearest(key, OPTIONS) {
                Some(near) => format!("did you mean {near:?}?"),
                None => format!(
                    "the options are {}; write \\, for a comma in a path",
                    OPTIONS.join(", ")
                ),
            };
            return Err(ValueError::new(
                WHAT,
                text,
                format!("has the unknown option {key:?}"),
                remedy,
            ));
        }
        let refused = |error: ValueError| {
            ValueError::new(
                WHAT,
                text,
                format!("has a bad {key}: {error}"),
                format!("correct {key}, or leave it out"),
            )
        };
        if key == "ro" {
            self.ro = match value {
                None => true,
                Some(value) => value.parse::<rtrs_core::config::Switch>().map_err(refused)?.is_on(),
            };
            return Ok(());
        }
        let Some(value) = value else {
            return Err(ValueError::new(
                WHAT,
                text,
                format!("has {key:?} without a value"),
                format!("write {key}=VALUE"),
            ));
        };
        match key {
            "direct" => self.direct = value.parse().map_err(refused)?,
            "block-size" => self.block_size = value.parse().map_err(refused)?,
            "delay" => self.delay = value.parse().map_err(refused)?,
            "id" => self.id = Some(check_id(value).map_err(refused)?.to_owned()),
            _ => self.error_rate = value.parse().map_err(refused)?,
        }
        Ok(())
    }
}

/// Judges an id of an export or a server: any text, compared as it is written.
///
/// # Errors
/// [`ValueError`] for an empty or too long one.
pub fn check_id(id: &str) -> Result<&str, ValueError> {
    match id.len() {
        1..=ID_BYTES_MAX => Ok(id),
        0 => Err(ValueError::new("id", id, "is empty", "write 1 to 255 bytes, or leave it out")),
        _ => Err(ValueError::new("id", id, "is too long", "write 1 to 255 bytes")),
    }
}

/// Writes `text` with a backslash before each character of `special` and before backslashes.
fn write_escaped(f: &mut fmt::Formatter<'_>, text: &str, special: &[char]) -> fmt::Result {
    for c in text.chars() {
        if c == '\\' || special.contains(&c) {
            write!(f, "\\")?;
        }
        write!(f, "{c}")?;
    }
    Ok(())
}

impl fmt::Display for ExportSpec {
    /// Writes the text form; options at their defaults are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            if name.starts_with(['/', '.']) {
                f.write_str("\\")?;
            }
            write_escaped(f, name, &[',', '='])?;
            f.write_str("=")?;
        }
        write_escaped(f, &self.target.to_string(), &[',', '='])?;
        if self.ro {
            f.write_str(",ro")?;
        }
        if self.direct != AutoSwitch::Auto {
            write!(f, ",direct={}", self.direct)?;
        }
        if self.block_size != BlockSize::Auto {
            write!(f, ",block-size={}", self.block_size)?;
        }
        if self.delay != Millis::new(0) {
            write!(f, ",delay={}", self.delay)?;
        }
        if self.error_rate != ErrorRate(0) {
            write!(f, ",error-rate={}", self.error_rate)?;
        }
        if let Some(id) = &self.id {
            f.write_str(",id=")?;
            write_escaped(f, id, &[',', '='])?;
        }
        Ok(())
    }
}

/// The map form; see the fields of [`ExportSpec`].
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ExportMap {
    #[serde(default)]
    name: Option<String>,
    target: Target,
    #[serde(default)]
    ro: bool,
    #[serde(default)]
    direct: AutoSwitch,
    #[serde(default)]
    block_size: BlockSize,
    #[serde(default)]
    delay: Millis,
    #[serde(default)]
    error_rate: ErrorRate,
    #[serde(default)]
    id: Option<String>,
}

impl<'de> Deserialize<'de> for ExportSpec {
    /// Reads either form.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SpecVisitor)
    }
}

struct SpecVisitor;

impl<'de> serde::de::Visitor<'de> for SpecVisitor {
    type Value = ExportSpec;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an export: [NAME=]TARGET[,OPTION...], or a map with target and options")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ExportSpec, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<ExportSpec, A::Error> {
        let map = ExportMap::deserialize(MapAccessDeserializer::new(map))?;
        Ok(ExportSpec {
            name: map.name,
            target: map.target,
            ro: map.ro,
            direct: map.direct,
            block_size: map.block_size,
            delay: map.delay,
            error_rate: map.error_rate,
            id: map.id,
        })
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a path, mem:SIZE or null:SIZE")
    }
}

impl Serialize for BlockSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.bytes() {
            None => serializer.serialize_str("auto"),
            Some(bytes) => serializer.serialize_u32(bytes),
        }
    }
}

impl<'de> Deserialize<'de> for BlockSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto, 512 or 4096")
    }
}

impl Serialize for ErrorRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ErrorRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "a fraction from 0 to 1")
    }
}

#[cfg(test)]
mod tests;
