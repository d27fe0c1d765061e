//! Warnings about settings that work but may not have the intended effect.
//!
//! [`warnings`] reads settings and files and changes nothing. `--check` prints the warnings;
//! startup and reloads log them.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use rtrs_core::local::why_denied_to;
use rtrs_core::rt::Account;
use rtrs_core::settings::{Auto, Portal, Scheme};
use rtrs_core::tls::{TlsServerConfig, writable_by_others};

use crate::access_list::AccessRule;
use crate::plan::{has_keys, read_tls};
use crate::settings::{AuditLog, Settings, exports_dir};

/// Returns all warnings for the operator.
pub(crate) fn warnings(set: &Settings) -> Vec<String> {
    // Problems with the files or the certificate are reported as errors.
    let tls = read_tls(set).ok().flatten();
    let expiry = tls.as_ref().and_then(|tls| tls.check_own().ok().flatten());
    let mut all: Vec<String> = expiry.into_iter().collect();
    all.extend(tls.iter().flat_map(TlsServerConfig::file_warnings));
    all.extend(set.clients_file.as_deref().and_then(writable_by_others));
    all.extend(user_warnings(set));
    if set.ping_only {
        return all;
    }
    all.extend(set.exports_dir.as_deref().map(exports_dir::warnings).unwrap_or_default());
    let mut rules = set.access.iter().chain(set.export.iter().flat_map(|spec| &spec.access));
    all.extend(without_interface(rules.clone()));
    if rules.clone().next().is_none() && !has_keys(set) && !set.insecure_open {
        all.push(
            "no access list: everyone who reaches the server can read and write all exports; set \
             access (for example --access anyone@10.0.0.0/24:rw) or use keys \
             (docs/how-to/keys.md), or silence this warning with --insecure-open"
                .to_owned(),
        );
    }
    all.extend(closed_exports(set));
    if tls.is_some() || !has_keys(set) {
        all.extend(rules_without_clients(rules.clone(), tls.as_ref()));
    }
    if let (Some(file), Some(true)) =
        (&set.clients_file, tls.as_ref().map(TlsServerConfig::is_empty))
    {
        all.push(format!(
            "{} (clients-file) is empty: no client has a name; add a line NAME ed25519:BASE64 for \
             each, as printed by `rtrs-client key show`",
            file.display()
        ));
    }
    if has_keys(set) && !proves(&set.listen) {
        all.push(
            "certificates or keys are set, but all portals are tcp://, where clients cannot \
             authenticate; add --listen tls://0.0.0.0:1234"
                .to_owned(),
        );
    }
    if has_keys(set) && proves(&set.listen) && rules.all(|rule| rule.name().is_some()) {
        let plain = set.listen.iter().filter_map(|portal| match portal {
            Auto::Is(portal) => (portal.scheme() == Scheme::Tcp).then_some(portal),
            Auto::Auto => None,
        });
        all.extend(plain.map(|portal| {
            format!(
                "the portal {portal} admits no client: no client can authenticate there, and no \
                 access rule admits clients without a name; remove the portal, or set access (for \
                 example --access anyone@10.0.0.0/24:ro), which admits clients without \
                 authentication or encryption"
            )
        }));
    }
    all
}

/// Finds exports without a list that no client can open because other exports have a list.
fn closed_exports(set: &Settings) -> Option<String> {
    let (closed, listed): (Vec<_>, Vec<_>) =
        set.export.iter().partition(|spec| spec.access.is_empty());
    if !set.access.is_empty() || listed.is_empty() || closed.is_empty() {
        return None;
    }
    let names: Vec<String> = closed.iter().map(|spec| format!("{:?}", spec.name())).collect();
    Some(format!(
        "no client can open {}: other exports have access lists, but this one has none; add access \
         to the export, or set access for all exports without their own list",
        names.join(", ")
    ))
}

