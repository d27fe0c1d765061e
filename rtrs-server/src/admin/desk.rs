//! The server's end of the control socket.
//!
//! Owns [`Desk`]: a thread of its own answers questions one after the other and asks the control
//! core by mail, which no backend holds up. A drain has a thread too, since it flushes the exports
//! first, and its answer comes from the server's main thread, when all others have ended. Without
//! `--name` and `--run-dir` a server that cannot have a control socket serves all the same.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use parking_lot::Mutex;
use rtrs_core::local::{ControlSocket, RunDir, check_socket_path, reply};
use rtrs_core::rt::Sender;
use rtrs_core::time::Duration;
use serde_json::{Value, json};

use super::question::{Question, WITHIN_MS_MAX};
use crate::engine::message::{AdminAnswer, AdminAsk, AdminReply, ControlMessage, Message};
use crate::epoch::SyncEpoch;
use crate::error::{Error, ErrorKind};
use crate::export::{ExportIndex, ExportTable};
use crate::plan::Plan;

/// How long the control core has for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// What saving an epoch may take in a drain.
const SAVE_MAX: Duration = Duration::from_secs(2);
/// What a flush at the end of a drain may take at least, when the time is up.
const FLUSH_MIN: Duration = Duration::from_secs(1);

/// A drain that was begun, and who waits for it.
struct Draining {
    stream: UnixStream,
    until: Instant,
    answer: mpsc::Receiver<AdminAnswer>,
}

/// What the threads of the desk share.
struct Shared {
    name: String,
    portals: Vec<String>,
    exports: Arc<ExportTable>,
    control: Sender<Message>,
    /// A drain is under way.
    busy: AtomicBool,
    draining: Mutex<Option<Draining>>,
}

/// A running server's control socket.
pub(crate) struct Desk {
    shared: Arc<Shared>,
    socket: ControlSocket,
}

/// The name of a server that was given none: where it listens first.
fn name_of(portals: &[String]) -> Option<String> {
    let (_, address) = portals.first()?.split_once("://")?;
    let everywhere = ["[::]:", "0.0.0.0:"].iter().find_map(|any| address.strip_prefix(any));
    Some(everywhere.unwrap_or(address).to_owned())
}

impl Desk {
    /// Opens the control socket of a server that listens on these portals. None when there can be
    /// none and nothing was said about it.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] and others, when it cannot be had as it was wanted.
    pub(crate) fn open(
        plan: &Plan,
        portals: &[String],
        exports: &Arc<ExportTable>,
        control: &Sender<Message>,
    ) -> Result<Option<Self>, Error> {
        let said = plan.name.is_some() || plan.run_dir.is_some();
        match Self::bind(plan, portals, exports, control) {
            Ok(desk) => Ok(Some(desk)),
            Err(error) if said => Err(error),
            Err(error) => {
                let error = error.chain();
                tracing::warn!("no control socket, so no `session list` and no `drain`: {error}");
                Ok(None)
            }
        }
    }

    fn bind(
        plan: &Plan,
        portals: &[String],
        exports: &Arc<ExportTable>,
        control: &Sender<Message>,
    ) -> Result<Self, Error> {
        let run_dir = RunDir::new(plan.run_dir.clone())?;
        run_dir.make()?;
        run_dir.check()?;
        let name = plan.name.clone().or_else(|| name_of(portals));
        let name = name.unwrap_or_else(|| std::process::id().to_string());
        let path = run_dir.server_socket(&name);
        check_socket_path("control socket", &path)?;
        let failed = |error| {
            let what = format!("cannot listen on the control socket {}", path.display());
            Error::with_source(ErrorKind::InUse, what, error)
        };
        let socket = ControlSocket::bind(&path).map_err(failed)?;
        let shared = Arc::new(Shared {
            name,
            portals: portals.to_vec(),
            exports: Arc::clone(exports),
            control: control.clone(),
            busy: AtomicBool::new(false),
            draining: Mutex::new(None),
        });
        let asked = Arc::clone(&shared);
        socket.serve(move |question, stream| asked.hear(question, stream)).map_err(failed)?;
        tracing::info!(name = %shared.name, "control socket at {}", path.display());
        Ok(Self { shared, socket })
    }

