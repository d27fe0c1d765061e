//! Tests with two or more nodes whose connections deliver bytes immediately.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::net::IpAddr;
use std::net::Ipv4Addr;

use rtrs_base::time::{Duration, Instant};

use super::*;
use crate::wire::{Extensions, HEADER_LEN, Header, MAP_LEN, RETRANSMITTED};

mod connect;
mod messages;
mod paths;
mod wire;

fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, last).into()
}

/// One end of a connection: the node, its link, the bytes written but not yet delivered, and the
/// total number written.
#[derive(Clone, Debug)]
struct End {
    node: u8,
    link: LinkId,
    out: Vec<u8>,
    written: u64,
}

/// Nodes by the last byte of their address, and connections between them.
struct Net {
    nodes: BTreeMap<u8, Node>,
    pipes: Vec<[End; 2]>,
    now: Instant,
    /// Whether written bytes reach the other end.
    delivers: bool,
    /// Nodes to which all attempts to connect fail.
    unreachable: Vec<u8>,
}

impl Net {
    fn new(nodes: &[u8]) -> Self {
        let pipes = Vec::new();
        let nodes = nodes.iter().map(|last| (*last, Self::node(*last, 1))).collect();
        let now = Instant::ZERO;
        Self { nodes, pipes, now, delivers: true, unreachable: Vec::new() }
    }

    fn node(last: u8, life: u32) -> Node {
        Node::new(Config::new(address(last), life, u64::from(last)))
    }

    fn at(&mut self, node: u8) -> &mut Node {
        self.nodes.get_mut(&node).unwrap()
    }

    fn send(&mut self, from: SocketId, node: u8, to: (u8, u16), payload: &[u8]) {
        let now = self.now;
        let (to, port) = (address(to.0), to.1);
        self.at(node).may_send(from, to, port, payload.len()).unwrap();
        self.at(node).send(now, from, Outgoing::new(to, port, payload.to_vec())).unwrap();
    }

    /// Reads the messages waiting at a socket; returns the source port and payload of each.
    fn read(&mut self, node: u8, id: SocketId) -> Vec<(u16, Vec<u8>)> {
        let each = |received: Received| (received.port, received.payload);
        std::iter::from_fn(|| self.at(node).receive(id)).map(each).collect()
    }

    /// Runs until no more bytes are transferred.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if !self.step() {
                return;
            }
        }
        panic!("nodes do not settle");
    }

    /// Advances time.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            self.settle();
            let next = self.nodes.values().filter_map(Node::deadline).min();
            let Some(next) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            let now = self.now;
            for node in self.nodes.values_mut() {
                node.tick(now);
            }
        }
        self.now = end;
    }

    fn step(&mut self) -> bool {
        let mut any = self.orders();
        let Self { nodes, pipes, now, .. } = self;
        for end in pipes.iter_mut().flatten() {
            let Some(node) = nodes.get_mut(&end.node) else { continue };
            loop {
                let mut room = [IoSlice::new(&[]); 8];
                let count = node.output(end.link, &mut room);
                let bytes: Vec<u8> = room[..count].iter().flat_map(|s| s.to_vec()).collect();
                if bytes.is_empty() {
                    break;
                }
                node.wrote(end.link, bytes.len());
                end.written += bytes.len() as u64;
                end.out.extend(bytes);
                any = true;
            }
        }
        if !self.delivers {
            return any;
        }
        for pipe in pipes {
            for (from, to) in [(0, 1), (1, 0)] {
                let bytes = std::mem::take(&mut pipe[from].out);
                if bytes.is_empty() {
                    continue;
                }
                any = true;
                if let Some(node) = nodes.get_mut(&pipe[to].node) {
                    node.received(*now, pipe[to].link, &bytes);
                }
            }
            for end in pipe.iter().filter(|end| end.out.is_empty()) {
                if let Some(node) = nodes.get_mut(&end.node) {
                    node.acked(end.link, end.written);
                }
            }
        }
        any
    }

    fn orders(&mut self) -> bool {
        let mut any = false;
        for last in self.nodes.keys().copied().collect::<Vec<_>>() {
            while let Some(order) = self.at(last).take_order() {
                any = true;
                match order {
                    Order::Connect { link, to } => self.connect(last, link, to),
                    Order::Close(link) => self.end(last, link),
                }
            }
        }
        any
    }

    fn connect(&mut self, from: u8, link: LinkId, to: IpAddr) {
        let now = self.now;
        let IpAddr::V4(v4) = to else { panic!("{to}") };
        let to = v4.octets()[3];
        if self.unreachable.contains(&to) || !self.nodes.contains_key(&to) {
            self.at(from).lost(now, link);
            return;
        }
        let accepted = self.at(to).accepted(now, address(from));
        self.at(from).connected(now, link);
        let Some(other) = accepted else {
            self.at(from).lost(now, link);
            return;
        };
        let end = |node, link| End { node, link, out: Vec::new(), written: 0 };
        self.pipes.push([end(from, link), end(to, other)]);
    }

    /// Notifies the other end when a connection was closed at one end.
    fn end(&mut self, node: u8, link: LinkId) {
        let is_it = |pipe: &[End; 2]| pipe.iter().any(|end| end.node == node && end.link == link);
        let Some(at) = self.pipes.iter().position(is_it) else { return };
        let now = self.now;
        for end in self.pipes.remove(at) {
            if (end.node, end.link) != (node, link)
                && let Some(other) = self.nodes.get_mut(&end.node)
            {
                other.lost(now, end.link);
            }
        }
    }

    /// Breaks a node's connections without its peers noticing.
    fn cut_at(&mut self, node: u8) {
        let now = self.now;
        let ends = std::mem::take(&mut self.pipes).into_iter().flatten();
        for end in ends.filter(|end| end.node == node) {
            self.at(node).lost(now, end.link);
        }
    }

    /// Breaks all connections. Bytes written but not yet delivered are lost.
    fn cut(&mut self) {
        let now = self.now;
        for end in std::mem::take(&mut self.pipes).into_iter().flatten() {
            self.at(end.node).lost(now, end.link);
        }
    }
}

/// Splits a stream into headers and payloads.
fn frames(mut stream: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut found = Vec::new();
    while !stream.is_empty() {
        let (head, rest) = stream.split_at(HEADER_LEN);
        let header = Header::decode(head.try_into().unwrap());
        let (payload, rest) = rest.split_at(header.len as usize);
        found.push((header, payload.to_vec()));
        stream = rest;
    }
    found
}
