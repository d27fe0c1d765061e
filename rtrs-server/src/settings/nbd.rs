//! An export of an NBD server, as `nbd://HOST[:PORT]/NAME` or `nbd+unix:///NAME?socket=PATH`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use nbd_bridge::ServerAddress;
use rtrs_core::settings::ValueError;

/// Port assigned to NBD by IANA.
const PORT: u16 = 10809;
/// Syntax hint for errors.
const FORM: &str = "write nbd://HOST[:PORT]/NAME or nbd+unix:///NAME?socket=PATH";

/// URL of an export, in its original and parsed form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NbdUrl {
    text: String,
    /// Address of the server.
    pub address: ServerAddress,
    /// Name of the export on the server.
    pub name: String,
}

impl FromStr for NbdUrl {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem: &'static str| ValueError::new("NBD URL", text, problem, FORM);
        let decoded = |part: &str| {
            decode(part).ok_or_else(|| refuse("has a bad % sequence, or a name that is not UTF-8"))
        };
        if let Some(rest) = text.strip_prefix("nbd+unix:///") {
            let pair = rest.split_once("?socket=");
            let (name, path) = pair.ok_or_else(|| refuse("names no socket"))?;
            let path = PathBuf::from(decoded(path)?);
            if !path.is_absolute() {
                return Err(refuse("has a socket path that is not absolute"));
            }
            let (address, name) = (ServerAddress::Unix(path), decoded(name)?);
            return Ok(Self { text: text.to_owned(), address, name });
        }
        let rest = text.strip_prefix("nbd://").ok_or_else(|| refuse("has an unknown scheme"))?;
        let (place, name) = rest.split_once('/').unwrap_or((rest, ""));
        if name.contains('?') {
            return Err(refuse("has options after the name"));
        }
        let (host, port) = match place.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or_else(|| refuse("lacks a ]"))?;
                (host, port.strip_prefix(':').or_else(|| port.is_empty().then_some("")))
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, Some("")),
            },
        };
        if host.is_empty() {
            return Err(refuse("has no host"));
        }
        let port = match port {
            Some("") => Some(PORT),
            port => port.and_then(|port| port.parse().ok()).filter(|port| *port != 0),
        };
        let port = port.ok_or_else(|| refuse("has a bad port"))?;
        let address = ServerAddress::Tcp(host.to_owned(), port);
        Ok(Self { text: text.to_owned(), address, name: decoded(name)? })
    }
}

/// Decodes the % sequences of a part of a URL.
fn decode(part: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes().iter();
    while let Some(byte) = rest.next() {
        let mut digit = || rest.next().and_then(|digit| char::from(*digit).to_digit(16));
        bytes.push(match byte {
            b'%' => u8::try_from(digit()? << 4 | digit()?).ok()?,
            byte => *byte,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

impl fmt::Display for NbdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_parsed_and_printed() {
        let tcp = |host: &str, port| ServerAddress::Tcp(host.into(), port);
        for (text, address, name) in [
            ("nbd://host", tcp("host", 10809), ""),
            ("nbd://host/", tcp("host", 10809), ""),
            ("nbd://host:1/disk", tcp("host", 1), "disk"),
            ("nbd://host/a/b%20c", tcp("host", 10809), "a/b c"),
            ("nbd://[::1]/disk", tcp("::1", 10809), "disk"),
            ("nbd://[::1]:7/disk", tcp("::1", 7), "disk"),
            ("nbd+unix:///?socket=/run/a", ServerAddress::Unix("/run/a".into()), ""),
            ("nbd+unix:///d?socket=/run/a%2cb", ServerAddress::Unix("/run/a,b".into()), "d"),
        ] {
            let url: NbdUrl = text.parse().unwrap();
            assert_eq!((&url.address, &*url.name, &*url.to_string()), (&address, name, text));
        }
        for (text, problem) in [
            ("nbds://host/disk", "has an unknown scheme"),
            ("nbd:host", "has an unknown scheme"),
            ("nbd:///disk", "has no host"),
            ("nbd://host:0/disk", "has a bad port"),
            ("nbd://host:x/disk", "has a bad port"),
            ("nbd://[::1]x/disk", "has a bad port"),
            ("nbd://[::1/disk", "lacks a ]"),
            ("nbd://host/disk?x=1", "has options after the name"),
            ("nbd+unix:///disk", "names no socket"),
            ("nbd+unix:///disk?socket=run/a", "path that is not absolute"),
            ("nbd://host/a%2", "has a bad % sequence"),
            ("nbd://host/a%00", "has a bad % sequence"),
        ] {
            let error = text.parse::<NbdUrl>().unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("nbd://HOST"), "{error}");
        }
    }
}
