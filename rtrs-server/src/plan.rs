//! What will run: settings that were judged, with every default filled in.
//!
//! Owns [`Plan`]. [`Plan::new`] judges the settings by themselves and against each other without
//! looking at the system; [`Plan::check`] then looks at what the plan needs, before the server
//! allocates, opens or listens. Every error says which setting, which value and what would do.
//!
//! Called by the binary; read by the rest of the server, which never sees `Settings`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rtrs_core::config::{AutoSwitch, ByteSize, Portal, Scheme, Shards, Switch, check_log_filter};
use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::limits::CHUNK_SIZE_MIN;
use rtrs_core::local::{RunDir, check_socket_path};
use tracing_subscriber::EnvFilter;

use crate::config::{
    BlockSize, ErrorRate, ExportSpec, ListenSpec, SearchSpec, Settings, Target, check_id,
};
use crate::error::{Error, ErrorKind};

/// Bits of the immediate that hold a chunk's index and an offset in it (docs/PROTOCOL.md, the
/// 32-bit immediate).
const IMM_PAYLOAD_BITS: u32 = 28;

/// The name of a server that was given none.
const AUTO: &str = "auto";

/// Chunk sizes that may be asked for, in bytes.
const CHUNK_BYTES: RangeInclusive<u64> = (8 << 10)..=(16 << 20);

/// Everything the server does, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The exports, in the order written, names unique.
    pub exports: Vec<ExportPlan>,
    /// Where names are looked for that are not exported.
    pub search_path: SearchSpec,
    /// Where to listen.
    pub listen: Listen,
    /// Chunks per path.
    pub queue_depth: u16,
    /// Bytes per chunk, a power of two.
    pub chunk_bytes: u32,
    /// Threads that carry IO.
    pub shards: Shards,
    /// Whether shards are bound to CPUs.
    pub pin: AutoSwitch,
    /// A fresh key per request.
    pub always_invalidate: bool,
    /// Ask for the MPA CRC.
    pub crc: bool,
    /// Heartbeat period in milliseconds.
    pub heartbeat_ms: u64,
    /// Periods a heartbeat may stay unanswered.
    pub heartbeat_missed_max: u32,
    /// Time a handshake may take, in milliseconds.
    pub handshake_timeout_ms: u64,
    /// Connections in their handshake at once.
    pub half_open_max: u32,
    /// Sessions at once.
    pub sessions_max: u32,
    /// Time running requests have at shutdown, in milliseconds.
    pub shutdown_grace_ms: u64,
    /// Bound of the adaptive poll in microseconds; 0 never polls.
    pub poll_us: u32,
    /// Answer pings and nothing else.
    pub ping_only: bool,
    /// Answer no pings.
    pub no_ping: bool,
    /// Take connections without a word for rping's.
    pub rping: bool,
    /// What the server is called, if it was said.
    pub name: Option<String>,
    /// What clients know the server by, if it was said.
    pub server_id: Option<String>,
    /// Where its control socket is to live, if it was said.
    pub run_dir: Option<PathBuf>,
    /// Where it keeps what outlives it, if it was said.
    pub state_dir: Option<PathBuf>,
    /// Log filter that is known to parse.
    pub log: String,
}

/// Where to listen, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// TCP, and RDMA where the host has a device for it, on every address and the default port.
    Auto,
    /// On these, at least one, each once.
    On(Vec<Portal>),
}

/// One export, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportPlan {
    /// The name clients open, 1 to 254 bytes without NUL.
    pub name: String,
    /// What is behind it.
    pub target: Target,
    /// Refuse writes.
    pub read_only: bool,
    /// Open past the page cache; `Auto` for targets that are no paths.
    pub direct: AutoSwitch,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Time each request waits before it runs, in milliseconds.
    pub delay_ms: u64,
    /// Share of requests that fail.
    pub error_rate: ErrorRate,
    /// What clients know it by, if it was said.
    pub id: Option<String>,
}

