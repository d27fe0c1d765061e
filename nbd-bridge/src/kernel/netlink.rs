//! The `nbd` family of generic netlink: its messages and its socket.
//!
//! A command runs inside the `send` that carries it, in the calling thread: the kernel records that
//! thread as the owner of a connected device, and a disconnect takes as long as the kernel needs to
//! end the device's IO. So connect from the process's main thread, and disconnect from a thread
//! that may be left behind. The answers are available when `send` returns; nothing here waits for
//! them.
//!
//! Source: `include/uapi/linux/nbd-netlink.h`, `drivers/block/nbd.c` (`nbd_genl_*`). Called by
//! `device`.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_F_NESTED, NLM_F_ACK, NLM_F_REQUEST,
    NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable, Nla, NlasIterator,
    ParseableParametrized,
};
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};

use super::error::DeviceError;

/// Maximum length of an answer; the family's description is the longest.
const ANSWER_MAX: usize = 16 * 1024;
/// Maximum number of answers to read: an answer and its acknowledgment are two.
const ANSWERS_MAX: usize = 8;
/// Maximum number of sockets per device, limited by the 16-bit length of an attribute.
pub(super) const SOCKETS_MAX: usize = 4096;

/// Command to the kernel (`NBD_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Connect = 1,
    Disconnect = 2,
    Reconfigure = 3,
}

/// An attribute (`NBD_ATTR_*`). Numbers are in host byte order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Attr {
    /// Number of the device. If a connect omits it, the kernel picks a free device.
    Index(u32),
    SizeBytes(u64),
    BlockSizeBytes(u64),
    /// Seconds a request may take before its socket counts as dead.
    Timeout(u64),
    /// Transmission flags of the NBD specification.
    ServerFlags(u64),
    /// Descriptors of connected sockets in the transmission phase.
    Sockets(Vec<i32>),
    /// Seconds to wait for new sockets when all sockets are dead.
    DeadConnTimeout(u64),
    /// Identifier shown in `/sys/block/nbdX/backend`.
    BackendIdentifier(String),
}

impl Attr {
    /// Returns the attribute's number and bytes.
    fn encode(&self) -> (u16, Vec<u8>) {
        match self {
            Self::Index(value) => (1, value.to_ne_bytes().into()),
            Self::SizeBytes(value) => (2, value.to_ne_bytes().into()),
            Self::BlockSizeBytes(value) => (3, value.to_ne_bytes().into()),
            Self::Timeout(value) => (4, value.to_ne_bytes().into()),
            Self::ServerFlags(value) => (5, value.to_ne_bytes().into()),
            Self::Sockets(descriptors) => {
                // Each descriptor is an attribute (NBD_SOCK_FD) nested in another (NBD_SOCK_ITEM).
                let item = |descriptor: &i32| {
                    let inner = DefaultNla::new(1, descriptor.to_ne_bytes().into());
                    DefaultNla::new(1 | NLA_F_NESTED, emitted(&[inner][..]))
                };
                let items: Vec<DefaultNla> = descriptors.iter().map(item).collect();
                (7 | NLA_F_NESTED, emitted(&items[..]))
            }
            Self::DeadConnTimeout(value) => (8, value.to_ne_bytes().into()),
            Self::BackendIdentifier(text) => (10, [text.as_bytes(), &[0]].concat()),
        }
    }
}

fn emitted(attrs: &[DefaultNla]) -> Vec<u8> {
    let mut bytes = vec![0; attrs.buffer_len()];
    attrs.emit(&mut bytes);
    bytes
}

impl Nla for Attr {
    fn value_len(&self) -> usize {
        self.encode().1.len()
    }

    fn kind(&self) -> u16 {
        self.encode().0
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.encode().1);
    }
}

/// A message of the family. In answers, only the device's number is examined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NbdMessage {
    command: u8,
    attrs: Vec<Attr>,
}

