//! The plan: validated settings with every default filled in.
//!
//! Owns [`Plan`]. [`Plan::new`] validates combinations of settings without accessing the system;
//! [`Plan::check`] then checks the resources that the plan needs, before the server allocates,
//! opens or listens. Every error names the setting, the value and a remedy.
//!
//! Created by the binary; read by the rest of the server.

pub(crate) mod partial;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::limits::CHUNK_SIZE_MIN;
use rtrs_core::local::{RunDir, check_socket_path, why_denied};
use rtrs_core::paths::make_absolute;
use rtrs_core::settings::{Auto, AutoSwitch, ByteSize, Portal, Scheme};
use rtrs_core::tls::{Clients, PrivateKey, TlsConfigError, TlsDir, TlsServerConfig};

use crate::error::{Error, ErrorKind};
use crate::plan::partial::Partial;
use crate::settings::{ExportSpec, OnMissing, SearchSpec, Settings, Target, exports_dir};

/// Bits of the immediate that hold a chunk's index and an offset in the chunk (docs/PROTOCOL.md,
/// the 32-bit immediate).
const IMM_PAYLOAD_BITS: u32 = 28;

/// Maximum number of symbolic links in a path, as in the kernel.
const LINKS_MAX: u32 = 40;

/// Valid chunk sizes, in bytes.
const CHUNK_BYTES: RangeInclusive<u64> = (8 << 10)..=(16 << 20);

/// Portals to listen on, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// TCP, plus RDMA if the host has a device for it, on every address and the default port.
    Auto,
    /// These portals: at least one, without duplicates.
    On(Vec<Portal>),
}

/// Everything the server does, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The settings. Each export has a unique name.
    pub settings: Settings,
    /// Portals to listen on.
    pub listen: Listen,
    /// Configuration file, if one was given.
    pub config: Option<PathBuf>,
    /// Dangling links in `exports-dir`.
    pub(crate) dangling: Vec<PathBuf>,
}

impl Plan {
    /// Validates settings.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for values that conflict, and for features that this build lacks.
    pub fn new(mut settings: Settings) -> Result<Self, Error> {
        let Settings { tls_dir, key_file, clients_file, exports_dir, .. } = &mut settings;
        make_absolute([tls_dir, key_file, clients_file, exports_dir]).map_err(|e| {
            let text = "cannot use tls-dir, key-file, clients-file or exports-dir";
            Error::with_source(ErrorKind::Usage, text, e)
        })?;
        settings.export.iter_mut().try_for_each(validate_export)?;
        let chunk_bytes = check_chunk_size(settings.chunk_size)?;
        check_immediate_bits(settings.queue_depth.get(), chunk_bytes)?;
        let plan = Self {
            listen: Listen::new(settings.listen.clone())?,
            settings,
            config: None,
            dangling: Vec::new(),
        };
        plan.check_tls_settings()?;
        plan.check_names()?;
        plan.check_pings()?;
        plan.check_control()?;
        let Settings { audit_log, audit_log_max, .. } = &plan.settings;
        if audit_log.is_none() && *audit_log_max != Settings::default().audit_log_max {
            return Err(usage("audit-log-max needs audit-log"));
        }
        Ok(plan)
    }

