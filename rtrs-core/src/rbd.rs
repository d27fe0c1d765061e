//! Images of Ceph's block device (RBD), accessed through librbd, which is loaded on first use.
//!
//! The programs do not depend on Ceph: [`Image::open`] loads `librbd.so.1`, which depends on
//! `librados.so.2`. The functions used from the public headers `rbd/librbd.h` and
//! `rados/librados.h` are declared here.
//!
//! An [`Image`] is one client of the cluster with one open image, shared by all shards: the cluster
//! grants an image's lock to a client, and blocklists whole clients. An IO is started on a shard
//! without blocking, and completes on a librbd thread, which adds it to the shard's [`ImageQueue`].
//! Everything else here blocks, and must be called on other threads.
//!
//! librbd copies written data before the call returns (`rbd_disable_zero_copy_writes`, on by
//! default). This is needed because peers can change the memory during a send, which would
//! invalidate the checksum of the data sent.

mod address;
mod lock;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak, mpsc};
use std::thread;

use crossbeam_queue::ArrayQueue;

pub use self::address::{ImageAddress, ImageFacts, RbdError, RbdStep};

use crate::block::{Io, IoOp, WakeHandle};
use crate::mem::MemSlice;
use crate::time::Duration;

/// Cluster, pool, image or completion.
type Handle = *mut c_void;

// SAFETY: a type; librbd calls it with the argument given to `rbd_update_watch`.
type WatchCall = unsafe extern "C" fn(Handle);
// SAFETY: a type; librbd calls it with a completion and the argument it was created with.
type EndCall = unsafe extern "C" fn(Handle, Handle);

const LIBRARY: &CStr = c"librbd.so.1";
/// Flag: leave the range allocated.
const ZEROES_THICK: c_int = 1;
/// Size of the buffer for an ID or fsid, including the NUL.
const TEXT_MAX: usize = 256;
const OPTIONS_MAX: usize = 512;
/// Maximum time for which the thread dropping an image waits for it to be closed.
const CLOSE_MAX: Duration = Duration::from_secs(5);
/// Interval at which to check whether the last IO of an image being closed has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// `rbd_image_info_t`.
#[repr(C)]
struct Info {
    size: u64,
    object_size: u64,
    _objects: u64,
    _order: c_int,
    _block_name_prefix: [c_char; 24],
    _parent_pool: i64,
    _parent_name: [c_char; 96],
}

/// `rbd_config_option_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct ConfigOption {
    name: *const c_char,
    value: *const c_char,
    _source: c_int,
}

