//! `node`: the daemon that owns the nodes of this host, and requests to it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use clap::{Args, Subcommand};
use rtrs_base::local::{ControlSocket, RequestError, ServiceManager, reply, request};
use rtrs_base::logging::log_to_stderr;
use rtrs_base::rt::{Signal, Signals, raise_open_files};
use rtrs_base::settings::{ByteSize, Flags, Output, print, settings_from_file, write_text};
use rtrs_base::time::Duration;
use serde::{Deserialize, Serialize};

use super::table::table;
use super::via::not_running;
use crate::error::{Error, ErrorKind, as_kind, failed};
use crate::node::{CongestedPort, NodeHandle, NodeOptions, NodeReport, UserSocket};
use crate::settings::{NodeAddress, Settings};
use crate::socket::{node_dir, node_path};

const NO_PERMISSION: &str = "permission denied; name another directory with --socket-dir, and set \
                             RDS_DIR to the same for programs";
/// Suffix of the control sockets of daemons.
const CONTROL_ENDING: &str = "ctl";
/// Maximum length of a unix socket path (unix(7)).
const SOCKET_PATH_MAX: usize = 107;
/// Time for another daemon to report that it already runs a node that was to be started.
const OTHER_TIME_MAX: Duration = Duration::from_secs(1);
/// Time for a daemon to answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// Interval of the checks that the nodes still run.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Open files of the process in addition to its nodes, and of a node in addition to its sockets and
/// peers, including 256 requests of users.
const PROCESS_FILES: u64 = 64;
const NODE_FILES: u64 = 320;
/// Time for the thread for commands to end, and interval of the checks that it has ended.
const CONTROL_END: Duration = Duration::from_secs(1);
const CONTROL_LOOK: Duration = Duration::from_millis(2);

/// The arguments of `node`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct NodeArgs {
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

    #[command(subcommand)]
    command: Option<NodeCommand>,
}

#[derive(Debug, Subcommand)]
enum NodeCommand {
    /// List the nodes that run on this host
    ///
    /// With `-o json`, list, info and stats print the same: all that is known of the nodes. Only
    /// root and the user of a daemon may ask it.
    List(AskArgs),
    /// Show the sockets and peers of nodes
    ///
    /// With `-o json` prints the same as `rds node list`.
    Info(AskArgs),
    /// Show the counters of nodes
    ///
    /// With `-o json` prints the same as `rds node list`.
    Stats(AskArgs),
    /// End the connections of a node to a peer, as a fault would; they are made again
    ///
    /// No message is lost.
    Reset(ResetArgs),
}

#[derive(Debug, Args)]
struct AskArgs {
    /// The node; without it, all nodes
    #[arg(value_name = "ADDRESS")]
    address: Option<NodeAddress>,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct ResetArgs {
    /// The node
    #[arg(value_name = "ADDRESS")]
    address: NodeAddress,

    /// The peer
    #[arg(value_name = "PEER")]
    peer: NodeAddress,

    /// Directory of the nodes' sockets
    ///
    /// The default is RDS_DIR, or /run/rds.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

/// A request to a daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    Report,
    Reset { address: IpAddr, peer: IpAddr },
}

/// Result of [`Request::Reset`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Reset {
    Done,
    NotConnected,
    /// The node belongs to another daemon.
    OtherNode,
}

/// A daemon's report about its nodes.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    pid: u32,
    nodes: Vec<NodeReport>,
}

pub(super) fn run(args: &NodeArgs, output: Output) -> Result<(), Error> {
    match &args.command {
        Some(NodeCommand::List(args)) => show(args, output, list_text),
        Some(NodeCommand::Info(args)) => show(args, output, |reports| {
            by_address(reports).into_iter().map(|(_, node)| info_text(node)).collect()
        }),
        Some(NodeCommand::Stats(args)) => show(args, output, |reports| {
            by_address(reports).into_iter().map(|(_, node)| stats_text(node)).collect()
        }),
        Some(NodeCommand::Reset(args)) => reset(args, output),
        None => serve(args, output),
    }
}

