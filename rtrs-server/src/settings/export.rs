//! An export as a user specifies it.
//!
//! Owns [`ExportSpec`] and its two forms: the text of `--export`,
//! `[NAME=]TARGET[,ro][,direct=auto|on|off][,block-size=512|4096][,no-lock]` followed by
//! `[,gateway][,conf=PATH][,user=USER][,connect-timeout=TIME][,migration=allow|deny]` and
//! `[,delay=TIME][,error-rate=RATE]`, the rate limits `[,iops=N][,bandwidth=SIZE][,burst=TIME]`,
//! the first two also for reads or writes only (`iops-read`), and `[,id=ID][,access=WHO:MODE]`; and
//! the map of a configuration file with the same names as keys.
//!
//! In the text form, a backslash makes the next character literal: `\,` and `\=` put a comma or an
//! equals sign into a name or a path, `\\` a backslash. An equals sign after a path that begins
//! with `/`, `./` or `../`, or after a URL, needs no backslash. In the map form, nothing is
//! escaped.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rtrs_core::settings::{
    AutoSwitch, ByteSize, Field, Keys, MILLISECOND, MINUTE, SECOND, Setting, Settings, Time, Value,
    ValueError, Visitor, choices, describe, nearest, print, text_values,
};
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::nbd::NbdUrl;
use super::rates::{ByteRate, RequestRate};
use super::rbd::RbdName;
use crate::access_list::AccessRule;
use crate::rate_limits::RateLimits;

/// Maximum length of an export name in bytes: the protocol allows 255 including the NUL (kernel
/// rnbd-proto.h, `NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 254;

/// Maximum length of an ID in bytes.
const ID_BYTES_MAX: usize = 255;
const WHAT: &str = "export";
/// The only option that may be repeated.
const ACCESS: &str = "access";
const FORMS: &str = "write [NAME=]PATH, mem:SIZE, null:SIZE, rbd:POOL/IMAGE or nbd://HOST/NAME";
/// Prefixes of targets that are not paths.
const SCHEMES: &[&str] = &["mem:", "null:", "rbd:", "nbd:", "nbds:", "nbd+unix:"];

/// Target of an export.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A regular file or a block device. Never begins with `mem:` or another scheme; such a
    /// relative path is stored with a leading `./`.
    Path(PathBuf),
    /// Memory, whose contents are lost when the server exits.
    Memory(u64),
    /// A null device: writes are discarded, reads return zeroes.
    Null(u64),
    /// An image in a Ceph cluster.
    Rbd(RbdName),
    /// An export of an NBD server.
    Nbd(NbdUrl),
}

impl FromStr for Target {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse =
            |problem: String, hint: &'static str| ValueError::new("target", text, problem, hint);
        let size = |size: &str| match size.parse::<ByteSize>() {
            Ok(size) => Ok(size.bytes()),
            Err(error) => Err(refuse(
                format!("is refused: {error}"),
                "write mem:SIZE or null:SIZE, or ./ in front of a path of that name",
            )),
        };
        if text.is_empty() {
            return Err(refuse("is empty".into(), FORMS));
        }
        if text.contains('\0') {
            return Err(refuse("contains a NUL".into(), "write the path without it"));
        }
        if let Some(rest) = text.strip_prefix("mem:") {
            size(rest).map(Self::Memory)
        } else if let Some(rest) = text.strip_prefix("null:") {
            size(rest).map(Self::Null)
        } else if let Some(rest) = text.strip_prefix("rbd:") {
            rest.parse().map(Self::Rbd)
        } else if text.starts_with("memory:") {
            let hint = "write mem:SIZE for memory, or ./ in front of a path of that name";
            Err(refuse("has an unknown scheme".into(), hint))
        } else if SCHEMES.iter().any(|scheme| text.starts_with(scheme)) {
            text.parse().map(Self::Nbd)
        } else {
            Ok(Self::Path(PathBuf::from(text)))
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Memory(size) => write!(f, "mem:{}", ByteSize::new(*size)),
            Self::Null(size) => write!(f, "null:{}", ByteSize::new(*size)),
            Self::Rbd(name) => write!(f, "rbd:{name}"),
            Self::Nbd(url) => write!(f, "{url}"),
        }
    }
}

choices! {
    /// The logical block size of an export.
    #[derive(Default)]
    pub enum BlockSize as "block-size" {
        /// The block device's own; 512 bytes for everything else.
        #[default]
        Auto = "auto",
        /// 512 bytes.
        B512 = "512",
        /// 4096 bytes.
        B4096 = "4096" | "4k",
    }
}

choices! {
    /// Whether a second client may write while a virtual machine moves.
    #[derive(Default)]
    pub enum Migration as "migration" {
        /// A second client that opens the export for migration may write.
        #[default]
        Allow = "allow",
        /// Opens for migration are refused.
        Deny = "deny",
    }
}

