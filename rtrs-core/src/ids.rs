//! Newtypes for numbers, so that one kind of index cannot be mistaken for another.

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
            /// Returns the number as an index into a table.
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
    /// `paths_uuid`: one client instance on one server; the same on all paths of the session.
    SessionId
}
uuid! {
    /// One path of a session, stable across reconnects; misleadingly called `sess_uuid` on the
    /// wire.
    PathUuid
}
number! {
    /// Index of a path within its session, local to this end.
    PathId, u16
}
number! {
    /// `cid`: index of a connection within its path. 0 is the service connection.
    ConnIndex, u16
}
number! {
    /// Permission to use one chunk; the `msg_id` on the wire. Equal to the chunk's index.
    PermitId, u16
}
number! {
    /// Index of a server buffer, from 0 to queue depth - 1.
    ChunkIndex, u16
}
number! {
    /// Index of a shard in this process, starting at 0.
    CoreIndex, u16
}
number! {
    /// Index of one of a shard's providers.
    ProviderIndex, u8
}
number! {
    /// Queue pair of this shard's provider. Not reused while one of its events may be pending.
    QpNum, u32
}
number! {
    /// Key with which a peer accesses registered memory.
    Rkey, u32
}

impl ProviderIndex {
    /// Returns the indices of `count` providers.
    pub fn all(count: usize) -> impl Iterator<Item = Self> + use<> {
        (0..u8::try_from(count).unwrap_or(u8::MAX)).map(Self)
    }
}

impl From<PermitId> for ChunkIndex {
    fn from(permit: PermitId) -> Self {
        Self(permit.0)
    }
}
