//! The atomics of protocols that loom checks: those of `std`, and under `--cfg loom` loom's.
//!
//! Loom runs a few threads in every interleaving and lets loads return every value that the memory
//! model allows. It does not know the single order of `SeqCst` accesses: it treats them as acquire
//! and release. The models stand beside the code, in modules named `loom_model`;
//! `scripts/loom.sh` runs them (docs/TESTING.md).

#[cfg(not(loom))]
pub use std::sync::atomic;

#[cfg(loom)]
pub use loom::sync::atomic;

/// Runs a model in every interleaving with at most three preemptions, or as many as
/// `LOOM_MAX_PREEMPTIONS` says. Switches where a thread ends or waits are not counted.
#[cfg(loom)]
pub fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(3);
    builder.check(run);
}
