//! The bridge on a real ring, over a memory device with switches, spoken to in bytes.
//!
//! After every turn the bridge counts its rows and buffers (`Bridge::check`), and every test ends
//! with all of them home.

mod client;
mod device;
mod fixture;
mod flow;
mod ghosts;
mod given_up;
mod long;
mod mixture;
mod neighbours;
mod parts;
mod programs;
mod resize;
mod status;
mod time;
mod violations;
