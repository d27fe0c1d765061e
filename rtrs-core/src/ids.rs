//! A newtype per number, so that no index is taken for another.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $inner:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl $name {
            /// The number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

macro_rules! uuid {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for (i, byte) in self.0.iter().enumerate() {
                    if matches!(i, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

uuid! {
    /// `paths_uuid`: one client instance of one server; the same on all its paths.
    SessionId
}
uuid! {
    /// `sess_uuid` on the wire, misleadingly: one path of a session, stable over reconnects.
    PathUuid
}
number! {
    /// A path's place in its session, on this side only.
    PathId, u16
}
number! {
    /// `cid`: a connection's number in its path. 0 is the service connection.
    ConnIndex, u16
}
number! {
    /// The right to use one chunk; the `msg_id` of the wire. Equal to the chunk's index.
    PermitId, u16
}
number! {
    /// A server buffer's number, 0 to queue depth - 1.
    ChunkIndex, u16
}
number! {
    /// A shard of this process, from 0.
    CoreIndex, u16
}
number! {
    /// Which of a shard's providers.
    ProviderIndex, u8
}
number! {
    /// A queue pair of this shard's provider. Never reused while an event of it may be on its way.
    QpNum, u32
}
number! {
    /// The key a peer needs to reach registered memory.
    Rkey, u32
}

impl ProviderIndex {
    /// Those of a shard that has so many.
    pub fn all(count: usize) -> impl Iterator<Item = Self> + use<> {
        (0..u8::try_from(count).unwrap_or(u8::MAX)).map(Self)
    }
}

impl From<PermitId> for ChunkIndex {
    fn from(permit: PermitId) -> Self {
        Self(permit.0)
    }
}
