//! The command `policy`.

use clap::Args;
use serde_json::json;

use super::global::GlobalArgs;
use super::session::Session;
use crate::control_protocol::{Changed, Request};
use crate::error::Error;
use crate::settings::Policy;

/// The arguments.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// Name of the volume on this host, as list shows it.
    #[arg(value_name = "NAME")]
    pub name: String,

    /// round-robin, min-inflight or min-latency
    #[arg(value_name = "POLICY")]
    pub policy: Policy,
}

pub(super) fn run(args: &PolicyArgs, global: &GlobalArgs) -> Result<(), Error> {
    let PolicyArgs { name, policy } = args;
    let request = Request::Policy { policy: *policy };
    let _: Changed = Session::find(name, global)?.request(&request)?;
    let changed = json!({ "name": name, "policy": policy });
    global.output.print(&changed, |_| format!("{name}: policy {policy}\n"))
}