impl BlockSize {
    /// Size in bytes, or `None` if the target decides.
    #[must_use]
    pub const fn bytes(self) -> Option<u32> {
        match self {
            Self::Auto => None,
            Self::B512 => Some(512),
            Self::B4096 => Some(4096),
        }
    }
}

/// Fraction of requests to fail deliberately, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ErrorRate(u32);

impl ErrorRate {
    /// Returns the rate in failures per million requests, 0 to 1,000,000.
    #[must_use]
    pub const fn per_million(self) -> u32 {
        self.0
    }
}

impl FromStr for ErrorRate {
    type Err = ValueError;

    /// Parses a decimal fraction from 0 to 1 with up to six places: `0`, `0.001`, `1`.
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

rtrs_core::settings! {
    /// One export: a name for clients, what is behind it, and how it behaves.
    pub struct ExportSpec {
        /// Name that clients open, 1 to 254 bytes
        name: Option<String> = "the name of the file, image or NBD export, mem or null",
        /// Path of a regular file or block device, mem:SIZE, null:SIZE,
        /// rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT], nbd://HOST[:PORT]/NAME or
        /// nbd+unix:///NAME?socket=PATH
        target: Target = "null:0",
        /// Refuse writes
        ro: bool = "false",
        /// Bypass the page cache; auto bypasses it for block devices
        direct: AutoSwitch = "auto",
        /// Logical block size; auto is that of the block device, otherwise 512
        block_size: BlockSize = "auto",
        /// Export for writing even if the file system does not support locks (flock); take neither
        /// qemu's image locks nor the lock of the RBD image
        no_lock: bool = "false",
        /// Share the RBD image with gateways on other servers: one serves it, and the others can
        /// take over
        gateway: bool = "false",
        /// Ceph configuration file, for rbd:
        conf: Option<PathBuf> = "/etc/ceph/ceph.conf",
        /// Ceph user, without client., for rbd:
        user: Option<String> = "admin",
        /// Time limit for connecting to the cluster or NBD server, for rbd: and nbd:
        connect_timeout: Time<SECOND, { 10 * MINUTE }> = "15s",
        /// Allow or deny writes by a second client (access: migration)
        migration: Migration = "allow",
        /// Delay each request by this time; for tests
        delay: Time<0, { 10 * MINUTE }> = "0s",
        /// Fraction of requests that fail with EIO, 0 to 1; for tests
        error_rate: ErrorRate = "0",
        /// Limit on requests per second, for all clients together; see docs/how-to/limit.md
        iops: RequestRate = "none",
        /// Limit on reads per second
        iops_read: RequestRate = "none",
        /// Limit on writes, discards and write zeroes per second
        iops_write: RequestRate = "none",
        /// Limit on bytes per second, for all clients together
        bandwidth: ByteRate = "none",
        /// Limit on bytes read per second
        bandwidth_read: ByteRate = "none",
        /// Limit on bytes written per second
        bandwidth_write: ByteRate = "none",
        /// Unused allowance that an idle export accumulates, as time at each limit
        burst: Time<{ 10 * MILLISECOND }, MINUTE> = "100ms",
        /// Identify the export to clients by this text, 1 to 255 bytes; see
        /// docs/explanation/identity.md
        id: Option<Id> = "derived from the file or disk",
        /// Access list of this export, as WHO:ro or WHO:rw; by default, the server's list applies
        access: Vec<AccessRule> = "",
    }
}

/// Placeholder for a missing target.
const NO_TARGET: Target = Target::Null(0);

impl ExportSpec {
    /// Returns the path of the target, or of its cluster's configuration file.
    pub(crate) fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match &mut self.target {
            Target::Path(path) => Some(path),
            _ => self.conf.as_mut(),
        }
    }

    /// Creates an export of `target` with every option at its default.
    #[must_use]
    pub fn new(name: Option<String>, target: Target) -> Self {
        Self { name, target, ..Self::default() }
    }

