//! DISCOVER: a client lists the exports that it may open, page by page.
//!
//! Only named exports are listed: what a search path leads to is known when somebody opens it. The
//! work of one page is bounded, whatever a client asks for.

use rtrs_core::ids::SessionId;
use rtrs_core::limits::SECTOR_SIZE;
use rtrs_core::wire::{Discovered, Name, Page};

use super::open::Opens;
use crate::engine::message::ControlAnswer;
use crate::export::ExportTable;

/// The exports that come after a name, as many as fit.
pub(super) fn page(
    after: &Name,
    room: u32,
    session: SessionId,
    (exports, opens): (&ExportTable, &Opens),
) -> ControlAnswer {
    // One more than fits says whether there are more.
    let named = exports.named_after(after.as_bytes(), Page::EXPORTS_MAX + 1);
    let found = named.iter().filter_map(|(at, export)| {
        let geometry = export.geometry();
        let users = opens.users(*at).iter();
        Some(Discovered {
            name: Name::new(export.name.as_bytes()).ok()?,
            sectors: geometry.size / u64::from(SECTOR_SIZE),
            block_size: geometry.logical_block,
            read_only: geometry.read_only,
            written: users.clone().any(|(who, how)| *who != session && how.may_write()),
            id: export.id,
        })
    });
    let page = Page::fill(found, room as usize);
    ControlAnswer::Page(page.encode().into())
}
