//! A volume in its session's process: its resources on the host, from attach to detach.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rtrs_core::block::Geometry;
use rtrs_core::identity::{ExportId, Identity as Pinned};
use rtrs_core::local::{ControlSocket, PassedSocket};

use super::config::volume_config;
use super::device::{self, Held, ReachedDevice};
use super::endings::LeftToUsers;
use super::report::Identity;
use super::saved::{Saved, UsedExport};
use super::waiting::{Add, Detach};
use crate::engine::VolumeConfig;
use crate::error::{Error, ErrorKind};
use crate::frontend::{self, MakeFrontEnds, PreparedFrontEnds};
use crate::plan::{AttachPlan, Front};
use crate::settings::RequirePaths;

/// Progress of a volume between attach and detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The device is being opened; this is the deadline.
    Opening(Instant),
    /// The volume is served.
    Attached,
    /// The kernel is releasing the device.
    Disconnecting,
    /// The front ends are finishing requests in flight; this is the deadline.
    Stopping(Instant),
    /// The session is closing the volume; this is the deadline.
    Closing(Instant),
}

impl Step {
    /// Takes the size that must be passed to the kernel. During the attach, the size waits until
    /// there is a device; a volume that is ending needs none.
    pub(crate) fn take_size(self, resized: &mut Option<u64>) -> Option<u64> {
        match self {
            Self::Opening(_) => None,
            Self::Attached => resized.take(),
            Self::Disconnecting | Self::Stopping(_) | Self::Closing(_) => {
                *resized = None;
                None
            }
        }
    }
}

/// Resources of a volume before it joins the session.
pub(crate) struct Prepared {
    pub(crate) config: VolumeConfig,
    pub(crate) fronts: MakeFrontEnds,
    pub(crate) control: ControlSocket,
    /// URI for NBD clients.
    pub(crate) uri: Option<String>,
    /// State saved for a takeover, in case the process dies.
    pub(crate) saved: Option<Saved>,
    reached: Option<ReachedDevice>,
}

/// A volume of the session.
pub(crate) struct Volume {
    pub(crate) identity: Identity,
    pub(crate) front: Front,
    pub(crate) control: ControlSocket,
    pub(crate) saved: Option<Saved>,
    /// Result of the first step of a quick takeover, until it is used.
    pub(crate) reached: Option<ReachedDevice>,
    /// Kernel device, until it is disconnected.
    pub(crate) held: Held,
    pub(crate) step: Step,
    /// Time limit for the open.
    pub(crate) patience: Duration,
    /// Number of connected paths that the attach needs.
    pub(crate) require_paths: RequirePaths,
    /// Geometry of an open volume that is waiting for paths.
    pub(crate) waits_for_paths: Option<Geometry>,
    /// Deadline for requests in flight during a detach.
    pub(crate) detached_by: Option<Instant>,
    /// Commands that are waiting for the detach.
    pub(crate) detaches: Vec<Detach>,
    /// Command that is waiting for the attach.
    pub(crate) add: Option<Add>,
    /// Reason why the volume of the `add` command is not attached, sent once the name is free.
    pub(crate) refused: Option<String>,
    /// Whether the volume was ever attached.
    pub(crate) was_attached: bool,
    /// How the volume's front ends left their users.
    pub(crate) left: Option<LeftToUsers>,
    /// Whether the saved state records that the volume shares a session.
    pub(crate) is_session_saved: bool,
    /// Number of shards whose connection the kernel has closed.
    pub(crate) kernel_gone: usize,
    /// Size that has yet to be passed to the kernel.
    pub(crate) resized: Option<u64>,
    /// Warning from the disconnection of the device.
    pub(crate) warning: Option<String>,
    /// Number of IOs still unfinished when their time limit expired.
    pub(crate) abandoned: usize,
}

impl Volume {
    /// Creates the volume of a plan, which must open within `patience`.
    pub(crate) fn new(
        plan: &AttachPlan,
        prepared: Prepared,
        identity: Identity,
        patience: Duration,
    ) -> (Self, MakeFrontEnds) {
        let Prepared { fronts, control, saved, reached, .. } = prepared;
        let volume = Self {
            identity,
            front: plan.front.clone(),
            control,
            saved,
            reached,
            held: Held::default(),
            step: Step::Opening(Instant::now() + patience),
            patience,
            require_paths: plan.settings.require_paths,
            waits_for_paths: None,
            detached_by: None,
            detaches: Vec::new(),
            add: None,
            refused: None,
            was_attached: false,
            left: None,
            is_session_saved: false,
            kernel_gone: 0,
            resized: None,
            warning: None,
            abandoned: 0,
        };
        (volume, fronts)
    }