    /// Name under which clients open the export: the configured one, or else that of the file,
    /// image or NBD export, or else `mem` or `null`.
    ///
    /// # Errors
    /// [`ValueError`] if the name is empty, too long or contains a NUL, or the path has no file
    /// name.
    pub fn resolved_name(&self) -> Result<String, ValueError> {
        let name = match (&self.name, &self.target) {
            (Some(name), _) => name.clone(),
            (None, Target::Memory(_)) => "mem".to_owned(),
            (None, Target::Null(_)) => "null".to_owned(),
            (None, Target::Path(path)) => file_name(path)?,
            (None, Target::Rbd(name)) => name.image.clone(),
            (None, Target::Nbd(url)) => url.name.clone(),
        };
        let refuse = |problem: String| {
            Err(ValueError::new(
                "export name",
                &name,
                problem,
                "use 1 to 254 bytes without NUL and .., as in vol0=/srv/vol0.img",
            ))
        };
        match name.len() {
            0 => refuse("is empty".into()),
            len if len > NAME_BYTES_MAX => refuse(format!("is {len} bytes long")),
            _ if name.contains('\0') => refuse("contains a NUL".into()),
            // OPEN refuses such a name, as the kernel does (rnbd-srv.c:process_msg_open).
            _ if name.contains("..") => refuse("contains .., and no client can open that".into()),
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

/// A character of the text form, and whether it was preceded by a backslash.
type Written = (char, bool);

/// Splits at unescaped commas.
fn split_fields(text: &str) -> Result<Vec<Vec<Written>>, ValueError> {
    let mut fields = vec![Vec::new()];
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let written = match c {
            ',' => {
                fields.push(Vec::new());
                continue;
            }
            '\\' => {
                let problem = "ends with a backslash that escapes nothing";
                let bare = || ValueError::new(WHAT, text, problem, "write \\\\ for a backslash");
                (chars.next().ok_or_else(bare)?, true)
            }
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

/// Whether the text before an equals sign is the beginning of a path or URL, not a name.
fn begins_path(field: &[Written]) -> bool {
    let begins = |start: &str| {
        start.chars().enumerate().all(|(at, c)| field.get(at).is_some_and(|w| *w == (c, false)))
    };
    ["/", "./", "../", "nbd://", "nbd+unix://"].into_iter().any(begins)
}

/// Splits a field at its first unescaped equals sign.
fn split_pair(field: &[Written]) -> Option<(&[Written], &[Written])> {
    let at = field.iter().position(|written| *written == ('=', false))?;
    Some((&field[..at], &field[at + 1..]))
}

impl FromStr for ExportSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse =
            |problem: String, hint: &'static str| Err(ValueError::new(WHAT, text, problem, hint));
        let fields = split_fields(text)?;
        let (head, options) = fields.split_first().map_or((&[][..], &[][..]), |(h, o)| (&**h, o));
        let (name, target) = match split_pair(head) {
            Some((name, target)) if !begins_path(name) => (Some(plain(name)), target),
            _ => (None, head),
        };
        if name.as_ref().is_some_and(String::is_empty) {
            return refuse("has an empty name".into(), "write NAME=TARGET, or only TARGET");
        }
        // After an escaped first letter, `mem:` or another scheme is the beginning of a file name.
        let literal = target.first().is_some_and(|(_, escaped)| *escaped);
        let target = plain(target);
        let target = if literal && SCHEMES.iter().any(|scheme| target.starts_with(scheme)) {
            format!("./{target}")
        } else {
            target
        };
        if target.is_empty() {
            return refuse("has no target".into(), FORMS);
        }
        let target = match target.parse() {
            Ok(target) => target,
            Err(error) => return refuse(format!("is refused: {error}"), FORMS),
        };
        let mut spec = Self::new(name, target);
        let options = grouped(options.iter().map(|option| pair(option)));
        if let Some((key, _)) = options.iter().find(|(key, all)| all.len() > 1 && key != ACCESS) {
            return refuse(format!("sets {key:?} twice"), "set it once");
        }
        for (key, values) in options {
            spec.set(text, &key, &values)?;
        }
        Ok(spec)
    }
}

/// Returns an option's name and value. Without an equals sign, it has no value; `rw` is the
/// opposite of `ro`.
fn pair(option: &[Written]) -> (String, Option<String>) {
    match split_pair(option) {
        Some((key, value)) => (plain(key), Some(plain(value))),
        None if plain(option) == "rw" => ("ro".to_owned(), Some("false".to_owned())),
        None => (plain(option), None),
    }
}

/// Values of each option, in order of the options' first occurrences.
type Options = Vec<(String, Vec<Option<String>>)>;

fn grouped(options: impl Iterator<Item = (String, Option<String>)>) -> Options {
    let mut all = Options::new();
    for (key, value) in options {
        match all.iter_mut().find(|(other, _)| *other == key) {
            Some((_, values)) => values.push(value),
            None => all.push((key, vec![value])),
        }
    }
    all
}

impl ExportSpec {
    /// Sets one option of the text form; `text` is the whole specification, for errors.
    fn set(&mut self, text: &str, key: &str, values: &[Option<String>]) -> Result<(), ValueError> {
        let mut option = SetOption { key, values, result: None };
        self.visit(&mut option);
        let (problem, hint) = match option.result {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if values.contains(&None) => (error, format!("write {key}=VALUE")),
            Some(Err(error)) => (error, format!("correct {key}, or leave it out")),
            None => {
                let all = describe::<Self>();
                let options = all.iter().map(|one| &*one.setting.name).filter(is_option);
                let hint = nearest(key, options.clone()).map_or_else(
                    || {
                        let options = options.collect::<Vec<_>>().join(", ");
                        format!("the options are {options}; write \\, for a comma in a path")
                    },
                    |near| format!("did you mean {near:?}?"),
                );
                (format!("has the unknown option {key:?}"), hint)
            }
        };
        Err(ValueError::new(WHAT, text, problem, hint))
    }

    /// Returns the export with changed options, each in the text form; `rw` undoes `ro`, and an
    /// empty `access=` removes the access list.
    ///
    /// # Errors
    /// [`ValueError`] for an unknown option, or an invalid value.
    pub fn with_options(&self, options: &[String]) -> Result<Self, ValueError> {
        let mut spec = self.clone();
        let fields: Result<Vec<_>, _> = options.iter().map(|text| split_fields(text)).collect();
        let pairs: Vec<_> = fields?.iter().flatten().map(|field| pair(field)).collect();
        for (key, values) in grouped(pairs.into_iter()) {
            if key == ACCESS && values == [Some(String::new())] {
                spec.access.clear();
                continue;
            }
            spec.set(&options.join(" "), &key, &values)?;
        }
        Ok(spec)
    }

    /// Returns the export with the options from `other` that can change while it is open.
    pub(crate) fn with_live_options(&self, other: &Self) -> Self {
        Self {
            ro: other.ro,
            iops: other.iops,
            iops_read: other.iops_read,
            iops_write: other.iops_write,
            bandwidth: other.bandwidth,
            bandwidth_read: other.bandwidth_read,
            bandwidth_write: other.bandwidth_write,
            burst: other.burst,
            access: other.access.clone(),
            ..self.clone()
        }
    }

    /// Rate limits of the export.
    pub(crate) fn rate_limits(&self) -> RateLimits {
        RateLimits {
            iops: self.iops.get(),
            iops_read: self.iops_read.get(),
            iops_write: self.iops_write.get(),
            bandwidth: self.bandwidth.get(),
            bandwidth_read: self.bandwidth_read.get(),
            bandwidth_write: self.bandwidth_write.get(),
            burst_ms: self.burst.millis(),
        }
    }

    /// Name under which clients open the export, once resolved.
    pub(crate) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }
}

fn is_option(name: &&str) -> bool {
    !["name", "target"].contains(name)
}

/// Visitor that sets one option of the text form.
struct SetOption<'a> {
    key: &'a str,
    values: &'a [Option<String>],
    result: Option<Result<(), String>>,
}

impl Visitor for SetOption<'_> {
    fn setting<F: Field>(&mut self, setting: &Setting, place: &mut F) {
        if self.key != setting.name || !is_option(&&*setting.name) {
            return;
        }
        let key = self.key;
        let flag = (setting.default == "false").then_some("true");
        let values = self.values.iter().map(|value| match value.as_deref().or(flag) {
            Some(text) => {
                text.parse::<F::Of>().map_err(|error| format!("has a bad {key}: {error}"))
            }
            None => Err(format!("has {key:?} without a value")),
        });
        let values = values.collect::<Result<Vec<_>, _>>();
        self.result = Some(values.map(|values| *place = F::made(values)));
    }

