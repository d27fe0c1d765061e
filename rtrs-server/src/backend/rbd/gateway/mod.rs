//! An image that several servers export, of which the one that has its lock serves it.
//!
//! Each server has the image open, with a client of the cluster of its own, and begins without the
//! lock. What blocks runs on a thread (`worker.rs`): taking the lock, if need be by force, which
//! has the OSDs refuse the former owner; giving it up; opening the image with a new client after
//! this one was refused. Shards look at one word before each IO (`device.rs`).
//!
//! The image keeps the *term*, which counts how often the lock was taken, and the session for which
//! that was. Only for the same session the lock is taken by force; for another one only if its
//! owner is gone, which the cluster knows 30 s after its end.
//!
//! A process that did not run for so long may have lost its lock to anyone. It counts as standby
//! from then on, before it has asked, and opens the image anew: a thread notes the time, that of a
//! suspended host included, and an IO that finds it to be too old is not begun.

mod device;
mod inner;
mod source;
mod worker;

pub use source::GatewaySource;

#[cfg(test)]
mod tests;
