//! DISCOVER: a client lists the exports that it may open, page by page.
//!
//! Only named exports are listed: what a search path leads to is known when somebody opens it. With
//! access lists, only what the client may open. The work of one page is bounded by the number of
//! exports, whatever a client asks for.

use std::sync::Arc;

use rtrs_core::ids::SessionId;
use rtrs_core::limits::SECTOR_SIZE;
use rtrs_core::wire::{Discovered, Name, Page};

use super::open::Opens;
use super::permission::may_open;
use super::registry::Registry;
use crate::engine::message::ControlAnswer;
use crate::export::{Export, ExportIndex, ExportTable};

/// The exports that come after a name, as many as fit.
pub(super) fn page(
    after: &Name,
    room: u32,
    session: SessionId,
    (exports, opens, registry): (&ExportTable, &Opens, &Registry),
) -> ControlAnswer {
    // One more than fits says whether there are more.
    let policy = exports.access();
    let may = |export: &Export, write| may_open(&policy, registry, (session, &export.name, write));
    let visible = |(_, export): &(ExportIndex, Arc<Export>)| may(export, false);
    let wanted = Page::EXPORTS_MAX + 1;
    let mut named = Vec::new();
    let mut from = after.as_bytes().to_vec();
    while named.len() < wanted {
        let next = exports.named_after(&from, wanted);
        let Some((_, last)) = next.last() else { break };
        from = last.name.as_bytes().to_vec();
        named.extend(next.into_iter().filter(visible));
    }
    let found = named.iter().filter_map(|(at, export)| {
        let geometry = export.geometry();
        let users = opens.users(*at).iter();
        Some(Discovered {
            name: Name::new(export.name.as_bytes()).ok()?,
            sectors: geometry.size / u64::from(SECTOR_SIZE),
            block_size: geometry.logical_block,
            read_only: geometry.read_only || !may(export, true),
            written: users.clone().any(|(who, how)| *who != session && how.may_write()),
            id: export.id,
        })
    });
    let page = Page::fill(found, room as usize);
    ControlAnswer::Page(page.encode().into())
}