    fn section<S: Settings>(&mut self, _: &'static str, _: &mut S) {}
}

/// Text by which an operator identifies an export or a server: 1 to 255 bytes, compared as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Id(String);

impl Id {
    /// Returns the text.
    #[must_use]
    pub fn get(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Id {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem, hint| Err(ValueError::new("id", text, problem, hint));
        match text.len() {
            1..=ID_BYTES_MAX => Ok(Self(text.to_owned())),
            0 => refuse("is empty", "write 1 to 255 bytes, or leave it out"),
            _ => refuse("is too long", "write 1 to 255 bytes"),
        }
    }
}

impl Value for ExportSpec {
    const NAME: &'static str = "SPEC";
}

impl Serialize for ExportSpec {
    /// Writes the map form.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        print(self).serialize(serializer)
    }
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
        let Keys(spec) = Keys::<ExportSpec>::deserialize(MapAccessDeserializer::new(map))?;
        if spec.target == NO_TARGET {
            return Err(serde::de::Error::missing_field("target"));
        }
        Ok(spec)
    }
}

text_values! {
    Target, "TARGET", "a path, mem:SIZE, null:SIZE, rbd:POOL/IMAGE or an NBD URL";
    ErrorRate, "FRACTION", "a fraction from 0 to 1";
    Id, "TEXT", "a text of 1 to 255 bytes";
}

#[cfg(test)]
mod tests;
