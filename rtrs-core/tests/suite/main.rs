//! Tests of rtrs-core through its public interface, in one binary, because each binary must be
//! linked. `conformance_verbs` is separate: the lab runs it on machines with an RDMA device.
#![forbid(unsafe_code)]

mod conformance_iwarp;
mod conformance_sim;
mod corpus;
mod golden;
mod sim_world;
mod wire_properties;
