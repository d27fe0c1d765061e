//! Access lists in the settings: which client may open which export, and with what access.
//!
//! Owns [`AccessRule`], one entry of a list as a user writes it, and [`AccessPolicy`], a snapshot
//! of all of a server's lists. Without any list, a server is open to everyone, or, if it has
//! certificates or keys, to clients that prove who they are. Once there is a list, everything that
//! is not listed is denied. An export follows its own list, or the server's if it has none. A list
//! allows what any of its rules allows; the order of the rules does not matter. While a
//! configuration is being applied, and as long as an export differs from it, the previous lists
//! apply too. A rule names a client by its authenticated name, or clients by their address. An
//! address does not prove who is using it.

mod network;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use rtrs_core::fabric::Who as ProvedWho;
use rtrs_core::ids::SessionId;
use rtrs_core::settings::{ValueError, text_values};
use rtrs_core::tls::EVERYONE;
use serde::{Deserialize, Serialize};

use self::network::Network;

const WHAT: &str = "access";
/// Maximum length of a client name, in bytes.
const NAME_BYTES_MAX: usize = 255;
/// Keyword for clients without a name, such as kernel clients.
const KERNEL: &str = "kernel";
/// Prefixes that `session list` shows before names; rules are written without them.
const PREFIXES: [&str; 2] = ["key:", "certificate:"];
/// Keyword for clients with and without a name.
const ANYONE: &str = "anyone";

/// Clients that a rule applies to. Without a network, the rule applies to every address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Name(String),
    Kernel(Option<Network>),
    Anyone(Option<Network>),
}

impl Who {
    fn means(&self, client: Client<'_>) -> bool {
        let within = |net: &Option<Network>| {
            net.as_ref().is_none_or(|net| net.contains(client.address, client.scope))
        };
        match self {
            Self::Name(name) => client.name == Some(name),
            Self::Kernel(net) => client.name.is_none() && within(net),
            Self::Anyone(net) => within(net),
        }
    }
}

/// One access rule: the clients it applies to, and whether they may write. Text form: `WHO:ro` or
/// `WHO:rw`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessRule {
    who: Who,
    write: bool,
}

/// A client, as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Client<'a> {
    /// Authenticated name, if the client has one.
    pub(crate) name: Option<&'a str>,
    pub(crate) address: IpAddr,
    /// Index of the interface of a link-local address, or 0.
    pub(crate) scope: u32,
    pub(crate) session: SessionId,
}

impl<'a> Client<'a> {
    /// Client of a session that connects from `peer` and has been authenticated as `who`.
    pub(crate) fn of(who: &'a ProvedWho, peer: SocketAddr, session: SessionId) -> Self {
        let scope = match peer {
            SocketAddr::V6(peer) => peer.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        Self { name: who.name(), address: peer.ip(), scope, session }
    }
}

impl fmt::Display for Client<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => write!(f, "client '{name}'"),
            None => write!(f, "a client at {} without a name", self.address.to_canonical()),
        }
    }
}

impl AccessRule {
    /// Name of the client, for a rule that applies to a client by name.
    pub(crate) fn name(&self) -> Option<&str> {
        match &self.who {
            Who::Name(name) => Some(name),
            Who::Kernel(_) | Who::Anyone(_) => None,
        }
    }

    /// Interface named in the rule, if it did not exist when the rule was read.
    pub(crate) fn missing_interface(&self) -> Option<&str> {
        match &self.who {
            Who::Kernel(net) | Who::Anyone(net) => net.as_ref()?.missing_interface(),
            Who::Name(_) => None,
        }
    }

    fn allows(&self, client: Client<'_>, write: bool) -> bool {
        (self.write || !write) && self.who.means(client)
    }
}

