//! `doctor`: walks a path from the host's name to the first message of a session, says at each step
//! what is right and what to change, and opens nothing.
//!
//! `steps.rs` the walk · `route.rs` the kernel's routes.

mod route;
mod steps;

use crate::cli::Output;
use crate::error::{Error, ErrorKind};
use crate::plan::DoctorPlan;
use crate::run::{print, show};

/// How a step went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// As it should be.
    Ok,
    /// It works, and could be better.
    Warn,
    /// It does not work.
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

/// A step that was walked.
#[derive(Clone, Debug, serde::Serialize)]
struct Step {
    step: &'static str,
    verdict: Verdict,
    /// What was found.
    found: String,
    /// What to change.
    remedy: Option<String>,
}

impl Step {
    fn text(&self) -> String {
        let mut text = format!("{:<5} {:<10} {}\n", self.verdict.word(), self.step, self.found);
        if let Some(remedy) = &self.remedy {
            text += &format!("                 change: {remedy}\n");
        }
        text
    }
}

/// The steps so far. For people each is shown as it is done.
struct Findings {
    steps: Vec<Step>,
    output: Output,
}

impl Findings {
    fn add(&mut self, step: Step) -> Result<(), Error> {
        if self.output == Output::Text {
            print(&step.text())?;
        }
        self.steps.push(step);
        Ok(())
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.steps.iter().filter(|step| step.verdict == verdict).count()
    }
}

/// Walks.
///
/// # Errors
/// [`ErrorKind::Path`] when a step failed.
pub(crate) fn run(plan: &DoctorPlan) -> Result<(), Error> {
    let mut findings = Findings { steps: Vec::new(), output: plan.output };
    steps::walk(plan, &mut findings)?;
    let (warned, failed) = (findings.count(Verdict::Warn), findings.count(Verdict::Fail));
    let summary = serde_json::json!({
        "path": plan.portal.to_string(),
        "usable": failed == 0,
        "warnings": warned,
        "failures": failed,
        "steps": findings.steps,
    });
    show(&summary, plan.output, |_| match (failed, warned) {
        (0, 0) => format!("{} is all right\n", plan.portal),
        (0, n) => format!("{} can be used; {n} could be better\n", plan.portal),
        (n, _) => format!("{} cannot be used: {n} failed\n", plan.portal),
    })?;
    match findings.steps.iter().find(|step| step.verdict == Verdict::Fail) {
        None => Ok(()),
        Some(step) => {
            let text = format!("{}: {}: {}", plan.portal, step.step, step.found);
            Err(Error::new(ErrorKind::Path, text))
        }
    }
}
