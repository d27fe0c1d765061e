//! Starts the threads of a session's shards, and sends them messages from the rest of the process.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use rtrs_core::ids::{CoreIndex, ProviderIndex};
use rtrs_core::mem::Region;
use rtrs_core::rt::{Clock, PollPolicy, Sender, mailbox, pin_plan};
use rtrs_core::settings::Scheme;
use rtrs_core::time::Duration;

use super::config::random_uuid;
use super::driver::{ClientShardReport, Message, ShardStart, run_shard};
use super::fabrics::FabricRegistry;
use super::fronts::NewFront;
use super::link_watcher::LinkWatcher;
use super::notices::Event;
use crate::engine::{Change, DeviceIndex, Reported, Resolved, SessionConfig};
use crate::error::{Error, system};
use crate::frontend::{
    FrontEndClient, FrontSocket, MakeFrontEnds, MemoryChange, MemoryChangeKind, Shards,
};
use crate::settings::SessionSettings;

/// Time limit for all shards to start serving their sockets to the kernel. Nothing waits for the
/// device yet, so this limit is meant for a stuck shard, not for a busy machine: with four busy
/// loops during twelve attaches, one shard took more than five seconds.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a shard's report, and for other answers.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for all shards to pin memory, or for IO in flight to end before memory is released.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a shard's change.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Threads of a session.
#[derive(Debug)]
pub(crate) struct Running {
    shards: Vec<Sender<Message>>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    /// Notifies shard 0 of changes; held only to be dropped.
    network: Option<LinkWatcher>,
    pub(crate) events: mpsc::Receiver<Event>,
}

/// Handle with which other threads send messages to shards.
#[derive(Clone, Debug)]
pub(crate) struct ShardHandle(Vec<Sender<Message>>);

impl ShardHandle {
    /// Returns the reports of all shards, in order, limited to the requested devices. The report of
    /// a shard that does not answer is missing.
    pub(crate) fn reports(&self, reported: Reported) -> Vec<ClientShardReport> {
        let mut reports = self.ask(|reply| Message::Query(reported, reply));
        reports.sort_by_key(|report: &ClientShardReport| report.engine.shard);
        reports
    }

    /// Requests an event when a path next makes progress. A report that is requested afterwards
    /// shows all earlier progress.
    pub(crate) fn watch_paths(&self) {
        self.0[0].send(Message::WatchPaths);
    }

    /// Stops watching the paths.
    pub(crate) fn ignore_paths(&self) {
        self.0[0].send(Message::IgnorePaths);
    }

    /// Returns the clients of a device whose connections a detach would cut, each once; None if a
    /// shard does not answer.
    pub(crate) fn clients(&self, device: DeviceIndex) -> Option<Vec<FrontEndClient>> {
        let all: Vec<Vec<FrontEndClient>> = self.ask(|reply| Message::Clients(device, reply));
        let is_complete = all.len() == self.0.len();
        let mut clients = all.concat();
        clients.sort_unstable();
        clients.dedup();
        is_complete.then_some(clients)
    }

    /// Asks all shards, and returns the answers that arrive in time.
    fn ask<T>(&self, question: impl Fn(mpsc::Sender<T>) -> Message) -> Vec<T> {
        let mut answers = Vec::with_capacity(self.0.len());
        let (reply, inbox) = mpsc::channel();
        for shard in &self.0 {
            shard.send(question(reply.clone()));
        }
        drop(reply);
        let deadline = std::time::Instant::now() + REPORT_TIMEOUT;
        while answers.len() < self.0.len() {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            match inbox.recv_timeout(left) {
                Ok(answer) => answers.push(answer),
                Err(_) => break,
            }
        }
        answers
    }

    /// Changes, on all shards, the memory that a device's user has registered.
    ///
    /// # Errors
    /// The reason given by a shard; `TimedOut` if a shard does not answer. Other shards may have
    /// made the change.
    pub(crate) fn change_memory(
        &self,
        device: DeviceIndex,
        region: &Arc<Region>,
        kind: MemoryChangeKind,
    ) -> io::Result<()> {
        let (reply, answers) = mpsc::channel();
        for shard in &self.0 {
            let change = MemoryChange::new(region, kind, reply.clone());
            shard.send(Message::Memory(device, change));
        }
        drop(reply);
        let deadline = std::time::Instant::now() + MEMORY_TIMEOUT;
        for _ in &self.0 {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let answer = answers.recv_timeout(left);
            answer.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        }
        Ok(())
    }

    /// Changes the paths or the policy of the session.
    ///
    /// # Errors
    /// Returns the reason why the change is impossible.
    pub(crate) fn change(&self, change: Change) -> Result<(), String> {
        let (reply, answer) = mpsc::channel();
        self.0[0].send(Message::Change { change, reply });
        answer.recv_timeout(CHANGE_TIMEOUT).unwrap_or_else(|_| {
            let seconds = CHANGE_TIMEOUT.as_secs();
            Err(format!(
                "no answer from shard 0 within {seconds} s; see status for whether the change took \
                 effect"
            ))
        })
    }