impl FromStr for AccessRule {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem: &'static str, hint| Err(ValueError::new(WHAT, text, problem, hint));
        // The mode follows the last colon: IPv6 addresses and names may contain others.
        let (who, write) = match text.rsplit_once(':') {
            Some((who, "ro")) => (who, false),
            Some((who, "rw")) => (who, true),
            _ => {
                return refuse(
                    "does not end with :ro or :rw",
                    "write WHO:ro or WHO:rw, as in db1:rw or anyone@10.0.0.0/24:ro",
                );
            }
        };
        let net = |net: &str| {
            Network::parse(net).map(Some).map_err(|(problem, hint)| {
                ValueError::new(WHAT, text, format!("has the bad network {net:?}{problem}"), hint)
            })
        };
        let who = match who.split_once('@') {
            Some((KERNEL, at)) => Who::Kernel(net(at)?),
            Some((ANYONE, at)) => Who::Anyone(net(at)?),
            _ if who == KERNEL => Who::Kernel(None),
            _ if who == ANYONE => Who::Anyone(None),
            _ if who.is_empty() || who.len() > NAME_BYTES_MAX => {
                return refuse("names no client", "write a name of 1 to 255 bytes before the mode");
            }
            _ if who.chars().any(char::is_control) => {
                return refuse("has a control character in the name", "remove it");
            }
            _ if who.trim() != who => {
                return refuse("has a space at the start or end of the name", "remove it");
            }
            _ if PREFIXES.iter().any(|prefix| who.starts_with(prefix)) => {
                let name = who.split_once(':').map_or(who, |(_, name)| name);
                let mode = if write { "rw" } else { "ro" };
                return Err(ValueError::new(
                    WHAT,
                    text,
                    "names no client: key: and certificate: are not part of a name",
                    format!("write {name}:{mode}"),
                ));
            }
            _ if is_mistyped(who) => {
                return refuse(
                    "names no client",
                    "write anyone or kernel in lowercase, alone or followed by @NETWORK",
                );
            }
            _ => match mistaken(who, if write { "rw" } else { "ro" }) {
                Some((problem, hint)) => return Err(ValueError::new(WHAT, text, problem, hint)),
                None => Who::Name(who.to_owned()),
            },
        };
        Ok(Self { who, write })
    }
}

/// Whether a name was probably meant as `anyone` or `kernel`.
fn is_mistyped(who: &str) -> bool {
    let word = who.split('@').next().unwrap_or_default().trim();
    [KERNEL, ANYONE].iter().any(|known| known.eq_ignore_ascii_case(word))
}

/// Detects text that was probably not meant as a client name. Returns the problem and a hint.
fn mistaken(who: &str, mode: &str) -> Option<(&'static str, String)> {
    let word = who.split('@').next().unwrap_or_default();
    if EVERYONE.iter().any(|known| known.eq_ignore_ascii_case(word)) {
        let net = who.split_once('@').map(|(_, net)| format!("@{net}")).unwrap_or_default();
        let hint = format!("write {ANYONE}{net}:{mode} for clients with and without a name");
        return Some(("names no client", hint));
    }
    // A name may contain spaces, as common names of certificates do.
    let parts = || who.split(|c: char| c == ',' || c.is_whitespace());
    if parts().any(|part| part.ends_with(":ro") || part.ends_with(":rw")) {
        let hint =
            "write each rule separately: --access A:rw --access B:ro, or access: [A:rw, B:ro]";
        return Some(("has several rules in one", hint.into()));
    }
    let is_net = |text: &str| {
        let address = text.split(['/', '%']).next();
        address.is_some_and(|at| at.parse::<IpAddr>().is_ok())
    };
    if is_net(who) {
        let hint = format!(
            "write {ANYONE}@{who}:{mode} for all clients at that address, with and without a name; \
             a certificate needs a name that is not an address"
        );
        return Some(("has an address and no name", hint));
    }
    match who.rsplit_once('@') {
        Some((name, net)) if is_net(net) => Some((
            "has both a name and an address, but a rule takes only one",
            format!("write {name}:{mode} or {ANYONE}@{net}:{mode}"),
        )),
        _ => None,
    }
}

impl fmt::Display for AccessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.write { "rw" } else { "ro" };
        match &self.who {
            Who::Name(name) => write!(f, "{name}:{mode}"),
            Who::Kernel(None) => write!(f, "{KERNEL}:{mode}"),
            Who::Kernel(Some(net)) => write!(f, "{KERNEL}@{net}:{mode}"),
            Who::Anyone(None) => write!(f, "{ANYONE}:{mode}"),
            Who::Anyone(Some(net)) => write!(f, "{ANYONE}@{net}:{mode}"),
        }
    }
}

text_values! {
    AccessRule, "WHO:MODE", "a rule such as db1:rw, kernel@10.0.0.0/24:rw or anyone:ro";
}

/// Change to an access list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListChange {
    /// Export that the list belongs to; None for the server's list.
    pub export: Option<String>,
    /// Rules before the change.
    pub before: Vec<AccessRule>,
    /// Rules after the change.
    pub after: Vec<AccessRule>,
}