impl Plan {
    /// Judges settings, laid over [`Settings::defaults`].
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a value out of its range, values that do not fit together, and
    /// what this build cannot do.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let Settings {
            export: Some(export),
            search_path: Some(search_path),
            listen: Some(listen),
            queue_depth: Some(queue_depth),
            chunk_size: Some(chunk_size),
            shards: Some(shards),
            pin: Some(pin),
            always_invalidate: Some(always_invalidate),
            crc: Some(crc),
            heartbeat_ms: Some(heartbeat_ms),
            heartbeat_missed_max: Some(heartbeat_missed_max),
            handshake_timeout_ms: Some(handshake_timeout_ms),
            half_open_max: Some(half_open_max),
            sessions_max: Some(sessions_max),
            shutdown_grace_ms: Some(shutdown_grace_ms),
            poll_us: Some(poll_us),
            ping_only: Some(ping_only),
            no_ping: Some(no_ping),
            rping: Some(rping),
            name: Some(name),
            server_id: Some(server_id),
            run_dir,
            state_dir,
            log: Some(log),
        } = settings.over(Settings::defaults())
        else {
            return Err(usage("a setting has neither a value nor a default"));
        };
        let plan = Self {
            exports: export.iter().map(ExportPlan::new).collect::<Result<_, _>>()?,
            search_path,
            listen: Listen::new(listen)?,
            queue_depth: in_range("queue-depth", u64::from(queue_depth), 1..=65535)?,
            chunk_bytes: check_chunk_size(chunk_size)?,
            shards,
            pin,
            always_invalidate: always_invalidate.is_on(),
            crc: crc.is_on(),
            heartbeat_ms: in_range("heartbeat-ms", heartbeat_ms, 10..=600_000)?,
            heartbeat_missed_max: in_range(
                "heartbeat-missed-max",
                u64::from(heartbeat_missed_max),
                1..=1000,
            )?,
            handshake_timeout_ms: in_range(
                "handshake-timeout-ms",
                handshake_timeout_ms,
                10..=600_000,
            )?,
            half_open_max: in_range("half-open-max", u64::from(half_open_max), 1..=65536)?,
            sessions_max: in_range("sessions-max", u64::from(sessions_max), 1..=65536)?,
            shutdown_grace_ms: in_range("shutdown-grace-ms", shutdown_grace_ms, 0..=600_000)?,
            poll_us: in_range("poll-us", u64::from(poll_us), 0..=10_000)?,
            ping_only,
            no_ping,
            rping,
            name: (name != AUTO).then_some(name),
            server_id: check_server_id(server_id)?,
            run_dir,
            state_dir,
            log,
        };
        check_immediate_bits(plan.queue_depth, plan.chunk_bytes)?;
        plan.check_names()?;
        plan.check_pings()?;
        plan.check_control()?;
        check_log_filter(&plan.log)
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot log", e))?;
        if let Err(error) = EnvFilter::try_new(&plan.log) {
            let text = format!("log filter {:?} is not understood; use info or debug", plan.log);
            return Err(Error::with_source(ErrorKind::Usage, text, error));
        }
        Ok(plan)
    }

    /// Looks at the system: something is exported (unless only pings are answered), each target is
    /// there, has the right kind and size, and may be read (and written, unless read-only), and
    /// RDMA is there if a portal wants it. Changes nothing.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] without exports, [`ErrorKind::Export`] for a target,
    /// [`ErrorKind::Listen`] for a portal, [`ErrorKind::InUse`] for a run directory.
    pub fn check(&self) -> Result<(), Error> {
        if let Some(dir) = &self.run_dir {
            RunDir::new(Some(dir.clone()))?.check()?;
        }
        if self.ping_only {
            return self.listen.open_rdma().map(drop);
        }
        self.check_search_path()?;
        if self.exports.is_empty() && self.search_path == SearchSpec::Off {
            return Err(usage("nothing to export; use --export PATH, or export: in the file"));
        }
        self.exports.iter().try_for_each(ExportPlan::check)?;
        self.listen.open_rdma().map(drop)
    }

    /// The settings that make this plan again, every one said.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            export: Some(self.exports.iter().map(ExportPlan::spec).collect()),
            search_path: Some(self.search_path.clone()),
            listen: Some(self.listen.specs()),
            queue_depth: Some(u32::from(self.queue_depth)),
            chunk_size: Some(ByteSize::new(u64::from(self.chunk_bytes))),
            shards: Some(self.shards),
            pin: Some(self.pin),
            always_invalidate: Some(Switch::from(self.always_invalidate)),
            crc: Some(Switch::from(self.crc)),
            heartbeat_ms: Some(self.heartbeat_ms),
            heartbeat_missed_max: Some(self.heartbeat_missed_max),
            handshake_timeout_ms: Some(self.handshake_timeout_ms),
            half_open_max: Some(self.half_open_max),
            sessions_max: Some(self.sessions_max),
            shutdown_grace_ms: Some(self.shutdown_grace_ms),
            poll_us: Some(self.poll_us),
            ping_only: Some(self.ping_only),
            no_ping: Some(self.no_ping),
            rping: Some(self.rping),
            name: Some(self.name.clone().unwrap_or_else(|| AUTO.to_owned())),
            server_id: Some(self.server_id.clone().unwrap_or_else(|| AUTO.to_owned())),
            run_dir: self.run_dir.clone(),
            state_dir: self.state_dir.clone(),
            log: Some(self.log.clone()),
        }
    }

    fn check_search_path(&self) -> Result<(), Error> {
        let SearchSpec::Below { prefix, .. } = &self.search_path else { return Ok(()) };
        let text = |problem| format!("search-path {} {problem}", prefix.display());
        match fs::metadata(prefix) {
            Ok(meta) if meta.is_dir() => Ok(()),
            Ok(_) => {
                let text = text("is no directory; name one, or off");
                Err(Error::new(ErrorKind::Export, text))
            }
            Err(error) => {
                let text = text("cannot be looked at; create it, or write off");
                Err(Error::with_source(ErrorKind::Export, text, error))
            }
        }
    }

    /// The control socket of the name that was said can be one.
    fn check_control(&self) -> Result<(), Error> {
        if self.name.as_deref() == Some("") {
            return Err(usage("name \"\" is empty; leave it out, or write auto"));
        }
        let run_dir = self.run_dir.clone().map(|dir| RunDir::new(Some(dir))).transpose()?;
        if let (Some(run_dir), Some(name)) = (run_dir, &self.name) {
            check_socket_path("control socket", &run_dir.server_socket(name))?;
        }
        Ok(())
    }

    fn check_pings(&self) -> Result<(), Error> {
        for (with, name) in [(self.ping_only, "ping-only"), (self.rping, "rping")] {
            if self.no_ping && with {
                return Err(usage(format!("{name} and no-ping exclude each other; leave one out")));
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), Error> {
        let mut names: Vec<&str> = self.exports.iter().map(|export| &*export.name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(usage(format!(
                "two exports have the name {:?}; give one another name, as in NAME=TARGET",
                pair[0]
            ))),
            None => Ok(()),
        }
    }
}

impl Listen {
    fn new(specs: Vec<ListenSpec>) -> Result<Self, Error> {
        if specs.is_empty() {
            return Err(usage("no portal to listen on; leave listen out, or write auto"));
        }
        if specs == [ListenSpec::Auto] {
            return Ok(Self::Auto);
        }
        let mut portals: Vec<Portal> = Vec::with_capacity(specs.len());
        for spec in specs {
            let ListenSpec::Portal(portal) = spec else {
                return Err(usage("listen says auto beside others; write one of them"));
            };
            check_listen(&portal, &portals)?;
            portals.push(portal);
        }
        Ok(Self::On(portals))
    }

    fn specs(&self) -> Vec<ListenSpec> {
        match self {
            Self::Auto => vec![ListenSpec::Auto],
            Self::On(portals) => portals.iter().cloned().map(ListenSpec::Portal).collect(),
        }
    }

    /// RDMA, if a portal was written that needs it.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`] with what is missing here.
    pub(crate) fn open_rdma(&self) -> Result<Option<Rdma>, Error> {
        let Self::On(portals) = self else { return Ok(None) };
        match portals.iter().find(|portal| portal.scheme() == Scheme::Rdma) {
            None => Ok(None),
            Some(portal) => Rdma::open().map(Some).map_err(|missing| {
                Error::with_source(ErrorKind::Listen, format!("cannot listen on {portal}"), missing)
            }),
        }
    }
}

/// Refuses what no listener can use, and what is among `before`.
fn check_listen(portal: &Portal, before: &[Portal]) -> Result<(), Error> {
    if portal.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
        return Err(usage(format!("cannot listen on {portal}: {}", NoRdma::Feature)));
    }
    portal.check_listen().map_err(|e| Error::with_source(ErrorKind::Usage, "cannot listen", e))?;
    if portal.port() != 0 && before.contains(portal) {
        return Err(usage(format!("listen names {portal} twice; name it once")));
    }
    Ok(())
}

