//! Access lists of a running server, from settings and commands.
//!
//! Owns [`ServerAccess`], the lists of the server itself and of its exports. Access that is not
//! listed stays denied: a server that had a list becomes open to everyone only when its
//! configuration has no list, not when a command removes the last one.
//!
//! A list applies to the export that the configuration defines under the name, so a new
//! configuration takes effect in two steps. [`narrow_to`](ServerAccess::narrow_to) immediately
//! denies the access that either configuration denies; [`grant`](ServerAccess::grant) permits what
//! the new one permits, export by export, once that export is in place. An export that could not be
//! changed keeps both conditions. An open export that left the configuration remains available to
//! the sessions that had it open at that time.

use std::collections::{BTreeMap, BTreeSet};

use rtrs_core::ids::SessionId;

use crate::access_list::{AccessPolicy, AccessRule, Grant, ListChange, Unlisted, bare};
use crate::control_protocol::UnlistedChange;
use crate::plan::has_keys;
use crate::settings::{ExportSpec, SearchSpec, Settings};
use crate::stats::AccessLimit;

/// Sessions that have an export open. The value is true if it is open for writing.
pub(super) type Holders = BTreeMap<SessionId, bool>;

/// An export that left the configuration while sessions had it open.
#[derive(Clone, Debug)]
struct Withdrawn {
    list: Vec<AccessRule>,
    grants: Vec<Grant>,
}

/// Access to an export before a command changed its list.
#[derive(Debug)]
pub(super) struct FormerAccess {
    /// Number of the most recently read configuration.
    configuration: u64,
    list: Option<Vec<AccessRule>>,
    narrowed: Option<Vec<Grant>>,
    withdrawn: Option<Withdrawn>,
}

/// Access lists of a server. Names are export names without leading slashes.
#[derive(Clone, Debug)]
pub(super) struct ServerAccess {
    server: Vec<AccessRule>,
    /// Lists, by export name.
    exports: BTreeMap<String, Vec<AccessRule>>,
    withdrawn: BTreeMap<String, Withdrawn>,
    /// Conditions that apply in addition to an export's list.
    narrowed: BTreeMap<String, Vec<Grant>>,
    /// Additional conditions for files found under the search path.
    narrowed_others: Vec<Grant>,
    /// Whether clients can authenticate.
    has_keys: bool,
    /// Whether clients can open files under a search path.
    has_search_path: bool,
    /// Whether there has been a list since the configuration was last read.
    closed: bool,
    /// Number of the most recently read configuration.
    configuration: u64,
    /// Generation of the certificates and keys in use.
    pub(super) generation: u64,
}

impl ServerAccess {
    /// Creates the lists for a server that is starting.
    pub(super) fn new(set: &Settings) -> Self {
        let mut access = Self {
            server: Vec::new(),
            exports: BTreeMap::new(),
            withdrawn: BTreeMap::new(),
            narrowed: BTreeMap::new(),
            narrowed_others: Vec::new(),
            has_keys: has_keys(set),
            has_search_path: set.search_path != SearchSpec::Off,
            closed: false,
            configuration: 0,
            generation: 0,
        };
        access.configure(set, BTreeMap::new());
        access
    }

    /// Sets the lists to those in the configuration, and those of exports that commands have added.
    fn configure(&mut self, set: &Settings, others: BTreeMap<String, Vec<AccessRule>>) {
        self.server.clone_from(&set.access);
        self.exports =
            others.into_iter().map(|(name, list)| (bare(&name).to_owned(), list)).collect();
        for spec in &set.export {
            self.exports.insert(bare(spec.name()).to_owned(), spec.access.clone());
        }
        self.closed = self.has_list();
        self.configuration += 1;
    }

    /// Adopts a configuration, but applies only its restrictions for now: an export is open to
    /// clients that both the previous lists and those of the configuration allow. `others` are the
    /// lists of exports that commands have added; `withdrawn` are the exports that left the
    /// configuration, which are available only to their holders.
    pub(super) fn narrow_to(
        &mut self,
        set: &Settings,
        others: BTreeMap<String, Vec<AccessRule>>,
        withdrawn: &BTreeMap<String, Holders>,
    ) {
        let before = self.clone();
        self.configure(set, others);
        self.withdrawn.clear();
        for (name, holders) in withdrawn {
            let name = bare(name).to_owned();
            if self.exports.contains_key(&name) {
                continue;
            }
            let mut grants = before.grants(&name);
            // Keeps the first set of holders: a session may be about to reconnect.
            if !grants.iter().any(|grant| matches!(grant, Grant::Holders(_))) {
                grants.push(Grant::Holders(holders.clone()));
            }
            let list = before.of(&name);
            self.withdrawn.insert(name, Withdrawn { list, grants });
        }
        self.narrowed.clear();
        for name in before.exports.keys().chain(before.withdrawn.keys()) {
            if self.exports.contains_key(name) && !rtrs_core::mutated!(ReloadGrantsFirst) {
                let own = self.list_or_rest(name);
                let mut grants = before.grants(name);
                grants.retain(|grant| *grant != own);
                if !grants.is_empty() {
                    self.narrowed.insert(name.clone(), grants);
                }
            }
        }
        let own = self.rest();
        self.narrowed_others = before.other_grants();
        self.narrowed_others.retain(|grant| *grant != own);
    }

