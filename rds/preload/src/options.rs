//! Options and requests of RDS sockets: getsockopt, setsockopt, ioctl.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use libc::c_int;
use rds::channel::{Counter, InfoOption, counters_of};
use rds::socket::{Access, AtPath};

use crate::controls::SOL_RDS;
use crate::memory::{borrow, errno};
use crate::table::{Entry, node_paths};

const CANCEL_SENT_TO: c_int = 1;
const GET_MR: c_int = 2;
const FREE_MR: c_int = 3;
const RECVERR: c_int = 5;
const CONG_MONITOR: c_int = 6;
const GET_MR_FOR_DEST: c_int = 7;
const TRANSPORT: c_int = 8;
const LATENCY: c_int = 10;
/// Size of a struct sockaddr_in, and position of the address in a struct sockaddr_in6.
const V4_LEN: usize = 16;
const V6_AT: usize = 8;
/// Sizes of the structures of GET_MR and GET_MR_FOR_DEST.
const REGION_LEN: usize = 32;
const REGION_FOR_DEST_LEN: usize = 160;
/// Minimum buffer sizes of the kernel, in bytes; reading an option returns twice as much.
const SNDBUF_MIN: usize = 2304;
const RCVBUF_MIN: usize = 1152;
/// Number of latencies of a received message.
const TRACES: usize = 3;
/// TCP as the transport.
const TRANSPORT_TCP: c_int = 2;
/// Number of transports; the others do not exist here.
const TRANSPORTS: c_int = 3;
/// Transport of a socket that has none yet.
const NO_TRANSPORT: c_int = -1;

const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
const SO_PASSPIDFD: c_int = 76;
const SO_PASSRIGHTS: c_int = 83;

/// SIOCPROTOPRIVATE and the next number: the type of service. TCP supports only one.
const SET_TOS: u64 = 0x89e0;
const GET_TOS: u64 = 0x89e1;

/// Result of an option call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Option of the descriptor itself, to be handled by the system.
    System,
    /// Success, with the value if one was requested.
    Value(Vec<u8>),
    /// Information: elements of this size.
    Info(Vec<u8>, usize),
}

fn int(value: &[u8]) -> io::Result<c_int> {
    let bytes = value.first_chunk().ok_or_else(|| errno(libc::EINVAL))?;
    Ok(c_int::from_ne_bytes(*bytes))
}

/// Returns the type of the control message that an option for timestamps requests. As in the
/// kernel, all of them deliver microseconds.
pub(crate) fn timestamp_kind(option: c_int) -> Option<c_int> {
    match option {
        libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS => Some(libc::SO_TIMESTAMP),
        SO_TIMESTAMP_NEW | SO_TIMESTAMPNS_NEW => Some(SO_TIMESTAMP_NEW),
        _ => None,
    }
}

/// Returns the bit for an option that makes a unix socket deliver control messages; 0 for other
/// options.
fn pass_bit(option: c_int) -> u8 {
    match option {
        libc::SO_PASSCRED => 1,
        libc::SO_PASSSEC => 2,
        SO_PASSPIDFD => 4,
        _ => 0,
    }
}

fn answer(value: c_int) -> Answer {
    Answer::Value(value.to_ne_bytes().to_vec())
}

/// Parses a buffer size.
fn buffer(value: &[u8], min: usize) -> io::Result<usize> {
    let bytes = usize::try_from(int(value)?).map_err(|_| errno(libc::EINVAL))?;
    Ok(bytes.max(min))
}

/// Parses the destination whose messages are canceled. As in the kernel, the length determines the
/// family if the address specifies none.
fn canceled(value: &[u8]) -> io::Result<(IpAddr, u16)> {
    let Some(&[f, g, p, q, a, b, c, d, ..]) = value.first_chunk::<V4_LEN>() else {
        return Err(errno(libc::EINVAL));
    };
    let (family, port) = (u16::from_ne_bytes([f, g]), u16::from_be_bytes([p, q]));
    if c_int::from(family) == libc::AF_INET || value.len() < size_of::<libc::sockaddr_in6>() {
        return Ok((Ipv4Addr::new(a, b, c, d).into(), port));
    }
    let mut address = [0; 16];
    address.copy_from_slice(&value[V6_AT..][..16]);
    Ok((Ipv6Addr::from(address).to_canonical(), port))
}

/// Sets an option.
pub(crate) fn set(
    fd: c_int,
    entry: &Entry,
    level: c_int,
    name: c_int,
    value: &[u8],
) -> io::Result<Answer> {
    match level {
        libc::SOL_SOCKET => set_common(fd, entry, name, value),
        SOL_RDS => set_own(fd, entry, name, value).map(|()| Answer::Value(Vec::new())),
        _ => Err(errno(libc::ENOPROTOOPT)),
    }
}

