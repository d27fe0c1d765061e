//! Image addresses, metadata of open images, and errors from opening images.

use std::io;
use std::path::PathBuf;

use crate::time::Duration;

/// Step at which opening an image failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RbdStep {
    /// Reading Ceph's configuration.
    Configuration,
    /// Connecting to the monitors as a user.
    Connect,
    /// Opening the pool.
    Pool,
    /// Opening the image, in its namespace and at its snapshot.
    Image,
    /// Reading the metadata of the image.
    Facts,
}

/// Reason why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RbdError {
    /// The library is missing or too old; contains the dynamic linker's message.
    #[error("cannot load librbd.so.1: {0}")]
    Library(String),
    /// A step failed.
    #[error("{0:?}: {1}")]
    Step(RbdStep, #[source] io::Error),
}

/// Address of an image, and how to connect to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageAddress {
    /// Name of the pool.
    pub pool: String,
    /// Namespace in the pool.
    pub namespace: Option<String>,
    /// Name of the image.
    pub image: String,
    /// Name of a snapshot.
    pub snapshot: Option<String>,
    /// Ceph configuration file; by default the one named by `CEPH_CONF`, or `/etc/ceph/ceph.conf`.
    pub configuration: Option<PathBuf>,
    /// Name of the Ceph user, without the prefix `client.`.
    pub user: String,
    /// Whether to open the image read-only.
    pub read_only: bool,
    /// Maximum time for the monitors to answer.
    pub connect_max: Duration,
}

/// Metadata of an image that does not change while the image is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// ID of the cluster.
    pub fsid: String,
    /// ID of the pool.
    pub pool: i64,
    /// ID of the image, which is independent of its name.
    pub image: String,
    /// ID of the snapshot.
    pub snapshot: Option<u64>,
    /// Object size in bytes.
    pub object_size: u64,
    /// Whether writes may be acknowledged before they are on the OSDs, because of pool or image
    /// settings.
    pub write_back: bool,
}
