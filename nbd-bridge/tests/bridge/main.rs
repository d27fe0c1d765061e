//! The bridge on a real ring, over a memory device with switches, tested at the byte level.
//!
//! After every turn the bridge checks its rows and buffers (`Bridge::check`), and every test ends
//! with all rows and buffers returned.

mod abandoned;
mod client;
mod device;
mod fixture;
mod flow;
mod ghosts;
mod long;
mod losses;
mod mixture;
mod neighbors;
mod parts;
mod programs;
mod resize;
mod status;
mod time;
mod unread;
mod violations;
