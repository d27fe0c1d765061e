//! The command `drain`.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use clap::Args;
use rtrs_core::time::Duration;

use super::server::{Server, ServerArgs, Within};
use crate::control_protocol::{Drained, Request};
use crate::error::{Error, ErrorKind};

/// Time that closing connections, ending threads and the last flush may take beyond a drain's time
/// limit.
const DRAIN_MARGIN: Duration = Duration::from_secs(30);
/// Maximum time for a drained server's process to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct DrainArgs {
    /// Maximum time, for example 30s
    ///
    /// Work that does not finish in time is abandoned, as with SIGTERM.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub within: Within,

    /// Stop the server even if the first flush fails or an exported file was deleted
    ///
    /// Use this if the data is already lost or the disk fails every flush. The next server reports
    /// the loss to the clients. Exits with 1. The content of a deleted file is lost.
    #[arg(long)]
    pub force: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &DrainArgs) -> Result<(), Error> {
    let request = Request::Drain { within_ms: args.within.millis(), force: args.force };
    let timeout = args.within.get() + DRAIN_MARGIN;
    let server = Server::find(&args.server)?;
    let (drained, stream) = server.request_within::<Drained>(&request, timeout)?;
    wait_exit(&stream)?;
    args.server.output.print(&drained, |_| "drained\n".to_owned())
}

/// Waits until the process exits, which closes its side of the connection: only then are its
/// address and files free.
fn wait_exit(stream: &UnixStream) -> Result<(), Error> {
    let ended = stream
        .set_read_timeout(Some(EXIT_TIMEOUT))
        .and_then(|()| io::copy(&mut stream.take(4096), &mut io::sink()));
    ended.map(drop).map_err(|error| {
        let what = "the server is drained, but its process has not exited";
        Error::with_source(ErrorKind::System, what, error)
    })
}