impl GenlFamily for NbdMessage {
    fn family_name() -> &'static str {
        "nbd"
    }

    fn command(&self) -> u8 {
        self.command
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for NbdMessage {
    fn buffer_len(&self) -> usize {
        self.attrs.as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.attrs.as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for NbdMessage {
    fn parse_with_param(buffer: &[u8], header: GenlHeader) -> Result<Self, DecodeError> {
        let mut attrs = Vec::new();
        for attr in NlasIterator::new(buffer) {
            let attr = attr?;
            if attr.kind() == Attr::Index(0).kind() {
                let value = attr.value().try_into();
                let value =
                    value.map_err(|_| DecodeError::from("a device number of the wrong size"))?;
                attrs.push(Attr::Index(u32::from_ne_bytes(value)));
            }
        }
        Ok(Self { command: header.cmd, attrs })
    }
}

/// A socket of the nbd family.
pub(super) struct Netlink {
    socket: Socket,
    family: u16,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket and looks up the family's number. Requires no privileges.
    ///
    /// # Errors
    /// The system's error; ENOENT if the kernel does not have the family, because the module is not
    /// loaded or because this is not the initial network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_GENERIC)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Answers are available when `send` returns: one that is missing then will never arrive.
        socket.set_non_blocking(true)?;
        let mut this = Self { socket, family: 0, sequence: 0 };
        let ask = GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![GenlCtrlAttrs::FamilyName(NbdMessage::family_name().to_owned())],
        };
        let answer = this.ask(GenlMessage::from_payload(ask))?;
        let family = answer
            .into_iter()
            .flat_map(|message| message.payload.nlas)
            .find_map(|nla| if let GenlCtrlAttrs::FamilyId(id) = nla { Some(id) } else { None });
        this.family = family.ok_or_else(|| invalid("no number for the family nbd"))?;
        Ok(this)
    }

    /// Connects sockets to a device and returns its number. The calling thread becomes the device's
    /// owner in `/sys/block/nbdX/pid`.
    ///
    /// # Errors
    /// The kernel's error: EPERM without CAP_SYS_ADMIN, EBUSY for a device in use (even if merely
    /// open), EINVAL for values that the kernel rejects.
    pub(super) fn connect(&mut self, attrs: Vec<Attr>) -> io::Result<u32> {
        let answer = self.command(Command::Connect, attrs)?;
        let index = answer
            .into_iter()
            .flat_map(|message| message.payload.attrs)
            .find_map(|attr| if let Attr::Index(index) = attr { Some(index) } else { None });
        index.ok_or_else(|| invalid("no device number in the answer to a connect"))
    }

    /// Disconnects a device: the kernel notifies its sockets, shuts them down and fails the IO in
    /// flight. Disconnecting an unconnected device is not an error.
    ///
    /// # Errors
    /// The kernel's error: EPERM without CAP_SYS_ADMIN, EINVAL for a device that does not exist.
    pub(super) fn disconnect(&mut self, index: u32) -> io::Result<()> {
        self.command(Command::Disconnect, vec![Attr::Index(index)]).map(drop)
    }

    /// Changes a connected device. A socket among the attributes replaces the first dead one. If
    /// none is dead, the kernel drops the new socket without an error.
    ///
    /// # Errors
    /// The kernel's error: EPERM without CAP_SYS_ADMIN, EINVAL for a device that is not connected,
    /// or has a different identifier.
    pub(super) fn reconfigure(&mut self, attrs: Vec<Attr>) -> io::Result<()> {
        self.command(Command::Reconfigure, attrs).map(drop)
    }

    fn command(
        &mut self,
        command: Command,
        attrs: Vec<Attr>,
    ) -> io::Result<Vec<GenlMessage<NbdMessage>>> {
        let mut message = GenlMessage::from_payload(NbdMessage { command: command as u8, attrs });
        message.set_resolved_family_id(self.family);
        self.ask(message)
    }

    /// Sends a message and collects the answers up to the acknowledgment.
    fn ask<T>(&mut self, message: T) -> io::Result<Vec<T>>
    where
        T: NetlinkSerializable + NetlinkDeserializable + Into<NetlinkPayload<T>> + Debug,
    {
        self.sequence += 1;
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answers = Vec::new();
        for _ in 0..ANSWERS_MAX {
            let mut bytes = Vec::with_capacity(ANSWER_MAX);
            self.socket.recv(&mut bytes, 0)?;
            if take_answers(&bytes, self.sequence, &mut answers)? {
                return Ok(answers);
            }
        }
        Err(invalid("no acknowledgment"))
    }
}

/// Parses the messages of one datagram. Returns true if the acknowledgment was among them.
fn take_answers<T>(mut bytes: &[u8], sequence: u32, answers: &mut Vec<T>) -> io::Result<bool>
where
    T: NetlinkDeserializable + Debug,
{
    while !bytes.is_empty() {
        let message = NetlinkMessage::<T>::deserialize(bytes)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        let length = (message.header.length as usize).next_multiple_of(4);
        bytes = bytes.get(length.max(4)..).unwrap_or_default();
        if message.header.sequence_number != sequence {
            continue;
        }
        match message.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            NetlinkPayload::Error(_) => return Ok(true),
            NetlinkPayload::InnerMessage(inner) => answers.push(inner),
            _ => {}
        }
    }
    Ok(false)
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("unexpected answer from the kernel: {what}"))
}

/// Returns the attribute for sockets. The caller must keep them open until connect returns.
pub(super) fn sockets_attr<'a>(sockets: impl Iterator<Item = BorrowedFd<'a>>) -> Attr {
    Attr::Sockets(sockets.map(|socket| socket.as_raw_fd()).collect())
}

