//! What was typed: the command line of `rtrs-server`.
//!
//! Owns [`LowArgs`], which clap fills; wrong flags end the process with code 2 before anything
//! else happens. What the flags mean, together with a configuration file, is `plan.rs`. The
//! settings themselves are declared in `config.rs`, since each is also a key of the file. Without
//! a command the flags are a server's; the commands, for one that runs, are in `cli/admin.rs`.

mod admin;

pub use admin::{Command, DisconnectArgs, DrainArgs, EvictArgs, SessionCommand, Shown, Where};

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::config::Settings;
use crate::error::Error;

/// Export files, disks and memory as network block devices
///
/// Serves RTRS clients over TCP and over RDMA devices. Every flag below that is a setting is also
/// a key of the configuration file, under the same name; flags win over the file, and a repeatable
/// flag replaces the file's list. The commands speak with a server that runs, and take no flags
/// before them.
///
/// Exit codes: 0 ended well, 1 failed, 2 wrong usage or wrong contents of the configuration file.
#[derive(Debug, Parser)]
#[command(
    name = "rtrs-server",
    version,
    max_term_width = 100,
    args_conflicts_with_subcommands = true
)]
pub struct LowArgs {
    /// The settings.
    #[command(flatten)]
    pub settings: Settings,

    /// Read settings from this YAML file
    ///
    /// configs/server.yaml in the source tree lists every key with its default.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Check flags, file and export targets, then stop
    ///
    /// Nothing is listened on and nothing is changed.
    #[arg(long)]
    pub check: bool,

    /// Print all settings with their defaults, then stop
    ///
    /// What is printed is a complete configuration file.
    #[arg(long)]
    pub print_config: bool,

    /// Format of --print-config: yaml or json
    ///
    /// Both are accepted by --config.
    #[arg(short, long, value_name = "FORMAT", default_value = "yaml")]
    pub output: Output,

    /// What to do with a running server; none to be one.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Format of printed settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// YAML.
    Yaml,
    /// JSON.
    Json,
}

