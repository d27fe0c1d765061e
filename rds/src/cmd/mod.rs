//! The command line of `rds`: one file per command, with its arguments, implementation and output.

#![allow(rustdoc::broken_intra_doc_links, reason = "flag help is plain text with brackets")]

mod args;
mod info;
mod manual;
mod node;
mod ping;
mod recv;
mod send;
mod stop;
mod stress;
mod table;
mod via;

use clap::{CommandFactory, Parser, Subcommand};
use rtrs_base::settings::{DocumentsArgs, ErrorClass, Output, exit_codes};

use self::info::InfoArgs;
use self::node::NodeArgs;
use self::ping::PingArgs;
use self::recv::RecvArgs;
use self::send::SendArgs;
use self::stress::StressArgs;
use crate::error::{Error, ErrorKind};

/// Reliable datagrams (RDS) over TCP, in user space
///
/// Communicates with other nodes of this program and with kernels that have rds_tcp.
#[derive(Debug, Parser)]
#[command(
    name = "rds",
    version = env!("RTRS_VERSION"),
    max_term_width = 0,
    after_long_help = exit_codes(ErrorKind::EXIT_STATUSES)
)]
pub struct LowArgs {
    /// Output format: text or json
    ///
    /// With json, an error is a line {"error": TEXT, "exit_code": CODE} on stderr.
    #[arg(
        short,
        long,
        global = true,
        value_name = "FORMAT",
        default_value = "text",
        hide_possible_values = true
    )]
    pub output: Output,

    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run nodes shared by the processes of this host, or query running nodes
    ///
    /// Without a command, runs a node for each address until SIGTERM. Each flag is also a key of
    /// the configuration file, with the same name. Flags override the file; a repeatable flag
    /// replaces the list of the file.
    Node(Box<NodeArgs>),
    /// Measure the round trip to another node, similar to rds-ping
    ///
    /// Sends an empty message to port 0 of the node, which every node answers. Exits with 1 if
    /// nothing was answered.
    Ping(PingArgs),
    /// Show counters, sockets, connections and queues of a node, similar to rds-info
    ///
    /// Shows everything unless -c, -k, -n, -s, -t or -r is given. The node must be running.
    Info(InfoArgs),
    /// Load two nodes and check every byte and the order of messages
    ///
    /// Run it with --listen on one host, and with that host's address on the other. Exits with 1 if
    /// any message was lost, duplicated, out of order or altered, or if nothing was answered.
    #[command(override_usage = "rds stress [OPTIONS] HOST\n       rds stress [OPTIONS] --listen \
                                --local ADDRESS")]
    Stress(StressArgs),
    /// Send messages from standard input
    ///
    /// Exits when the other node has received all messages.
    Send(SendArgs),
    /// Print messages that arrive at a port
    Recv(RecvArgs),
    /// Write manual pages and shell completions
    ///
    /// For packages: a page for each command, and completions for bash, zsh and fish.
    #[command(hide = true)]
    Documents(DocumentsArgs),
}

impl LowArgs {
    /// Returns the output format for the result and for errors.
    #[must_use]
    pub fn output(&self) -> Output {
        self.output
    }

    /// Runs the command.
    ///
    /// # Errors
    /// The reason for the failure, with its kind.
    pub fn run(&self) -> Result<(), Error> {
        let output = self.output;
        match &self.command {
            Command::Node(args) => node::run(args, output),
            Command::Ping(args) => ping::run(args, output),
            Command::Info(args) => info::run(args, output),
            Command::Stress(args) => stress::run(args, output),
            Command::Send(args) => send::run(args, output),
            Command::Recv(args) => recv::run(args, output),
            Command::Documents(args) => args.run(Self::command(), &manual::manual()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        LowArgs::command().debug_assert();
    }

    #[test]
    fn every_flag_has_help() {
        let mut command = LowArgs::command();
        command.build();
        for command in command.get_subcommands().filter(|c| c.get_name() != "help") {
            let name = command.get_name();
            let about = command.get_about().unwrap_or_else(|| panic!("{name} has no help"));
            assert!(about.to_string().len() <= 100, "{name}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let help = arg.get_help().unwrap_or_else(|| panic!("{name}: {arg} has no help"));
                assert!(help.to_string().len() <= 120, "{name}: the help of {arg} is long");
            }
        }
    }
}
