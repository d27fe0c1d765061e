//! The plan of `attach`: a session, and where it is served: as NBD, or as a block device.
//!
//! Owns [`AttachPlan`] and [`Front`].

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use nbd_bridge::kernel::{DeviceOptions, check_device};
use rtrs_core::config::{ByteSize, Shards};
use rtrs_core::local::{RunDir, SocketState, check_socket_path, socket_state};

use super::session::SessionPlan;
use super::{in_range, unsaid, usage};
use crate::cli::Output;
use crate::config::{Access, Device, NbdAddress, NoPath, Settings};
use crate::device;
use crate::error::{Error, ErrorKind};

const BUFFER_BYTES_MIN: u64 = 58 << 20;
const BUFFER_BYTES_MAX: u64 = 4 << 30;

/// Longest times of a device, in seconds.
const DEVICE_SECONDS_MAX: u64 = 86_400;
/// What the kernel waits for a request beyond the session's own bound, in seconds.
const DEVICE_SECONDS_MORE: u64 = 30;

/// Seconds that the kernel keeps requests for a process that takes over, if nothing else is said.
const TAKEOVER_SECONDS: u64 = 60;
/// So late the kernel may be: two looks at a request of a quick device, each up to 1.3 s, or one
/// after the bound of another, up to a second later; and some.
const RESENT_MARGIN: Duration = Duration::from_secs(5);
/// A device is not to be without good flushes for longer than this, whatever its time-out.
const RESENT_MAX: Duration = Duration::from_secs(300);

/// Where the session is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Front {
    /// A unix socket with this path, absolute, at most 107 bytes. A socket nobody listens on may
    /// lie there: remove it before binding.
    Socket(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
    /// A block device of the kernel.
    Device(DeviceOptions),
}

/// `attach`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachPlan {
    /// The session.
    pub session: SessionPlan,
    /// Where it is served.
    pub front: Front,
    /// Bytes of NBD buffers per shard, a multiple of 4096.
    pub buffer_bytes: u64,
    /// Stay in the foreground.
    pub foreground: bool,
    /// Whatever the session was pinned to, go on with what opens first.
    pub accept_new_identity: bool,
    /// Where the control socket lives: [`RunDir::control_socket`] of the export's name.
    pub run_dir: RunDir,
    /// For people or programs.
    pub output: Output,
}

impl Front {
    fn new(settings: &Settings, session: &SessionPlan) -> Result<Self, Error> {
        for (name, said) in
            [("takeover", settings.takeover), ("quick-takeover", settings.quick_takeover)]
        {
            if said == Some(true) && settings.device.is_none() {
                return Err(usage(format!("{name} is about a block device; use it with device")));
            }
        }
        match (settings.socket.clone(), settings.listen, settings.device) {
            (Some(path), None, None) => {
                let path = std::path::absolute(&path).map_err(|e| {
                    Error::with_source(ErrorKind::Usage, format!("socket {path:?} is no path"), e)
                })?;
                check_socket_path("socket", &path)?;
                Ok(Self::Socket(path))
            }
            (None, Some(address), None) => Ok(Self::Tcp(address.get())),
            (None, None, Some(device)) => {
                device_options(settings, device, session).map(Self::Device)
            }
            (None, None, None) => Err(usage(
                "none of device, socket and listen is said; use --device auto, --socket PATH or \
                 --listen ADDR:PORT",
            )),
            _ => Err(usage("more than one of device, socket and listen is said; use one of them")),
        }
    }
}

/// How the kernel is told to treat the device.
fn device_options(
    settings: &Settings,
    device: Device,
    session: &SessionPlan,
) -> Result<DeviceOptions, Error> {
    let (Some(takeover), Some(quick)) = (settings.takeover, settings.quick_takeover) else {
        return Err(unsaid());
    };
    let takeover = takeover || quick;
    if takeover && session.access == Access::Migration {
        return Err(usage(
            "takeover needs access that excludes other writers, since requests of the process that \
             died may still be under way; use access auto, rw or ro",
        ));
    }
    let usual_dead_s = if takeover { TAKEOVER_SECONDS } else { 0 };
    let dead_timeout_s = settings.device_dead_timeout_s.unwrap_or(usual_dead_s);
    let timeout_s = match (quick, settings.device_timeout_s) {
        (false, said) => Some(request_seconds(said, session)?),
        (true, None) => None,
        (true, Some(_)) => {
            return Err(usage(
                "with quick-takeover the kernel has no bound for a request, and device-timeout-s \
                 says one; drop one of them",
            ));
        }
    };
    Ok(DeviceOptions {
        choice: device.get(),
        timeout_s,
        dead_timeout_s: in_range("device-dead-timeout-s", dead_timeout_s, 0..=DEVICE_SECONDS_MAX)?,
        backend: device::backend(&session.session_name, &session.export_name),
        takeover,
    })
}