macro_rules! functions {
    ($($name:ident($($of:ty),*) $(-> $to:ty)?;)*) => {
        /// Functions of librbd and librados.
        struct Library {
            // SAFETY: types; each call explains why it complies with the header's requirements.
            $($name: unsafe extern "C" fn($($of),*) $(-> $to)?,)*
        }

        impl Library {
            fn find(library: Handle) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        let at = symbol(library, concat!(stringify!($name), "\0"))?;
                        // SAFETY: the header declares a function with this name and type.
                        unsafe {
                            // SAFETY: see above.
                            mem::transmute::<Handle, unsafe extern "C" fn($($of),*) $(-> $to)?>(at)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    rados_create2(*mut Handle, *const c_char, *const c_char, u64) -> c_int;
    rados_conf_read_file(Handle, *const c_char) -> c_int;
    rados_conf_set(Handle, *const c_char, *const c_char) -> c_int;
    rados_connect(Handle) -> c_int;
    rados_shutdown(Handle);
    rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
    rados_wait_for_latest_osdmap(Handle) -> c_int;
    rados_mon_command(
        Handle, *const *const c_char, usize, *const c_char, usize, Handle, Handle, Handle, Handle
    ) -> c_int;
    rados_ioctx_create(Handle, *const c_char, *mut Handle) -> c_int;
    rados_ioctx_set_namespace(Handle, *const c_char);
    rados_ioctx_get_id(Handle) -> i64;
    rados_ioctx_destroy(Handle);
    rbd_open(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_open_read_only(Handle, *const c_char, *mut Handle, *const c_char) -> c_int;
    rbd_close(Handle) -> c_int;
    rbd_stat(Handle, *mut Info, usize) -> c_int;
    rbd_get_id(Handle, *mut c_char, usize) -> c_int;
    rbd_snap_get_id(Handle, *const c_char, *mut u64) -> c_int;
    rbd_config_image_list(Handle, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
    rbd_resize(Handle, u64) -> c_int;
    rbd_lock_acquire(Handle, c_int) -> c_int;
    rbd_lock_release(Handle) -> c_int;
    rbd_lock_break(Handle, c_int, *const c_char) -> c_int;
    rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
    rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
    rbd_metadata_get(Handle, *const c_char, *mut c_char, *mut usize) -> c_int;
    rbd_metadata_set(Handle, *const c_char, *const c_char) -> c_int;
    rbd_update_watch(Handle, *mut u64, WatchCall, Handle) -> c_int;
    rbd_update_unwatch(Handle, u64) -> c_int;
    rbd_aio_create_completion(Handle, EndCall, *mut Handle) -> c_int;
    rbd_aio_get_return_value(Handle) -> isize;
    rbd_aio_release(Handle);
    rbd_aio_read(Handle, u64, usize, *mut c_char, Handle) -> c_int;
    rbd_aio_write(Handle, u64, usize, *const c_char, Handle) -> c_int;
    rbd_aio_flush(Handle, Handle) -> c_int;
    rbd_aio_discard(Handle, u64, u64, Handle) -> c_int;
    rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
}

/// Returns the dynamic linker's description of its last failure on this thread.
fn linker_error() -> String {
    // SAFETY: dlerror returns null or a string that remains valid until the next call on this
    // thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic linker gives no reason".to_owned();
    }
    // SAFETY: it is a string, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the address of a function; `name` ends with a NUL.
fn symbol(library: Handle, name: &'static str) -> Result<Handle, String> {
    // SAFETY: the handle is that of an open library, and the name ends with a NUL.
    let at = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
    if at.is_null() { Err(linker_error()) } else { Ok(at) }
}

impl Library {
    /// Returns the library, which is loaded on the first call.
    fn get() -> Result<&'static Self, RbdError> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        let load = || {
            // SAFETY: the library is Ceph's, whose initialization may run on any thread. It is
            // never unloaded.
            let library =
                unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if library.is_null() { Err(linker_error()) } else { Self::find(library) }
        };
        let loaded = LOADED.get_or_init(load).as_ref();
        loaded.map_err(|why| RbdError::Library(why.clone()))
    }
}

type Changed = Box<dyn Fn() + Send + Sync>;

/// Open image.
pub struct Image {
    /// None while the image is being dropped.
    open: Option<Open>,
    facts: ImageFacts,
    /// Name of the image in the pool.
    name: String,
    /// Each queue holds a clone for as long as the queue, or an IO in it, exists.
    queues: Arc<()>,
}

/// Handles to close, in reverse order.
struct Open {
    library: &'static Library,
    cluster: Handle,
    pool: Handle,
    image: Handle,
    watch: Option<(u64, *mut Changed)>,
}

// SAFETY: librados and librbd may be called on any thread; they call the watch on their own
// threads, and it is `Send` and `Sync`.
unsafe impl Send for Open {}
// SAFETY: as above, also concurrently.
unsafe impl Sync for Open {}

/// Converts a librbd result, which is at least 0 or a negative errno.
fn check(code: c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::from_raw_os_error(-code)) } else { Ok(()) }
}

fn c_string(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Returns the string that a function writes.
fn text(fill: impl FnOnce(*mut c_char, usize) -> c_int) -> io::Result<String> {
    let mut bytes = [0u8; TEXT_MAX];
    check(fill(bytes.as_mut_ptr().cast(), TEXT_MAX - 1))?;
    let text = CStr::from_bytes_until_nul(&bytes).map_err(io::Error::other)?;
    Ok(text.to_string_lossy().into_owned())
}

fn pointer(text: Option<&CString>) -> *const c_char {
    text.map_or(ptr::null(), |text| text.as_ptr())
}

impl Image {
    /// Connects to the cluster and opens the image. Blocks, indefinitely if OSDs do not answer.
    ///
    /// # Errors
    /// Returns the step that failed.
    pub fn open(at: &ImageAddress) -> Result<Self, RbdError> {
        let library = Library::get()?;
        let null = ptr::null_mut();
        let mut open = Open { library, cluster: null, pool: null, image: null, watch: None };
        let step = |step| move |error| RbdError::Step(step, error);
        open.configure(at).map_err(step(RbdStep::Configuration))?;
        // SAFETY: the cluster was created.
        let connected = check(unsafe { (library.rados_connect)(open.cluster) });
        connected.map_err(step(RbdStep::Connect))?;
        open.open_pool(at).map_err(step(RbdStep::Pool))?;
        open.open_image(at).map_err(step(RbdStep::Image))?;
        let facts = open.facts(at).map_err(step(RbdStep::Facts))?;
        let name = at.image.clone();
        Ok(Self { open: Some(open), facts, name, queues: Arc::default() })
    }

    fn get(&self) -> &Open {
        self.open.as_ref().unwrap_or_else(|| unreachable!("taken by drop alone"))
    }

    /// Returns the facts about the image.
    pub fn facts(&self) -> &ImageFacts {
        &self.facts
    }

    /// Returns the size in bytes. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn size(&self) -> io::Result<u64> {
        Ok(self.get().info()?.size)
    }

    /// Resizes the image. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        let Open { library, image, .. } = *self.get();
        // SAFETY: the image is open.
        check(unsafe { (library.rbd_resize)(image, size) })
    }

    /// Registers a callback for changes to the size or snapshots, called on a librbd thread. The
    /// callback must not block. Only one can be registered per image.
    ///
    /// # Errors
    /// Returns librbd's error.
    pub fn watch(&mut self, changed: impl Fn() + Send + Sync + 'static) -> io::Result<()> {
        // SAFETY: called with the argument given to the watch below.
        unsafe extern "C" fn call(changed: Handle) {
            // SAFETY: it is freed after the watch has ended.
            unsafe { (*changed.cast::<Changed>())() }
        }
        let open = self.open.as_mut().filter(|open| open.watch.is_none());
        let open = open.unwrap_or_else(|| unreachable!("watched once"));
        let changed = Box::into_raw(Box::new(Box::new(changed) as Changed));
        let mut number = 0;
        // SAFETY: the image is open, and `changed` is freed after the watch has ended.
        let code = unsafe {
            (open.library.rbd_update_watch)(open.image, &mut number, call, changed.cast())
        };
        if code < 0 {
            // SAFETY: created above, and not taken by the watch.
            drop(unsafe { Box::from_raw(changed) });
        } else {
            open.watch = Some((number, changed));
        }
        check(code)
    }

    /// Creates a queue for up to `room` concurrent IOs from a shard.
    pub fn queue(&self, room: usize, wake: WakeHandle) -> Arc<ImageQueue> {
        Arc::new(ImageQueue {
            ended: ArrayQueue::new(room),
            woken: AtomicBool::new(false),
            wake,
            _image: Arc::clone(&self.queues),
        })
    }

    /// Starts an IO that the image's geometry permits, and adds it to the queue when it completes.
    /// The caller must start no more IOs than the queue has room for.
    pub fn start(&self, mut slot: Box<ImageIo>, io: Io, queue: &Arc<ImageQueue>) {
        let Open { library, image, .. } = *self.get();
        let (offset, len) = (io.offset, io.len as usize);
        slot.tag = io.tag;
        (slot.op, slot.len) = (io.op, io.len);
        slot.queue = Some(Arc::clone(queue));
        let at = io.buf.as_ref().map_or(ptr::null_mut(), |buf| buf.address().cast::<c_char>());
        slot.buf = io.buf;
        let thick = if io.flags.no_unmap { ZEROES_THICK } else { 0 };
        let slot = Box::into_raw(slot);
        let mut end = ptr::null_mut();
        // SAFETY: the slot lives until its completion callback, which is called once.
        let mut code = unsafe { (library.rbd_aio_create_completion)(slot.cast(), ended, &mut end) };
        if code >= 0 {
            // SAFETY: the image is open. The buffer has `len` bytes and lives as long as the slot,
            // which is until the completion callback.
            code = unsafe {
                match io.op {
                    IoOp::Read => (library.rbd_aio_read)(image, offset, len, at, end),
                    IoOp::Write => (library.rbd_aio_write)(image, offset, len, at, end),
                    IoOp::Flush => (library.rbd_aio_flush)(image, end),
                    IoOp::Discard => (library.rbd_aio_discard)(image, offset, len as u64, end),
                    IoOp::WriteZeroes => {
                        (library.rbd_aio_write_zeroes)(image, offset, len, end, thick, 0)
                    }
                    IoOp::Extents => -libc::EOPNOTSUPP,
                }
            };
            if code < 0 {
                // SAFETY: created above, and its callback will not be called.
                unsafe { (library.rbd_aio_release)(end) };
            }
        }
        if code < 0 {
            // SAFETY: created above, and its callback will not be called.
            let slot = unsafe { Box::from_raw(slot) };
            slot.end(code as isize);
        }
    }
}

