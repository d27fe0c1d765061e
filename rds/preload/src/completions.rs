//! Completions of zero-copy sends that the program has not read yet.
//!
//! The node sends them between messages. As with the kernel, the program receives them with a
//! message, or from a nonblocking receive that finds no message.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of cookies in a control message.
const COOKIES_MAX: usize = 8;
/// Length of the control message: a count and the cookies.
pub(crate) const COMPLETION_LEN: usize = 4 + 4 * COOKIES_MAX;
/// Maximum number of cookies kept per socket. A program that passes no buffer for control messages
/// never reads them.
const KEPT_MAX: usize = 1 << 16;

pub(crate) type Completions = BTreeMap<u64, VecDeque<u32>>;

/// Cookies by the inode of the socket.
static COMPLETIONS: Mutex<Completions> = Mutex::new(BTreeMap::new());

/// Takes the lock for an operation or for a fork.
pub(crate) fn lock() -> MutexGuard<'static, Completions> {
    COMPLETIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a cookie. Returns true if the socket now has enough cookies to fill a control message.
pub(crate) fn keep(inode: u64, cookie: u32) -> bool {
    let mut completions = lock();
    let cookies = completions.entry(inode).or_default();
    if cookies.len() >= KEPT_MAX {
        cookies.pop_front();
    }
    cookies.push_back(cookie);
    cookies.len() >= COOKIES_MAX
}

/// Whether any cookies are kept for a socket.
pub(crate) fn is_any(inode: u64) -> bool {
    lock().get(&inode).is_some_and(|cookies| !cookies.is_empty())
}

/// Takes the oldest cookies of a socket, as the contents of a control message.
pub(crate) fn take(inode: u64) -> Option<[u8; COMPLETION_LEN]> {
    let mut completions = lock();
    let cookies = completions.get_mut(&inode).filter(|cookies| !cookies.is_empty())?;
    let count = cookies.len().min(COOKIES_MAX);
    let mut bytes = [0; COMPLETION_LEN];
    bytes[..4].copy_from_slice(&(count as u32).to_ne_bytes());
    for (room, cookie) in bytes[4..].chunks_exact_mut(4).zip(cookies.drain(..count)) {
        room.copy_from_slice(&cookie.to_ne_bytes());
    }
    Some(bytes)
}

/// Discards the cookies of a socket.
pub(crate) fn forget(inode: u64) {
    lock().remove(&inode);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_are_taken_in_order_eight_at_a_time() {
        let inode = u64::MAX;
        assert!(take(inode).is_none());
        for cookie in 0..10 {
            assert_eq!(keep(inode, cookie), cookie >= 7);
        }
        let words = |bytes: [u8; COMPLETION_LEN]| -> Vec<u32> {
            let word = |part: &[u8]| u32::from_ne_bytes([part[0], part[1], part[2], part[3]]);
            bytes.chunks_exact(4).map(word).collect()
        };
        assert_eq!(words(take(inode).unwrap()), [8, 0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(is_any(inode));
        assert_eq!(words(take(inode).unwrap()), [2, 8, 9, 0, 0, 0, 0, 0, 0]);
        assert!(!is_any(inode));
        keep(inode, 1);
        forget(inode);
        assert!(take(inode).is_none());
    }
}
