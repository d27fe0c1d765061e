//! `metrics`.

use clap::Args;
use rtrs_core::metrics::Samples;
use rtrs_core::settings::{Output, print_text};

use super::global::GlobalArgs;
use super::session::Session;
use super::sessions::replies;
use crate::control_protocol::Request;
use crate::error::{Error, usage};
use crate::metrics::ALL;

/// The arguments.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// Name of the session [default: all sessions]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
}

pub(super) fn run(args: &MetricsArgs, global: &GlobalArgs) -> Result<(), Error> {
    if global.output == Output::Json {
        return Err(usage("metrics prints the text format of Prometheus; drop -o json"));
    }
    let mut all = Samples::default();
    let samples: Vec<Samples> = match &args.name {
        Some(name) => vec![Session::find(name, global)?.request(&Request::Metrics)?],
        None => {
            let run_dir = global.run_dir()?;
            run_dir.check()?;
            replies(&Request::Metrics, &run_dir)?
        }
    };
    samples.iter().for_each(|samples| all.merge(samples));
    print_text(&all.text(ALL))
}
