//! Tests of two servers that share an export: which one is selected and when, and repeated
//! requests.

use rtrs_core::block::IoOp;
use rtrs_core::gateway::Standing;
use rtrs_core::identity::ExportId;
use rtrs_core::ids::PathUuid;
use rtrs_core::status::IoStatus;
use rtrs_core::time::Duration;
use rtrs_core::wire::{AccessMode, Imm, Move, errno};

use super::fixture::{Fixture, MS, SEC};
use crate::engine::{Change, DeviceIndex};
use crate::path::state::PathState;

const FIRST: DeviceIndex = DeviceIndex::FIRST;

/// Servers that share the export, and the server that each path leads to.
pub(super) struct Gateways {
    /// Active server.
    pub(super) active: Option<usize>,
    term: u64,
    /// The state that each server reports instead of its real one.
    says: [Option<Standing>; 2],
    /// Received MOVE requests: the server, and whether a different server should take over.
    pub(super) moves: Vec<(usize, bool)>,
    /// Errno in the answer to MOVE; 0 if the server is then active.
    errno: u16,
    /// Whether a takeover completes on its own.
    obeys: bool,
    /// Server that each path leads to.
    leads: [usize; 3],
    /// The only server that may receive a FENCE.
    fences: Option<usize>,
}

impl Gateways {
    fn new(active: Option<usize>) -> Self {
        Self {
            active,
            term: 1,
            says: [None; 2],
            moves: Vec::new(),
            errno: 0,
            obeys: true,
            leads: [0, 1, 0],
            fences: None,
        }
    }

    /// Returns the server that a path leads to; path identities start at 0xa0.
    fn server(&self, path: PathUuid) -> usize {
        self.leads[usize::from(path.0[0] - 0xa0)]
    }

    /// Checks that a fence goes to the server of the dead path: others do not know the path.
    pub(super) fn check_fence(&self, over: PathUuid) {
        assert_eq!(self.fences, Some(self.server(over)), "FENCE to the wrong server");
    }

    pub(super) fn id(&self, path: PathUuid) -> Option<[u8; 16]> {
        Some([1 + u8::try_from(self.server(path)).expect("two servers"); 16])
    }

    /// Whether the path's server has other exports; only the first server does.
    pub(super) fn has_others(&self, path: PathUuid) -> bool {
        self.server(path) == 0
    }

    pub(super) fn standing(&self, path: PathUuid) -> Standing {
        let active = self.active == Some(self.server(path));
        self.says[self.server(path)].unwrap_or(Standing { active, term: self.term })
    }

    pub(super) fn check_io(&self, path: PathUuid) {
        assert_eq!(self.active, Some(self.server(path)), "IO to a standby");
    }

    pub(super) fn moves(&mut self, path: PathUuid, Move { away, .. }: Move) -> u16 {
        let server = self.server(path);
        self.moves.push((server, away));
        if self.errno == 0 && self.obeys {
            self.end_move(server, away);
        }
        self.errno
    }

    fn end_move(&mut self, server: usize, away: bool) {
        self.term += u64::from(!away);
        self.active = Some(server).filter(|_| !away);
    }
}

fn gateways(fixture: &mut Fixture) -> &mut Gateways {
    fixture.server.how.gateways.as_mut().unwrap()
}

fn seen(fixture: &Fixture) -> &Gateways {
    fixture.server.how.gateways.as_ref().unwrap()
}

/// Opens a session with a path to each of two servers.
fn open(active: Option<usize>) -> Fixture {
    let mut fixture = Fixture::new(|s| {
        s.paths = 2;
        s.how.fence = true;
        s.how.export_id = Some(ExportId::of_name("a"));
        s.how.gateways = Some(Gateways::new(active));
    });
    fixture.until("both paths", 5 * SEC, are_up);
    if active.is_some() {
        fixture.until("the device", SEC, |s| s.client.control.view().is_open(FIRST));
        fixture.run(10 * MS);
    }
    fixture
}

fn are_up(fixture: &Fixture) -> bool {
    let up = [PathState::Connected, PathState::Standby];
    states(fixture).iter().all(|state| up.contains(state))
}

