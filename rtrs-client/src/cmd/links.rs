//! Paths for `doctor`, `discover` and `ping`, given as arguments or taken from an attached session
//! or a configuration file, with the certificates or keys for them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use rtrs_core::settings::{Portal, ValueError, settings_from_file};

use super::apply::running;
use super::global::GlobalArgs;
use super::link_target::LinkTarget;
use super::session::Session;
use crate::error::{Error, usage};
use crate::settings::{SessionSettings, Settings};
use crate::tls::TlsSources;

/// Path, or the name of an attached session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkArg {
    /// Path with a scheme, or in rnbd's form.
    Path(LinkTarget),
    /// Name without a scheme.
    Session(String),
}

impl FromStr for LinkArg {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text.parse() {
            Ok(path) => Ok(Self::Path(path)),
            // In practice a name contains neither character; a path always contains one.
            Err(error) if text.is_empty() || text.contains([':', '/']) => Err(error),
            Err(_) if text.parse::<IpAddr>().is_ok() => {
                let hint = "write tcp:// or another scheme in front of it";
                Err(ValueError::new("path", text, "has no scheme", hint))
            }
            Err(_) => Ok(Self::Session(text.to_owned())),
        }
    }
}

/// Source of paths besides the command line, and their certificates or keys.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct LinkSource {
    /// Read the paths and keys from this configuration file of attach
    ///
    /// The file is that of attach --config, with the paths of a session and its keys or
    /// certificates.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Certificates or keys.
    #[command(flatten)]
    pub tls: TlsSources,
}

/// Path with its certificates or keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) target: LinkTarget,
    pub(super) tls: TlsSources,
}

impl Link {
    /// Rejects a path to which no client can connect.
    fn checked(self) -> Result<Self, Error> {
        self.target.check(&self.tls)?;
        Ok(self)
    }
}

impl LinkSource {
    /// Returns the links, at least one, from the arguments or the configuration file. Certificates
    /// and keys from the command line replace those of the session or file.
    ///
    /// # Errors
    /// Fails if a session does not answer, the file is invalid or has no path, or no client can
    /// connect to a path.
    pub(super) fn links<'a>(
        &self,
        args: impl IntoIterator<Item = &'a LinkArg>,
        global: &GlobalArgs,
    ) -> Result<Vec<Link>, Error> {
        let mut links = Vec::new();
        for arg in args {
            match arg {
                LinkArg::Path(target) => {
                    links.push(Link { target: target.clone(), tls: self.tls.clone() });
                }
                LinkArg::Session(name) => {
                    let session = Session::find(name, global)?;
                    let running = running(&session.status()?, &session.run_dir, global)?;
                    links.extend(self.of_settings(&running.plan.session.settings));
                }
            }
        }
        if let Some(file) = &self.config {
            let settings: Settings = settings_from_file(file)?;
            if settings.session.path.is_empty() {
                return Err(usage(format!("{} has no path; add the key path", file.display())));
            }
            links.extend(self.of_settings(&settings.session));
        }
        if links.is_empty() {
            return Err(usage("the session has no path; add one with path add"));
        }
        links.into_iter().map(Link::checked).collect()
    }

    fn of_settings(&self, settings: &SessionSettings) -> Vec<Link> {
        let is_typed = self.tls != TlsSources::default();
        let tls = if is_typed { self.tls.clone() } else { TlsSources::of(settings) };
        let link = |portal: &Portal| Link {
            target: LinkTarget { portal: portal.clone(), default_port: false },
            tls: tls.clone(),
        };
        settings.path.iter().map(link).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinguished_from_paths() {
        for text in ["tcp://h", "ip:10.0.0.2", "rdma://[fd00::1]:1234"] {
            assert!(matches!(text.parse(), Ok(LinkArg::Path(_))), "{text}");
        }
        assert_eq!("vol0".parse(), Ok(LinkArg::Session("vol0".to_owned())));
        for text in ["", "10.0.0.2:1234", "10.0.0.2", "fd00::1", "tcp:/h", "ftp://h"] {
            assert!(text.parse::<LinkArg>().is_err(), "{text}");
        }
    }

    #[test]
    fn keys_of_the_command_line_replace_those_of_the_file() {
        let file = SessionSettings {
            path: vec!["tls://a".parse().unwrap(), "tls://b".parse().unwrap()],
            tls_dir: Some("/file".into()),
            ..Settings::default().session
        };
        let mut source = LinkSource { config: None, tls: TlsSources::default() };
        let links = source.of_settings(&file);
        assert_eq!(links.len(), 2);
        assert_eq!(links[1].tls.dir, Some("/file".into()));
        source.tls.dir = Some("/typed".into());
        assert_eq!(source.of_settings(&file)[0].tls.dir, Some("/typed".into()));
    }
}
