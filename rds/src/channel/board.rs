//! Shared memory that a node writes and its users read: the congested ports of peers, and the state
//! on which users of one socket in several processes must agree.
//!
//! Layout in 32-bit words: a header, a slot for each socket, a table of peers (open addressing),
//! and a congestion map for each entry of that table. Readers need no lock: what they read may be
//! slightly outdated, as updates from a peer always are.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rtrs_base::mem::SharedMemory;
use rtrs_base::time::Duration;

use super::packet::{mapped, unmapped};
use crate::wire::{CongestionMap, MAP_LEN};

const MAGIC: u32 = 0x5244_5301;
/// Offsets of the words of the header.
const AT_MAGIC: usize = 0;
const AT_CHANGES: usize = 4;
const AT_SLOTS: usize = 8;
const AT_PLACES: usize = 12;
const AT_ADDRESS: usize = 16;
const AT_CROWDED: usize = 32;
const HEAD_LEN: usize = 64;
/// Words of a slot: serial number, port, buffer sizes, flags, the default destination, and totals
/// of the socket's flow.
const SLOT_LEN: usize = 64;
/// Words of an entry in the table of peers: its state and the address.
const PLACE_LEN: usize = 32;
const FREE: u32 = 0;
const USED: u32 = 1;
const LEFT: u32 = 2;

/// Offsets in a slot: payload released from the send buffer, and the mark of payload taken, if any.
const AT_RELEASED: usize = 40;
const AT_MARK: usize = 44;
const AT_HAS_MARK: usize = 48;

const FLAG_CONNECTED: u32 = 1;
const FLAG_MONITOR: u32 = 2;

/// State of a socket, as shown in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketView {
    /// Distinguishes successive sockets in the slot; 0 means that the slot is free.
    pub serial: u32,
    /// Port of the socket.
    pub port: u16,
    /// Send buffer size in bytes.
    pub sndbuf: usize,
    /// Receive buffer size in bytes.
    pub rcvbuf: usize,
    /// Default destination, for messages sent without a destination.
    pub connected: Option<(IpAddr, u16)>,
    /// The users of the socket have requested reports of ports that are no longer congested.
    pub monitors: bool,
}

/// The board, read-only.
#[derive(Debug)]
pub struct Board {
    memory: SharedMemory,
    layout: Layout,
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    slots: usize,
    /// Number of entries in the table of peers; a power of two.
    places: usize,
}

impl Layout {
    fn slot(self, slot: usize) -> usize {
        HEAD_LEN + slot * SLOT_LEN
    }

    fn place(self, place: usize) -> usize {
        self.slot(self.slots) + place * PLACE_LEN
    }

    fn map(self, place: usize) -> usize {
        self.place(self.places) + place * MAP_LEN
    }

    fn len(self) -> usize {
        self.map(self.places)
    }

    /// Returns the entries to probe for an address, in order.
    fn probes(self, address: Ipv6Addr) -> impl Iterator<Item = usize> {
        let hash = address.octets().iter().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
        });
        let mask = self.places - 1;
        (0..self.places).map(move |step| (hash as usize + step) & mask)
    }
}

fn load_address(memory: &SharedMemory, at: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    for (word, chunk) in octets.chunks_exact_mut(4).enumerate() {
        chunk.copy_from_slice(&memory.load(at + word * 4).to_ne_bytes());
    }
    octets.into()
}

fn store_address(memory: &SharedMemory, at: usize, address: IpAddr) {
    for (word, chunk) in mapped(address).octets().chunks_exact(4).enumerate() {
        let value = u32::from_ne_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        memory.store(at + word * 4, value);
    }
}

