//! Exports of NBD servers: opening an export and determining its capabilities.
//!
//! If the server allows several connections to one export, each shard has a connection on its own
//! ring (`queue.rs`). Otherwise all shards share one connection, on a thread to which they send
//! their IOs (`single.rs`). Everything before a connection's first request may block, and runs on a
//! thread that belongs to the export (`dialer.rs`).
//!
//! A lost connection is reestablished; in the meantime, IOs wait for at most `GONE_MAX`. Unanswered
//! requests are resent. Changes that were answered but not flushed may be lost if the server has
//! stopped: one flush fails for that reason, and the engine informs all sessions (`changes.rs`). A
//! device is flushed when it is closed (`last_flush.rs`). Changes still unflushed when this process
//! exits are not recorded anywhere, so the export's cache ID depends on the process
//! (`state/clean_stop.rs`).

mod changes;
mod dialer;
mod flushes;
mod last_flush;
mod link;
mod outstanding;
mod queue;
mod receiver;
mod sender;
mod shared;

use std::io;
use std::rc::Rc;
use std::sync::{Arc, mpsc};

use nbd_bridge::client::Offered;
use nbd_bridge::wire::transmission_flags as tf;
use nbd_bridge::{DialError, dial};
use parking_lot::Mutex;
use rtrs_core::block::{
    BlockDevice, BlockSource, Core, Geometry, Io, IoFlags, IoOp, SharedErrors, SharedSize,
    TargetSize,
};
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::{Clock, Fd, Ring};
use rtrs_core::time::Duration;

use self::changes::{ANSWER_MAX, Changes};
use self::queue::NbdDevice;
pub use self::shared::NbdOptions;
use self::shared::Shared;
use super::off_shard::within;
use super::single::Single;
use super::target::{BackendError, whole_blocks};

/// Maximum time to flush an export that is being removed.
const SETTLE_MAX: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const RING_ENTRIES: u32 = 8;
/// Maximum block size announced to clients.
const BLOCK_MAX: u32 = 4096;
/// Maximum size of a discard or write zeroes.
const CLEAR_MAX: u32 = 1 << 30;

/// An export of an NBD server.
#[derive(Debug)]
pub struct NbdSource {
    shared: Arc<Shared>,
    /// Present for a server that allows only one connection.
    single: Option<Single>,
}

impl NbdSource {
    /// Connects to a server.
    ///
    /// # Errors
    /// Returns a displayable message that describes the problem.
    pub fn open(text: &str, how: NbdOptions) -> Result<Self, BackendError> {
        Self::open_within(text, how, ANSWER_MAX)
    }

    /// Connects to a server. `answer_max` limits a flush that one connection needs from another.
    fn open_within(
        text: &str,
        how: NbdOptions,
        answer_max: Duration,
    ) -> Result<Self, BackendError> {
        let system =
            |error| BackendError::new(text, "cannot be opened", "try again").because(error);
        let at = how.clone();
        let made =
            within("nbd-dial", how.open_max, move || dial(&at.address, &at.name, at.open_max));
        let (fd, offered) = match made.map_err(system)? {
            Some(made) => made.map_err(|error| refused(text, &how, error))?,
            None => {
                let problem = format!("does not answer within {} s", how.open_max.as_secs());
                let hint = "check the server, or set connect-timeout";
                return Err(BackendError::new(text, problem, hint));
            }
        };
        let geometry = geometry(text, &how, &offered)?;
        let multi = offered.flags & tf::CAN_MULTI_CONN != 0;
        let (dialer, wanted) = mpsc::channel();
        let shared = Arc::new(Shared {
            text: text.to_owned(),
            size: Arc::new(SharedSize::new(geometry.size)),
            geometry,
            how,
            dialer,
            first: Mutex::new(Some((fd, offered))),
            multi,
            outage: Mutex::new(None),
            changes: Changes::new(answer_max),
        });
        dialer::start(&shared, wanted).map_err(system)?;
        let single = if multi {
            None
        } else {
            let of = Arc::clone(&shared);
            let open = move |core: &Core| open_queue(&of, core);
            let size = Arc::clone(&shared.size);
            let started = Single::start(shared.geometry.clone(), size, open);
            Some(started.map_err(system)?)
        };
        Ok(Self { shared, single })
    }
}

fn open_queue(shared: &Arc<Shared>, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
    let Some(ring) = &core.ring else {
        let text = format!("{} needs a shard with a ring", shared.text);
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    };
    let first = shared.first.lock().take().map(|(fd, offered)| (Fd::new(fd), offered));
    Ok(Box::new(NbdDevice::new(shared, ring, core.wake.clone(), first)?))
}

