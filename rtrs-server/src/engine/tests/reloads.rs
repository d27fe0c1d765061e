//! Test of access while a configuration is applied: at every step, a client that opens an export
//! with a given target is allowed to use that target by the previous configuration or by the next
//! one.
//!
//! Commands and reloads run as in the daemon, on the test's thread. The control shard runs on a
//! different thread, where clients try to open everything: before and after each request from the
//! daemon, and after each change to the exports and the lists. A target is identified by its size.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use rtrs_core::prng::Prng;
use rtrs_core::rt::{Ring, mailbox};
use rtrs_core::wire::AccessMode;

use super::fixture::{Fixture, StandOptions, client_ip};
use super::peer::{Peer, PeerOptions};
use crate::daemon::rig::Rig;
use crate::engine::message::{ControlMessage, Message};
use crate::export::ExportTable;
use crate::settings::{ExportSpec, OnMissing, Settings};
use crate::stats::ShardReport;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const CLIENTS: u8 = 3;

/// Clients with access, and whether they may write.
type List = Vec<(u8, bool)>;

#[derive(Clone, Debug, Default)]
struct Config {
    server: List,
    /// Size of the target in MiB, and access list, by export name.
    exports: BTreeMap<&'static str, (u64, List)>,
    /// Whether there is one more export, which cannot be opened.
    fails: bool,
}

/// Opens by target, client and write access.
type Opened = BTreeSet<(u64, u8, bool)>;

impl Config {
    fn draw(prng: &mut Prng) -> Self {
        let list = |prng: &mut Prng, chance| {
            let who = (0..CLIENTS).filter(|_| prng.below(100) < chance).collect::<Vec<_>>();
            who.into_iter().map(|who| (who, prng.below(2) == 0)).collect::<List>()
        };
        let mut config = Self { server: list(prng, 25), ..Self::default() };
        for name in NAMES {
            if prng.below(4) > 0 {
                let own = list(prng, 35);
                config.exports.insert(name, (1 + prng.below(3), own));
            }
        }
        config.fails = prng.below(4) == 0;
        config
    }

    fn settings(&self) -> Settings {
        let rules = |list: &List| -> Vec<String> {
            let mode = |write| if write { "rw" } else { "ro" };
            list.iter()
                .map(|(who, write)| format!("anyone@{}:{}", client_ip(*who), mode(*write)))
                .collect()
        };
        let spec = |(name, (size, list)): (&&str, &(u64, List))| -> ExportSpec {
            let access: Vec<_> = rules(list).iter().map(|rule| format!(",access={rule}")).collect();
            format!("{name}=null:{size}M{}", access.concat()).parse().unwrap()
        };
        let mut export: Vec<ExportSpec> = self.exports.iter().map(spec).collect();
        export.extend(self.fails.then(|| "x=/none/there".parse().unwrap()));
        let access = rules(&self.server).iter().map(|rule| rule.parse().unwrap()).collect();
        Settings { access, export, insecure_open: true, ..Settings::default() }
    }

    fn may(&self, name: &str, who: u8, write: bool) -> bool {
        let Some((_, own)) = self.exports.get(name) else { return false };
        let listed = |list: &List| list.iter().any(|rule| rule.0 == who && (rule.1 || !write));
        let open = self.server.is_empty() && self.exports.values().all(|(_, own)| own.is_empty());
        open || listed(if own.is_empty() { &self.server } else { own })
    }

    /// Everything that the configuration allows.
    fn all(&self) -> Opened {
        let mut all = Opened::new();
        for (name, (size, _)) in &self.exports {
            for who in 0..CLIENTS {
                let modes = [false, true].into_iter().filter(|write| self.may(name, who, *write));
                all.extend(modes.map(|write| (*size, who, write)));
            }
        }
        all
    }
}

/// Tries to open all names, each client in both modes. Returns the successful opens, by name.
fn try_all(fixture: &mut Fixture) -> Vec<(&'static str, (u64, u8, bool))> {
    let mut opened = Vec::new();
    for who in 0..CLIENTS {
        let number = 100 + who;
        let options = PeerOptions {
            session: number,
            path: number,
            local: who,
            cid_num: 1,
            ..PeerOptions::default()
        };
        let mut peer = Peer::new(fixture, options);
        if peer.connect(fixture, 0).is_err() {
            continue;
        }
        peer.info(fixture, &format!("asks{who}"));
        for name in NAMES {
            for write in [false, true] {
                let mode = if write { AccessMode::ReadWrite } else { AccessMode::ReadOnly };
                let answer = peer.open_device(fixture, name, mode);
                opened
                    .extend(answer.ok().map(|opened| (name, (opened.nsectors >> 11, who, write))));
            }
        }
        peer.leave(fixture);
    }
    opened
}

