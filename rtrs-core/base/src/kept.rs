//! Writer that keeps its output in memory.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;

/// Everything written so far, shared by all clones.
#[derive(Clone, Debug, Default)]
pub struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    /// Returns the output as text, with invalid UTF-8 replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
