//! Socket of a device. A thread of its own serves one monitor at a time.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rtrs_core::local::{SocketFile, bind_unix};
use rtrs_core::mem::TruncationAlarm;
use rtrs_core::rt::{Mailbox, Sender, mailbox, peer_pid};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::channel::Channel;
use crate::command::Command;
use crate::exchange::{Exchange, Wait};
use crate::lines::Line;
use crate::log_call;
use crate::monitor::Monitor;
use crate::shared::Shared;

/// Time limit for the rest of a message that has begun, and for the monitor to read answers.
const MESSAGE_TIME: Duration = Duration::from_secs(5);
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Socket of the connected monitor.
type Connection = Arc<parking_lot::Mutex<Option<UnixStream>>>;

/// Reads a monitor's messages and passes them to [`Monitor`].
type Handler = BackendReqHandler<Mutex<Monitor>>;

/// Part of the service that one shard takes over when it gets the device.
#[derive(Debug)]
pub struct Seat {
    pub(crate) shared: Arc<Shared>,
    pub(crate) shard: u16,
    pub(crate) mailbox: Mailbox<Command>,
    /// Service of the socket; only on shard 0.
    pub(crate) service: Option<Service>,
}

/// Guest of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestOptions {
    /// Number of queues that the guest may use, by default up to 64.
    pub queues: Option<u16>,
    /// Whether the guest may have run on another host before, with a cache mode that its monitor
    /// does not transfer. Until the guest sets its mode here, writes are durable when they are
    /// answered.
    pub is_arriving: bool,
}

/// Bound socket of a device that is not served yet.
#[derive(Debug)]
pub struct Bound {
    listener: UnixListener,
    file: SocketFile,
}

impl Bound {
    /// Binds a socket, replacing one that a dead process left behind.
    ///
    /// # Errors
    /// The system's error; `AddrInUse` if another process listens there.
    pub fn new(path: &Path) -> io::Result<Self> {
        let (listener, file) = bind_unix(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, file })
    }

    /// Returns the seats of the shards, at least one, of the volume `name`.
    ///
    /// # Errors
    /// The system's error if there is no descriptor left.
    pub fn seats(self, name: &str, shards: u16, guest: GuestOptions) -> io::Result<Vec<Seat>> {
        let GuestOptions { queues, is_arriving } = guest;
        self.seats_of(Shared::new(name, shards)?.with_queues(queues).with_arrival(is_arriving))
    }

    /// Returns the seats of a device's shards.
    pub(crate) fn seats_of(self, shared: Shared) -> io::Result<Vec<Seat>> {
        let (shards, shared) = (shared.shards, Arc::new(shared));
        let (senders, mailboxes): (Vec<_>, Vec<_>) =
            (0..shards).map(|_| mailbox()).collect::<io::Result<Vec<_>>>()?.into_iter().unzip();
        let connection = Connection::default();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let Self { listener, file } = self;
        let serving = Serving {
            listener,
            stop: Arc::clone(&stop),
            shared: Arc::clone(&shared),
            shards: senders,
            connection: Arc::clone(&connection),
            channel: None,
        };
        let mut service = Some(Service { _file: file, stop, connection, waiting: Some(serving) });
        let seat = |(shard, mailbox)| {
            let service = service.take();
            Seat { shared: Arc::clone(&shared), shard, mailbox, service }
        };
        Ok((0..).zip(mailboxes).map(seat).collect())
    }
}

/// Service of a socket. Dropping it stops the service: the monitor is disconnected once the
/// requests in flight have ended.
#[derive(Debug)]
pub(crate) struct Service {
    /// File of the socket, removed with the service.
    _file: SocketFile,
    stop: Arc<OwnedFd>,
    connection: Connection,
    /// State of the thread until the thread starts.
    waiting: Option<Serving>,
}

