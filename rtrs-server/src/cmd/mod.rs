//! The command line of `rtrs-server`: one file per command, with its arguments, implementation and
//! output.
//!
//! Owns [`LowArgs`], which clap fills; invalid flags end the process with code 2 before anything
//! else happens. Without a command, the flags are the settings of the server to run: they are
//! declared in `settings.rs`, because each is also a key of the configuration file, and validated
//! in `plan.rs`. The commands address a server that is already running (`server.rs`).

mod aliases;
mod drain;
mod export;
mod manual;
mod metrics;
mod reload;
mod server;
mod session;
mod set;
mod status;
mod text;
mod top;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use rtrs_core::local::absolute_path;
use rtrs_core::settings::{
    DocumentsArgs, ErrorClass, Flags, Output, exit_codes, print, settings_from_file,
};
use rtrs_core::tls::KeyCommand;
use serde_json::json;

use self::aliases::without_aliases;
use self::drain::DrainArgs;
use self::export::ExportCommand;
use self::metrics::MetricsArgs;
use self::reload::ReloadArgs;
use self::server::ServerArgs;
use self::session::SessionCommand;
use self::set::{GetArgs, SetArgs};
use self::top::TopArgs;
use crate::daemon::{Checked, Reread, Running, check_start, serve, warnings};
use crate::error::{Error, ErrorKind};
use crate::plan::Plan;
use crate::settings::{ExportSpec, OnMissing, Settings};

/// Export files, disks and memory as network block devices
///
/// Serves RTRS clients over TCP and over RDMA devices. Each flag below that is a setting is also a
/// key of the configuration file, with the same name. Flags override the file; a repeatable flag
/// replaces the list of the file. The commands control a running server; before them, only
/// --run-dir and --output can be set.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "rtrs-server",
    version = env!("RTRS_VERSION"),
    max_term_width = 0,
    args_conflicts_with_subcommands = true,
    after_long_help = exit_codes(ErrorKind::EXIT_STATUSES)
)]
pub struct LowArgs {
    /// The settings.
    #[command(flatten)]
    pub settings: Flags<Settings>,

    /// Read settings from this YAML file
    ///
    /// configs/server.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check flags, configuration file, exports, locks and addresses, print ok, then exit
    ///
    /// Fails if an export cannot be opened, for example because its target is locked, and on
    /// anything else that would prevent a start, such as an address in use or missing permission
    /// for io_uring. Prints the warnings that startup would log. If this server
    /// itself is running (its name, or without --name its address, in the same run directory),
    /// reports that and does not test what the server holds. Accepts no connections and changes
    /// nothing.
    #[arg(long)]
    pub check: bool,

    /// Do not start if any export cannot be opened
    ///
    /// Equivalent to --on-missing refuse; overrides --on-missing. By default the server serves the
    /// other exports, and opens the rest as soon as that is possible.
    #[arg(long)]
    pub strict: bool,

    /// Print the settings in effect as YAML, then exit
    ///
    /// The output is a complete configuration file.
    #[arg(long)]
    pub print_config: bool,

    /// Output format of --print-config: text (YAML) or json
    ///
    /// --config reads both.
    #[arg(short, long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub output: Output,

