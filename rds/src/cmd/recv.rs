//! `recv`: prints messages received on a port.

use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use rtrs_base::settings::{Int, Output};
use serde_json::json;

use super::args::{Port, Seconds};
use super::via::{ViaArgs, on};
use crate::error::{Error, ErrorKind, failed};
use crate::socket::RdsSocket;
use crate::wire::PAYLOAD_MAX;

/// The arguments of `recv`.
#[derive(Debug, Args)]
pub struct RecvArgs {
    /// Port to receive on: 2 to 65535
    #[arg(value_name = "PORT")]
    port: Port,

    /// Exit after this many messages
    #[arg(short = 'n', long, value_name = "COUNT")]
    count: Option<Int<u64, 1, { u64::MAX }>>,

    /// Exit with an error if nothing arrives for this time: 1ms to 1h
    #[arg(short = 'W', long, value_name = "TIME")]
    timeout: Option<Seconds>,

    /// Print messages as they are, without a newline after each
    ///
    /// With `-o json`, each message is a line, with "text", or with "base64" if it is not UTF-8.
    #[arg(long)]
    raw: bool,

    #[command(flatten)]
    via: ViaArgs,
}

pub(super) fn run(args: &RecvArgs, output: Output) -> Result<(), Error> {
    if args.raw && output == Output::Json {
        let text = "--raw and `-o json` are mutually exclusive; leave one out";
        return Err(Error::new(ErrorKind::Usage, text));
    }
    let node = args.via.open(None)?;
    let wrong = on(&node, ErrorKind::Node);
    let socket = RdsSocket::bind(&node, args.port.get()).map_err(&wrong)?;
    socket.set_receive_timeout(args.timeout.map(Seconds::get)).map_err(&wrong)?;
    let mut buffer = vec![0; PAYLOAD_MAX];
    let mut left = args.count.map_or(u64::MAX, Int::get);
    while left > 0 {
        left -= 1;
        let (len, from) = socket.recv_from(&mut buffer).map_err(on(&node, ErrorKind::Messages))?;
        let payload = &buffer[..len];
        let mut out = io::stdout().lock();
        let written = match output {
            Output::Json => {
                let (key, text) = shown(payload);
                let line = json!({
                    "from": from.ip(), "port": from.port(), "bytes": len, key: text,
                });
                writeln!(out, "{line}")
            }
            Output::Text if args.raw => out.write_all(payload),
            Output::Text => out.write_all(payload).and_then(|()| out.write_all(b"\n")),
        };
        match written.and_then(|()| out.flush()) {
            // The reader has stopped reading, as `head` does.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.map_err(failed(ErrorKind::System, "cannot print"))?,
        }
    }
    Ok(())
}

/// Returns a message as a JSON string, and the name of its field.
fn shown(payload: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(payload) {
        Ok(text) => ("text", text.to_owned()),
        Err(_) => ("base64", STANDARD.encode(payload)),
    }
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn json_preserves_every_byte() {
        assert_eq!(shown("é\n".as_bytes()), ("text", "é\n".to_owned()));
        assert_eq!(shown(b"a\xff"), ("base64", "Yf8=".to_owned()));
    }
}
