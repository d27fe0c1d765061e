//! A volume's settings, and how it is opened.

use std::time::Duration;

use rtrs_client::embed::{EmbedOptions, EmbedPlan, EmbeddedVolume, VolumeUri};

use crate::error::Error;
use crate::queue::Queue;
use crate::volume::Volume;

/// Defaults for the options that sessions do not have.
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
    /// Creates the settings for a volume backed by this export; it needs at least one
    /// [`path`](Self::path).
    #[must_use]
    pub fn new(export: impl Into<String>) -> Self {
        Self { export: export.into(), settings: Vec::new() }
    }

    /// Creates a volume's settings from a URI with the first path, the export, and settings.
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
    /// The export begins after the first slash of the path and may contain slashes. In the export
    /// and the values, `%` followed by two hexadecimal digits encodes a byte.
    ///
    /// # Errors
    /// [`ErrorKind::Settings`](crate::ErrorKind::Settings) if `text` has a different form. Values
    /// are checked by [`open`](Self::open).
    pub fn from_uri(text: &str) -> Result<Self, Error> {
        let VolumeUri { path, export, settings } = text.parse()?;
        let builder = Self::new(export).path(path);
        Ok(settings.into_iter().fold(builder, |builder, (name, value)| builder.set(name, value)))
    }

    /// Adds a path to the server: `SCHEME://[SOURCE@]HOST[:PORT]` with the scheme tcp, tls or rdma.
    #[must_use]
    pub fn path(self, portal: impl Into<String>) -> Self {
        self.set("path", portal)
    }

    /// Sets a session setting, by its name in the settings reference: any but `log` and
    /// `log-format`. Repeating `path` or `server-key` adds a value; for others, the last value
    /// counts.
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

    /// Sets the number of queues, 1 by default. Each has its own IO thread in the library, and its
    /// own connection on each path.
    #[must_use]
    pub fn queues(self, count: u16) -> Self {
        self.set("queues", count.to_string())
    }

    /// Sets the maximum number of requests in flight on each queue, 1 to 1024; 128 by default.
    #[must_use]
    pub fn queue_depth(self, requests: u16) -> Self {
        self.set("queue-depth", requests.to_string())
    }

    /// Sets the maximum number of bytes in a read or write, 4 KiB to 32 MiB in steps of 4 KiB; 1
    /// MiB by default.
    #[must_use]
    pub fn io_max(self, bytes: u32) -> Self {
        self.set("io-max", bytes.to_string())
    }

    /// Sets how long to keep trying to open a volume that cannot be opened yet, for example because
    /// the server still has requests from an earlier session. By default, it is tried once.
    #[must_use]
    pub fn retry_for(self, time: Duration) -> Self {
        self.set("retry-for", format!("{}ms", time.as_millis()))
    }

    fn plan(&self) -> Result<EmbedPlan, Error> {
        Ok(EmbedPlan::new(&self.export, &self.settings, OPTIONS)?)
    }

    /// Opens the volume, and returns it with its queues. Waits at most 30 s longer than
    /// [`retry_for`](Self::retry_for), plus the time that the system's resolver takes.
    ///
    /// # Errors
    /// [`ErrorKind::Settings`](crate::ErrorKind::Settings) naming the setting,
    /// [`ErrorKind::Path`](crate::ErrorKind::Path) with the reason for each path,
    /// [`ErrorKind::System`](crate::ErrorKind::System).
    pub fn open(&self) -> Result<(Volume, Vec<Queue>), Error> {
        let plan = self.plan()?;
        let (volume, users) = EmbeddedVolume::open(&plan)?;
        Ok(Volume::new(volume, users, &plan.options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn settings_of_the_library_are_kept_apart_from_those_of_the_session() {
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
        for (name, value) in [("queues", "many"), ("io-timeout", "0"), ("path", "nowhere")] {
            let error = Builder::new("v").path("tcp://h").set(name, value).plan().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Settings, "{error}");
            assert!(error.to_string().starts_with(name), "{error}");
        }
    }
}