    /// Command for a running server; without one, this process becomes a server.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// The commands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Show the state of a running server
    ///
    /// Version, uptime, addresses, and the numbers of exports, sessions and paths by state. `export
    /// list` and `session list` have the details.
    Status(ServerArgs),
    /// Change settings of a running server: its log level
    ///
    /// The change lasts until the server ends; the next start uses the log level of the
    /// configuration. Exports and access lists change with `export` and `reload`; other settings
    /// need a restart.
    Set(SetArgs),
    /// Print settings of a running server
    ///
    /// Omits exports and access lists, which `export list` shows.
    Get(GetArgs),
    /// List and end the sessions of a running server
    ///
    /// The server is found by its control socket in the run directory.
    #[command(subcommand)]
    Session(SessionCommand),
    /// Show live rates of sessions, their paths and exports
    ///
    /// On a terminal the view fills the screen, and h lists the keys. Elsewhere each interval is a
    /// few lines of text, or with -o json one line of JSON.
    Top(TopArgs),
    /// Print the metrics of a running server
    ///
    /// In the text format of Prometheus, as served by GET /metrics (--metrics). For the textfile
    /// collector of node_exporter, write the output to a temporary file and rename that file.
    Metrics(MetricsArgs),
    /// Stop a running server without loss
    ///
    /// Flushes the exports while the server still serves. Then accepts no more connections, ends
    /// the paths of each session one after another, each once its requests are answered, and
    /// flushes the exports again. Clients continue over their other paths and then wait for a
    /// server at the same address. Exits with 0 when the server's process has ended after all of
    /// this. Exits with 1 if requests were left unanswered or data was not flushed, or if the first
    /// flush failed: then the server continues to serve, unless you use --force.
    Drain(DrainArgs),
    /// List, add, remove and change the exports of a running server
    ///
    /// Other exports are not touched.
    #[command(subcommand)]
    Export(ExportCommand),
    /// Reload the configuration file of a running server and apply its exports
    ///
    /// SIGHUP does the same. Changes nothing if the configuration, a certificate or a key is wrong.
    /// First applies access lists and the files of tls-dir, key-file and clients-file, and ends the
    /// sessions of clients that are no longer accepted. Then adds, removes and changes exports. A
    /// new export that cannot be opened counts as failed, as at startup; with --strict, no export
    /// changes in that case. An open export is not changed, but is reported. Reports other changed
    /// settings, which need a restart. Exits with 1 if an export differs from the configuration for
    /// any reason other than being open.
    Reload(ReloadArgs),
    /// Manage this server's key
    ///
    /// Used by tls:// and rdma:// with --key-file, like the keys of ssh. Clients set the output of
    /// `show` as their server-key. Works without a running server.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Write manual pages and shell completions
    ///
    /// For packages: a page for each command, and completions for bash, zsh and fish.
    #[command(hide = true)]
    Documents(DocumentsArgs),
}

impl LowArgs {
    /// Returns the arguments in parsing order: `--run-dir` and `--output` before a command are
    /// moved after it. All other flags before a command belong to a server to run. Replaces a
    /// command name that other tools use, and prints a tip.
    #[must_use]
    pub fn arguments(mut args: Vec<OsString>) -> Vec<OsString> {
        let mut at = 1;
        while let Some(flag) = args.get(at).and_then(|arg| arg.to_str()) {
            at += match flag {
                "--run-dir" | "--output" | "-o" => 2,
                _ if flag.starts_with("--run-dir=") || flag.starts_with("--output=") => 1,
                _ if flag.starts_with('-') => return args,
                _ => break,
            };
        }
        if at < args.len() {
            let command = args.split_off(at);
            let flags = args.split_off(1);
            args.extend(command.into_iter().chain(flags));
        }
        without_aliases(args)
    }

    /// Returns the output format for the result and errors.
    #[must_use]
    pub fn output(&self) -> Output {
        match &self.command {
            None | Some(Command::Documents(_)) => self.output,
            Some(Command::Status(args)) => args.output,
            Some(Command::Set(args)) => args.server.output,
            Some(Command::Get(args)) => args.server.output,
            Some(Command::Session(command)) => command.server().output,
            Some(Command::Top(args)) => args.server.output,
            Some(Command::Metrics(args)) => args.server.output,
            Some(Command::Drain(args)) => args.server.output,
            Some(Command::Export(command)) => command.server().output,
            Some(Command::Reload(args)) => args.server.output,
            Some(Command::Key(command)) => command.args().output,
        }
    }

