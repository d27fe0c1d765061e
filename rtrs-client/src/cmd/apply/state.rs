//! State of a volume, in the terms of the file.

use rtrs_core::local::RunDir;
use rtrs_core::settings::SettingValues;

use crate::cmd::global::GlobalArgs;
use crate::cmd::session::Session;
use crate::cmd::sessions::{self, Answer};
use crate::control_protocol::{Request, SessionState, Status};
use crate::daemon::saved::is_left_without;
use crate::error::{Error, ErrorKind};
use crate::volumes::difference::{Found, Running};
use crate::volumes::plan_of;

/// Finds the state of the volume with this name.
pub(super) fn state_of(name: &str, run_dir: &RunDir, global: &GlobalArgs) -> Found {
    let socket = run_dir.control_socket(name);
    match sessions::ask(name, &socket, sessions::REPLY_TIMEOUT) {
        None if is_left_without(&socket) => Found::Dead,
        None => Found::Absent,
        Some(Answer::Silent(silent)) if silent.state == SessionState::Dead => Found::Dead,
        Some(Answer::Silent(silent)) => Found::Silent(silent.reason),
        Some(Answer::Status(status)) => match running(&status, run_dir, global) {
            Ok(running) => Found::Running(Box::new(running)),
            Err(error) => Found::Silent(error.chain().to_string()),
        },
    }
}

/// Reads the state of a session that answers, in the terms of the file.
///
/// # Errors
/// Fails if the session is ending, or does not report its settings or paths.
pub(in crate::cmd) fn running(
    status: &Status,
    run_dir: &RunDir,
    global: &GlobalArgs,
) -> Result<Running, Error> {
    let silent = |text: &str| Error::new(ErrorKind::System, text);
    if status.state == SessionState::Detaching {
        return Err(silent("it is being detached; try again later"));
    }
    let paths =
        status.paths.as_ref().ok_or_else(|| silent("the session does not list its paths"))?;
    let stays = paths.iter().filter(|path| path.leaving.as_deref() != Some("remove"));
    let paths = stays.map(|path| path.path.clone()).collect();
    let values: SettingValues = Session::new(&status.name, global)?.request(&Request::Get)?;
    let plan = plan_of(&status.name, values.settings, paths, run_dir)?;
    let (device, identity) = (status.device.clone(), status.identity);
    let ended = status.needs_new_session();
    Ok(Running { plan, device, identity, ended, no_service: status.no_service() })
}
