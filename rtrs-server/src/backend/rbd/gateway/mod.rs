//! An image that several servers export; the server that holds the image's lock serves it.
//!
//! Each server has the image open, with its own cluster client, and starts without the lock. A
//! thread runs the blocking operations (`worker.rs`): taking the lock, by force if necessary, which
//! makes the OSDs refuse the previous owner; releasing it; reopening the image with a new client
//! after the current one was refused. Shards check one word before each IO (`device.rs`).
//!
//! The image's metadata contains the *term*, which counts the times that the lock was taken, and
//! the session for which it was taken. The lock is taken by force only for the same session; for a
//! different session, only if the lock's owner has stopped, which the cluster detects after 30 s.
//!
//! A process that was paused for that long may have lost its lock to another server. It then counts
//! as standby, even before it has checked, and reopens the image: a thread records the time from a
//! clock that includes host suspension, and an IO does not start if the record is too old.

mod device;
mod inner;
mod source;
mod worker;

pub use source::GatewaySource;

#[cfg(test)]
mod tests;