fn serve(args: &NodeArgs, output: Output) -> Result<(), Error> {
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
        .map_err(failed(ErrorKind::System, "cannot start the log's thread"))?;
    raise_limits(&settings, options.len() as u64);
    let dir = settings.socket_dir.clone().unwrap_or_else(node_dir);
    make_dir(&dir)?;
    remove_stale(&dir)?;
    let signals = Signals::take().map_err(failed(ErrorKind::System, "cannot handle signals"))?;
    let (nodes, ready) = start_nodes(&dir, &settings, options)?;
    let nodes = Arc::new(nodes);
    let control = serve_commands(&dir, &nodes)?;
    let (stop, stopped) = mpsc::channel();
    let _forwarding = signals
        .forward(move |signal| {
            if signal == Signal::Stop {
                // The main thread receives this only once.
                let _ = stop.send(());
            }
        })
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    let manager = ServiceManager::from_env();
    let watched = Arc::downgrade(&nodes);
    manager
        .watch(move || match watched.upgrade() {
            Some(nodes) => nodes.iter().all(|node| node.report().is_some()),
            None => true,
        })
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    // The nodes keep running even if standard output is closed.
    if let Err(error) = write_text(&ready) {
        tracing::warn!(%error, "cannot print that the nodes are ready");
    }
    manager.ready(ready.trim_end());
    wait_for_stop(&nodes, &stopped)?;
    manager.stopping();
    drop(control);
    end_nodes(nodes);
    Ok(())
}

/// Returns the options of a node for each address of the settings.
fn node_options(settings: &Settings) -> Result<Vec<NodeOptions>, Error> {
    let addresses: BTreeSet<IpAddr> = settings.address.iter().map(|address| address.0).collect();
    if addresses.is_empty() {
        let text = "no node to run; name an address of this host with --address";
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

/// Serves commands at the control socket of this process.
fn serve_commands(dir: &Path, nodes: &Arc<Vec<NodeHandle>>) -> Result<ControlSocket, Error> {
    let control = dir.join(format!("{}.{CONTROL_ENDING}", std::process::id()));
    let what = format!("cannot listen for commands at {}", control.display());
    let control = ControlSocket::bind(&control).map_err(failed(ErrorKind::InUse, what))?;
    let asked = Arc::clone(nodes);
    control
        .serve(move |request, stream| answer(&asked, &request, &stream))
        .map_err(failed(ErrorKind::System, "cannot start a thread"))?;
    Ok(control)
}

/// Waits for a signal while all nodes run.
fn wait_for_stop(nodes: &[NodeHandle], stopped: &mpsc::Receiver<()>) -> Result<(), Error> {
    while let Err(mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
        if let Some(ended) = nodes.iter().find(|node| !node.is_running()) {
            let text = format!("the node {} has failed; see the log", ended.address());
            return Err(Error::new(ErrorKind::System, text));
        }
    }
    Ok(())
}

/// Ends the nodes, each with its last owner; messages of users are still sent. The thread for
/// commands is an owner until it has ended, and the watchdog thread while it sends a request.
fn end_nodes(nodes: Arc<Vec<NodeHandle>>) {
    let deadline = std::time::Instant::now() + CONTROL_END;
    while Arc::strong_count(&nodes) > 1 && std::time::Instant::now() < deadline {
        std::thread::sleep(CONTROL_LOOK);
    }
    drop(nodes);
}

/// Raises the limit of open files, and warns if it is too low: a node without descriptors can
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
            "the limit of open files is {limit}, but the settings allow for {need}; raise the hard \
             limit (LimitNOFILE= in a systemd unit), or lower sockets-max, peers-max or paths"
        );
    }
}