impl Service {
    /// Starts the thread, which also serves a monitor that connected before the start.
    pub(crate) fn start(&mut self) -> io::Result<()> {
        let Some(mut serving) = self.waiting.take() else { return Ok(()) };
        let run = move || {
            if let Err(error) = serving.run() {
                tracing::error!("{}: the socket is not served: {error}", serving.shared.name);
            }
        };
        thread::Builder::new().name("rtrs-vhost".into()).spawn(run).map(drop)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // A monitor that does not finish a message must not keep the thread. An error means that
        // the monitor has disconnected.
        if let Some(stream) = &*self.connection.lock() {
            let _ = stream.shutdown(Shutdown::Read);
        }
        // A full counter is readable already.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
    }
}

/// Event for which the thread waits.
enum Event {
    Stop,
    Message,
    Connection,
    /// The geometry of the device has changed.
    Change,
    /// The monitor has truncated the guest's memory.
    Truncation,
}

/// Connection of a monitor, and the alarm of its memory.
#[derive(Clone, Copy)]
struct Watched<'a> {
    stream: &'a UnixStream,
    alarm: &'a TruncationAlarm,
}

/// Thread of the service.
#[derive(Debug)]
struct Serving {
    listener: UnixListener,
    stop: Arc<OwnedFd>,
    shared: Arc<Shared>,
    shards: Vec<Sender<Command>>,
    connection: Connection,
    /// Channel to the connected monitor.
    channel: Option<Channel>,
}

impl Serving {
    fn run(&mut self) -> io::Result<()> {
        loop {
            match self.wait(None)? {
                Event::Stop => return Ok(()),
                Event::Message | Event::Truncation => {}
                Event::Change => drop(self.shared.take_change()),
                Event::Connection => {
                    let Some(stream) = self.accept() else { continue };
                    match self.serve(stream) {
                        Ok(true) => {}
                        Ok(false) => return Ok(()),
                        Err(error) => self.log_not_served(&error),
                    }
                }
            }
        }
    }