/// Returns the warnings about the rules in a list that startup with these settings would log.
pub(super) fn rule_warnings(set: &Settings, rules: &[AccessRule]) -> Vec<String> {
    let mut all: Vec<String> = without_interface(rules.iter()).collect();
    if rules.iter().all(|rule| rule.name().is_none()) {
        return all;
    }
    // Reloads report errors in the files.
    if let Ok(tls) = read_tls(set) {
        all.extend(rules_without_clients(rules.iter(), tls.as_ref()));
    }
    all
}

/// Warns about rules that name an interface that does not exist.
fn without_interface<'a>(
    rules: impl Iterator<Item = &'a AccessRule>,
) -> impl Iterator<Item = String> {
    rules.filter_map(|rule| {
        let name = rule.missing_interface()?;
        Some(format!(
            "the access rule {rule} admits no client: there is no interface {name} (ip link); \
             reload once it exists"
        ))
    })
}

/// Finds client names in these rules that no client can have.
fn rules_without_clients<'a>(
    rules: impl Iterator<Item = &'a AccessRule>,
    tls: Option<&TlsServerConfig>,
) -> Option<String> {
    let mut named = rules.filter_map(AccessRule::name).peekable();
    let first = *named.peek()?;
    let Some(tls) = tls else {
        return Some(format!(
            "the access rule for {first:?} admits no client: without certificates or keys no \
             client has a name; set tls-dir or key-file, or use addresses (anyone@NETWORK)"
        ));
    };
    let unknown = named.filter(|name| !tls.may_know(name));
    let names: BTreeSet<String> = unknown.map(|name| format!("{name:?}")).collect();
    let names: Vec<String> = names.into_iter().collect();
    (!names.is_empty()).then(|| {
        format!(
            "access rules name {}, but clients-file has no such client: these rules admit no \
             client",
            names.join(", ")
        )
    })
}

/// Whether clients can authenticate on any of these portals.
fn proves(listen: &[Auto<Portal>]) -> bool {
    listen.iter().any(|portal| match portal {
        Auto::Is(portal) => portal.scheme() != Scheme::Tcp,
        // With certificates or keys, `auto` means tls://.
        Auto::Auto => true,
    })
}

/// Warns about operations that the configured user will not be permitted to perform.
fn user_warnings(set: &Settings) -> Vec<String> {
    let Some(user) = &set.user else { return Vec::new() };
    // A user that does not exist is reported as an error.
    let Ok(account) = Account::find(&user.name, user.group.as_deref()) else { return Vec::new() };
    let name = &account.name;
    let denied = tls_files(set).into_iter().filter_map(|file| {
        let why = why_denied_to(&account, &file, false)?;
        Some(format!("a reload will fail: {why}; run chown {name} {}", file.display()))
    });
    let mut all: Vec<String> = denied.collect();
    if let Some(AuditLog::File(path)) = &set.audit_log
        && let Some(dir) = path.parent()
        && let Some(why) = why_denied_to(&account, dir, true)
    {
        all.push(format!(
            "the audit log cannot be rotated when it is full: {why}; move it to a directory that \
             belongs to {name}"
        ));
    }
    all
}

/// Files with certificates or keys that are read on reload.
fn tls_files(set: &Settings) -> Vec<PathBuf> {
    let in_dir = |dir: &Path| {
        let names = ["ca-cert.pem", "ca-crl.pem", "server-cert.pem", "server-key.pem"];
        names.map(|name| dir.join(name)).into_iter().filter(|file| file.exists())
    };
    let dir = set.tls_dir.iter().flat_map(|dir| in_dir(dir));
    dir.chain(set.key_file.clone()).chain(set.clients_file.clone()).collect()
}

/// Warns the operator in the log or, if the log accepts no warnings, on stderr.
pub(super) fn warn(warnings: Vec<String>) {
    for warning in warnings {
        if tracing::enabled!(tracing::Level::WARN) {
            tracing::warn!("{warning}");
        } else {
            // Errors are ignored, because stderr may be closed.
            let _ = writeln!(std::io::stderr(), "warning: {warning}");
        }
    }
}

#[cfg(test)]
mod tests {
    use rtrs_core::skip::skip;
    use rtrs_core::tests::certificates::{TestDir, Wanted, certificates, write_secret};
    use rtrs_core::tls::PrivateKey;

