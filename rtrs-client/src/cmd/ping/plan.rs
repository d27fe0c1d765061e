//! Arguments of `ping`, and the plan made from them.
//!
//! Defines [`PingArgs`] and [`PingPlan`].

use std::net::IpAddr;

use clap::{Args, ValueEnum};
use rtrs_core::settings::{ByteSize, Int, Output, Portal, SECOND, SourceAddress, Switch, Time};
use rtrs_core::time::Duration;
use rtrs_core::wire::{PingHello, PingMode, RPING_PORT, RPING_SIZE_MAX, RPING_SIZE_MIN};

use crate::cmd::global::GlobalArgs;
use crate::cmd::link_target::Timeout;
use crate::cmd::links::{Link, LinkArg, LinkSource};
use crate::cmd::text::remark;
use crate::error::{Error, ErrorKind, usage};
use crate::tls::TlsSources;

/// Measurement of a ping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The server reads the data of this end and writes it back
    Ping,
    /// This end reads from the server, one read at a time
    ReadLat,
    /// This end writes with an immediate, and the server writes the same back
    WriteLat,
    /// This end keeps many reads in flight
    ReadBw,
    /// This end keeps many writes in flight
    WriteBw,
}

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct PingArgs {
    /// The server, for example tls://host, rdma://10.0.0.1@10.0.0.2, tcp://host:1234 or ip:10.0.0.2
    ///
    /// The name of an attached session pings its first path.
    #[arg(value_name = "PATH|NAME", required_unless_present = "config", conflicts_with = "config")]
    pub target: Option<LinkArg>,

    /// Stop after N rounds or operations per queue pair; 0 continues until Ctrl-C
    ///
    /// The default is 0 for ping, 1000 for read-lat and write-lat, 2000 for read-bw and write-bw.
    #[arg(short, long, value_name = "N")]
    pub count: Option<u64>,

    /// Bytes of data, 1 to 1M (with --rping 23 to 65535) [default: 64; bandwidth: 64k]
    ///
    /// The -S of an rping server must be at least as large.
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<ByteSize>,

    /// Time between rounds, up to 20s [default: 1s for ping, else 0]
    ///
    /// 0 starts the next round as soon as the previous one is answered. Not for bandwidth modes.
    #[arg(short, long, value_name = "TIME")]
    pub interval: Option<Time<0, { 20 * SECOND }>>,

    /// Timeout of a step, 10ms to 10m [default: 5s]
    ///
    /// A round without an answer in this time is lost and ends its connection, because a reliable
    /// connection delivers nothing after a loss.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Timeout,

    /// Configuration file, certificates or keys.
    #[command(flatten)]
    pub from: LinkSource,

    /// Local address to connect from
    ///
    /// Same as tcp://ADDR@HOST. Selects the RDMA device. A link-local address needs its interface,
    /// as in fe80::1%eth0, and HOST must have the same one.
    #[arg(short = 'I', long, value_name = "ADDR")]
    pub source: Option<SourceAddress>,

    /// Measurement [default: ping]
    ///
    /// All but ping need an rtrs-server at the other end.
    #[arg(short, long, value_name = "MODE", default_value = "ping", hide_default_value = true)]
    pub mode: Mode,

    /// Number of queue pairs, 1 to 64 [default: 1]
    ///
    /// Each queue pair is a separate connection and runs the full count.
    #[arg(short = 'n', long, value_name = "N", default_value = "1", hide_default_value = true)]
    pub queue_pairs: Int<u32, 1, 64>,

    /// Operations in flight per queue pair in read-bw and write-bw, 1 to 256 [default: 16]
    ///
    /// Like txdepth of krping.
    #[arg(short, long, value_name = "N")]
    pub depth: Option<Int<u16, 1, { PingHello::DEPTH_MAX as u64 }>>,

    /// Run both directions at the same time, in read-bw and write-bw
    ///
    /// The table has a separate line for the server's direction.
    #[arg(long)]
    pub duplex: bool,

    /// Compare the data that comes back: on or off [default: on]
    ///
    /// read-bw compares only the last read, write-bw nothing.
    #[arg(long, value_name = "on|off", default_value = "on", hide_default_value = true)]
    pub validate: Switch,

    /// Have the server's messages invalidate the key just used, and use a new key each time
    ///
    /// Like server_inv of krping. Only over tcp://: RDMA devices have no such keys in user space.
    #[arg(long)]
    pub server_invalidate: bool,

    /// Have the server invalidate the key of its own buffer with each of its reads
    ///
    /// Like read_inv of krping. The invalidation is not visible on the wire.
    #[arg(long)]
    pub read_invalidate: bool,

    /// Use the rping protocol, with an rping -s or an rtrs-server --rping; default port 7174
    ///
    /// Over tcp:// this is plain iWARP, for siw or an iWARP card at the other end.
    #[arg(long)]
    pub rping: bool,

    /// Request CRC32C on TCP connections: on or off [default: on]
    ///
    /// The CRC is used if either end requests it.
    #[arg(long, value_name = "on|off", default_value = "on", hide_default_value = true)]
    pub crc: Switch,

    /// Show the data of each round
    ///
    /// Like rping -v.
    #[arg(short, long)]
    pub verbose: bool,

    /// Show only the table at the end
    ///
    /// Errors are still shown.
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// Validated arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cmd) struct PingPlan {
    /// Server, with rping's port in rping mode.
    pub portal: Portal,
    /// Certificates or keys.
    pub tls: TlsSources,
    /// Local address to connect from.
    pub source: Option<IpAddr>,
    /// Parameters, as sent to the server.
    pub hello: PingHello,
    /// Number of rounds or operations per queue pair; 0 means no limit.
    pub count: u64,
    /// Time between rounds.
    pub interval: Duration,
    /// Arguments as given.
    pub args: PingArgs,
    /// Output format, for people or programs.
    pub output: Output,
}

