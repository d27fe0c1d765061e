//! Value parsers shared by the command lines and the configuration files.
//!
//! Owns the small types a user writes: [`ByteSize`], [`Millis`], [`Portal`], [`Switch`],
//! [`AutoSwitch`] and [`Shards`]. Each parses from text, prints a text that parses back to the same
//! value, and does both the same way under clap and under serde, so a flag and a key never differ.
//! Beside them lies what both daemons do alike with settings: reading the file, judging the words
//! of a log filter, and the error that ends a command.
//!
//! Promises: no parser panics or allocates without bound, and every error says what was being
//! read, which value was refused, and what would do ([`ValueError`]).
//!
//! Called by `cli.rs`, `config.rs` and `plan.rs` of both daemons. Nothing here touches the system
//! except [`Portal::resolve`] and [`settings_from_file`].

mod command_error;
mod duration;
mod error;
mod file;
mod log;
mod portal;
mod settings;
mod size;
mod suggest;
mod switch;

pub use command_error::{Chain, CommandError, ErrorClass};
pub use duration::{Millis, TimeUnit};
pub use error::ValueError;
pub use file::{deserialize_list, deserialize_text, file_error_text};
pub use log::check_log_filter;
pub use portal::{Host, PORT_DEFAULT, Portal, ResolveError, Scheme};
pub use settings::{settings_from_file, settings_from_yaml};
pub use size::ByteSize;
pub use suggest::nearest;
pub use switch::{AutoSwitch, Shards, Switch};
