//! `open-device`: run by the client in a child process, because a session must not wait for a
//! device that it serves.

use std::path::PathBuf;

use clap::Args;

use crate::daemon::device;
use crate::error::Error;

/// The arguments.
#[derive(Debug, Args)]
pub struct OpenDeviceArgs {
    /// The device.
    #[arg(value_name = "PATH")]
    pub path: PathBuf,

    /// Fail if the device is claimed
    ///
    /// Mounts, swap and stacked devices claim a device.
    #[arg(long)]
    pub exclusive: bool,
}

pub(super) fn run(args: &OpenDeviceArgs) -> Result<(), Error> {
    device::open(&args.path, args.exclusive)
}