impl PingPlan {
    /// Whether a line is printed for each round.
    pub(crate) fn prints_rounds(&self) -> bool {
        !self.args.quiet && (self.args.verbose || self.hello.mode == PingMode::PingPong)
    }

    pub(in crate::cmd) fn new(args: &PingArgs, global: &GlobalArgs) -> Result<Self, Error> {
        let mut links = args.from.links(&args.target, global)?;
        let others = links.len() - 1;
        let Link { target, tls } = links.swap_remove(0);
        let portal = target.portal;
        if others > 0 {
            remark(format_args!("pinging {portal}, the first of {} paths", others + 1));
        }
        let source = source_of(args, &portal)?;
        let mode = match args.mode {
            Mode::Ping => PingMode::PingPong,
            Mode::ReadLat => PingMode::ReadLatency,
            Mode::WriteLat => PingMode::WriteLatency,
            Mode::ReadBw => PingMode::ReadBandwidth,
            Mode::WriteBw => PingMode::WriteBandwidth,
        };
        Self::check_together(args, mode)?;
        let bytes = match args.size {
            Some(size) => size.bytes(),
            None if mode.is_bandwidth() => 65536,
            None => 64,
        };
        let sizes = if args.rping {
            u64::from(RPING_SIZE_MIN)..=u64::from(RPING_SIZE_MAX)
        } else {
            1..=u64::from(PingHello::SIZE_MAX)
        };
        let (low, high) = (*sizes.start(), *sizes.end());
        let size = u32::try_from(bytes).ok().filter(|size| sizes.contains(&u64::from(*size)));
        let size = size
            .ok_or_else(|| usage(format!("size {bytes} is out of range; use {low} to {high}")))?;
        let pong = mode == PingMode::PingPong;
        let count = match mode {
            PingMode::PingPong => 0,
            PingMode::ReadLatency | PingMode::WriteLatency => 1000,
            PingMode::ReadBandwidth | PingMode::WriteBandwidth => 2000,
        };
        let usual = Duration::from_secs(pong.into());
        let rping_port = args.rping && target.default_port;
        Ok(Self {
            portal: if rping_port { portal.with_port(RPING_PORT) } else { portal },
            source,
            hello: PingHello {
                mode,
                duplex: args.duplex,
                server_invalidate: args.server_invalidate,
                read_invalidate: args.read_invalidate,
                depth: args.depth.map_or(16, Int::get),
                size,
            },
            count: args.count.unwrap_or(count),
            interval: args.interval.map_or(usual, Time::get),
            tls,
            args: args.clone(),
            output: global.output,
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
            (args.rping && !pong, "rping supports only --mode ping; drop --rping or --mode"),
            (
                args.rping && invalidates,
                "rping supports neither --server-invalidate nor --read-invalidate; drop them",
            ),
        ] {
            if wrong {
                return Err(usage(text));
            }
        }
        Ok(())
    }
}

/// Returns the local address to connect from, as given by the portal or `--source`.
fn source_of(args: &PingArgs, portal: &Portal) -> Result<Option<IpAddr>, Error> {
    let Some(given) = &args.source else { return Ok(portal.source()) };
    if portal.source().is_some_and(|written| written != given.ip()) {
        return Err(usage(format!("--source {given} contradicts {portal}; use only one")));
    }
    portal.clone().with_source(given).map_err(|error| {
        Error::with_source(ErrorKind::Usage, format!("--source {given}"), error)
    })?;
    Ok(Some(given.ip()))
}
