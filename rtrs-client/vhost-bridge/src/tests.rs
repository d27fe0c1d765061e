//! Tests of a device with its socket and shards, against a hand-written monitor and driver.

mod rig;

mod control;
mod data;
mod hostile;
mod migration;
mod restart;
