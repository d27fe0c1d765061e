//! Plan for `attach`: a session and where its volumes are served.
//!
//! This module owns [`AttachPlan`] and [`Front`].

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nbd_bridge::Relays;
use nbd_bridge::kernel::{DeviceOptions, check_device};
use rtrs_core::local::{
    RunDir, SocketState, absolute_path, check_socket_path, check_tcp_address, socket_state,
};
use rtrs_core::paths::make_absolute;
use rtrs_core::settings::{Output, Shards, Time};
use rtrs_core::tls::TlsDir;

use super::device_name::{backend, cannot_attach, device_failed};
use super::session::{SessionPlan, check_name};
use crate::error::{Error, ErrorKind, usage};
use crate::settings::{
    Access, AttachSettings, BenchSettings, Device, NbdAddress, NbdTls, PlaceSettings,
    SessionSettings, Settings, SlowIo,
};

/// Placeholder for the volume name in the path of a socket.
pub(super) const NAME: &str = "{name}";

const BUFFER_BYTES_MIN: u64 = 58 << 20;
const BUFFER_BYTES_MAX: u64 = 4 << 30;

/// Maximum kernel timeout of a request.
const DEVICE_TIMEOUT_MAX: Duration = Duration::from_secs(86_400);
/// Margin by which the default kernel timeout exceeds the session's own limit.
const DEVICE_TIMEOUT_MORE: Duration = Duration::from_secs(30);

/// Default time for which the kernel holds requests for a successor process.
const TAKEOVER: Duration = Duration::from_secs(60);
/// Maximum delay before the kernel resends a request, beyond its timeout: with quick takeover, two
/// checks of up to 1.3 s each, otherwise one check up to a second late; plus a margin.
const RESENT_MARGIN: Duration = Duration::from_secs(5);
/// Maximum time for which a device may go without a successful flush, whatever its timeout.
const RESENT_MAX: Duration = Duration::from_secs(300);

/// Place where a volume is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Front {
    /// Unix socket with this absolute path of at most 107 bytes. A stale socket may exist there and
    /// must be removed before binding.
    Socket(PathBuf),
    /// TCP address.
    Tcp(SocketAddr),
    /// Kernel block device.
    Device(DeviceOptions),
    /// Unix socket for a virtual machine; the path is like that of `Socket`.
    VhostUser(PathBuf),
}

/// Validated settings of `attach`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachPlan {
    /// Session to attach.
    pub session: SessionPlan,
    /// Place where the volume is served.
    pub front: Front,
    /// Settings, including the defaults that depend on other settings. The buffer size is a
    /// multiple of 4096.
    pub settings: AttachSettings,
    /// Ignore the pinned identity and accept the identity that the first open reports.
    pub accept_new_identity: bool,
    /// Time limit for retries while no path connects or the server refuses the open.
    pub retry_for: Duration,
    /// Directory of the control socket: [`RunDir::control_socket`] of the volume's name.
    pub run_dir: RunDir,
    /// Output format: for people or for programs.
    pub output: Output,
    /// The service manager passed the front end's socket.
    pub is_activated: bool,
    /// Further volumes of the same session, each with its own front end and an empty `more`.
    pub more: Vec<Self>,
}

impl Front {
    fn new(settings: &AttachSettings, session: &SessionPlan) -> Result<Self, Error> {
        check_device_settings(settings)?;
        for (name, is_set) in [
            ("socket-mode", settings.socket_mode.is_some()),
            ("socket-owner", settings.socket_owner.is_some()),
        ] {
            if is_set && settings.socket.is_none() && settings.vhost_user.is_none() {
                return Err(usage(format!("{name} needs a unix socket; set socket too")));
            }
        }
        if settings.queues.is_some() && settings.vhost_user.is_none() {
            return Err(usage("queues needs a virtual machine; set vhost-user too"));
        }
        check_nbd_tls(settings)?;
        check_open_to_others(settings)?;
        let AttachSettings { socket, listen, device, vhost_user, .. } = settings;
        match (socket, listen, device, vhost_user) {
            (Some(path), None, None, None) => socket_path("socket", path).map(Self::Socket),
            (None, Some(address), None, None) => Ok(Self::Tcp(address.get())),
            (None, None, Some(device), None) => {
                device_options(settings, *device, session).map(Self::Device)
            }
            (None, None, None, Some(path)) => {
                check_vhost_user(settings)?;
                socket_path("vhost-user", path).map(Self::VhostUser)
            }
            (None, None, None, None) => Err(usage(
                "choose where to attach: --device auto, --socket PATH, --listen ADDR:PORT or \
                 --vhost-user PATH",
            )),
            _ => {
                Err(usage("device, socket, listen and vhost-user cannot be combined; set only one"))
            }
        }
    }
}

