//! Command line of `rtrs-client`: one file per command, with its arguments, action and output.
//!
//! This module owns [`LowArgs`], which clap fills; invalid flags end the process with exit code 2
//! before anything else happens. Flags that are settings are declared in `settings.rs`, because
//! each is also a key of the configuration file.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod aliases;
mod apply;
mod at_once;
mod attach;
mod bench;
mod compare;
mod copy;
mod detach;
mod discover;
mod doctor;
mod exporter;
mod global;
mod link;
mod link_target;
mod links;
mod list;
mod logs;
mod manual;
mod metrics;
mod notice;
mod open_device;
mod path;
mod ping;
mod policy;
mod progress;
mod reach;
mod save;
mod session;
mod sessions;
mod set;
mod source;
mod stats;
mod status;
mod text;
mod top;
mod udev_properties;

use clap::{CommandFactory, Parser, Subcommand};
use rtrs_core::settings::{DocumentsArgs, ErrorClass, Output, exit_codes};
use rtrs_core::tls::KeyCommand;

pub use self::aliases::without_aliases;
use self::apply::{ApplyArgs, DiffArgs};
use self::attach::AttachArgs;
use self::bench::BenchArgs;
use self::compare::CompareArgs;
use self::copy::CopyArgs;
use self::detach::DetachArgs;
use self::discover::DiscoverArgs;
use self::doctor::DoctorArgs;
use self::exporter::ExporterArgs;
use self::global::GlobalArgs;
use self::list::ListArgs;
use self::logs::LogsArgs;
use self::metrics::MetricsArgs;
use self::open_device::OpenDeviceArgs;
use self::path::PathArgs;
use self::ping::PingArgs;
use self::policy::PolicyArgs;
use self::save::SaveArgs;
use self::session::NameArgs;
use self::set::{GetArgs, SetArgs};
use self::top::TopArgs;
use self::udev_properties::UdevArgs;
use crate::error::{Error, ErrorKind};
use crate::session_log::is_in_background;

/// Attach network block devices over RTRS and serve them as NBD
#[derive(Debug, Parser)]
#[command(
    name = "rtrs-client",
    version = env!("RTRS_VERSION"),
    max_term_width = 0,
    after_long_help = exit_codes(ErrorKind::EXIT_STATUSES)
)]
pub struct LowArgs {
    /// Flags of all commands.
    #[command(flatten)]
    pub global: GlobalArgs,

