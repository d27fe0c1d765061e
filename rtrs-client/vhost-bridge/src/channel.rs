//! Channel on which the device notifies the monitor of a changed configuration.
//!
//! The crate `vhost` takes the channel's descriptor from the message that passes it, but cannot
//! send this notification. So the descriptor is copied from that message before `vhost` reads it.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

/// Message of the monitor that passes the channel.
const SET_CHANNEL: u32 = 21;
/// Message of the device that the configuration has changed.
const CONFIG_CHANGED: u32 = 2;
/// Version of the protocol, in the flags of a message.
const VERSION: u32 = 1;
const HEADER_LEN: usize = 12;

/// Sending end of the channel.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

impl Channel {
    /// Returns the channel if the next message passes one. The message stays unread.
    pub(crate) fn passed(stream: &UnixStream) -> Option<Self> {
        let mut header = [0; HEADER_LEN];
        // Without room for descriptors, none is copied.
        let peeked = peek(stream, &mut header, &mut RecvAncillaryBuffer::new(&mut []));
        let code = header.first_chunk().map(|code| u32::from_le_bytes(*code));
        if peeked.ok()? < HEADER_LEN || code != Some(SET_CHANNEL) {
            return None;
        }
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        peek(stream, &mut header, &mut ancillary).ok()?;
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        fds.next()?.next().map(Self)
    }

    /// Reports to the monitor that the configuration has changed.
    ///
    /// # Errors
    /// The system's error. A monitor that does not read loses the message.
    pub(crate) fn config_changed(&self) -> io::Result<()> {
        let header = [CONFIG_CHANGED, VERSION, 0].map(u32::to_le_bytes);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        send(&self.0, header.as_flattened(), flags)?;
        Ok(())
    }
}

fn peek(
    stream: &UnixStream,
    bytes: &mut [u8],
    ancillary: &mut RecvAncillaryBuffer<'_>,
) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    Ok(recvmsg(stream, &mut [IoSliceMut::new(bytes)], ancillary, flags)?.bytes)
}