/// Returns the absolute path of a socket.
fn socket_path(setting: &str, path: &Path) -> Result<PathBuf, Error> {
    let path = absolute_path(setting, path)?;
    check_socket_path(setting, &path)?;
    Ok(path)
}

/// Rejects settings that a virtual machine's device does not support: its requests do not wait for
/// earlier ones that may still be running on the server.
fn check_vhost_user(settings: &AttachSettings) -> Result<(), Error> {
    if slow_io(settings) == SlowIo::Fail {
        return Err(usage("vhost-user does not support slow-io fail; use slow-io wait"));
    }
    Ok(())
}

/// Rejects device settings without a device.
fn check_device_settings(settings: &AttachSettings) -> Result<(), Error> {
    for (name, is_set) in [
        ("takeover", settings.takeover),
        ("quick-takeover", settings.quick_takeover),
        ("device-timeout", settings.device_timeout.is_some()),
        ("device-dead-timeout", settings.device_dead_timeout.is_some()),
    ] {
        if is_set && settings.device.is_none() {
            return Err(usage(format!("{name} needs a block device; set device too")));
        }
    }
    Ok(())
}

/// Rejects TLS for NBD clients without a TCP address or without certificates, and TLS certificates
/// without TLS.
fn check_nbd_tls(settings: &AttachSettings) -> Result<(), Error> {
    let AttachSettings { nbd_tls, nbd_tls_dir, listen, .. } = settings;
    match (nbd_tls.mode(), nbd_tls_dir) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(usage("nbd-tls-dir needs nbd-tls; set nbd-tls require, or on")),
        (Some(_), _) if listen.is_none() => Err(usage(format!(
            "nbd-tls {nbd_tls} needs a TCP address; set listen too, or omit nbd-tls"
        ))),
        (Some(_), None) => Err(usage(format!(
            "nbd-tls {nbd_tls} needs certificates; set nbd-tls-dir to a directory with \
             ca-cert.pem, server-cert.pem and server-key.pem"
        ))),
        (Some(_), Some(_)) => Ok(()),
    }
}

/// Rejects NBD in clear text without authentication on an address that other hosts can reach.
fn check_open_to_others(settings: &AttachSettings) -> Result<(), Error> {
    let Some(address) = settings.listen.map(NbdAddress::get) else { return Ok(()) };
    let is_local = address.ip().to_canonical().is_loopback();
    if is_local || settings.insecure_open || settings.nbd_tls == NbdTls::Require {
        return Ok(());
    }
    Err(usage(format!(
        "listen {address} would let every host that can connect read and write in clear text; set \
         nbd-tls require with nbd-tls-dir, listen on 127.0.0.1, or accept this with insecure-open"
    )))
}

/// Treatment of a request that takes too long. After a takeover, the kernel repeats a dead
/// process's requests only once they are as old as its timeout, so a takeover needs a finite
/// timeout.
fn slow_io(settings: &AttachSettings) -> SlowIo {
    let bounded = settings.takeover && !settings.quick_takeover;
    settings.slow_io.unwrap_or(if bounded { SlowIo::Fail } else { SlowIo::Wait })
}

/// Socket path of a volume. The name is encoded as in file names of the run directory.
fn socket_of(path: &Path, run_dir: &RunDir, name: &str) -> PathBuf {
    let control = run_dir.control_socket(name);
    let stem = control.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    path.to_str().map_or_else(|| path.to_owned(), |path| path.replace(NAME, &stem).into())
}

