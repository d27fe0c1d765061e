//! TLS state of a process: its configuration, and the threads that compute handshakes.
//!
//! A signature and a key exchange take a large fraction of a millisecond, too long for a shard.
//! Handshake steps and other tasks (proofs over RDMA) wait in two bounded queues, from which the
//! threads take work alternately, so that a flood of one kind does not delay the other. Connections
//! closed in the meantime are skipped.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use super::config::{TlsClientConfig, TlsServerConfig};
use super::error::TlsConfigError;
use super::handshake::{Begin, Handshake, Progress, RequestLen};
use crate::rt::Sender;
use parking_lot::{Condvar, Mutex, RwLock};

/// Number of threads; each is busy only while it computes.
const WORKERS: usize = 2;
/// Maximum number of queued handshake steps. Beyond that, connections are closed.
const JOBS_MAX: usize = 4096;
/// Maximum number of queued other tasks. Beyond that, they are refused.
const TASKS_MAX: usize = 1024;

/// Handshake step.
pub(crate) struct Job {
    /// Token chosen by the shard.
    pub(crate) token: u64,
    pub(crate) handshake: Box<Handshake>,
    pub(crate) received: Vec<u8>,
    /// Dropped when the connection is closed.
    pub(crate) wanted: Weak<()>,
    pub(crate) reply: Sender<Done>,
}

/// Long computation other than a handshake step.
type Task = Box<dyn FnOnce() + Send>;

/// Work for a thread.
#[derive(Debug, PartialEq, Eq)]
enum Work<J = Job, T = Task> {
    Handshake(J),
    Task(T),
}

/// Completed handshake step.
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

struct Queue<J = Job, T = Task> {
    jobs: VecDeque<J>,
    tasks: VecDeque<T>,
    /// The last work taken was a task.
    task_last: bool,
    closed: bool,
}

impl<J, T> Default for Queue<J, T> {
    fn default() -> Self {
        let (jobs, tasks) = (VecDeque::new(), VecDeque::new());
        Self { jobs, tasks, task_last: false, closed: false }
    }
}

impl<J, T> Queue<J, T> {
    /// Returns the next piece of work, alternating between the queues.
    fn take(&mut self) -> Option<Work<J, T>> {
        let task_first = !self.task_last || self.jobs.is_empty();
        let task = if task_first { self.tasks.pop_front() } else { None };
        self.task_last = task.is_some();
        match task {
            Some(task) => Some(Work::Task(task)),
            None => self.jobs.pop_front().map(Work::Handshake),
        }
    }
}

/// TLS state shared by all shards of a process. The threads exit when this state is dropped.
pub struct TlsEndpoint {
    role: RwLock<Role>,
    queue: Arc<(Mutex<Queue>, Condvar)>,
}

impl TlsEndpoint {
    /// Creates the endpoint of a server.
    ///
    /// # Errors
    /// Returns the system's error if a thread cannot be started.
    pub fn server(config: TlsServerConfig) -> io::Result<Arc<Self>> {
        Self::start(Role::Server(config))
    }

    /// Creates the endpoint of a client.
    ///
    /// # Errors
    /// See [`TlsEndpoint::server`].
    pub fn client(config: TlsClientConfig) -> io::Result<Arc<Self>> {
        Self::start(Role::Client(config))
    }

    fn start(role: Role) -> io::Result<Arc<Self>> {
        let endpoint = Self { role: RwLock::new(role), queue: Arc::default() };
        for _ in 0..WORKERS {
            let queue = Arc::clone(&endpoint.queue);
            let thread = std::thread::Builder::new().name("tls-handshake".into());
            // The thread exits when the queue is closed.
            drop(thread.spawn(move || work(&queue))?);
        }
        Ok(Arc::new(endpoint))
    }

    /// Uses this configuration for new connections of a server. Returns its number, which is part
    /// of each [`Proof`](crate::fabric::Proof) checked against it. If the new configuration equals
    /// the current one, the current one stays in use and keeps its number, so that clients that are
    /// proving their identity need not start over.
    pub fn replace(&self, mut config: TlsServerConfig) -> u64 {
        let mut role = self.role.write();
        config.generation = match &*role {
            Role::Server(before) if config.changes_since(before).is_empty() => {
                return before.generation;
            }
            Role::Server(before) => before.generation + 1,
            Role::Client(_) => 0,
        };
        let generation = config.generation;
        *role = Role::Server(config);
        generation
    }

    /// Returns the current configuration of a server; None for a client.
    pub fn server_config(&self) -> Option<TlsServerConfig> {
        match &*self.role.read() {
            Role::Server(config) => Some(config.clone()),
            Role::Client(_) => None,
        }
    }

