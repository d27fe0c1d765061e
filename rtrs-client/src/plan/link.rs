//! The plans of `ping` and `doctor`.

use std::net::IpAddr;

use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::settings::{Int, Portal, Scheme, Time};
use rtrs_core::time::Duration;
use rtrs_core::wire::{PingHello, PingMode, RPING_PORT, RPING_SIZE_MAX, RPING_SIZE_MIN};

use super::{in_range, usage};
use crate::cli::{DoctorArgs, LinkTarget, Mode, Output, PingArgs};
use crate::error::{Error, ErrorKind};

/// `ping`, judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PingPlan {
    /// The server, with rping's port where that is meant.
    pub portal: Portal,
    /// Local address to connect from.
    pub source: Option<IpAddr>,
    /// What to do, as the server is told.
    pub hello: PingHello,
    /// Rounds or operations of each queue pair; 0 is endless.
    pub count: u64,
    /// From round to round.
    pub interval: Duration,
    /// What was typed.
    pub args: PingArgs,
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

impl DoctorPlan {
    pub(super) fn new(args: &DoctorArgs, output: Output) -> Result<Self, Error> {
        check(&args.target)?;
        let portal = args.target.portal.clone();
        Ok(Self { portal, timeout: args.timeout.get(), output })
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
        let usual = Duration::from_secs(pong.into());
        let rping_port = args.rping && args.target.default_port;
        Ok(Self {
            portal: if rping_port { portal.with_port(RPING_PORT) } else { portal },
            source,
            hello: PingHello {
                mode,
                duplex: args.duplex,
                server_invalidate: args.server_invalidate,
                read_invalidate: args.read_invalidate,
                depth: args.depth.map_or(16, Int::get),
                size: in_range("size", size, sizes)?,
            },
            count: args.count.unwrap_or(count),
            interval: args.interval.map_or(usual, Time::get),
            args: args.clone(),
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
