//! The command `session evict`.

use std::time::Instant;

use clap::Args;
use rtrs_core::time::Duration;
use serde_json::json;

use crate::cmd::server::{Server, ServerArgs, Within};
use crate::control_protocol::{Ended, Request};
use crate::error::{Error, ErrorKind};

/// Interval between checks of whether the evicted session still exists.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct EvictArgs {
    /// Name or ID of the session, as in `session list`
    pub session: String,

    /// Wait at most TIME, for example 5s, for running IO; exit with 1 if IO is still running
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub within: Within,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &EvictArgs) -> Result<(), Error> {
    let session = &args.session;
    let server = Server::find(&args.server)?;
    let ended: Ended = server.request(&Request::SessionEvict { session: session.clone() })?;
    let deadline = Instant::now() + args.within.get();
    while let Some(left) =
        server.sessions()?.sessions.into_iter().find(|left| left.id == ended.session)
    {
        if Instant::now() >= deadline {
            return Err(Error::new(
                ErrorKind::System,
                format!(
                    "{session} is evicted, but the backend still runs {} of its requests; its \
                     exports stay in use until these finish (see session list)",
                    left.io.inflight
                ),
            ));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let evicted = json!({ "evicted": ended.session });
    args.server.output.print(&evicted, |_| format!("{session} evicted\n"))
}
