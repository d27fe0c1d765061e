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
/// Control message types of zero-copy sends: the cookie of a message, and those that are complete.
const ZCOPY_COOKIE: c_int = 12;
pub(crate) const ZCOPY_COMPLETION: c_int = 13;

/// Control messages of a send.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SendControls {
    has_cookie: bool,
    /// The cookie, unless its control message is too short.
    cookie: Option<u32>,
    /// One of them requests an operation on remote memory, which TCP does not have.
    is_remote: bool,
    /// One of them is of an unknown type.
    is_unknown: bool,
}

impl SendControls {
    /// Reads the control messages of a send.
    ///
    /// # Safety
    /// `message` is readable, and so is the memory that it points to.
    pub(crate) unsafe fn read(message: &msghdr) -> Self {
        let mut controls = Self::default();
        // SAFETY: the macros of the C library iterate over the control messages within their
        // bounds, and the cookie is read within the length of its message.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(message);
            while let Some(head) = at.as_ref() {
                match head.cmsg_type {
                    _ if head.cmsg_level != SOL_RDS => {}
                    ZCOPY_COOKIE => {
                        let is_whole = head.cmsg_len >= libc::CMSG_LEN(4) as _;
                        let cookie = libc::CMSG_DATA(at).cast::<u32>();
                        controls.has_cookie = true;
                        controls.cookie = is_whole.then(|| cookie.read_unaligned());
                    }
                    1..=3 | 6..=9 => controls.is_remote = true,
                    _ => controls.is_unknown = true,
                }
                at = libc::CMSG_NXTHDR(message, at);
            }
        }
        controls
    }

    /// Returns the cookie of a message. `is_zerocopy` means that the call has MSG_ZEROCOPY, and
    /// `may_notify` that the socket has SO_ZEROCOPY and the message a payload.
    pub(crate) fn cookie(&self, is_zerocopy: bool, may_notify: bool) -> io::Result<Option<u32>> {
        if self.is_unknown || is_zerocopy && !self.has_cookie {
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

/// Returns the space that a control message with `len` bytes takes.
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
    /// Starts to write control messages into the buffer of a receive.
    ///
    /// # Safety
    /// The control buffer that `message` points to is writable as long as the writer exists.
    pub(crate) unsafe fn new(message: &'a mut msghdr) -> Self {
        Self { message, used: 0 }
    }

    /// Whether there is room for another control message with `len` bytes.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let room = self.message.msg_controllen.saturating_sub(self.used);
        !self.message.msg_control.is_null() && room >= space(len)
    }

    /// Writes a control message if there is room for it; otherwise sets the truncation flag.
    pub(crate) fn put(&mut self, level: c_int, kind: c_int, bytes: &[u8]) {
        if !self.has_room(bytes.len()) {
            self.message.msg_flags |= libc::MSG_CTRUNC;
            return;
        }
        // SAFETY: there is room for a whole control message, by the check above, and the buffer is
        // writable, by the guarantee to `new`. Spaces of control messages keep the alignment.
        unsafe {
            let head = self.message.msg_control.cast::<u8>().add(self.used);
            let head = head.cast::<libc::cmsghdr>();
            let mut value: libc::cmsghdr = std::mem::zeroed();
            value.cmsg_level = level;
            value.cmsg_type = kind;
            value.cmsg_len = libc::CMSG_LEN(bytes.len() as u32) as _;
            head.write_unaligned(value);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), libc::CMSG_DATA(head), bytes.len());
        }
        self.used += space(bytes.len());
    }
}

impl Drop for ControlWriter<'_> {
    fn drop(&mut self) {
        self.message.msg_controllen = self.used as _;
    }
}
