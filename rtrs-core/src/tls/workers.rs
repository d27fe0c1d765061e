//! The TLS of a process: its configuration, and the threads on which handshakes compute.
//!
//! A signature and a key exchange take a good part of a millisecond, too long for a shard. Jobs
//! wait in one queue of bounded length. Connections that were closed meanwhile are passed over.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use super::config::{TlsClientConfig, TlsServerConfig};
use super::handshake::{Begin, Handshake, Progress, RequestLen};
use crate::rt::Sender;
use parking_lot::{Condvar, Mutex, RwLock};

/// Threads; each is busy only while it computes.
const WORKERS: usize = 2;
/// Jobs that wait at most. Beyond that connections are closed.
const JOBS_MAX: usize = 4096;

/// A step of a handshake.
pub(crate) struct Job {
    /// The shard's number for it.
    pub(crate) token: u64,
    pub(crate) handshake: Box<Handshake>,
    pub(crate) received: Vec<u8>,
    /// Gone when the connection is.
    pub(crate) wanted: Weak<()>,
    pub(crate) reply: Sender<Done>,
}

/// Anything else that takes long.
type Task = Box<dyn FnOnce() + Send>;

/// What a thread is to do.
enum Work {
    Handshake(Job),
    Task(Task),
}

/// A step that was taken.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) token: u64,
    pub(crate) handshake: Box<Handshake>,
    pub(crate) progress: Progress,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("output", &self.output.len()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Role {
    Server(TlsServerConfig),
    Client(TlsClientConfig),
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Work>,
    closed: bool,
}

/// What all shards of a process share for TLS. Its threads end with it.
pub struct TlsEndpoint {
    role: RwLock<Role>,
    queue: Arc<(Mutex<Queue>, Condvar)>,
}

impl TlsEndpoint {
    /// For a server.
    ///
    /// # Errors
    /// The system's if there can be no thread.
    pub fn server(config: TlsServerConfig) -> io::Result<Arc<Self>> {
        Self::start(Role::Server(config))
    }

    /// For a client.
    ///
    /// # Errors
    /// As [`TlsEndpoint::server`].
    pub fn client(config: TlsClientConfig) -> io::Result<Arc<Self>> {
        Self::start(Role::Client(config))
    }

    fn start(role: Role) -> io::Result<Arc<Self>> {
        let endpoint = Self { role: RwLock::new(role), queue: Arc::default() };
        for _ in 0..WORKERS {
            let queue = Arc::clone(&endpoint.queue);
            let thread = std::thread::Builder::new().name("tls-handshake".into());
            // It ends when the queue is closed.
            drop(thread.spawn(move || work(&queue))?);
        }
        Ok(Arc::new(endpoint))
    }

    /// From now on new connections of a server use this. Returns its number, which the
    /// [`Proof`](crate::fabric::Proof)s have that are checked against it.
    pub fn replace(&self, mut config: TlsServerConfig) -> u64 {
        let mut role = self.role.write();
        config.generation = match &*role {
            Role::Server(before) => before.generation + 1,
            Role::Client(_) => 0,
        };
        let generation = config.generation;
        *role = Role::Server(config);
        generation
    }

    /// Begins the handshake of an accepted connection. None at a client's endpoint.
    pub(crate) fn accept(&self, request_len: RequestLen) -> Option<Handshake> {
        match &*self.role.read() {
            Role::Server(config) => {
                Some(Handshake::new(Begin::Server { config: config.clone(), request_len }))
            }
            Role::Client(_) => None,
        }
    }

    /// Begins the handshake with a server, whose certificate must have this name, or else its
    /// address. The request goes out with its end. None at a server's endpoint.
    pub(crate) fn connect(
        &self,
        address: IpAddr,
        name: Option<&str>,
        request: Vec<u8>,
    ) -> Option<Handshake> {
        match &*self.role.read() {
            Role::Client(config) => {
                let name = config.server_name(address, name);
                Some(Handshake::new(Begin::Client { config: config.clone(), name, request }))
            }
            Role::Server(_) => None,
        }
    }

    /// Lets a thread take a step. False when too many wait.
    pub(crate) fn submit(&self, job: Job) -> bool {
        self.enqueue(Work::Handshake(job))
    }

    /// Lets a thread do something with the configuration of a server as it is now. False when too
    /// much waits, and at a client's endpoint.
    pub fn compute(&self, task: impl FnOnce(&TlsServerConfig) + Send + 'static) -> bool {
        let config = match &*self.role.read() {
            Role::Server(config) => config.clone(),
            Role::Client(_) => return false,
        };
        self.enqueue(Work::Task(Box::new(move || task(&config))))
    }

    fn enqueue(&self, work: Work) -> bool {
        let (queue, more) = &*self.queue;
        let mut queue = queue.lock();
        if queue.jobs.len() >= JOBS_MAX {
            return false;
        }
        queue.jobs.push_back(work);
        drop(queue);
        more.notify_one();
        true
    }
}

impl Drop for TlsEndpoint {
    fn drop(&mut self) {
        self.queue.0.lock().closed = true;
        self.queue.1.notify_all();
    }
}

impl fmt::Debug for TlsEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let jobs = self.queue.0.lock().jobs.len();
        f.debug_struct("TlsEndpoint").field("jobs", &jobs).finish_non_exhaustive()
    }
}

fn work((queue, more): &(Mutex<Queue>, Condvar)) {
    loop {
        let mut at = queue.lock();
        let job = loop {
            match at.jobs.pop_front() {
                Some(job) => break job,
                None if at.closed => return,
                None => more.wait(&mut at),
            }
        };
        drop(at);
        let job = match job {
            Work::Handshake(job) => job,
            Work::Task(task) => {
                task();
                continue;
            }
        };
        let Job { token, mut handshake, received, wanted, reply } = job;
        if wanted.strong_count() > 0 {
            let progress = handshake.advance(&received);
            reply.send(Done { token, handshake, progress });
        }
    }
}
