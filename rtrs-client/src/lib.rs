//! Placeholder of the crate map.