/// Reports a change to the device over the paths to a server.
fn changed(fixture: &mut Fixture, server: usize) {
    for path in 0..fixture.server.paths.len() {
        if seen(fixture).server(fixture.server.paths[path].uuid) == server {
            fixture.server.immediate(path, 0, Imm::Changed { device: 0 }.encode());
        }
    }
}

fn is_served(fixture: &Fixture, by: usize) -> bool {
    let shards = 0..fixture.client.shards();
    fixture.client.control.view().is_open(FIRST)
        && shards.into_iter().all(|shard| fixture.client.serving(shard, FIRST) == [by])
}

fn states(fixture: &Fixture) -> Vec<PathState> {
    fixture.client.control.view().paths().iter().map(|path| path.state).collect()
}

fn lose(fixture: &mut Fixture, path: usize) {
    fixture.link_down(path);
    let up = [PathState::Connected, PathState::Standby];
    fixture.until("the path's end", 2 * SEC, |s| !up.contains(&states(s)[path]));
}

#[test]
fn io_goes_to_the_active_server_and_the_other_is_standby() {
    let mut fixture = open(Some(1));
    assert!(is_served(&fixture, 1));
    assert_eq!(states(&fixture), [PathState::Standby, PathState::Connected]);
    fixture.read(0, 0, 4096);
    fixture.run(12 * SEC);
    assert!(gateways(&mut fixture).moves.is_empty(), "no gateway is asked");
}

#[test]
fn a_standby_path_does_not_replace_one_whose_link_fails() {
    let mut fixture = open(Some(1));
    fixture.link_down_reported(&[1]);
    assert_eq!(states(&fixture), [PathState::Standby, PathState::Connected]);
    fixture.run(SEC);
    assert!(gateways(&mut fixture).moves.is_empty(), "no gateway is asked");
    fixture.link_down_reported(&[0]);
    assert_ne!(states(&fixture)[0], PathState::Standby, "nothing needs the standby path");
    fixture.until("both paths", 5 * SEC, are_up);
}

#[test]
fn if_no_server_is_active_one_is_asked() {
    let mut fixture = open(None);
    fixture.until("the question", SEC, |s| !seen(s).moves.is_empty());
    changed(&mut fixture, 0);
    fixture.until("the device", SEC, |s| is_served(s, 0));
    assert_eq!(states(&fixture), [PathState::Connected, PathState::Standby]);
    assert_eq!(gateways(&mut fixture).moves, [(0, false)]);
    fixture.read(0, 0, 4096);
}

#[test]
fn nothing_is_resent_before_the_other_server_is_active() {
    let mut fixture = open(Some(0));
    fixture.server.how.hold = true;
    gateways(&mut fixture).obeys = false;
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("it is held", SEC, |s| s.server.held.len() == 1);
    lose(&mut fixture, 0);
    let asked = fixture.now();
    fixture.until("the question", SEC, |s| !seen(s).moves.is_empty());
    assert!(fixture.now().since(asked) < 400 * MS, "the path gets only a moment");
    fixture.run(SEC);
    assert_eq!(fixture.spread(), [1, 0], "nothing was resent");
    gateways(&mut fixture).end_move(1, false);
    changed(&mut fixture, 1);
    fixture.until("it is resent", SEC, |s| s.spread() == [1, 1]);
    assert_eq!(gateways(&mut fixture).moves, [(1, false)]);
    fixture.server.how.hold = false;
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    // The server returns as a standby.
    fixture.link_up(0);
    fixture.until("both paths", 5 * SEC, are_up);
    assert!(is_served(&fixture, 1));
}