impl Board {
    /// Maps the board of a node.
    ///
    /// # Errors
    /// The system's error; `InvalidData` for memory that is not a board.
    pub fn open(fd: OwnedFd) -> io::Result<Self> {
        let refuse = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let memory = SharedMemory::open(fd)?;
        if memory.len() < HEAD_LEN || memory.load(AT_MAGIC) != MAGIC {
            return Err(refuse("the node's shared memory has another version"));
        }
        let slots = memory.load(AT_SLOTS) as usize;
        let layout = Layout { slots, places: memory.load(AT_PLACES) as usize };
        let fits = slots < 1 << 20 && layout.places < 1 << 20 && layout.places.is_power_of_two();
        if !fits || layout.len() > memory.len() {
            return Err(refuse("the node's shared memory is too short"));
        }
        Ok(Self { memory, layout })
    }

    /// Returns the inode of the memory, which identifies the board.
    ///
    /// # Errors
    /// The system's error.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.memory)?.st_ino)
    }

    /// Returns the node's address.
    pub fn address(&self) -> IpAddr {
        unmapped(load_address(&self.memory, AT_ADDRESS))
    }

    /// Returns the state of a socket, or `None` if there is no such slot.
    pub fn socket(&self, slot: usize) -> Option<SocketView> {
        let at = (slot < self.layout.slots).then(|| self.layout.slot(slot))?;
        let word = |index: usize| self.memory.load(at + index * 4);
        let port = |word: u32| u16::try_from(word).unwrap_or(0);
        let flags = word(4);
        let is_connected = flags & FLAG_CONNECTED != 0;
        let to = || (unmapped(load_address(&self.memory, at + 24)), port(word(5)));
        Some(SocketView {
            serial: word(0),
            port: port(word(1)),
            sndbuf: word(2) as usize,
            rcvbuf: word(3) as usize,
            connected: is_connected.then(to),
            monitors: flags & FLAG_MONITOR != 0,
        })
    }

    /// Returns the total payload released from a socket's send buffer, which wraps around.
    pub fn released(&self, slot: usize) -> u32 {
        if slot < self.layout.slots {
            self.memory.load(self.layout.slot(slot) + AT_RELEASED)
        } else {
            0
        }
    }

    /// Returns the total of payload taken at which users must report it to the node.
    pub fn mark(&self, slot: usize) -> Option<u32> {
        let at = (slot < self.layout.slots).then(|| self.layout.slot(slot))?;
        // The mark is written before this flag.
        let has_mark = self.memory.load(at + AT_HAS_MARK) != 0;
        has_mark.then(|| self.memory.load(at + AT_MARK))
    }

    /// Whether the node may refuse messages to this address, because it has reached its limit on
    /// peers and this address is not a peer that has sent a congestion map.
    pub fn may_refuse(&self, peer: IpAddr) -> bool {
        self.memory.load(AT_CROWDED) != 0 && self.place_of(peer).is_none()
    }

    /// Returns the change counter, to be passed to [`Self::wait`].
    pub fn changes(&self) -> u32 {
        self.memory.load(AT_CHANGES)
    }

    /// Waits until a map has changed since `changes` was read, for at most `limit`.
    ///
    /// # Errors
    /// `Interrupted` if a signal arrives.
    pub fn wait(&self, changes: u32, limit: Option<Duration>) -> io::Result<()> {
        self.memory.wait(AT_CHANGES, changes, limit)
    }

    /// Whether a port of a peer is congested.
    pub fn is_congested(&self, peer: IpAddr, port: u16) -> bool {
        self.place_of(peer).is_some_and(|place| {
            let word = self.memory.load(self.layout.map(place) + usize::from(port / 32) * 4);
            u32::from_le(word) & 1 << (port % 32) != 0
        })
    }

    fn place_of(&self, peer: IpAddr) -> Option<usize> {
        let wanted = mapped(peer);
        for place in self.layout.probes(wanted) {
            let at = self.layout.place(place);
            match self.memory.load(at) {
                FREE => return None,
                USED if load_address(&self.memory, at + 4) == wanted => return Some(place),
                _ => {}
            }
        }
        None
    }
}

/// The board, writable.
#[derive(Debug)]
pub(crate) struct BoardWriter {
    memory: SharedMemory,
    layout: Layout,
    places: BTreeMap<IpAddr, usize>,
    free_slots: Vec<usize>,
    next_serial: u32,
}