/// Explains why there is no connection.
fn refused(text: &str, how: &NbdOptions, error: DialError) -> BackendError {
    match error {
        DialError::Io(error) => {
            let hint = "check that the server runs and listens there";
            let problem = format!("cannot be reached at {}", how.address);
            BackendError::new(text, problem, hint).because(error)
        }
        DialError::Handshake(error) => {
            let hint = "check the name and the server (`nbdinfo --list URL`)";
            BackendError::new(text, format!("cannot be used: {error}"), hint)
        }
    }
}

/// Returns the export's capabilities.
fn geometry(text: &str, how: &NbdOptions, offered: &Offered) -> Result<Geometry, BackendError> {
    let has = |flag| offered.flags & flag != 0;
    if has(tf::READ_ONLY) && !how.read_only {
        return Err(BackendError::new(text, "is read-only", "export it with `ro`"));
    }
    let smallest = offered.min_block.max(512);
    let block = how.block.unwrap_or(smallest);
    if block < smallest || block > BLOCK_MAX {
        let problem = format!("needs blocks of {smallest} bytes or more, not {block}");
        let hint = "leave block-size out; servers with blocks over 4096 bytes cannot be used";
        return Err(BackendError::new(text, problem, hint));
    }
    let size = whole_blocks(text, offered.size, u64::from(block));
    if size == 0 {
        let problem = format!("has {} bytes, less than one block of {block}", offered.size);
        return Err(BackendError::new(text, problem, "give it a size first"));
    }
    let changes = !how.read_only;
    let preferred = offered.preferred_block;
    let physical = if preferred.is_power_of_two() { preferred } else { 4096 };
    let physical_block = physical.clamp(block, 32 << 10);
    let discard = changes && has(tf::SEND_TRIM);
    let write_zeroes = changes && has(tf::SEND_WRITE_ZEROES);
    Ok(Geometry {
        logical_block: block,
        physical_block,
        io_max: offered.max_payload.min(32 << 20) / block * block,
        discard_max: CLEAR_MAX,
        zeroes_max: CLEAR_MAX,
        read_only: how.read_only,
        write_cache: changes && has(tf::SEND_FLUSH),
        fua: has(tf::SEND_FUA),
        discard,
        discard_granularity: if discard { physical_block } else { 0 },
        write_zeroes,
        // A server that supports the flag may still refuse any request, so nothing is promised.
        fast_zero: false,
        rotational: has(tf::ROTATIONAL),
        extents: true,
        ..Geometry::plain(size)
    })
}

impl BlockSource for NbdSource {
    fn target_size(&self) -> io::Result<TargetSize> {
        // The NBD server determines the size.
        Ok(TargetSize { bytes: self.geometry().size, was_cut: None, is_fixed: true })
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: self.shared.size.get(), ..self.shared.geometry.clone() }
    }

    fn outage(&self) -> Option<String> {
        self.shared.outage.lock().clone()
    }

    /// A loss is reported to only one flush, whichever comes first.
    fn shared_errors(&self) -> SharedErrors {
        SharedErrors::Flushes
    }

    /// The server may still be executing requests from closed connections.
    fn is_exclusive(&self) -> bool {
        self.shared.geometry.read_only
    }

    fn settle(&self) -> io::Result<()> {
        if !self.shared.geometry.write_cache {
            return Ok(());
        }
        let ring = Ring::new(RING_ENTRIES)?;
        let core = Core { ring: Some(Rc::clone(&ring)), ..Core::without_ring(CoreIndex(0)) };
        let mut device = self.open(&core)?;
        let (op, flags) = (IoOp::Flush, IoFlags::default());
        let flush = Io { tag: 0, op, flags, offset: 0, len: 0, buf: None };
        device.submit(flush).map_err(|_| io::Error::other("its queue is full"))?;
        let until = Clock.now() + SETTLE_MAX;
        while Clock.now() < until {
            device.poll(Clock.now());
            if let Some(done) = device.reap() {
                let errno = i32::from(done.status.to_errno());
                return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
            }
            // A queue on a different thread does not wake this ring.
            ring.turn_or_sleep(Some(POLL_INTERVAL))?;
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn open(&self, core: &Core) -> io::Result<Box<dyn BlockDevice>> {
        match &self.single {
            Some(single) => Ok(single.open(core)),
            None => open_queue(&self.shared, core),
        }
    }
}

#[cfg(test)]
mod tests;
