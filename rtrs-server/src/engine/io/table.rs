//! Tables whose row numbers have types of their own.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use rtrs_core::ids::PermitId;

/// Number of a row in a [`Table`].
pub(super) trait Row: Copy {
    /// Returns the number of the row at an index.
    fn at(place: u32) -> Self;
    /// Index of the row.
    fn place(self) -> usize;
}

macro_rules! rows {
    ($($(#[$doc:meta])+ $name:ident,)+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) struct $name(pub u32);

        impl Row for $name {
            fn at(place: u32) -> Self {
                Self(place)
            }
            fn place(self) -> usize {
                self.0 as usize
            }
        }
    )+};
}

rows! {
    /// Row of a path on this shard.
    PathRow,
    /// Row of a connection on this shard.
    ConnRow,
}

/// A request on this shard: the row of its path, and its permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestRef {
    /// The row of the path.
    pub path: PathRow,
    /// The permit.
    pub permit: PermitId,
}

/// Requests that a shard checks in each turn.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Requests in `Deferred`, `Blocked` or `Turn`.
    pub(super) deferred: Vec<RequestRef>,
    /// Requests in `Settling`.
    pub(super) settling: Vec<RequestRef>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.deferred.is_empty() && self.settling.is_empty()
    }
}

impl RequestRef {
    /// Encodes the reference as an IO tag.
    pub(super) fn tag(self) -> u64 {
        u64::from(self.path.0) << 16 | u64::from(self.permit.0)
    }

    /// Decodes the reference from a tag.
    #[allow(clippy::cast_possible_truncation, reason = "the tag was made from these widths")]
    pub(super) fn of(tag: u64) -> Self {
        Self { path: PathRow((tag >> 16) as u32), permit: PermitId(tag as u16) }
    }
}

/// A table whose lowest free row is used first.
#[derive(Debug)]
pub(super) struct Table<R, T> {
    rows: Vec<Option<T>>,
    named: PhantomData<R>,
}

impl<R: Row, T> Table<R, T> {
    /// Creates a table without rows.
    pub(super) const fn new() -> Self {
        Self { rows: Vec::new(), named: PhantomData }
    }

    /// Adds a row, whose value may depend on its number.
    pub(super) fn insert(&mut self, value: impl FnOnce(R) -> T) -> R {
        let at = self.rows.iter().position(Option::is_none).unwrap_or_else(|| {
            self.rows.push(None);
            self.rows.len() - 1
        });
        let row = R::at(u32::try_from(at).unwrap_or_else(|_| panic!("more rows than descriptors")));
        self.rows[at] = Some(value(row));
        row
    }

    /// Returns a row.
    pub(super) fn get(&self, row: R) -> Option<&T> {
        self.rows.get(row.place())?.as_ref()
    }

    /// Returns a row mutably.
    pub(super) fn get_mut(&mut self, row: R) -> Option<&mut T> {
        self.rows.get_mut(row.place())?.as_mut()
    }

    /// Removes a row.
    pub(super) fn remove(&mut self, row: R) -> Option<T> {
        self.rows.get_mut(row.place())?.take()
    }

    /// All rows with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (R, &T)> {
        (0..).zip(&self.rows).filter_map(|(at, row)| Some((R::at(at), row.as_ref()?)))
    }

    /// All rows with their numbers, mutably.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (R, &mut T)> {
        (0..).zip(&mut self.rows).filter_map(|(at, row)| Some((R::at(at), row.as_mut()?)))
    }

    /// All rows, mutably.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.rows.iter_mut().flatten()
    }
}

/// Returns a row that must exist. Panics if it does not, which is a bug in this crate.
impl<R: Row + Debug, T> Index<R> for Table<R, T> {
    type Output = T;

    fn index(&self, row: R) -> &T {
        self.get(row).unwrap_or_else(|| panic!("no {row:?}"))
    }
}

impl<R: Row + Debug, T> IndexMut<R> for Table<R, T> {
    fn index_mut(&mut self, row: R) -> &mut T {
        self.get_mut(row).unwrap_or_else(|| panic!("no {row:?}"))
    }
}
