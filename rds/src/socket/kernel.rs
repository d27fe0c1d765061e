//! Sockets of the kernel's own RDS (AF_RDS), for hosts that have its modules.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};

use rtrs_base::rt::{get_option, set_option};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendFlags, SocketAddrAny, SocketFlags,
    SocketType, recvmsg, sendto,
};

use super::access::is_nonblocking;
use super::transfer::{How, Incoming};

const AF_RDS: u16 = 21;
const SOL_RDS: i32 = 276;
const CANCEL_SENT_TO: i32 = 1;
const CONG_MONITOR: i32 = 6;
/// Size of the buffer for the control messages of one receive call.
const CONTROL_LEN: usize = 256;

fn new_socket() -> io::Result<OwnedFd> {
    let family = AddressFamily::from_raw(AF_RDS);
    Ok(rustix::net::socket_with(family, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Returns a socket bound to a port (any free port for 0), and the port number.
pub(super) fn bind(address: IpAddr, port: u16) -> io::Result<(OwnedFd, u16)> {
    let socket = new_socket()?;
    rustix::net::bind(&socket, &SocketAddr::new(address, port))?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((socket, bound.port()))
}

pub(super) fn send(
    socket: BorrowedFd<'_>,
    payload: &[u8],
    to: SocketAddr,
    dontwait: bool,
) -> io::Result<usize> {
    let flags = if dontwait { SendFlags::DONTWAIT } else { SendFlags::empty() };
    Ok(sendto(socket, payload, flags, &to)?)
}

pub(super) fn receive(
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> io::Result<Incoming> {
    let space: usize = to.iter().map(|part| part.len()).sum();
    let mut room = [MaybeUninit::uninit(); CONTROL_LEN];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    // If the message does not fit, this flag makes the call return its full length.
    let mut flags = RecvFlags::TRUNC;
    flags.set(RecvFlags::DONTWAIT, how.dontwait);
    flags.set(RecvFlags::PEEK, how.peek);
    let got = recvmsg(socket, to, &mut control, flags).map_err(|errno| match errno {
        Errno::AGAIN if !how.dontwait && !is_nonblocking(socket) => Errno::TIMEDOUT,
        errno => errno,
    })?;
    match got.address.map(|address: SocketAddrAny| SocketAddr::try_from(address)) {
        Some(Ok(from)) => {
            let total = got.bytes;
            Ok(Incoming::Message { len: total.min(space), total, from })
        }
        // A congestion update; only a control message would list the groups.
        _ => Ok(Incoming::Cleared(u64::MAX)),
    }
}

pub(super) fn set_buffer(socket: BorrowedFd<'_>, bytes: usize, is_send: bool) -> io::Result<()> {
    // The kernel doubles the value that is set, and uses half of the stored value as the limit.
    match is_send {
        true => set_socket_send_buffer_size(socket, bytes)?,
        false => set_socket_recv_buffer_size(socket, bytes)?,
    }
    Ok(())
}

pub(super) fn set_monitor(socket: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set_option(socket, SOL_RDS, CONG_MONITOR, &i32::from(on).to_ne_bytes())
}

pub(super) fn cancel(socket: BorrowedFd<'_>, to: SocketAddr) -> io::Result<()> {
    let mut bytes = Vec::new();
    match to {
        SocketAddr::V4(v4) => {
            bytes.extend(AddressFamily::INET.as_raw().to_ne_bytes());
            bytes.extend(v4.port().to_be_bytes());
            bytes.extend(v4.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend(AddressFamily::INET6.as_raw().to_ne_bytes());
            bytes.extend(v6.port().to_be_bytes());
            bytes.extend(v6.flowinfo().to_be_bytes());
            bytes.extend(v6.ip().octets());
            bytes.extend(v6.scope_id().to_ne_bytes());
        }
    }
    set_option(socket, SOL_RDS, CANCEL_SENT_TO, &bytes)
}

/// Returns the data of an info option, and the size of each element.
pub(super) fn info(option: u32) -> io::Result<(Vec<u8>, usize)> {
    let socket = new_socket()?;
    let name = i32::try_from(option).map_err(|_| Errno::NOPROTOOPT)?;
    let mut bytes = vec![0; 4096];
    // The data may grow between two calls.
    for _ in 0..16 {
        match get_option(&socket, SOL_RDS, name, &mut bytes)? {
            (Some(size), len) => {
                bytes.truncate(len);
                return Ok((bytes, size));
            }
            (None, len) => bytes.resize(len.max(bytes.len() * 2), 0),
        }
    }
    Err(Errno::NOSPC.into())
}

/// Whether the kernel has RDS over TCP and a socket can be bound to this address.
#[must_use]
pub fn has_kernel_rds(address: IpAddr) -> bool {
    let address = if address.is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address };
    bind(address, 0).is_ok()
}
