//! Plan for a volume that a program uses in its own process.
//!
//! This module owns [`EmbedPlan`].

use std::fmt::Display;
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rtrs_core::settings::{ByteSize, Time};
use rtrs_core::settings::{Field, Setting, Settings as _, Shards, Visitor, describe, nearest};

use super::session::{NAME_BYTES_MAX, SessionPlan, default_session_name};
use crate::error::{Error, usage};
use crate::settings::{Access, SessionSettings};

/// Maximum number of requests in flight on a queue: as many as a shard takes.
pub const EMBED_DEPTH_MAX: u16 = 1024;
/// Minimum and maximum memory size of a request.
const IO_MAX: std::ops::RangeInclusive<u32> = 4096..=32 << 20;
/// Session settings that concern its process.
const OF_PROCESS: [&str; 2] = ["log", "log-format"];

/// Settings of an embedded volume that `attach` does not have.
const QUEUES: &str = "queues";
const QUEUE_DEPTH: &str = "queue-depth";
const QUEUE_IO_MAX: &str = "io-max";
const RETRY_FOR: &str = "retry-for";

/// Number of sessions that this process has planned.
static PLANNED: AtomicU32 = AtomicU32::new(0);

/// Parameters of an embedded volume that `attach` does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedOptions {
    /// Number of queues; each has a shard.
    pub queues: u16,
    /// Maximum number of requests in flight on each queue, 1 to [`EMBED_DEPTH_MAX`].
    pub queue_depth: u16,
    /// Maximum size of the memory of a request, 4 KiB to 32 MiB.
    pub io_max: u32,
    /// Time to keep trying to open a volume that the server does not yet let this session open.
    pub retry_for: Duration,
}

impl EmbedOptions {
    /// Assigns the value of a setting that is one of these options. Returns false for other
    /// settings.
    fn take(&mut self, name: &str, value: &str) -> Result<bool, Error> {
        match name {
            QUEUES => self.queues = parse(name, value)?,
            QUEUE_DEPTH => self.queue_depth = parse(name, value)?,
            QUEUE_IO_MAX => {
                let size: ByteSize = parse(name, value)?;
                self.io_max = u32::try_from(size.bytes()).unwrap_or(u32::MAX);
            }
            RETRY_FOR => self.retry_for = parse::<Time>(name, value)?.get(),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

fn parse<T: FromStr<Err: Display>>(name: &str, value: &str) -> Result<T, Error> {
    value.parse().map_err(|error| usage(format!("{name}: {error}")))
}

/// Validated settings of an embedded volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbedPlan {
    /// Session to use; its shards serve the queues.
    pub session: SessionPlan,
    /// Other parameters.
    pub options: EmbedOptions,
}

/// Visitor that assigns the values that were given for one setting.
struct Given<'a> {
    name: &'a str,
    texts: Vec<&'a str>,
    outcome: Option<Result<(), String>>,
}

impl Visitor for Given<'_> {
    fn setting<F: Field>(&mut self, setting: &Setting, value: &mut F) {
        if setting.name == self.name {
            let parsed: Result<Vec<F::Of>, _> =
                self.texts.iter().map(|text| text.parse::<F::Of>()).collect();
            let parsed = parsed.map(|values| *value = F::made(values));
            self.outcome = Some(parsed.map_err(|error| format!("{}: {error}", self.name)));
        }
    }

    fn section<S: rtrs_core::settings::Settings>(&mut self, _: &'static str, _: &mut S) {}
}

/// Returns session settings with these values. Repeated values of a list are combined; for other
/// settings, the last value counts.
fn settings_of(given: &[(String, String)]) -> Result<SessionSettings, Error> {
    let mut settings = SessionSettings::default();
    for (at, (name, _)) in given.iter().enumerate() {
        if OF_PROCESS.contains(&name.as_str()) {
            return Err(usage(format!("{name} concerns the process, not the session; drop it")));
        }
        if given[..at].iter().any(|(earlier, _)| earlier == name) {
            continue;
        }
        let texts = given.iter().filter(|(other, _)| other == name).map(|(_, text)| &**text);
        let mut assign = Given { name, texts: texts.collect(), outcome: None };
        settings.visit(&mut assign);
        assign.outcome.unwrap_or_else(|| Err(unknown(name))).map_err(usage)?;
    }
    Ok(settings)
}

fn unknown(name: &str) -> String {
    let known = describe::<SessionSettings>();
    let names = known.iter().map(|one| one.setting.name.as_str());
    match nearest(name, names.filter(|name| !OF_PROCESS.contains(name))) {
        Some(near) => format!("there is no setting {name}; did you mean {near}?"),
        None => format!("there is no setting {name}; see the settings of a session"),
    }
}

/// Default session name: unique among the sessions of this host, because several processes may open
/// the same export, and each of them several times.
fn unique_session_name(export: &str) -> String {
    let number = PLANNED.fetch_add(1, Ordering::Relaxed);
    let suffix = format!("-{}-{number}", std::process::id());
    let mut name = default_session_name(export);
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX - suffix.len()));
    name + &suffix
}

