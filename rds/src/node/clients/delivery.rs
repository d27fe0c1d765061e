//! Messages and notifications for users: through the ring of their socket, or its connection.

use std::io;

use rtrs_base::rt::{Op, unacknowledged_bytes};
use rtrs_base::time::{Duration, Instant};

use super::super::client::{Client, ClientId, data_packet};
use super::{Clients, PACKETS_MAX, PAUSE, Task, wall_clock};
use crate::channel::{Packet, PacketKind, RING_LEN, RING_MESSAGE_MAX};
use crate::proto::{Node, Pending, SocketId};

/// Pause before the connection of a socket whose ring is empty is looked at again.
const TOKEN_PAUSE: Duration = Duration::from_millis(1);

/// Result of an attempt to pass something on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    Done,
    /// The ring has to be emptied, up to this many bytes.
    RingFull(u64),
    /// Users take the token of the empty ring from the connection at this moment.
    Soon,
}

impl Clients {
    /// Passes on the messages that wait for a user, as far as there is room.
    pub(super) fn deliver(&mut self, now: Instant, node: &mut Node, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let Some(bound) = &client.bound else { return };
        if client.writing.is_some() {
            return;
        }
        let socket = bound.id;
        let (mut left, mut waits) = (PACKETS_MAX, false);
        let blocked = loop {
            let Some(pending) = node.ports_mut().pending(socket) else { break false };
            match pass_on(client, node, socket, pending) {
                Ok(Passed::Done) => {}
                Ok(Passed::RingFull(left)) => {
                    publish(client);
                    let bound = client.bound.as_mut();
                    waits = bound.is_some_and(|bound| bound.flow.outgoing.want_report(left));
                    if waits {
                        break false;
                    }
                }
                Ok(Passed::Soon) => {
                    self.starved.add(id, now + TOKEN_PAUSE);
                    break false;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break true,
                Err(error) => {
                    let gone = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
                    // If the user has disconnected, the following read notices.
                    if !gone.contains(&error.kind()) {
                        self.starved.add(id, now + PAUSE);
                        if let Some(left_out) = self.starved.log(now) {
                            let port = socket.port;
                            tracing::warn!(
                                port, %error, left_out,
                                "cannot pass on a message; trying again shortly"
                            );
                        }
                    }
                    break false;
                }
            }
            left -= 1;
            if left == 0 {
                break true;
            }
        };
        publish(client);
        if blocked {
            // Completes at once if only the limit of the turn was reached.
            let op = Op::writable(client.fd.clone());
            client.writing = Some(self.port.submit(op, Task::Write(id).token()));
        }
        if self.settle(node, id) {
            self.untaken.add(id);
        }
        self.untaken.set_waiting(id, waits);
    }
}

/// Lets users take what is in the ring, and makes the connection readable.
fn publish(client: &mut Client) {
    let has_unpublished = |client: &Client| {
        client.bound.as_ref().is_some_and(|bound| bound.flow.outgoing.has_unpublished())
    };
    if !has_unpublished(client) {
        return;
    }
    ensure_token(client);
    if let Some(bound) = &mut client.bound {
        bound.flow.outgoing.publish();
    }
    // Users may have taken the last of the earlier messages, and the token with it.
    ensure_token(client);
}

fn ensure_token(client: &mut Client) {
    if client.bound.as_ref().is_some_and(|bound| bound.flow.outgoing.needs_token()) {
        client.send_token();
    }
}

/// Passes on the next input of a socket, if there is room.
fn pass_on(
    client: &mut Client,
    node: &mut Node,
    socket: SocketId,
    pending: Pending,
) -> io::Result<Passed> {
    let passed = match pending {
        Pending::Updates(groups) => put(client, &Packet::update(groups), &[])?,
        Pending::Completion(value) => {
            put(client, &Packet { value, ..Packet::new(PacketKind::Completed) }, &[])?
        }
        Pending::Message => match node.ports().peek(socket) {
            Some(received) => put(client, &data_packet(received, wall_clock()), &received.payload)?,
            None => Passed::Done,
        },
    };
    if passed != Passed::Done {
        return Ok(passed);
    }
    match pending {
        Pending::Updates(_) => {
            node.ports_mut().take_updates(socket);
        }
        Pending::Completion(_) => {
            node.ports_mut().take_completion(socket);
        }
        Pending::Message => {
            let passed = node.pass(socket);
            if let (Some(bound), Some(passed)) = (&mut client.bound, passed) {
                bound.flow.passed(passed.payload.len());
            }
        }
    }
    Ok(Passed::Done)
}

/// Puts a packet into the ring, or sends it over the connection. A socket that gets a message too
/// long for the ring uses the connection from then on, once its users have taken everything else.
fn put(client: &mut Client, packet: &Packet, payload: &[u8]) -> io::Result<Passed> {
    if let Some(bound) = client.bound.as_mut().filter(|bound| bound.flow.uses_outgoing) {
        let ring = &mut bound.flow.outgoing;
        if payload.len() <= RING_MESSAGE_MAX {
            let is_written = ring.write(&packet.encode(), payload);
            let half = RING_LEN as u64 / 2;
            return Ok(if is_written { Passed::Done } else { Passed::RingFull(half) });
        }
        if !ring.is_empty() {
            return Ok(Passed::RingFull(0));
        }
        if unacknowledged_bytes(&client.fd)? > 0 {
            return Ok(Passed::Soon);
        }
        ring.close();
        bound.flow.uses_outgoing = false;
    }
    client.deliver(packet, payload)?;
    Ok(Passed::Done)
}