/// How long the kernel waits for a request, if `said` says so, or else as long as may be needed.
fn request_seconds(said: Option<u64>, session: &SessionPlan) -> Result<u64, Error> {
    // What an IO may take at most (`NoPath::io_age_max`). The kernel must not lose patience before:
    // what it sends again may overtake what follows.
    let io_ms = 2 * session.io_timeout_ms;
    let (bound_ms, usual_s) = match session.no_path {
        NoPath::Queue => (io_ms, DEVICE_SECONDS_MAX),
        NoPath::Fail => (io_ms, io_ms.div_ceil(1000) + DEVICE_SECONDS_MORE),
        NoPath::QueueFor(time) => {
            let bound_ms = io_ms + time.millis();
            (bound_ms, bound_ms.div_ceil(1000) + DEVICE_SECONDS_MORE)
        }
    };
    let usual_s = usual_s.min(DEVICE_SECONDS_MAX);
    let least_s = (bound_ms + 1000).div_ceil(1000).min(DEVICE_SECONDS_MAX);
    let timeout_s = said.unwrap_or(usual_s);
    if timeout_s < least_s {
        return Err(usage(format!(
            "device-timeout-s {timeout_s} is too short beside io-timeout-ms {} and no-path {}; \
             use {least_s} or more, or lower these",
            session.io_timeout_ms, session.no_path
        )));
    }
    in_range("device-timeout-s", timeout_s, 1..=DEVICE_SECONDS_MAX)
}

/// A quick takeover needs a device with one socket, and an IO stays on one shard.
fn quick_shards(shards: Shards) -> Result<Shards, Error> {
    match shards {
        Shards::Count(count) if count.get() > 1 => Err(usage(format!(
            "quick-takeover needs a device with one socket, which one shard serves; use it with \
             shards 1 instead of {count}"
        ))),
        _ => Ok(Shards::Count(NonZeroU16::MIN)),
    }
}

impl AttachPlan {
    /// Judges settings, laid over [`Settings::defaults`].
    pub(crate) fn new(name: &str, settings: Settings, output: Output) -> Result<Self, Error> {
        let settings = settings.over(Settings::defaults());
        let (Some(buffer_size), Some(foreground)) = (settings.buffer_size, settings.foreground)
        else {
            return Err(unsaid());
        };
        let bytes = buffer_size.bytes();
        if !(BUFFER_BYTES_MIN..=BUFFER_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(4096) {
            return Err(usage(format!(
                "buffer-size {buffer_size} is not usable; use 58M to 4G in steps of 4k"
            )));
        }
        let run_dir = RunDir::new(settings.run_dir.clone())?;
        check_socket_path("control socket", &run_dir.control_socket(name))?;
        let fronts = settings.clone();
        let mut session = SessionPlan::new(name, settings, Access::Auto)?;
        if fronts.quick_takeover == Some(true) {
            session.shards = quick_shards(session.shards)?;
        }
        let front = Front::new(&fronts, &session)?;
        let buffer_bytes = bytes;
        let accept_new_identity = false;
        Ok(Self { session, front, buffer_bytes, foreground, accept_new_identity, run_dir, output })
    }

    /// True when it takes a device over that another process has left, if there is one.
    pub(crate) fn takes_over(&self) -> bool {
        matches!(&self.front, Front::Device(options) if options.takeover)
    }

    /// How long to try to open the export: a session that takes over waits for the server to be
    /// done with that of the process that died.
    pub(crate) fn takeover_patience(&self) -> Duration {
        match &self.front {
            Front::Device(options) if options.takeover => {
                Duration::from_secs(options.dead_timeout_s)
            }
            _ => Duration::ZERO,
        }
    }

    /// How long, once the session is open, the kernel may send again what a process that died had
    /// taken: until the last of it is as old as the kernel waits for a request. A device of a quick
    /// takeover has no such bound; its requests come within three seconds.
    pub(crate) fn resent_for(&self) -> Duration {
        match &self.front {
            Front::Device(options) if options.takeover => {
                let bound = Duration::from_secs(options.timeout_s.unwrap_or(0));
                (bound + RESENT_MARGIN).min(RESENT_MAX)
            }
            _ => Duration::ZERO,
        }
    }

    /// The session's check; the run directory is ours; neither socket path is in use; the device
    /// is free, and the kernel and its privileges are there.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.run_dir.check()?;
        let name = &self.session.export_name;
        let control = self.run_dir.control_socket(name);
        if socket_state(&control)? == SocketState::InUse {
            let text = format!(
                "{name:?} is attached already (control socket {}); detach it first",
                control.display()
            );
            return Err(Error::new(ErrorKind::InUse, text));
        }
        if let Front::Socket(path) = &self.front
            && socket_state(path)? == SocketState::InUse
        {
            let text =
                format!("socket {} is in use by another process; use another path", path.display());
            return Err(Error::new(ErrorKind::InUse, text));
        }
        self.session.check()?;
        if let Front::Device(options) = &self.front {
            let what = device::cannot_attach(name, options.choice);
            check_device(options.choice, &options.backend).map_err(device::failed(what))?;
        }
        Ok(())
    }

    /// The settings that make this plan again, given the same name.
    pub(super) fn settings(&self) -> Settings {
        let front = match &self.front {
            Front::Socket(path) => Settings { socket: Some(path.clone()), ..Settings::default() },
            Front::Tcp(address) => {
                Settings { listen: Some(NbdAddress::new(*address)), ..Settings::default() }
            }
            Front::Device(options) => Settings {
                device: Some(Device::new(options.choice)),
                device_timeout_s: options.timeout_s,
                device_dead_timeout_s: Some(options.dead_timeout_s),
                takeover: Some(options.takeover),
                quick_takeover: Some(options.timeout_s.is_none()),
                ..Settings::default()
            },
        };
        let rest = Settings {
            foreground: Some(self.foreground),
            buffer_size: Some(ByteSize::new(self.buffer_bytes)),
            run_dir: Some(self.run_dir.path().to_path_buf()),
            ..self.session.settings()
        };
        front.over(rest)
    }
}