    /// Returns the settings from the configuration file, if one was given, overridden by the flags.
    ///
    /// # Errors
    /// Errors in the file, or flags with old names.
    pub fn layered_settings(&self) -> Result<Settings, Error> {
        let mut settings = match &self.config {
            Some(path) => settings_from_file(path)?,
            None => Settings::default(),
        };
        self.settings.apply(&mut settings)?;
        match settings.on_missing {
            _ if self.strict => settings.on_missing = OnMissing::Refuse,
            OnMissing::Auto if self.config.is_some() => settings.on_missing = OnMissing::Wait,
            _ => {}
        }
        Ok(settings)
    }

    /// Creates the plan from these flags and the files they name.
    ///
    /// # Errors
    /// Errors in the files, or conflicting settings.
    pub fn plan(&self) -> Result<Plan, Error> {
        let mut settings = self.layered_settings()?;
        let dangling = settings.add_exports_of_dir(self.config.as_deref())?;
        // Saved and printed configurations may be used from another directory.
        for path in settings.export.iter_mut().filter_map(ExportSpec::path_mut) {
            *path = absolute_path("export", path)?;
        }
        let config = self.config.as_ref().map(|path| absolute_path("config", path)).transpose();
        Ok(Plan { config: config?, dangling, ..Plan::new(settings)? })
    }

    /// Runs the command. Without a command, plans a server, and then either stops for `--check` or
    /// `--print-config`, or serves.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for invalid arguments, otherwise errors from the server or the system.
    pub fn run(&self) -> Result<(), Error> {
        match &self.command {
            Some(Command::Status(args)) => return status::run(args),
            Some(Command::Set(args)) => return set::set(args),
            Some(Command::Get(args)) => return set::get(args),
            Some(Command::Session(command)) => return session::run(command),
            Some(Command::Top(args)) => return top::run(args),
            Some(Command::Metrics(args)) => return metrics::run(args),
            Some(Command::Drain(args)) => return drain::run(args),
            Some(Command::Export(command)) => return export::run(command),
            Some(Command::Reload(args)) => return reload::run(args),
            Some(Command::Key(command)) => return command.run(),
            Some(Command::Documents(args)) => {
                return args.run(Self::command(), &manual::manual());
            }
            None => {}
        }
        let mut plan = self.plan()?;
        if self.check || self.print_config || !plan.may_lack_files() {
            plan = plan.complete()?;
        }
        let checked = match (self.check, self.print_config) {
            (true, _) => {
                plan.check()?;
                Some(check_start(&plan)?)
            }
            (false, true) => None,
            (false, false) => {
                plan.check_for_start()?;
                None
            }
        };
        if self.print_config {
            let own = Plan::new(self.layered_settings()?)?.settings.export;
            let map = print(&Settings { export: own, ..plan.settings });
            let yaml = serde_yaml::to_string(&map).map_err(|error| {
                Error::with_source(ErrorKind::System, "cannot print the settings", error)
            })?;
            return self.output.print(&map, |_| yaml);
        }
        if let Some(Checked { running, warnings: of_start }) = checked {
            for warning in warnings(&plan.settings).into_iter().chain(of_start) {
                // Ignored if stderr is closed.
                let _ = writeln!(io::stderr(), "warning: {warning}");
            }
            let checked = match &running {
                Some(running) => json!({ "ok": true, "running": running }),
                None => json!({ "ok": true }),
            };
            return self.output.print(&checked, |_| checked_text(running.as_ref()));
        }
        let again = self.clone();
        let reread: Reread = Box::new(move || again.plan()?.complete());
        serve(&plan, reread)
    }
}