/// Sets an option that all socket families have.
fn set_common(fd: c_int, entry: &Entry, name: c_int, value: &[u8]) -> io::Result<Answer> {
    match name {
        libc::SO_SNDBUF | libc::SO_SNDBUFFORCE => {
            let bytes = buffer(value, SNDBUF_MIN)?;
            match entry.bound(fd) {
                Some(bound) => bound.set_sndbuf(borrow(fd), bytes)?,
                None => entry.wish(|wishes| wishes.sndbuf = Some(bytes)),
            }
        }
        libc::SO_RCVBUF | libc::SO_RCVBUFFORCE => {
            let bytes = buffer(value, RCVBUF_MIN)?;
            match entry.bound(fd) {
                Some(bound) => bound.set_rcvbuf(borrow(fd), bytes)?,
                None => entry.wish(|wishes| wishes.rcvbuf = Some(bytes)),
            }
        }
        // Not passed to the unix socket, whose control messages differ from those of RDS.
        option if timestamp_kind(option).is_some() => {
            let on = int(value)? != 0;
            entry.set_timestamps(on.then_some(option));
        }
        // The payload is copied, but the sender is notified as in the kernel.
        libc::SO_ZEROCOPY => match int(value)? {
            on @ 0..=1 => entry.set_zerocopy(on == 1),
            _ => return Err(errno(libc::EINVAL)),
        },
        SO_PASSRIGHTS => return Err(errno(libc::ENOPROTOOPT)),
        libc::SO_PEEK_OFF => return Err(errno(libc::EOPNOTSUPP)),
        option if pass_bit(option) != 0 => {
            let (on, bit) = (int(value)? != 0, pass_bit(option));
            entry.wish(|wishes| {
                wishes.passes = if on { wishes.passes | bit } else { wishes.passes & !bit };
            });
        }
        _ => return Ok(Answer::System),
    }
    Ok(Answer::Value(Vec::new()))
}

/// Sets an option of RDS sockets.
fn set_own(fd: c_int, entry: &Entry, name: c_int, value: &[u8]) -> io::Result<()> {
    match name {
        option @ (libc::SO_TIMESTAMP | SO_TIMESTAMP_NEW) => {
            let value = <[u8; 4]>::try_from(value).map_err(|_| errno(libc::EFAULT))?;
            entry.set_timestamps((value != [0; 4]).then_some(option));
        }
        CONG_MONITOR => {
            let on = int(value)? != 0;
            match entry.bound(fd) {
                Some(bound) => bound.set_monitor(borrow(fd), on)?,
                None => entry.wish(|wishes| wishes.monitors = on),
            }
        }
        CANCEL_SENT_TO => {
            let bound = entry.bound(fd).ok_or_else(|| errno(libc::ENOTCONN))?;
            bound.cancel(borrow(fd), canceled(value)?)?;
        }
        RECVERR => {
            let on = int(value)? != 0;
            entry.wish(|wishes| wishes.recverr = on);
        }
        TRANSPORT => set_transport(fd, entry, value)?,
        LATENCY => set_traces(entry, value)?,
        // There are no memory regions over TCP.
        FREE_MR => return Err(errno(libc::EINVAL)),
        GET_MR => return Err(no_region(fd, entry, value.len() == REGION_LEN)),
        GET_MR_FOR_DEST => {
            return Err(no_region(fd, entry, value.len() == REGION_FOR_DEST_LEN));
        }
        _ => return Err(errno(libc::ENOPROTOOPT)),
    }
    Ok(())
}

/// Returns the error for a request for a memory region.
fn no_region(fd: c_int, entry: &Entry, is_whole: bool) -> io::Error {
    errno(match entry.bound(fd) {
        _ if !is_whole => libc::EINVAL,
        Some(_) => libc::EOPNOTSUPP,
        None => libc::ENOTCONN,
    })
}

/// Selects which latencies of received messages are passed to the program.
fn set_traces(entry: &Entry, value: &[u8]) -> io::Result<()> {
    let traces: [u8; 4] = value.try_into().map_err(|_| errno(libc::EFAULT))?;
    let [count, positions @ ..] = traces;
    let Some(positions) = positions.get(..count.into()) else { return Err(errno(libc::EFAULT)) };
    if positions.iter().any(|position| usize::from(*position) >= TRACES) {
        entry.set_traces([0; 4]);
        return Err(errno(libc::EFAULT));
    }
    entry.set_traces(traces);
    Ok(())
}

/// Selects the transport, once and before the bind.
fn set_transport(fd: c_int, entry: &Entry, value: &[u8]) -> io::Result<()> {
    if entry.bound(fd).is_some() || entry.wishes().transport {
        return Err(errno(libc::EOPNOTSUPP));
    }
    match int(value)? {
        _ if value.len() != size_of::<c_int>() => Err(errno(libc::EINVAL)),
        TRANSPORT_TCP => {
            entry.wish(|wishes| wishes.transport = true);
            Ok(())
        }
        0..TRANSPORTS => Err(errno(libc::ENOPROTOOPT)),
        _ => Err(errno(libc::EINVAL)),
    }
}

