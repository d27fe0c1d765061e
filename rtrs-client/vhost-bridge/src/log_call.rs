//! Message that passes an event descriptor for the dirty log (SET_LOG_FD).
//!
//! The crate `vhost` does not know the message and would end the connection. Monitors check the log
//! themselves, so the descriptor is closed and never written to.

use std::io::{self, IoSliceMut};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendFlags, recvmsg, send};

const SET_LOG_FD: u32 = 7;
/// Version of the protocol, in the flags of a message.
const VERSION: u32 = 1;
/// Flag of a message that is an answer.
const REPLY: u32 = 4;
/// Flag of a message that asks for an answer.
const NEED_REPLY: u32 = 8;
const HEADER_LEN: usize = 12;

/// Reads and answers the next message if it passes an event descriptor for the log. Returns whether
/// it does.
///
/// # Errors
/// The system's error.
pub(crate) fn take(stream: &UnixStream) -> io::Result<bool> {
    let mut header = [0; HEADER_LEN];
    if read(stream, &mut header, RecvFlags::PEEK)? < HEADER_LEN {
        return Ok(false);
    }
    let word = |at: usize| header[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
    let [code, flags, len] = [0, 4, 8].map(word);
    // `vhost` refuses anything else.
    if code != SET_LOG_FD || flags & !NEED_REPLY != VERSION || len != 0 {
        return Ok(false);
    }
    read(stream, &mut header, RecvFlags::empty())?;
    if flags & NEED_REPLY != 0 {
        let answer = [SET_LOG_FD, VERSION | REPLY, 8, 0, 0].map(u32::to_le_bytes);
        send(stream, answer.as_flattened(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    }
    Ok(true)
}

/// Reads bytes. The kernel closes descriptors for which there is no room.
fn read(stream: &UnixStream, bytes: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
    let mut room = RecvAncillaryBuffer::new(&mut []);
    let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    Ok(recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut room, flags)?.bytes)
}
