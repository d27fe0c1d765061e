//! Settings of a volume to be opened.

use std::sync::{Mutex, PoisonError};

use rtrs::Builder;

/// `rtrs_options`.
#[derive(Debug)]
pub(crate) struct COptions(Mutex<Builder>);

impl COptions {
    pub(crate) fn new(builder: Builder) -> Self {
        Self(Mutex::new(builder))
    }

    pub(crate) fn set(&self, name: &str, value: &str) {
        let mut builder = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *builder = builder.clone().set(name, value);
    }

    pub(crate) fn builder(&self) -> Builder {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
