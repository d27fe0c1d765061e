//! `ping`: pings a server, prints each round, and ends with a table.

mod plan;
mod report;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::thread;

use rtrs_core::proto::ping::{PingClient, PingClientConfig, PingEvent};
use rtrs_core::rt::{Mailbox, Sender, mailbox};
use rtrs_core::settings::{Output, write_text};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

pub(super) use self::plan::PingArgs;
pub(super) use self::report::Tally;

use self::plan::PingPlan;
use super::global::GlobalArgs;
use super::link::{Link, LinkOptions, Watch};
use super::reach::{self, Choice};
use super::text::progress;
use crate::cmd::discover::listing::{AskError, prove};
use crate::error::{Error, ErrorKind, system};

/// Interval between progress updates of a long run.
const PROGRESS_EVERY: Duration = Duration::from_millis(500);

/// Describes why the authentication that precedes the pings failed.
fn describe_unproved(portal: &str, why: &AskError) -> String {
    // Authentication needs a session, which a server with ping-only does not have.
    let hint = match why.errno() {
        Some(errno::EOPNOTSUPP) => {
            "; a server with ping-only cannot authenticate: omit key-file or tls-dir"
        }
        _ => "",
    };
    format!("cannot ping {portal}: authentication failed: {why}{hint}")
}

/// Runs the pings. The error is [`ErrorKind::Path`] if the server cannot be reached or if anything
/// was lost.
pub(super) fn run(args: &PingArgs, global: &GlobalArgs) -> Result<(), Error> {
    let plan = &PingPlan::new(args, global)?;
    let portal = &plan.portal;
    let failed = |e| Error::with_source(ErrorKind::Path, format!("cannot ping {portal}"), e);
    let found = portal.resolve().map_err(failed)?;
    let wanted = |a: &SocketAddr| plan.source.is_none_or(|s| s.is_ipv4() == a.is_ipv4());
    let found: Vec<SocketAddr> = found.into_iter().filter(wanted).collect();
    let timeout = plan.args.timeout.get();
    let Some(Choice { remote, .. }) = reach::choose(portal.scheme(), plan.source, &found, timeout)
    else {
        let text = format!("{portal} has no address of the source address's family");
        return Err(Error::new(ErrorKind::Path, text));
    };
    let options = LinkOptions { crc: plan.args.crc.is_on(), plain: plan.args.rping, timeout };
    let mut link = Link::open(portal, &plan.tls, options)?;
    if !plan.args.rping {
        let proved = prove(&mut link, plan.source, remote, timeout);
        proved.map_err(|why| {
            Error::new(ErrorKind::Path, describe_unproved(&portal.to_string(), &why))
        })?;
    }
    let config = PingClientConfig {
        local: plan.source,
        remote,
        hello: plan.hello,
        rping: plan.args.rping,
        count: plan.count,
        interval: plan.interval,
        validate: plan.args.validate.is_on(),
        timeout,
    };
    let mut clients: Vec<PingClient> =
        (0..plan.args.queue_pairs.get()).map(|_| PingClient::new(config.clone())).collect();
    let (stop, stopped) = signals()?;
    let mut shown = Shown::new(plan, remote, stop);
    shown.print(&report::head_text(plan, remote));
    link.ping(&mut clients, &mut shown, stopped, None)
        .map_err(system("the ping's thread failed"))?;
    shown.end_progress();
    let summary = report::summary(plan, remote, &clients, &shown.tally);
    plan.output.print(&summary, report::Summary::text)?;
    verdict(plan, &clients, &shown.tally)
}

/// Creates a mailbox that receives a message for each termination signal, and its sender.
fn signals() -> Result<(Sender<()>, Mailbox<()>), Error> {
    let (sender, mailbox) = mailbox().map_err(system("cannot create a mailbox"))?;
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(system("cannot handle signals"))?;
    let to_stop = sender.clone();
    thread::spawn(move || {
        for _ in signals.forever() {
            to_stop.send(());
        }
    });
    Ok((sender, mailbox))
}

/// Returns the error that determines the exit code, if any.
fn verdict(plan: &PingPlan, clients: &[PingClient], tally: &Tally) -> Result<(), Error> {
    let (sent, answered) = report::totals(clients);
    if let Some((_, failure)) = tally.failures.first() {
        let text = match tally.failures.len() {
            1 => format!("cannot ping {}: {failure}", plan.portal),
            n => format!("cannot ping {} on {n} queue pairs: {failure}", plan.portal),
        };
        return Err(Error::new(ErrorKind::Path, text));
    }
    if answered < sent || sent == 0 {
        let text = format!("{} of {sent} were lost", sent - answered);
        return Err(Error::new(ErrorKind::Path, text));
    }
    Ok(())
}

/// Output shown while the pings run.
struct Shown<'a> {
    plan: &'a PingPlan,
    remote: SocketAddr,
    tally: Tally,
    /// Whether a progress line is on the terminal.
    line: bool,
    live: bool,
    before: Option<(Instant, u64)>,
    /// Sender that ends the ping.
    stop: Sender<()>,
}

impl<'a> Shown<'a> {
    fn new(plan: &'a PingPlan, remote: SocketAddr, stop: Sender<()>) -> Self {
        // Rounds that are printed individually need no progress line.
        let quiet = plan.args.quiet || !plan.prints_rounds();
        let live = quiet && plan.output == Output::Text && io::stderr().is_terminal();
        Self { plan, remote, tally: Tally::default(), line: false, live, before: None, stop }
    }

    fn print(&self, text: &str) {
        if self.plan.output == Output::Text
            && !self.plan.args.quiet
            && write_text(text).is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
        {
            // The reader of the output has gone away, as `head` does.
            self.stop.send(());
        }
    }

    fn end_progress(&mut self) {
        if std::mem::take(&mut self.line) {
            progress("\n");
        }
    }
}

impl Watch for Shown<'_> {
    fn event(&mut self, _now: Instant, at: usize, event: PingEvent) {
        if let PingEvent::Round { .. } = &event
            && self.plan.prints_rounds()
        {
            self.print(&report::round_text(self.plan, self.remote, at, &event));
        }
        if let PingEvent::Ended(Err(failure)) = &event {
            self.end_progress();
            self.print(&format!("queue pair {at}: {failure}\n"));
        }
        self.tally.take(at, event);
    }

    fn tick(&mut self, now: Instant, clients: &[PingClient]) {
        let (_, answered) = report::totals(clients);
        let rate = self.before.map_or(0.0, |(then, before)| {
            (answered - before) as f64 / (now - then).as_secs_f64().max(1e-9)
        });
        self.before = Some((now, answered));
        let text = report::progress_text(self.plan, answered, rate);
        if write!(io::stderr(), "\r{text} ").is_ok() {
            self.line = true;
        }
    }

    fn tick_every(&self) -> Option<Duration> {
        self.live.then_some(PROGRESS_EVERY)
    }
}