    /// Waits for the next event. A stop takes precedence, then a truncation, then messages.
    fn wait(&self, watched: Option<Watched<'_>>) -> io::Result<Event> {
        loop {
            let [stop, changed] = [self.stop.as_fd(), self.shared.changed.as_fd()];
            let alarm = watched.map(|watched| watched.alarm.event());
            let stream = watched.map(|watched| watched.stream.as_fd());
            let fds = [Some(stop), alarm, stream, Some(self.listener.as_fd()), Some(changed)];
            let mut events = fds.map(|fd| {
                let flags = if fd.is_some() { PollFlags::IN } else { PollFlags::empty() };
                PollFd::from_borrowed_fd(fd.unwrap_or(stop), flags)
            });
            match poll(&mut events, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let found = events.iter().position(|event| !event.revents().is_empty());
            match found {
                Some(0) => return Ok(Event::Stop),
                Some(1) => return Ok(Event::Truncation),
                Some(2) => return Ok(Event::Message),
                Some(4) => return Ok(Event::Change),
                Some(_) => return Ok(Event::Connection),
                None => {}
            }
        }
    }

    fn log_not_served(&self, error: &io::Error) {
        if let Some(repeated) = self.shared.admit(Line::NotServed) {
            let name = &self.shared.name;
            tracing::warn!(repeated, "{name}: a connection cannot be served: {error}");
        }
    }

    fn accept(&self) -> Option<UnixStream> {
        match self.listener.accept() {
            Ok((stream, _)) => Some(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                self.log_not_served(&error);
                // If no descriptor is free, the connection stays in the listen queue.
                thread::sleep(ACCEPT_PAUSE);
                None
            }
        }
    }

    /// Serves a monitor until it disconnects. Returns false if the service has to stop.
    fn serve(&mut self, stream: UnixStream) -> io::Result<bool> {
        stream.set_read_timeout(Some(MESSAGE_TIME))?;
        stream.set_write_timeout(Some(MESSAGE_TIME))?;
        let alarm = TruncationAlarm::of(Arc::clone(&self.shared.share))?;
        let watched = stream.try_clone()?;
        *self.connection.lock() = Some(stream.try_clone()?);
        let monitor = Arc::new(Mutex::new(Monitor::new(&self.shared, &self.shards, &alarm)));
        let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&monitor));
        let pid = peer_pid(&watched).ok().filter(|pid| *pid != 0);
        self.shared.connected(pid);
        if let Some(repeated) = self.shared.admit(Line::Connected) {
            let name = &self.shared.name;
            tracing::info!(pid, repeated, "{name}: virtual machine monitor connected");
        }
        // The monitor reads the current size now, so earlier changes need no message.
        self.shared.take_change();
        let watched = Watched { stream: &watched, alarm: &alarm };
        let goes_on = self.handle(watched, &mut handler);
        self.channel = None;
        *self.connection.lock() = None;
        let is_in_use = lock(&monitor).end();
        if self.shared.has_only_kicks()
            && let Some(repeated) = self.shared.admit(Line::NotShared)
        {
            let name = &self.shared.name;
            let text = "the guest kicked its queues, but no request appeared in them";
            tracing::warn!(repeated, "{name}: {text}; its memory must be shared");
        }
        // A guest that could not use the device has left nothing here.
        self.shared.disconnected(is_in_use && !self.shared.is_arriving());
        goes_on
    }

    /// Handles messages until the monitor disconnects. Returns false if the service has to stop.
    fn handle(&mut self, watched: Watched<'_>, handler: &mut Handler) -> io::Result<bool> {
        let stream = watched.stream;
        loop {
            match self.wait(Some(watched))? {
                Event::Stop => return Ok(false),
                Event::Truncation => {
                    self.log_end(&Error::InvalidOperation("guest memory was truncated"));
                    return Ok(true);
                }
                Event::Connection => self.refuse(),
                Event::Change => self.tell_change(),
                Event::Message => {
                    let exchange = Exchange { stream, stop: self.stop.as_fd() };
                    let late = match exchange.wait(MESSAGE_TIME)? {
                        Wait::Stop => return Ok(false),
                        Wait::Ready => None,
                        Wait::NoMessage => Some("a message is incomplete"),
                        Wait::NoRoom => Some("the monitor does not read answers"),
                    };
                    let read = match late {
                        Some(why) => Err(Error::InvalidOperation(why)),
                        None => self.read(stream, handler),
                    };
                    if let Err(error) = read {
                        self.log_end(&error);
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Logs why a connection has ended.
    fn log_end(&self, error: &Error) {
        let name = &self.shared.name;
        if matches!(error, Error::Disconnected) {
            if let Some(repeated) = self.shared.admit(Line::Disconnected) {
                tracing::info!(repeated, "{name}: virtual machine monitor disconnected");
            }
        } else if let Some(repeated) = self.shared.admit(Line::Message(error.to_string())) {
            tracing::warn!(repeated, "{name}: virtual machine monitor: {error}");
        }
    }

    /// Reads and handles a message.
    fn read(&mut self, stream: &UnixStream, handler: &mut Handler) -> Result<(), Error> {
        if log_call::take(stream).map_err(Error::ReqHandlerError)? {
            return Ok(());
        }
        let channel = Channel::passed(stream);
        handler.handle_request()?;
        if channel.is_some() {
            self.channel = channel;
        }
        Ok(())
    }

    /// Reports to the monitor that the size of the device has changed.
    fn tell_change(&mut self) {
        if self.shared.take_change()
            && let Some(channel) = &self.channel
            && let Err(error) = channel.config_changed()
            && let Some(repeated) = self.shared.admit(Line::SizeNotTold)
        {
            let name = &self.shared.name;
            tracing::warn!(repeated, "{name}: cannot announce the new size to the guest: {error}");
        }
    }

    /// Refuses a second monitor.
    fn refuse(&mut self) {
        let is_refused = self.accept().is_some();
        if is_refused && let Some(repeated) = self.shared.admit(Line::Refused) {
            let name = &self.shared.name;
            tracing::warn!(repeated, "{name}: connection refused: a monitor is already connected");
        }
    }
}

/// Locks the monitor's state, which only this thread uses.
fn lock(monitor: &Mutex<Monitor>) -> MutexGuard<'_, Monitor> {
    monitor.lock().unwrap_or_else(PoisonError::into_inner)
}
