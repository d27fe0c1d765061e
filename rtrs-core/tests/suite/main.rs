//! Tests of rtrs-core through its public interface, in one binary, because each binary costs a
//! link. `conformance_verbs` is another one: the lab runs it on machines with an RDMA device.
#![forbid(unsafe_code)]

mod conformance_iwarp;
mod conformance_sim;
mod corpus;
mod golden;
mod sim_world;
mod wire_properties;