    /// Whether the volume is not being detached.
    pub(crate) fn is_wanted(&self) -> bool {
        matches!(self.step, Step::Opening(_) | Step::Attached)
    }

    /// Makes listings show that the volume is being detached.
    pub(crate) fn show_end(&self) {
        self.identity.ending.store(true, Ordering::Relaxed);
    }

    /// Time at which the volume's next time limit expires.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.step {
            Step::Opening(at) | Step::Stopping(at) | Step::Closing(at) => Some(at),
            Step::Attached | Step::Disconnecting => None,
        }
    }

    /// Removes the state saved for the next process, if the end of the volume leaves no user that
    /// could miss a loss. A volume that was never attached has written nothing, and the files of a
    /// dead process remain. Users of a device end with the device, unless it could not be taken
    /// from them. NBD clients may connect to the next process.
    pub(crate) fn forget(&self) {
        let Some(saved) = self.saved.as_ref().filter(|_| self.was_attached) else { return };
        let detached = !self.detaches.is_empty();
        let is_over = match self.front {
            Front::Device(_) => self.warning.is_none(),
            // Unknown after a shard has failed.
            _ => self.left.is_some_and(|left| !left.needs_epoch(detached)),
        };
        if is_over {
            saved.forget();
        } else if detached && !matches!(self.front, Front::Device(_)) {
            saved.forget_but_epoch();
        }
    }
}

/// Acquires a volume's resources on the host: its control socket, and its NBD socket or address,
/// which may be among the sockets that the service manager passed.
///
/// # Errors
/// Fails if a socket or address is in use, or an identity contradicts that of a dead process.
pub(crate) fn prepare(plan: &AttachPlan, passed: &[PassedSocket]) -> Result<Prepared, Error> {
    let name = &plan.session.name;
    let control_path = plan.run_dir.control_socket(name);
    let control = ControlSocket::bind(&control_path).map_err(|e| {
        let what = format!("cannot listen on the control socket {}", control_path.display());
        Error::with_source(ErrorKind::InUse, what, e)
    })?;
    // This must come first, because it starts the time during which requests are repeated.
    let reached = match &plan.front {
        Front::Device(options) => device::reach(options, name)?,
        _ => None,
    };
    if matches!(plan.front, Front::Device(_)) {
        device::become_dependable();
    }
    let PreparedFrontEnds { make: fronts, uri } = frontend::prepare(plan, passed)?;
    let saved = Some(Saved::new(&plan.run_dir, name)?);
    let config = VolumeConfig {
        identity: pinned(plan, saved.as_ref())?,
        inherited_epoch: inherited(plan, saved.as_ref()),
        inherited_export: inherited_export(plan, saved.as_ref()),
        promotes: plan.promotes(),
        ..volume_config(&plan.session)
    };
    Ok(Prepared { config, fronts, control, uri, saved, reached })
}

/// Epoch in which a dead process may have left unflushed writes. NBD users of a socket or an
/// address reconnect to the next process automatically; users of a device only after a takeover.
fn inherited(plan: &AttachPlan, saved: Option<&Saved>) -> Option<u64> {
    let is_device = matches!(plan.front, Front::Device(_));
    saved.filter(|_| !is_device || plan.takes_over())?.epoch()
}

/// Export to which the inherited epoch belongs, if known. A volume that was moved has a different
/// one.
fn inherited_export(plan: &AttachPlan, saved: Option<&Saved>) -> Option<ExportId> {
    let saved = saved.filter(|_| !plan.takes_over() && !plan.accept_new_identity)?;
    let export = saved.export_of_epoch().unwrap_or_else(|error| {
        // At worst, a loss is reported unnecessarily.
        tracing::warn!("cannot read which export an earlier process used: {error}");
        None
    });
    export?.identity.export
}

/// Identity that a volume must have, if it is known before the open. Users of a volume that was not
/// detached expect its export, whether or not they notice that there is a new process.
fn pinned(plan: &AttachPlan, saved: Option<&Saved>) -> Result<Option<Pinned>, Error> {
    let given = plan.session.settings.identity;
    if plan.accept_new_identity {
        return Ok(None);
    }
    let Some(saved) = saved else { return Ok(given) };
    let left = match saved.export() {
        Ok(left) if plan.takes_over() => left.map(|export| export.identity),
        Ok(left) => left.and_then(UsedExport::lasting),
        Err(error) => {
            let text = "cannot read which export the dead process used; set --identity ID or \
                        --accept-new-identity";
            return match given {
                Some(given) => Ok(Some(given)),
                None => Err(Error::with_source(ErrorKind::System, text, error)),
            };
        }
    };
    joined(left, given)
}

