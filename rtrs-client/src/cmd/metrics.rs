//! `metrics`, and the metrics of all sessions on a host for `exporter`.

use clap::Args;
use rtrs_core::local::{RequestError, RunDir};
use rtrs_core::metrics::Samples;
use rtrs_core::settings::{Output, print_text};
use rtrs_core::time::Duration;

use super::global::GlobalArgs;
use super::notice::Awaited;
use super::session::Session;
use super::sessions::{REPLY_TIMEOUT, Reply, replies};
use super::text::remark;
use crate::control_protocol::Request;
use crate::error::{Error, usage};
use crate::metrics::{ALL, SESSION_UP};

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
    let samples = match &args.name {
        Some(name) => Session::find(name, global)?.request(&Request::Metrics)?,
        None => {
            let (what, run_dir) = (|| "sessions to answer".to_owned(), global.run_dir()?);
            let found = Awaited { what, at_most: REPLY_TIMEOUT }
                .with_notice(global.output, || gather(&run_dir, |_| REPLY_TIMEOUT))?;
            for (name, error) in &found.silent {
                // `list` reports dead sessions.
                if !matches!(error, RequestError::NotRunning) {
                    remark(format_args!("{name}: {error}"));
                }
            }
            found.samples
        }
    };
    print_text(&samples.text(ALL))
}

/// Metrics of all sessions in a run directory.
#[derive(Debug)]
pub(super) struct Gathered {
    /// Samples of all sessions, including one per session that shows whether it answered.
    pub(super) samples: Samples,
    /// Sessions that did not answer, by name, with the reasons.
    pub(super) silent: Vec<(String, RequestError)>,
}

/// Requests the metrics of all sessions at the same time. `timeout` returns the time limit for the
/// session with a given name.
///
/// # Errors
/// Fails if the directory cannot be read or can be changed by other users.
pub(super) fn gather(
    run_dir: &RunDir,
    timeout: impl Fn(&str) -> Duration + Sync,
) -> Result<Gathered, Error> {
    run_dir.check()?;
    let mut found = Gathered { samples: Samples::default(), silent: Vec::new() };
    for Reply { name, result } in replies::<Samples>(&Request::Metrics, run_dir, timeout)? {
        found.samples.add(&SESSION_UP, &[&name], result.is_ok());
        match result {
            Ok(samples) => found.samples.merge(&samples),
            Err(error) => found.silent.push((name, error)),
        }
    }
    Ok(found)
}