/// Returns the open files of `nodes` nodes: a connection for each socket, those of each peer,
/// further ones that are new or replace former ones, rings, listeners and boards; plus those of the
/// process.
fn open_files(settings: &Settings, nodes: u64) -> u64 {
    let sockets = u64::from(settings.sockets_max.get());
    let peers = u64::from(settings.peers_max.get());
    let paths = u64::from(settings.paths.get());
    PROCESS_FILES + nodes * (NODE_FILES + sockets + (paths + 1) * peers)
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

/// Creates the directory of sockets, which all users may read.
fn make_dir(dir: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.map_err(|error| {
        let what = format!("cannot make the directory {}", dir.display());
        if error.kind() == io::ErrorKind::PermissionDenied {
            return Error::new(ErrorKind::InUse, format!("{what}: {NO_PERMISSION}"));
        }
        Error::with_source(ErrorKind::InUse, what, error)
    })
}

/// Explains why users of a node cannot be served in a directory.
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
            "{what}: the path is longer than {SOCKET_PATH_MAX} bytes; name a shorter directory \
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

fn answer(nodes: &[NodeHandle], asked: &Request, stream: &UnixStream) {
    match asked {
        Request::Report => {
            let pid = std::process::id();
            let nodes = nodes.iter().filter_map(NodeHandle::report).collect();
            reply(stream, Ok(Report { pid, nodes }));
        }
        Request::Reset { address, peer } => {
            let node = nodes.iter().find(|node| node.address() == *address);
            let done = match node.map(|node| node.reset(*peer)) {
                Some(true) => Reset::Done,
                Some(false) => Reset::NotConnected,
                None => Reset::OtherNode,
            };
            reply(stream, Ok(done));
        }
    }
}

/// Returns the control sockets of daemons in a directory.
fn daemons(dir: &Path) -> Result<Vec<PathBuf>, Error> {
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

/// Returns the named directory, or the default one.
fn dir_of(named: Option<&Path>) -> PathBuf {
    named.map_or_else(node_dir, Path::to_owned)
}

/// Explains why a daemon does not answer.
fn no_answer(path: &Path, error: &RequestError) -> String {
    let what = format!("cannot ask the daemon at {}", path.display());
    match error {
        RequestError::Io(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
            format!("{what}: permission denied; only root and the user of the daemon may ask it")
        }
        error => format!("{what}: {error}"),
    }
}

/// Prints the reports of a directory's daemons about the named node, or about all nodes. Daemons
/// that do not answer are listed in the error, after the other reports have been printed.
fn show(
    args: &AskArgs,
    output: Output,
    text: impl FnOnce(&[Report]) -> String,
) -> Result<(), Error> {
    let dir = dir_of(args.socket_dir.as_deref());
    let (mut found, mut silent) = (Vec::new(), Vec::new());
    for path in daemons(&dir)? {
        match request::<Report>(&path, &Request::Report, ANSWER_TIME_MAX) {
            Ok((mut report, _)) => {
                report.nodes.retain(|node| args.address.is_none_or(|ask| ask.0 == node.address));
                found.push(report);
            }
            // Left over from a daemon that was killed.
            Err(RequestError::NotRunning) => {}
            Err(error) => silent.push(no_answer(&path, &error)),
        }
    }
    found.retain(|report| !report.nodes.is_empty());
    if silent.is_empty()
        && found.is_empty()
        && let Some(address) = args.address
    {
        return Err(not_running(address.0));
    }
    output.print(&found, |found| match found.is_empty() && silent.is_empty() {
        true => format!("no node runs in {}\n", dir.display()),
        false => text(found),
    })?;
    match silent.is_empty() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Node, silent.join("; "))),
    }
}

/// Returns all nodes ordered by address, with the process ID of each.
fn by_address(reports: &[Report]) -> Vec<(u32, &NodeReport)> {
    let mut all = Vec::new();
    for report in reports {
        all.extend(report.nodes.iter().map(|node| (report.pid, node)));
    }
    all.sort_by_key(|(_, node)| node.address);
    all
}

