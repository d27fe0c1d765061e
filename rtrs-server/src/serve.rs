//! From a judged plan to a running server.
//!
//! Owns [`serve`], the binary's last call: it runs until a signal ends it.

use crate::error::{Error, ErrorKind};
use crate::plan::Plan;

/// Runs the server until SIGTERM or SIGINT.
///
/// # Errors
/// [`ErrorKind::System`]: this build carries no sessions yet.
pub fn serve(plan: &Plan) -> Result<(), Error> {
    let count = plan.exports.len();
    let text = format!("cannot serve {count} exports: this build carries no sessions yet");
    Err(Error::new(ErrorKind::System, text))
}
