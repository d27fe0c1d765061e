//! Passes messages and notifications to users through the rings of their sockets.

use std::io;

use rtrs_base::rt::{Op, unacknowledged_bytes};
use rtrs_base::time::Instant;

use super::super::client::{Client, ClientId, data_packet};
use super::{Clients, PACKETS_MAX, Task, wall_clock};
use crate::channel::{Packet, PacketKind};
use crate::proto::{Node, Pending, SocketId};

impl Clients {
    /// Passes on the messages that wait for a user, as long as there is room.
    pub(super) fn deliver(&mut self, now: Instant, node: &mut Node, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id).filter(|client| client.writing.is_none())
        else {
            return;
        };
        let Some(socket) = client.bound.as_ref().map(|bound| bound.id) else { return };
        let (mut left, mut waits, mut is_refused) = (PACKETS_MAX, false, false);
        while left > 0 && !waits {
            let Some(pending) = node.ports_mut().pending(socket) else { break };
            left -= 1;
            let passed = pass_on(client, node, socket, pending);
            if let Passed::RingFull(len) = passed {
                // If a token cannot be sent, it is retried below.
                let _ = publish(client);
                let bound = client.bound.as_mut();
                let wants = bound.is_some_and(|bound| bound.flow.outgoing.want_room(len));
                // If there is still no room, a program has changed the words.
                waits = wants || is_refused;
            }
            is_refused = passed != Passed::Done;
        }
        if left == 0 {
            // Completes at once, because only the limit per turn was reached.
            let op = Op::writable(client.fd.clone());
            client.writing = Some(self.port.submit(op, Task::Write(id).token()));
        }
        let sent = publish(client);
        self.untaken.add_unread(id);
        self.untaken.set_waiting(id, waits);
        if self.settle(node, id) {
            self.untaken.add(id);
        }
        self.starved.retry_token(now, id, sent);
    }
}

/// Checks whether the messages of a user have a token, which a killed user may have taken. Returns
/// whether to check again.
pub(super) fn check_unread(client: &mut Client) -> io::Result<bool> {
    let has_tokens = unacknowledged_bytes(&client.fd).is_ok_and(|bytes| bytes > 0);
    let Some(bound) = &mut client.bound else { return Ok(false) };
    let is_empty = bound.flow.outgoing.is_empty();
    if !is_empty && !has_tokens {
        tracing::debug!(port = bound.id.port, "messages of a user had no token");
        client.send_token()?;
    }
    Ok(!is_empty)
}

/// Lets users take what is in the ring, and makes the connection readable.
fn publish(client: &mut Client) -> io::Result<()> {
    let has_unpublished = |client: &Client| {
        client.bound.as_ref().is_some_and(|bound| bound.flow.outgoing.has_unpublished())
    };
    if has_unpublished(client) {
        // If this fails, it is retried below.
        let _ = ensure_token(client);
        if let Some(bound) = &mut client.bound {
            bound.flow.outgoing.publish();
        }
    }
    // Users may have taken the last of the earlier messages and, with it, the token.
    ensure_token(client)
}

fn ensure_token(client: &mut Client) -> io::Result<()> {
    match client.bound.as_ref().is_some_and(|bound| bound.flow.outgoing.needs_token()) {
        true => client.send_token(),
        false => Ok(()),
    }
}

/// Result of an attempt to pass something on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    Done,
    /// The ring has no room for a payload of this length.
    RingFull(usize),
}

/// Passes on the next input of a socket, if there is room.
fn pass_on(client: &mut Client, node: &mut Node, socket: SocketId, pending: Pending) -> Passed {
    let Some(bound) = &mut client.bound else { return Passed::Done };
    let mut put = |packet: &Packet, payload: &[u8]| {
        let is_written = bound.flow.outgoing.write(&packet.encode(), payload);
        if is_written { Passed::Done } else { Passed::RingFull(payload.len()) }
    };
    let passed = match pending {
        Pending::Updates(groups) => put(&Packet::update(groups), &[]),
        Pending::Completion(value) => {
            put(&Packet { value, ..Packet::new(PacketKind::Completed) }, &[])
        }
        Pending::Message => match node.ports().peek(socket) {
            Some(received) => put(&data_packet(received, wall_clock()), &received.payload),
            None => Passed::Done,
        },
    };
    if passed != Passed::Done {
        return passed;
    }
    match pending {
        Pending::Updates(_) => {
            node.ports_mut().take_updates(socket);
        }
        Pending::Completion(_) => {
            node.ports_mut().take_completion(socket);
        }
        Pending::Message => {
            if let Some(received) = node.pass(socket) {
                bound.flow.passed(received.payload.len());
            }
        }
    }
    Passed::Done
}
