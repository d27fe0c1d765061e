//! Which image is meant, what it is, and why it cannot be opened.

use std::io;
use std::path::PathBuf;

use crate::time::Duration;

/// What of opening an image failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RbdStep {
    /// Reading the configuration of Ceph.
    Configuration,
    /// Connecting to the monitors as a user.
    Connect,
    /// Opening the pool.
    Pool,
    /// Opening the image, in its namespace, at its snapshot.
    Image,
    /// Looking what it is.
    Facts,
}

/// Why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The library is not there or too old; what the dynamic linker says.
    #[error("cannot load librbd.so.1: {0}")]
    Library(String),
    /// A step failed.
    #[error("{0:?}: {1}")]
    Step(RbdStep, #[source] io::Error),
}

/// Which image, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageAddress {
    /// The name of the pool.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The name of the image.
    pub image: String,
    /// The name of a snapshot.
    pub snapshot: Option<String>,
    /// The configuration of Ceph; without one that of `CEPH_CONF` or `/etc/ceph/ceph.conf`.
    pub configuration: Option<PathBuf>,
    /// The name of the Ceph user, without `client.` in front.
    pub user: String,
    /// Open it for reading only.
    pub read_only: bool,
    /// How long the monitors may take to answer.
    pub connect_max: Duration,
}

/// What an image is, as long as it exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// The id of the cluster.
    pub fsid: String,
    /// The number of the pool.
    pub pool: i64,
    /// The id of the image, whatever its name.
    pub image: String,
    /// The number of the snapshot.
    pub snapshot: Option<u64>,
    /// Bytes of an object.
    pub object_size: u64,
    /// Writes may be acknowledged before they are on the OSDs: the pool or the image asks for that.
    pub write_back: bool,
}