impl BoardWriter {
    /// Creates a board for this many sockets and peers.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn create(address: IpAddr, sockets: usize, peers: usize) -> io::Result<Self> {
        let layout = Layout { slots: sockets, places: (peers * 2).next_power_of_two() };
        let memory = SharedMemory::create("rds-board", layout.len())?;
        store_address(&memory, AT_ADDRESS, address);
        let word = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        memory.store(AT_SLOTS, word(layout.slots));
        memory.store(AT_PLACES, word(layout.places));
        memory.store(AT_MAGIC, MAGIC);
        let free_slots = (0..sockets).rev().collect();
        Ok(Self { memory, layout, places: BTreeMap::new(), free_slots, next_serial: 0 })
    }

    /// Allocates a slot for a socket and returns it with its serial number.
    pub(crate) fn take_slot(&mut self) -> Option<(usize, u32)> {
        let slot = self.free_slots.pop()?;
        self.next_serial = self.next_serial.wrapping_add(1).max(1);
        Some((slot, self.next_serial))
    }

    /// Frees a slot.
    pub(crate) fn free_slot(&mut self, slot: usize) {
        self.memory.store(self.layout.slot(slot), 0);
        self.free_slots.push(slot);
    }

    /// Publishes the state of a socket.
    pub(crate) fn set_socket(&self, slot: usize, view: &SocketView) {
        let at = self.layout.slot(slot);
        let word = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let connected = if view.connected.is_some() { FLAG_CONNECTED } else { 0 };
        let monitors = if view.monitors { FLAG_MONITOR } else { 0 };
        if let Some((address, port)) = view.connected {
            store_address(&self.memory, at + 24, address);
            self.memory.store(at + 20, port.into());
        }
        for (index, value) in [
            (4, connected | monitors),
            (3, word(view.rcvbuf)),
            (2, word(view.sndbuf)),
            (1, view.port.into()),
            (0, view.serial),
        ] {
            self.memory.store(at + index * 4, value);
        }
    }

    /// Publishes the payload released from a socket's send buffer, and the total of payload taken
    /// at which its users must report it.
    pub(crate) fn set_flow(&self, slot: usize, released: u32, mark: Option<u32>) {
        let at = self.layout.slot(slot);
        let mark_words = mark.map(|mark| (AT_MARK, mark));
        let words = [(AT_RELEASED, released), (AT_HAS_MARK, mark.is_some().into())];
        for (offset, value) in mark_words.into_iter().chain(words) {
            // Written only when it changes, since users read the same cache line.
            if self.memory.load(at + offset) != value {
                self.memory.store(at + offset, value);
            }
        }
    }

    /// Publishes whether the node has reached its limit on peers.
    pub(crate) fn set_crowded(&self, is_crowded: bool) {
        // Written only when it changes, since users read the same cache line.
        if self.memory.load(AT_CROWDED) != u32::from(is_crowded) {
            self.memory.store(AT_CROWDED, is_crowded.into());
        }
    }

    /// Sets the map of a peer. `None` forgets the peer.
    pub(crate) fn set_map(&mut self, peer: IpAddr, map: Option<&CongestionMap>) {
        let Some(map) = map else {
            if let Some(place) = self.places.remove(&peer) {
                self.memory.store(self.layout.place(place), LEFT);
                self.write_map(place, &CongestionMap::default());
                self.changed();
            }
            return;
        };
        let place = match self.places.get(&peer) {
            Some(place) => *place,
            None => match self.add_place(peer) {
                Some(place) => place,
                // Cannot happen: there are twice as many entries as peers.
                None => return,
            },
        };
        self.write_map(place, map);
        self.changed();
    }

    fn add_place(&mut self, peer: IpAddr) -> Option<usize> {
        let mut probes = self.layout.probes(mapped(peer));
        let place = probes.find(|place| self.memory.load(self.layout.place(*place)) != USED)?;
        store_address(&self.memory, self.layout.place(place) + 4, peer);
        self.memory.store(self.layout.place(place), USED);
        self.places.insert(peer, place);
        Some(place)
    }

    fn write_map(&self, place: usize, map: &CongestionMap) {
        let at = self.layout.map(place);
        for (word, chunk) in map.bytes().chunks_exact(4).enumerate() {
            let value = u32::from_ne_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
            // Pages of maps that were never congested are never touched.
            if self.memory.load(at + word * 4) != value {
                self.memory.store(at + word * 4, value);
            }
        }
    }

    fn changed(&self) {
        self.memory.store(AT_CHANGES, self.memory.load(AT_CHANGES).wrapping_add(1));
        self.memory.wake(AT_CHANGES);
    }
}

