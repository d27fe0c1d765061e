//! An in-process NBD server with a cache that is lost when the server crashes.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

use nbd_bridge::wire::{cmd, cmd_flags, transmission_flags as tf};
use parking_lot::Mutex;

/// Block size in bytes. The first 8 bytes of a block are its content; the rest is ignored.
pub(super) const BLOCK: usize = 512;

#[derive(Debug, Default)]
struct State {
    /// Contents that survive a crash, by block.
    stable: Vec<u64>,
    cache: Vec<u64>,
    /// Number of the current instance of the server.
    start: u64,
    flags: u16,
    connections: Vec<UnixStream>,
    /// Connections of earlier instances, which stay open but are never answered.
    silent: Vec<UnixStream>,
}

/// The server. Its threads exit with the process.
#[derive(Clone, Debug)]
pub(super) struct Store(Arc<Mutex<State>>);

impl Store {
    /// Starts a server with `blocks` blocks on a unix socket.
    pub(super) fn start(socket: &str, blocks: usize, multi: bool) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let content = vec![0; blocks];
        let (stable, cache) = (content.clone(), content);
        let store = Self(Arc::new(Mutex::new(State { stable, cache, ..State::default() })));
        store.set_multi(multi);
        let serving = store.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                let store = serving.clone();
                let socket = socket.unwrap();
                // Fails when the client or a crash closes the connection.
                thread::spawn(move || drop(store.serve(socket)));
            }
        });
        store
    }

    /// Sets whether several connections are allowed.
    pub(super) fn set_multi(&self, multi: bool) {
        let flags = tf::HAS_FLAGS | tf::SEND_FLUSH | tf::SEND_FUA;
        self.0.lock().flags = flags | if multi { tf::CAN_MULTI_CONN } else { 0 };
    }

    /// Contents that survive a crash.
    pub(super) fn stable(&self) -> Vec<u64> {
        self.0.lock().stable.clone()
    }

    /// Loses the cache and all connections. After a silent crash, the connections stay open.
    pub(super) fn crash(&self, silent: bool) {
        let mut state = self.0.lock();
        state.cache = state.stable.clone();
        state.start += 1;
        let connections = std::mem::take(&mut state.connections);
        if silent {
            state.silent.extend(connections);
        } else {
            connections.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        }
    }

    /// Closes the connections left by silent crashes.
    pub(super) fn reset_silent(&self) {
        let silent = std::mem::take(&mut self.0.lock().silent);
        silent.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
    }

    fn serve(&self, mut socket: UnixStream) -> io::Result<()> {
        self.handshake(&mut socket)?;
        let start = {
            let mut state = self.0.lock();
            state.connections.push(socket.try_clone()?);
            state.start
        };
        loop {
            let mut head = [0; 28];
            socket.read_exact(&mut head)?;
            let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
            let number = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
            let len = u32::from_be_bytes(head[24..].try_into().unwrap()) as usize;
            let (flags, command, offset) = (word(4), word(6), number(16));
            let mut data = vec![0; if matches!(command, cmd::READ | cmd::WRITE) { len } else { 0 }];
            if command == cmd::WRITE {
                socket.read_exact(&mut data)?;
            }
            let mut state = self.0.lock();
            if state.start != start {
                continue;
            }
            let first = usize::try_from(offset).unwrap() / BLOCK;
            for (at, bytes) in (first..).zip(data.chunks_exact_mut(BLOCK)) {
                let (content, _) = bytes.split_first_chunk_mut::<8>().unwrap();
                if command == cmd::READ {
                    *content = state.cache[at].to_be_bytes();
                } else {
                    state.cache[at] = u64::from_be_bytes(*content);
                    if flags & cmd_flags::FUA != 0 {
                        state.stable[at] = state.cache[at];
                    }
                }
            }
            match command {
                cmd::FLUSH => state.stable = state.cache.clone(),
                cmd::DISC => return Ok(()),
                _ => {}
            }
            let mut reply = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0].to_vec();
            reply.extend_from_slice(&head[8..16]);
            if command == cmd::READ {
                reply.extend_from_slice(&data);
            }
            // Sent before a crash can begin: only a running server replies.
            socket.write_all(&reply)?;
        }
    }

    fn handshake(&self, socket: &mut UnixStream) -> io::Result<()> {
        const GO: u32 = 7;
        const INFO: u32 = 3;
        const ACK: u32 = 1;
        const UNSUPPORTED: u32 = 1 << 31 | 1;
        socket.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
        socket.read_exact(&mut [0; 4])?;
        loop {
            let mut head = [0; 16];
            socket.read_exact(&mut head)?;
            let (option, len) = (&head[8..12], u32::from_be_bytes(head[12..].try_into().unwrap()));
            socket.read_exact(&mut vec![0; len as usize])?;
            let go = option == GO.to_be_bytes();
            let mut reply = |kind: u32, data: &[u8]| {
                let len = u32::try_from(data.len()).unwrap().to_be_bytes();
                let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
                socket.write_all(&[&magic, option, &kind.to_be_bytes(), &len, data].concat())
            };
            if !go {
                reply(UNSUPPORTED, &[])?;
                continue;
            }
            let (blocks, flags) = {
                let state = self.0.lock();
                (state.stable.len(), state.flags)
            };
            let size = (blocks * BLOCK) as u64;
            reply(INFO, &[&[0, 0], &size.to_be_bytes()[..], &flags.to_be_bytes()].concat())?;
            return reply(ACK, &[]);
        }
    }
}
