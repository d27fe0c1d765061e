//! URIs of volumes: `tcp://HOST/EXPORT?NAME=VALUE&NAME=VALUE`.

use std::str::FromStr;

use crate::error::{Error, usage};

/// Parts of the URI of a volume.
#[derive(Debug, PartialEq, Eq)]
pub struct VolumeUri {
    /// First path to the server.
    pub path: String,
    /// Name of the export.
    pub export: String,
    /// Names and values of settings, in order.
    pub settings: Vec<(String, String)>,
}

impl FromStr for VolumeUri {
    type Err = Error;

    /// Splits a URI into its parts, checking only its form.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text)
    }
}

fn parse(text: &str) -> Result<VolumeUri, Error> {
    let form = || refuse(text, "it is not of the form SCHEME://HOST[:PORT]/EXPORT[?NAME=VALUE]");
    let (location, query) = text.split_once('?').unwrap_or((text, ""));
    let (scheme, rest) = location.split_once("://").ok_or_else(form)?;
    let (host, export) = rest.split_once('/').ok_or_else(form)?;
    if scheme.is_empty() || host.is_empty() || export.is_empty() {
        return Err(form());
    }
    let decoded = |part: &str| {
        decode(part).ok_or_else(|| refuse(text, &format!("{part:?} has an invalid escape")))
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let setting = |pair: &str| -> Result<(String, String), Error> {
        let (name, value) = pair.split_once('=').ok_or_else(form)?;
        Ok((name.to_owned(), decoded(value)?))
    };
    Ok(VolumeUri {
        path: format!("{scheme}://{host}"),
        export: decoded(export)?,
        settings: pairs.map(setting).collect::<Result<_, _>>()?,
    })
}

fn refuse(text: &str, problem: &str) -> Error {
    usage(format!("cannot use the URI {text:?}: {problem}"))
}

/// Replaces escapes. Returns None if one is invalid, or the result is not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16).and_then(|d| u8::try_from(d).ok());
        let (high, low) = (digit()?, digit()?);
        bytes.push(high << 4 | low);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_uri_has_a_path_an_export_and_settings() {
        let parts = parse("rdma://[fd00::2]:7/a/b%20c%3f?path=tls://h&key-file=/k%26").unwrap();
        let setting = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(parts.path, "rdma://[fd00::2]:7");
        assert_eq!(parts.export, "a/b c?");
        assert_eq!(parts.settings, [setting("path", "tls://h"), setting("key-file", "/k&")]);
        assert!(parse("tcp://h/v").unwrap().settings.is_empty());
        assert!(parse("tcp://h/v?").unwrap().settings.is_empty());
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "vol0",
            "tcp://h",
            "tcp://h/",
            "tcp:///v",
            "://h/v",
            "tcp://h/v?a",
            "tcp://h/%",
            "tcp://h/%4",
            "tcp://h/%4g",
            "tcp://h/%ff",
            "tcp://h/v?a=%zz",
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage, "{text}");
        }
    }
}
