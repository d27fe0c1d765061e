//! Receiving: messages that the node puts into the ring of a socket, or sends over its connection.

use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use rtrs_base::time::Duration;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::access::{Binding, is_nonblocking};
use super::transfer::{Arrival, How, Incoming, Source, has_ended, receive_next};
use crate::channel::{PACKET_LEN, Packet, PacketKind};

/// Number of times that a call yields its CPU for messages of which the token has arrived.
const YIELDS: usize = 50;
/// Maximum number of tokens that a call takes. There are more only if a program has changed their
/// number.
const TOKENS_MAX: usize = 16;
/// Interval of the checks whether the node counts a token again.
const STRAY_PAUSE: Duration = Duration::from_millis(1);

/// Receives the next message or notification. Users get congestion updates only with a monitor;
/// those of other users have served their purpose, which is to wake a poll.
///
/// # Errors
/// EAGAIN or ETIMEDOUT when there is nothing, EINTR, ENETDOWN when the node has ended. EMFILE when
/// a message above 64 KiB is lost because this process has no descriptors left.
pub fn receive(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> io::Result<Arrival> {
    loop {
        let mut arrival = next_arrival(binding, socket, to, how)?;
        if !matches!(arrival.incoming, Incoming::Cleared(_)) || binding.monitors() {
            return Ok(arrival);
        }
        if how.peek {
            // The update is taken even if a message would stay.
            arrival = next_arrival(binding, socket, to, How { dontwait: true, peek: false })?;
            if !matches!(arrival.incoming, Incoming::Cleared(_)) {
                return Ok(arrival);
            }
        }
    }
}

/// Receives the next message or notification, from the ring or from the connection. The node uses
/// the connection once the ring is closed.
fn next_arrival(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> io::Result<Arrival> {
    let source = Source { socket, taken: &|len| binding.taken(socket, len) };
    loop {
        if let Some(arrival) = take(binding, socket, to, how) {
            return arrival;
        }
        // The ring is closed when it is empty.
        if binding.flow.incoming.is_closed() && binding.flow.incoming.is_empty() {
            return receive_next(source, to, how);
        }
        let waits = !how.dontwait && !is_nonblocking(socket);
        let next = match waits {
            true => binding.flow.incoming.wait(|| peek(socket, how, waits)),
            false => Some(peek(socket, how, waits)),
        };
        let Some(next) = next else { continue };
        if next? == Some(PacketKind::Token) {
            await_messages(binding, socket, waits)?;
            continue;
        }
        match receive_next(source, to, How { dontwait: true, ..how }) {
            // Another call has taken it.
            Err(error) if is_again(&error) && waits => {}
            arrival => return arrival,
        }
    }
}

fn is_again(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::AGAIN.raw_os_error())
}

/// Takes the next message or notification from the ring.
fn take(
    binding: &Binding,
    socket: BorrowedFd<'_>,
    to: &mut [IoSliceMut<'_>],
    how: How,
) -> Option<io::Result<Arrival>> {
    let ring = &binding.flow.incoming;
    let ((packet, len), taken) = ring.take(how.peek, |delivery| {
        let mut head = [0; PACKET_LEN];
        delivery.read(0, &mut head);
        let mut at = PACKET_LEN;
        for part in to.iter_mut() {
            at += delivery.read(at, part);
        }
        (Packet::decode(&head), at - PACKET_LEN)
    })?;
    if taken.is_wanted {
        binding.report(socket, PacketKind::Taken);
    }
    if taken.is_last {
        for _ in 0..TOKENS_MAX {
            if !ring.reserve_token() {
                break;
            }
            take_token(socket);
        }
    }
    if ring.has_overlooked() {
        binding.report(socket, PacketKind::Token);
    }
    let Some(packet) = packet else { return Some(Err(Errno::PROTO.into())) };
    let incoming = match packet.kind {
        PacketKind::Update => Incoming::Cleared(packet.wide()),
        PacketKind::Completed => Incoming::Completed(packet.value),
        _ => {
            if !how.peek {
                binding.taken(socket, packet.len);
            }
            let from = SocketAddr::new(packet.address, packet.port);
            Incoming::Message { len, total: packet.len as usize, from }
        }
    };
    let is_message = packet.kind == PacketKind::Data;
    let time = if is_message { Duration::from_nanos(packet.wide()) } else { Duration::ZERO };
    Some(Ok(Arrival { incoming, time, times: packet.times }))
}

/// Takes a token from the connection that this call has reserved.
fn take_token(socket: BorrowedFd<'_>) {
    let mut head = [0; PACKET_LEN];
    // Nothing is there only after another process that has the socket was killed.
    let _ = recv(socket, &mut head, RecvFlags::DONTWAIT);
}

/// Returns the type of the next packet on the connection, for which it waits as `how` says.
fn peek(socket: BorrowedFd<'_>, how: How, waits: bool) -> io::Result<Option<PacketKind>> {
    let mut head = [0; PACKET_LEN];
    let flags = (how.flags() - RecvFlags::CMSG_CLOEXEC) | RecvFlags::PEEK;
    let got = match recv(socket, &mut head, flags) {
        // See `receive_next`.
        Err(Errno::CONNRESET) => recv(socket, &mut head, flags),
        got => got,
    };
    match got {
        Err(Errno::AGAIN) if waits => Err(Errno::TIMEDOUT.into()),
        Ok((0, _)) | Err(Errno::CONNRESET) => Err(Errno::NETDOWN.into()),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(Packet::decode(&head).map(|packet| packet.kind)),
    }
}

/// Waits for messages whose token has arrived, or takes the token if there are none.
fn await_messages(binding: &Binding, socket: BorrowedFd<'_>, waits: bool) -> io::Result<()> {
    let ring = &binding.flow.incoming;
    for _ in 0..YIELDS {
        if !ring.is_empty() {
            return Ok(());
        }
        std::thread::yield_now();
    }
    if ring.reserve_token() {
        take_token(socket);
        return Ok(());
    }
    if !ring.is_empty() {
        return Ok(());
    }
    // A process that has the socket too has reserved the token, and takes it now or was killed.
    if has_ended(socket)? {
        return Err(Errno::NETDOWN.into());
    }
    binding.report(socket, PacketKind::Token);
    if !waits {
        return Err(Errno::AGAIN.into());
    }
    std::thread::sleep(STRAY_PAUSE);
    Ok(())
}