impl Drop for Image {
    /// Closes the image on another thread once its last IO has ended, and waits, for a limited
    /// time, until that is done, so that the image's lock is free afterwards.
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let queues = Arc::downgrade(&mem::take(&mut self.queues));
        let (done, closed) = mpsc::channel::<()>();
        // Shared with the thread, so that the handles are not lost if the thread cannot be started.
        let open = Arc::new(Mutex::new(Some(open)));
        let (open_there, queues_there) = (Arc::clone(&open), queues.clone());
        let close = move || {
            while queues_there.strong_count() > 0 {
                thread::sleep(POLL_INTERVAL);
            }
            drop(take(&open_there));
            drop(done);
        };
        let name = &self.facts.image;
        match thread::Builder::new().name("rbd-close".into()).spawn(close) {
            Ok(_) => {
                let ended = closed.recv_timeout(CLOSE_MAX);
                if ended == Err(mpsc::RecvTimeoutError::Timeout) {
                    tracing::warn!(
                        "RBD image {name}: the cluster does not answer; closing it later"
                    );
                }
            }
            Err(error) => {
                tracing::error!("RBD image {name}: cannot start a thread: {error}");
                if is_idle(&queues) {
                    drop(take(&open));
                } else {
                    tracing::error!("RBD image {name} stays open: its IO is still running");
                    mem::forget(take(&open));
                }
            }
        }
    }
}