/// Checks that the directory of a socket exists.
fn check_directory(socket: &Path) -> Result<(), Error> {
    let Some(parent) = socket.parent() else { return Ok(()) };
    let text = || format!("cannot serve the socket {}", socket.display());
    let found = std::fs::metadata(parent).map_err(|error| {
        let (text, dir) = (text(), parent.display());
        if error.kind() == io::ErrorKind::NotFound {
            let text = format!("{text}: the directory {dir} does not exist; create it");
            return Error::new(ErrorKind::InUse, text);
        }
        Error::with_source(ErrorKind::InUse, format!("{text}: directory {dir}"), error)
    })?;
    if found.is_dir() {
        return Ok(());
    }
    let text = format!("{}: {} is not a directory", text(), parent.display());
    Err(Error::new(ErrorKind::InUse, text))
}

/// Checks that an address can be listened on.
fn check_address(address: SocketAddr) -> Result<(), Error> {
    check_tcp_address(address).map_err(|error| {
        let text = format!("cannot serve NBD on {address}");
        Error::with_source(ErrorKind::InUse, text, error)
    })
}

/// Device options for the kernel.
fn device_options(
    settings: &AttachSettings,
    device: Device,
    session: &SessionPlan,
) -> Result<DeviceOptions, Error> {
    let quick = settings.quick_takeover;
    let takeover = settings.takeover || quick;
    if takeover && session.access == Access::Migration {
        return Err(usage(
            "takeover needs an access mode that excludes other writers, because requests of the \
             dead process may still be running; use access auto, rw or ro",
        ));
    }
    let usual_dead = if takeover { TAKEOVER } else { Duration::ZERO };
    let dead_timeout = settings.device_dead_timeout.map_or(usual_dead, Time::get);
    let timeout_s = match (quick, settings.device_timeout) {
        (false, set) => Some(request_seconds(set.map(Time::get), slow_io(settings), session)?),
        (true, None) => None,
        (true, Some(_)) => {
            return Err(usage(
                "quick-takeover and device-timeout cannot be combined, because the kernel then has \
                 no timeout; drop one",
            ));
        }
    };
    Ok(DeviceOptions {
        choice: device.get(),
        timeout_s,
        dead_timeout_s: whole_seconds(dead_timeout),
        backend: backend(&session.session_name, &session.name),
        takeover,
    })
}

/// Kernel timeout for a request: `set` if given, otherwise as long as a request may take.
pub(super) fn request_seconds(
    set: Option<Duration>,
    slow_io: SlowIo,
    session: &SessionPlan,
) -> Result<u64, Error> {
    let SessionSettings { io_timeout, no_path, .. } = &session.settings;
    // Maximum time of an IO. The kernel must not give up earlier: requests that it resends may
    // overwrite later ones.
    let bound = no_path.io_age_max(io_timeout.get());
    // With a slow disk, a request may take arbitrarily long.
    let usual_bound = bound.filter(|_| slow_io == SlowIo::Fail);
    let usual = usual_bound.map_or(DEVICE_TIMEOUT_MAX, |bound| bound + DEVICE_TIMEOUT_MORE);
    let least = bound.unwrap_or_else(|| io_timeout.get() * 2) + Duration::from_secs(1);
    let least = whole_seconds(least.min(DEVICE_TIMEOUT_MAX));
    let seconds = whole_seconds(set.unwrap_or_else(|| usual.min(DEVICE_TIMEOUT_MAX)));
    if seconds < least {
        return Err(usage(format!(
            "device-timeout {seconds}s is too short for io-timeout {io_timeout} and no-path \
             {no_path}; use {least}s or more, or lower these"
        )));
    }
    Ok(seconds)
}

/// Rounds up to seconds, the kernel's unit.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Number of shards for a quick takeover: one, because the device has only one socket and an IO
/// stays on one shard.
fn quick_shards(shards: Shards) -> Result<Shards, Error> {
    match shards {
        Shards::Is(count) if count.get() > 1 => Err(usage(format!(
            "quick-takeover needs one shard, because its device has one socket; use shards 1 \
             instead of {count}"
        ))),
        _ => Ok(Shards::ONE),
    }
}