    /// Chunk size in bytes, a power of two.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        u32::try_from(self.settings.chunk_size.bytes()).unwrap_or(u32::MAX)
    }

    /// Refuses dangling links in `exports-dir`.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigFile`], naming the first link.
    pub(crate) fn complete(self) -> Result<Self, Error> {
        let Some(link) = self.dangling.first() else { return Ok(self) };
        let why = exports_dir::describe_dangling(link);
        let text = format!("{why}; restore the file, or remove the link");
        Err(Error::new(ErrorKind::ConfigFile, text))
    }

    /// Whether the server may start without some files in `exports-dir`. It may not if a missing
    /// file could hold the only access list, as the other exports would be open to everyone.
    pub(crate) fn may_lack_files(&self) -> bool {
        let set = &self.settings;
        let mut lists = set.export.iter().map(|spec| &spec.access).chain([&set.access]);
        set.on_missing != OnMissing::Refuse
            && (set.insecure_open || lists.any(|list| !list.is_empty()))
    }

    /// Checks the system without changing it: at least one export is configured (unless the server
    /// only answers pings); each target exists, has a valid type and size, and is readable (and
    /// writable, unless read-only), or the server may start without it; and RDMA is available if a
    /// portal needs it.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] if there are no exports, [`ErrorKind::Export`] for a target,
    /// [`ErrorKind::Listen`] for a portal, [`ErrorKind::InUse`] for a run directory.
    pub fn check(&self) -> Result<(), Error> {
        self.check_for_start()?;
        match self.settings.ping_only {
            true => Ok(()),
            false => Partial::open(&self.settings, check_export).enough(&self.settings).map(drop),
        }
    }

    /// Runs [`Self::check`] without the targets, which the server opens anyway and which may hang.
    ///
    /// # Errors
    /// Those of [`Self::check`].
    pub(crate) fn check_for_start(&self) -> Result<(), Error> {
        let set = &self.settings;
        // With `user`, the run directory belongs to that user.
        if let (Some(dir), None) = (&set.run_dir, &set.user) {
            RunDir::new(Some(dir.clone()))?.check()?;
        }
        self.load_tls()?;
        if set.ping_only {
            return self.listen.open_rdma().map(drop);
        }
        self.check_search_path()?;
        let later = set.search_path != SearchSpec::Off || set.exports_dir.is_some();
        if set.export.is_empty() && !later {
            return Err(usage("nothing to export; use --export PATH, or export: in the file"));
        }
        set.export.iter().try_for_each(|spec| check_below(spec, &set.search_path))?;
        self.listen.open_rdma().map(drop)
    }

    fn check_search_path(&self) -> Result<(), Error> {
        let SearchSpec::Below { prefix, .. } = &self.settings.search_path else { return Ok(()) };
        let text = |problem| format!("search-path {} {problem}", prefix.display());
        match fs::metadata(prefix) {
            Ok(meta) if meta.is_dir() => Ok(()),
            Ok(_) => {
                let text = text("is not a directory; use a directory or off");
                Err(Error::new(ErrorKind::Export, text))
            }
            Err(error) => {
                let text = text("cannot be read; create it or use off");
                Err(Error::with_source(ErrorKind::Export, text, error))
            }
        }
    }

    /// Whether certificates or keys are configured.
    pub(crate) fn has_tls(&self) -> bool {
        has_keys(&self.settings)
    }

    fn check_tls_settings(&self) -> Result<(), Error> {
        let Settings { tls_dir, key_file, clients_file, .. } = &self.settings;
        if tls_dir.is_some() && (key_file.is_some() || clients_file.is_some()) {
            return Err(usage("tls-dir excludes key-file and clients-file; leave one out"));
        }
        match (key_file, clients_file) {
            (Some(_), None) => return Err(usage("key-file needs clients-file")),
            (None, Some(_)) => return Err(usage("clients-file needs key-file")),
            _ => {}
        }
        let Listen::On(portals) = &self.listen else { return Ok(()) };
        match portals.iter().find(|portal| portal.scheme() == Scheme::Tls) {
            Some(portal) if !self.has_tls() => Err(usage(format!(
                "cannot listen on {portal}: TLS needs certificates or keys; set tls-dir, or \
                 key-file and clients-file"
            ))),
            _ => Ok(()),
        }
    }

    /// Reads the certificates or keys, if configured.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`], naming the file.
    pub(crate) fn load_tls(&self) -> Result<Option<TlsServerConfig>, Error> {
        load_tls(&self.settings)
    }

    /// Checks that the configured name results in a valid control socket path.
    fn check_control(&self) -> Result<(), Error> {
        let set = &self.settings;
        let run_dir = set.run_dir.clone().map(|dir| RunDir::new(Some(dir))).transpose()?;
        if let (Some(run_dir), Auto::Is(name)) = (run_dir, &set.name) {
            check_socket_path("control socket", &run_dir.server_socket(name.get()))?;
        }
        Ok(())
    }

    fn check_pings(&self) -> Result<(), Error> {
        let set = &self.settings;
        for (with, name) in [(set.ping_only, "ping-only"), (set.rping, "rping")] {
            if set.no_ping && with {
                return Err(usage(format!("{name} and no-ping are mutually exclusive; drop one")));
            }
        }
        Ok(())
    }

    fn check_names(&self) -> Result<(), Error> {
        let mut names: Vec<&str> = self.settings.export.iter().map(ExportSpec::name).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(usage(format!(
                "two exports have the name {:?}; rename one with NAME=TARGET",
                pair[0]
            ))),
            None => Ok(()),
        }
    }
}

/// Whether clients can authenticate, by certificates or keys.
pub(crate) fn has_keys(set: &Settings) -> bool {
    set.tls_dir.is_some() || set.key_file.is_some()
}

