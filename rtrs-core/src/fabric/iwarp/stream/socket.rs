//! A connection's socket: its operations on the ring, and the end of each direction.
//!
//! At most one connect, one send and one receive run at a time. The slice list of a send or receive
//! moves into the operation and returns with its completion.

use std::net::{IpAddr, Shutdown, SocketAddr};

use socket2::SockRef;

use super::super::batch::BATCH_SLICES;
use super::super::env::token;
use super::super::rx::RX_SLICES;
use crate::ids::QpNum;
use crate::mem::{IoVecs, MemSlice};
use crate::rt::{Fd, Op, OpId, Port, unacknowledged};
use crate::time::Duration;

/// A socket and its running operations.
#[derive(Debug)]
pub(super) struct StreamSocket {
    fd: Fd,
    /// The connection's queue pair, used in tokens.
    qp: QpNum,
    connect: Option<OpId>,
    send: Option<OpId>,
    recv: Option<OpId>,
    /// Slice list for sends; None while a send holds it.
    send_iov: Option<Box<IoVecs>>,
    recv_iov: Option<Box<IoVecs>>,
    peer_done: bool,
    fin_sent: bool,
    send_broken: bool,
}

impl StreamSocket {
    /// Creates the state of a socket without running operations.
    pub(super) fn new(fd: Fd, qp: QpNum) -> Self {
        Self {
            fd,
            qp,
            connect: None,
            send: None,
            recv: None,
            send_iov: Some(IoVecs::new(BATCH_SLICES)),
            recv_iov: Some(IoVecs::new(RX_SLICES)),
            peer_done: false,
            fin_sent: false,
            send_broken: false,
        }
    }

    /// Returns the token of an operation of this kind.
    pub(super) fn token(&self, kind: u64) -> u64 {
        token::of(u64::from(self.qp.0), kind)
    }

    pub(super) fn connect(&mut self, port: &Port, address: SocketAddr) {
        let op = Op::Connect { fd: self.fd.clone(), address };
        self.connect = Some(port.submit(op, self.token(token::CONNECT)));
    }

    pub(super) fn send(&mut self, port: &Port, buf: MemSlice) {
        let op = Op::Send { fd: self.fd.clone(), buf };
        self.send = Some(port.submit(op, self.token(token::SEND)));
    }

    pub(super) fn recv(&mut self, port: &Port, buf: MemSlice) {
        let op = Op::Recv { fd: self.fd.clone(), buf };
        self.recv = Some(port.submit(op, self.token(token::RECV)));
    }

    pub(super) fn send_list(&mut self, port: &Port, iov: Box<IoVecs>) {
        let op = Op::SendMsg { fd: self.fd.clone(), iov };
        self.send = Some(port.submit(op, self.token(token::SEND)));
    }

    pub(super) fn recv_list(&mut self, port: &Port, iov: Box<IoVecs>) {
        let op = Op::RecvMsg { fd: self.fd.clone(), iov };
        self.recv = Some(port.submit(op, self.token(token::RECV)));
    }

    /// Records that the operation of this kind has completed.
    pub(super) fn completed(&mut self, kind: u64) {
        match kind {
            token::CONNECT => self.connect = None,
            token::SEND => self.send = None,
            _ => self.recv = None,
        }
    }

    pub(super) fn is_sending(&self) -> bool {
        self.send.is_some()
    }

    pub(super) fn is_receiving(&self) -> bool {
        self.recv.is_some()
    }

    /// Returns true if no operation is running.
    pub(super) fn is_idle(&self) -> bool {
        self.connect.is_none() && self.send.is_none() && self.recv.is_none()
    }

    /// Cancels running operations; each still completes.
    pub(super) fn cancel(&self, port: &Port) {
        for id in [self.connect, self.send, self.recv].into_iter().flatten() {
            port.cancel(id);
        }
    }

    pub(super) fn take_send_list(&mut self) -> Option<Box<IoVecs>> {
        self.send_iov.take()
    }

    pub(super) fn keep_send_list(&mut self, iov: Box<IoVecs>) {
        self.send_iov = Some(iov);
    }

    pub(super) fn take_recv_list(&mut self) -> Option<Box<IoVecs>> {
        self.recv_iov.take()
    }

    pub(super) fn keep_recv_list(&mut self, iov: Box<IoVecs>) {
        self.recv_iov = Some(iov);
    }

    /// Records that the peer will send no more data.
    pub(super) fn end_receiving(&mut self) {
        self.peer_done = true;
    }

    /// Returns true if the peer will send no more data.
    pub(super) fn has_peer_ended(&self) -> bool {
        self.peer_done
    }

    /// Records that sending has failed; data that can still be received may show why.
    pub(super) fn break_sending(&mut self) {
        self.send_broken = true;
    }

    pub(super) fn is_send_broken(&self) -> bool {
        self.send_broken
    }

    /// Sends FIN, once.
    pub(super) fn send_fin(&mut self) {
        if !self.fin_sent {
            self.fin_sent = true;
            let _ = SockRef::from(&self.fd).shutdown(Shutdown::Write);
        }
    }

    pub(super) fn is_fin_sent(&self) -> bool {
        self.fin_sent
    }

    /// Aborts all operations on the socket, even if canceling had no effect.
    pub(super) fn shut_down(&self) {
        let _ = SockRef::from(&self.fd).shutdown(Shutdown::Both);
    }

    /// Makes the peer see a reset when the socket is closed.
    pub(super) fn reset_on_close(&self) {
        let _ = SockRef::from(&self.fd).set_linger(Some(Duration::ZERO));
    }

    /// Sends as many bytes as the send buffer has room for, bypassing the ring.
    pub(super) fn send_now(&self, bytes: &[u8]) {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let _ = SockRef::from(&self.fd).send_with_flags(bytes, flags);
    }

    /// Returns the local address.
    pub(super) fn local_ip(&self) -> Option<IpAddr> {
        let address = SockRef::from(&self.fd).local_addr().ok()?.as_socket()?;
        Some(address.ip().to_canonical())
    }

    /// Returns the peer's address.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        SockRef::from(&self.fd).peer_addr().ok()?.as_socket()
    }

    /// Returns true if the peer's system has acknowledged all data.
    pub(super) fn peer_has_all(&self) -> Option<bool> {
        unacknowledged(&self.fd).ok().map(|segments| segments == 0)
    }
}
