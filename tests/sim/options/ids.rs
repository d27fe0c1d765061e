//! What the servers say they are, in half of the runs with other servers: there some say less than
//! both ids, as a kernel's server and our earlier versions do.
//!
//! Drawn by a generator of its own, so that the other runs stay what they were.

use rtrs_core::identity::{Comparison, ExportId, Identity, ServerId};
use rtrs_core::prng::{Prng, Ratio};

use super::{FaultMix, MS, Options, half, pick};

// Chosen so that the seeds that are kept for what they found stay what they were.
const IDS: u64 = 0x7361_7973_5f69_647d;

/// What the session's server says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// Nothing, as a kernel's server.
    Nothing,
    /// Its own id, and no export's.
    Server,
    /// Its own id, and an export's that holds for this boot of its host.
    Weak(u64),
    /// Its own id, and an export's that lasts.
    All,
}

impl Said {
    /// The ids that are said.
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

/// What is said in a run.
#[derive(Clone, Copy, Debug)]
pub struct Ids {
    /// By the session's server, in each third of the time under load; where that changes the
    /// server is started again.
    pub home: [Said; 3],
}

impl Ids {
    /// True when the session knows too little at first to refuse another server that is all there
    /// is: it might be its own after an upgrade, or of another boot. Then another path to its own
    /// has to be connected as long as others answer.
    pub(in super::super) fn is_beside(self) -> bool {
        self.home[0] != Said::All
    }
}

/// By what a session tells another server from its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Told {
    /// By what it knows.
    Known,
    /// By a path to its own that is connected and did not say this.
    Beside,
}

/// By what a session that knows `known` tells a server that says `other` from its own. None if
/// nothing tells them apart.
fn told(known: Identity, other: Identity) -> Option<Told> {
    let server = known.server.is_some_and(|known| other.server != Some(known));
    let export = known.export.is_some_and(|known| {
        other.export.is_none_or(|other| known.compare(other) == Comparison::Different)
    });
    if server || export {
        return Some(Told::Known);
    }
    (other != known).then_some(Told::Beside)
}

/// What servers may say that a session which knows `known` tells from its own by that. Where
/// neither says anything, or both the same, nothing tells two servers apart but the shape of the
/// device, which is the same here: that is no fault of the client, and not drawn.
pub(in super::super) fn others(known: Identity, by: Told) -> Vec<Identity> {
    let (server, export) = home();
    let servers = [None, server, Some(ServerId::of_name("other"))];
    let other = Some(ExportId::of_name("other"));
    let exports = [None, export, other, weak(1, "vol"), weak(2, "other"), weak(7, "vol")];
    let all = servers
        .into_iter()
        .flat_map(|server| exports.into_iter().map(move |export| Identity { server, export }));
    all.filter(|&other| told(known, other) == Some(by)).collect()
}

impl Options {
    /// Draws who says what.
    pub(super) fn draw_ids(&mut self) {
        let own = &mut Prng::new(self.seed ^ IDS);
        if !half(own) {
            return;
        }
        use Said::{All, Nothing, Server, Weak};
        let less = pick(own, &[Nothing, Server, Weak(1)]);
        let home = match own.below(8) {
            // The others alone say less.
            0 => [All; 3],
            // An operator starts an earlier version, and thinks better of it.
            1 => [All, less, All],
            _ if self.paths == 1 => [All, less, All],
            2..=4 => [less; 3],
            // An upgrade, or the server's host starts anew.
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

    /// Leaves nothing that could end the first path, and makes it likely that the others end.
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
        self.server_letter_max = self.server_letter_max.min(3 * MS);
        let disk = &mut self.disk;
        (disk.slow_max, disk.stuck) = (disk.slow_max.min(50 * MS), Ratio::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::{Identity, Said, Told, others};

    /// Each kind of server can be told from others, and no session has to tell apart what says the
    /// same.
    #[test]
    fn there_are_others_that_can_be_told_apart() {
        for said in [Said::Nothing, Said::Server, Said::Weak(1), Said::All] {
            let known = said.identity();
            let counts = [Told::Known, Told::Beside].map(|by| others(known, by).len());
            assert_eq!(counts[0] > 0, said != Said::Nothing, "{said:?}");
            assert_eq!(counts[1] > 0, said != Said::All, "{said:?}");
            assert_eq!(counts[0] + counts[1], 17, "{said:?}");
            assert!(!others(known, Told::Known).contains(&known));
        }
        assert!(others(Said::All.identity(), Told::Known).contains(&Identity::default()));
    }
}
