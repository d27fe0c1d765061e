//! Runtime of a shard: its ring, turns, messages and clock.

mod affinity;
pub mod blkdev;
mod clock;
mod event_queue;
mod fixed;
mod log;
mod mailbox;
mod op;
mod process;
mod reactor;
mod ring;
mod ring_error;
mod signals;
mod sleep_flag;
mod socket;
mod syscall;

pub use affinity::{allowed_cpus, pin_plan, pin_to};
pub use clock::Clock;
pub use event_queue::{EventReceiver, EventSender, event_queue};
pub use log::{Log, SettleAtEnd};
pub use mailbox::{Inbox, Mailbox, Sender, mailbox};
pub use op::{Fd, Op};
pub use process::{
    Account, FilesAs, Privileges, become_account, become_daemon, become_io_flusher, boot_number,
    close_descriptors_on_exec, duplicate_inherited, effective_user, end_with_starter, forbid_dumps,
    forbid_new_privileges, lock_memory, locked_memory_limit, page_size, privileges,
    raise_open_files, random_number, refuse_oom_kill, replace_stderr, reset_signals,
    unbound_locked_memory,
};
pub use reactor::{PollPolicy, ReactorStats, Shard, run};
pub use ring::{Completed, OpId, Port, Ring};
pub use signals::{Forwarding, Signal, Signals};
pub use socket::{
    PeerCredentials, PeerEnd, get_option, is_hung_up, peer_credentials, peer_end, peer_pid,
    receive_passed, set_option, unacknowledged, unacknowledged_bytes, unread,
};
