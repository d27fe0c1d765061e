//! An image's lock, and metadata stored with the image.

use std::ffi::CStr;
use std::io;
use std::ptr;

use super::{Image, Open, c_string, check, text};

use libc::c_int;

const LOCK_EXCLUSIVE: c_int = 0;
/// Time for which OSDs refuse a client whose lock was broken, in seconds: a week. Ceph's default is
/// an hour.
const REFUSED_SECONDS: &str = "604800.0";

impl Image {
    /// Acquires the image's lock until the image is closed; other clients cannot obtain it by
    /// requesting it. Blocks.
    ///
    /// # Errors
    /// EROFS if another client holds the lock and does not release it, EINVAL for an image without
    /// the exclusive-lock feature.
    pub fn lock(&self) -> io::Result<()> {
        let Open { library, image, .. } = *self.get();
        // SAFETY: the image is open.
        check(unsafe { (library.rbd_lock_acquire)(image, LOCK_EXCLUSIVE) })
    }

    /// Releases the lock once all writes have ended. From then on, writes are refused (EROFS): the
    /// lock is not acquired again automatically. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn unlock(&self) -> io::Result<()> {
        let Open { library, image, .. } = *self.get();
        // SAFETY: the image is open.
        check(unsafe { (library.rbd_lock_release)(image) })
    }

    /// Breaks this owner's lock; the OSDs then refuse its client for a week. Later requests through
    /// this image run only on OSDs that know of the refusal. Blocks.
    ///
    /// # Errors
    /// EBUSY if another client holds the lock, ENOENT if it is not held, or the cluster's error.
    pub fn break_lock(&self, owner: &str) -> io::Result<()> {
        let open = self.get();
        let Open { library, cluster, pool, .. } = *open;
        open.refuse(owner)?;
        // SAFETY: the cluster is connected.
        check(unsafe { (library.rados_wait_for_latest_osdmap)(cluster) })?;
        // librbd would block the owner again, which takes just as long. It reads the setting when
        // an image is opened.
        let name = c_string(&self.name)?;
        let mut image = ptr::null_mut();
        open.set_refusing(false)?;
        // SAFETY: the pool is open, the name ends with a NUL.
        let opened =
            check(unsafe { (library.rbd_open)(pool, name.as_ptr(), &mut image, ptr::null()) });
        open.set_refusing(true)?;
        opened?;
        let owner = c_string(owner)?;
        // SAFETY: the image is open, the owner ends with a NUL.
        let broken =
            check(unsafe { (library.rbd_lock_break)(image, LOCK_EXCLUSIVE, owner.as_ptr()) });
        // SAFETY: the image is open, and not shared.
        unsafe { (library.rbd_close)(image) };
        broken
    }

    /// Returns the lock's owner, if there is one. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn lock_owner(&self) -> io::Result<Option<String>> {
        let Open { library, image, .. } = *self.get();
        let (mut mode, mut owner, mut count) = (0, ptr::null_mut(), 1);
        // SAFETY: the image is open; there is room for one owner, as given in `count`.
        let found =
            unsafe { (library.rbd_lock_get_owners)(image, &mut mode, &mut owner, &mut count) };
        if found == -libc::ENOENT || found >= 0 && (count == 0 || owner.is_null()) {
            return Ok(None);
        }
        check(found)?;
        // SAFETY: an owner is a string that remains valid until it is cleaned up.
        let text = unsafe { CStr::from_ptr(owner) }.to_string_lossy().into_owned();
        // SAFETY: the owner that was filled in above.
        unsafe { (library.rbd_lock_get_owners_cleanup)(&mut owner, count) };
        Ok(Some(text))
    }

    /// Returns a metadata value of the image. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn note(&self, key: &CStr) -> io::Result<Option<String>> {
        let Open { library, image, .. } = *self.get();
        let get = |to, mut room: usize| {
            // SAFETY: the image is open, the key ends with a NUL; the size is that of `text`.
            unsafe { (library.rbd_metadata_get)(image, key.as_ptr(), to, &mut room) }
        };
        match text(get) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Stores a metadata value with the image. Blocks.
    ///
    /// # Errors
    /// Returns the cluster's error.
    pub fn set_note(&self, key: &CStr, value: &str) -> io::Result<()> {
        let Open { library, image, .. } = *self.get();
        let value = c_string(value)?;
        // SAFETY: the image is open, the strings end with a NUL.
        check(unsafe { (library.rbd_metadata_set)(image, key.as_ptr(), value.as_ptr()) })
    }
}

impl Open {
    /// Sets whether OSDs refuse the client from which this one takes the lock.
    pub(super) fn set_refusing(&self, refusing: bool) -> io::Result<()> {
        let value = if refusing { c"true" } else { c"false" };
        self.set(c"rbd_blocklist_on_break_lock", value)
            // Name of the option in Ceph 15.
            .or_else(|_| self.set(c"rbd_blacklist_on_break_lock", value))
    }

    /// Makes the OSDs refuse a client. librbd could do that, but Ceph 16 monitors do not understand
    /// the format in which it passes the duration.
    fn refuse(&self, client: &str) -> io::Result<()> {
        // Addresses contain neither character.
        if client.contains(['"', '\\']) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let ask = |list| {
            let order = c_string(&format!(
                "{{\"prefix\": \"osd {list}\", \"{list}op\": \"add\", \"addr\": \"{client}\", \
                 \"expire\": {REFUSED_SECONDS}}}"
            ))?;
            let (orders, null) = ([order.as_ptr()], ptr::null_mut());
            // SAFETY: the cluster is connected; there is one command, which ends with a NUL, and no
            // input; the output is not requested.
            check(unsafe {
                let call = self.library.rados_mon_command;
                call(self.cluster, orders.as_ptr(), 1, ptr::null(), 0, null, null, null, null)
            })
        };
        // Name of the command in Ceph 15.
        ask("blocklist").or_else(|_| ask("blacklist"))
    }
}