/// Returns the value of an option.
pub(crate) fn get(fd: c_int, entry: &Entry, level: c_int, name: c_int) -> io::Result<Answer> {
    let view = entry.bound(fd).and_then(|bound| bound.view());
    // Doubles a size that was set, as the kernel does.
    let double = |bytes: usize| answer(c_int::try_from(bytes * 2).unwrap_or(c_int::MAX));
    Ok(match (level, name) {
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => match (view, entry.wishes().sndbuf) {
            (Some(view), _) => double(view.sndbuf),
            (None, Some(bytes)) => double(bytes),
            (None, None) => Answer::System,
        },
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => match (view, entry.wishes().rcvbuf) {
            (Some(view), _) => double(view.rcvbuf),
            (None, Some(bytes)) => double(bytes),
            (None, None) => Answer::System,
        },
        (libc::SOL_SOCKET, libc::SO_ZEROCOPY) => answer(entry.is_zerocopy().into()),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => answer(crate::calls::AF_RDS),
        (libc::SOL_SOCKET, libc::SO_PEEK_OFF) => return Err(errno(libc::EOPNOTSUPP)),
        // Reports no process and no user, since those of the unix socket belong to the node.
        (libc::SOL_SOCKET, libc::SO_PEERCRED) => {
            Answer::Value([0_i32, -1, -1].map(c_int::to_ne_bytes).concat())
        }
        (libc::SOL_SOCKET, option) if timestamp_kind(option).is_some() => {
            answer((entry.timestamps() == Some(option)).into())
        }
        (libc::SOL_SOCKET, option) if pass_bit(option) != 0 => {
            answer((entry.wishes().passes & pass_bit(option) != 0).into())
        }
        (SOL_RDS, RECVERR) => answer(entry.wishes().recverr.into()),
        (SOL_RDS, TRANSPORT) => match view {
            None if !entry.wishes().transport => answer(NO_TRANSPORT),
            _ => answer(TRANSPORT_TCP),
        },
        (SOL_RDS, number) => match u32::try_from(number).ok().and_then(InfoOption::of) {
            Some(option) => info(fd, entry, option)?,
            None => return Err(errno(libc::ENOPROTOOPT)),
        },
        (level, _) if level != libc::SOL_SOCKET => return Err(errno(libc::ENOPROTOOPT)),
        _ => Answer::System,
    })
}

/// Returns an info option of the socket's node, or of all nodes if the socket is not bound.
fn info(fd: c_int, entry: &Entry, option: InfoOption) -> io::Result<Answer> {
    if let Some(bound) = entry.bound(fd) {
        let (bytes, size) = bound.info(borrow(fd), option.number())?;
        return Ok(Answer::Info(bytes, size));
    }
    let (mut all, mut element) = (Vec::new(), 0);
    let mut counters: Vec<Counter> = Vec::new();
    for path in node_paths() {
        // The node may have stopped.
        let Ok(access) = Access::open(Box::new(AtPath(path))) else { continue };
        let (bytes, size) = access.info(option.number())?;
        element = size;
        if option == InfoOption::Counters {
            for counter in counters_of(&bytes, size) {
                match counters.iter_mut().find(|known| known.name == counter.name) {
                    Some(known) => known.value += counter.value,
                    None => counters.push(counter),
                }
            }
        } else {
            all.extend(bytes);
        }
    }
    for counter in counters {
        let mut name = counter.name.into_bytes();
        name.resize(32, 0);
        all.extend(name);
        all.extend(counter.value.to_ne_bytes());
    }
    Ok(Answer::Info(all, element))
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Request to the descriptor itself, to be handled by the system.
    System,
    Done,
    /// Success, with an int for the program.
    Int(c_int),
    /// Success, with a byte for the program.
    Byte(u8),
}

/// Handles an ioctl request.
pub(crate) fn request(fd: c_int, entry: &Entry, request: u64) -> io::Result<Reply> {
    match request {
        SET_TOS if entry.bound(fd).is_none() && !entry.wishes().transport => {
            Err(errno(libc::ENOTTY))
        }
        SET_TOS if entry.has_sent() => Err(errno(libc::EINVAL)),
        SET_TOS => Ok(Reply::Done),
        GET_TOS => Ok(Reply::Byte(0)),
        // Bytes that the socket has sent and its peers have not acknowledged.
        request if request == libc::TIOCOUTQ => Ok(Reply::Int(unacknowledged(fd, entry))),
        request if request == libc::FIONREAD => Err(errno(libc::ENOTTY)),
        _ => Ok(Reply::System),
    }
}

fn unacknowledged(fd: c_int, entry: &Entry) -> c_int {
    let in_flight = entry.bound(fd).map_or(0, |bound| bound.in_flight());
    c_int::try_from(in_flight).unwrap_or(c_int::MAX)
}