    use super::*;
    use crate::plan::load_tls;
    use crate::settings::ExportSpec;

    fn spec(text: &str) -> ExportSpec {
        text.parse().unwrap()
    }

    fn has(warnings: &[String], part: &str) -> bool {
        warnings.iter().any(|warning| warning.contains(part))
    }

    #[test]
    fn warnings_name_open_exports_and_ineffective_rules() {
        let mut set = Settings { export: vec![spec("v=mem:1M")], ..Settings::default() };
        assert!(warnings(&set)[0].contains("everyone"));
        set.insecure_open = true;
        assert_eq!(warnings(&set), [""; 0]);
        set.insecure_open = false;
        set.export = vec![spec("v=mem:1M,access=anyone@10.0.0.0/8:rw")];
        assert_eq!(warnings(&set), [""; 0]);
        set.export.push(spec("closed=mem:1M"));
        assert!(warnings(&set)[0].starts_with("no client can open \"closed\": other exports"));
        set.access = vec!["db1:rw".parse().unwrap()];
        assert!(warnings(&set)[0].contains("\"db1\" admits no client"));
        set.ping_only = true;
        assert_eq!(warnings(&set), [""; 0]);
    }

    #[test]
    fn names_without_a_key_are_reported() {
        let dir = TestDir::new("warnings");
        let at = |name: &str| Some(dir.0.join(name));
        PrivateKey::generate().unwrap().write_new(&dir.0.join("key")).unwrap();
        let client = PrivateKey::generate().unwrap().public();
        let mut set = Settings {
            export: vec![
                spec("v=mem:1M,access=db1:rw,access=db9:ro"),
                spec("w=mem:1M,access=db1:rw,access=db9:rw"),
            ],
            key_file: at("key"),
            clients_file: at("clients"),
            listen: vec!["tls://127.0.0.1:0".parse().unwrap()],
            ..Settings::default()
        };
        std::fs::write(dir.0.join("clients"), format!("db1 {client}\n")).unwrap();
        let found = warnings(&set);
        assert!(found.len() == 1 && found[0].contains("access rules name \"db9\","), "{found:?}");
        set.listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        assert!(has(&warnings(&set), "all portals are tcp://"));
        set.listen.push("rdma://127.0.0.1:0".parse().unwrap());
        let plain = "the portal tcp://127.0.0.1:0 admits no client";
        assert!(has(&warnings(&set), plain), "{:?}", warnings(&set));
        let export = std::mem::replace(&mut set.export, vec![spec("v=mem:1M")]);
        assert!(has(&warnings(&set), plain), "{:?}", warnings(&set));
        set.access = vec!["kernel@10.0.0.0/8:rw".parse().unwrap()];
        assert!(!has(&warnings(&set), plain), "{:?}", warnings(&set));
        (set.export, set.access) = (export, Vec::new());
        assert!(!has(&warnings(&set), "all portals are tcp://"));
        std::fs::write(dir.0.join("clients"), "# no client yet\n").unwrap();
        assert!(has(&warnings(&set), "clients (clients-file) is empty"));
    }

    #[test]
    fn an_expiring_certificate_is_reported_and_an_expired_one_refused() {
        let dir = TestDir::new("expiry");
        let authority = certificates(&dir.0);
        let set = Settings {
            tls_dir: Some(dir.0.clone()),
            export: vec![spec("v=mem:1M,access=any-name:rw")],
            listen: vec!["tls://127.0.0.1:0".parse().unwrap()],
            ..Settings::default()
        };
        assert_eq!(warnings(&set), [""; 0]);
        authority.issue(&dir.0, &Wanted { days: Some(13), ..Wanted::SERVER });
        assert!(has(&warnings(&set), "server-cert.pem expires on "), "{:?}", warnings(&set));
        authority.issue(&dir.0, &Wanted { days: Some(16), ..Wanted::SERVER });
        assert_eq!(warnings(&set), [""; 0]);
        for (wanted, why) in [
            (
                Wanted { years: (2020, 2021), ..Wanted::SERVER },
                "expired on 2021-01-01 00:00:00 UTC; renew it",
            ),
            (Wanted { years: (2119, 2120), ..Wanted::SERVER }, "not valid before 2119-01-01"),
        ] {
            authority.issue(&dir.0, &wanted);
            let text = load_tls(&set).unwrap_err().chain().to_string();
            assert!(text.contains("server-cert.pem") && text.contains(why), "{text}");
        }
        authority.issue(&dir.0, &Wanted::CLIENT_ONLY);
        for end in ["cert", "key"] {
            let text = std::fs::read_to_string(dir.0.join(format!("client-{end}.pem"))).unwrap();
            write_secret(&dir.0.join(format!("server-{end}.pem")), &text);
        }
        let text = load_tls(&set).unwrap_err().chain().to_string();
        assert!(text.contains("is not for servers (extended key usage)"), "{text}");
    }