/// Combines the identity left by a process with the configured identity, if they do not contradict
/// each other: a boot-specific export ID changes at the next boot, and either may be less complete.
fn joined(left: Option<Pinned>, given: Option<Pinned>) -> Result<Option<Pinned>, Error> {
    match (left, given) {
        (Some(left), Some(given)) if left.contradicts(&given) => {
            let text = format!(
                "cannot attach: the dead process used {left}, but identity is {given}; correct \
                 identity, or if the volume was moved, detach it first or set --accept-new-identity"
            );
            Err(Error::new(ErrorKind::Usage, text))
        }
        (Some(left), Some(given)) => Ok(Some(left.or(given))),
        (left, given) => Ok(left.or(given)),
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::identity::ServerId;
    use rtrs_core::local::RunDir;
    use rtrs_core::settings::Output;

    use super::*;
    use crate::engine::Outstanding;
    use crate::settings::Settings;

    const LEFT: &str = "00112233445566778899aabbccddeeff/00000000000000000000000000000001";
    const GIVEN: &str = "00112233445566778899aabbccddeeff/00000000000000000000000000000002";

    fn plan(front: &str, identity: Option<&str>, accept_new_identity: bool) -> AttachPlan {
        let identity = identity.map(|id| format!("\nidentity: {id}")).unwrap_or_default();
        let settings = Settings::from_yaml(&format!("{front}{identity}"), "s.yaml").unwrap();
        let plan = AttachPlan::new("v", settings, Output::Text).unwrap();
        AttachPlan { accept_new_identity, ..plan }
    }

    #[test]
    fn saved_and_configured_pins_must_agree() {
        let server = Some(ServerId::of_name("s"));
        let weak = |boot| Some(ExportId::weak(boot, "file", &[]));
        let of = |server, export| Some(Pinned { server, export });
        let stable = Some(ExportId::of_name("e"));
        for (left, given, both) in [
            (None, None, None),
            (None, of(server, stable), of(server, stable)),
            (of(server, stable), of(server, None), of(server, stable)),
            (of(server, None), of(None, stable), of(server, stable)),
            (of(server, weak(2)), of(server, weak(1)), of(server, weak(2))),
        ] {
            assert_eq!(joined(left, given).ok(), Some(both), "{left:?} {given:?}");
        }
        let other = Some(ServerId::of_name("t"));
        assert!(joined(of(server, stable), of(other, stable)).is_err());
        assert!(joined(of(server, stable), of(server, weak(1))).is_err());
    }

    #[test]
    fn a_volume_is_pinned_before_it_opens() {
        let name = format!("rtrs-pinned-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        let left: Pinned = LEFT.parse().unwrap();
        let given: Pinned = GIVEN.parse().unwrap();
        let device = |identity, accept| plan("device: auto\ntakeover: true", identity, accept);
        let pin = |plan: &AttachPlan| pinned(plan, Some(&saved)).map_err(|e| e.to_string());

        // The dead process had pinned nothing.
        assert_eq!(pin(&device(None, false)), Ok(None));
        assert_eq!(pin(&device(Some(GIVEN), false)), Ok(Some(given)));
        saved.begin();
        saved.save_export(UsedExport { identity: left, memory: false });
        assert_eq!(pin(&device(None, false)), Ok(Some(left)));
        assert_eq!(pin(&device(Some(LEFT), false)), Ok(Some(left)));
        let error = pin(&device(Some(GIVEN), false)).unwrap_err();
        assert!(error.contains(LEFT) && error.contains(GIVEN), "{error}");
        assert!(error.contains("if the volume was moved, detach it first or set "), "{error}");
        for identity in [None, Some(LEFT), Some(GIVEN)] {
            assert_eq!(pin(&device(identity, true)), Ok(None), "a deliberate move");
        }

        for front in ["device: auto", "socket: /s"] {
            assert_eq!(pin(&plan(front, None, false)), Ok(Some(left)), "{front}");
            let error = pin(&plan(front, Some(GIVEN), false)).unwrap_err();
            assert!(error.starts_with("cannot attach: the dead process used "), "{error}");
            assert_eq!(pin(&plan(front, Some(GIVEN), true)), Ok(None), "{front}");
        }
        // A restarted server's memory is a different export.
        saved.save_export(UsedExport { identity: left, memory: true });
        let server = Pinned { export: None, ..left };
        assert_eq!(pin(&plan("socket: /s", None, false)), Ok(Some(server)));
        assert_eq!(pin(&plan("socket: /s", Some(GIVEN), false)), Ok(Some(given)));
        assert_eq!(pin(&device(None, false)), Ok(Some(left)), "a takeover continues");
        // After a detach, the volume's users expect nothing.
        saved.forget_but_epoch();
        assert_eq!(pin(&plan("socket: /s", None, false)), Ok(None));

        // An unreadable file does not count as missing.
        std::fs::write(dir.control_socket("v").with_extension("identity"), "x").unwrap();
        let error = pin(&device(None, false)).unwrap_err();
        assert!(error.contains("cannot read which export the dead process used"), "{error}");
        assert_eq!(pin(&device(Some(GIVEN), false)), Ok(Some(given)));
        assert_eq!(pin(&device(None, true)), Ok(None));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_socket_or_takeover_inherits_the_epoch_of_a_dead_process() {
        let name = format!("rtrs-inherited-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        let epoch = |front| inherited(&plan(front, None, false), Some(&saved));
        assert_eq!(epoch("socket: /s"), None);
        saved.begin();
        saved.save_epoch(7);
        assert_eq!(epoch("socket: /s"), Some(7));
        assert_eq!(epoch("device: auto\ntakeover: true"), Some(7));
        assert_eq!(epoch("device: auto"), None, "without users");
        saved.forget();
        assert_eq!(epoch("socket: /s"), None, "detached");
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn the_files_of_a_dead_process_stay_until_the_next_attach() {
        let name = format!("rtrs-left-{}", std::process::id());
        let dir = RunDir::new(Some(std::env::temp_dir().join(name))).unwrap();
        dir.make().unwrap();
        let saved = Saved::new(&dir, "v").unwrap();
        let volume_of = |front| {
            let plan = plan(front, None, false);
            let saved = Saved::new(&dir, "v").unwrap();
            saved.begin();
            saved.save_epoch(7);
            let prepared = Prepared {
                config: volume_config(&plan.session),
                fronts: Box::new(|_| Vec::new()),
                control: ControlSocket::bind(&dir.control_socket("v")).unwrap(),
                uri: None,
                saved: Some(saved),
                reached: None,
            };
            Volume::new(&plan, prepared, Identity::example(), Duration::ZERO).0
        };
        let left = |volume: &Volume| {
            volume.forget();
            saved.epoch()
        };
        let mut volume = volume_of("device: auto\ntakeover: true");
        assert_eq!(left(&volume), Some(7), "the next one may take it over");
        volume.was_attached = true;
        volume.warning = Some("its users keep it".into());
        assert_eq!(left(&volume), Some(7));
        volume.warning = None;
        assert_eq!(left(&volume), None);
        drop(volume);

        let mut volume = volume_of("socket: /s");
        volume.left = Some(LeftToUsers { may_return: false, outstanding: Outstanding::Nothing });
        assert_eq!(left(&volume), Some(7), "never attached");
        (volume.was_attached, volume.left) = (true, None);
        assert_eq!(left(&volume), Some(7), "a shard has failed");
        volume.left = Some(LeftToUsers { may_return: false, outstanding: Outstanding::Loss });
        assert_eq!(left(&volume), Some(7));
        volume.left = Some(LeftToUsers { may_return: false, outstanding: Outstanding::Unflushed });
        assert_eq!(left(&volume), Some(7), "its users may return after a signal");
        volume.left = Some(LeftToUsers { may_return: false, outstanding: Outstanding::Reported });
        assert_eq!(left(&volume), None, "its users have gone");
        drop(volume);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_size_that_arrives_during_the_attach_waits_for_the_device() {
        let mut resized = Some(8192);
        assert_eq!(Step::Opening(Instant::now()).take_size(&mut resized), None);
        assert_eq!(Step::Attached.take_size(&mut resized), Some(8192));
        assert_eq!(Step::Attached.take_size(&mut resized), None, "once");
        resized = Some(4096);
        assert_eq!(Step::Disconnecting.take_size(&mut resized), None);
        assert_eq!(resized, None, "not looked at again");
    }
}