    /// Returns the differences between a configuration and a server's current configuration.
    pub fn changes_to(&self, config: &TlsServerConfig) -> Vec<String> {
        match &*self.role.read() {
            Role::Server(before) => config.changes_since(before),
            Role::Client(_) => Vec::new(),
        }
    }

    /// Checks whether a configuration that was reread can replace a server's current configuration.
    /// Returns the problem with its certificate, if that certificate is in use.
    ///
    /// # Errors
    /// Returns a [`TlsConfigError`] that names the file.
    pub fn check_renewed(
        &self,
        config: &TlsServerConfig,
    ) -> Result<Option<String>, TlsConfigError> {
        match &*self.role.read() {
            Role::Server(before) => config.check_renewed(before),
            Role::Client(_) => config.check_own().map(|_| None),
        }
    }

    /// Returns when the server's current certificate expires, in seconds since 1970.
    pub fn expires(&self) -> Option<u64> {
        match &*self.role.read() {
            Role::Server(config) => config.expires(),
            Role::Client(_) => None,
        }
    }

    /// Returns the problem with the server's current certificate: it has expired, or will soon.
    pub fn expiry_warning(&self) -> Option<String> {
        match &*self.role.read() {
            Role::Server(config) => match config.check_own() {
                Ok(soon) => soon,
                Err(error) => Some(format!("{}: clients refuse the certificate", error.chain())),
            },
            Role::Client(_) => None,
        }
    }

    /// Returns a message for each revocation list of the configuration that is older than the
    /// current one.
    pub fn older_lists(&self, config: &TlsServerConfig) -> Vec<String> {
        match &*self.role.read() {
            Role::Server(before) => config.older_lists_than(before),
            Role::Client(_) => Vec::new(),
        }
    }

    /// Begins the handshake of an accepted connection. Returns None at a client's endpoint.
    pub(crate) fn accept(&self, request_len: RequestLen) -> Option<Handshake> {
        match &*self.role.read() {
            Role::Server(config) => {
                Some(Handshake::new(Begin::Server { config: config.clone(), request_len }))
            }
            Role::Client(_) => None,
        }
    }

    /// Begins the handshake with a server, whose certificate must contain this name or, if there is
    /// none, the server's address. The request is sent along with the end of the handshake. Returns
    /// None at a server's endpoint.
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

    /// Submits a handshake step to a thread. Returns false if too many are queued.
    pub(crate) fn submit(&self, job: Job) -> bool {
        self.enqueue(|queue| {
            let room = queue.jobs.len() < JOBS_MAX;
            if room {
                queue.jobs.push_back(job);
            }
            room
        })
    }

    /// Runs a task on a thread with a server's current configuration. Returns false if too many
    /// tasks are queued, or at a client's endpoint.
    pub fn compute(&self, task: impl FnOnce(&TlsServerConfig) + Send + 'static) -> bool {
        let config = match &*self.role.read() {
            Role::Server(config) => config.clone(),
            Role::Client(_) => return false,
        };
        self.enqueue(|queue| {
            let room = queue.tasks.len() < TASKS_MAX;
            if room {
                queue.tasks.push_back(Box::new(move || task(&config)));
            }
            room
        })
    }

    fn enqueue(&self, add: impl FnOnce(&mut Queue) -> bool) -> bool {
        let (queue, more) = &*self.queue;
        let added = add(&mut queue.lock());
        if added {
            more.notify_one();
        }
        added
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
        let queue = self.queue.0.lock();
        let (jobs, tasks) = (queue.jobs.len(), queue.tasks.len());
        f.debug_struct("TlsEndpoint")
            .field("jobs", &jobs)
            .field("tasks", &tasks)
            .finish_non_exhaustive()
    }
}

fn work((queue, more): &(Mutex<Queue>, Condvar)) {
    loop {
        let mut at = queue.lock();
        let job = loop {
            match at.take() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_kinds_of_work_do_not_block_each_other() {
        let mut queue = Queue { jobs: (0..100).collect(), ..Queue::<i32, &str>::default() };
        queue.tasks.extend(["a", "b"]);
        let mut taken = || queue.take().unwrap();
        let first = [taken(), taken(), taken(), taken(), taken()];
        let [zero, one, two] = [0, 1, 2].map(Work::Handshake);
        assert_eq!(first, [Work::Task("a"), zero, Work::Task("b"), one, two]);
        let mut queue = Queue { tasks: (0..100).collect(), ..Queue::<&str, i32>::default() };
        queue.jobs.push_back("a");
        let mut taken = || queue.take().unwrap();
        let first = [taken(), taken(), taken(), taken()];
        assert_eq!(first, [Work::Task(0), Work::Handshake("a"), Work::Task(1), Work::Task(2)]);
        queue.tasks.clear();
        assert_eq!(queue.take(), None);
    }
}