    /// Passes the session the addresses of a path's host, or the reason why it has none.
    pub(crate) fn resolved(&self, path: String, found: Resolved) {
        self.0[0].send(Message::Resolved { path, found });
    }

    /// Gives every shard a provider of this scheme. Returns its index, which is the same on all
    /// shards.
    ///
    /// # Errors
    /// Returns what a shard lacks.
    pub(crate) fn provide(&self, scheme: Scheme) -> Result<ProviderIndex, String> {
        let (reply, answers) = mpsc::channel();
        for shard in &self.0 {
            shard.send(Message::Provide { scheme, reply: reply.clone() });
        }
        drop(reply);
        let mut provider = Err("the session has no shards".to_owned());
        for _ in &self.0 {
            let reply = answers.recv_timeout(CHANGE_TIMEOUT);
            let reply = reply.unwrap_or_else(|_| Err("a shard did not answer".into()));
            let reply = reply.map_err(|error| format!("no provider of {scheme}://: {error}"))?;
            provider = Ok(reply);
        }
        provider
    }

    /// Number of shards.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Gives every shard its socket to the kernel for a device, and waits until all serve theirs.
    ///
    /// # Errors
    /// Fails with `TimedOut` or `BrokenPipe` if a shard cannot serve its socket.
    pub(crate) fn adopt_kernel(
        &self,
        device: DeviceIndex,
        sockets: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let (adopted, answers) = mpsc::channel();
        for (shard, socket) in self.0.iter().zip(sockets) {
            let socket = FrontSocket::Kernel(socket, adopted.clone());
            shard.send(Message::Socket(device, socket));
        }
        drop(adopted);
        let deadline = std::time::Instant::now() + ADOPT_TIMEOUT;
        for _ in &self.0 {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            answers.recv_timeout(left).map_err(|error| match error {
                mpsc::RecvTimeoutError::Timeout => io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "a shard did not take its kernel socket within {} s",
                        ADOPT_TIMEOUT.as_secs()
                    ),
                ),
                mpsc::RecvTimeoutError::Disconnected => io::Error::new(
                    io::ErrorKind::BrokenPipe,
                    "a shard cannot serve its kernel socket; see the log",
                ),
            })?;
        }
        Ok(())
    }

    /// Returns the shards for which front ends are created.
    fn wake(senders: &[Sender<Message>]) -> Shards {
        let count = u16::try_from(senders.len()).unwrap_or(u16::MAX);
        let senders = senders.to_vec();
        Shards { count, wake: Arc::new(move |shard: usize| senders[shard].send(Message::Look)) }
    }

    /// Gives every shard its front end of an added device.
    pub(crate) fn add_fronts(
        &self,
        device: DeviceIndex,
        name: &str,
        carries_kernel: bool,
        fronts: MakeFrontEnds,
    ) {
        for (shard, make) in self.0.iter().zip(fronts(&Self::wake(&self.0))) {
            let front = NewFront { device, name: name.to_owned(), make };
            shard.send(Message::AddFront { front, carries_kernel });
        }
    }

    /// Lets the front ends of a device accept clients.
    pub(crate) fn serve_fronts(&self, device: DeviceIndex) {
        self.0.iter().for_each(|shard| shard.send(Message::ServeFront(device)));
    }

    /// Removes all shards' front ends of a device.
    pub(crate) fn remove_fronts(&self, device: DeviceIndex) {
        self.0.iter().for_each(|shard| shard.send(Message::RemoveFront(device)));
    }

    /// Stops the front ends of a device; requests in flight have this long to finish.
    pub(crate) fn stop_fronts(&self, device: DeviceIndex, grace: Duration) {
        let (device, deadline) = (Some(device), Clock.now() + grace);
        self.0.iter().for_each(|shard| shard.send(Message::StopFront { device, deadline }));
    }

    /// Device of an export's volume in the session.
    pub(crate) fn device_of(&self, export: &str) -> Option<DeviceIndex> {
        let reports = self.reports(Reported::None);
        let control = reports.iter().find(|report| report.engine.shard == CoreIndex(0))?;
        let mut volumes = control.engine.volumes.iter();
        volumes.find(|volume| volume.used && volume.export == export).map(|found| found.device)
    }

    /// Ends all shards immediately, after one of them has failed.
    pub(crate) fn end(&self) {
        self.0.iter().for_each(|shard| shard.send(Message::Exit));
    }

    /// Ends the session.
    pub(crate) fn shut_down(&self, grace: Duration) {
        self.0[0].send(Message::Shutdown { grace });
    }
}

/// Front ends of a volume, for all shards.
pub(crate) struct VolumeFronts {
    /// Name that the front ends offer.
    pub(crate) name: String,
    pub(crate) make: MakeFrontEnds,
}