impl Listen {
    fn new(specs: Vec<Auto<Portal>>) -> Result<Self, Error> {
        if specs.is_empty() {
            return Err(usage("listen is empty; omit it or use auto"));
        }
        if specs == [Auto::Auto] {
            return Ok(Self::Auto);
        }
        let mut portals: Vec<Portal> = Vec::with_capacity(specs.len());
        for spec in specs {
            let Auto::Is(portal) = spec else {
                return Err(usage("listen mixes auto with portals; use one or the other"));
            };
            check_listen(&portal, &portals)?;
            portals.push(portal);
        }
        Ok(Self::On(portals))
    }

    /// Opens RDMA if a configured portal needs it.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`], naming what is missing on this host.
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

/// Refuses portals that no listener can use, and duplicates of those in `before`.
fn check_listen(portal: &Portal, before: &[Portal]) -> Result<(), Error> {
    if portal.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
        return Err(usage(format!("cannot listen on {portal}: {}", NoRdma::Feature)));
    }
    portal.check_listen().map_err(|e| Error::with_source(ErrorKind::Usage, "cannot listen", e))?;
    if portal.port() != 0 && before.contains(portal) {
        return Err(usage(format!("listen contains {portal} twice; drop one")));
    }
    Ok(())
}

/// Resolves the name of an export and validates the combination of its options.
pub(crate) fn validate_export(spec: &mut ExportSpec) -> Result<(), Error> {
    let name = spec
        .resolved_name()
        .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot export", e))?;
    let refuse = |problem: String| Err(usage(format!("export {name:?}: {problem}")));
    if let Target::Memory(bytes) | Target::Null(bytes) = spec.target {
        let block = u64::from(spec.block_size.bytes().unwrap_or(512));
        let size = ByteSize::new(bytes);
        if bytes == 0 || !bytes.is_multiple_of(block) {
            return refuse(format!(
                "size {size} is not a positive multiple of the block size, {block} bytes"
            ));
        }
        if bytes > i64::MAX.unsigned_abs() {
            return refuse(format!("size {size} is too large; use less than 8E"));
        }
    }
    if spec.direct == AutoSwitch::On && !matches!(spec.target, Target::Path(_)) {
        return refuse("direct=on needs a file or block device; leave it out".into());
    }
    if spec.gateway && (!matches!(spec.target, Target::Rbd(_)) || spec.ro || spec.no_lock) {
        return refuse(
            "gateway needs an rbd: target with a lock; leave out gateway, ro or no-lock".into(),
        );
    }
    match &spec.target {
        Target::Rbd(image) if spec.gateway && image.snapshot.is_some() => {
            return refuse("a snapshot has no lock to hand over; leave out gateway".into());
        }
        // A snapshot is read-only.
        Target::Rbd(image) => spec.ro |= image.snapshot.is_some(),
        _ if spec.conf.is_some() || spec.user.is_some() => {
            return refuse("conf and user are for rbd: targets; leave them out".into());
        }
        _ => {}
    }
    spec.name = Some(name);
    Ok(())
}

/// Hint for a missing file. Must not suggest creating one: an empty disk would replace lost data.
const MISSING: &str = "check the path, and whether its file system is mounted";
/// Problem with an empty file, which may be what remains of lost data.
const EMPTY: &str = "is empty; restore its data, or set its size if it is new";

/// Checks the target of an export.
pub(crate) fn check_export(spec: &ExportSpec) -> Result<(), Error> {
    let Target::Path(path) = &spec.target else { return Ok(()) };
    let refuse = |problem: String| {
        let text = format!("cannot export {:?}: {} {problem}", spec.name(), path.display());
        Err(Error::new(ErrorKind::Export, text))
    };
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let hint = if path.starts_with("/dev") { "check the name (lsblk)" } else { MISSING };
            return refuse(format!("does not exist; {hint}"));
        }
        Err(error) => return Err(inaccessible(spec, path, error)),
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
    let block = u64::from(spec.block_size.bytes().unwrap_or(512));
    if kind.is_file() && meta.len() == 0 {
        return refuse(EMPTY.to_owned());
    }
    if kind.is_file() && meta.len() < block {
        return refuse(format!(
            "has {} bytes, less than one block of {block}; enlarge it",
            meta.len()
        ));
    }
    probe(spec, path).map(drop).map_err(|error| inaccessible(spec, path, error))
}

/// Refuses an export with its own access list whose target is under the search path: the server's
/// list applies there, so other clients could open the same file under a different name.
///
/// # Errors
/// [`ErrorKind::Usage`], naming both.
pub(crate) fn check_below(spec: &ExportSpec, search: &SearchSpec) -> Result<(), Error> {
    let (Target::Path(path), SearchSpec::Below { prefix, .. }) = (&spec.target, search) else {
        return Ok(());
    };
    let (path, prefix) = (resolve(path, LINKS_MAX), resolve(prefix, LINKS_MAX));
    if spec.access.is_empty() || !path.starts_with(&prefix) {
        return Ok(());
    }
    Err(usage(format!(
        "export {:?} has an access list, but {} is below search-path, where only the server's list \
         applies; move the target out of {}, or use this list for the server",
        spec.name(),
        path.display(),
        prefix.display()
    )))
}

