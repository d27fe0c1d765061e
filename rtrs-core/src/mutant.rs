//! Safety rules that a test can disable in the real code, one at a time.
//!
//! A checker that has never seen a rule broken proves little. So each rule that prevents data loss
//! has a *mutant*: a condition `rtrs_core::mutated!(Name)` in the line that enforces the rule. It
//! is constantly false and costs nothing unless the feature `mutants` and debug assertions are
//! enabled. `rtrs-sim --mutants` enables one after the other and shows that the simulator detects
//! each (docs/explanation/simulator.md). The choice is per thread, so that concurrent tests do not
//! affect each other. Builds of the `release` profile have no mutants, whatever features they have.

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
    /// Those of RTRS and NBD, which `rtrs-sim` takes out.
    ALL {
        /// The server lets a second session write to an export.
        SecondWriter = "second-writer",
        /// CLOSE is answered, and the export given back, while requests of the session run there.
        CloseWhileBusy = "close-while-busy",
        /// PREFLUSH of a write is not done.
        PreflushDropped = "preflush-dropped",
        /// FUA on a device without FUA is not followed by a flush.
        PostflushDropped = "postflush-dropped",
        /// FUA is not handed to the device.
        FuaDropped = "fua-dropped",
        /// A request that is sent again does not wait for the permit of its first copy.
        ReplayWithoutPermit = "replay-without-permit",
        /// A change does not wait for what a closed path has left running in its place.
        DeferredBegins = "deferred-begins",
        /// Of what a closed path has left running only changes of the same first byte wait.
        DeferredByStart = "deferred-by-start",
        /// A session that has ended gives its exports back while its block IO runs.
        SessionGoneEarly = "session-gone-early",
        /// FENCE is answered while shards still serve the path.
        FenceBeforeStopped = "fence-before-stopped",
        /// FENCE is answered and the path goes on.
        FenceWithoutEnd = "fence-without-end",
        /// FENCE is answered by a process that knows nothing of the path, at a disk without a lock.
        ForeignFenceAnswered = "foreign-fence-answered",
        /// A path that its client says is dead is not replaced.
        OldPathKept = "old-path-kept",
        /// A request of several parts is answered after the first.
        FirstPartAnswers = "first-part-answers",
        /// A request is answered well although its device failed.
        DeviceErrorDropped = "device-error-dropped",
        /// The server does not say in which epoch its cache is.
        CacheLifeUnsaid = "cache-life-unsaid",
        /// The server does not end paths that are silent.
        ServerKeepsSilent = "server-keeps-silent",
        /// The server keeps connections whose handshake does not go on.
        HandshakeKept = "handshake-kept",
        /// A session that has ended keeps its exports.
        ExportKept = "export-kept",
        /// A flush is answered without the device.
        FlushSkipped = "flush-skipped",
        /// A read is answered without its data.
        ReadUnsent = "read-unsent",
        /// A request is sent again before its path is fenced off.
        ResendBeforeFence = "resend-before-fence",
        /// A path carries IO before those that died are fenced off.
        UpBeforeFence = "up-before-fence",
        /// An IO ends with an error before the path that it was sent on is fenced off.
        GivenUpBeforeFence = "given-up-before-fence",
        /// The shards of a client use the same permits.
        PermitsShared = "permits-shared",
        /// A flush covers what was acknowledged after it was sent.
        FlushCoversLater = "flush-covers-later",
        /// An answer out of another epoch of the server's cache counts for this one.
        OldLifeAnswer = "old-life-answer",
        /// A flush that the server answers with some errors reports nothing to other users.
        FlushErrorByKind = "flush-error-by-kind",
        /// A loss is not reported by flushes.
        LossUnsaid = "loss-unsaid",
        /// Of flushes beside each other one reports a loss and the others succeed.
        LossSaidOnce = "loss-said-once",
        /// A loss between the parts of an IO is not reported after the IO's end.
        PartLossForgotten = "part-loss-forgotten",
        /// Who takes over does not count what the one before may have left.
        InheritedForgotten = "inherited-forgotten",
        /// The epoch that is kept for a successor moves on before a loss was reported.
        KeptLifeEarly = "kept-life-early",
        /// The window of a read stays open when the read has ended.
        ReadWindowKept = "read-window-kept",
        /// A read ends before its window is known to be closed.
        RevokeNotAwaited = "revoke-not-awaited",
        /// A volume's number is free while requests of it are under way.
        VolumeFreedEarly = "volume-freed-early",
        /// IO goes on ending with errors when a path is up again.
        StaysGivenUp = "stays-given-up",
        /// The fresh key of a chunk is not taken from the answer.
        FreshKeyDropped = "fresh-key-dropped",
        /// The client does not end paths that are silent.
        ClientKeepsSilent = "client-keeps-silent",
        /// An IO of several requests ends with the first.
        FirstRequestEnds = "first-request-ends",
        /// An IO of several requests ends well although one failed.
        RequestErrorDropped = "request-error-dropped",
        /// The client does not ask for FUA.
        FuaUnasked = "fua-unasked",
        /// A dead path that carried IO is not noted as one to fence off.
        LostUnnoted = "lost-unnoted",
        /// The front end drops FUA.
        NbdFuaDropped = "nbd-fua-dropped",
        /// The front end answers a flush without the device.
        NbdFlushSkipped = "nbd-flush-skipped",
        /// The front end reports success for what its device failed.
        NbdErrorDropped = "nbd-error-dropped",
        /// The front end uses the memory of a write anew while the device has it.
        NbdMemoryEarly = "nbd-memory-early",
        /// The front end answers when the first IO of a request has ended.
        NbdFirstPart = "nbd-first-part",
        /// The front end hands on what overlaps a write that a closed connection has left.
        NbdOrphanForgotten = "nbd-orphan-forgotten",
        /// Changes of one block do not take turns, at the front end or the server.
        NbdTurnsSkipped = "nbd-turns-skipped",
        /// The front end reads and writes a block although the server takes partial writes.
        PartialByClient = "partial-by-client",
        /// A partial write does not wait for its turn.
        PartialWithoutTurn = "partial-without-turn",
        /// The front end hands on what overlaps a change that was given up and may still land.
        SlowIoRangeDropped = "slow-io-range-dropped",
        /// The front end takes flushes that came before a loss was reported for ones that came
        /// after.
        NbdBacklogForgotten = "nbd-backlog-forgotten",
        /// Zeroes of a session do not count among what it has to flush.
        ZeroesNotCounted = "zeroes-not-counted",
        /// Discards of a session do not count among what it has to flush.
        DiscardNotCounted = "discard-not-counted",
        /// The client does not count zeroes and discards among what the server may lose.
        ZeroesUnwatched = "zeroes-unwatched",
        /// PREFLUSH of zeroes and discards is not done.
        PreflushOfZeroesDropped = "preflush-of-zeroes-dropped",
        /// A sync that failed is forgotten when it was answered.
        SyncFailureForgotten = "sync-failure-forgotten",
        /// An epoch that could not be written counts as saved.
        FailedSaveCounts = "failed-save-counts",
        /// A session may go on using an export that was removed under it.
        RemovedServed = "removed-served",
        /// A session opens what has the name of an export that was removed under it.
        RemovedReopened = "removed-reopened",
        /// A client does not end when its export was removed.
        RemovedIgnored = "removed-ignored",
        /// A path is used that leads to another server's disk.
        OtherDiskAccepted = "other-disk-accepted",
        /// A path is used that meets ids which a path that is connected did not say.
        NewIdBeside = "new-id-beside",
        /// A path is used that meets an export's id of another boot than a path that is connected.
        OtherBootBeside = "other-boot-beside",
        /// The server does not notify clients that an export has another size.
        ResizeUnsaid = "resize-unsaid",
        /// The client does not announce that the heartbeats of a path are not rare any more.
        IdleKept = "idle-kept",
        /// An idle session is not asked for its life when another client wants what it has.
        IdleUnhurried = "idle-unhurried",
        /// The client does not open a device again that has another size.
        ResizeUnheard = "resize-unheard",
    }
    /// Those of gateways, which `tests/sim/gateways` takes out.
    GATEWAYS {
        /// A standby gateway is given IO as if it were active.
        StandbyServes = "standby-serves",
    }
    /// Those of access rights and shares, which the tests of `rtrs-server` take out.
    SERVER {
        /// A configuration counts before the exports are as it says.
        ReloadGrantsFirst = "reload-grants-first",
        /// All that clients ask of the control shard is done within a turn.
        ControlUnbounded = "control-unbounded",
        /// A session connects as many paths as it likes, whatever they take.
        PathsUnbounded = "paths-unbounded",
    }
    /// Those of RDS nodes, which `tests/rds/sim` takes out.
    RDS {
        /// A message is taken for acknowledged when it is written.
        RdsAckEarly = "rds-ack-early",
        /// The system of a peer acknowledges for a node that has not taken the connection.
        RdsAckUntaken = "rds-ack-untaken",
        /// What was lost is sent again without the mark of a repeat.
        RdsRepeatUnmarked = "rds-repeat-unmarked",
        /// What has arrived before is taken again.
        RdsOldTaken = "rds-old-taken",
        /// What was lost goes behind what waits.
        RdsLostBehind = "rds-lost-behind",
        /// A new connection does not begin with the map.
        RdsMapForgotten = "rds-map-forgotten",
        /// Peers do not get the map when it changes.
        RdsMapUnsent = "rds-map-unsent",
        /// A probe goes in front of what is sent again.
        RdsProbeFirst = "rds-probe-first",
        /// Messages follow a first probe that is not acknowledged.
        RdsUnsynced = "rds-unsynced",
        /// Messages do not wait for the map that says of which run the peer is.
        RdsUnheld = "rds-unheld",
        /// What may have reached the run of a peer before is sent to the next one.
        RdsRestartIgnored = "rds-restart-ignored",
        /// A new connection is read before what is left of the former one.
        RdsPredecessorSkipped = "rds-predecessor-skipped",
        /// An accepted connection is replaced by the next one before it is read.
        RdsCandidateUnread = "rds-candidate-unread",
        /// A larger peer that asks for a connection gets none.
        RdsKickIgnored = "rds-kick-ignored",
        /// A socket that was full is not notified that it may send.
        RdsRefusedUnanswered = "rds-refused-unanswered",
        /// Users are not notified that a port is not congested any more.
        RdsClearedUnanswered = "rds-cleared-unanswered",
        /// What a lost connection held of an unfinished message counts for ever.
        RdsPartKept = "rds-part-kept",
        /// An accepted connection does not take over when the former one ends.
        RdsCandidateForgotten = "rds-candidate-forgotten",
    }
}

/// True while this rule is disabled. Write `rtrs_core::mutated!(Variant)` in the line that enforces
/// it.
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

/// Returns true if this thread runs with that mutant.
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

/// Makes this thread run with a mutant, or with none. Returns false if this build has no mutants.
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
        let all = Self::ALL.iter().chain(Self::SERVER).chain(Self::RDS);
        let found = all.copied().find(|mutant| mutant.name() == text);
        found.ok_or_else(|| format!("no mutant is called '{text}'; `rtrs-sim --mutants list`"))
    }
}

#[cfg(test)]
mod tests {
    use super::Mutant;

    #[test]
    fn names_are_distinct_and_nothing_is_chosen() {
        let all = [Mutant::ALL, Mutant::SERVER, Mutant::RDS].concat();
        for (at, mutant) in all.iter().enumerate() {
            assert_eq!(mutant.name().parse(), Ok(*mutant));
            assert!(!mutant.rule().is_empty() && !super::is_chosen(*mutant));
            assert!(all[..at].iter().all(|other| other.name() != mutant.name()));
        }
        assert!("none-such".parse::<Mutant>().is_err());
    }
}