impl LowArgs {
    /// The flags laid over the configuration file, if one was named.
    ///
    /// # Errors
    /// The errors of [`Settings::from_file`].
    pub fn layered_settings(&self) -> Result<Settings, Error> {
        let file = match &self.config {
            Some(path) => Settings::from_file(path)?,
            None => Settings::default(),
        };
        Ok(self.settings.clone().over(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn parse(args: &[&str]) -> Result<LowArgs, clap::Error> {
        LowArgs::try_parse_from([&["rtrs-server"], args].concat())
    }

    #[test]
    fn the_definition_holds() {
        LowArgs::command().debug_assert();
    }

    #[test]
    fn every_flag_has_short_and_long_help_and_every_setting_is_a_key() {
        let not_keys = ["config", "check", "print-config", "output", "help", "version"];
        let defaults = serde_yaml::to_value(Settings::defaults()).unwrap();
        let mut keys: Vec<&str> =
            defaults.as_mapping().unwrap().keys().filter_map(|key| key.as_str()).collect();
        let command = LowArgs::command();
        for arg in command.get_arguments() {
            let name = arg.get_long().unwrap();
            let short = arg.get_help().unwrap_or_else(|| panic!("--{name} has no help"));
            assert!(short.to_string().len() <= 100, "the short help of --{name} is long");
            if !["help", "version"].contains(&name) {
                let long = arg.get_long_help().unwrap_or_else(|| panic!("--{name}: no long help"));
                assert_ne!(long.to_string(), short.to_string(), "--{name}");
            }
            if not_keys.contains(&name) {
                continue;
            }
            let at = keys.iter().position(|key| *key == name);
            keys.remove(at.unwrap_or_else(|| panic!("--{name} is no key of the file")));
        }
        assert!(keys.is_empty(), "keys without a flag: {keys:?}");
    }

    #[test]
    fn commands_have_help_and_flags_of_their_own() {
        let mut command = LowArgs::command();
        command.build();
        let mut all: Vec<_> =
            command.get_subcommands().filter(|c| c.get_name() != "help").collect();
        let nested = |c: &&clap::Command| c.get_name() == "session";
        let session = all.iter().copied().find(nested).unwrap();
        all.extend(session.get_subcommands().filter(|c| c.get_name() != "help"));
        assert_eq!(all.len(), 5);
        for command in all {
            let name = command.get_name();
            let short = command.get_about().unwrap_or_else(|| panic!("{name} has no help"));
            assert!(short.to_string().len() <= 100, "{name}");
            assert_ne!(command.get_long_about().unwrap().to_string(), short.to_string(), "{name}");
        }
        let args = parse(&["drain", "--within", "2m", "--name", "n", "-o", "json"]).unwrap();
        let Some(Command::Drain(drain)) = args.command else { panic!("{args:?}") };
        assert_eq!(drain.within.get(), 120_000);
        assert_eq!((drain.place.name.as_deref(), drain.place.output), (Some("n"), Shown::Json));
        let args = parse(&["session", "disconnect", "s", "--path", "3", "--run-dir=/r"]).unwrap();
        let Some(Command::Session(SessionCommand::Disconnect(args))) = args.command else {
            panic!("{args:?}")
        };
        assert_eq!((&*args.session, args.path), ("s", Some(3)));
        assert_eq!(args.place.run_dir, Some("/r".into()));
        assert!(parse(&["--export=/x"]).unwrap().command.is_none());
    }

    #[test]
    fn flags_reach_their_settings() {
        let args = parse(&[
            "--export=/srv/a.img",
            "--export",
            "v=mem:1M,ro",
            "--search-path=/srv/%SESSNAME%",
            "--listen=tcp://127.0.0.1:0",
            "--queue-depth=128",
            "--chunk-size=64k",
            "--shards=2",
            "--pin=off",
            "--always-invalidate=off",
            "--crc=off",
            "--heartbeat-ms=100",
            "--heartbeat-missed-max=3",
            "--handshake-timeout-ms=1000",
            "--half-open-max=10",
            "--sessions-max=11",
            "--shutdown-grace-ms=12",
            "--poll-us=0",
            "--ping-only",
            "--no-ping",
            "--rping",
            "--server-id",
            "s",
            "--name=n",
            "--run-dir=/r",
            "--state-dir=/s",
            "--log=debug",
        ])
        .unwrap();
        let text = "export: [/srv/a.img, 'v=mem:1M,ro']\nsearch-path: /srv/%SESSNAME%\n\
             listen: tcp://127.0.0.1:0\nqueue-depth: 128\nchunk-size: 64k\nshards: 2\npin: off\n\
             always-invalidate: off\n\
             crc: off\nheartbeat-ms: 100\nheartbeat-missed-max: 3\nhandshake-timeout-ms: 1000\n\
             half-open-max: 10\nsessions-max: 11\nshutdown-grace-ms: 12\npoll-us: 0\nlog: debug\n\
             ping-only: true\nno-ping: true\nrping: true\nserver-id: s\nname: n\nrun-dir: /r\n\
             state-dir: /s\n";
        assert_eq!(args.settings, Settings::from_yaml(text, "s").unwrap());
    }

    #[test]
    fn wrong_usage_says_flag_value_and_remedy() {
        for (args, part) in [
            (&["--chunk-size=12q"][..], "'--chunk-size <SIZE>': size \"12q\" has the unknown unit"),
            (&["--listen=1.2.3.4"], "has no scheme; write tcp://1.2.3.4"),
            (&["--export=/x,rw"], "has the unknown option \"rw\"; did you mean \"ro\"?"),
            (&["--crc=yes"], "is neither on nor off; use on or off"),
            (&["--queue-depth=x"], "invalid digit"),
            (&["--que-depth=5"], "--queue-depth"),
            (&["--crc=on", "--crc=off"], "cannot be used multiple times"),
            (&["vol0"], "unrecognized subcommand 'vol0'"),
            (&["session"], "Usage: rtrs-server session <COMMAND>"),
            (&["session", "evict"], "<SESSION>"),
            (&["--export=/x", "session", "list"], "cannot be used with"),
            (&["drain", "--within=5y"], "5y"),
            (&["session", "disconnect", "s", "--path=x"], "invalid digit"),
            (&["-o", "xml"], "[possible values: yaml, json]"),
        ] {
            let error = parse(args).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(part), "{error}\nlacks {part}");
        }
        assert_eq!(parse(&["--help"]).unwrap_err().kind(), ErrorKind::DisplayHelp);
        assert_eq!(parse(&["--version"]).unwrap_err().exit_code(), 0);
    }
}
