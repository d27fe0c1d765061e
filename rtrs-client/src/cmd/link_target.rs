//! Path argument of `ping`, `doctor` and `discover`.

use std::str::FromStr;

use rtrs_core::fabric::rdma::{NoRdma, Rdma};
use rtrs_core::settings::{MILLISECOND, MINUTE, Portal, Scheme, Time, ValueError};

use crate::error::{Error, ErrorKind, usage};
use crate::tls::TlsSources;

/// Time limit of a step.
pub(super) type Timeout = Time<{ 10 * MILLISECOND }, { 10 * MINUTE }>;

/// Portal, and whether its port was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkTarget {
    /// Portal of the server.
    pub portal: Portal,
    /// Whether no port was given.
    pub default_port: bool,
}

impl FromStr for LinkTarget {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let portal: Portal = text.parse()?;
        // A path in the form of rnbd, ip:10.0.0.2, has no port.
        let Some((_, text)) = text.split_once("://") else {
            return Ok(Self { portal, default_port: true });
        };
        // The text was parsed, so the part after the brackets or the last colon is a port.
        let target = text.rsplit(['@', '/']).next().unwrap_or_default();
        let port = target.rsplit(']').next().unwrap_or_default();
        Ok(Self { portal, default_port: !port.contains(':') })
    }
}

impl LinkTarget {
    /// Rejects a portal to which no client can connect.
    pub(super) fn check(&self, tls: &TlsSources) -> Result<(), Error> {
        let portal = &self.portal;
        tls.check(std::slice::from_ref(portal))?;
        portal
            .check_connect()
            .map_err(|e| Error::with_source(ErrorKind::Usage, "cannot connect", e))?;
        if portal.scheme() == Scheme::Rdma && !Rdma::BUILT_IN {
            return Err(usage(format!("cannot connect to {portal}: {}", NoRdma::Feature)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_explicit_port_is_distinguished_from_the_default() {
        for (text, default_port) in [
            ("tcp://h", true),
            ("tcp://h:1234", false),
            ("rdma://[fd00::1]", true),
            ("rdma://[fd00::1]:1234", false),
            ("ip:10.0.0.2", true),
            ("ip:fd00::1@ip:fd00::2", true),
        ] {
            let target: LinkTarget = text.parse().unwrap();
            assert_eq!((target.default_port, target.portal.port()), (default_port, 1234), "{text}");
        }
    }
}
