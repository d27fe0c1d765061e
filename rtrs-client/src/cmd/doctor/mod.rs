//! `doctor`: checks a path step by step, from the host name to the first message of a session, and
//! suggests fixes. It opens nothing.
//!
//! `steps.rs` contains the steps, `route.rs` the kernel's routes.

mod route;
mod steps;

use clap::Args;
use rtrs_core::settings::{Output, print_text};

use super::global::GlobalArgs;
use super::link_target::{LinkTarget, Timeout};
use crate::error::{Error, ErrorKind};
use crate::tls::TlsSources;

/// The arguments.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The path to check, as in attach --path.
    #[arg(value_name = "PATH")]
    pub target: LinkTarget,

    /// Timeout of a step, 10ms to 10m [default: 5s]
    ///
    /// It applies to each connect and each answer.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Timeout,

    /// Certificates or keys.
    #[command(flatten)]
    pub tls: TlsSources,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// Correct.
    Ok,
    /// Working, but not optimal.
    Warn,
    /// Not working.
    Fail,
    /// Not tried, or not needed.
    Skip,
}

impl Verdict {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
            Self::Skip => "skip",
        }
    }
}

/// Completed step.
#[derive(Clone, Debug, serde::Serialize)]
struct Step {
    step: &'static str,
    verdict: Verdict,
    /// Finding of the step.
    found: String,
    /// Suggested fix.
    remedy: Option<String>,
}

impl Step {
    fn text(&self) -> String {
        let mut text = format!("{:<5} {:<10} {}\n", self.verdict.word(), self.step, self.found);
        if let Some(remedy) = &self.remedy {
            text += &format!("                 hint: {remedy}\n");
        }
        text
    }
}

/// Steps so far. In text output, each is shown once it is completed.
struct Findings {
    steps: Vec<Step>,
    output: Output,
}

impl Findings {
    fn add(&mut self, step: Step) -> Result<(), Error> {
        if self.output == Output::Text {
            print_text(&step.text())?;
        }
        self.steps.push(step);
        Ok(())
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.steps.iter().filter(|step| step.verdict == verdict).count()
    }
}

/// Checks the path. The error is [`ErrorKind::Path`] when a step failed.
pub(super) fn run(args: &DoctorArgs, global: &GlobalArgs) -> Result<(), Error> {
    args.target.check(&args.tls)?;
    let portal = &args.target.portal;
    let mut findings = Findings { steps: Vec::new(), output: global.output };
    steps::walk(portal, &args.tls, args.timeout.get(), &mut findings)?;
    let (warned, failed) = (findings.count(Verdict::Warn), findings.count(Verdict::Fail));
    let summary = serde_json::json!({
        "path": portal.to_string(),
        "usable": failed == 0,
        "warnings": warned,
        "failures": failed,
        "steps": findings.steps,
    });
    global.output.print(&summary, |_| match (failed, warned) {
        (0, 0) => format!("{portal} is OK\n"),
        (0, n) => format!("{portal} works; warnings: {n}\n"),
        (n, _) => format!("{portal} does not work; failed steps: {n}\n"),
    })?;
    match findings.steps.iter().find(|step| step.verdict == Verdict::Fail) {
        None => Ok(()),
        Some(step) => {
            let text = format!("{portal}: {}: {}", step.step, step.found);
            Err(Error::new(ErrorKind::Path, text))
        }
    }
}
