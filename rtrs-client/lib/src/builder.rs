//! Opening of a volume.

use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use rtrs_client::embed::{EmbedOptions, EmbedPlan, EmbeddedVolume};
use rtrs_core::settings::{ByteSize, Time};

use crate::error::{Error, ErrorKind};
use crate::queue::Queue;
use crate::uri;
use crate::volume::Volume;

/// Settings of the library, which `attach` does not have.
const QUEUES: &str = "queues";
const QUEUE_DEPTH: &str = "queue-depth";
const IO_MAX: &str = "io-max";
const RETRY_FOR: &str = "retry-for";

/// Defaults of these settings.
const OPTIONS: EmbedOptions =
    EmbedOptions { queues: 1, queue_depth: 128, io_max: 1 << 20, retry_for: Duration::ZERO };

/// Settings of a volume to be opened.
///
/// ```no_run
/// use std::time::Duration;
///
/// # fn main() -> Result<(), rtrs::Error> {
/// let (volume, queues) = rtrs::Builder::new("vol0")
///     .path("tls://10.0.0.2")
///     .path("tls://10.1.0.2")
///     .set("tls-dir", "/etc/rtrs/tls")
///     .set("no-path", "fail")
///     .queues(4)
///     .retry_for(Duration::from_secs(10))
///     .open()?;
/// assert_eq!(queues.len(), 4);
/// # drop(volume);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Builder {
    export: String,
    /// Names and values, in the order in which they were set.
    settings: Vec<(String, String)>,
}

impl Builder {
    /// Creates the settings of a volume of this export; it needs at least one
    /// [`path`](Self::path).
    #[must_use]
    pub fn new(export: impl Into<String>) -> Self {
        Self { export: export.into(), settings: Vec::new() }
    }

    /// Creates the settings of a volume from a URI: the first path, the export, and settings.
    ///
    /// ```
    /// let uri = "tcp://10.0.0.1@10.0.0.2:1234/vol0?path=tcp://10.1.0.2&io-timeout=5s&queues=2";
    /// let same = rtrs::Builder::new("vol0")
    ///     .path("tcp://10.0.0.1@10.0.0.2:1234")
    ///     .path("tcp://10.1.0.2")
    ///     .set("io-timeout", "5s")
    ///     .queues(2);
    /// assert_eq!(rtrs::Builder::from_uri(uri), Ok(same));
    /// ```
    ///
    /// The export begins after the first slash of the path and may contain slashes. In export and
    /// values, `%` and two hexadecimal digits are a byte.
    ///
    /// # Errors
    /// [`ErrorKind::Settings`] if the text has another form. Values are checked by
    /// [`open`](Self::open).
    pub fn from_uri(text: &str) -> Result<Self, Error> {
        let uri::Parts { path, export, settings } = uri::parse(text)?;
        let builder = Self::new(export).path(path);
        Ok(settings.into_iter().fold(builder, |builder, (name, value)| builder.set(name, value)))
    }

    /// Adds a path to the server: `SCHEME://[SOURCE@]HOST[:PORT]` with the scheme tcp, tls or rdma.
    #[must_use]
    pub fn path(self, portal: impl Into<String>) -> Self {
        self.set("path", portal)
    }

    /// Sets a setting of a session, by its name in the reference of settings: all but `log` and
    /// `log-format`. Repeating `path` or `server-key` adds a value; of others the last one counts.
    #[must_use]
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Opens the volume read-only. By default it is writable, or read-only if the export is.
    #[must_use]
    pub fn read_only(self) -> Self {
        self.set("access", "ro")
    }

    /// Sets the number of queues, 1 by default. Each has an IO thread of the library, and a
    /// connection on each path.
    #[must_use]
    pub fn queues(self, count: u16) -> Self {
        self.set(QUEUES, count.to_string())
    }

    /// Sets the maximum number of requests in flight of each queue, 1 to 1024; 128 by default.
    #[must_use]
    pub fn queue_depth(self, requests: u16) -> Self {
        self.set(QUEUE_DEPTH, requests.to_string())
    }

    /// Sets the maximum number of bytes of a read or write, 4 KiB to 32 MiB in steps of 4 KiB;
    /// 1 MiB by default.
    #[must_use]
    pub fn io_max(self, bytes: u32) -> Self {
        self.set(IO_MAX, bytes.to_string())
    }

    /// Sets the time for attempts to open a volume that cannot be opened yet, for example because
    /// the server still has requests of an earlier session. By default there is one attempt.
    #[must_use]
    pub fn retry_for(self, time: Duration) -> Self {
        self.set(RETRY_FOR, format!("{}ms", time.as_millis()))
    }

    /// Separates the settings of the library from those of the session.
    fn plan(&self) -> Result<EmbedPlan, Error> {
        let (mut options, mut of_session) = (OPTIONS, Vec::new());
        for (name, value) in &self.settings {
            match name.as_str() {
                QUEUES => options.queues = parse(name, value)?,
                QUEUE_DEPTH => options.queue_depth = parse(name, value)?,
                IO_MAX => {
                    let size: ByteSize = parse(name, value)?;
                    options.io_max = u32::try_from(size.bytes()).unwrap_or(u32::MAX);
                }
                RETRY_FOR => options.retry_for = parse::<Time>(name, value)?.get(),
                _ => of_session.push((name.clone(), value.clone())),
            }
        }
        Ok(EmbedPlan::new(&self.export, &of_session, options)?)
    }

    /// Opens the volume. Returns its queues too. Waits at most 30 s longer than
    /// [`retry_for`](Self::retry_for), and at most as long as the system's resolver for names.
    ///
    /// # Errors
    /// [`ErrorKind::Settings`] with the setting, [`ErrorKind::Path`] with the reason of each path,
    /// [`ErrorKind::System`].
    pub fn open(&self) -> Result<(Volume, Vec<Queue>), Error> {
        let plan = self.plan()?;
        let (volume, users) = EmbeddedVolume::open(&plan)?;
        Ok(Volume::new(volume, users, &plan.options))
    }
}

fn parse<T: FromStr<Err: Display>>(name: &str, value: &str) -> Result<T, Error> {
    value.parse().map_err(|error| Error::new(ErrorKind::Settings, format!("{name}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_library_are_not_those_of_the_session() {
        let builder = Builder::new("vol0").path("tcp://h").read_only();
        assert_eq!(builder.plan().unwrap().options, OPTIONS);
        let builder = builder.queues(3).queue_depth(7).io_max(8192);
        let plan = builder.retry_for(Duration::from_millis(1500)).plan().unwrap();
        let expected = EmbedOptions {
            queues: 3,
            queue_depth: 7,
            io_max: 8192,
            retry_for: Duration::from_millis(1500),
        };
        assert_eq!((plan.options, &*plan.session.export_name), (expected, "vol0"));
    }

    #[test]
    fn invalid_values_name_their_setting() {
        for (name, value) in [
            ("queues", "many"),
            ("queue-depth", "0"),
            ("io-max", "1"),
            ("io-max", "5G"),
            ("retry-for", "soon"),
            ("io-timeout", "0"),
            ("path", "nowhere"),
        ] {
            let error = Builder::new("v").path("tcp://h").set(name, value).plan().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Settings, "{error}");
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }
}
