//! The runtime of a core: its ring, its turn, its mail, its clock.

mod affinity;
pub mod blkdev;
mod clock;
mod fixed;
mod log;
mod mailbox;
mod process;
mod reactor;
mod ring;
mod sleep_flag;
mod socket;

pub use affinity::{allowed_cpus, pin_plan, pin_to};
pub use clock::Clock;
pub use log::{Log, SettleAtEnd};
pub use mailbox::{Inbox, Mailbox, Sender, mailbox};
pub use process::{
    Privileges, become_daemon, become_io_flusher, boot_number, lock_memory, page_size, privileges,
    random_number, refuse_oom_kill,
};
pub use reactor::{PollPolicy, ReactorStats, Shard, run};
pub use ring::{Completed, Fd, Op, OpId, Port, Ring};
pub use socket::{PeerEnd, peer_end, unacknowledged, unread};