#[test]
fn a_server_is_asked_at_most_once_in_ten_seconds() {
    let mut fixture = open(Some(0));
    gateways(&mut fixture).obeys = false;
    lose(&mut fixture, 0);
    let count = |fixture: &mut Fixture, time: Duration| {
        let before = gateways(fixture).moves.len();
        fixture.run(time);
        gateways(fixture).moves.len() - before
    };
    assert_eq!(count(&mut fixture, 9 * SEC), 1);
    assert_eq!(count(&mut fixture, 20 * SEC), 2);
    // A server that cannot take over is asked again soon.
    gateways(&mut fixture).errno = errno::EAGAIN;
    fixture.run(11 * SEC);
    assert!((4..=6).contains(&count(&mut fixture, 5 * SEC)));
}

#[test]
fn the_higher_term_wins_if_two_servers_claim_to_be_active() {
    let mut fixture = open(Some(0));
    gateways(&mut fixture).end_move(1, false);
    let stale = Some(Standing { active: true, term: 1 });
    gateways(&mut fixture).says[0] = stale;
    changed(&mut fixture, 1);
    fixture.until("the later one", SEC, |s| is_served(s, 1));
    assert_eq!(states(&fixture), [PathState::Standby, PathState::Connected]);
    fixture.run(3 * SEC);
    assert!(is_served(&fixture, 1), "the other is asked but not believed");
    fixture.read(0, 0, 4096);
}

#[test]
fn a_switch_asks_the_active_server_to_leave_and_then_the_other() {
    let mut fixture = open(Some(0));
    let switch = || Change::SwitchVolume { export: "vol0".into() };
    fixture.change(switch()).unwrap();
    fixture.until("it leaves", SEC, |s| seen(s).moves == [(0, true)]);
    changed(&mut fixture, 0);
    fixture.until("the other is asked", SEC, |s| seen(s).moves == [(0, true), (1, false)]);
    changed(&mut fixture, 1);
    fixture.until("the other one", SEC, |s| is_served(s, 1));
    lose(&mut fixture, 0);
    let error = fixture.change(switch()).unwrap_err().to_string();
    assert!(error.contains("no path to another gateway"), "{error}");
}

#[test]
fn a_switch_that_the_active_server_ignores_is_forced() {
    let mut fixture = open(Some(0));
    gateways(&mut fixture).obeys = false;
    fixture.change(Change::SwitchVolume { export: "vol0".into() }).unwrap();
    fixture.run(4 * SEC);
    assert_eq!(seen(&fixture).moves, [(0, true)]);
    fixture.until("the other is asked", 2 * SEC, |s| seen(s).moves == [(0, true), (1, false)]);
    gateways(&mut fixture).end_move(1, false);
    changed(&mut fixture, 1);
    fixture.until("the other one", SEC, |s| is_served(s, 1));
    fixture.run(30 * SEC);
    assert_eq!(seen(&fixture).moves.len(), 2, "once");
}

/// Opens a session with a path to each server and a third path to the first one. A write is in
/// flight to the first server over the first path.
fn open_with_third() -> (Fixture, u64) {
    let mut fixture = Fixture::new(|s| {
        s.paths = 3;
        (s.how.hold, s.how.fence, s.how.hold_fences) = (true, true, true);
        s.how.export_id = Some(ExportId::of_name("a"));
        s.how.gateways = Some(Gateways { fences: Some(0), ..Gateways::new(Some(0)) });
    });
    fixture.until("all paths", 5 * SEC, are_up);
    fixture.until("the device", SEC, |s| s.client.control.view().is_open(FIRST));
    fixture.run(10 * MS);
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("it is held", SEC, |s| s.server.held.len() == 1);
    assert_eq!(fixture.spread(), [1, 0, 0]);
    (fixture, tag)
}

#[test]
fn returning_to_another_server_does_not_fence_a_path() {
    let (mut fixture, tag) = open_with_third();
    lose(&mut fixture, 0);
    // The path's address now belongs to the other server.
    gateways(&mut fixture).leads[0] = 1;
    fixture.link_up(0);
    fixture.until("the path", 2 * SEC, |s| states(s)[0] == PathState::Standby);
    fixture.run(100 * MS);
    assert_eq!(fixture.spread(), [1, 0, 0], "the first server may still have it");
    (fixture.server.how.hold, fixture.server.how.hold_fences) = (false, false);
    fixture.server.release();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.spread(), [1, 0, 1]);
    assert_eq!(states(&fixture), [PathState::Standby, PathState::Standby, PathState::Connected]);
}