/// Formats the result of a check.
fn checked_text(running: Option<&Running>) -> String {
    let Some(Running { name, pid, holds, .. }) = running else { return "ok\n".to_owned() };
    let holds = match &holds[..] {
        [] => String::new(),
        holds => format!("; it holds {}, which were not tested", holds.join(", ")),
    };
    format!("ok\nthis server is running: {name}, process {pid}{holds}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::error::ErrorKind;

    fn parse(args: &[&str]) -> Result<LowArgs, clap::Error> {
        LowArgs::try_parse_from([&["rtrs-server"], args].concat())
    }

    #[test]
    fn the_command_line_definition_is_valid() {
        LowArgs::command().debug_assert();
    }

    #[test]
    fn every_flag_has_short_and_long_help() {
        let command = LowArgs::command();
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let name = arg.get_long().unwrap();
            let short = arg.get_help().unwrap_or_else(|| panic!("--{name} has no help"));
            assert!(short.to_string().len() <= 100, "the short help of --{name} is long: {short}");
            if !["help", "version"].contains(&name) {
                let long = arg.get_long_help().unwrap_or_else(|| panic!("--{name}: no long help"));
                assert_ne!(long.to_string(), short.to_string(), "--{name}");
            }
        }
    }

    #[test]
    fn commands_have_help_and_their_own_flags() {
        let mut command = LowArgs::command();
        command.build();
        let mut all: Vec<_> =
            command.get_subcommands().filter(|c| c.get_name() != "help").collect();
        for name in ["session", "export"] {
            let nested = all.iter().copied().find(|c| c.get_name() == name).unwrap();
            all.extend(nested.get_subcommands().filter(|c| c.get_name() != "help"));
        }
        assert_eq!(all.len(), 21);
        for command in all {
            let name = command.get_name();
            let short = command.get_about().unwrap_or_else(|| panic!("{name} has no help"));
            assert!(short.to_string().len() <= 100, "{name}");
            assert_ne!(command.get_long_about().unwrap().to_string(), short.to_string(), "{name}");
        }
        let args = parse(&["drain", "--within", "2m", "--name", "n", "-o", "json"]).unwrap();
        let Some(Command::Drain(drain)) = args.command else { panic!("{args:?}") };
        assert_eq!(drain.within.millis(), 120_000);
        assert_eq!((drain.server.name.as_deref(), drain.server.output), (Some("n"), Output::Json));
        let args = parse(&["session", "disconnect", "s", "--path", "3", "--run-dir=/r"]).unwrap();
        let Some(Command::Session(SessionCommand::Disconnect(args))) = args.command else {
            panic!("{args:?}")
        };
        assert_eq!((&*args.session, args.path), ("s", Some(3)));
        assert_eq!(args.server.run_dir, Some("/r".into()));
        assert!(parse(&["--export=/x"]).unwrap().command.is_none());
    }

    #[test]
    fn flags_reach_their_settings() {
        let args = parse(&[
            "--export=/srv/a.img",
            "--export",
            "v=mem:1M,ro",
            "--exports-dir=/e",
            "--search-path=/srv/%SESSNAME%",
            "--listen=tcp://127.0.0.1:0",
            "--queue-depth=128",
            "--chunk-size=64k",
            "--shards=2",
            "--pin=off",
            "--always-invalidate=off",
            "--crc=off",
            "--heartbeat=100ms",
            "--heartbeat-missed-max=3",
            "--heartbeat-idle-max=9s",
            "--handshake-timeout=1s",
            "--open-timeout=2s",
            "--half-open-max=10",
            "--sessions-max=11",
            "--memory-max=5M",
            "--shutdown-grace-ms=12",
            "--poll=0",
            "--ping-only",
            "--no-ping",
            "--rping",
            "--server-id",
            "s",
            "--name=n",
            "--run-dir=/r",
            "--state-dir=/s",
            "--user=rtrs:disk",
            "--metrics=127.0.0.1:9823",
            "--log=debug",
        ])
        .unwrap();
        let text = "export: [/srv/a.img, 'v=mem:1M,ro']\nexports-dir: /e\n\
             search-path: /srv/%SESSNAME%\nlisten: tcp://127.0.0.1:0\nqueue-depth: 128\n\
             chunk-size: 64k\nshards: 2\npin: off\n\
             always-invalidate: off\n\
             crc: off\nheartbeat: 100ms\nheartbeat-missed-max: 3\n\
             heartbeat-idle-max: 9s\nhandshake-timeout: 1s\n\
             open-timeout: 2s\nhalf-open-max: 10\nsessions-max: 11\nmemory-max: 5M\n\
             shutdown-grace: 12ms\npoll: 0s\nlog: debug\n\
             ping-only: true\nno-ping: true\nrping: true\nserver-id: s\nname: n\nrun-dir: /r\n\
             state-dir: /s\nuser: rtrs:disk\nmetrics: 127.0.0.1:9823\n";
        assert_eq!(args.layered_settings().unwrap(), Settings::from_yaml(text, "s").unwrap());
    }

    #[test]
    fn switches_in_the_file_stay_on_without_their_flags() {
        let file = std::env::temp_dir().join(format!("rtrs-on-{}.yaml", std::process::id()));
        let text = "export: /x\non-missing: wait\ninsecure-open: true\nping-only: true\n\
             no-ping: true\nrping: true\n";
        std::fs::write(&file, text).unwrap();
        let args = parse(&[&format!("--config={}", file.display())]).unwrap();
        assert_eq!(args.layered_settings().unwrap(), Settings::from_yaml(text, "s").unwrap());
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn flags_are_accepted_before_and_after_commands() {
        let arguments = |args: &str| {
            let args = args.split(' ').map(OsString::from).collect();
            let args = LowArgs::arguments(args).into_iter().map(|arg| arg.into_string().unwrap());
            args.collect::<Vec<_>>().join(" ")
        };
        for (typed, parsed) in [
            ("s --run-dir /r session list", "s session list --run-dir /r"),
            ("s --run-dir=/r -o json drain", "s drain --run-dir=/r -o json"),
            ("s session list --run-dir /r", "s session list --run-dir /r"),
            ("s --run-dir /r --export x", "s --run-dir /r --export x"),
            ("s --run-dir", "s --run-dir"),
            ("s --run-dir /r", "s --run-dir /r"),
            ("s", "s"),
        ] {
            assert_eq!(arguments(typed), parsed);
        }
    }

    #[test]
    fn wrong_usage_names_flag_value_and_remedy() {
        for (args, part) in [
            (&["--chunk-size=12q"][..], "'--chunk-size <SIZE>': size \"12q\" has the unknown unit"),
            (&["--listen=1.2.3.4"], "has no scheme; write tcp://1.2.3.4"),
            (&["--export=/x,row"], "has the unknown option \"row\"; did you mean \"ro\"?"),
            (&["--crc=maybe"], "switch \"maybe\" is not valid; use on or off"),
            (&["--queue-depth=x"], "number \"x\" is not a whole number; use 1 to 65535"),
            (&["--que-depth=5"], "--queue-depth"),
            (&["--crc=on", "--crc=off"], "cannot be used multiple times"),
            (&["vol0"], "unrecognized subcommand 'vol0'"),
            (&["session"], "Usage: rtrs-server session <COMMAND>"),
            (&["session", "evict"], "<SESSION>"),
            (&["--export=/x", "session", "list"], "cannot be used with"),
            (&["drain", "--within=5y"], "5y"),
            (&["drain", "--within=5"], "time \"5\" has no unit; write 5s or 5ms"),
            (&["drain", "--within=1h"], "time \"1h\" is out of range; use 0s to 10m"),
            (&["session", "disconnect", "s", "--path=x"], "invalid digit"),
            (&["-o", "xml"], "[possible values: text, json]"),
        ] {
            let error = parse(args).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(part), "{error}\nlacks {part}");
        }
        assert_eq!(parse(&["--help"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
        assert_eq!(parse(&["--version"]).unwrap_err().exit_code(), 0);
    }
}