    /// The server's threads have ended. Finishes a drain: flushes what was written, gives up the
    /// control socket, and answers.
    ///
    /// # Errors
    /// [`ErrorKind::System`] for a drain that could not answer or flush everything.
    pub(crate) fn close(self) -> Result<(), Error> {
        let Self { shared, socket } = self;
        let drain = shared.draining.lock().take();
        let Some(Draining { stream, until, answer }) = drain else { return Ok(()) };
        let left = until.saturating_duration_since(Instant::now()).max(FLUSH_MIN);
        let mut wrong = Vec::new();
        // Without an answer a signal has ended the server before.
        let begun = match answer.try_recv() {
            Ok(AdminAnswer::Drained { unfinished }) => {
                if unfinished > 0 {
                    wrong.push(format!("{unfinished} requests had not ended in time"));
                }
                true
            }
            _ => false,
        };
        if begun && let Err(error) = settle(&shared.exports, left) {
            wrong.push(error.to_string());
        }
        drop((socket, shared));
        let wrong = wrong.join("; ");
        let value = match (begun, &*wrong) {
            (true, "") => json!({ "drained": true }),
            (true, wrong) => refusal(format!("the server has ended, but {wrong}")),
            (false, _) => refusal("not drained: the server was ended otherwise before"),
        };
        send(&stream, &value);
        // Closed by the end of the process, which is what the one who asked waits for.
        std::mem::forget(stream);
        if wrong.is_empty() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::System, format!("drained, but {wrong}")))
    }
}

impl Shared {
    fn hear(self: &Arc<Self>, question: &str, stream: UnixStream) {
        let value = match serde_json::from_str::<Question>(question) {
            Err(error) => refusal(format!("not understood: {error}")),
            Ok(Question::Status) => json!({
                "name": self.name,
                "pid": std::process::id(),
                "version": env!("CARGO_PKG_VERSION"),
                "portals": self.portals,
                "draining": self.busy.load(Ordering::SeqCst),
            }),
            Ok(Question::SessionList) => self.ask(AdminAsk::Sessions),
            Ok(Question::SessionDisconnect { session, path }) => {
                self.ask(AdminAsk::Disconnect { session, path })
            }
            Ok(Question::SessionEvict { session }) => self.ask(AdminAsk::Evict { session }),
            Ok(Question::Drain { within_ms }) if within_ms > WITHIN_MS_MAX => {
                refusal(format!("within_ms {within_ms} is out of range; use 0 to {WITHIN_MS_MAX}"))
            }
            Ok(Question::Drain { within_ms }) => {
                if self.busy.swap(true, Ordering::SeqCst) {
                    refusal("a drain is already under way")
                } else {
                    return self.begin_drain(stream, Duration::from_millis(within_ms));
                }
            }
        };
        send(&stream, &value);
    }

    fn mail(&self, ask: AdminAsk) -> mpsc::Receiver<AdminAnswer> {
        let (answered, answer) = mpsc::channel();
        let reply = AdminReply::new(move |answer| {
            if answered.send(answer).is_err() {
                tracing::debug!("who asked is gone");
            }
        });
        self.control.send(Message::Control(ControlMessage::Admin { ask, reply }));
        answer
    }

    fn ask(&self, ask: AdminAsk) -> Value {
        match self.mail(ask).recv_timeout(ANSWER_TIMEOUT) {
            Ok(AdminAnswer::Sessions(list)) => json!({ "sessions": list }),
            Ok(AdminAnswer::Ended { session, paths }) => {
                json!({ "session": session, "paths": paths })
            }
            Ok(AdminAnswer::Drained { .. }) => json!({ "drained": true }),
            Ok(AdminAnswer::Refused(why)) => refusal(why),
            Err(_) => refusal("the server is ending, or too busy to answer"),
        }
    }

    fn begin_drain(self: &Arc<Self>, stream: UnixStream, within: Duration) {
        let Ok(other) = stream.try_clone() else {
            self.busy.store(false, Ordering::SeqCst);
            return;
        };
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().name("rtrs-drain".into());
        if let Err(error) = thread.spawn(move || shared.drain(stream, within)) {
            self.busy.store(false, Ordering::SeqCst);
            send(&other, &refusal(format!("cannot start a thread: {error}")));
        }
    }