    /// Command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Attach an export as a block device or serve it as NBD
    ///
    /// Returns when the device or the NBD server is ready. Each flag that is a setting is also a
    /// key of the configuration file, with the same name. Flags override the file; a repeatable
    /// flag replaces the list of the file.
    Attach(Box<AttachArgs>),
    /// Make the sessions of this host match a file
    ///
    /// Attaches sessions that are not running, and changes settings and paths of those that are,
    /// without interrupting their IO. Changes that a running session cannot make are reported, and
    /// made with --reattach. Sessions that the file does not list are reported, and detached with
    /// --prune. A second apply of the same file does nothing. A failure does not keep other
    /// sessions from being applied; the command then exits with 1.
    Apply(ApplyArgs),
    /// Print what apply would do
    ///
    /// Exits with 0 if nothing differs from the file, with 1 if something does, and with 2 on any
    /// error, like diff(1).
    Diff(DiffArgs),
    /// Write a file for apply from the running sessions
    ///
    /// Leaves defaults out. `save | apply -f -` changes nothing.
    Save(SaveArgs),
    /// List attached sessions
    ///
    /// Prints one line per session in the run directory. A session is dead if its process died, and
    /// unresponsive if it does not answer.
    List(ListArgs),
    /// Show a session with its state, paths and NBD connections
    ///
    /// NAME is the name of the volume, as list shows it. The exit code is 0 for a session that is
    /// open, degraded (a path is not connected), connecting or detaching. It is 3 for a session
    /// that serves no IO: no-path, failed, evicted, identity-mismatch, dead or unresponsive.
    Status(NameArgs),
    /// Show the counters and latencies of a session
    ///
    /// NAME is the name of the volume, as list shows it.
    Stats(NameArgs),
    /// Show live rates of sessions and paths
    ///
    /// One line per session in the run directory, or per NAME, and below it one per path. On a
    /// terminal the view fills the screen, and h lists the keys. Elsewhere each interval is a few
    /// lines of text, or with -o json one line of JSON.
    Top(TopArgs),
    /// Print the metrics of all sessions, or of one
    ///
    /// Prints the text format of Prometheus, which GET /metrics also serves (attach --metrics). For
    /// the textfile collector of node_exporter, write to a temporary file and rename the file.
    Metrics(MetricsArgs),
    /// Serve the metrics of all sessions at one address
    ///
    /// Answers GET /metrics in the text format of Prometheus until SIGTERM, with the metrics of all
    /// sessions in the run directory at the time. A session that hangs has rtrs_client_session_up 0
    /// and does not delay the others. The package's rtrs-client-exporter.socket starts the exporter
    /// on the first scrape.
    Exporter(ExporterArgs),
    /// Print the log of a background session
    ///
    /// NAME is the name of the volume, as list shows it. The log is kept when the session ends, and
    /// the next attach appends to it.
    Logs(LogsArgs),
    /// Detach sessions
    ///
    /// Finishes running requests, closes each session and ends its process, one after another. NAME
    /// is the name of the volume, as list shows it. Exits with 1 if a session could not be
    /// detached; the others still are.
    Detach(DetachArgs),
    /// List the exports of servers
    ///
    /// Shows the exports that a server has by name, with size, block size and mode, and whether
    /// another session has one open for writing. Exports below the search path are not listed. No
    /// export is opened. Exits with 1 if a server does not answer or does not list its exports
    /// (discovery: off at the server, an older rtrs-server, a kernel server). A server with access
    /// lists shows only what this client may open; with keys or certificates it must authenticate.
    Discover(DiscoverArgs),
    /// List, add, remove, disconnect or reconnect the paths of a session
    ///
    /// The session keeps running, and no IO fails.
    Path(PathArgs),
    /// Change settings of an attached session
    ///
    /// The new values apply to all paths at once, until the session is detached; the configuration
    /// file is not changed. If one value cannot change, none does. get shows which can.
    Set(SetArgs),
    /// Print the settings of an attached session
    ///
    /// Prints all settings, or only the named ones.
    Get(GetArgs),
    /// Change the path selection policy
    ///
    /// NAME is the name of the volume, as list shows it.
    Policy(PolicyArgs),
    /// Copy a volume, file or block device to another, without attaching anything
    ///
    /// SRC and DST are the URI of a volume (tcp://HOST/EXPORT, tls:// or rdma://), the path of a
    /// file or block device, or - for stdin and stdout. Holes are not read and become holes or
    /// zeroes. Exits with 0 only if the whole copy is durable.
    Copy(CopyArgs),
    /// Compare two volumes, files or block devices
    ///
    /// A and B are as for copy; A can be - for stdin. Holes are not read and equal zeroes. Exits
    /// with 0 if both are equal, with 1 if they differ, and with 2 on any error, like cmp(1).
    Compare(CompareArgs),
    /// Measure a session without NBD
    ///
    /// Opens the export, runs requests for a while, and prints rates and latencies. The
    /// configuration file applies too: the settings of the session, and those of bench under the
    /// key bench.
    Bench(Box<BenchArgs>),
    /// Measure latency and bandwidth of a path (tcp, tls or rdma; rping-compatible)
    ///
    /// Connects to an rtrs-server, or with --rping to an rping -s. In each round the server reads
    /// the data of this end and writes it back, and this end compares it. Ends with a table. Exits
    /// with 1 if anything was lost.
    Ping(Box<PingArgs>),
    /// Check paths step by step and suggest fixes
    ///
    /// The steps range from host name, route, device and port to a ping and the first message of a
    /// session, which is not opened. Exits with 1 if a step fails.
    Doctor(DoctorArgs),
    /// Manage this client's key
    ///
    /// For tls:// and rdma:// with --key-file, like ssh-keygen for ssh. Add the line that `show`
    /// prints to the clients-file of the server.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Write manual pages and shell completions
    ///
    /// For packages: a page for each command, and completions for bash, zsh and fish.
    #[command(hide = true)]
    Documents(DocumentsArgs),
    /// Open a device and close it again
    ///
    /// The client runs this itself, because it must not wait for a device that it serves.
    #[command(hide = true)]
    OpenDevice(OpenDeviceArgs),
    /// Print the properties from which udev creates the links of a device
    ///
    /// The udev rules run this (60-rtrs.rules).
    #[command(hide = true)]
    UdevProperties(UdevArgs),
}

impl LowArgs {
    /// Returns the output format for the result and for errors.
    #[must_use]
    pub fn output(&self) -> Output {
        // The attach command reads the log of the process that it starts.
        if is_in_background() { Output::Text } else { self.global.output }
    }

    /// Runs the command.
    ///
    /// # Errors
    /// Returns the failure of the command, by kind.
    pub fn run(&self) -> Result<(), Error> {
        let global = &self.global;
        match &self.command {
            Command::Attach(args) => attach::run(args, global),
            Command::Apply(args) => apply::apply(args, global),
            Command::Diff(args) => apply::diff(args, global),
            Command::Save(args) => save::run(args, global),
            Command::List(args) => list::run(args, global),
            Command::Status(args) => status::run(args, global),
            Command::Stats(args) => stats::run(args, global),
            Command::Top(args) => top::run(args, global),
            Command::Metrics(args) => metrics::run(args, global),
            Command::Exporter(args) => exporter::run(args, global),
            Command::Logs(args) => logs::run(args, global),
            Command::Detach(args) => detach::run(args, global),
            Command::Discover(args) => discover::run(args, global),
            Command::Path(args) => path::run(args, global),
            Command::Set(args) => set::set(args, global),
            Command::Get(args) => set::get(args, global),
            Command::Policy(args) => policy::run(args, global),
            Command::Copy(args) => copy::run(args, global),
            Command::Compare(args) => compare::run(args, global),
            Command::Bench(args) => bench::run(args, global),
            Command::Ping(args) => ping::run(args, global),
            Command::Doctor(args) => doctor::run(args, global),
            Command::Key(command) => command.run(),
            Command::Documents(args) => args.run(Self::command(), &manual::manual()),
            Command::OpenDevice(args) => open_device::run(args),
            Command::UdevProperties(args) => udev_properties::run(args, global),
        }
    }
}

#[cfg(test)]
mod tests;
