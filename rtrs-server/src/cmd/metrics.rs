//! The command `metrics`.

use clap::Args;
use rtrs_core::metrics::Samples;
use rtrs_core::settings::{Output, print_text};

use super::server::{Server, ServerArgs};
use crate::control_protocol::Request;
use crate::error::{Error, ErrorKind};
use crate::metrics::ALL;

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct MetricsArgs {
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &MetricsArgs) -> Result<(), Error> {
    if args.server.output == Output::Json {
        let text = "metrics prints the text format of Prometheus; drop -o json";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    let samples: Samples = Server::find(&args.server)?.request(&Request::Metrics)?;
    print_text(&samples.text(ALL))
}
