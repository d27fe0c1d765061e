//! Settings: how they are declared, read and printed.
//!
//! A daemon declares each setting once, in a [`settings!`](crate::settings!) struct: name, type
//! with its range, default and help. The flag ([`Flags`]), the key of the configuration file
//! ([`Keys`]), `--print-config` ([`print()`]) and the tables in the documentation ([`describe`])
//! are derived from that.
//!
//! The value types are [`ByteSize`], [`Time`], [`Int`], [`Auto`], [`Portal`], [`Switch`],
//! [`AutoSwitch`], [`Shards`], and those that a daemon adds. Each parses from text, prints text
//! that parses back to the same value, and is read alike from flags and files. The rest is common
//! to both daemons: validating the words of a log filter, the output of a command ([`Output`]), and
//! the error that ends it.
//!
//! No parser panics or allocates unbounded memory, and every error says what was read, which value
//! was refused, and what is accepted ([`ValueError`]). Nothing here touches the system except
//! [`Portal::resolve`] and [`settings_from_file`].

mod address;
mod choice;
mod command_error;
mod declare;
mod documents;
mod duration;
mod error;
mod exit_status;
mod file;
mod file_map;
mod flags;
mod log;
mod macros;
mod metrics;
mod number;
mod output;
mod portal;
mod reading;
mod size;
mod socket_mode;
mod suggest;
mod values;

pub use crate::{choices, text_values};
pub use address::{parse_address, write_address};
pub use choice::{AutoSwitch, Switch, either, unknown_choice};
pub use command_error::{Chain, CommandError, ErrorClass};
pub use declare::{Described, Field, Setting, Settings, Value, Visitor, describe, print};
pub use documents::{DocumentsArgs, FileUse, FormatPage, KeyGroup, Manual};
pub use duration::{HOUR, MILLISECOND, MINUTE, SECOND, Time};
pub use error::ValueError;
pub use exit_status::{ExitStatus, exit_codes};
pub use file::{deserialize_list, deserialize_text};
pub use file_map::Keys;
pub use flags::Flags;
pub use log::{LogFilter, LogFormat};
pub use metrics::MetricsAddress;
pub use number::{Auto, Int, Shards};
pub use output::{Output, announce, print_text, printable, run_program, wants_json, write_text};
pub use portal::{Host, PORT_DEFAULT, Portal, ResolveError, Scheme, SourceAddress};
pub use reading::{config_text, settings_from_file, settings_from_yaml, without_bom, yaml_error};
pub use size::ByteSize;
pub use socket_mode::SocketMode;
pub use suggest::nearest;
pub use values::{SettingValue, SettingValues, changes, key_value};
