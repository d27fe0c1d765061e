//! Requests from users: binding ports, changing sockets, and reading information.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rtrs_base::rt::PeerCredentials;
use rtrs_base::time::Instant;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals};
use rustix::io::Errno;

use super::super::client::{Asker, Bound, Client, ClientId};
use super::super::shortage::has_free;
use super::{Clients, Passed};
use crate::channel::{
    InfoOption, NodeFlow, Packet, PacketKind, PacketTimes, SocketView, TallyReader, encode_info,
};
use crate::proto::{BindError, Node, UserId};

/// Template for answers of kind [`PacketKind::Bound`].
const BOUND: Packet = Packet {
    kind: PacketKind::Bound,
    port: 0,
    len: 0,
    address: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    value: 0,
    extra: 0,
    times: PacketTimes::NONE,
};

fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

impl Clients {
    pub(super) fn bind(&mut self, now: Instant, node: &mut Node, id: ClientId, packet: &Packet) {
        let Some(user) = self.begin_answer(now, node, id) else { return };
        if self.reserve.is_refused(id) {
            self.answer(id, Some(Errno::MFILE));
            return;
        }
        let own = node.config().address;
        let bound = match packet.address == own {
            false => Err(Errno::ADDRNOTAVAIL),
            true => node.bind_for(user, packet.port).map_err(|error| match error {
                BindError::Reserved => Errno::INVAL,
                BindError::InUse(_) => Errno::ADDRINUSE,
                BindError::TooMany(_) => Errno::NOBUFS,
            }),
        };
        let socket = match bound {
            Ok(socket) => socket,
            Err(errno) => {
                self.answer(id, Some(errno));
                return;
            }
        };
        let flow = NodeFlow::create();
        let flow = flow.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM));
        // Next, the user passes the descriptor of a connection, which would be lost if this process
        // had no free descriptor.
        let flow = flow.and_then(|flow| if has_free() { Ok(flow) } else { Err(Errno::MFILE) });
        let slot = flow.and_then(|flow| Ok((flow, self.board.take_slot().ok_or(Errno::NOBUFS)?)));
        let (flow, (slot, serial)) = match slot {
            Ok(slot) => slot,
            Err(errno) => {
                node.close_socket(socket);
                self.reserve.warn(now, &errno.into());
                self.answer(id, Some(errno));
                return;
            }
        };
        let (sndbuf, rcvbuf) = (node.config().sndbuf, node.config().rcvbuf);
        let (port, connected, monitors) = (socket.port, None, false);
        let view = SocketView { serial, port, sndbuf, rcvbuf, connected, monitors };
        self.board.set_flow(slot, 0, None);
        self.board.set_socket(slot, &view);
        self.unbound.remove(id);
        self.by_socket.insert(socket, id);
        if let Some(client) = self.clients.get_mut(&id) {
            let (is_full, ends_at) = (false, None);
            client.bound = Some(Bound { id: socket, slot, view, flow, is_full, ends_at });
        }
        self.say_bound(id, id, None);
        self.answers.forget(id);
    }

    /// Sends a user the board, a socket's slot on the board, the socket's counters, and the number
    /// of the control connection that may change the socket.
    fn say_bound(&self, to: ClientId, socket: ClientId, control: Option<ClientId>) {
        let bound = |id| self.clients.get(&id).and_then(|client| client.bound.as_ref());
        let Some(bound) = bound(socket) else { return };
        let (len, extra) = (bound.view.serial, word(bound.slot));
        let address = Ipv6Addr::from(u128::from(control.unwrap_or(0))).into();
        let packet = Packet { len, extra, address, ..BOUND };
        self.say(to, &packet, &[self.board.as_fd(), bound.flow.fd()]);
    }

    /// Lets a control connection change a socket: the connection that the packet names, if it
    /// exists, otherwise the passed connection.
    pub(super) fn control(
        &mut self,
        now: Instant,
        node: &mut Node,
        socket: ClientId,
        packet: &Packet,
        passed: Passed,
    ) {
        let Passed { connection, tally } = passed;
        let Some(answering) = self.adopt_apart(node, socket, connection) else { return };
        let Some(user) = self.begin_answer(now, node, answering) else { return };
        let named = packet.wide();
        let control = if self.controls.contains(named) { named } else { answering };
        if control == answering && !self.controls.has_room(user) {
            let error = io::Error::other("too many processes use sockets (control connections)");
            self.reserve.warn(now, &error);
            self.answer(answering, Some(Errno::NOBUFS));
            return;
        }
        if control == answering {
            self.unbound.remove(control);
            if let Some(tally) = tally.and_then(TallyReader::new) {
                self.controls.keep_tally(control, tally);
            }
        }
        let idle = self.controls.grant(control, user, socket);
        self.say_bound(answering, socket, Some(control));
        if let Some(idle) = idle {
            self.is_unbound(node, idle);
        }
    }

    /// Adopts a connection that a user passed, with the user's credentials. Disconnects a user who
    /// passed anything else.
    fn adopt_apart(&mut self, node: &mut Node, id: ClientId, fd: OwnedFd) -> Option<ClientId> {
        let credentials = self.clients.get(&id)?.credentials;
        match Client::passed(fd, credentials) {
            Ok(client) => Some(self.add(node, client)),
            Err(error) => {
                let PeerCredentials { pid, uid } = credentials;
                tracing::debug!(uid, pid, %error, "user disconnected: no connection was passed");
                self.end(node, id);
                None
            }
        }
    }

    /// Records that a connection is waiting for an answer, and returns its user. Closes the
    /// connection if it may not wait for one.
    fn begin_answer(&mut self, now: Instant, node: &mut Node, id: ClientId) -> Option<UserId> {
        let client = self.clients.get(&id)?;
        let user = client.user();
        if !self.answers.begin(now, id, client) {
            self.end(node, id);
            return None;
        }
        Some(user)
    }

    /// Handles a request that is answered on a separate connection.
    pub(super) fn request_apart(
        &mut self,
        now: Instant,
        node: &mut Node,
        id: ClientId,
        packet: &Packet,
        fd: OwnedFd,
    ) {
        if let Some(answering) = self.adopt_apart(node, id, fd) {
            self.request(now, node, Asker { control: id, answering }, packet);
        }
    }

    /// Handles a request on a connection without a socket.
    pub(super) fn request(&mut self, now: Instant, node: &mut Node, asker: Asker, packet: &Packet) {
        let id = asker.answering;
        if self.begin_answer(now, node, id).is_none() {
            return;
        }
        match packet.kind {
            PacketKind::Attach => self.say(id, &BOUND, &[self.board.as_fd()]),
            PacketKind::Reach => {
                let refused = node.reach(now, packet.address).is_err();
                self.answer(id, refused.then_some(Errno::NOMEM));
            }
            PacketKind::Info => self.info(now, node, id, packet.value),
            PacketKind::SetBuffer
            | PacketKind::Connect
            | PacketKind::Monitor
            | PacketKind::Cancel => {
                let errno = self.change(now, node, asker.control, packet).err();
                self.answer(id, errno);
            }
            _ => self.end(node, id),
        }
    }

    fn info(&mut self, now: Instant, node: &mut Node, id: ClientId, number: u32) {
        let Some(option) = InfoOption::of(number) else {
            self.answer(id, Some(Errno::NOPROTOOPT));
            return;
        };
        let mut inodes = BTreeMap::new();
        if matches!(option, InfoOption::Sockets { .. }) {
            let inode = |id| self.clients.get(id).map_or(0, |client| client.inode);
            inodes.extend(self.by_socket.iter().map(|(socket, id)| (socket.port, inode(id))));
        }
        let inode = |port| inodes.get(&port).copied().unwrap_or(0);
        node.ports_mut().set_refused(self.refused());
        let (bytes, size) = encode_info(node, option, inode);
        let Some(client) = self.clients.get(&id) else { return };
        if !self.answers.add_bytes(now, id, client, bytes.len()) {
            self.end(node, id);
            return;
        }
        let (len, extra) = (word(bytes.len()), word(size));
        let packet = Packet { len, extra, ..Packet::new(PacketKind::Done) };
        match in_memory(&bytes) {
            Ok(fd) => self.say(id, &packet, &[fd.as_fd()]),
            Err(error) => {
                tracing::warn!(%error, "cannot create memory for an answer");
                self.answer(id, Some(Errno::NOMEM));
            }
        }
    }

    /// Changes the socket named by a request.
    fn change(
        &mut self,
        now: Instant,
        node: &mut Node,
        control: ClientId,
        packet: &Packet,
    ) -> Result<(), Errno> {
        let target = self.meant(control, packet)?;
        if packet.kind == PacketKind::Cancel {
            // Read messages sent before this request first, even if the socket is full.
            self.read(now, node, target, true);
        }
        let client = self.clients.get_mut(&target).ok_or(Errno::NOENT)?;
        let bound = client.bound.as_mut().ok_or(Errno::NOENT)?;
        match packet.kind {
            PacketKind::SetBuffer => {
                let size = Some(packet.value as usize);
                match packet.port {
                    0 => node.set_buffers(bound.id, size, None),
                    _ => node.set_buffers(bound.id, None, size),
                }
                let info = node.ports().sockets().find(|info| info.port == bound.id.port);
                if let Some(info) = info {
                    (bound.view.sndbuf, bound.view.rcvbuf) = (info.sndbuf, info.rcvbuf);
                }
            }
            PacketKind::Connect => {
                let to = (packet.address, packet.port);
                bound.view.connected = Some(to).filter(|(address, _)| !address.is_unspecified());
            }
            PacketKind::Monitor => bound.view.monitors = packet.value != 0,
            _ => node.cancel(bound.id, packet.address, packet.port),
        }
        self.board.set_socket(bound.slot, &bound.view);
        self.settle(node, target);
        Ok(())
    }

    /// Returns the socket named by a request on a control connection.
    pub(super) fn meant(&self, control: ClientId, packet: &Packet) -> Result<ClientId, Errno> {
        let is_meant = |client: &Client| {
            client.bound.as_ref().is_some_and(|bound| {
                bound.slot == packet.extra as usize && bound.view.serial == packet.len
            })
        };
        let meant = self.clients.iter().find(|(_, client)| is_meant(client));
        let target = *meant.ok_or(Errno::NOENT)?.0;
        if !self.controls.may_change(control, target) {
            return Err(Errno::PERM);
        }
        Ok(target)
    }

    fn answer(&self, id: ClientId, errno: Option<Errno>) {
        let code = errno.map_or(0, Errno::raw_os_error);
        let value = u32::try_from(code).unwrap_or(0);
        self.say(id, &Packet { value, ..Packet::new(PacketKind::Done) }, &[]);
    }

    fn say(&self, id: ClientId, packet: &Packet, fds: &[BorrowedFd<'_>]) {
        if let Some(client) = self.clients.get(&id) {
            // Fails if the user has disconnected or does not read its answers.
            let _ = client.write(packet, fds);
        }
    }
}

/// Creates a memfd that contains these bytes.
fn in_memory(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create("rds-info", flags)?);
    file.write_all(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::WRITE | SealFlags::SEAL)?;
    Ok(file.into())
}