/// An export by name, and the size, client and write access with which it was opened.
type Found = (&'static str, (u64, u8, bool));

/// Tasks of the control shard's thread other than messages.
enum Task {
    /// Opens an export for a client, if allowed, and keeps it open.
    Hold {
        who: u8,
        name: &'static str,
        write: bool,
        held: mpsc::Sender<bool>,
    },
    /// Reports whether the clients that hold exports have all of their paths.
    AreUp(mpsc::Sender<Vec<(u8, bool)>>),
    /// Reports what clients can open now.
    Look(mpsc::Sender<Vec<Found>>),
    End,
}

/// A control shard on a thread, whose clients record opens beyond `allowed`.
struct Shard {
    tasks: mpsc::Sender<Task>,
    wake: rtrs_core::rt::Sender<Message>,
    table: Arc<ExportTable>,
    allowed: Arc<Mutex<Opened>>,
    /// Opens that neither configuration allows.
    stolen: Arc<Mutex<Opened>>,
    thread: std::thread::JoinHandle<()>,
}

fn run(
    table: Arc<ExportTable>,
    inbox: rtrs_core::rt::Mailbox<Message>,
    tasks: &mpsc::Receiver<Task>,
    look: &dyn Fn(&mut Fixture),
) {
    let ring = Ring::new(8).unwrap();
    let mut inbox = inbox.arm(&ring).unwrap();
    let options = StandOptions::default();
    let mut fixture = Fixture::serving(options, Some(table));
    let mut holders: Vec<(u8, Peer)> = Vec::new();
    loop {
        ring.turn().unwrap();
        let Some(message) = inbox.take_or_watch() else {
            ring.turn_or_sleep(None).unwrap();
            continue;
        };
        match message {
            Message::Control(ControlMessage::Admin { .. }) => {
                look(&mut fixture);
                fixture.send(message);
                fixture.settle();
                look(&mut fixture);
            }
            Message::Report(reply) => {
                look(&mut fixture);
                reply.send(ShardReport::default());
            }
            Message::Wake => match tasks.recv().unwrap() {
                Task::Hold { who, name, write, held } => {
                    let (session, path) = (1 + who, 1 + who);
                    let options =
                        PeerOptions { session, path, local: who, ..PeerOptions::default() };
                    let mut peer = Peer::new(&fixture, options);
                    let mode = if write { AccessMode::ReadWrite } else { AccessMode::ReadOnly };
                    let opened = (0..options.cid_num)
                        .all(|cid| peer.connect(&mut fixture, cid).is_ok())
                        && {
                            peer.info(&mut fixture, &format!("holds{who}"));
                            peer.open_device(&mut fixture, name, mode).is_ok()
                        };
                    match opened {
                        true => holders.push((who, peer)),
                        false => peer.leave(&mut fixture),
                    }
                    held.send(opened).unwrap();
                }
                Task::AreUp(answer) => {
                    let up = holders.iter_mut().map(|(who, peer)| {
                        let closed = peer.closed(&mut fixture);
                        (*who, closed == 0)
                    });
                    answer.send(up.collect()).unwrap();
                }
                Task::Look(answer) => answer.send(try_all(&mut fixture)).unwrap(),
                Task::End => return,
            },
            _ => {}
        }
    }
}

impl Shard {
    fn start() -> Self {
        let (wake, inbox) = mailbox().unwrap();
        let (tasks, todo) = mpsc::channel();
        let table = ExportTable::new(Vec::new());
        let (allowed, stolen) = (Arc::<Mutex<Opened>>::default(), Arc::<Mutex<Opened>>::default());
        let (may, took, exports) = (Arc::clone(&allowed), Arc::clone(&stolen), Arc::clone(&table));
        let thread = std::thread::spawn(move || {
            let look = |fixture: &mut Fixture| {
                let opened = try_all(fixture).into_iter().map(|(_, opened)| opened);
                let may = may.lock().clone();
                took.lock().extend(opened.filter(|opened| !may.contains(opened)));
            };
            run(exports, inbox, &todo, &look);
        });
        let asks = wake.clone();
        table.watch(move || {
            let (done, wait) = mpsc::channel();
            let reply = crate::engine::message::AdminReplyTo::new(move |_| done.send(()).unwrap());
            asks.send(Message::Report(reply));
            wait.recv().unwrap();
        });
        Self { tasks, wake, table, allowed, stolen, thread }
    }

    fn ask<T>(&self, task: impl FnOnce(mpsc::Sender<T>) -> Task) -> T {
        let (answer, wait) = mpsc::channel();
        self.tasks.send(task(answer)).unwrap();
        self.wake.send(Message::Wake);
        wait.recv().unwrap()
    }

    fn end(self) {
        self.tasks.send(Task::End).unwrap();
        self.wake.send(Message::Wake);
        self.thread.join().unwrap();
    }
}

/// Runs the configurations of a seed.
fn play(seed: u64) -> Result<(), String> {
    let mut prng = Prng::new(seed);
    let first = Config { fails: false, ..Config::draw(&mut prng) };
    let shard = Shard::start();
    *shard.allowed.lock() = first.all();
    let on_missing = if seed.is_multiple_of(2) { OnMissing::Wait } else { OnMissing::Refuse };
    let settings = Settings { on_missing, ..first.settings() };
    let rig = Rig::new(&settings, Arc::clone(&shard.table), shard.wake.clone());
    let mut held = Vec::new();
    for who in 0..CLIENTS {
        let (name, write) = (NAMES[prng.index(NAMES.len())], prng.below(2) == 0);
        if shard.ask(|held| Task::Hold { who, name, write, held }) {
            held.push((who, name, write));
        }
    }
    let (mut before, mut all) = (first.clone(), first.all());
    for round in 0..2 {
        let next = Config::draw(&mut prng);
        all.extend(next.all());
        // Exports kept from the first configuration still exist under the third.
        let kept: Opened = if round == 0 { before.all() } else { all.clone() };
        *shard.allowed.lock() = kept.union(&next.all()).copied().collect();
        let done = rig.reload(&next.settings());
        let wrong = std::mem::take(&mut *shard.stolen.lock());
        if !wrong.is_empty() {
            return Err(format!("{wrong:?} by {before:?} to {next:?}, held {held:?}: {done:?}"));
        }
        // Exports that match the configuration follow it.
        let opened = shard.ask(Task::Look);
        for (name, (size, own)) in &next.exports {
            let same = before.exports.get(name).is_none_or(|(before, _)| before == size);
            let there = done.is_ok() || before.exports.contains_key(name);
            for who in (0..CLIENTS).filter(|_| round == 0 && same && there) {
                let reads = opened.contains(&(*name, (*size, who, false)));
                if reads != next.may(name, who, false) {
                    return Err(format!("{name} {own:?} {who} {reads}: {before:?} to {next:?}"));
                }
            }
        }
        // Clients that hold an export that is no longer in the configuration keep it.
        let up = shard.ask(Task::AreUp);
        for (who, name, write) in held.iter().filter(|_| round == 0) {
            if !next.exports.contains_key(name) && !up.contains(&(*who, true)) {
                return Err(format!("{who} lost {name} {write}: {before:?} to {next:?}"));
            }
        }
        before = next;
    }
    drop(rig);
    shard.end();
    Ok(())
}

#[test]
fn access_follows_the_lists_before_or_after_a_reload() {
    for seed in 0..40 {
        play(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

#[test]
fn a_configuration_granted_before_its_exports_is_detected() {
    rtrs_core::mutant::choose(Some(rtrs_core::mutant::Mutant::ReloadGrantsFirst));
    let noticed = (0..40).any(|seed| play(seed).is_err());
    rtrs_core::mutant::choose(None);
    assert!(noticed || !cfg!(debug_assertions));
}

/// Settings with one export, whose options follow its target.
fn with_export(options: &str) -> Settings {
    let export = vec![format!("a=null:1M{options}").parse().unwrap()];
    Settings { export, insecure_open: true, ..Settings::default() }
}

/// Runs `test` with a server that has read a configuration.
fn with_rig(first: &Settings, test: impl FnOnce(&Arc<Rig>)) {
    let shard = Shard::start();
    let rig = Arc::new(Rig::new(first, Arc::clone(&shard.table), shard.wake.clone()));
    test(&rig);
    drop(rig);
    shard.end();
}

/// A reload without the command lock may have read a file that a command then replaces: the reload
/// undoes the change, and the command must not report that the change is saved.
#[test]
fn a_command_that_saves_notices_a_reload_that_reads_before_it_writes() {
    with_rig(&with_export(""), |rig| {
        let before = rig.origin("a").unwrap();
        assert!(!before.reloading);
        let (asks, asked) = mpsc::channel();
        let (of, reading) = (Arc::downgrade(rig), before.configuration);
        rig.after_reading(move || {
            let origin = of.upgrade().unwrap().origin("a").unwrap();
            assert_ne!(origin.configuration, reading, "a command that began before must know");
            asks.send(origin.reloading).unwrap();
        });
        let read = rig.read().unwrap();
        assert_eq!(asked.try_recv(), Ok(true), "one that begins now must wait");
        assert!(rig.origin("a").unwrap().reloading, "until the exports are changed");
        drop(rig.apply(read).unwrap());
        assert!(!rig.origin("a").unwrap().reloading);
    });
}

#[test]
fn an_older_reading_is_not_applied_after_a_newer_one() {
    with_rig(&with_export(""), |rig| {
        rig.configure(&with_export(",ro"));
        let older = rig.read().unwrap();
        let newer = with_export(",migration=deny");
        assert_eq!(rig.reload(&newer).unwrap().changed, ["a"]);
        let done = rig.apply(older).unwrap();
        assert!(done.changed.is_empty() && done.warnings.len() == 1, "{done:?}");
        assert_eq!(rig.saved(), newer.export);
    });
}
