//! `doctor`: checks paths step by step, from the host name to the first message of a session, and
//! suggests fixes. Opens no export.
//!
//! `steps.rs` contains the steps, `route.rs` the kernel's routes.

mod route;
mod steps;

use clap::Args;
use rtrs_core::settings::{Output, Portal, print_text};
use serde_json::{Value, json};

use super::global::GlobalArgs;
use super::link_target::Timeout;
use super::links::{LinkArg, LinkSource};
use super::session::Session;
use crate::error::{Error, ErrorKind};

/// The arguments.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The path to check, as in attach --path, or an attached session with all its paths
    #[arg(value_name = "PATH|NAME", required_unless_present = "config", conflicts_with = "config")]
    pub target: Option<LinkArg>,

    /// Timeout of a step, 10ms to 10m [default: 5s]
    ///
    /// The timeout applies to each connect and each answer.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Timeout,

    /// Configuration file, certificates or keys.
    #[command(flatten)]
    pub from: LinkSource,
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

/// Steps so far. In text output, each is shown on completion.
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

/// Checks the paths. The error is [`ErrorKind::Path`] if a step failed.
pub(super) fn run(args: &DoctorArgs, global: &GlobalArgs) -> Result<(), Error> {
    let links = args.from.links(&args.target, global)?;
    let mut checked = Vec::new();
    for link in &links {
        if links.len() > 1 && global.output == Output::Text {
            print_text(&format!("{}\n", link.target.portal))?;
        }
        let mut findings = Findings { steps: Vec::new(), output: global.output };
        steps::walk(&link.target.portal, &link.tls, args.timeout.get(), &mut findings)?;
        if global.output == Output::Text {
            print_text(&verdict(&link.target.portal, &findings))?;
        }
        checked.push((&link.target.portal, findings));
    }
    let guest = match &args.target {
        Some(LinkArg::Session(name)) => steps::guest(&Session::find(name, global)?.status()?),
        _ => None,
    };
    if let Some(step) = guest.iter().find(|_| global.output == Output::Text) {
        print_text(&step.text())?;
    }
    if global.output == Output::Json {
        let mut reports: Vec<Value> =
            checked.iter().map(|(portal, findings)| report(portal, findings)).collect();
        let is_one_path = matches!(args.target, Some(LinkArg::Path(_)));
        let mut report = if is_one_path { reports.remove(0) } else { json!({ "paths": reports }) };
        if let Some(step) = &guest {
            report["guest"] = json!(step);
        }
        global.output.print(&report, |_| String::new())?;
    }
    let mut failed = checked.iter().filter_map(|(portal, findings)| {
        let step = findings.steps.iter().find(|step| step.verdict == Verdict::Fail)?;
        Some(format!("{portal}: {}: {}", step.step, step.found))
    });
    let is_failed = |step: &&Step| step.verdict == Verdict::Fail;
    let guest = guest.iter().find(is_failed).map(|step| format!("{}: {}", step.step, step.found));
    match failed.next().or(guest) {
        None => Ok(()),
        Some(text) => Err(Error::new(ErrorKind::Path, text)),
    }
}

/// Formats the summary line for a path.
fn verdict(portal: &Portal, findings: &Findings) -> String {
    match (findings.count(Verdict::Fail), findings.count(Verdict::Warn)) {
        (0, 0) => format!("{portal} is OK\n"),
        (0, n) => format!("{portal} works; warnings: {n}\n"),
        (n, _) => format!("{portal} does not work; failed steps: {n}\n"),
    }
}

fn report(portal: &Portal, findings: &Findings) -> Value {
    let failed = findings.count(Verdict::Fail);
    json!({
        "path": portal.to_string(),
        "usable": failed == 0,
        "warnings": findings.count(Verdict::Warn),
        "failures": failed,
        "steps": findings.steps,
    })
}
