//! From a judged plan to its execution.
//!
//! Owns [`run`], the binary's last call.

use crate::error::{Error, ErrorKind};
use crate::plan::Plan;

/// Does what the plan says.
///
/// # Errors
/// [`ErrorKind::System`]: this build carries no sessions yet.
pub fn run(_plan: &Plan) -> Result<(), Error> {
    Err(Error::new(ErrorKind::System, "cannot run: this build carries no sessions yet"))
}