fn list_text(reports: &[Report]) -> String {
    let rows: Vec<_> = by_address(reports)
        .into_iter()
        .map(|(pid, node)| {
            let up = node.peers.iter().filter(|peer| peer.state == "up").count();
            let (sockets, peers) = (node.sockets.len(), node.peers.len());
            let address = node.address.to_string();
            vec![address, pid.to_string(), sockets.to_string(), peers.to_string(), up.to_string()]
        })
        .collect();
    table(&["NODE", ">PID", ">SOCKETS", ">PEERS", ">PEERS UP"], &rows)
}

fn info_text(node: &NodeReport) -> String {
    let size = |bytes: usize| ByteSize::new(bytes as u64);
    let max = size(node.memory_max);
    let (received, sent) = (size(node.unread_bytes), size(node.unacked_bytes));
    let mut text = format!(
        "node {}\n  memory: received {received} of {max}, sent {sent} of {max}\n",
        node.address
    );
    for socket in &node.sockets {
        text += &format!("  port {}: process {}, user {}", socket.port, socket.pid, socket.uid);
        if let Some(seconds) = socket.congested_seconds {
            let unread = socket.unread_bytes;
            text += &format!(", congested for {seconds} s, {unread} bytes unread");
        }
        text += "\n";
    }
    for peer in &node.peers {
        text += &format!(
            "  peer {}: {}, {} bytes queued, {} unread, next sequence {} to it, {} from it\n",
            peer.address,
            peer.state,
            peer.queued_bytes,
            peer.unread_bytes,
            peer.next_tx,
            peer.next_rx
        );
        for path in peer.paths.iter().filter(|_| peer.paths.len() > 1) {
            text += &format!(
                "    path {}: {}, {} bytes queued, next sequence {} to it, {} from it\n",
                path.path, path.state, path.queued_bytes, path.next_tx, path.next_rx
            );
        }
        if let Some(seconds) = peer.stuck_seconds {
            text += &format!("    nothing acknowledged for {seconds} s\n");
        }
        if !peer.congested_ports.is_empty() {
            let port = |at: &CongestedPort| format!("{} for {} s", at.port, at.seconds);
            let ports: Vec<String> = peer.congested_ports.iter().map(port).collect();
            text += &format!("    congested ports: {}\n", ports.join(", "));
        }
    }
    text
}

fn stats_text(node: &NodeReport) -> String {
    let mut text = format!("node {}\n", node.address);
    for (name, value) in &node.counters {
        text += &format!("  {name:<28} {value:>16}\n");
    }
    text
}

fn reset(args: &ResetArgs, output: Output) -> Result<(), Error> {
    let (address, peer) = (args.address.0, args.peer.0);
    let dir = dir_of(args.socket_dir.as_deref());
    let mut why = None;
    for path in daemons(&dir)? {
        match request::<Reset>(&path, &Request::Reset { address, peer }, ANSWER_TIME_MAX) {
            Ok((Reset::Done, _)) => {
                let done = serde_json::json!({ "ok": true });
                return output.print(&done, |_| "connection reset\n".to_owned());
            }
            Ok((Reset::NotConnected, _)) => {
                why = Some(format!("node {address} has no connection to {peer}"));
            }
            Ok((Reset::OtherNode, _)) | Err(RequestError::NotRunning) => {}
            Err(error) => why = why.or_else(|| Some(no_answer(&path, &error))),
        }
    }
    match why {
        Some(why) => {
            Err(Error::new(ErrorKind::Node, format!("cannot reset the connection: {why}")))
        }
        None => Err(not_running(address)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_open_file_limit_covers_the_settings() {
        let mut settings = Settings::default();
        assert_eq!(open_files(&settings, 1), 64 + 320 + 4096 + 2 * 1024);
        settings.sockets_max = "10".parse().unwrap();
        settings.peers_max = "5".parse().unwrap();
        assert_eq!(open_files(&settings, 3), 64 + 3 * (320 + 10 + 10));
    }
}
