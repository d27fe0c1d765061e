//! Tests of a device with its socket and shards, against a monitor and driver written by hand.

mod rig;

mod control;
mod data;
mod hostile;
mod restart;
