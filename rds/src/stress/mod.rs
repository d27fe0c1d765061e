//! Load between two nodes, with every byte and the order of messages checked: the state machines of
//! `rds stress`, which run on a node's own thread or over any kind of sockets.

mod client;
mod ends;
mod message;
mod server;
mod tcp;

pub(crate) use client::{ClientPlan, StressClient, Tally};
pub(crate) use ends::{Machine, OnNode, over_sockets};
pub(crate) use message::{HEAD_LEN, LEN_MAX};
pub(crate) use server::StressServer;
pub(crate) use tcp::{TcpResult, serve_tcp, tcp_round_trips, tcp_stream};
