//! Control messages of sends and receives.

use std::io;

use libc::{c_int, msghdr};

use crate::memory::errno;

/// Level of RDS socket options and control messages.
pub(crate) const SOL_RDS: c_int = 276;

/// Control message type of congestion updates.
pub(crate) const CONG_UPDATE: c_int = 5;
/// Control message type of the latencies of a message.
pub(crate) const RXPATH_LATENCY: c_int = 11;
/// Control message types of operations on remote memory: a transfer, and a registration.
const RDMA_ARGS: c_int = 1;
const RDMA_MAP: c_int = 3;
/// First and last type of atomic operations.
const ATOMIC_FIRST: c_int = 6;
const ATOMIC_LAST: c_int = 9;
/// Lengths of the contents of these control messages.
const RDMA_ARGS_LEN: usize = 56;
const RDMA_MAP_LEN: usize = 32;
const ATOMIC_LEN: usize = 72;
/// Position of the number of local buffers in a transfer.
const LOCAL_COUNT: usize = 32;
/// Control message types of zero-copy sends: the cookie of a message, and completed cookies.
const ZCOPY_COOKIE: c_int = 12;
pub(crate) const ZCOPY_COMPLETION: c_int = 13;

/// Control messages of a send.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendControls {
    has_cookie: bool,
    /// The cookie, unless its control message is too short.
    cookie: Option<u32>,
    /// A control message requests an operation on remote memory, which TCP does not support.
    is_remote: bool,
    /// A control message is malformed, of an unknown type, or refers to unregistered memory.
    is_invalid: bool,
}

impl SendControls {
    /// Reads the control messages of a send.
    ///
    /// # Safety
    /// `message` is readable, and so is the memory that it points to.
    pub(crate) unsafe fn read(message: &msghdr) -> Self {
        let mut controls = Self::default();
        let end = (message.msg_control as usize).saturating_add(message.msg_controllen);
        // SAFETY: the macros of the C library iterate over the control messages within their
        // bounds, and contents are read within the length of their message, which is checked.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(message);
            while let Some(head) = at.as_ref() {
                let len = head.cmsg_len.checked_sub(libc::CMSG_LEN(0) as usize);
                let len = len.filter(|_| head.cmsg_len <= end.saturating_sub(at as usize));
                let Some(len) = len else {
                    controls.is_invalid = true;
                    break;
                };
                if head.cmsg_level == SOL_RDS {
                    let content = std::slice::from_raw_parts(libc::CMSG_DATA(at), len);
                    controls.add(head.cmsg_type, content);
                }
                at = libc::CMSG_NXTHDR(message, at);
            }
        }
        controls
    }

    /// Adds an RDS control message.
    fn add(&mut self, kind: c_int, content: &[u8]) {
        let is_whole = match kind {
            ZCOPY_COOKIE => {
                self.has_cookie = true;
                self.cookie = content.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
                return;
            }
            RDMA_ARGS => {
                let buffers = content.get(LOCAL_COUNT..LOCAL_COUNT + 8);
                content.len() >= RDMA_ARGS_LEN && buffers != Some(&[0; 8])
            }
            RDMA_MAP => content.len() >= RDMA_MAP_LEN,
            ATOMIC_FIRST..=ATOMIC_LAST => content.len() >= ATOMIC_LEN,
            // Includes RDMA_DEST (2), since no memory is ever registered.
            _ => false,
        };
        self.is_remote |= is_whole;
        self.is_invalid |= !is_whole;
    }

    /// Returns the cookie of a message. `is_zerocopy` means that the call uses MSG_ZEROCOPY, and
    /// `may_notify` that the socket has SO_ZEROCOPY and the message has a payload.
    pub(crate) fn cookie(&self, is_zerocopy: bool, may_notify: bool) -> io::Result<Option<u32>> {
        if self.is_invalid || is_zerocopy && !self.has_cookie {
            return Err(errno(libc::EINVAL));
        }
        if self.is_remote {
            return Err(errno(libc::EOPNOTSUPP));
        }
        match self.cookie {
            _ if !self.has_cookie => Ok(None),
            Some(cookie) if is_zerocopy && may_notify => Ok(Some(cookie)),
            _ => Err(errno(libc::EINVAL)),
        }
    }
}

/// Returns the length of a control message with `len` bytes, without padding.
fn length(len: usize) -> usize {
    // SAFETY: this only computes a size.
    unsafe { libc::CMSG_LEN(len as u32) as usize }
}

/// Returns the space that a control message with `len` bytes takes up.
fn space(len: usize) -> usize {
    // SAFETY: this only computes a size.
    unsafe { libc::CMSG_SPACE(len as u32) as usize }
}

/// Whether a receive has room for this many bytes as its only control message.
pub(crate) fn has_room(message: &msghdr, len: usize) -> bool {
    !message.msg_control.is_null() && message.msg_controllen >= space(len)
}

/// Writes the control messages of a receive, one after the other.
pub(crate) struct ControlWriter<'a> {
    message: &'a mut msghdr,
    used: usize,
}

impl<'a> ControlWriter<'a> {
    /// Starts writing control messages into the buffer of a receive.
    ///
    /// # Safety
    /// The control buffer that `message` points to must be writable as long as the writer exists.
    pub(crate) unsafe fn new(message: &'a mut msghdr) -> Self {
        Self { message, used: 0 }
    }

    fn room(&self) -> usize {
        match self.message.msg_control.is_null() {
            true => 0,
            false => self.message.msg_controllen.saturating_sub(self.used),
        }
    }

    /// Whether there is room for another control message with `len` bytes.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.room() >= space(len)
    }

    /// Writes a control message. If there is no room for all of it, writes what fits, at least a
    /// header, and sets the truncation flag.
    pub(crate) fn put(&mut self, level: c_int, kind: c_int, bytes: &[u8]) {
        let (room, whole) = (self.room(), length(bytes.len()));
        let written = whole.min(room);
        if written < whole {
            self.message.msg_flags |= libc::MSG_CTRUNC;
        }
        let Some(fitting) = written.checked_sub(length(0)) else { return };
        // SAFETY: `written` is at most the room in the buffer, which is writable by the guarantee
        // to `new`, and covers a header and `fitting` bytes, at most as many as there are to copy.
        unsafe {
            let head = self.message.msg_control.cast::<u8>().add(self.used);
            let head = head.cast::<libc::cmsghdr>();
            let mut value: libc::cmsghdr = std::mem::zeroed();
            value.cmsg_level = level;
            value.cmsg_type = kind;
            value.cmsg_len = written as _;
            head.write_unaligned(value);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), libc::CMSG_DATA(head), fitting);
        }
        self.used += space(bytes.len()).min(room);
    }
}

impl Drop for ControlWriter<'_> {
    fn drop(&mut self) {
        self.message.msg_controllen = self.used as _;
    }
}
