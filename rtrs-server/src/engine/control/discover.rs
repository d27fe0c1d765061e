//! DISCOVER: a client lists the exports that it may open, page by page.
//!
//! Only named exports are listed: what a search path leads to is known when somebody opens it. With
//! access lists, only what the client may open. Which exports these are is found out once for each
//! client, [`SLICE`] exports at a time, and kept until exports or access lists change: what a page
//! costs does not depend on how many exports there are. What is kept says where to look; a page
//! holds only what its client may open when it is made.

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

/// Exports that one step of a list looks at.
pub(super) const SLICE: u16 = 128;
/// Lists that are kept.
const LISTS_MAX: usize = 16;

/// Identity of a client: the names and addresses of its session's paths. Two with the same may open
/// the same. The session counts if rules depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ClientKey {
    paths: Vec<(Option<String>, IpAddr)>,
    session: Option<SessionId>,
}

/// What a client may open.
#[derive(Debug)]
struct List {
    client: ClientKey,
    /// Number of the exports and access lists that were looked at.
    version: u64,
    /// In the order of their names.
    exports: Vec<ExportIndex>,
}

/// A list that is being made for a request.
#[derive(Debug)]
pub(super) struct Draft {
    list: List,
    /// Name that was looked at last.
    from: Box<[u8]>,
}

/// Lists of exports, the last to be used behind the others.
#[derive(Debug, Default)]
pub(super) struct Lists(VecDeque<List>);

/// Progress of a DISCOVER.
pub(super) enum Step {
    Answer(ControlAnswer),
    /// There are other exports to look at.
    Again(Box<Draft>),
}

/// A DISCOVER: exports behind a name, in an answer of limited size.
pub(super) struct PageRequest<'a> {
    pub(super) session: SessionId,
    pub(super) after: &'a Name,
    /// Bytes of the answer.
    pub(super) room: u32,
}

/// What a page is made from.
#[derive(Clone, Copy)]
pub(super) struct Tables<'a> {
    pub(super) exports: &'a ExportTable,
    pub(super) opens: &'a Opens,
    pub(super) registry: &'a Registry,
}

impl Lists {
    /// Makes a page of exports, as many as fit. Looks at [`SLICE`] exports, after those of `draft`,
    /// if there is no list for the client yet.
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

/// The identity of a session's client.
fn client_key(exports: &ExportTable, registry: &Registry, session: SessionId) -> ClientKey {
    let policy = exports.access();
    if policy.is_open() {
        return ClientKey::default();
    }
    let mut paths: Vec<_> = clients(registry, session)
        .map(|client| (client.name.map(str::to_owned), client.address))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    ClientKey { paths, session: policy.has_holders().then_some(session) }
}

impl Draft {
    /// Looks at more exports. Returns the list when that was all.
    fn look(
        mut self: Box<Self>,
        session: SessionId,
        exports: &ExportTable,
        registry: &Registry,
    ) -> Result<List, Box<Self>> {
        let next = exports.named_after(&self.from, usize::from(SLICE));
        // After the exports: a list is never older than what it is for.
        let policy = exports.access();
        let last = next.last().filter(|_| next.len() == usize::from(SLICE));
        let last: Option<Box<[u8]>> = last.map(|(_, last)| bare(last.name.as_bytes()).into());
        let visible = next
            .iter()
            .filter(|(_, export)| may_open(&policy, registry, (session, &export.name, false)));
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
        // One more than fits says whether there are more.
        let named = self.exports[first..].iter().filter_map(|at| {
            let export = exports.get(*at)?;
            if exports.find(export.name.as_bytes()) != Some(*at) {
                return None;
            }
            let policy = exports.access();
            let may = |write| may_open(&policy, registry, (session, &export.name, write));
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