/// An id as it was written, if it was.
fn checked_id(id: Option<&str>) -> Result<Option<String>, Error> {
    let checked = id.map(check_id).transpose();
    let checked = checked.map_err(|e| Error::with_source(ErrorKind::Usage, "cannot serve", e))?;
    Ok(checked.map(str::to_owned))
}

fn check_server_id(id: String) -> Result<Option<String>, Error> {
    checked_id(Some(id).filter(|id| id != AUTO).as_deref())
}

impl ExportPlan {
    fn new(spec: &ExportSpec) -> Result<Self, Error> {
        let name = spec
            .resolved_name()
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot export", e))?;
        let refuse = |problem: String| Err(usage(format!("export {name:?}: {problem}")));
        if let Target::Memory(size) | Target::Null(size) = spec.target {
            let block = u64::from(spec.block_size.bytes().unwrap_or(512));
            if size.bytes() == 0 || !size.bytes().is_multiple_of(block) {
                return refuse(format!(
                    "size {size} is not one or more blocks of {block} bytes; use a multiple"
                ));
            }
            if size.bytes() > i64::MAX.unsigned_abs() {
                return refuse(format!("size {size} is too large; use less than 8E"));
            }
            if spec.direct == AutoSwitch::On {
                return refuse("direct=on needs a file or block device; leave it out".into());
            }
        }
        Ok(Self {
            name,
            target: spec.target.clone(),
            read_only: spec.ro,
            direct: spec.direct,
            block_size: spec.block_size,
            delay_ms: in_range("delay", spec.delay.get(), 0..=600_000)?,
            error_rate: spec.error_rate,
            id: checked_id(spec.id.as_deref())?,
        })
    }

