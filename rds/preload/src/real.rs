//! The C library functions that the program would call without this library.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library, resolved on first use.
pub(crate) struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the address of the function; null if no other library defines it.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a null-terminated string; the lookup has no other effect.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls a C library function with the given signature. Fails with ENOSYS if it does not exist.
macro_rules! real {
    ($name:ident($($arg:ident: $type:ty),*) -> $ret:ty) => {{
        const NAME: &[u8] = concat!(stringify!($name), "\0").as_bytes();
        static REAL: $crate::real::Real =
            $crate::real::Real::new(match ::std::ffi::CStr::from_bytes_with_nul(NAME) {
                Ok(name) => name,
                Err(_) => panic!("a name has no NUL"),
            });
        let address = REAL.address();
        if address.is_null() {
            $crate::memory::set_errno(libc::ENOSYS);
            -1
        } else {
            // SAFETY: only called below, as the function that the type describes.
            type Function = unsafe extern "C" fn($($type),*) -> $ret;
            // SAFETY: the C library function of this name has this signature, and the caller's
            // arguments are forwarded unchanged.
            let function = unsafe {
                ::std::mem::transmute::<*mut ::std::ffi::c_void, Function>(address)
            };
            // SAFETY: as above.
            unsafe { function($($arg),*) }
        }
    }};
}
pub(crate) use real;