/// Resolves a path whose last components may be missing: the file may appear while the server runs.
fn resolve(path: &Path, links: u32) -> PathBuf {
    if let Ok(path) = fs::canonicalize(path) {
        return path;
    }
    let parent = path.parent().map(|parent| match parent.as_os_str().is_empty() {
        true => Path::new("."),
        false => parent,
    });
    let Some(parent) = parent else { return path.to_owned() };
    if let Ok(target) = fs::read_link(path)
        && links > 0
    {
        return resolve(&parent.join(target), links - 1);
    }
    let mut resolved = resolve(parent, links);
    match path.file_name() {
        Some(name) => resolved.push(name),
        // The path ends with `..`.
        None => {
            resolved.pop();
        }
    }
    resolved
}

/// Opens and closes the path with the permissions that the export needs: mode bits alone are not
/// sufficient (access lists, capabilities, read-only mounts).
fn probe(spec: &ExportSpec, path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(!spec.ro).open(path)
}

fn inaccessible(spec: &ExportSpec, path: &Path, error: io::Error) -> Error {
    let (rights, hint) = if spec.ro {
        ("read", "make it readable for this user")
    } else {
        ("read and written", "make it readable and writable for this user, or export it with ,ro")
    };
    let denied = (error.kind() == io::ErrorKind::PermissionDenied)
        .then(|| why_denied(path, !spec.ro))
        .flatten();
    let (name, path) = (spec.name(), path.display());
    let text = match denied {
        Some(why) => format!("cannot export {name:?}: {why}; {hint}"),
        None => format!("cannot export {name:?}: {path} cannot be {rights}; {hint}"),
    };
    Error::with_source(ErrorKind::Export, text, error)
}

/// Reads the certificates or keys, if configured. Refuses a certificate that no client would
/// accept.
///
/// # Errors
/// [`ErrorKind::Listen`], naming the file.
pub(crate) fn load_tls(settings: &Settings) -> Result<Option<TlsServerConfig>, Error> {
    let loaded = read_tls(settings)?;
    let checked = loaded.as_ref().map_or(Ok(None), TlsServerConfig::check_own);
    checked.map(|_| loaded).map_err(unusable)
}

/// Reads the certificates or keys, if configured, without checking that clients would accept the
/// certificate.
///
/// # Errors
/// [`ErrorKind::Listen`], naming the file.
pub(crate) fn read_tls(settings: &Settings) -> Result<Option<TlsServerConfig>, Error> {
    let Settings { tls_dir, key_file, clients_file, .. } = settings;
    let loaded = match (tls_dir, key_file, clients_file) {
        (Some(dir), ..) => TlsServerConfig::with_certificates(&TlsDir(dir.clone())),
        (None, Some(key), Some(clients)) => PrivateKey::read(key).and_then(|key| {
            let known = Clients::read(clients)?;
            refuse_own(&key, clients, &known)?;
            TlsServerConfig::with_keys(&key, known)
        }),
        _ => return Ok(None),
    };
    loaded.map(Some).map_err(unusable)
}

/// Refuses a list of clients that contains the server's own key.
fn refuse_own(key: &PrivateKey, path: &Path, known: &Clients) -> Result<(), TlsConfigError> {
    known.name_of(&key.public()).map_or(Ok(()), |name| {
        Err(TlsConfigError::Content {
            path: path.to_owned(),
            why: format!(
                "the key of {name} is the key of this server (key-file); replace it with the \
                 output of `rtrs-client key show` on the client"
            ),
        })
    })
}

/// Wraps an error that concerns certificates or keys.
pub(crate) fn unusable(error: TlsConfigError) -> Error {
    Error::with_source(ErrorKind::Listen, "bad certificates or keys", error)
}

fn usage(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Usage, text)
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

/// Checks the 28-bit rule: index and offset share the immediate's payload, so ceil(log2(depth)) +
/// log2(chunk) must not exceed 28.
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
        "queue-depth {queue_depth} with chunk-size {} needs {bits} bits, but the protocol has \
         {IMM_PAYLOAD_BITS}; use a queue-depth of at most {depth_max}{smaller}",
        ByteSize::new(u64::from(chunk_bytes))
    )))
}

#[cfg(test)]
mod tests;
