//! Pointers that the program passes.
//!
//! Each type stands for one kind of pointer argument of the functions in the header. Only C callers
//! create values of these types: the fields are private, and there are no constructors. So the
//! methods rely on the header's rules: a pointer that is not NULL points to a valid object of its
//! type.

use std::ffi::{CStr, c_char, c_int, c_void};

use rtrs::PIECES_MAX;

use crate::entry::Failure;
use crate::layout::Growing;
use crate::memory::Span;

/// Largest size of a structure that may grow; larger sizes are invalid.
const STRUCT_BYTES_MAX: usize = 4096;

fn null(name: &str) -> Failure {
    Failure::invalid(format!("{name} is NULL"))
}

/// Returns a failure unless the pointer is aligned and not NULL.
fn check<T>(pointer: *const T, name: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(null(name));
    }
    if !pointer.is_aligned() {
        return Err(Failure::invalid(format!("{name} is not an aligned address")));
    }
    Ok(())
}

/// `const char *` to a string.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// Returns the string.
    pub(crate) fn get(&self, name: &str) -> Result<&str, Failure> {
        if self.0.is_null() {
            return Err(null(name));
        }
        // SAFETY: by the rules of this module, the pointer points to a NUL-terminated string that
        // does not change during the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Failure::invalid(format!("{name} is not UTF-8: {text:?}")))
    }
}

/// Pointer to an object of the library.
#[repr(transparent)]
pub(crate) struct Handle<T>(*mut T);

impl<T: Sync> Handle<T> {
    /// Returns the object.
    pub(crate) fn get(&self, name: &str) -> Result<&T, Failure> {
        check(self.0, name)?;
        // SAFETY: by the rules of this module, the object exists during the call. Until it is
        // freed, there are only shared borrows of it.
        Ok(unsafe { &*self.0 })
    }
}

impl<T> Handle<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Frees an object that [`Out::give`] has returned to the program. Does nothing for NULL.
    pub(crate) fn free(self) {
        if !self.0.is_null() {
            // SAFETY: by the rules of this module, the object was created by `Out::give`, and this
            // is its last use.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}

/// Pointer through which a call returns a pointer to an object.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut *const T);

impl<T> Out<T> {
    /// Checks the pointer, and sets the program's result to NULL.
    pub(crate) fn clear(&self, name: &str) -> Result<(), Failure> {
        check(self.0, name)?;
        self.set(std::ptr::null());
        Ok(())
    }

    /// Passes an object to the program, which frees it with [`Handle::free`]. To be called after
    /// `clear` has succeeded.
    pub(crate) fn give(&self, object: T) {
        self.set(Box::into_raw(Box::new(object)));
    }

    /// Lends the program an object that outlives its use. To be called after `clear` has succeeded.
    pub(crate) fn lend(&self, object: &T) {
        self.set(object);
    }

    fn set(&self, object: *const T) {
        // SAFETY: by the rules of this module, the pointer points to a pointer of the program that
        // only this call uses; `clear` has checked it.
        unsafe { self.0.write(object) };
    }
}

/// Pointer to a structure that the call fills. The program passes the size of the structure.
#[repr(transparent)]
pub(crate) struct Fill<T>(*mut T);

impl<T: Growing> Fill<T> {
    /// Checks the pointer and the size.
    pub(crate) fn check(&self, name: &str, bytes: usize) -> Result<(), Failure> {
        check(self.0, name)?;
        if (T::BYTES_MIN..=STRUCT_BYTES_MAX).contains(&bytes) {
            return Ok(());
        }
        let text = format!("{name} cannot have {bytes} bytes; it has {}", size_of::<T>());
        Err(Failure::invalid(text))
    }

    /// Writes the fields that the program's version of the header has, and zeroes those of later
    /// versions. To be called after `check` has succeeded with this size.
    pub(crate) fn write(&self, value: &T, bytes: usize) {
        let known = bytes.min(size_of::<T>());
        let from = std::ptr::from_ref(value).cast::<u8>();
        // SAFETY: by the rules of this module, the pointer points to `bytes` bytes of the program
        // that only this call uses; `check` has checked both. `value` has at least `known` bytes,
        // without padding.
        unsafe {
            let to = self.0.cast::<u8>();
            to.copy_from_nonoverlapping(from, known);
            to.add(known).write_bytes(0, bytes - known);
        }
    }
}

/// Pointer to an array that the call fills.
#[repr(transparent)]
pub(crate) struct Array<T>(*mut T);

impl<T: Copy> Array<T> {
    /// Checks the pointer.
    pub(crate) fn check(&self, name: &str) -> Result<(), Failure> {
        check(self.0, name)
    }

    /// Writes `elements` to the array, which must have room for them. To be called after `check`
    /// has succeeded.
    pub(crate) fn write(&self, elements: &[T]) {
        // SAFETY: by the rules of this module, the pointer points to at least `elements.len()`
        // elements that only this call uses; `check` has checked the pointer.
        unsafe { self.0.copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
    }
}

/// Pointer to a request's memory.
#[repr(transparent)]
pub(crate) struct Memory(*mut c_void);

impl Memory {
    /// Returns the `len` bytes of memory at the pointer.
    pub(crate) fn span(&self, len: usize) -> Result<Span, Failure> {
        // SAFETY: by the rules of this module, the memory is mapped.
        unsafe { Span::new(self.0.cast(), len) }
    }
}

/// Pointer to an array of buffers.
#[repr(transparent)]
pub(crate) struct IoVecs(*const libc::iovec);

impl IoVecs {
    /// Returns the memory of the `count` buffers that are not empty.
    pub(crate) fn spans(&self, count: c_int) -> Result<Vec<Span>, Failure> {
        check(self.0, "iov")?;
        let count = usize::try_from(count).ok().filter(|count| (1..=PIECES_MAX).contains(count));
        let Some(count) = count else {
            return Err(Failure::invalid(format!("the count of buffers is not 1 to {PIECES_MAX}")));
        };
        // SAFETY: by the rules of this module, the array has `count` elements, which do not change
        // during the call.
        let all = unsafe { std::slice::from_raw_parts(self.0, count) };
        let filled = all.iter().filter(|one| one.iov_len > 0);
        // SAFETY: by the rules of this module, the memory is mapped.
        filled.map(|one| unsafe { Span::new(one.iov_base.cast(), one.iov_len) }).collect()
    }
}