impl AttachPlan {
    pub(crate) fn new(name: &str, settings: Settings, output: Output) -> Result<Self, Error> {
        let (mut set, run_dir) = (settings.attach, RunDir::new(settings.place.run_dir)?);
        set.export = set.export.filter(|export| export != name);
        if set.export.is_some() {
            check_name("volume name", name)?;
        }
        // These files are reread after the process has moved to the background.
        make_absolute([&mut set.nbd_tls_dir])
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot use nbd-tls-dir", e))?;
        let size = set.buffer_size;
        let bytes = size.bytes();
        if !(BUFFER_BYTES_MIN..=BUFFER_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(4096) {
            return Err(usage(format!(
                "buffer-size {size} is not usable; use 58M to 4G in steps of 4k"
            )));
        }
        check_socket_path("control socket", &run_dir.control_socket(name))?;
        for path in [&mut set.socket, &mut set.vhost_user] {
            *path = path.take().map(|path| socket_of(&path, &run_dir, name));
        }
        if set.quick_takeover {
            set.shards = quick_shards(set.shards)?;
        }
        let session = SessionPlan::new(name, settings.session, set.shards, Access::Auto)?
            .with_export(set.export.as_deref())?;
        set.slow_io = Some(slow_io(&set));
        let front = Front::new(&set, &session)?;
        match &front {
            Front::Socket(path) => set.socket = Some(path.clone()),
            Front::VhostUser(path) => set.vhost_user = Some(path.clone()),
            Front::Tcp(_) => {}
            Front::Device(options) => {
                set.takeover = options.takeover;
                set.device_timeout = options.timeout_s.map(Duration::from_secs).map(Time::new);
                let dead = Duration::from_secs(options.dead_timeout_s);
                set.device_dead_timeout = Some(Time::new(dead));
            }
        }
        let (accept_new_identity, retry_for, more) = (false, Duration::ZERO, Vec::new());
        Ok(Self {
            session,
            front,
            settings: set,
            accept_new_identity,
            retry_for,
            run_dir,
            output,
            is_activated: false,
            more,
        })
    }

    /// Returns the TLS setup for at most `clients` NBD clients, if the plan offers TLS.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Path`], which names the file.
    pub(crate) fn nbd_tls(&self, clients: usize) -> Result<Option<Arc<Relays>>, Error> {
        let AttachSettings { nbd_tls, nbd_tls_dir, .. } = &self.settings;
        let (Some(mode), Some(dir)) = (nbd_tls.mode(), nbd_tls_dir) else { return Ok(None) };
        let relays = Relays::new(mode, TlsDir(dir.clone()), clients);
        relays.map(Some).map_err(|error| {
            Error::with_source(ErrorKind::Path, "cannot serve NBD over TLS", error)
        })
    }

    /// Treatment of a request that takes too long on a working path.
    pub(crate) fn slow_io(&self) -> SlowIo {
        self.settings.slow_io.unwrap_or_default()
    }

    /// Whether access `migration` is to become exclusive: requests of a virtual machine wait for
    /// that, unlike those of NBD clients, which may write beside the other session.
    pub(crate) fn promotes(&self) -> bool {
        matches!(self.front, Front::VhostUser(_)) && self.session.access == Access::Migration
    }

    /// Whether the volume takes over the device that a dead process left behind, if any.
    pub(crate) fn takes_over(&self) -> bool {
        matches!(&self.front, Front::Device(options) if options.takeover)
    }

    /// Time limit for attempts to open the export. In a takeover, the session waits until the
    /// server has ended the session of the dead process.
    pub(crate) fn open_patience(&self) -> Duration {
        let takeover = match &self.front {
            Front::Device(options) if options.takeover => {
                Duration::from_secs(options.dead_timeout_s)
            }
            _ => Duration::ZERO,
        };
        takeover.max(self.retry_for)
    }

    /// Time after the open during which the kernel may repeat requests of a dead process: until the
    /// last of them is as old as the kernel's timeout. A device with quick takeover has no such
    /// timeout; its requests are repeated within three seconds.
    pub(crate) fn resent_for(&self) -> Duration {
        match &self.front {
            Front::Device(options) if options.takeover => {
                let bound = Duration::from_secs(options.timeout_s.unwrap_or(0));
                (bound + RESENT_MARGIN).min(RESENT_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// Checks the session and the run directory, and for each volume that neither socket path is in
    /// use and that the device is free and usable with this kernel and these privileges.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.run_dir.check()?;
        self.volumes().try_for_each(Self::check_sockets)?;
        self.session.check_local()?;
        self.check_paths()?;
        self.volumes().try_for_each(Self::check_front)
    }

    /// Checks that the session has as many paths as it requires.
    fn check_paths(&self) -> Result<(), Error> {
        let paths = self.session.settings.path.len();
        let required = self.settings.require_paths.of(paths);
        if required <= paths {
            return Ok(());
        }
        Err(usage(format!(
            "require-paths is {required}, and the session has {paths} paths; use all, or a \
             smaller number"
        )))
    }

    /// Checks that neither socket path of the volume is in use.
    fn check_sockets(&self) -> Result<(), Error> {
        let name = &self.session.name;
        let control = self.run_dir.control_socket(name);
        if socket_state(&control)? == SocketState::InUse {
            let text = format!(
                "{name:?} is already attached (control socket {}); see `list`; attach this export \
                 under another name with --as NAME, or detach the other first",
                control.display()
            );
            return Err(Error::new(ErrorKind::InUse, text));
        }
        if let Front::Socket(path) | Front::VhostUser(path) = &self.front
            && !self.is_activated
            && socket_state(path)? == SocketState::InUse
        {
            let text =
                format!("socket {} is in use by another process; use another path", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        if let Some(owner) = &self.settings.socket_owner {
            owner.numbers().map_err(|error| {
                let text = format!("socket-owner {owner} is not known here");
                Error::with_source(ErrorKind::Usage, text, error)
            })?;
        }
        Ok(())
    }

    /// Checks that the volume's certificates and device can be used.
    fn check_front(&self) -> Result<(), Error> {
        self.nbd_tls(1)?;
        if let Front::Device(options) = &self.front {
            let what = cannot_attach(&self.session.name, options.choice);
            check_device(options.choice, &options.backend).map_err(device_failed(what))?;
        }
        Ok(())
    }

    /// Runs the part of [`check`](Self::check) that applies to a volume of a running session.
    pub(crate) fn check_volume(&self) -> Result<(), Error> {
        self.check_sockets()?;
        self.check_front()
    }

    /// Runs [`check`](Self::check), and also checks what would otherwise show only at startup: that
    /// the host of at least one path has an address, that the socket's directory exists, and that
    /// the address is free.
    pub(crate) fn check_start(&self) -> Result<(), Error> {
        self.check()?;
        self.session.check()?;
        let made = self.volumes().filter(|volume| !volume.is_activated);
        made.map(|volume| &volume.front).try_for_each(|front| match front {
            Front::Socket(path) | Front::VhostUser(path) => check_directory(path),
            Front::Tcp(address) => check_address(*address),
            Front::Device(_) => Ok(()),
        })
    }

    /// Returns the settings of a session that is not served anywhere.
    pub(crate) fn printed_nowhere(name: &str, mut settings: Settings) -> Result<Settings, Error> {
        check_device_settings(&settings.attach)?;
        let run_dir = RunDir::new(settings.place.run_dir)?.path().to_path_buf();
        let shards = settings.attach.shards;
        let session = SessionPlan::new(name, settings.session, shards, Access::Auto)?;
        settings.attach.slow_io = Some(slow_io(&settings.attach));
        let place = PlaceSettings { run_dir: Some(run_dir) };
        let bench = BenchSettings::default();
        Ok(Settings { session: session.settings, attach: settings.attach, place, bench })
    }

    /// Returns the settings from which this plan can be recreated, given the same name.
    pub(crate) fn printed(&self) -> Settings {
        let run_dir = Some(self.run_dir.path().to_path_buf());
        Settings {
            session: self.session.settings.clone(),
            attach: self.settings.clone(),
            place: PlaceSettings { run_dir },
            bench: BenchSettings::default(),
        }
    }
}
