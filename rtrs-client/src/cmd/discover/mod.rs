//! `discover`: lists the exports of servers.

pub(super) mod listing;
mod proving;

use std::net::SocketAddr;
use std::time::Instant;

use clap::Args;
use rtrs_core::identity::Identity;
use rtrs_core::settings::{Output, Portal, Switch, printable};
use rtrs_core::time::Duration;
use rtrs_core::wire::Discovered;
use serde::Serialize;

use self::listing::Listing;
use super::at_once::at_once;
use super::global::GlobalArgs;
use super::link::{Link, LinkOptions};
use super::link_target::Timeout;
use super::links::{LinkArg, LinkSource};
use super::text::{or_dash, remark, size_text};
use crate::error::{Error, ErrorKind};
use crate::tls::TlsSources;

/// Number of servers queried at the same time.
const AT_ONCE: usize = 8;

/// The arguments.
#[derive(Debug, Args)]
pub struct DiscoverArgs {
    /// Servers, for example tcp://host:1234, tls://host or rdma://10.0.0.1@10.0.0.2, or sessions
    ///
    /// The name of an attached session means the servers of its paths.
    #[arg(value_name = "PATH|NAME", required_unless_present = "config")]
    pub targets: Vec<LinkArg>,

    /// Time limit for each server, 10ms to 10m [default: 5s]
    ///
    /// The limit covers the connect and all answers of a server. Servers are queried concurrently.
    #[arg(short = 'W', long, value_name = "TIME", default_value = "5s", hide_default_value = true)]
    pub timeout: Timeout,

    /// Request CRC32C on TCP connections: on or off [default: on]
    ///
    /// The CRC is used if either end requests it.
    #[arg(long, value_name = "on|off", default_value = "on", hide_default_value = true)]
    pub crc: Switch,

    /// Configuration file, certificates or keys.
    #[command(flatten)]
    pub from: LinkSource,
}

/// The command's output.
#[derive(Debug, Serialize)]
struct Servers {
    servers: Vec<Server>,
}

/// A server with its exports, or the reason why there are none.
#[derive(Debug, Serialize)]
struct Server {
    path: String,
    exports: Vec<Export>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Export {
    name: String,
    size: u64,
    block_size: u32,
    read_only: bool,
    /// Whether another session has the export open for writing.
    in_use: bool,
    /// Identity in the format of `attach --identity`; None if the server reports neither ID.
    identity: Option<String>,
}

/// Lists the exports. The error is [`ErrorKind::Path`] if a server returned no list.
pub(super) fn run(args: &DiscoverArgs, global: &GlobalArgs) -> Result<(), Error> {
    let links = args.from.links(&args.targets, global)?;
    let servers = at_once(&links, AT_ONCE, |link| {
        let path = link.target.portal.to_string();
        let options =
            LinkOptions { crc: args.crc.is_on(), plain: false, timeout: args.timeout.get() };
        match ask(&link.target.portal, &link.tls, options) {
            Ok(listing) => Server { path, exports: exports(&listing), error: None },
            Err(error) => Server { path, exports: Vec::new(), error: Some(error) },
        }
    });
    let servers = Servers { servers };
    let failed: Vec<_> = servers
        .servers
        .iter()
        .filter_map(|one| {
            Some(format!("cannot list the exports of {}: {}", one.path, one.error.as_ref()?))
        })
        .collect();
    if failed.len() < servers.servers.len() || global.output == Output::Json {
        global.output.print(&servers, text)?;
    }
    let Some((last, others)) = failed.split_last() else { return Ok(()) };
    others.iter().for_each(remark);
    Err(Error::new(ErrorKind::Path, last.clone()))
}

/// Returns the size in bytes of an export that the server lists; None if it is not listed.
pub(super) fn listed_size(
    name: &str,
    portal: &Portal,
    tls: &TlsSources,
    options: LinkOptions,
) -> Option<u64> {
    let listing = ask(portal, tls, options).ok()?;
    exports(&listing).into_iter().find(|export| export.name == name).map(|export| export.size)
}

/// Asks one server, trying its addresses one after another, within the timeout of `options`.
fn ask(portal: &Portal, tls: &TlsSources, options: LinkOptions) -> Result<Listing, String> {
    let deadline = Instant::now() + options.timeout;
    let found = portal.resolve().map_err(|error| error.to_string())?;
    let wanted = |a: &&SocketAddr| portal.source().is_none_or(|s| s.is_ipv4() == a.is_ipv4());
    let mut failure = "the server has no address of the source address's family".to_owned();
    for address in found.iter().filter(wanted) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left < Duration::from_millis(1) {
            break;
        }
        let link = Link::open(portal, tls, LinkOptions { timeout: left, ..options });
        let mut link = link.map_err(|error| error.chain().to_string())?;
        match listing::list(&mut link, portal.source(), *address, left) {
            Ok(listing) => return Ok(listing),
            Err(error) => failure = error.to_string(),
        }
    }
    Err(failure)
}

fn exports(listing: &Listing) -> Vec<Export> {
    let export = |export: &Discovered| {
        let identity = Identity { server: listing.server, export: export.id };
        Export {
            name: String::from_utf8_lossy(export.name.as_bytes()).into_owned(),
            size: export.sectors.saturating_mul(512),
            block_size: export.block_size,
            read_only: export.read_only,
            in_use: export.written,
            identity: (!identity.is_unknown()).then(|| identity.to_string()),
        }
    };
    listing.exports.iter().map(export).collect()
}

/// Formats one line per export.
fn text(servers: &Servers) -> String {
    let line = |cells: [&str; 6]| {
        let [name, size, block, mode, used, path] = cells;
        format!("{name:<24} {size:>10} {block:>6} {mode:<4} {used:<6} {path}\n")
    };
    let mut out = line(["NAME", "SIZE", "BLOCK", "MODE", "IN USE", "SERVER"]);
    for server in &servers.servers {
        for export in &server.exports {
            out += &line([
                &printable(&export.name),
                &size_text(export.size),
                &export.block_size.to_string(),
                if export.read_only { "ro" } else { "rw" },
                or_dash(export.in_use.then_some("yes")).as_str(),
                &server.path,
            ]);
        }
    }
    out
}