    fn spec(&self) -> ExportSpec {
        ExportSpec {
            ro: self.read_only,
            direct: self.direct,
            block_size: self.block_size,
            delay: rtrs_core::config::Millis::new(self.delay_ms),
            error_rate: self.error_rate,
            id: self.id.clone(),
            ..ExportSpec::new(Some(self.name.clone()), self.target.clone())
        }
    }

    fn check(&self) -> Result<(), Error> {
        let Target::Path(path) = &self.target else { return Ok(()) };
        let refuse = |problem: String| {
            let text = format!("cannot export {:?}: {} {problem}", self.name, path.display());
            Err(Error::new(ErrorKind::Export, text))
        };
        let meta = match fs::metadata(path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return refuse(
                    "does not exist; create it, for one with truncate -s 1G FILE".to_owned(),
                );
            }
            Err(error) => return Err(self.inaccessible(path, error)),
        };
        let kind = meta.file_type();
        if kind.is_dir() {
            return refuse("is a directory; export a file or block device in it".to_owned());
        }
        if !kind.is_file() && !kind.is_block_device() {
            return refuse(
                "is neither a regular file nor a block device; export one of these".to_owned(),
            );
        }
        let block = u64::from(self.block_size.bytes().unwrap_or(512));
        if kind.is_file() && meta.len() == 0 {
            return refuse("is empty; give it a size, for one with truncate -s 1G FILE".to_owned());
        }
        if kind.is_file() && meta.len() < block {
            return refuse(format!(
                "has {} bytes, less than one block of {block}; enlarge it",
                meta.len()
            ));
        }
        self.probe(path).map(drop).map_err(|error| self.inaccessible(path, error))
    }

    /// Opens and closes the path with the rights the export needs: mode bits alone do not tell
    /// (access lists, capabilities, read-only mounts).
    fn probe(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(!self.read_only).open(path)
    }

    fn inaccessible(&self, path: &Path, error: io::Error) -> Error {
        let rights = if self.read_only { "read" } else { "read and written" };
        let remedy = if self.read_only { "allow it" } else { "allow it, or add ,ro" };
        let text = format!(
            "cannot export {:?}: {} cannot be {rights}; {remedy}",
            self.name,
            path.display()
        );
        Error::with_source(ErrorKind::Export, text, error)
    }
}

fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
}

/// `value` as the narrower type, if it is in `range`. The ranges here all fit their types.
fn in_range<T: TryFrom<u64>>(
    key: &str,
    value: u64,
    range: RangeInclusive<u64>,
) -> Result<T, Error> {
    let (low, high) = (*range.start(), *range.end());
    T::try_from(value)
        .ok()
        .filter(|_| range.contains(&value))
        .ok_or_else(|| usage(format!("{key} {value} is out of range; use {low} to {high}")))
}

fn check_chunk_size(size: ByteSize) -> Result<u32, Error> {
    let bytes = size.bytes();
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| bytes.is_power_of_two() && CHUNK_BYTES.contains(&u64::from(*bytes)))
        .ok_or_else(|| {
            usage(format!(
                "chunk-size {size} is not usable; use a power of two from 8k to 16M, as in 128k"
            ))
        })
}

/// The 28-bit rule: index and offset share the immediate's payload, so
/// ceil(log2(depth)) + log2(chunk) must not exceed 28.
fn check_immediate_bits(queue_depth: u16, chunk_bytes: u32) -> Result<(), Error> {
    let chunk_bits = chunk_bytes.trailing_zeros();
    let depth_bits = u32::from(queue_depth).next_power_of_two().trailing_zeros();
    let bits = depth_bits + chunk_bits;
    if bits <= IMM_PAYLOAD_BITS {
        return Ok(());
    }
    let depth_max = (1_u32 << (IMM_PAYLOAD_BITS - chunk_bits)).min(65535);
    let chunk_max = 1 << (IMM_PAYLOAD_BITS - depth_bits);
    let smaller = if chunk_max < CHUNK_SIZE_MIN {
        String::new()
    } else {
        format!(", or a chunk-size of at most {}", ByteSize::new(u64::from(chunk_max)))
    };
    Err(usage(format!(
        "queue-depth {queue_depth} with chunk-size {} needs {bits} bits and the wire has \
         {IMM_PAYLOAD_BITS}; use a queue-depth of at most {depth_max}{smaller}",
        ByteSize::new(u64::from(chunk_bytes))
    )))
}

#[cfg(test)]
mod tests;