impl EmbedPlan {
    /// Validates the settings of a volume of this export: pairs of a name, as in the reference of
    /// session settings or of an option, and a value. `options` are the defaults of the options.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage), with the setting and a remedy.
    pub fn new(
        export: &str,
        given: &[(String, String)],
        mut options: EmbedOptions,
    ) -> Result<Self, Error> {
        let mut of_session = Vec::new();
        for (name, value) in given {
            if !options.take(name, value)? {
                of_session.push((name.clone(), value.clone()));
            }
        }
        let EmbedOptions { queues, queue_depth, io_max, .. } = options;
        let shards: Shards = queues
            .to_string()
            .parse()
            .map_err(|_| usage(format!("{queues} queues are not possible; use 1 to 1023")))?;
        if !(1..=EMBED_DEPTH_MAX).contains(&queue_depth) {
            let text = format!("queue-depth {queue_depth} is not usable; use 1 to 1024");
            return Err(usage(text));
        }
        if !IO_MAX.contains(&io_max) || !io_max.is_multiple_of(4096) {
            let text = format!("io-max {io_max} is not usable; use 4k to 32M in steps of 4k");
            return Err(usage(text));
        }
        let mut settings = settings_of(&of_session)?;
        settings.session_name.get_or_insert_with(|| unique_session_name(export));
        let session = SessionPlan::new(export, settings, shards, Access::Auto)?;
        Ok(Self { session, options })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: EmbedOptions =
        EmbedOptions { queues: 2, queue_depth: 8, io_max: 1 << 20, retry_for: Duration::ZERO };

    fn plan(given: &[(&str, &str)], options: EmbedOptions) -> Result<EmbedPlan, String> {
        let given: Vec<_> =
            given.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        EmbedPlan::new("vol", &given, options).map_err(|error| error.to_string())
    }

    #[test]
    fn lists_collect_their_values_and_other_settings_take_the_last_one() {
        let given = [
            ("path", "tcp://a"),
            ("io-timeout", "1s"),
            ("path", "tcp://b:7"),
            ("io-timeout", "2s"),
            ("read-only", "on"),
        ];
        let session = plan(&given, OPTIONS).unwrap().session;
        let paths: Vec<String> = session.settings.path.iter().map(ToString::to_string).collect();
        assert_eq!(paths.len(), 2, "{paths:?}");
        assert_eq!(session.settings.io_timeout.get(), Duration::from_secs(2));
        assert_eq!((session.access, session.shards.count()), (Access::Ro, 2));
    }

    #[test]
    fn options_are_not_settings_of_the_session() {
        let given = [
            ("queues", "3"),
            ("path", "tcp://a"),
            ("queue-depth", "7"),
            ("io-max", "8k"),
            ("retry-for", "1500ms"),
        ];
        let expected = EmbedOptions {
            queues: 3,
            queue_depth: 7,
            io_max: 8192,
            retry_for: Duration::from_millis(1500),
        };
        assert_eq!(plan(&given, OPTIONS).unwrap().options, expected);
        for (name, value) in [
            ("queues", "many"),
            ("queue-depth", "0"),
            ("io-max", "1"),
            ("io-max", "5G"),
            ("retry-for", "soon"),
        ] {
            let error = plan(&[("path", "tcp://h"), (name, value)], OPTIONS).unwrap_err();
            assert!(error.starts_with(name), "{error}");
        }
    }

    #[test]
    fn sessions_of_a_process_have_different_names() {
        let name = |given: &[_]| plan(given, OPTIONS).unwrap().session.session_name;
        assert_ne!(name(&[("path", "tcp://a")]), name(&[("path", "tcp://a")]));
        assert_eq!(name(&[("path", "tcp://a"), ("session-name", "s")]), "s");
        assert!(unique_session_name(&"x".repeat(NAME_BYTES_MAX)).len() <= NAME_BYTES_MAX);
    }

    #[test]
    fn invalid_settings_are_refused_with_a_remedy() {
        for (name, text, error) in [
            ("polcy", "round-robin", "there is no setting polcy; did you mean policy?"),
            ("policy", "best", "policy: "),
            ("log", "info", "log concerns the process"),
            ("path", "ftp://a", "path: "),
        ] {
            let found = plan(&[(name, text)], OPTIONS).unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
        let path = [("path", "tcp://a")];
        for (options, error) in [
            (EmbedOptions { queues: 0, ..OPTIONS }, "0 queues"),
            (EmbedOptions { queue_depth: 0, ..OPTIONS }, "queue-depth 0"),
            (EmbedOptions { queue_depth: 1025, ..OPTIONS }, "queue-depth 1025"),
            (EmbedOptions { io_max: 4095, ..OPTIONS }, "io-max 4095"),
            (EmbedOptions { io_max: 4097, ..OPTIONS }, "io-max 4097"),
        ] {
            let found = plan(&path, options).unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
    }
}
