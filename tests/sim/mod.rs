//! The simulator: the real machines of client and server over the simulated fabric, one seed.
//!
//! One thread, one virtual clock. From the seed follow the shape of the cluster, the workload,
//! the faults and every delay; the same seed gives the same run, byte for byte. Called by
//! `rtrs-sim` and by the test binary `sim`.
//!
//! `options.rs` what a seed draws · `cluster.rs` cores, world and clock · `host.rs` one core ·
//! `port.rs` the fabric as the machines see it, with its faults · `disk.rs` the backend ·
//! `epochs.rs` the server's state directory · `workload.rs` who uses the device · `buffers.rs` its
//! memory · `nbd.rs` the front end between · `oracle.rs` what reads may return · `faults.rs` what
//! breaks and when · `held.rs` a write that its disk holds up · `idle.rs` what happens after idle
//! minutes · `shares.rs` what equal paths carry after a stall · `proofs.rs` clients that prove who
//! they are, and an intruder, with `crowd.rs` · `gateways/` two servers over one store · `run.rs`
//! one run from attach to detach · `log.rs` what happened · `plant.rs` bugs that must be caught ·
//! `mutants.rs` rules of the machines taken out.

mod buffers;
mod cluster;
mod crowd;
mod disk;
mod epochs;
mod faults;
mod gateways;
mod held;
mod host;
mod idle;
mod log;
mod mutants;
mod nbd;
mod options;
mod oracle;
mod plant;
mod port;
mod proofs;
mod run;
mod shares;
mod workload;

pub use gateways::{Counts, GatewayPlant, run_gateways};
pub use held::run_held;
pub use idle::run_idle;
pub use log::Sink;
pub use mutants::{Caught, Scenario, Scene, Verdict, hunt, keep_panics};
pub use options::Options;
pub use plant::Plant;
pub use proofs::{Proofs, run_proofs};
pub use run::{Outcome, Stats, run, run_with};
pub use shares::run_shares;

/// What a checker found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which checker: `blocks`, `buffers`, `durable`, `once`, `errors`, `home`, `memory`, `live` or
    /// `share`.
    pub checker: &'static str,
    /// What it saw.
    pub text: String,
}

/// Seeds that failed once, with what went wrong.
pub fn kept_seeds() -> Vec<(u64, &'static str)> {
    parse_seeds(include_str!("seeds.txt"))
}

/// A seed and a remark on each line; empty lines and those that begin with `#` are left out.
///
/// # Panics
/// When a line is neither.
fn parse_seeds(text: &'static str) -> Vec<(u64, &'static str)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (seed, remark) = line.split_once(' ').unwrap_or((line, ""));
            match seed.parse() {
                Ok(seed) => (seed, remark.trim()),
                Err(_) => panic!("seeds.txt: '{line}' does not begin with a seed"),
            }
        })
        .collect()
}

impl Failure {
    fn new(checker: &'static str, text: impl Into<String>) -> Self {
        Self { checker, text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::{kept_seeds, parse_seeds};

    #[test]
    fn kept_seeds_are_read() {
        let parsed = parse_seeds("# a\n\n12 what  went wrong\n 13\n");
        assert_eq!(parsed, [(12, "what  went wrong"), (13, "")]);
        assert!(kept_seeds().iter().all(|(_, remark)| !remark.is_empty()), "remarks are missing");
    }
}
