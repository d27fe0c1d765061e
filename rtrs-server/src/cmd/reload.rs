//! The command `reload`.

use clap::Args;
use rtrs_core::settings::printable;
use rtrs_core::tls::NO_LIST;

use crate::access_list::rules;
use crate::cmd::server::{CHANGE_TIMEOUT, Server, ServerArgs, warnings_text};
use crate::cmd::text::{NEEDS_FORCE, counted, losses_text};
use crate::control_protocol::{Kept, Reloaded, Request, UnlistedChange};
use crate::error::{Error, ErrorKind};

/// The arguments.
#[derive(Debug, Clone, Args)]
pub struct ReloadArgs {
    /// Print what a reload would change, and change nothing
    ///
    /// Configuration, certificates, keys and clients-file are read and checked. Targets are not
    /// opened, so a locked target is detected only by the reload.
    #[arg(long)]
    pub dry_run: bool,

    /// Apply the access lists even if they close exports or end sessions, and close deleted files
    ///
    /// The content of a file that was deleted while it was exported is lost when it is closed.
    /// Without this flag, such an export stays as it is.
    #[arg(long, conflicts_with = "dry_run")]
    pub force: bool,

    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
}

pub(super) fn run(args: &ReloadArgs) -> Result<(), Error> {
    let server = Server::find(&args.server)?;
    let request = match args.dry_run {
        true => Request::ReloadPreview,
        false => Request::Reload { force: args.force },
    };
    let (done, _) = server.request_within::<Reloaded>(&request, CHANGE_TIMEOUT)?;
    args.server.output.print(&done, |done| text(done, args.dry_run))?;
    match done.failed.len() {
        0 => Ok(()),
        1 => Err(Error::new(ErrorKind::Export, "one export does not match the configuration")),
        more => {
            let text = format!("{more} exports do not match the configuration");
            Err(Error::new(ErrorKind::Export, text))
        }
    }
}

fn text(done: &Reloaded, dry_run: bool) -> String {
    let would = if dry_run { "would be " } else { "" };
    let Reloaded { added, removed, changed, kept, failed, restart, unchanged, .. } = done;
    let mut out = String::new();
    for (what, names) in [("added", added), ("removed", removed), ("changed", changed)] {
        out.extend(names.iter().map(|name| format!("{would}{what} {}\n", printable(name))));
    }
    let line = |what: &str, one: &Kept| {
        format!("{would}{what} {}: {}\n", printable(&one.name), printable(&one.why))
    };
    out.extend(kept.iter().map(|one| line("kept", one)));
    out.extend(failed.iter().map(|one| line("failed", one)));
    if !restart.is_empty() {
        out += &format!("needs a restart: {}\n", restart.join(", "));
        if restart.iter().any(|setting| setting == "log") {
            out += "to change the log level now, use `rtrs-server set log=LEVEL`\n";
        }
    }
    out += &warnings_text(done.certificate.iter().chain(&done.warnings));
    out.extend(done.access_changed.iter().map(|change| {
        let (list, before, after) = (change.list(), rules(&change.before), rules(&change.after));
        let [list, before, after] = [list, before, after].map(|text| printable(&text).to_string());
        format!("{would}changed: {list}, from {before} to {after}\n")
    }));
    let keys = done.keys_changed.iter();
    out.extend(keys.map(|what| {
        let how = if what == NO_LIST { "removed" } else { "changed" };
        format!("{would}{how}: {}\n", printable(what))
    }));
    if let Some(UnlistedChange { before, after }) = &done.unlisted_changed {
        let list = "access to exports without their own list";
        let [before, after] = [before, after].map(|text| printable(text));
        out += &format!("{would}changed: {list}, from {before} to {after}\n");
    }
    out += &losses_text(&done.losses, would);
    if done.needs_force {
        out += NEEDS_FORCE;
    }
    let done = counted(added.len() + removed.len() + changed.len(), "export");
    out + &match dry_run {
        true => format!("{done} would change, {unchanged} would stay\n"),
        false => format!("{done} changed, {unchanged} unchanged\n"),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::control_protocol::Losses;
    use crate::stats::Revoked;

    #[test]
    fn a_removed_list_is_reported_as_removed() {
        let done = Reloaded { keys_changed: vec![NO_LIST.into()], ..Reloaded::default() };
        let line = "removed: ca-crl.pem: no certificate is revoked anymore\n";
        assert!(text(&done, false).starts_with(line), "{}", text(&done, false));
    }

    #[test]
    fn the_text_names_what_was_revoked() {
        let revoked = |paths_left| Revoked {
            session: "db1-vol0".into(),
            identity: Some("key:db1".into()),
            paths: 1,
            paths_left,
            peers: [Ipv4Addr::new(10, 0, 0, 7).into()].into(),
        };
        let done = Reloaded {
            changed: vec!["vol0".into()],
            keys_changed: vec!["clients-file: removed db1 (SHA256:x)".into()],
            losses: Losses { closed: vec!["vol1".into()], revoked: vec![revoked(0), revoked(2)] },
            ..Reloaded::default()
        };
        assert_eq!(
            text(&done, false),
            "changed vol0\nchanged: clients-file: removed db1 (SHA256:x)\n\
             closed: vol1; no client may open it\n\
             ended: 1 path of session db1-vol0 (key:db1) from 10.0.0.7\n\
             ended: 1 of 3 paths of session db1-vol0 (key:db1) from 10.0.0.7\n1 session ended\n\
             1 export changed, 0 unchanged\n"
        );
        let text = text(&Reloaded { unchanged: 3, needs_force: true, ..done }, true);
        assert!(text.contains("would be closed: vol1;"), "{text}");
        assert!(
            text.contains(
                "1 session would be ended\nwithout --force, this change would be refused\n"
            )
        );
        assert!(text.contains("would be ended: 1 path of session db1-vol0"), "{text}");
        assert!(text.ends_with("\n1 export would change, 3 would stay\n"));
    }
}
