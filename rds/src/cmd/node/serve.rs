//! The daemon that owns the nodes of this host.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use clap::Args;
use rtrs_base::local::{ControlSocket, ServiceManager, reply, request};
use rtrs_base::logging::log_to_stderr;
use rtrs_base::rt::{Signal, Signals, raise_open_files};
use rtrs_base::settings::{Flags, Output, announce, print, settings_from_file};
use rtrs_base::time::Duration;

use super::control::{CONTROL_ENDING, Report, Request, daemons};
use super::metrics::serve_metrics;
use super::nodes::Nodes;
use crate::error::{Error, ErrorKind, as_kind, failed};
use crate::node::{NodeHandle, NodeOptions, UserSocket, controls_max};
use crate::settings::Settings;
use crate::socket::{node_dir, node_path};

const NO_PERMISSION: &str = "permission denied; choose another directory with --socket-dir, and \
                             set RDS_DIR to it for programs";
/// Maximum length of a unix socket path (unix(7)).
const SOCKET_PATH_MAX: usize = 107;
/// Time for another daemon to report that it already runs a node that this one was to start.
const OTHER_TIME_MAX: Duration = Duration::from_secs(1);
/// Interval between checks that the nodes are still running.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Open files of the process beyond those of its nodes, and of a node beyond those of its sockets,
/// their processes and its peers, including 256 requests of users and 1,024 unread answers.
const PROCESS_FILES: u64 = 64;
const NODE_FILES: u64 = 320 + 1024;
/// Time for the command thread to stop, and interval between checks of whether it has.
const CONTROL_END: Duration = Duration::from_secs(1);
const CONTROL_LOOK: Duration = Duration::from_millis(2);

/// The arguments of the daemon.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// The settings.
    #[command(flatten)]
    settings: Flags<Settings>,

    /// Read settings from this YAML file
    ///
    /// configs/rds.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print the settings in effect as YAML, then exit
    ///
    /// The output is a complete configuration file.
    #[arg(long)]
    print_config: bool,
}

pub(super) fn serve(args: &ServeArgs, output: Output) -> Result<(), Error> {
    let mut settings: Settings = match &args.config {
        Some(path) => settings_from_file(path)?,
        None => Settings::default(),
    };
    args.settings.apply(&mut settings)?;
    if args.print_config {
        let map = print(&settings);
        let yaml = serde_yaml::to_string(&map)
            .map_err(failed(ErrorKind::System, "cannot print the settings"))?;
        return output.print(&map, |_| yaml);
    }
    let options = node_options(&settings)?;
    let _log = log_to_stderr(&settings.log, settings.log_format)
        .map_err(failed(ErrorKind::System, "cannot start the logging thread"))?;
    raise_limits(&settings, options.len() as u64);
    let dir = settings.socket_dir.clone().unwrap_or_else(node_dir);
    make_dir(&dir)?;
    remove_stale(&dir)?;
    let signals = Signals::take().map_err(failed(ErrorKind::System, "cannot handle signals"))?;
    let (nodes, ready) = start_nodes(&dir, &settings, options)?;
    let nodes = Arc::new(Nodes::new(nodes, &settings));
    let metrics = settings.metrics.as_ref().map(|at| serve_metrics(&nodes, at)).transpose()?;
    let control = serve_commands(&dir, &nodes)?;
    let (stop, stopped) = mpsc::channel();
    let _forwarding = signals
        .forward(move |signal| {
            if signal == Signal::Stop {
                // The main thread receives from this channel only once.
                let _ = stop.send(());
            }
        })
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    let manager = ServiceManager::from_env();
    let watched = Arc::downgrade(&nodes);
    manager
        .watch(move || match watched.upgrade() {
            Some(nodes) => nodes.all().iter().all(|node| node.report().is_some()),
            None => true,
        })
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    // The nodes keep running even if standard output is closed.
    if let Err(error) = announce(ready.clone()) {
        tracing::warn!(%error, "cannot print that the nodes are ready");
    }
    manager.ready(ready.trim_end());
    wait_for_stop(&nodes, &stopped)?;
    manager.stopping();
    drop((control, metrics));
    end_nodes(nodes);
    Ok(())
}

