//! Identities that servers report, in half of the runs with other servers: some servers report only
//! one of the two IDs, or neither, as kernel servers and our earlier versions do.
//!
//! Drawn by a separate generator, so that other runs do not change.

use rtrs_core::identity::{Comparison, ExportId, Identity, ServerId};
use rtrs_core::prng::{Prng, Ratio};

use super::{FaultMix, MS, Options, half, pick};

// Chosen so that seeds kept because they found bugs still produce the same runs.
const IDS: u64 = 0x7361_7973_5f69_647d;

/// Identity that the session's server reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportedIds {
    /// No IDs, like a kernel server.
    Nothing,
    /// Its server ID, but no export ID.
    Server,
    /// Its server ID, and an export ID that is valid for this boot of its host.
    Weak(u64),
    /// Its server ID, and a persistent export ID.
    All,
}

impl ReportedIds {
    /// Returns the reported IDs.
    pub(in super::super) fn identity(self) -> Identity {
        let (server, export) = home();
        match self {
            Self::Nothing => Identity::default(),
            Self::Server => Identity { server, export: None },
            Self::Weak(boot) => Identity { server, export: weak(boot, "vol") },
            Self::All => Identity { server, export },
        }
    }
}

fn home() -> (Option<ServerId>, Option<ExportId>) {
    (Some(ServerId::of_name("home")), Some(ExportId::of_name("vol")))
}

fn weak(boot: u64, name: &str) -> Option<ExportId> {
    Some(ExportId::weak(boot, "sim", &[name.as_bytes()]))
}

/// Identities reported in a run.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// Identity of the session's server in each third of the time under load; the server is
    /// restarted when it changes.
    pub home: [ReportedIds; 3],
}

impl Ids {
    /// Whether the session knows too little at first to refuse another server when that is the only
    /// one: it might be the session's own after an upgrade, or after another boot. In that case,
    /// another path to the session's own server must be connected while others answer.
    pub(in super::super) fn is_beside(self) -> bool {
        self.home[0] != ReportedIds::All
    }
}

/// Evidence by which a session recognizes that a server is not its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Evidence {
    /// The identity that the session knows.
    Known,
    /// A connected path to its own server, which reported a different identity.
    Beside,
}

/// Returns how a session knowing `known` distinguishes a server that reports `other` from its own,
/// or None if it cannot.
fn evidence(known: Identity, other: Identity) -> Option<Evidence> {
    let server = known.server.is_some_and(|known| other.server != Some(known));
    let export = known.export.is_some_and(|known| {
        other.export.is_none_or(|other| known.compare(other) == Comparison::Different)
    });
    if server || export {
        return Some(Evidence::Known);
    }
    (other != known).then_some(Evidence::Beside)
}

/// Returns the identities of other servers that a session knowing `known` detects in this way. If
/// both servers report nothing or the same IDs, only the shape of the device could distinguish
/// them, and that is the same here, so such servers are not drawn.
pub(in super::super) fn other_identities(known: Identity, by: Evidence) -> Vec<Identity> {
    let (server, export) = home();
    let servers = [None, server, Some(ServerId::of_name("other"))];
    let other = Some(ExportId::of_name("other"));
    let exports = [None, export, other, weak(1, "vol"), weak(2, "other"), weak(7, "vol")];
    let all = servers
        .into_iter()
        .flat_map(|server| exports.into_iter().map(move |export| Identity { server, export }));
    all.filter(|&other| evidence(known, other) == Some(by)).collect()
}

impl Options {
    /// Draws the reported identities.
    pub(super) fn draw_ids(&mut self) {
        let own = &mut Prng::new(self.seed ^ IDS);
        if !half(own) {
            return;
        }
        use ReportedIds::{All, Nothing, Server, Weak};
        let less = pick(own, &[Nothing, Server, Weak(1)]);
        let home = match own.below(8) {
            // Only the others report less.
            0 => [All; 3],
            // An operator starts an earlier version and then goes back.
            1 => [All, less, All],
            _ if self.paths == 1 => [All, less, All],
            2..=4 => [less; 3],
            // An upgrade, or a reboot of the server's host.
            _ => {
                let pairs = [(Nothing, Server), (Nothing, All), (Server, All), (Weak(1), Weak(2))];
                let (first, then) = pick(own, &pairs);
                [first, then, then]
            }
        };
        let ids = Ids { home };
        if ids.is_beside() {
            self.keep_first_path(own);
        }
        self.extra.ids = Some(ids);
    }

    /// Excludes faults that could end the first path, and makes the end of other paths likely.
    fn keep_first_path(&mut self, prng: &mut Prng) {
        self.faults = FaultMix {
            gap_max: pick(prng, &[50, 100, 200]) * MS,
            lasts_max: pick(prng, &[20, 200]) * MS,
            link_down: 3,
            silence: 1,
            blackhole: pick(prng, &[0, 2]),
            slow_path: pick(prng, &[0, 1]),
            spare: true,
            ..FaultMix::NONE
        };
        (self.takeover, self.pinned, self.world.link.bandwidth) = (None, None, None);
        self.server_message_max = self.server_message_max.min(3 * MS);
        let disk = &mut self.disk;
        (disk.slow_max, disk.stuck) = (disk.slow_max.min(50 * MS), Ratio::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::{Evidence, Identity, ReportedIds, other_identities};

    /// Each kind of server can be distinguished from others, and no session has to distinguish
    /// servers that report the same IDs.
    #[test]
    fn other_identities_are_distinguishable() {
        for reported in
            [ReportedIds::Nothing, ReportedIds::Server, ReportedIds::Weak(1), ReportedIds::All]
        {
            let known = reported.identity();
            let counts =
                [Evidence::Known, Evidence::Beside].map(|by| other_identities(known, by).len());
            assert_eq!(counts[0] > 0, reported != ReportedIds::Nothing, "{reported:?}");
            assert_eq!(counts[1] > 0, reported != ReportedIds::All, "{reported:?}");
            assert_eq!(counts[0] + counts[1], 17, "{reported:?}");
            assert!(!other_identities(known, Evidence::Known).contains(&known));
        }
        assert!(
            other_identities(ReportedIds::All.identity(), Evidence::Known)
                .contains(&Identity::default())
        );
    }
}
