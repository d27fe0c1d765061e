//! The operator's side of a running server: its control socket, and the commands that use it.
//!
//! `desk.rs` answers in the server's process, `command.rs` asks, `report.rs` shows the answers to
//! people; `question.rs` is what they say to each other, a line of JSON each way. What is asked of
//! sessions is answered by the control core (`engine/control/admin.rs`).

mod command;
mod desk;
mod question;
mod report;

pub use command::run;
pub(crate) use desk::Desk;