/// Opens a socket to the kernel's driver.
pub(super) fn open_netlink() -> Result<Netlink, DeviceError> {
    Netlink::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => DeviceError::NoModule,
        _ => DeviceError::System(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(command: Command, attrs: Vec<Attr>) -> Vec<u8> {
        let message = NbdMessage { command: command as u8, attrs };
        let mut message = GenlMessage::from_payload(message);
        message.set_resolved_family_id(0x21);
        let mut message = NetlinkMessage::from(message);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        message.header.sequence_number = 7;
        message.finalize();
        let mut bytes = vec![0xff; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_disconnect_matches_golden_bytes() {
        #[rustfmt::skip]
        let expected = [
            28, 0, 0, 0, 0x21, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr
            2, 1, 0, 0, // genlmsghdr: NBD_CMD_DISCONNECT, version 1
            8, 0, 1, 0, 3, 0, 0, 0, // NBD_ATTR_INDEX
        ];
        assert_eq!(bytes_of(Command::Disconnect, vec![Attr::Index(3)]), expected);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_connect_matches_golden_bytes() {
        let attrs = vec![
            Attr::SizeBytes(1 << 32),
            Attr::BlockSizeBytes(512),
            Attr::Timeout(90),
            Attr::DeadConnTimeout(1),
            Attr::ServerFlags(0x16d),
            Attr::Sockets(vec![5, 0x1234]),
            Attr::BackendIdentifier("rtrs:a".into()),
        ];
        #[rustfmt::skip]
        let expected = [
            120, 0, 0, 0, 0x21, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0, // nlmsghdr
            1, 1, 0, 0, // genlmsghdr: NBD_CMD_CONNECT, version 1
            12, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, // size
            12, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0, 0, // block size
            12, 0, 4, 0, 90, 0, 0, 0, 0, 0, 0, 0, // timeout
            12, 0, 8, 0, 1, 0, 0, 0, 0, 0, 0, 0, // dead connection timeout
            12, 0, 5, 0, 0x6d, 1, 0, 0, 0, 0, 0, 0, // server flags
            28, 0, 7, 0x80, // sockets, nested
            12, 0, 1, 0x80, 8, 0, 1, 0, 5, 0, 0, 0, // an item, nested, and its descriptor
            12, 0, 1, 0x80, 8, 0, 1, 0, 0x34, 0x12, 0, 0,
            11, 0, 10, 0, b'r', b't', b'r', b's', b':', b'a', 0, 0, // identifier, padded
        ];
        assert_eq!(bytes_of(Command::Connect, attrs), expected);
    }

    #[test]
    fn the_maximum_number_of_sockets_fits_an_attribute() {
        let items = (0..SOCKETS_MAX).map(|_| 3).collect();
        let attr = Attr::Sockets(items);
        assert!(attr.value_len() + 4 <= usize::from(u16::MAX));
    }

    /// Builds an acknowledgment (code 0) or an error for the message `sequence`.
    fn acknowledgment(code: i32, sequence: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(36u32.to_ne_bytes());
        bytes.extend(2u16.to_ne_bytes());
        bytes.extend(0u16.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes());
        bytes.extend(code.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes
    }

    #[test]
    fn replies_end_with_their_acknowledgment() {
        let reply = bytes_of(Command::Connect, vec![Attr::Index(4)]);
        let mut both = reply.clone();
        both.extend(acknowledgment(0, 7));
        let mut answers: Vec<GenlMessage<NbdMessage>> = Vec::new();
        assert!(take_answers(&both, 7, &mut answers).unwrap());
        assert_eq!(answers[0].payload.attrs, [Attr::Index(4)]);
        // The acknowledgment arrives in a separate datagram, as does that of a different message.
        answers.clear();
        assert!(!take_answers(&reply, 7, &mut answers).unwrap());
        assert!(!take_answers(&acknowledgment(-1, 6), 7, &mut answers).unwrap());
        assert!(take_answers(&acknowledgment(0, 7), 7, &mut answers).unwrap());
        let error = take_answers(&acknowledgment(-16, 7), 7, &mut answers).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(16));
    }

    #[test]
    fn malformed_replies_are_errors() {
        let mut answers: Vec<GenlMessage<NbdMessage>> = Vec::new();
        let reply = bytes_of(Command::Connect, vec![Attr::Index(4)]);
        for cut in 1..reply.len() {
            assert!(take_answers(&reply[..cut], 7, &mut answers).is_err(), "{cut} bytes");
        }
        for at in 0..reply.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = reply.clone();
                bytes[at] = value;
                let _ = take_answers(&bytes, 7, &mut answers);
            }
        }
    }
}
