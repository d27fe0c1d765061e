//! The plans of `ping` and `doctor`.

use std::net::IpAddr;

use rtrs_core::config::{Portal, Scheme};
use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::time::Duration;
use rtrs_core::wire::{PingHello, PingMode, RPING_PORT, RPING_SIZE_MAX, RPING_SIZE_MIN};

use super::{in_range, usage};
use crate::cli::{DoctorArgs, LinkTarget, Mode, Output, PingArgs};
use crate::error::{Error, ErrorKind};

/// A server ends a ping that is silent for longer than this and some.
const INTERVAL_MS_MAX: u64 = 20_000;
const QUEUE_PAIRS_MAX: u64 = 64;

/// `ping`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PingPlan {
    /// The server, with rping's port where that is meant.
    pub portal: Portal,
    /// Local address to connect from.
    pub source: Option<IpAddr>,
    /// What was asked for, by its name.
    pub mode: Mode,
    /// What to do, as the server is told.
    pub hello: PingHello,
    /// Speak exactly rping.
    pub rping: bool,
    /// Rounds or operations of each queue pair; 0 is endless.
    pub count: u64,
    /// From round to round.
    pub interval: Duration,
    /// Bound of each step.
    pub timeout: Duration,
    /// Compare the data.
    pub validate: bool,
    /// Connections at once.
    pub queue_pairs: u32,
    /// Ask for the MPA CRC.
    pub crc: bool,
    /// Show the data of each round.
    pub verbose: bool,
    /// Show only the table.
    pub quiet: bool,
    /// For people or programs.
    pub output: Output,
}

/// `doctor`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoctorPlan {
    /// The path.
    pub portal: Portal,
    /// Bound of each step.
    pub timeout: Duration,
    /// For people or programs.
    pub output: Output,
}

/// What no path may be.
fn check(target: &LinkTarget) -> Result<(), Error> {
    let portal = &target.portal;
    portal
        .check_connect()
        .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot connect", e))?;
    if portal.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
        return Err(usage(format!("cannot connect to {portal}: {}", NoRdma::Feature)));
    }
    Ok(())
}

fn timeout(millis: u64) -> Result<Duration, Error> {
    in_range::<u64>("timeout", millis, 10..=600_000).map(Duration::from_millis)
}

impl DoctorPlan {
    pub(super) fn new(args: &DoctorArgs, output: Output) -> Result<Self, Error> {
        check(&args.target)?;
        let portal = args.target.portal.clone();
        Ok(Self { portal, timeout: timeout(args.timeout.get())?, output })
    }
}

impl PingPlan {
    pub(super) fn new(args: &PingArgs, output: Output) -> Result<Self, Error> {
        check(&args.target)?;
        let portal = args.target.portal.clone();
        let source = match (portal.source(), args.source) {
            (Some(written), Some(given)) if written != given => {
                return Err(usage(format!(
                    "source {given} is not that of {portal}; write it once"
                )));
            }
            (written, given) => written.or(given),
        };
        let mode = match args.mode {
            Mode::Ping => PingMode::PingPong,
            Mode::ReadLat => PingMode::ReadLatency,
            Mode::WriteLat => PingMode::WriteLatency,
            Mode::ReadBw => PingMode::ReadBandwidth,
            Mode::WriteBw => PingMode::WriteBandwidth,
        };
        Self::check_together(args, mode)?;
        let size = match args.size {
            Some(size) => size.bytes(),
            None if mode.is_bandwidth() => 65536,
            None => 64,
        };
        let sizes = if args.rping {
            u64::from(RPING_SIZE_MIN)..=u64::from(RPING_SIZE_MAX)
        } else {
            1..=u64::from(PingHello::SIZE_MAX)
        };
        let pong = mode == PingMode::PingPong;
        let count = match mode {
            PingMode::PingPong => 0,
            PingMode::ReadLatency | PingMode::WriteLatency => 1000,
            PingMode::ReadBandwidth | PingMode::WriteBandwidth => 2000,
        };
        let interval = args.interval.map_or(if pong { 1000 } else { 0 }, |i| i.get());
        let depth = u64::from(args.depth.unwrap_or(16));
        let rping_port = args.rping && args.target.default_port;
        Ok(Self {
            portal: if rping_port { portal.with_port(RPING_PORT) } else { portal },
            source,
            mode: args.mode,
            hello: PingHello {
                mode,
                duplex: args.duplex,
                server_invalidate: args.server_invalidate,
                read_invalidate: args.read_invalidate,
                depth: in_range("depth", depth, 1..=u64::from(PingHello::DEPTH_MAX))?,
                size: in_range("size", size, sizes)?,
            },
            rping: args.rping,
            count: args.count.unwrap_or(count),
            interval: Duration::from_millis(in_range("interval", interval, 0..=INTERVAL_MS_MAX)?),
            timeout: timeout(args.timeout.get())?,
            validate: args.validate.is_on(),
            queue_pairs: in_range("queue-pairs", args.queue_pairs.into(), 1..=QUEUE_PAIRS_MAX)?,
            crc: args.crc.is_on(),
            verbose: args.verbose,
            quiet: args.quiet,
            output,
        })
    }

    fn check_together(args: &PingArgs, mode: PingMode) -> Result<(), Error> {
        let bandwidth = mode.is_bandwidth();
        let pong = mode == PingMode::PingPong;
        let invalidates = args.server_invalidate || args.read_invalidate;
        for (wrong, text) in [
            (args.duplex && !bandwidth, "--duplex is for --mode read-bw and write-bw"),
            (args.depth.is_some() && !bandwidth, "--depth is for --mode read-bw and write-bw"),
            (args.interval.is_some() && bandwidth, "--interval is not for bandwidth modes"),
            (invalidates && !pong, "--server-invalidate and --read-invalidate are for --mode ping"),
            (args.rping && !pong, "rping knows --mode ping only; leave --rping or --mode out"),
            (
                args.rping && invalidates,
                "rping knows no --server-invalidate and no --read-invalidate; leave them out",
            ),
        ] {
            if wrong {
                return Err(usage(text));
            }
        }
        Ok(())
    }
}
