//! `reload`.

use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs};
use crate::control_protocol::{Kept, Reloaded, Request};
use crate::error::{Error, ErrorKind};

pub(super) fn run(args: &ServerArgs) -> Result<(), Error> {
    let server = Server::find(args)?;
    let (done, _) = server.request_within::<Reloaded>(&Request::Reload, CHANGE_TIMEOUT)?;
    args.output.print(&done, text)?;
    match done.failed.len() {
        0 => Ok(()),
        1 => Err(Error::new(ErrorKind::Export, "one export is not as the configuration says")),
        more => {
            let text = format!("{more} exports are not as the configuration says");
            Err(Error::new(ErrorKind::Export, text))
        }
    }
}

fn text(done: &Reloaded) -> String {
    let Reloaded { added, removed, changed, kept, failed, restart, unchanged } = done;
    let mut out = String::new();
    for (what, names) in [("added", added), ("removed", removed), ("changed", changed)] {
        out.extend(names.iter().map(|name| format!("{what} {name}\n")));
    }
    let line = |what: &str, one: &Kept| format!("{what} {}: {}\n", one.name, one.why);
    out.extend(kept.iter().map(|one| line("kept", one)));
    out.extend(failed.iter().map(|one| line("failed", one)));
    if !restart.is_empty() {
        out += &format!("needs a restart: {}\n", restart.join(", "));
    }
    let done = added.len() + removed.len() + changed.len();
    out + &format!("{done} exports changed, {unchanged} as they were\n")
}
