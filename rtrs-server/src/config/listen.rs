//! One word of `listen`: a portal, or `auto`.
//!
//! Owns [`ListenSpec`]. `auto` stands for what a server without the setting does: TCP on every
//! address, and RDMA where the host has a device. What it comes to is `plan.rs`.

use std::fmt;
use std::str::FromStr;

use rtrs_core::config::{Portal, ValueError, deserialize_text};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenSpec {
    /// TCP, and RDMA where it is there, on every address and the default port.
    Auto,
    /// Here.
    Portal(Portal),
}

impl FromStr for ListenSpec {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Portal) }
    }
}

impl fmt::Display for ListenSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Portal(portal) => portal.fmt(f),
        }
    }
}

impl Serialize for ListenSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ListenSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_text(deserializer, "auto, or a portal such as tcp://127.0.0.1:1234")
    }
}