/// Formats the rules of a list for display.
pub(crate) fn rules(list: &[AccessRule]) -> String {
    let rules: Vec<String> = list.iter().map(AccessRule::to_string).collect();
    if rules.is_empty() { "none".into() } else { rules.join(" ") }
}

impl ListChange {
    /// Describes the list for display.
    pub(crate) fn list(&self) -> String {
        match &self.export {
            Some(name) => format!("access list of export {name}"),
            None => "access list of the server".into(),
        }
    }
}

/// Access to exports that no list applies to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unlisted {
    /// No lists, certificates or keys are configured: full access for everyone.
    #[default]
    Everyone,
    /// No lists are configured: full access for clients with a name.
    Named,
    /// Lists are configured, or the last one was removed while running: no access.
    Nobody,
}

impl Unlisted {
    fn allows(self, client: Client<'_>) -> bool {
        match self {
            Self::Everyone => true,
            Self::Named => client.name.is_some(),
            Self::Nobody => false,
        }
    }
}

/// Condition for opening an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Access list, of the export or of the server.
    Rules(Vec<AccessRule>),
    /// Rule for exports to which no list applies.
    Unlisted(Unlisted),
    /// Sessions that had the export open when it was removed from the configuration. The value is
    /// true for sessions that may write.
    Holders(BTreeMap<SessionId, bool>),
}

impl Grant {
    fn allows(&self, client: Client<'_>, write: bool) -> bool {
        match self {
            Self::Rules(list) => list.iter().any(|rule| rule.allows(client, write)),
            Self::Unlisted(unlisted) => unlisted.allows(client),
            Self::Holders(sessions) => {
                sessions.get(&client.session).is_some_and(|writes| *writes || !write)
            }
        }
    }

    /// Whether no client meets the condition.
    pub(crate) fn admits_nobody(&self) -> bool {
        match self {
            Self::Rules(list) => list.is_empty(),
            Self::Unlisted(unlisted) => *unlisted == Unlisted::Nobody,
            Self::Holders(sessions) => sessions.is_empty(),
        }
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            _ if self.admits_nobody() => f.write_str("no client"),
            Self::Rules(list) => f.write_str(&rules(list)),
            Self::Unlisted(Unlisted::Everyone) => f.write_str("everyone"),
            Self::Unlisted(_) => f.write_str("every authenticated client"),
            Self::Holders(_) => f.write_str("sessions that have the export open"),
        }
    }
}

/// Whether a client meets all conditions.
fn all_allow(grants: &[Grant], client: Client<'_>, write: bool) -> bool {
    grants.iter().all(|grant| grant.allows(client, write))
}

/// Access lists of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessPolicy {
    /// Conditions for exports that are not in `exports`, and for those under the search path. All
    /// conditions must hold.
    others: Vec<Grant>,
    /// Conditions of individual exports, by name without leading slashes.
    exports: BTreeMap<String, Vec<Grant>>,
    /// Whether any export has more than one condition.
    narrowed: bool,
    /// Generation of the certificates and keys in use.
    pub(crate) generation: u64,
    /// Clients that any rule applies to, so that unlisted clients can be refused quickly regardless
    /// of the number of exports.
    names: BTreeSet<String>,
    nets: Vec<Who>,
    /// Broadest access to any export without a list.
    unlisted: Unlisted,
}

impl Default for AccessPolicy {
    fn default() -> Self {
        Self::new(&[], [].into_iter(), Unlisted::Everyone)
    }
}

