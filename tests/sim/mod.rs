//! Simulator: the real client and server engines over the simulated fabric, driven by one seed.
//!
//! One thread runs everything on one virtual clock. The seed determines the shape of the cluster,
//! the workload, the faults and every delay; the same seed gives the same run, byte for byte. It is
//! used by `rtrs-sim` and the test binary `sim`.
//!
//! `options.rs` settings drawn from a seed · `cluster.rs` cores, world and clock · `host.rs` one
//! core · `port.rs` the fabric as the engines see it, with its faults · `disk.rs` the backend ·
//! `epochs.rs` the server's state directory · `workload.rs` users of the device · `buffers.rs`
//! their memory · `nbd.rs` their front end · `oracle.rs` legal results of reads · `faults.rs` plan
//! of faults · `held.rs` a write held by its disk · `away.rs` a client that returns after another
//! writer · `moving.rs` a virtual machine that moves to a new host · `idle.rs` events after idle
//! minutes · `shares.rs` shares of equal paths after a stall · `machine/` a virtual machine and the
//! front end for it · `proofs.rs` clients that prove their identity, and an intruder, with
//! `crowd.rs` · `gateways/` two servers over one store · `run.rs` one run from attach to detach ·
//! `log.rs` event log · `plant.rs` planted bugs · `mutants.rs` engines with a rule removed.

mod away;
mod buffers;
mod cluster;
mod crowd;
mod disk;
mod epochs;
mod faults;
mod fixed;
mod gateways;
mod held;
mod host;
mod idle;
mod log;
mod machine;
mod moving;
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

pub use away::{Memory, run_away};
pub use fixed::run_fixed;
pub use gateways::{Counts, GatewayPlant, run_gateways};
pub use held::run_held;
pub use idle::run_idle;
pub use log::Sink;
pub use moving::run_moving;
pub use mutants::{Caught, Scenario, Scene, Verdict, hunt, keep_panics};
pub use options::Options;
pub use plant::Plant;
pub use proofs::{Proofs, run_proofs};
pub use run::{Outcome, Stats, run, run_machine, run_with};
pub use shares::run_shares;

/// Violation found by a checker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the checker: `blocks`, `buffers`, `durable`, `once`, `errors`, `home`, `memory`,
    /// `live` or `share`.
    pub checker: &'static str,
    /// Description of the violation.
    pub text: String,
}

/// Returns seeds that once failed, each with its reason.
pub fn kept_seeds() -> Vec<(u64, &'static str)> {
    parse_seeds(include_str!("seeds.txt"))
}

/// Parses a seed and a remark from each line, skipping empty lines and those that begin with `#`.
///
/// # Panics
/// Panics if a line has a different form.
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
    fn saved_seeds_are_read() {
        let parsed = parse_seeds("# a\n\n12 what  went wrong\n 13\n");
        assert_eq!(parsed, [(12, "what  went wrong"), (13, "")]);
        assert!(kept_seeds().iter().all(|(_, remark)| !remark.is_empty()), "remarks are missing");
    }
}
