//! `key generate`, `key show` and `key fingerprint`, the same for both daemons.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use super::keys::{PrivateKey, PublicKey};
use crate::settings::{CommandError, ErrorClass, Output};

/// Command that manages a key.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum KeyCommand {
    /// Generate a key, write it to a new file, and print its public half
    ///
    /// Only the current user can read the file. If the daemon runs as another user, change the
    /// owner with chown. The directory must exist.
    Generate(KeyArgs),
    /// Print the public half of a key, ed25519:BASE64
    ///
    /// A server's key goes into server-key on its clients, a client's key into the clients-file on
    /// its servers.
    Show(KeyArgs),
    /// Print the fingerprint of a key, SHA256:BASE64
    ///
    /// The fingerprint is short enough to compare by eye with those in errors and logs.
    Fingerprint(KeyArgs),
}

/// The arguments.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct KeyArgs {
    /// File with the private key; key fingerprint takes a public key too, ed25519:BASE64
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Output format: text or json
    ///
    /// json is one object with the file, the public key and its fingerprint.
    #[arg(short, long, value_name = "FORMAT", default_value = "text", hide_possible_values = true)]
    pub output: Output,
}

impl KeyCommand {
    /// Returns the arguments of the command.
    #[must_use]
    pub const fn args(&self) -> &KeyArgs {
        match self {
            Self::Generate(args) | Self::Show(args) | Self::Fingerprint(args) => args,
        }
    }

    /// Runs the command.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written, or does not contain a key that only its owner
    /// can read.
    pub fn run<K: ErrorClass>(&self) -> Result<(), CommandError<K>> {
        let KeyArgs { file, output } = self.args();
        let given = file.to_str().and_then(|text| text.parse::<PublicKey>().ok());
        if let (Self::Fingerprint(_), Some(public)) = (self, given) {
            return self.print(public, None, *output);
        }
        let key = if let Self::Generate(_) = self {
            let key = PrivateKey::generate();
            let key = key
                .ok_or_else(|| CommandError::new(K::SYSTEM, "the system has no random numbers"))?;
            key.write_new(file).map_err(|error| {
                let hint = match error.kind() {
                    std::io::ErrorKind::AlreadyExists => "; move the old key away first",
                    _ => "",
                };
                let text = format!("cannot write the key {}{hint}", file.display());
                CommandError::with_source(K::SYSTEM, text, error)
            })?;
            key
        } else {
            PrivateKey::read(file)
                .map_err(|e| CommandError::with_source(K::SYSTEM, "cannot use the key", e))?
        };
        self.print(key.public(), Some(file), *output)
    }

    fn print<K: ErrorClass>(
        &self,
        public: PublicKey,
        file: Option<&Path>,
        output: Output,
    ) -> Result<(), CommandError<K>> {
        let fingerprint = public.fingerprint();
        let all = json!({
            "file": file.map(|file| file.display().to_string()),
            "public": public.to_string(),
            "fingerprint": fingerprint,
        });
        output.print(&all, |_| match self {
            Self::Fingerprint(_) => format!("{fingerprint}\n"),
            Self::Generate(_) | Self::Show(_) => format!("{public}\n"),
        })
    }
}