    /// Applies the permissions of the configuration to these exports, which match it. Does nothing
    /// if a newer configuration has been read since the one with this number.
    pub(super) fn grant<'a>(&mut self, configuration: u64, exports: impl Iterator<Item = &'a str>) {
        if configuration != self.configuration {
            return;
        }
        self.narrowed_others.clear();
        for name in exports {
            self.narrowed.remove(bare(name));
        }
    }

    /// Number of the most recently read configuration.
    pub(super) fn configuration(&self) -> u64 {
        self.configuration
    }

    /// Whether clients without a rule are refused, even after a command has removed the last list.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// List of the server itself.
    pub(super) fn server(&self) -> &[AccessRule] {
        &self.server
    }

    /// List of an export.
    pub(super) fn of(&self, export: &str) -> Vec<AccessRule> {
        let name = bare(export);
        let withdrawn = || self.withdrawn.get(name).map(|export| &export.list);
        self.exports.get(name).or_else(withdrawn).cloned().unwrap_or_default()
    }

    /// Additional restriction on an export, if any.
    pub(super) fn limit_of(&self, export: &str) -> Option<AccessLimit> {
        let name = bare(export);
        if self.withdrawn.contains_key(name) {
            return Some(AccessLimit::Holders);
        }
        self.narrowed.contains_key(name).then_some(AccessLimit::Before)
    }

    /// Sets the list of an export, overriding the configuration. Returns the previous access.
    pub(super) fn set(&mut self, spec: &ExportSpec) -> FormerAccess {
        let name = bare(spec.name());
        let former = FormerAccess {
            configuration: self.configuration,
            list: self.exports.insert(name.to_owned(), spec.access.clone()),
            narrowed: self.narrowed.remove(name),
            withdrawn: self.withdrawn.remove(name),
        };
        self.closed |= self.has_list();
        former
    }

    /// Reverts the list of an export that a command has set. `configured` says whether the
    /// configuration defines the export. Does nothing if the list has changed since, or if a
    /// configuration with a different list may have been read. Returns whether the list was
    /// reverted.
    pub(super) fn take_back(
        &mut self,
        set: &ExportSpec,
        former: FormerAccess,
        configured: bool,
    ) -> bool {
        let name = bare(set.name());
        let is_same_configuration = former.configuration == self.configuration;
        let may = is_same_configuration || !configured;
        if self.exports.get(name) != Some(&set.access) || !may {
            return false;
        }
        match former.list {
            Some(list) => drop(self.exports.insert(name.to_owned(), list)),
            None => drop(self.exports.remove(name)),
        }
        if is_same_configuration {
            self.narrowed.extend(former.narrowed.map(|grants| (name.to_owned(), grants)));
            self.withdrawn.extend(former.withdrawn.map(|one| (name.to_owned(), one)));
        }
        true
    }

    /// Restores the lists of exports of the configuration with this number that commands have
    /// removed since it was read. Does nothing if a newer configuration has been read since.
    pub(super) fn renew(&mut self, configuration: u64, exports: &[ExportSpec]) {
        if configuration != self.configuration {
            return;
        }
        for spec in exports {
            let list = self.exports.entry(bare(spec.name()).to_owned());
            list.or_insert_with(|| spec.access.clone());
        }
    }

    /// Removes the lists of an export that no longer exists.
    pub(super) fn forget(&mut self, export: &str) {
        let name = bare(export);
        self.exports.remove(name);
        self.narrowed.remove(name);
        self.withdrawn.remove(name);
    }

    /// Lists that differ in `now`.
    pub(super) fn changes_to(&self, now: &Self) -> Vec<ListChange> {
        let names: BTreeSet<&String> = self.exports.keys().chain(now.exports.keys()).collect();
        let list = |lists: &BTreeMap<String, Vec<AccessRule>>, name| {
            lists.get(name).cloned().unwrap_or_default()
        };
        let exports = names.into_iter().map(|name| ListChange {
            export: Some(name.clone()),
            before: list(&self.exports, name),
            after: list(&now.exports, name),
        });
        let (before, after) = (self.server.clone(), now.server.clone());
        let server = ListChange { export: None, before, after };
        let all = std::iter::once(server).chain(exports);
        all.filter(|change| change.before != change.after).collect()
    }

    /// Exports that clients can open in `self` but no client can open in `now`.
    pub(super) fn closed_in(&self, now: &Self) -> Vec<String> {
        let closes =
            |before: &Grant, after: &Grant| !before.admits_nobody() && after.admits_nobody();
        let closed = |name: &&String| closes(&self.list_or_rest(name), &now.list_or_rest(name));
        let names = self.exports.keys().filter(|name| now.exports.contains_key(*name));
        let found = self.has_search_path && closes(&self.rest(), &now.rest());
        let found = found.then(|| "files below search-path".to_owned());
        names.filter(closed).cloned().chain(found).collect()
    }

    /// Access to exports without a list of their own, if it differs in `now` other than by the
    /// rules of the server's list.
    pub(super) fn unlisted_change_to(&self, now: &Self) -> Option<UnlistedChange> {
        let listed = |access: &Self| !access.server.is_empty();
        let (before, after) = (self.rest().to_string(), now.rest().to_string());
        let differs = before != after && !(listed(self) && listed(now));
        differs.then_some(UnlistedChange { before, after })
    }

    fn has_list(&self) -> bool {
        !self.server.is_empty() || self.exports.values().any(|list| !list.is_empty())
    }

    /// Condition for exports without a list of their own.
    fn rest(&self) -> Grant {
        match (self.has_list(), self.closed, self.has_keys) {
            (true, ..) => Grant::Rules(self.server.clone()),
            (false, true, _) => Grant::Unlisted(Unlisted::Nobody),
            (false, false, true) => Grant::Unlisted(Unlisted::Named),
            (false, false, false) => Grant::Unlisted(Unlisted::Everyone),
        }
    }

    fn list_or_rest(&self, name: &str) -> Grant {
        match self.exports.get(name) {
            Some(list) if !list.is_empty() => Grant::Rules(list.clone()),
            _ => self.rest(),
        }
    }

    /// Conditions of an export, all of which apply.
    fn grants(&self, name: &str) -> Vec<Grant> {
        if let Some(withdrawn) = self.withdrawn.get(name) {
            return withdrawn.grants.clone();
        }
        let narrowed = self.narrowed.get(name).into_iter().flatten().cloned();
        [self.list_or_rest(name)].into_iter().chain(narrowed).collect()
    }

    /// Conditions for exports without a list of their own.
    fn other_grants(&self) -> Vec<Grant> {
        [self.rest()].into_iter().chain(self.narrowed_others.iter().cloned()).collect()
    }

    /// Creates the policy from the lists.
    pub(super) fn policy(&self) -> AccessPolicy {
        let listed = self.exports.iter().filter(|(_, list)| !list.is_empty());
        let listed = listed.map(|(name, _)| name);
        // Exports without a list that must not follow the conditions of others.
        let beside = match self.narrowed_others.is_empty() {
            true => None,
            false => Some(self.exports.keys()),
        };
        let names = listed.chain(self.narrowed.keys()).chain(self.withdrawn.keys());
        let names: BTreeSet<&String> = names.chain(beside.into_iter().flatten()).collect();
        let exports = names.into_iter().map(|name| (name.clone(), self.grants(name))).collect();
        AccessPolicy::with_grants(self.other_grants(), exports).with_generation(self.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_list::Client;

    fn spec(text: &str) -> ExportSpec {
        text.parse().unwrap()
    }

    #[test]
    fn only_the_configuration_reopens_a_server_that_had_a_list() {
        let mut access = ServerAccess::new(&Settings::default());
        assert!(access.policy().is_open());
        access.set(&spec("v=mem:1M,access=anyone:ro"));
        assert!(!access.policy().is_open());
        access.forget("v");
        assert!(!access.policy().is_open(), "the list went with its export");
        access.configure(&Settings::default(), BTreeMap::new());
        assert!(access.policy().is_open());
    }

    #[test]
    fn a_change_names_the_exports_that_it_closes() {
        let open = ServerAccess::new(&settings(&[], &["a=mem:1M", "b=mem:1M", "c=mem:1M"]));
        let with = |access: &ServerAccess, text: &str| {
            let mut access = access.clone();
            access.set(&spec(text));
            access
        };
        let first = with(&open, "a=mem:1M,access=anyone:ro");
        assert_eq!(open.closed_in(&first), ["b", "c"]);
        let change = open.unlisted_change_to(&first).unwrap();
        assert_eq!((&*change.before, &*change.after), ("everyone", "no client"));
        // Exports that are closed already, or are new, are not closed by the change.
        let second = with(&first, "b=mem:1M,access=anyone:ro");
        assert!(first.closed_in(&second).is_empty());
        assert!(first.closed_in(&with(&first, "d=mem:1M")).is_empty());
        assert_eq!(second.closed_in(&with(&second, "b=mem:1M")), ["b"], "its list goes");
        // Exports without a list of their own follow the server's.
        let server = ServerAccess::new(&settings(&["anyone:rw"], &["a=mem:1M", "b=mem:1M"]));
        assert!(server.closed_in(&with(&server, "a=mem:1M,access=db1:rw")).is_empty());
        assert!(open.closed_in(&server).is_empty());
        let set = Settings { search_path: "/srv".parse().unwrap(), ..settings(&[], &["a=mem:1M"]) };
        let found = ServerAccess::new(&set);
        let listed = with(&found, "a=mem:1M,access=anyone:ro");
        assert_eq!(found.closed_in(&listed), ["files below search-path"]);
    }

    const DB1: SessionId = SessionId([1; 16]);
    const DB2: SessionId = SessionId([2; 16]);

    fn may(
        access: &ServerAccess,
        who: &str,
        session: SessionId,
        export: &str,
        write: bool,
    ) -> bool {
        let client = Client { name: Some(who), address: [10, 0, 0, 1].into(), scope: 0, session };
        let policy = access.policy();
        let allowed = policy.allows(client, export, write);
        assert!(!allowed || policy.may_connect(client), "{who} {export}");
        allowed
    }

    fn settings(server: &[&str], exports: &[&str]) -> Settings {
        let access = server.iter().map(|rule| rule.parse().unwrap()).collect();
        let export = exports.iter().map(|text| spec(text)).collect();
        Settings { access, export, ..Settings::default() }
    }

    #[test]
    fn a_configuration_revokes_first_and_grants_later() {
        let old = settings(&["ops:ro"], &["a=mem:1M,access=db1:rw", "b=mem:1M"]);
        let new = settings(
            &["ops:rw"],
            &["a=mem:2M,access=db2:rw,access=db1:ro", "b=mem:1M,access=db1:rw"],
        );
        let mut access = ServerAccess::new(&old);
        access.narrow_to(&new, BTreeMap::new(), &BTreeMap::new());
        let may = |access: &ServerAccess, who, export, write| may(access, who, DB1, export, write);
        assert!(may(&access, "db1", "a", false) && !may(&access, "db1", "a", true));
        assert!(!may(&access, "db2", "a", false) && !may(&access, "db1", "b", false));
        assert!(!may(&access, "ops", "b", false), "only in the old list of the server");
        let client =
            Client { name: Some("ops"), address: [10, 0, 0, 1].into(), scope: 0, session: DB1 };
        let found = |access: &ServerAccess, write| access.policy().allows_found(client, write);
        assert!(found(&access, false) && !found(&access, true));
        assert_eq!(access.limit_of("a"), Some(AccessLimit::Before));
        // Only exports that match the last configuration follow it.
        access.grant(access.configuration() - 1, ["a", "b"].into_iter());
        assert!(!may(&access, "db1", "b", false));
        access.grant(access.configuration(), ["b"].into_iter());
        assert!(may(&access, "db1", "b", true) && !may(&access, "db2", "a", false));
        assert!(found(&access, true));
        // The export that was kept is not available to clients of the next configuration either.
        let third = settings(&[], &["a=mem:3M,access=db3:rw", "b=mem:1M"]);
        access.narrow_to(&third, BTreeMap::new(), &BTreeMap::new());
        access.grant(access.configuration(), ["b"].into_iter());
        assert!(["db1", "db2", "db3"].into_iter().all(|who| !may(&access, who, "a", false)));
        // A command overrides the access to an existing export.
        access.set(&spec("a=mem:1M,access=db3:rw"));
        assert!(may(&access, "db3", "a", true) && access.limit_of("a").is_none());
    }

    #[test]
    fn a_withdrawn_export_serves_only_its_holders() {
        let old = settings(&["web:rw"], &["a=mem:1M,access=db1:rw,access=db2:rw", "b=mem:1M"]);
        let holders = |who: &[(SessionId, bool)]| who.iter().copied().collect::<Holders>();
        let gone = |who| BTreeMap::from([("a".to_owned(), holders(who))]);
        let mut access = ServerAccess::new(&old);
        // No list remains: the withdrawn export does not close the server, and is not open to
        // everyone.
        access.narrow_to(&settings(&[], &["b=mem:1M"]), BTreeMap::new(), &gone(&[(DB1, false)]));
        access.grant(access.configuration(), ["b"].into_iter());
        for (who, session, write, allowed) in [
            ("db1", DB1, false, true),
            ("db1", DB1, true, false),
            ("db1", DB2, false, false),
            ("db2", DB2, false, false),
            ("web", DB2, false, false),
            ("web", DB1, false, false),
        ] {
            assert_eq!(may(&access, who, session, "a", write), allowed, "{who} {write}");
        }
        assert!(access.policy().is_open_to_everyone() && !access.policy().is_open());
        assert_eq!(access.limit_of("a"), Some(AccessLimit::Holders));
        assert_eq!(access.of("a").len(), 2, "`export save` keeps its list");
        // The next reload finds no holders, because the session is reconnecting.
        access.narrow_to(&settings(&[], &["b=mem:1M"]), BTreeMap::new(), &gone(&[]));
        assert!(may(&access, "db1", DB1, "a", false));
        // The export is configured again.
        access.narrow_to(&old, BTreeMap::new(), &BTreeMap::new());
        assert!(may(&access, "db1", DB1, "a", false) && !may(&access, "db2", DB2, "a", false));
        access.grant(access.configuration(), ["a", "b"].into_iter());
        assert!(may(&access, "db2", DB2, "a", true) && !may(&access, "web", DB1, "a", false));
    }

    #[test]
    fn a_leading_slash_does_not_change_the_name() {
        let mut old = settings(&[], &["a=mem:1M,access=db1:rw"]);
        old.export[0].name = Some("/a".into());
        let mut access = ServerAccess::new(&old);
        let new = settings(&["db2:rw"], &["a=mem:2M,access=db2:rw"]);
        access.narrow_to(&new, BTreeMap::new(), &BTreeMap::new());
        for name in ["a", "/a", "//a"] {
            assert!(
                !may(&access, "db2", DB2, name, false) && !may(&access, "db1", DB1, name, false)
            );
        }
    }

    #[test]
    fn a_list_applies_without_its_export() {
        let set = Settings {
            export: vec![spec("v=/none/there,access=anyone:ro"), spec("w=mem:1M")],
            ..Settings::default()
        };
        assert!(!ServerAccess::new(&set).policy().is_open());
    }

    #[test]
    fn a_list_is_reverted_with_the_conditions_of_an_unapplied_configuration() {
        let listed = |rule: &str| settings(&[], &[&format!("a=mem:1M,access={rule}")]);
        let mut access = ServerAccess::new(&listed("db1:rw"));
        access.narrow_to(&listed("db2:rw"), BTreeMap::new(), &BTreeMap::new());
        let set = spec("a=mem:1M,access=anyone:rw");
        let former = access.set(&set);
        assert_eq!(access.limit_of("a"), None);
        assert!(access.take_back(&set, former, true));
        assert_eq!(access.limit_of("a"), Some(AccessLimit::Before), "not widened");
        assert_eq!(access.of("a")[0].to_string(), "db2:rw");
        let former = access.set(&set);
        access.narrow_to(&listed("anyone:rw"), BTreeMap::new(), &BTreeMap::new());
        assert!(!access.take_back(&set, former, true), "the configuration has this list");
        let former = access.set(&set);
        access.set(&spec("a=mem:1M,access=db3:rw"));
        assert!(!access.take_back(&set, former, false), "another command has changed it");
    }

    #[test]
    fn a_removal_during_a_reload_does_not_cost_the_new_export_its_list() {
        let listed = settings(&[], &["a=mem:1M,access=db1:rw", "b=mem:1M,access=db2:rw"]);
        let mut access = ServerAccess::new(&listed);
        access.forget("a");
        access.renew(0, &listed.export);
        assert!(access.of("a").is_empty(), "another configuration");
        access.set(&spec("b=mem:1M,access=db3:rw"));
        access.renew(access.configuration(), &listed.export);
        assert_eq!(["a", "b"].map(|name| access.of(name)[0].to_string()), ["db1:rw", "db3:rw"]);
    }
}
