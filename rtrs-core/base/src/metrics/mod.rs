//! Metrics in the text format of Prometheus, and the HTTP server that answers scrapes.
//!
//! A daemon declares each metric once ([`Metric`]), collects values into [`Samples`] when they are
//! requested, and renders them. Nothing here runs on a shard: shards record IO times in their own
//! [`Times`] and [`FineTimes`], and everything else comes from the reports that the commands also
//! use.

mod exposition;
mod fine_times;
mod http;
mod times;

pub use exposition::{Kind, Metric, Number, Samples};
pub use fine_times::FineTimes;
pub use http::MetricsServer;
pub use times::{Bucket, TIME_BUCKETS, Times, bucket_of};

/// Declares the metrics of a daemon: a constant for each, and `ALL` with all metrics in this order.
/// The metrics common to both daemons come first; `of` lists the labels that distinguish processes,
/// `io` those that identify the target of an IO.
#[macro_export]
macro_rules! metrics {
    (of [$($of:literal),*]; io [$($io:literal),+]; $($own:tt)+) => {
        $crate::metrics! {
            BUILD_INFO = Gauge "rtrs_build_info" ["role", $($of,)* "version"]
                "Version of the daemon; the value is 1.";
            START_TIME = Gauge "rtrs_start_time_seconds" ["role" $(, $of)*]
                "Time at which the daemon started, in seconds since 1970.";
            IO_SECONDS = Histogram "rtrs_io_seconds" ["role", $($io,)+ "op"]
                "Time of an IO: on the server, from arrival to answer; on the client, from \
                 submission to completion.";
            IO_BYTES = Counter "rtrs_io_bytes_total" ["role", $($io,)+ "op"]
                "Bytes of IOs that succeeded.";
            IO_ERRORS = Counter "rtrs_io_errors_total" ["role", $($io,)+ "op"]
                "IOs that ended with an error.";
            CRC_ERRORS = Counter "rtrs_crc_errors_total" ["role", $($of,)* "transport"]
                "Received frames with a wrong checksum; each ended its connection.";
            RECEIVED = Counter "rtrs_receive_bytes_total" ["role", $($of,)* "transport"]
                "Bytes received from the network, headers included.";
            SENT = Counter "rtrs_transmit_bytes_total" ["role", $($of,)* "transport"]
                "Bytes sent to the network, headers included.";
            INTERNAL_ERRORS = Counter "rtrs_internal_errors_total" ["role" $(, $of)*]
                "Bugs in the daemon; each is in its log and ended a path.";
            $($own)+
        }
    };
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

        /// All metrics, in the order in which they are rendered.
        pub const ALL: &[&$crate::metrics::Metric] = &[$(&$constant),+];
    };
}