/// Returns node options for each configured address.
fn node_options(settings: &Settings) -> Result<Vec<NodeOptions>, Error> {
    let addresses: BTreeSet<IpAddr> = settings.address.iter().map(|address| address.0).collect();
    if addresses.is_empty() {
        let text = "no node to run; set an address of this host with --address";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    addresses.into_iter().map(|address| settings.options(address)).collect()
}

/// Starts the nodes. Returns them with a line of text for each.
fn start_nodes(
    dir: &Path,
    settings: &Settings,
    options: Vec<NodeOptions>,
) -> Result<(Vec<NodeHandle>, String), Error> {
    let mut nodes = Vec::new();
    let mut ready = String::new();
    for options in options {
        let address = options.config.address;
        let path = node_path(dir, address);
        let users = UserSocket::bind(&path, settings.socket_mode.get());
        let users = users.map_err(|error| no_user_socket(dir, address, error))?;
        nodes.push(NodeHandle::start(options, Some(users)).map_err(as_kind(ErrorKind::Node))?);
        ready += &format!("node {address} is ready at {}\n", path.display());
    }
    Ok((nodes, ready))
}

/// Serves commands on the control socket of this process.
fn serve_commands(dir: &Path, nodes: &Arc<Nodes>) -> Result<ControlSocket, Error> {
    let control = dir.join(format!("{}.{CONTROL_ENDING}", std::process::id()));
    let what = format!("cannot listen for commands at {}", control.display());
    let control = ControlSocket::bind(&control).map_err(failed(ErrorKind::InUse, what))?;
    let asked = Arc::clone(nodes);
    control
        .serve(move |request, stream| answer(&asked, request, &stream))
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    Ok(control)
}

/// Waits for a signal while all nodes run.
fn wait_for_stop(nodes: &Nodes, stopped: &mpsc::Receiver<()>) -> Result<(), Error> {
    while let Err(mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
        if let Some(ended) = nodes.all().iter().find(|node| !node.is_running()) {
            let text = format!("the node {} has failed; see the log", ended.address());
            return Err(Error::new(ErrorKind::System, text));
        }
    }
    Ok(())
}

/// Stops the nodes: each stops when its last owner is dropped, after sending its users' messages.
/// The command thread is an owner until it stops, and the watchdog thread while it sends a request.
fn end_nodes(nodes: Arc<Nodes>) {
    let deadline = std::time::Instant::now() + CONTROL_END;
    while Arc::strong_count(&nodes) > 1 && std::time::Instant::now() < deadline {
        std::thread::sleep(CONTROL_LOOK);
    }
    drop(nodes);
}

/// Raises the limit on open files, and warns if it is too low: a node without descriptors can
/// neither accept connections nor pass on long messages.
fn raise_limits(settings: &Settings, nodes: u64) {
    let limit = match raise_open_files() {
        Ok(limit) => limit,
        Err(error) => {
            tracing::warn!(%error, "cannot raise the limit of open files");
            return;
        }
    };
    let need = open_files(settings, nodes);
    if limit < need {
        tracing::warn!(
            "the limit of open files is {limit}, but the settings need {need}; raise the hard \
             limit (LimitNOFILE= in a systemd unit), or lower sockets-max, peers-max or paths"
        );
    }
}

/// Returns the number of files that the process and `nodes` nodes may open. A node needs a
/// connection and counters for each socket and each process with sockets, the connections of each
/// peer and one to replace them, and rings, listeners and boards.
fn open_files(settings: &Settings, nodes: u64) -> u64 {
    let sockets = u64::from(settings.sockets_max.get());
    let peers = u64::from(settings.peers_max.get());
    let paths = u64::from(settings.paths.get());
    let controls = controls_max(settings.sockets_max.get() as usize) as u64;
    PROCESS_FILES + nodes * (NODE_FILES + 2 * (sockets + controls) + (paths + 1) * peers)
}

/// Removes the control sockets of daemons that were killed.
fn remove_stale(dir: &Path) -> Result<(), Error> {
    for path in daemons(dir)? {
        let pid = path.file_stem().and_then(|stem| stem.to_str()?.parse::<u32>().ok());
        let runs = pid.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists());
        let refuses = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if !runs
            && UnixStream::connect(&path).is_err_and(refuses)
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::debug!(%error, path = %path.display(), "cannot remove an old socket");
        }
    }
    Ok(())
}

/// Creates the directory for the sockets, which all users may read.
fn make_dir(dir: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.map_err(|error| {
        let what = format!("cannot create the directory {}", dir.display());
        if error.kind() == io::ErrorKind::PermissionDenied {
            return Error::new(ErrorKind::InUse, format!("{what}: {NO_PERMISSION}"));
        }
        Error::with_source(ErrorKind::InUse, what, error)
    })
}

/// Explains why a node's user socket cannot be created in a directory.
fn no_user_socket(dir: &Path, address: IpAddr, error: io::Error) -> Error {
    let path = node_path(dir, address);
    let what = format!("cannot listen for users at {}", path.display());
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => match pid_of(dir, address) {
            Some(pid) => format!("{what}: node {address} already runs (PID {pid})"),
            None => format!("{what}: node {address} already runs"),
        },
        io::ErrorKind::PermissionDenied => format!("{what}: {NO_PERMISSION}"),
        _ if path.as_os_str().len() > SOCKET_PATH_MAX => format!(
            "{what}: the path is longer than {SOCKET_PATH_MAX} bytes; choose a shorter directory \
             with --socket-dir"
        ),
        _ => return Error::with_source(ErrorKind::InUse, what, error),
    };
    Error::new(ErrorKind::InUse, text)
}

/// Returns the process ID of the daemon that runs a node, if the daemon answers.
fn pid_of(dir: &Path, address: IpAddr) -> Option<u32> {
    daemons(dir).ok()?.iter().find_map(|path| {
        let asked = request::<Report>(path, &Request::Report, OTHER_TIME_MAX);
        let (report, _) = asked.ok()?;
        report.nodes.iter().any(|node| node.address == address).then_some(report.pid)
    })
}

fn answer(nodes: &Nodes, asked: Request, stream: &UnixStream) {
    match asked {
        Request::Report => {
            let pid = std::process::id();
            let nodes = nodes.all().iter().filter_map(NodeHandle::report).collect();
            reply(stream, Ok(Report { pid, nodes }));
        }
        Request::Reset { address, peer } => {
            let reset = nodes.find(address).map(|node| node.reset(peer));
            reply(stream, Ok(reset));
        }
        Request::Get { address } => reply(stream, Ok(nodes.values(address))),
        Request::Set { address, settings } => reply(stream, nodes.change(address, &settings)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_file_limit_covers_the_settings() {
        let mut settings = Settings::default();
        assert_eq!(open_files(&settings, 1), 64 + 1344 + 2 * (4096 + 8320) + 2 * 1024);
        settings.sockets_max = "10".parse().unwrap();
        settings.peers_max = "5".parse().unwrap();
        assert_eq!(open_files(&settings, 3), 64 + 3 * (1344 + 2 * (10 + 148) + 10));
    }
}
