//! Metrics in the text format of Prometheus, and the HTTP server that answers scrapes.
//!
//! A daemon declares each metric once ([`Metric`]), collects values into [`Samples`] when somebody
//! asks, and renders them. Nothing here runs on a shard: IO times are counted in [`Times`], which
//! a shard owns, and everything else comes from the reports that the commands use too.

mod exposition;
mod http;
mod times;

pub use exposition::{Kind, Metric, Number, Samples};
pub use http::MetricsServer;
pub use times::{Bucket, TIME_BUCKETS, Times, bucket_of};

/// Declares the metrics of a daemon: a constant for each, and `ALL` of them in this order.
#[macro_export]
macro_rules! metrics {
    ($($constant:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)+) => {
        $(
            #[doc = $help]
            pub(crate) const $constant: $crate::metrics::Metric = $crate::metrics::Metric {
                name: $name,
                kind: $crate::metrics::Kind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )+

        /// All metrics, in the order of the text.
        pub const ALL: &[&$crate::metrics::Metric] = &[$(&$constant),+];
    };
}