fn take(open: &Mutex<Option<Open>>) -> Option<Open> {
    open.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Waits for a limited time until no queue is left. Returns false if a queue still exists.
fn is_idle(queues: &Weak<()>) -> bool {
    let until = std::time::Instant::now() + CLOSE_MAX;
    while queues.strong_count() > 0 {
        if std::time::Instant::now() >= until {
            return false;
        }
        thread::sleep(POLL_INTERVAL);
    }
    true
}

impl Open {
    fn set(&self, name: &CStr, value: &CStr) -> io::Result<()> {
        // SAFETY: the cluster was created.
        check(unsafe { (self.library.rados_conf_set)(self.cluster, name.as_ptr(), value.as_ptr()) })
    }

    fn configure(&mut self, at: &ImageAddress) -> io::Result<()> {
        let user = c_string(&format!("client.{}", at.user))?;
        // SAFETY: the strings end with a NUL.
        check(unsafe {
            (self.library.rados_create2)(&mut self.cluster, c"ceph".as_ptr(), user.as_ptr(), 0)
        })?;
        // This program reports errors itself; the configuration file may request a log.
        self.set(c"log_to_stderr", c"false")?;
        self.set(c"err_to_stderr", c"false")?;
        let file = at.configuration.as_deref().map(Path::as_os_str).map(OsStrExt::as_bytes);
        let file = file.map(CString::new).transpose().map_err(io::Error::other)?;
        // SAFETY: the cluster was created; without a file, the usual locations are searched.
        check(unsafe {
            (self.library.rados_conf_read_file)(self.cluster, pointer(file.as_ref()))
        })?;
        let seconds = at.connect_max.as_secs().max(1);
        self.set(c"client_mount_timeout", &c_string(&seconds.to_string())?)?;
        self.set_refusing(true)?;
        // Writes must not be acknowledged before the OSDs have them.
        self.set(c"rbd_cache", c"false")?;
        self.set(c"rbd_persistent_cache_mode", c"disabled")
    }

    fn open_pool(&mut self, at: &ImageAddress) -> io::Result<()> {
        let pool = c_string(&at.pool)?;
        // SAFETY: the cluster is connected.
        check(unsafe {
            (self.library.rados_ioctx_create)(self.cluster, pool.as_ptr(), &mut self.pool)
        })?;
        let namespace = at.namespace.as_deref().map(c_string).transpose()?;
        if namespace.is_some() {
            let namespace = pointer(namespace.as_ref());
            // SAFETY: the pool is open.
            unsafe { (self.library.rados_ioctx_set_namespace)(self.pool, namespace) };
        }
        Ok(())
    }

    fn open_image(&mut self, at: &ImageAddress) -> io::Result<()> {
        let image = c_string(&at.image)?;
        let snapshot = at.snapshot.as_deref().map(c_string).transpose()?;
        let Self { library, pool, .. } = *self;
        let open = if at.read_only { library.rbd_open_read_only } else { library.rbd_open };
        // SAFETY: the pool is open, and the strings end with a NUL.
        check(unsafe { open(pool, image.as_ptr(), &mut self.image, pointer(snapshot.as_ref())) })
    }

    fn info(&self) -> io::Result<Info> {
        // SAFETY: numbers and arrays of numbers, for which all zeroes is valid.
        let mut info: Info = unsafe { mem::zeroed() };
        // SAFETY: the image is open, and the size is that of the structure.
        check(unsafe { (self.library.rbd_stat)(self.image, &mut info, size_of::<Info>()) })?;
        Ok(info)
    }

    fn facts(&self, at: &ImageAddress) -> io::Result<ImageFacts> {
        let Self { library, cluster, pool, image, .. } = *self;
        let snapshot = match at.snapshot.as_deref().map(c_string).transpose()? {
            Some(name) => {
                let mut number = 0;
                // SAFETY: the image is open.
                check(unsafe { (library.rbd_snap_get_id)(image, name.as_ptr(), &mut number) })?;
                Some(number)
            }
            None => None,
        };
        Ok(ImageFacts {
            // SAFETY: the cluster is connected; the size is that of `text`.
            fsid: text(|to, room| unsafe { (library.rados_cluster_fsid)(cluster, to, room) })?,
            // SAFETY: the pool is open.
            pool: unsafe { (library.rados_ioctx_get_id)(pool) },
            // SAFETY: the image is open; the size is that of `text`.
            image: text(|to, room| unsafe { (library.rbd_get_id)(image, to, room) })?,
            snapshot,
            object_size: self.info()?.object_size,
            write_back: self.is_write_back()?,
        })
    }

    /// Returns true if settings of the pool or the image enable a write-back cache, overriding the
    /// setting made here.
    fn is_write_back(&self) -> io::Result<bool> {
        let none = ConfigOption { name: ptr::null(), value: ptr::null(), _source: 0 };
        let mut options = vec![none; OPTIONS_MAX];
        let mut count = OPTIONS_MAX as c_int;
        let at = options.as_mut_ptr();
        // SAFETY: the image is open, and there is room for that many options.
        check(unsafe { (self.library.rbd_config_image_list)(self.image, at, &mut count) })?;
        let found = options.iter().take(usize::try_from(count).unwrap_or(0)).any(|option| {
            // SAFETY: librbd has filled in strings, which remain valid until they are cleaned up.
            let (name, value) =
                unsafe { (CStr::from_ptr(option.name), CStr::from_ptr(option.value)) };
            name == c"rbd_cache" && value == c"true"
                || name == c"rbd_persistent_cache_mode" && value != c"disabled"
        });
        // SAFETY: the options that were filled in above.
        unsafe { (self.library.rbd_config_image_list_cleanup)(at, count) };
        Ok(found)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let Self { library, cluster, pool, image, watch } = self;
        // SAFETY: everything that is not null is open, no IO is in progress, and there is no other
        // user. No callback of the watch is running once it has been removed.
        unsafe {
            if let Some((number, changed)) = watch.take() {
                (library.rbd_update_unwatch)(*image, number);
                drop(Box::from_raw(changed));
            }
            if !image.is_null() {
                (library.rbd_close)(*image);
            }
            if !pool.is_null() {
                (library.rados_ioctx_destroy)(*pool);
            }
            if !cluster.is_null() {
                (library.rados_shutdown)(*cluster);
            }
        }
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("facts", &self.facts).finish_non_exhaustive()
    }
}

/// IO in progress in librbd. The caller reuses these objects.
#[derive(Debug)]
pub struct ImageIo {
    /// Tag of the IO.
    pub tag: u64,
    /// Operation.
    pub op: IoOp,
    /// Length in bytes.
    pub len: u32,
    /// Result: at least 0 (for a read, the number of bytes read), or a negative errno.
    pub result: isize,
    buf: Option<MemSlice>,
    queue: Option<Arc<ImageQueue>>,
}

impl ImageIo {
    /// Creates an unused object.
    pub fn unused() -> Box<Self> {
        Box::new(Self { tag: 0, op: IoOp::Flush, len: 0, result: 0, buf: None, queue: None })
    }

    fn end(mut self: Box<Self>, result: isize) {
        self.result = result;
        self.buf = None;
        let Some(queue) = self.queue.take() else { return };
        // There is room for all IOs that are started.
        let _ = queue.ended.push(self);
        if !queue.woken.swap(true, Ordering::SeqCst) {
            queue.wake.wake();
        }
    }
}

/// Completion callback of an IO, called on a librbd thread.
///
/// # Safety
/// `slot` is the box that the completion was created with, and this is its only callback.
unsafe extern "C" fn ended(completion: Handle, slot: Handle) {
    let Ok(library) = Library::get() else { unreachable!("it has called us") };
    // SAFETY: ownership of the slot was passed on when the IO was started, and is returned once.
    let slot = unsafe { Box::from_raw(slot.cast::<ImageIo>()) };
    // SAFETY: the completion is that of the IO, which has ended.
    let result = unsafe { (library.rbd_aio_get_return_value)(completion) };
    // SAFETY: as above; there is no other user.
    unsafe { (library.rbd_aio_release)(completion) };
    slot.end(result);
}

/// Queue of a shard's completed IOs.
#[derive(Debug)]
pub struct ImageQueue {
    ended: ArrayQueue<Box<ImageIo>>,
    /// The shard has been woken and has not checked the queue since.
    woken: AtomicBool,
    wake: WakeHandle,
    _image: Arc<()>,
}

impl ImageQueue {
    /// Rearms the wake-up: IOs that end after this call wake the shard. Must be called before
    /// completed IOs are taken.
    pub fn look(&self) {
        self.woken.store(false, Ordering::SeqCst);
    }

    /// Returns the next completed IO.
    pub fn take(&self) -> Option<Box<ImageIo>> {
        self.ended.pop()
    }
}