impl AsFd for BoardWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(peers: usize) -> (BoardWriter, Board) {
        let writer = BoardWriter::create([10, 0, 0, 1].into(), 4, peers).unwrap();
        let board = Board::open(writer.as_fd().try_clone_to_owned().unwrap()).unwrap();
        (writer, board)
    }

    #[test]
    fn readers_see_sockets() {
        let (mut writer, board) = pair(4);
        assert_eq!(board.address(), IpAddr::from([10, 0, 0, 1]));
        let (slot, serial) = writer.take_slot().unwrap();
        let mut view = SocketView {
            serial,
            port: 4000,
            sndbuf: 100_000,
            rcvbuf: 200_000,
            connected: None,
            monitors: true,
        };
        writer.set_socket(slot, &view);
        assert_eq!(board.socket(slot), Some(view));
        view.connected = Some(("fd00::7".parse().unwrap(), 65535));
        writer.set_socket(slot, &view);
        assert_eq!(board.socket(slot), Some(view));
        assert_eq!((board.released(slot), board.mark(slot)), (0, None));
        writer.set_flow(slot, 7, Some(9));
        assert_eq!((board.released(slot), board.mark(slot)), (7, Some(9)));
        writer.set_flow(slot, 8, None);
        assert_eq!((board.released(slot), board.mark(slot)), (8, None));
        writer.free_slot(slot);
        assert_eq!(board.socket(slot).map(|view| view.serial), Some(0));
        let next = writer.take_slot().unwrap();
        assert!(next.0 == slot && next.1 != serial);
        assert_eq!(board.socket(4), None);
    }

    #[test]
    fn readers_see_congestion() {
        let (mut writer, board) = pair(64);
        let peer = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut map = CongestionMap::default();
        for last in 1..=64 {
            map.set(u16::from(last) * 1000, true);
            writer.set_map(peer(last), Some(&map));
            map.set(u16::from(last) * 1000, false);
        }
        for last in 1..=64 {
            let congested: Vec<u16> =
                (0..=u16::MAX).filter(|port| board.is_congested(peer(last), *port)).collect();
            assert_eq!(congested, [u16::from(last) * 1000]);
        }
        assert!(!board.is_congested(peer(65), 1000));
        assert!(!board.may_refuse(peer(65)));
        writer.set_crowded(true);
        assert!(board.may_refuse(peer(65)) && !board.may_refuse(peer(64)));
        let changes = board.changes();
        for last in 1..=32 {
            writer.set_map(peer(last), None);
        }
        assert_eq!(board.changes(), changes + 32);
        board.wait(changes, None).unwrap();
        assert!(!board.is_congested(peer(1), 1000) && board.is_congested(peer(33), 33_000));
        for last in 100..132 {
            writer.set_map(peer(last), Some(&map));
            assert!(!board.is_congested(peer(last), 1000), "nothing is left of the former map");
        }
    }

    #[test]
    fn foreign_memory_is_refused() {
        let memory = SharedMemory::create("x", 4096).unwrap();
        let fd = memory.as_fd().try_clone_to_owned().unwrap();
        assert_eq!(Board::open(fd).unwrap_err().kind(), io::ErrorKind::InvalidData);
        memory.store(AT_MAGIC, MAGIC);
        memory.store(AT_SLOTS, 1000);
        memory.store(AT_PLACES, 4);
        let fd = memory.as_fd().try_clone_to_owned().unwrap();
        assert!(Board::open(fd).is_err());
    }
}