#[test]
fn a_path_that_returns_to_another_server_carries_io_once_that_is_active() {
    let (mut fixture, tag) = open_with_third();
    lose(&mut fixture, 0);
    gateways(&mut fixture).leads[0] = 1;
    fixture.link_up(0);
    fixture.until("the path", 2 * SEC, |s| states(s)[0] == PathState::Standby);
    gateways(&mut fixture).end_move(1, false);
    fixture.server.how.hold = false;
    changed(&mut fixture, 1);
    // The fence that the third path requested times out first.
    fixture.until("it is resent", 12 * SEC, |s| s.spread() != [1, 0, 0]);
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    fixture.until("the other server", SEC, |s| s.client.serving(0, FIRST) == [0, 1]);
}

#[test]
fn a_volume_open_at_one_server_delays_the_others_until_it_is_closed() {
    let mut fixture = Fixture::new(|s| {
        s.paths = 2;
        s.how.fence = true;
        s.how.export_id = Some(ExportId::of_name("a"));
        s.how.gateways = Some(Gateways::new(Some(0)));
    });
    fixture.server.more.add("vol1", 1 << 20);
    fixture.server.more.named("vol1").export_id = Some(ExportId::of_name("b"));
    fixture.until("both paths", 5 * SEC, are_up);
    fixture.until("the device", SEC, |s| s.client.control.view().is_open(FIRST));
    fixture.change(Change::AddVolume(super::fixture::volume("vol1"))).unwrap();
    fixture.until("the volume", SEC, |s| s.volumes() == ["vol0", "vol1"]);
    fixture.run(10 * MS);
    fixture.server.how.hold = true;
    let tag = fixture.submit(0, IoOp::Write, 0, 4096);
    fixture.until("it is held", SEC, |s| s.server.held.len() == 1);
    lose(&mut fixture, 0);
    fixture.until("the question", SEC, |s| !seen(s).moves.is_empty());
    changed(&mut fixture, 1);
    fixture.run(SEC);
    assert_eq!(fixture.spread(), [1, 0]);
    fixture.server.how.hold = false;
    fixture.change(Change::CloseVolume { export: "vol1".into() }).unwrap();
    fixture.drain(SEC);
    assert_eq!(fixture.client.status(tag), Some(IoStatus::Ok));
    assert_eq!(fixture.spread(), [1, 1]);
}

#[test]
fn a_read_only_session_asks_no_server() {
    let mut fixture = Fixture::new(|s| {
        s.paths = 2;
        s.config.volumes[0].access = AccessMode::ReadOnly;
        s.how.export_id = Some(ExportId::of_name("a"));
        s.how.gateways = Some(Gateways::new(None));
    });
    fixture.until("both paths", 5 * SEC, are_up);
    fixture.run(3 * SEC);
    assert!(gateways(&mut fixture).moves.is_empty());
}

#[test]
fn another_export_behind_the_second_server_is_not_used() {
    for weak in [false, true] {
        let mut fixture = Fixture::new(|s| {
            s.paths = 2;
            s.how.export_id = Some(match weak {
                true => ExportId::weak(1, "test", &[b"a"]),
                false => ExportId::of_name("a"),
            });
            s.how.gateways = Some(Gateways::new(Some(0)));
        });
        if !weak {
            fixture.until("one path", 5 * SEC, |s| s.client.control.view().is_open(FIRST));
            fixture.server.how.export_id = Some(ExportId::of_name("b"));
            let now = fixture.now();
            let find = |path: &super::server::Path| path.uuid.0[0] == 0xa1;
            if let Some(path) = fixture.server.paths.iter().position(find) {
                fixture.server.end_path(now, path);
            }
        }
        let refused = |s: &Fixture| s.client.last_error(1).starts_with("cannot use this path: ");
        fixture.until("the refusal", 5 * SEC, refused);
        fixture.run(SEC);
        assert!(gateways(&mut fixture).moves.is_empty());
    }
}