    #[test]
    fn an_expired_revocation_list_is_reported() {
        let dir = TestDir::new("list");
        let authority = certificates(&dir.0);
        let set = Settings {
            tls_dir: Some(dir.0.clone()),
            export: vec![spec("v=mem:1M")],
            listen: vec!["tls://127.0.0.1:0".parse().unwrap()],
            ..Settings::default()
        };
        std::fs::write(dir.0.join("ca-crl.pem"), authority.list(&[7], 1, 2022)).unwrap();
        let got = warnings(&set);
        assert!(got.len() == 1 && has(&got, "ca-crl.pem expired on 2022-01-01"), "{got:?}");
    }

    #[test]
    fn files_writable_by_others_are_reported() {
        use std::os::unix::fs::PermissionsExt;
        let dir = TestDir::new("modes");
        let authority = certificates(&dir.0);
        std::fs::write(dir.0.join("ca-crl.pem"), authority.list(&[7], 1, 2120)).unwrap();
        PrivateKey::generate().unwrap().write_new(&dir.0.join("key")).unwrap();
        let client = PrivateKey::generate().unwrap().public();
        std::fs::write(dir.0.join("clients"), format!("db1 {client}\n")).unwrap();
        let certificates = Settings {
            tls_dir: Some(dir.0.clone()),
            export: vec![spec("v=mem:1M")],
            listen: vec!["tls://127.0.0.1:0".parse().unwrap()],
            ..Settings::default()
        };
        let keys = Settings {
            tls_dir: None,
            key_file: Some(dir.0.join("key")),
            clients_file: Some(dir.0.join("clients")),
            ..certificates.clone()
        };
        for (set, name) in
            [(&certificates, "ca-cert.pem"), (&certificates, "ca-crl.pem"), (&keys, "clients")]
        {
            let path = dir.0.join(name);
            let mode = |mode| {
                std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            };
            for loose in [0o666, 0o620] {
                mode(loose);
                let what = format!("is writable by other users (mode {loose:o})");
                let path = path.display().to_string();
                let names = |text: &String| text.contains(&path) && text.contains(&what);
                assert!(warnings(set).iter().any(names), "{:?}", warnings(set));
            }
            mode(0o644);
            assert_eq!(warnings(set), [""; 0]);
        }
    }

    #[test]
    fn files_the_user_cannot_read_are_reported() {
        let dir = TestDir::new("user");
        certificates(&dir.0);
        let Ok(other) = Account::find("nobody", None) else {
            return skip("there is no user nobody");
        };
        let set = Settings {
            tls_dir: Some(dir.0.clone()),
            user: Some("nobody".parse().unwrap()),
            insecure_open: true,
            audit_log: Some(AuditLog::File(dir.0.join("audit.log"))),
            ..Settings::default()
        };
        let key = dir.0.join("server-key.pem");
        let found = warnings(&set);
        let why = format!("user nobody ({}) may not read {}", other.uid, key.display());
        assert!(has(&found, &format!("a reload will fail: {why}")), "{found:?}");
        assert!(has(&found, &format!("run chown nobody {}", key.display())), "{found:?}");
        assert!(has(&found, "the audit log cannot be rotated when it is full"), "{found:?}");
    }
}
