//! The commands that speak with a running server: sessions, drain.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtrs_core::config::Millis;

/// What to do with a running server.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Look at the sessions of a running server, and end them
    ///
    /// The server is found by its control socket in the run directory.
    #[command(subcommand)]
    Session(SessionCommand),
    /// End a running server without loss: what runs is answered, what was written is flushed
    ///
    /// Exports are flushed while everything is still served; then no connection is taken any more,
    /// the paths of each session end one after the other, each when its requests are answered, and
    /// the exports are flushed again. Clients go on over their other paths and then wait for a
    /// server at the same address. Returns 0 when the server's process has ended with all that
    /// done; 1 when it had to be ended with requests unanswered or data not flushed, or when the
    /// first flush failed: then it goes on serving.
    Drain(DrainArgs),
}

/// What to do with sessions.
#[derive(Debug, Subcommand)]
pub enum SessionCommand {
    /// List sessions: their paths, exports, requests
    ///
    /// -o json has every counter.
    List(Where),
    /// End paths of a session; its client connects them again
    ///
    /// No request is lost: the client sends what was not answered again.
    Disconnect(DisconnectArgs),
    /// End a session, its opens too, and do not let it come back
    ///
    /// For a client that is gone and still holds an export, so that another may open it. Its name
    /// is free at once, its exports when its last request has left the backend. The session's
    /// number is refused until the server restarts; a client that is alive after all gets errors
    /// and has to attach anew.
    Evict(EvictArgs),
}

/// Where the server is found, and how its answer is shown.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct Where {
    /// The server's name; needed where several run
    ///
    /// What the server was given with --name, or the address it listens on first, as in
    /// 127.0.0.1:1234; the port alone if that is on every address.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// Look for control sockets here [default: /run/rtrs, or $XDG_RUNTIME_DIR/rtrs without root]
    ///
    /// Without root and XDG_RUNTIME_DIR it is /tmp/rtrs-UID.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Print for people (text) or for programs (json)
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: Shown,
}

/// How an answer is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shown {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// `session disconnect`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DisconnectArgs {
    /// The session's name, or its number as `session list` shows it
    pub session: String,

    /// End only this path, by its number as `session list` shows it
    #[arg(long, value_name = "N")]
    pub path: Option<u32>,

    /// Where.
    #[command(flatten)]
    pub place: Where,
}

/// `session evict`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct EvictArgs {
    /// The session's name, or its number as `session list` shows it
    pub session: String,

    /// Wait so long for its last requests, as in 10s, 500ms or 2m
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Millis,

    /// Where.
    #[command(flatten)]
    pub place: Where,
}

/// `drain`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DrainArgs {
    /// Time for all of it, as in 30s, 500ms or 2m
    ///
    /// What has not ended then is abandoned, as at SIGTERM.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub within: Millis,

    /// Where.
    #[command(flatten)]
    pub place: Where,
}
