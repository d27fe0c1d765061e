//! Safety rules that a test can disable in the real code, one at a time.
//!
//! A checker that has never seen a rule broken proves little. So each rule that prevents data loss
//! has a *mutant*: a condition `rtrs_base::mutated!(Name)` on the line that enforces the rule. The
//! condition is always false and costs nothing unless the feature `mutants` and debug assertions
//! are enabled. `rtrs-sim --mutants` enables the mutants one after another and shows that the
//! simulator detects each one (docs/explanation/simulator.md). Mutants are chosen per thread, so
//! that concurrent tests do not affect each other. Builds with the `release` profile have no
//! mutants, whatever their features.

use std::fmt;
use std::str::FromStr;

macro_rules! mutants {
    ($($(#[doc = $about:literal])+ $group:ident {
        $($(#[doc = $rule:literal])+ $variant:ident = $name:literal,)+
    })+) => {
        /// Safety rule that can be disabled.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Mutant {
            $($($(#[doc = $rule])+ $variant,)+)+
        }

        impl Mutant {
            $($(#[doc = $about])+ pub const $group: &'static [Self] = &[$(Self::$variant,)+];)+

            /// All mutants of all groups.
            const EVERY: &'static [Self] = &[$($(Self::$variant,)+)+];

            /// Returns the name used on command lines.
            pub const fn name(self) -> &'static str {
                match self { $($(Self::$variant => $name,)+)+ }
            }

            /// Returns a description of the broken rule.
            pub fn rule(self) -> &'static str {
                match self { $($(Self::$variant => concat!($($rule),+).trim(),)+)+ }
            }
        }
    };
}

mutants! {
    /// Rules of RTRS and NBD, which `rtrs-sim` disables.
    ALL {
        /// The server lets a second session write to an export.
        SecondWriter = "second-writer",
        /// CLOSE is answered and the export released while the session's requests still run on it.
        CloseWhileBusy = "close-while-busy",
        /// A write with PREFLUSH is not preceded by a flush.
        PreflushDropped = "preflush-dropped",
        /// A write with FUA to a device without FUA is not followed by a flush.
        PostflushDropped = "postflush-dropped",
        /// FUA is not passed to the device.
        FuaDropped = "fua-dropped",
        /// A resent request does not wait for the permit of its first copy.
        ReplayWithoutPermit = "replay-without-permit",
        /// A change does not wait for overlapping IO that a closed path has left running.
        OverlapIgnored = "overlap-ignored",
        /// A change waits only for IO of a closed path that begins at the same byte.
        OverlapByStartOnly = "overlap-by-start-only",
        /// An ended session releases its exports while its block IO still runs.
        SessionReleasedEarly = "session-released-early",
        /// FENCE is answered while shards still serve the path.
        FenceBeforeStopped = "fence-before-stopped",
        /// FENCE is answered, but the path stays in use.
        FencedPathKept = "fenced-path-kept",
        /// FENCE is answered by a process that does not know the path, on a disk without a lock.
        ForeignFenceAnswered = "foreign-fence-answered",
        /// A path that its client reports dead is not replaced.
        OldPathKept = "old-path-kept",
        /// A request of several parts is answered after the first part.
        FirstPartAnswers = "first-part-answers",
        /// A request is answered with success although its device failed.
        DeviceErrorDropped = "device-error-dropped",
        /// The server does not report the epoch of its cache.
        CacheEpochUnreported = "cache-epoch-unreported",
        /// The server does not close silent paths.
        ServerKeepsSilent = "server-keeps-silent",
        /// The server keeps connections whose handshake has stalled.
        HandshakeKept = "handshake-kept",
        /// An ended session keeps its exports.
        ExportKept = "export-kept",
        /// A flush is answered without flushing the device.
        FlushSkipped = "flush-skipped",
        /// A read is answered without its data.
        ReadUnsent = "read-unsent",
        /// A request is resent before its path is fenced off.
        ResendBeforeFence = "resend-before-fence",
        /// A path carries IO before the dead paths are fenced off.
        UpBeforeFence = "up-before-fence",
        /// An IO fails before the path on which it was sent is fenced off.
        GivenUpBeforeFence = "given-up-before-fence",
        /// The shards of a client use the same permits.
        PermitsShared = "permits-shared",
        /// A flush covers writes that were acknowledged after it was sent.
        FlushCoversLater = "flush-covers-later",
        /// An answer from another epoch of the server's cache counts for the current one.
        OldEpochAnswer = "old-epoch-answer",
        /// Certain flush errors on the server do not report a loss to other users.
        FlushErrorByKind = "flush-error-by-kind",
        /// Flushes do not report a loss.
        LossUnreported = "loss-unreported",
        /// Only one of several concurrent flushes reports a loss; the others succeed.
        LossReportedOnce = "loss-reported-once",
        /// A successful flush does not wait for flushes that overlap it and may report a loss.
        FlushOvertakes = "flush-overtakes",
        /// A loss between the parts of an IO is not reported once the IO has ended.
        PartLossForgotten = "part-loss-forgotten",
        /// A process that takes over ignores writes that its predecessor may have left.
        InheritedForgotten = "inherited-forgotten",
        /// A volume is promoted although no virtual machine uses it any more.
        ClaimKept = "claim-kept",
        /// Losses between the attach on a new host and the guest's first flush there are ignored.
        ArrivalForgotten = "arrival-forgotten",
        /// The epoch saved for a successor advances before a loss is reported.
        KeptLifeEarly = "kept-life-early",
        /// The window of a read stays open after the read has ended.
        ReadWindowKept = "read-window-kept",
        /// The data of a read into several pieces of memory stays in the device's bounce memory.
        ReadNotCollected = "read-not-collected",
        /// A read ends before its window is confirmed to be closed.
        RevokeNotAwaited = "revoke-not-awaited",
        /// A volume's number is reused while its requests are in flight.
        VolumeFreedEarly = "volume-freed-early",
        /// IO keeps failing after a path is up again.
        StaysGivenUp = "stays-given-up",
        /// The new key of a chunk is not taken from the answer.
        FreshKeyDropped = "fresh-key-dropped",
        /// The client does not close silent paths.
        ClientKeepsSilent = "client-keeps-silent",
        /// An IO of several requests ends with its first request.
        FirstRequestEnds = "first-request-ends",
        /// An IO of several requests succeeds although one failed.
        RequestErrorDropped = "request-error-dropped",
        /// The client does not request FUA.
        FuaUnasked = "fua-unasked",
        /// A dead path that carried IO is not recorded for fencing.
        LostUnnoted = "lost-unnoted",
        /// The front end drops FUA.
        NbdFuaDropped = "nbd-fua-dropped",
        /// The front end answers a flush without flushing the device.
        NbdFlushSkipped = "nbd-flush-skipped",
        /// The front end reports success for a request that its device failed.
        NbdErrorDropped = "nbd-error-dropped",
        /// The front end reuses the memory of a write while the device still uses it.
        NbdMemoryReusedEarly = "nbd-memory-reused-early",
        /// The front end answers a request when its first IO has ended.
        NbdFirstPartAnswers = "nbd-first-part-answers",
        /// The front end submits requests that overlap a write left by a closed connection.
        NbdOrphanForgotten = "nbd-orphan-forgotten",
        /// Changes to one block run concurrently, in the front end or on the server.
        NbdTurnsSkipped = "nbd-turns-skipped",
        /// The front end rewrites whole blocks although the server accepts partial writes.
        PartialByClient = "partial-by-client",
        /// A partial write does not wait for its turn.
        PartialWithoutTurn = "partial-without-turn",
        /// The front end submits requests that overlap an abandoned change.
        SlowIoRangeDropped = "slow-io-range-dropped",
        /// The front end treats flushes that arrived before a loss was reported like later ones.
        NbdBacklogForgotten = "nbd-backlog-forgotten",
        /// A session's write zeroes requests do not count as unflushed.
        ZeroesNotCounted = "zeroes-not-counted",
        /// A session's discards do not count as unflushed.
        DiscardNotCounted = "discard-not-counted",
        /// The client does not count zeroes and discards as changes that the server may lose.
        ZeroesUnwatched = "zeroes-unwatched",
        /// Zeroes and discards with PREFLUSH are not preceded by a flush.
        PreflushOfZeroesDropped = "preflush-of-zeroes-dropped",
        /// A failed sync is forgotten once it has been answered.
        SyncFailureForgotten = "sync-failure-forgotten",
        /// An epoch that could not be saved counts as saved.
        FailedSaveCounts = "failed-save-counts",
        /// A session may keep using its export after the export is removed.
        RemovedServed = "removed-served",
        /// A session opens a new export with the name of its removed one.
        RemovedReopened = "removed-reopened",
        /// A client does not stop after its export is removed.
        RemovedIgnored = "removed-ignored",
        /// A path that leads to another server's disk is used.
        OtherDiskAccepted = "other-disk-accepted",
        /// A path is used although its server reports IDs that a connected path did not report.
        NewIdBeside = "new-id-beside",
        /// A path is used although its export ID is from another boot than a connected path's.
        OtherBootBeside = "other-boot-beside",
        /// The server does not notify clients that the size of an export has changed.
        ResizeUnannounced = "resize-unannounced",
        /// The client does not announce that a path returns to frequent heartbeats.
        IdleKept = "idle-kept",
        /// An idle session is not probed when another client requests its export.
        IdleSessionUnprobed = "idle-session-unprobed",
        /// The client does not reopen a device whose size has changed.
        ResizeUnheard = "resize-unheard",
    }
    /// Rules of the front end for virtual machines, which `rtrs-sim` disables in runs with a
    /// machine.
    MACHINES {
        /// The record of a request is cleared before the answer enters the ring.
        VhostClearedEarly = "vhost-cleared-early",
        /// A request is submitted without a record.
        VhostUnrecorded = "vhost-unrecorded",
        /// The record does not name the request that is answered next.
        VhostLastUnrecorded = "vhost-last-unrecorded",
        /// A request is repeated although the dead process has answered it.
        VhostAnsweredAgain = "vhost-answered-again",
        /// The record of a new ring begins at index 0, wherever the ring begins.
        VhostFreshAtZero = "vhost-fresh-at-zero",
        /// Requests of a dead process are repeated by descriptor, not by age.
        VhostRepeatedUnordered = "vhost-repeated-unordered",
        /// Requests of a dead process are not repeated.
        VhostLeftForgotten = "vhost-left-forgotten",
        /// A ring with a record continues at the index that the monitor passes.
        VhostBaseTrusted = "vhost-base-trusted",
        /// The driver is not called after a restart, although the dead process may not have called.
        VhostCallForgotten = "vhost-call-forgotten",
        /// An answer enters the ring before the status is in memory.
        VhostStatusLate = "vhost-status-late",
        /// A read is answered without its data.
        VhostReadUnplaced = "vhost-read-unplaced",
        /// A flush is answered without flushing the device.
        VhostFlushSkipped = "vhost-flush-skipped",
        /// A failed request is answered with success.
        VhostErrorDropped = "vhost-error-dropped",
        /// Changes of a guest without a write cache are not durable.
        VhostThroughDropped = "vhost-through-dropped",
        /// No flush follows a durable change of a device without FUA.
        VhostPostflushDropped = "vhost-postflush-dropped",
        /// Flushes that were offered before a loss was reported are treated like later ones.
        VhostBacklogForgotten = "vhost-backlog-forgotten",
        /// The next process does not learn that the guest has turned off its write cache.
        VhostModeForgotten = "vhost-mode-forgotten",
    }
    /// Rules of gateways, which `tests/sim/gateways` disables.
    GATEWAYS {
        /// A standby gateway receives IO like the active one.
        StandbyServes = "standby-serves",
    }
    /// Rules of access rights, shares and extents, which the tests of `rtrs-server` disable.
    SERVER {
        /// A new configuration takes effect before the exports match it.
        ReloadGrantsFirst = "reload-grants-first",
        /// The control shard handles an unlimited number of client requests in one turn.
        ControlUnbounded = "control-unbounded",
        /// A session may connect any number of paths, regardless of their cost.
        PathsUnbounded = "paths-unbounded",
        /// An extent list is used after a change has begun.
        ExtentsKept = "extents-kept",
        /// An extent list is kept although a change was in flight when its search began.
        ExtentsBesideChange = "extents-beside-change",
    }
    /// Rules of RDS nodes, which `rds/tests/system/sim` disables.
    RDS {
        /// A message counts as acknowledged once it is written.
        RdsAckEarly = "rds-ack-early",
        /// A peer's system acknowledges messages for a node that has not accepted the connection.
        RdsAckUnaccepted = "rds-ack-unaccepted",
        /// A lost message is resent without being marked as a repeat.
        RdsRepeatUnmarked = "rds-repeat-unmarked",
        /// A message that has already arrived is delivered again.
        RdsDuplicateAccepted = "rds-duplicate-accepted",
        /// A lost message is queued behind waiting ones.
        RdsLostQueuedLast = "rds-lost-queued-last",
        /// A new connection does not begin with the congestion map.
        RdsMapForgotten = "rds-map-forgotten",
        /// Peers do not receive the congestion map when it changes.
        RdsMapUnsent = "rds-map-unsent",
        /// A probe is sent before resent messages.
        RdsProbeFirst = "rds-probe-first",
        /// Messages are sent although the first probe is not acknowledged.
        RdsProbeNotAwaited = "rds-probe-not-awaited",
        /// Messages do not wait for the map that identifies the run of the peer.
        RdsMapNotAwaited = "rds-map-not-awaited",
        /// A message that may have reached one run of a peer is resent to the next run.
        RdsRestartIgnored = "rds-restart-ignored",
        /// A new connection is read before the rest of its predecessor.
        RdsPredecessorSkipped = "rds-predecessor-skipped",
        /// An accepted connection is replaced by the next one before it is read.
        RdsCandidateUnread = "rds-candidate-unread",
        /// A larger peer's request for a connection is ignored.
        RdsConnectRequestIgnored = "rds-connect-request-ignored",
        /// A socket that was full is not notified that it may send again.
        RdsSpaceUnannounced = "rds-space-unannounced",
        /// Users are not notified that a port is no longer congested.
        RdsClearUnannounced = "rds-clear-unannounced",
        /// The partial message of a lost connection stays counted forever.
        RdsPartKept = "rds-part-kept",
        /// An accepted connection does not take over when its predecessor ends.
        RdsCandidateForgotten = "rds-candidate-forgotten",
    }
}

/// Evaluates to true while this rule is disabled. Write `rtrs_base::mutated!(Variant)` on the line
/// that enforces the rule.
#[macro_export]
macro_rules! mutated {
    ($variant:ident) => {
        $crate::mutant::is_chosen($crate::mutant::Mutant::$variant)
    };
}

#[cfg(all(feature = "mutants", debug_assertions))]
thread_local! {
    static CHOSEN: std::cell::Cell<Option<Mutant>> = const { std::cell::Cell::new(None) };
}

/// Returns true if this thread runs with this mutant.
#[cfg(all(feature = "mutants", debug_assertions))]
pub fn is_chosen(mutant: Mutant) -> bool {
    CHOSEN.get() == Some(mutant)
}

/// Returns false: this build has no mutants.
#[cfg(not(all(feature = "mutants", debug_assertions)))]
#[inline(always)]
pub const fn is_chosen(_: Mutant) -> bool {
    false
}

/// Makes this thread run with this mutant, or with none. Returns false if this build has no
/// mutants.
#[cfg(feature = "mutants")]
pub fn choose(mutant: Option<Mutant>) -> bool {
    #[cfg(debug_assertions)]
    CHOSEN.set(mutant);
    cfg!(debug_assertions) || mutant.is_none()
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mutant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::EVERY.iter().copied().find(|mutant| mutant.name() == text);
        found.ok_or_else(|| format!("unknown mutant '{text}'; see `rtrs-sim --mutants list`"))
    }
}

#[cfg(test)]
mod tests {
    use super::Mutant;

    #[test]
    fn names_are_distinct_and_no_mutant_is_chosen() {
        for (at, mutant) in Mutant::EVERY.iter().enumerate() {
            assert_eq!(mutant.name().parse(), Ok(*mutant));
            assert!(!mutant.rule().is_empty() && !super::is_chosen(*mutant));
            assert!(Mutant::EVERY[..at].iter().all(|other| other.name() != mutant.name()));
        }
        assert!("none-such".parse::<Mutant>().is_err());
    }
}
