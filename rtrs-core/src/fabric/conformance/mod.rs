//! Conformance suite that every provider must pass: the contract of `fabric/mod.rs` as test cases.
//!
//! A provider supplies a [`Harness`]: two ends, a listener and a connector, a clock and a step that
//! advances time (virtual or real). [`fabric_conformance!`](crate::fabric_conformance) generates a
//! named test for each case; [`run_all`] runs them in a loop. In every case, the [`Bench`] around a
//! harness checks that no completion is repeated or unexpected, that no event follows the last
//! event of a queue pair, and that everything that must complete has completed at the end.
//!
//! `bench.rs` the test bench · `connect.rs` · `transfer.rs` sends, writes, reads · `memory.rs`
//! keys, bounds, windows · `ending.rs` disconnect, abort, guarantees of closed queue pairs.

mod bench;
mod connect;
mod ending;
mod forward;
mod memory;
mod transfer;

use std::io::Write;
use std::net::{IpAddr, SocketAddr};

pub use bench::Bench;
use bench::{LIMITS, Memory, Pair, Port, SEND, read_from, write_to};

use super::Fabric;
use crate::time::{Duration, Instant};

/// One of a harness's shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// Listening end.
    A,
    /// Connecting end.
    B,
    /// Second shard of the listening end's process.
    SecondA,
}

/// All sides, in the order in which they are driven.
const SIDES: [Side; 3] = [Side::A, Side::B, Side::SecondA];

/// Environment that a provider supplies for its tests. Each case gets a new one.
pub trait Harness {
    /// Returns the time of this harness's clock.
    fn now(&self) -> Instant;

    /// Advances time slightly: runs the next event of a virtual world, or waits for the transport
    /// for up to a few milliseconds. The suite calls `flush` before and `poll` after it on every
    /// fabric.
    fn step(&mut self);

    /// Returns the fabric for a side. `A` and `B` must exist.
    fn fabric(&mut self, side: Side) -> Option<&mut dyn Fabric>;

    /// Returns the address at which `A` listens; port 0 selects a free one.
    fn listen_address(&self) -> SocketAddr;

    /// Returns an address where connections are refused immediately.
    fn refusing_address(&mut self) -> SocketAddr;

    /// Returns an address that never responds, if the harness has one.
    fn silent_address(&mut self) -> Option<SocketAddr>;

    /// Returns the source address of `B`, or None for the system's choice.
    fn source_address(&self) -> Option<IpAddr> {
        None
    }

    /// Returns true if a message waits until a receive is posted for it, as on reliable verbs
    /// connections; otherwise the message closes the connection.
    fn waits_for_receives(&self) -> bool {
        false
    }

    /// Returns the reason if a case cannot run: a known limit of the transport, or no transport.
    /// The case is then skipped visibly and counted as skipped. A harness that skips every case has
    /// no fabrics.
    fn skips(&self, _case: &str) -> Option<String> {
        None
    }

    /// Returns how long the suite waits for an expected event.
    fn patience(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// Returns how long the suite waits to verify that an event does not occur.
    fn settle_time(&self) -> Duration {
        Duration::from_millis(50)
    }
}

/// Test case of the suite.
pub type Case = fn(&mut Bench<'_>);

/// Generates a test for every case. `$make` is a function that returns a new harness by value.
#[macro_export]
macro_rules! fabric_conformance {
    ($make:path) => { $crate::fabric_conformance! { @list @tests ($make) } };
    (@tests ($make:path) $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                $crate::fabric::conformance::run_named(stringify!($name), &mut $make());
            }
        )*
    };
    (@table () $($name:ident)*) => {
        &[$((stringify!($name), $name as Case)),*]
    };
    (@list @$then:ident ($($arg:tt)*)) => {
        $crate::fabric_conformance! { @$then ($($arg)*)
            connect_carries_private_data_both_ways
            connect_without_private_data
            reject_carries_private_data
            dropped_request_ends_the_attempt
            refused_connect_fails
            connect_times_out
            abort_while_connecting
            failed_connect_flushes_receives
            port_in_use_is_reported
            many_queue_pairs
            request_is_accepted_on_another_core
            send_sizes
            send_longer_than_the_receive
            send_with_immediate
            send_of_two_pieces
            sends_keep_their_order
            write_sizes
            write_of_two_pieces
            scattered_memory_is_written_and_read
            write_with_immediate
            empty_write_needs_no_key
            data_is_placed_before_the_immediate
            a_batch_of_writes
            selective_signaling
            both_directions_simultaneously
            read_sizes
            empty_read_needs_no_key
            writes_and_reads_mixed
            unknown_key_is_refused
            deregistered_key_is_refused
            write_out_of_bounds_by_one_is_refused
            write_below_the_base_is_refused
            write_that_wraps_is_refused
            write_without_permission_is_refused
            read_without_permission_is_refused
            read_out_of_bounds_by_one_is_refused
            key_of_another_domain_is_refused
            window_grants_and_revokes
            window_keys_are_fresh
            window_has_bounds
            window_without_permission_is_refused
            window_serves_all_queue_pairs_of_its_domain
            dropped_window_is_refused
            memory_is_reusable_after_its_connections
            memory_registered_on_another_thread_is_usable
            send_with_invalidate_revokes_the_key
            local_memory_is_checked
            queues_are_bounded
            missing_receive_ends_the_connection
            disconnect_flushes_everything
            disconnect_sends_what_was_posted
            disconnect_from_both_ends
            abort_flushes_everything
            no_peer_write_lands_after_closed
            closed_queue_pair_accepts_nothing
            other_queue_pairs_are_unaffected
            reconnect_after_close
        }
    };
}

use connect::*;
use ending::*;
use memory::*;
use transfer::*;

/// All cases with their names.
pub const CASES: &[(&str, Case)] = fabric_conformance!(@list @table ());

/// Runs one case on a new harness. Panics if the case fails.
pub fn run_named(name: &str, harness: &mut dyn Harness) {
    let found = CASES.iter().find(|(n, _)| *n == name);
    let (_, case) = found.unwrap_or_else(|| panic!("no case named {name}"));
    if let Some(reason) = harness.skips(name) {
        skip(&reason);
        return;
    }
    let mut bench = Bench::new(harness);
    case(&mut bench);
    bench.settle();
}

/// Reports that the current test is skipped, and why: to stderr, bypassing the test runner's
/// capture, and to the file named by `RTRS_SKIP_FILE`, where `scripts/test.sh` counts it.
///
/// # Panics
/// Panics if that file cannot be written.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    let line = format!("SKIP {}: {reason}\n", thread.name().unwrap_or("test"));
    // A failure to write to stderr cannot be reported.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("RTRS_SKIP_FILE") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("note the skip");
    }
}

/// Runs every case, each on a new harness.
pub fn run_all(make: &mut dyn FnMut() -> Box<dyn Harness>) {
    for (name, _) in CASES {
        run_named(name, &mut *make());
    }
}
