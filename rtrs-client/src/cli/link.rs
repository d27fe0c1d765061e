//! What was typed of `ping` and `doctor`, which look at a link and have no configuration file.

use std::net::IpAddr;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use rtrs_core::config::{ByteSize, Millis, Portal, Switch, ValueError};

/// A portal, and whether its port was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTarget {
    /// The portal.
    pub portal: Portal,
    /// No port was written.
    pub default_port: bool,
}

impl FromStr for LinkTarget {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let portal: Portal = text.parse()?;
        // A path of rnbd, ip:10.0.0.2, has none.
        let Some((_, text)) = text.split_once("://") else {
            return Ok(Self { portal, default_port: true });
        };
        // It parsed: what is behind the brackets or the last colon is a port.
        let target = text.rsplit(['@', '/']).next().unwrap_or_default();
        let port = target.rsplit(']').next().unwrap_or_default();
        Ok(Self { portal, default_port: !port.contains(':') })
    }
}

/// What a ping does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The server reads our data and writes it back
    Ping,
    /// We read the server's data, one read after another
    ReadLat,
    /// We write with an immediate, the server writes the same back
    WriteLat,
    /// We keep many reads in flight
    ReadBw,
    /// We keep many writes in flight
    WriteBw,
}

/// `ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// The server, as in rdma://10.0.0.1@10.0.0.2, tcp://host:1234 or ip:10.0.0.2.
    #[arg(value_name = "PATH")]
    pub target: LinkTarget,

    /// Stop after so many rounds or operations of each queue pair; 0 goes on until Ctrl-C
    ///
    /// The default is 0 for ping, 1000 for read-lat and write-lat, 2000 for read-bw and write-bw.
    #[arg(short, long, value_name = "N")]
    pub count: Option<u64>,

    /// Bytes of data, 1 to 1M (with --rping 23 to 65535) [default: 64; bandwidth: 64k]
    ///
    /// rping's server must have been given at least as much with its -S.
    #[arg(short, long, value_name = "SIZE")]
    pub size: Option<ByteSize>,

    /// From one round to the next, in ms if no unit is written [default: 1s for ping, else 0]
    ///
    /// At most 20s. 0 starts the next round as soon as one is answered. Not for bandwidth.
    #[arg(short, long, value_name = "TIME")]
    pub interval: Option<Millis>,

    /// Give up when a step takes longer, in ms if no unit is written [default: 5s]
    ///
    /// A round that was not answered by then is lost, and its connection is ended: on a reliable
    /// one nothing comes after what was lost.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Millis,

    /// Connect from this local address
    ///
    /// The same as tcp://ADDR@HOST. It decides which RDMA device is used.
    #[arg(short = 'I', long, value_name = "ADDR")]
    pub source: Option<IpAddr>,

    /// What to measure [default: ping]
    ///
    /// All but ping need a rtrs-server at the other end.
    #[arg(short, long, value_name = "MODE", default_value = "ping", hide_default_value = true)]
    pub mode: Mode,

    /// Queue pairs at once, 1 to 64 [default: 1]
    ///
    /// Each is a connection of its own and does the whole count.
    #[arg(short = 'n', long, value_name = "N", default_value = "1", hide_default_value = true)]
    pub queue_pairs: u32,

    /// Operations in flight of each queue pair in read-bw and write-bw, 1 to 256 [default: 16]
    ///
    /// This is krping's txdepth.
    #[arg(short, long, value_name = "N")]
    pub depth: Option<u16>,

    /// Let the server do the same the other way at once, in read-bw and write-bw
    ///
    /// What it did is a line of its own in the table.
    #[arg(long)]
    pub duplex: bool,

    /// Compare the data that comes back: on or off [default: on]
    ///
    /// In read-bw only the last read is compared, in write-bw nothing.
    #[arg(long, value_name = "on|off", default_value = "on", hide_default_value = true)]
    pub validate: Switch,

    /// Let the server's go-aheads invalidate the key just used, and take a new key each time
    ///
    /// krping's server_inv. Over tcp:// only: RDMA devices have no such keys in user space.
    #[arg(long)]
    pub server_invalidate: bool,

    /// Let the server end the key of its own buffer with each of its reads
    ///
    /// krping's read_inv. Nothing of it is seen on the wire.
    #[arg(long)]
    pub read_invalidate: bool,

    /// Speak exactly rping, to an rping -s or to a server with --rping; port 7174 by default
    ///
    /// Over tcp:// this is plain iWARP, as kernels have it: siw, or an iWARP card at the other end.
    #[arg(long)]
    pub rping: bool,

    /// Ask for CRC32C on TCP connections: on or off [default: on]
    ///
    /// It is used if either end asks for it.
    #[arg(long, value_name = "on|off", default_value = "on", hide_default_value = true)]
    pub crc: Switch,

    /// Show the data of each round
    ///
    /// As rping -v does.
    #[arg(short, long)]
    pub verbose: bool,

    /// Show only the last table
    ///
    /// Errors are shown all the same.
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The path to look at, as it would be given to attach --path.
    #[arg(value_name = "PATH")]
    pub target: LinkTarget,

    /// Give up when a step takes longer, in ms if no unit is written [default: 5s]
    ///
    /// That is the bound of each connect and each answer.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Millis,
}
