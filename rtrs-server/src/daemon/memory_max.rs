//! The memory limit for chunks: as configured, or derived from the host's memory.

use std::fs;

use rtrs_core::limits::Limits;
use rtrs_core::settings::{Auto, ByteSize};

use crate::path::chunks::ChunkPool;
use crate::settings::Settings;

/// File with the system's memory size.
const MEMINFO: &str = "/proc/meminfo";

/// Returns the limit in bytes. Logs a warning if the chunks of one path do not fit.
pub(super) fn of(set: &Settings, limits: Limits) -> u64 {
    let path = ChunkPool::bytes(limits) as u64;
    match set.memory_max {
        Auto::Is(size) => {
            let max = size.bytes();
            if max < path {
                tracing::warn!(
                    "memory-max {size} is less than the chunks of one path ({}): every session \
                     gets a smaller queue depth, and clients that do not support this, such as the \
                     kernel's, are refused; raise memory-max, or lower queue-depth or chunk-size",
                    ByteSize::new(path)
                );
            }
            max
        }
        Auto::Auto => {
            let text = fs::read_to_string(MEMINFO).unwrap_or_default();
            let Some(total) = total_bytes(&text) else {
                tracing::warn!(
                    "cannot read the size of memory from {MEMINFO}; running without memory-max"
                );
                return u64::MAX;
            };
            (2 * path).max(total / 4)
        }
    }
}

/// Total memory of the host according to `/proc/meminfo` (proc(5)).
fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_a_quarter_of_the_host() {
        assert_eq!(
            total_bytes("MemFree: 5 kB\nMemTotal:       24562648 kB\n"),
            Some(25_152_151_552)
        );
        for other in ["", "MemTotal: much kB", "MemTotal: 5", "MemTotal: 99999999999999999999 kB"] {
            assert_eq!(total_bytes(other), None, "{other}");
        }
        let own = total_bytes(&fs::read_to_string(MEMINFO).unwrap()).unwrap();
        let of = |yaml: &str, limits| of(&Settings::from_yaml(yaml, "test").unwrap(), limits);
        assert_eq!(of("", Limits::new(1, 8192).unwrap()), own / 4);
        assert_eq!(of("memory-max: 5M\n", Limits::DEFAULT), 5 << 20);
    }
}
