//! DISCOVER: a client lists the exports that it may open, page by page.
//!
//! Only named exports are listed, because files in a search path are unknown until they are opened.
//! With access lists, only exports that the client may open are listed. These exports are
//! determined once for each client, [`SLICE`] exports at a time, and cached until exports or access
//! lists change: the cost of a page does not depend on the number of exports. The cached list only
//! narrows the search; a page lists what its client may open at the time the page is created.

use std::collections::VecDeque;
use std::net::IpAddr;

use rtrs_core::ids::SessionId;
use rtrs_core::limits::SECTOR_SIZE;
use rtrs_core::wire::{Discovered, Name, Page};

use super::open::Opens;
use super::permission::{clients, may_open};
use super::registry::Registry;
use crate::engine::message::ControlAnswer;
use crate::export::{ExportIndex, ExportTable, bare};

/// Number of exports that one step of building a list visits.
pub(super) const SLICE: u16 = 128;
/// Maximum number of cached lists.
const LISTS_MAX: usize = 16;

/// Identity of a client: the names and addresses of its session's paths. Clients with equal keys
/// may open the same exports. The session is part of the key if rules depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClientKey {
    /// Names, addresses, and the interfaces of link-local addresses.
    paths: Vec<(Option<String>, IpAddr, u32)>,
    session: Option<SessionId>,
}

/// Exports that a client may open.
#[derive(Debug)]
struct List {
    client: ClientKey,
    /// Version of the exports and access lists that the list was built from.
    version: u64,
    /// Exports, in order of their names.
    exports: Vec<ExportIndex>,
}

/// A partial list that is being built for a request.
#[derive(Debug)]
pub(super) struct Draft {
    list: List,
    /// Last name visited.
    from: Box<[u8]>,
}

/// Lists of exports; the most recently used is last.
#[derive(Debug, Default)]
pub(super) struct Lists(VecDeque<List>);

/// Progress of a DISCOVER.
pub(super) enum Step {
    Answer(ControlAnswer),
    /// More exports must be visited.
    Again(Box<Draft>),
}

/// A DISCOVER: lists exports after a name, in an answer of limited size.
pub(super) struct PageRequest<'a> {
    pub(super) session: SessionId,
    pub(super) after: &'a Name,
    /// Maximum size of the answer in bytes.
    pub(super) room: u32,
}

/// Sources of a page's contents.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub(super) exports: &'a ExportTable,
    pub(super) opens: &'a Opens,
    pub(super) registry: &'a Registry,
}

impl Lists {
    /// Creates a page with as many exports as fit. If there is no list for the client yet, visits
    /// the next [`SLICE`] exports after those in `draft`.
    pub(super) fn page(
        &mut self,
        request: &PageRequest<'_>,
        draft: Option<Box<Draft>>,
        tables: Tables<'_>,
    ) -> Step {
        let Tables { exports, registry, .. } = tables;
        let session = request.session;
        let version = exports.version();
        let client = client_key(exports, registry, session);
        let known = |list: &List| list.version == version && list.client == client;
        self.0.retain(|list| list.version == version);
        let list = match self.0.iter().position(known).and_then(|at| self.0.remove(at)) {
            Some(list) => list,
            None => {
                let draft = draft.filter(|draft| known(&draft.list));
                let draft = draft.unwrap_or_else(|| {
                    let list = List { client, version, exports: Vec::new() };
                    Box::new(Draft { list, from: Box::default() })
                });
                match draft.look(session, exports, registry) {
                    Ok(list) => list,
                    Err(draft) => return Step::Again(draft),
                }
            }
        };
        let page = list.page(request, tables);
        if self.0.len() >= LISTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(list);
        Step::Answer(page)
    }
}

/// Identity of a session's client.
fn client_key(exports: &ExportTable, registry: &Registry, session: SessionId) -> ClientKey {
    let policy = exports.access();
    if policy.is_open() {
        return ClientKey::default();
    }
    let mut paths: Vec<_> = clients(registry, session)
        .map(|client| (client.name.map(str::to_owned), client.address, client.scope))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    ClientKey { paths, session: policy.has_holders().then_some(session) }
}

impl Draft {
    /// Visits more exports. Returns the complete list after the last export.
    fn look(
        mut self: Box<Self>,
        session: SessionId,
        exports: &ExportTable,
        registry: &Registry,
    ) -> Result<List, Box<Self>> {
        let next = exports.named_after(&self.from, usize::from(SLICE));
        // Read after the exports, so that the access lists are never older than the exports they
        // apply to.
        let policy = exports.access();
        let last = next.last().filter(|_| next.len() == usize::from(SLICE));
        let last: Option<Box<[u8]>> = last.map(|(_, last)| bare(last.name.as_bytes()).into());
        let visible = next
            .iter()
            .filter(|(_, export)| may_open(&policy, registry, session, &export.name, false));
        self.list.exports.extend(visible.map(|(at, _)| *at));
        match last {
            Some(last) => {
                self.from = last;
                Err(self)
            }
            None => Ok(self.list),
        }
    }
}

impl List {
    fn page(&self, request: &PageRequest<'_>, tables: Tables<'_>) -> ControlAnswer {
        let Tables { exports, opens, registry } = tables;
        let (session, after) = (request.session, bare(request.after.as_bytes()));
        let is_before = |at: &ExportIndex| {
            exports.get(*at).is_some_and(|export| bare(export.name.as_bytes()) <= after)
        };
        let first = self.exports.partition_point(is_before);
        // Fetching one export more than fits shows whether there are more.
        let named = self.exports[first..].iter().filter_map(|at| {
            let export = exports.get(*at)?;
            if exports.find(export.name.as_bytes()) != Some(*at) {
                return None;
            }
            let policy = exports.access();
            let may = |write| may_open(&policy, registry, session, &export.name, write);
            let geometry = may(false).then(|| export.geometry())?;
            let users = opens.users(*at).iter();
            Some(Discovered {
                name: Name::new(export.name.as_bytes()).ok()?,
                sectors: geometry.size / u64::from(SECTOR_SIZE),
                block_size: geometry.logical_block,
                read_only: geometry.read_only || !may(true),
                written: users.clone().any(|(who, how)| *who != session && how.may_write()),
                id: export.id,
            })
        });
        let page = Page::fill(named.take(Page::EXPORTS_MAX + 1), request.room as usize);
        ControlAnswer::Page(page.encode().into())
    }
}
