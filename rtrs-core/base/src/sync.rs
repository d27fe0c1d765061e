//! Atomics and locks for the algorithms that loom checks: those of `std` and `parking_lot`, or
//! loom's under `--cfg loom`.
//!
//! Loom runs a few threads in every interleaving and lets loads return every value that the memory
//! model allows. It does not model the single total order of `SeqCst` accesses: it treats them as
//! acquire and release. The models are next to the code, in modules named `loom_model`;
//! `scripts/loom.sh` runs them (docs/explanation/testing.md).

#[cfg(not(loom))]
pub use std::sync::atomic;

#[cfg(loom)]
pub use loom::sync::atomic;

#[cfg(not(loom))]
pub use parking_lot::{Mutex, RwLock};

#[cfg(loom)]
pub use locks::{Mutex, RwLock};

/// Loom's locks with the methods of `parking_lot`. A panic ends the model, so no lock is ever
/// poisoned.
#[cfg(loom)]
mod locks {
    use loom::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    #[derive(Debug)]
    pub struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap()
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap()
        }
    }
}

/// Runs a model in every interleaving with at most three preemptions, or with
/// `LOOM_MAX_PREEMPTIONS` preemptions. Switches where a thread ends or waits do not count.
#[cfg(loom)]
pub fn model(run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(3);
    builder.check(run);
}
