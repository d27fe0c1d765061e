//! Requests to daemons over the control sockets in their nodes' directory.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rtrs_base::local::{RequestError, request};
use rtrs_base::time::Duration;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::via::not_running;
use crate::error::{Error, ErrorKind, failed};
use crate::node::NodeReport;
use crate::socket::node_dir;

/// Suffix of the daemons' control sockets.
pub(super) const CONTROL_ENDING: &str = "ctl";
/// Time within which a daemon must answer.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// A request to a daemon. Requests about one node are answered with null if the daemon is not
/// running that node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    Report,
    /// Reset the connections to a peer. The answer is their number.
    Reset {
        address: IpAddr,
        peer: IpAddr,
    },
    /// Return the settings of a node: [`SettingValues`](rtrs_base::settings::SettingValues).
    Get {
        address: IpAddr,
    },
    /// Change a node's settings. The answer contains the new values.
    Set {
        address: IpAddr,
        settings: BTreeMap<String, String>,
    },
}

/// A daemon's report about its nodes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) pid: u32,
    pub(super) nodes: Vec<NodeReport>,
}

/// Returns the daemons' control sockets in a directory.
pub(super) fn daemons(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let what = || format!("cannot read the directory {}", dir.display());
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::with_source(ErrorKind::System, what(), error)),
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    let mut paths = paths.map_err(failed(ErrorKind::System, what()))?;
    paths.retain(|path| path.extension().is_some_and(|ending| ending == CONTROL_ENDING));
    paths.sort();
    Ok(paths)
}

/// Returns the named directory, or the default directory.
pub(super) fn dir_of(named: Option<&Path>) -> PathBuf {
    named.map_or_else(node_dir, Path::to_owned)
}

/// Explains why a daemon does not answer.
pub(super) fn no_answer(path: &Path, error: &RequestError) -> String {
    let what = format!("cannot query the daemon at {}", path.display());
    match error {
        RequestError::Io(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
            format!("{what}: permission denied; only root and the user of the daemon may query it")
        }
        error => format!("{what}: {error}"),
    }
}

/// Sends a request about a node to the daemon running it. Returns the daemon's answer, or the
/// reason why there is none.
pub(super) fn ask_node<T: DeserializeOwned>(
    dir: &Path,
    address: IpAddr,
    asked: &Request,
) -> Result<T, Error> {
    let mut why = None;
    for path in daemons(dir)? {
        match request::<Option<T>>(&path, asked, ANSWER_TIME_MAX) {
            Ok((Some(answer), _)) => return Ok(answer),
            Ok((None, _)) | Err(RequestError::NotRunning) => {}
            // Daemons refuse only invalid values of settings.
            Err(RequestError::Refused(text)) => return Err(Error::new(ErrorKind::Usage, text)),
            Err(error) => why = why.or_else(|| Some(no_answer(&path, &error))),
        }
    }
    Err(why.map_or_else(|| not_running(address), |why| Error::new(ErrorKind::Node, why)))
}
