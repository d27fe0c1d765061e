//! The command `export list`.

use rtrs_core::settings::printable;

use crate::cmd::server::{Server, ServerArgs};
use crate::cmd::text::bytes;
use crate::control_protocol::{ExportList, Request};
use crate::error::Error;
use crate::settings::AccessRule;
use crate::stats::{AccessLimit, ExportSnapshot, ExportState};

pub(super) fn run(args: &ServerArgs) -> Result<(), Error> {
    let list: ExportList = Server::find(args)?.request(&Request::ExportList)?;
    args.output.print(&list, text)
}

/// Formats one line for each export.
fn text(list: &ExportList) -> String {
    let line = |cells: [&str; 7]| {
        let [name, size, mode, state, errors, backing, users] = cells;
        format!("{name:<24} {size:>10} {mode:<4} {state:<8} {errors:>6} {backing:<32} {users}\n")
    };
    let head = line(["NAME", "SIZE", "MODE", "STATE", "ERRORS", "BACKING", "OPEN BY"]);
    let lines = list.exports.iter().map(|export| {
        let users: Vec<String> = export
            .open_by
            .iter()
            .map(|user| {
                let name = user.name.as_deref().unwrap_or(&user.session);
                format!("{} ({})", printable(name), user.access)
            })
            .collect();
        let ExportSnapshot { name, size, read_only, state, device_errors, backing, .. } = export;
        let mut access = match &export.access[..] {
            [] => String::new(),
            own => format!("  access: {}\n", rules(own)),
        };
        let limits = limits_text(export);
        access += match export.access_limit {
            None => "",
            Some(AccessLimit::Holders) => {
                "  access: only sessions that had the export open when it was removed from the \
                 configuration\n"
            }
            Some(AccessLimit::Before) => {
                "  access: not as configured; only clients that the previous lists also admit\n"
            }
        };
        let head = line([
            &printable(name),
            &bytes(*size),
            if *read_only { "ro" } else { "rw" },
            &state.to_string(),
            &device_errors.to_string(),
            &printable(backing),
            &if users.is_empty() { "-".to_owned() } else { users.join(", ") },
        ]);
        let target = target_text(*state);
        let reason = export.explained().map(|why| format!("  {}\n", printable(&why)));
        head + target + &reason.unwrap_or_default() + &access + &limits
    });
    let access = match (list.open_to_everyone, &list.access[..]) {
        (true, _) => "access: everyone, because there is no access list\n".to_owned(),
        (false, []) if list.open_to_named => {
            "access: every authenticated client, because there is no access list\n".to_owned()
        }
        (false, []) => "access to exports without their own list: no client\n".to_owned(),
        (false, own) => format!("access to exports without their own list: {}\n", rules(own)),
    };
    head + &lines.collect::<String>() + &access
}

/// Explains a state in which the export differs from what its path leads to.
fn target_text(state: ExportState) -> &'static str {
    match state {
        ExportState::Replaced => {
            "  its path refers to another file or device, but sessions still use the old target. \
             If the old target was deleted, its content is lost when the last session closes it: \
             copy it through a client first\n"
        }
        ExportState::Missing => {
            "  its path no longer exists; the open target is exported until the server stops. If \
             the target was deleted, its content is then lost: copy it through a client first. If \
             it was renamed, rename it back\n"
        }
        ExportState::Cut => {
            "  its target was truncated: the export keeps its size, and IO beyond the end of the \
             target fails; restore the target, or adopt its size with `export resize` (with \
             --force while the export is open)\n"
        }
        _ => "",
    }
}

/// Formats a line with the rate limits of an export; empty without limits.
fn limits_text(export: &ExportSnapshot) -> String {
    let Some(limits) = &export.limits else { return String::new() };
    let (count, seconds) = (export.io.throttled, export.io.throttled_ns / 1_000_000_000);
    let delayed = match count {
        0 => String::new(),
        1 => format!("; 1 request delayed for {seconds} s"),
        _ => format!("; {count} requests delayed for {seconds} s in total"),
    };
    format!("  limits: {limits}{delayed}\n")
}

fn rules(rules: &[AccessRule]) -> String {
    let rules: Vec<String> = rules.iter().map(|rule| printable(&rule.to_string())).collect();
    rules.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_cut_or_may_be_lost_is_explained() {
        for state in [ExportState::Replaced, ExportState::Missing] {
            let text = target_text(state);
            assert!(text.contains("lost") && text.contains("copy it through a client"), "{text}");
        }
        assert!(target_text(ExportState::Cut).contains("the export keeps its size"));
        assert_eq!(target_text(ExportState::Open), "");
    }

    #[test]
    fn the_list_shows_who_may_open_other_exports() {
        let list = |access: &[&str], open_to_everyone, open_to_named| ExportList {
            exports: Vec::new(),
            access: access.iter().map(|rule| rule.parse().unwrap()).collect(),
            open_to_everyone,
            open_to_named,
        };
        for (list, end) in [
            (list(&[], true, false), "access: everyone, because there is no access list\n"),
            (
                list(&[], false, true),
                "every authenticated client, because there is no access list\n",
            ),
            (list(&[], false, false), "access to exports without their own list: no client\n"),
            (list(&["db1:rw"], false, false), "without their own list: db1:rw\n"),
        ] {
            let shown = text(&list);
            assert!(shown.ends_with(end), "{shown}");
        }
    }
}