impl AccessPolicy {
    /// Creates a policy from the server's list, each export's name and list, and the access to
    /// everything else.
    pub(crate) fn new<'a>(
        server: &[AccessRule],
        exports: impl Iterator<Item = (&'a str, &'a [AccessRule])>,
        unlisted: Unlisted,
    ) -> Self {
        let listed = exports.filter(|(_, list)| !list.is_empty());
        let exports: BTreeMap<_, _> = listed
            .map(|(name, list)| (bare(name).to_owned(), vec![Grant::Rules(list.to_vec())]))
            .collect();
        let others = match server.is_empty() && exports.is_empty() {
            true => Grant::Unlisted(unlisted),
            false => Grant::Rules(server.to_vec()),
        };
        Self::with_grants(vec![others], exports)
    }

    /// Creates a policy from the conditions of individual exports and the conditions of all others.
    pub(crate) fn with_grants(others: Vec<Grant>, exports: BTreeMap<String, Vec<Grant>>) -> Self {
        let (mut names, mut nets) = (BTreeSet::new(), BTreeSet::new());
        let mut least = Unlisted::Nobody;
        for grant in exports.values().flatten().chain(&others) {
            match grant {
                Grant::Rules(list) => list.iter().for_each(|rule| match &rule.who {
                    Who::Name(name) => drop(names.insert(name.clone())),
                    who => drop(nets.insert(who.clone())),
                }),
                Grant::Unlisted(unlisted) => least = least.min(*unlisted),
                Grant::Holders(_) => {}
            }
        }
        let narrowed = exports.values().chain([&others]).any(|grants| grants.len() > 1);
        let nets = nets.into_iter().collect();
        Self { others, exports, narrowed, generation: 0, names, nets, unlisted: least }
    }

    /// Sets the generation of the certificates and keys that authenticate the clients.
    pub(crate) fn with_generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// Whether everyone has full access.
    pub(crate) fn is_open(&self) -> bool {
        self.exports.is_empty() && self.is_open_to_everyone()
    }

    /// Whether exports without their own conditions are open to everyone.
    pub(crate) fn is_open_to_everyone(&self) -> bool {
        self.others == [Grant::Unlisted(Unlisted::Everyone)]
    }

    /// Whether exports without their own conditions are open to every client with a name.
    pub(crate) fn is_open_to_named(&self) -> bool {
        self.others == [Grant::Unlisted(Unlisted::Named)]
    }

    /// Whether any condition depends on the client's session.
    pub(crate) fn has_holders(&self) -> bool {
        let is_holders = |grant: &Grant| matches!(grant, Grant::Holders(_));
        self.narrowed && self.exports.values().flatten().any(is_holders)
    }

    /// Whether a client may have a session: it may open at least one export, if that export exists.
    pub(crate) fn may_connect(&self, client: Client<'_>) -> bool {
        let named = self.unlisted.allows(client)
            || client.name.is_some_and(|name| self.names.contains(name))
            || self.nets.iter().any(|net| net.means(client));
        let may = |grants: &Vec<Grant>| all_allow(grants, client, false);
        named && (!self.narrowed || may(&self.others) || self.exports.values().any(may))
    }

    /// Whether a client may open an export by name; if `write` is set, also for writing.
    pub(crate) fn allows(&self, client: Client<'_>, export: &str, write: bool) -> bool {
        let grants = self.exports.get(bare(export)).unwrap_or(&self.others);
        all_allow(grants, client, write)
    }

    /// Whether a client may open a file under the search path whose name is not an export's.
    pub(crate) fn allows_found(&self, client: Client<'_>, write: bool) -> bool {
        all_allow(&self.others, client, write)
    }
}

