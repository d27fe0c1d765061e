//! Connections between nodes with the properties of TCP: each host's network stack buffers bytes in
//! transit, and reports the end of a connection only after all earlier bytes.

use std::collections::BTreeMap;
use std::collections::VecDeque;

use rds::proto::LinkId;

/// Identifies a connection.
pub(super) type ConnId = u64;
/// One end of a connection.
pub(super) type EndId = (ConnId, usize);

/// State of one end.
#[derive(Debug)]
pub(super) struct End {
    pub(super) host: usize,
    /// Number of the node's run: each restart of the node begins a new run.
    pub(super) life: u32,
    /// Link number on the node; None until the node has accepted the end.
    pub(super) link: Option<LinkId>,
    /// Bytes written that have not reached the other host.
    pub(super) out: VecDeque<u8>,
    /// Bytes that have reached this host but have not been read.
    pub(super) inbox: VecDeque<u8>,
    /// Total bytes sent by this end that the other host has received.
    pub(super) acked: u64,
    /// Whether any byte of this end was read.
    pub(super) was_read: bool,
    /// Whether the end of the connection follows the bytes in the inbox.
    pub(super) ends: bool,
    /// Whether the node has closed this end or stopped.
    pub(super) closed: bool,
    /// Whether bytes written at this end are lost.
    pub(super) broken: bool,
}

/// All connections.
#[derive(Debug, Default)]
pub(super) struct Net {
    conns: BTreeMap<ConnId, [End; 2]>,
    by_link: BTreeMap<(usize, LinkId), EndId>,
    /// Ends that nodes have not accepted, oldest first.
    backlog: BTreeMap<usize, VecDeque<EndId>>,
    next: ConnId,
}

impl Net {
    /// Connects a node (with its run and link number) to another node's host (with that node's
    /// run).
    pub(super) fn connect(&mut self, from: (usize, u32, LinkId), to: (usize, u32)) {
        self.next += 1;
        let id = self.next;
        let end = |host, life, link| End {
            host,
            life,
            link,
            out: VecDeque::new(),
            inbox: VecDeque::new(),
            acked: 0,
            was_read: false,
            ends: false,
            closed: false,
            broken: false,
        };
        let ends = [end(from.0, from.1, Some(from.2)), end(to.0, to.1, None)];
        self.by_link.insert((from.0, from.2), (id, 0));
        self.backlog.entry(to.0).or_default().push_back((id, 1));
        self.conns.insert(id, ends);
    }

    /// Accepts the oldest waiting end of a node.
    pub(super) fn accept(&mut self, host: usize) -> Option<EndId> {
        self.backlog.get_mut(&host)?.pop_front()
    }

    /// Sets the link number of an end that its node has accepted.
    pub(super) fn name(&mut self, id: EndId, link: LinkId) {
        if let Some(end) = self.end(id) {
            end.link = Some(link);
            let host = end.host;
            self.by_link.insert((host, link), id);
        }
    }

    pub(super) fn find(&self, host: usize, link: LinkId) -> Option<EndId> {
        self.by_link.get(&(host, link)).copied()
    }

    pub(super) fn end(&mut self, (conn, side): EndId) -> Option<&mut End> {
        self.conns.get_mut(&conn).map(|ends| &mut ends[side])
    }

    /// Returns the ends of a node, oldest first.
    pub(super) fn of_host(&self, host: usize) -> Vec<EndId> {
        let mine = self.by_link.iter().filter(|((owner, _), _)| *owner == host);
        mine.map(|(_, id)| *id).collect()
    }

    /// Returns all connections, oldest first.
    pub(super) fn all(&self) -> Vec<ConnId> {
        self.conns.keys().copied().collect()
    }

    /// Returns, for each connection of a node, the other node and its run.
    pub(super) fn peers(&mut self, host: usize) -> Vec<(usize, u32)> {
        let others: Vec<EndId> = self.of_host(host).into_iter().map(other).collect();
        others.into_iter().filter_map(|id| self.end(id).map(|end| (end.host, end.life))).collect()
    }

    /// Moves up to `count` written bytes from one end to the other host, as far as the window
    /// allows. Returns how many are left.
    pub(super) fn move_bytes(&mut self, (conn, side): EndId, count: usize, window: usize) -> usize {
        let Some(ends) = self.conns.get_mut(&conn) else { return 0 };
        let [first, second] = ends;
        let (from, to) = if side == 0 { (first, second) } else { (second, first) };
        if to.closed || from.broken {
            // The bytes are never acknowledged.
            from.out.clear();
            return 0;
        }
        let room = window.saturating_sub(to.inbox.len());
        let count = count.min(room).min(from.out.len());
        to.inbox.extend(take(&mut from.out, count));
        from.acked += count as u64;
        from.out.len()
    }

    /// Closes an end because its node has closed it or stopped: no more bytes are read at this end.
    pub(super) fn close(&mut self, (conn, side): EndId) {
        let Some(ends) = self.conns.get_mut(&conn) else { return };
        ends[side].closed = true;
        ends[side].inbox.clear();
        if let Some(link) = ends[side].link {
            self.by_link.remove(&(ends[side].host, link));
        }
        if ends.iter().all(|end| end.closed) {
            self.conns.remove(&conn);
        }
    }

    /// Breaks a connection: no more bytes are transferred.
    pub(super) fn break_conn(&mut self, conn: ConnId) {
        for end in self.conns.get_mut(&conn).into_iter().flatten() {
            end.broken = true;
            end.out.clear();
        }
    }

    /// Ends the connection at one end, after the bytes already received. Returns that end's node.
    pub(super) fn finish(&mut self, id: EndId) -> Option<usize> {
        let end = self.end(id).filter(|end| !end.closed)?;
        (end.ends, end.broken) = (true, true);
        end.out.clear();
        Some(end.host)
    }
}

/// Returns the other end.
pub(super) fn other((conn, side): EndId) -> EndId {
    (conn, 1 - side)
}

/// Takes bytes off the front in one copy, because most of the simulated traffic passes through
/// here.
pub(super) fn take(queue: &mut VecDeque<u8>, count: usize) -> Vec<u8> {
    let (first, second) = queue.as_slices();
    let from_first = count.min(first.len());
    let bytes = [&first[..from_first], &second[..count - from_first]].concat();
    queue.drain(..count);
    bytes
}