    /// Flushes while everything is still served, so that little is left to flush while clients
    /// wait; then asks the control core. The answer is [`Desk::close`]'s.
    fn drain(&self, stream: UnixStream, within: Duration) {
        let until = Instant::now() + within;
        match settle(&self.exports, within / 2) {
            Err(error) if error.kind() != io::ErrorKind::TimedOut => {
                tracing::error!("not draining: {error}");
                self.busy.store(false, Ordering::SeqCst);
                return send(&stream, &refusal(format!("not draining, and serving on: {error}")));
            }
            // It is tried again when no more is written.
            Err(error) => tracing::warn!("draining all the same: {error}"),
            Ok(()) => {}
        }
        let mut draining = self.draining.lock();
        let within = until.saturating_duration_since(Instant::now());
        // Held until the drain stands there: its answer is looked for when the server has ended.
        let answer = self.mail(AdminAsk::Drain { within });
        *draining = Some(Draining { stream, until, answer });
    }
}

fn refusal(why: impl Into<String>) -> Value {
    json!({ "error": why.into() })
}

fn send(stream: &UnixStream, value: &Value) {
    if let Err(error) = reply(stream, &value.to_string()) {
        tracing::debug!("control socket: {error}");
    }
}

/// Waits until a failure is kept for the next server, which is before anybody hears of it.
fn wait_saved(epoch: &SyncEpoch, rises: u32) {
    let until = Instant::now() + SAVE_MAX;
    while !epoch.is_saved(rises) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Flushes all exports, within a bound. A flush that takes longer goes on by itself.
fn settle(exports: &Arc<ExportTable>, limit: Duration) -> io::Result<()> {
    let (told, heard) = mpsc::channel();
    let at = Arc::new(Mutex::new(String::new()));
    let (exports, now_at) = (Arc::clone(exports), Arc::clone(&at));
    std::thread::Builder::new().name("rtrs-flush".into()).spawn(move || {
        let result = (0..exports.len()).try_for_each(|index| {
            let index = ExportIndex(u16::try_from(index).unwrap_or(u16::MAX));
            let Some(export) = exports.get(index) else { return Ok(()) };
            now_at.lock().clone_from(&export.name);
            export.source.settle().map_err(|error| {
                wait_saved(&export.epoch, export.epoch.raise());
                let text = format!("export {:?} cannot be flushed: {error}", export.name);
                io::Error::new(error.kind(), text)
            })
        });
        // Nobody waits for it any more when it took too long.
        let _ = told.send(result);
    })?;
    heard.recv_timeout(limit).unwrap_or_else(|_| {
        let text = format!(
            "the flush of export {:?} takes longer than {} ms",
            at.lock().as_str(),
            limit.as_millis()
        );
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Condvar;

    use rtrs_core::block::{BlockDevice, BlockSource, Core, Geometry};

    use crate::export::Export;

    #[test]
    fn a_server_is_named_by_where_it_listens_first() {
        for (portals, name) in [
            (&["tcp://127.0.0.1:1234", "rdma://10.0.0.1:1"][..], Some("127.0.0.1:1234")),
            (&["tcp://[::]:1234"], Some("1234")),
            (&["rdma://0.0.0.0:7"], Some("7")),
            (&["tcp://[::1]:9"], Some("[::1]:9")),
            (&[], None),
        ] {
            let portals: Vec<String> = portals.iter().map(|&portal| portal.to_owned()).collect();
            assert_eq!(name_of(&portals).as_deref(), name);
        }
    }

    /// Flushes with this result, when it is let.
    #[derive(Debug)]
    struct Slow {
        gate: Arc<(std::sync::Mutex<bool>, Condvar)>,
        error: Option<i32>,
    }

    impl BlockSource for Slow {
        fn geometry(&self) -> Geometry {
            Geometry::plain(4096)
        }
        fn open(&self, _core: &Core) -> io::Result<Box<dyn BlockDevice>> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn settle(&self) -> io::Result<()> {
            let (open, wake) = &*self.gate;
            let mut open = open.lock().unwrap();
            while !*open {
                open = wake.wait(open).unwrap();
            }
            self.error.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }
    }

    #[test]
    fn a_flush_is_bounded_and_its_error_names_the_export() {
        let gate = Arc::new((std::sync::Mutex::new(false), Condvar::new()));
        let export = |name: &str, error| Export {
            name: name.into(),
            source: Arc::new(Slow { gate: Arc::clone(&gate), error }),
            read_only: false,
            id: None,
            epoch: Arc::default(),
        };
        let table = ExportTable::new(vec![export("good", None), export("bad", Some(5))]);
        let error = settle(&table, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("the flush of export \"good\""), "{error}");
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        let error = settle(&table, Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().starts_with("export \"bad\" cannot be flushed: "), "{error}");
        settle(&ExportTable::new(vec![export("good", None)]), Duration::from_secs(60)).unwrap();
    }
}