/// Strips leading slashes from an export name.
pub(crate) fn bare(name: &str) -> &str {
    name.trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn read(texts: &[&str]) -> Vec<AccessRule> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn at(address: &str) -> Client<'_> {
        let session = SessionId([0; 16]);
        Client { name: None, address: address.parse().unwrap(), scope: 0, session }
    }

    fn policy(server: &[&str], exports: &[(&str, &[&str])]) -> AccessPolicy {
        let exports: Vec<_> = exports.iter().map(|(name, list)| (*name, read(list))).collect();
        let lists = exports.iter().map(|(name, list)| (*name, &list[..]));
        AccessPolicy::new(&read(server), lists, Unlisted::Everyone)
    }

    #[test]
    fn rules_are_parsed_and_printed() {
        for (text, printed) in [
            ("db1:rw", "db1:rw"),
            ("spiffe://x/db1:ro", "spiffe://x/db1:ro"),
            ("ann@host:ro", "ann@host:ro"),
            ("Database 1:ro", "Database 1:ro"),
            ("anyone-else:ro", "anyone-else:ro"),
            ("kernel:rw", "kernel:rw"),
            ("kernel@10.0.0.0/24:rw", "kernel@10.0.0.0/24:rw"),
            ("anyone@::ffff:10.0.0.0/120:rw", "anyone@10.0.0.0/24:rw"),
            ("anyone@::ffff:10.0.0.9:rw", "anyone@10.0.0.9/32:rw"),
            ("anyone@10.0.0.9:ro", "anyone@10.0.0.9/32:ro"),
            ("anyone@fd00::/8:ro", "anyone@fd00::/8:ro"),
            ("kernel@fe80::%eth9/64:rw", "kernel@fe80::%eth9/64:rw"),
            ("anyone@fe80::1%eth9:ro", "anyone@fe80::1%eth9/128:ro"),
        ] {
            assert_eq!(text.parse::<AccessRule>().unwrap().to_string(), printed);
        }
        for (text, problem) in [
            ("db1", "does not end with :ro or :rw"),
            ("db1:wr", "does not end with :ro or :rw"),
            (":rw", "names no client"),
            ("a\nb:rw", "control character"),
            ("kernel@10.0.0.0/33:rw", "bad network \"10.0.0.0/33\""),
            ("anyone@lan:ro", "bad network \"lan\""),
            ("anyone@10.0.0.9/24:ro", "write 10.0.0.0/24, or 10.0.0.9 for that address alone"),
            ("anyone@10.0.0.9/0:ro", "bits set beyond /0"),
            ("Anyone@10.0.0.0/8:ro", "in lowercase"),
            ("KERNEL:rw", "in lowercase"),
            ("anyone :rw", "a space at the start or end"),
            (" db1:rw", "a space at the start or end"),
            ("key:db1:rw", "not part of a name; write db1:rw"),
            ("certificate:db1:ro", "not part of a name; write db1:ro"),
            ("everyone:rw", "names no client; write anyone:rw"),
            ("Any@10.0.0.0/8:ro", "write anyone@10.0.0.0/8:ro"),
            ("*:rw", "write anyone:rw"),
            ("10.0.0.0/24:rw", "no name; write anyone@10.0.0.0/24:rw"),
            ("10.0.0.0/33:rw", "write anyone@10.0.0.0/33:rw"),
            ("fd00::1:ro", "write anyone@fd00::1:ro"),
            ("db1@10.0.0.1:rw", "write db1:rw or anyone@10.0.0.1:rw"),
            ("db1@fd00::/8:ro", "write db1:ro or anyone@fd00::/8:ro"),
            ("fe80::1%eth9:rw", "write anyone@fe80::1%eth9:rw"),
            ("anyone@fd00::1%eth9:rw", "bad network \"fd00::1%eth9\", which has an interface"),
            ("db1:rw ro1:ro", "has several rules in one; write each rule separately"),
            ("db1:rw,ro1:ro", "has several rules in one"),
        ] {
            let error = text.parse::<AccessRule>().unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn without_a_list_everyone_has_access() {
        let open = policy(&[], &[("vol0", &[])]);
        assert!(open.is_open() && open.may_connect(at("::1")));
        assert!(open.allows(at("10.0.0.1"), "vol0", true));
    }

    #[test]
    fn removing_the_last_list_does_not_open_the_server() {
        let closed = AccessPolicy::new(&[], [].into_iter(), Unlisted::Nobody);
        assert!(!closed.is_open() && !closed.may_connect(at("::1")));
        assert!(!closed.allows(at("::1"), "vol0", false));
    }

    #[test]
    fn with_keys_and_no_list_a_name_suffices() {
        let (nameless, db1) = (at("10.0.0.1"), Client { name: Some("db1"), ..at("10.0.0.1") });
        let keys = AccessPolicy::new(&[], [].into_iter(), Unlisted::Named);
        assert!(!keys.is_open() && keys.may_connect(db1) && keys.allows(db1, "v", true));
        assert!(!keys.may_connect(nameless) && !keys.allows(nameless, "v", false));
        // Once there is a list, a name alone is not enough.
        let (list, exports) = (read(&["db2:rw"]), [].into_iter());
        let listed = AccessPolicy::new(&list, exports, Unlisted::Named);
        assert!(!listed.may_connect(db1) && !listed.allows(db1, "v", false));
    }

    #[test]
    fn an_export_uses_its_own_list_or_the_servers() {
        let policy = policy(
            &["anyone@10.0.0.0/24:ro"],
            &[("vol0", &["anyone@10.0.0.7:rw"]), ("/dev/x", &["db1:rw"])],
        );
        let (inside, writer, outside) = (at("10.0.0.1"), at("10.0.0.7"), at("10.0.1.1"));
        assert!(policy.allows(inside, "vol1", false) && !policy.allows(inside, "vol1", true));
        assert!(!policy.allows(inside, "vol0", false), "its own list replaces the server's");
        assert!(policy.allows(writer, "vol0", true) && policy.allows(writer, "/vol0", false));
        assert!(!policy.may_connect(outside) && policy.may_connect(writer));
        let db1 = Client { name: Some("db1"), ..outside };
        assert!(policy.may_connect(db1) && policy.allows(db1, "dev/x", true));
        assert!(!policy.allows(db1, "vol1", false));
        assert!(!policy.may_connect(Client { name: Some("db2"), ..outside }));
    }

    /// An export name with leading slashes, which are ignored.
    #[derive(Clone, Debug)]
    struct Spelled {
        name: &'static str,
        slashes: usize,
    }

    impl Spelled {
        fn text(&self) -> String {
            "/".repeat(self.slashes) + self.name
        }
    }

    fn spelled() -> impl Strategy<Value = Spelled> {
        let names = select(&["vol0", "vol1", "dev/x", "a"][..]);
        (names, 0..4usize).prop_map(|(name, slashes)| Spelled { name, slashes })
    }

    fn any_list() -> impl Strategy<Value = Vec<&'static str>> {
        let rules =
            ["anyone:ro", "anyone@10.0.0.0/31:rw", "kernel@10.0.0.2:rw", "db1:rw", "db2:ro"];
        vec(select(rules.to_vec()), 0..3)
    }

    proptest! {
        /// All spellings of a name give the same answers, however the configuration spells it.
        #[test]
        fn leading_slashes_do_not_change_access(
            server in any_list(),
            lists in vec((spelled(), any_list()), 0..4),
            asked in spelled(),
            name in select(&[None, Some("db1"), Some("db2"), Some("db3")][..]),
            address in 0..4u8,
            unlisted in select(
                &[Unlisted::Everyone, Unlisted::Named, Unlisted::Nobody][..],
            ),
        ) {
            let server = read(&server);
            let lists: Vec<_> = lists.into_iter().map(|(at, list)| (at, read(&list))).collect();
            let policy = |with_slashes: bool| {
                let spelled: Vec<_> = lists
                    .iter()
                    .map(|(at, list)| {
                        (if with_slashes { at.text() } else { at.name.to_owned() }, list)
                    })
                    .collect();
                let lists = spelled.iter().map(|(name, list)| (name.as_str(), &list[..]));
                AccessPolicy::new(&server, lists, unlisted)
            };
            let (spelled, plain) = (policy(true), policy(false));
            let (address, session) = ([10, 0, 0, address].into(), SessionId([0; 16]));
            let client = Client { name, address, scope: 0, session };
            prop_assert_eq!(&spelled, &plain);
            let none = server.is_empty() && lists.iter().all(|(_, list)| list.is_empty());
            prop_assert_eq!(spelled.may_connect(client), plain.may_connect(client));
            prop_assert_eq!(spelled.is_open(), plain.is_open());
            prop_assert_eq!(spelled.is_open_to_named(), plain.is_open_to_named());
            for write in [false, true] {
                let allowed = spelled.allows(client, &asked.text(), write);
                prop_assert_eq!(allowed, plain.allows(client, asked.name, write));
                // Expected access according to the lists, without the policy's own lookup.
                let is_own = |(at, list): &&(Spelled, Vec<_>)| {
                    at.name == asked.name && !list.is_empty()
                };
                let own = lists.iter().rfind(is_own);
                let list = own.map_or(&server, |(_, list)| list);
                let listed = list.iter().any(|rule| rule.allows(client, write));
                prop_assert_eq!(allowed, listed || none && unlisted.allows(client));
            }
        }
    }

    #[test]
    fn a_list_on_one_export_closes_all_others() {
        let policy = policy(&[], &[("vol0", &["anyone:ro"])]);
        assert!(policy.may_connect(at("::1")) && policy.allows(at("::1"), "vol0", false));
        assert!(!policy.allows(at("::1"), "vol1", false));
    }

    #[test]
    fn the_kernel_rule_matches_nameless_clients() {
        let policy = policy(&["kernel@10.0.0.0/24:rw"], &[]);
        let nameless = at("10.0.0.1");
        assert!(policy.allows(nameless, "v", true));
        assert!(!policy.allows(Client { name: Some("db1"), ..nameless }, "v", false));
        assert!(!policy.allows(at("10.0.1.1"), "v", false));
    }

    #[test]
    fn ipv4_mapped_addresses_match_ipv4_rules() {
        let policy = policy(&["anyone@10.0.0.0/24:rw"], &[]);
        assert!(policy.may_connect(at("::ffff:10.0.0.9")) && !policy.may_connect(at("::1")));
    }
}
