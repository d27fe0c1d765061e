//! The plan of `attach`: a session, and where it is served as NBD.
//!
//! Owns [`AttachPlan`] and [`Front`].

use std::net::SocketAddr;
use std::path::PathBuf;

use rtrs_core::config::ByteSize;

use super::place::{RunDir, SocketState, check_socket_path, socket_state};
use super::session::SessionPlan;
use super::{unsaid, usage};
use crate::config::{Access, NbdAddress, Settings};
use crate::error::{Error, ErrorKind};

const BUFFER_BYTES_MIN: u64 = 58 << 20;
const BUFFER_BYTES_MAX: u64 = 4 << 30;

/// Where NBD is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Front {
    /// A unix socket with this path, absolute, at most 107 bytes. A socket nobody listens on may
    /// lie there: remove it before binding.
    Socket(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

/// `attach`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachPlan {
    /// The session.
    pub session: SessionPlan,
    /// Where NBD is served.
    pub front: Front,
    /// Bytes of NBD buffers per shard, a multiple of 4096.
    pub buffer_bytes: u64,
    /// Stay in the foreground.
    pub foreground: bool,
    /// Where the control socket lives: [`RunDir::control_socket`] of the export's name.
    pub run_dir: RunDir,
}

impl AttachPlan {
    /// Judges settings, laid over [`Settings::defaults`].
    pub(super) fn new(name: &str, settings: Settings) -> Result<Self, Error> {
        let settings = settings.over(Settings::defaults());
        let front = match (settings.socket.clone(), settings.listen) {
            (Some(path), None) => {
                let path = std::path::absolute(&path).map_err(|e| {
                    Error::with_source(ErrorKind::Usage, format!("socket {path:?} is no path"), e)
                })?;
                check_socket_path("socket", &path)?;
                Front::Socket(path)
            }
            (None, Some(address)) => Front::Tcp(address.get()),
            (Some(_), Some(_)) => {
                return Err(usage("both socket and listen are said; NBD is served on one of them"));
            }
            (None, None) => {
                return Err(usage(
                    "neither socket nor listen is said; use --socket PATH or --listen ADDR:PORT",
                ));
            }
        };
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
        let session = SessionPlan::new(name, settings, Access::Auto)?;
        Ok(Self { session, front, buffer_bytes: bytes, foreground, run_dir })
    }

    /// The session's check; the run directory is ours; neither socket path is in use.
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
        self.session.check()
    }

    /// The settings that make this plan again, given the same name.
    pub(super) fn settings(&self) -> Settings {
        let (socket, listen) = match &self.front {
            Front::Socket(path) => (Some(path.clone()), None),
            Front::Tcp(address) => (None, Some(NbdAddress::new(*address))),
        };
        Settings {
            socket,
            listen,
            foreground: Some(self.foreground),
            buffer_size: Some(ByteSize::new(self.buffer_bytes)),
            run_dir: Some(self.run_dir.path().to_path_buf()),
            ..self.session.settings()
        }
    }
}