/// Starts the threads of a session, with the front ends of each of its volumes.
///
/// # Errors
/// Fails with the system's error when threads or descriptors are refused.
pub(crate) fn start(
    settings: &SessionSettings,
    config: SessionConfig,
    fronts: Vec<VolumeFronts>,
    registry: &Arc<FabricRegistry>,
) -> Result<Running, Error> {
    start_threads(settings, config, fronts, registry)
        .map_err(system("cannot start the session's threads"))
}

fn start_threads(
    settings: &SessionSettings,
    config: SessionConfig,
    fronts: Vec<VolumeFronts>,
    registry: &Arc<FabricRegistry>,
) -> io::Result<Running> {
    let poll = PollPolicy { budget_max: settings.poll.get() };
    let shards = usize::from(config.shards);
    let config = Arc::new(config);
    let uuids: Arc<[[u8; 16]]> =
        config.paths.iter().map(|_| random_uuid()).collect::<io::Result<Vec<_>>>()?.into();
    let mailboxes = (0..shards).map(|_| mailbox::<Message>()).collect::<io::Result<Vec<_>>>()?;
    let (senders, boxes) = mailboxes.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
    let (events, from_shards) = mpsc::channel();
    let cpus = pin_plan(settings.pin, config.shards);
    let mut fronts_of: Vec<Vec<NewFront>> = (0..shards).map(|_| Vec::new()).collect();
    for (device, fronts) in DeviceIndex::all().zip(fronts) {
        let made = (fronts.make)(&ShardHandle::wake(&senders));
        for (shard, make) in fronts_of.iter_mut().zip(made) {
            shard.push(NewFront { device, name: fronts.name.clone(), make });
        }
    }
    let mut threads = Vec::with_capacity(shards);
    for (index, (inbox, fronts)) in boxes.into_iter().zip(fronts_of).enumerate() {
        let shard = CoreIndex(u16::try_from(index).unwrap_or(u16::MAX));
        let start = ShardStart {
            shard,
            config: Arc::clone(&config),
            uuids: Arc::clone(&uuids),
            inbox,
            shards: senders.clone(),
            registry: Arc::clone(registry),
            fronts,
            events: Some(events.clone()),
            poll,
            pin: cpus.get(index).copied(),
        };
        let failed = events.clone();
        let body = move || {
            let _alarm = Alarm { shard, events: failed.clone() };
            let result = run_shard(start);
            if let Err(error) = &result
                && failed.send(Event::ShardFailed(shard, error.to_string())).is_err()
            {
                tracing::error!("shard {shard} ended: {error}");
            }
            result
        };
        threads.push(std::thread::Builder::new().name(format!("rtrs-{index}")).spawn(body)?);
    }
    let network = watch_network(senders[0].clone());
    Ok(Running { shards: senders, threads, network, events: from_shards })
}

/// Notifies shard 0 of changes in the host's network, if the system reports them.
fn watch_network(control_shard: Sender<Message>) -> Option<LinkWatcher> {
    let watch = LinkWatcher::start(move |change| control_shard.send(Message::Network(change)));
    let unavailable = |error: &io::Error| {
        tracing::info!(
            "the system does not report link changes ({error}): dead paths are detected by \
             heartbeats and reconnect only after their delays"
        );
    };
    watch.inspect_err(unavailable).ok()
}

/// Reports a shard that panics. Otherwise it would go unnoticed: the other shards continue, and the
/// IO of that shard waits forever. (In a release build, a panic ends the process.)
struct Alarm {
    shard: CoreIndex,
    events: mpsc::Sender<Event>,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.events.send(Event::ShardFailed(self.shard, "panicked".into()));
        }
    }
}

impl Running {
    /// Returns a handle for other threads.
    pub(crate) fn shards(&self) -> ShardHandle {
        ShardHandle(self.shards.clone())
    }

    /// Waits for the threads, which have been asked to end. A shard that does not end within five
    /// seconds ends with the process.
    pub(crate) fn join(self) {
        drop(self.network);
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        for thread in self.threads {
            while !thread.is_finished() && std::time::Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            if thread.is_finished() {
                match thread.join() {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::error!("a shard ended with an error: {error}"),
                    Err(_) => tracing::error!("a shard panicked"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_panic_is_reported() {
        let (events, reported) = mpsc::channel();
        let shard = CoreIndex(1);
        let quiet = Alarm { shard, events: events.clone() };
        drop(quiet);
        assert!(reported.try_recv().is_err(), "nothing happened");
        let thread = std::thread::spawn(move || {
            let _alarm = Alarm { shard, events };
            panic!("on purpose");
        });
        assert!(thread.join().is_err());
        let Ok(Event::ShardFailed(CoreIndex(1), why)) = reported.try_recv() else {
            panic!("no event")
        };
        assert_eq!(why, "panicked");
    }
}
