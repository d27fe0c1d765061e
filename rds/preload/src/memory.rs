//! Access to the program's memory through the pointers in its calls: addresses, buffers, headers.
//!
//! Pointers are trusted as much as in a system call: an invalid pointer is the program's fault.
//! Null pointers are errors here, as in the kernel.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::BorrowedFd;

use libc::{c_int, c_void, iovec, msghdr, sockaddr, socklen_t};

/// Maximum number of buffers that the system accepts in one call (UIO_MAXIOV).
pub(crate) const PARTS_MAX: usize = 1024;
/// Maximum length of an address that the system accepts (struct sockaddr_storage).
pub(crate) const ADDRESS_MAX: socklen_t = 128;

/// An address passed by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Address and port of a node.
    Of(SocketAddr),
    /// Address of a family that nodes do not support.
    None,
}

/// Converts an errno to an error.
pub(crate) fn errno(code: c_int) -> io::Error {
    io::Error::from_raw_os_error(code)
}

pub(crate) fn set_errno(code: c_int) {
    // SAFETY: points to this thread's errno in the C library.
    unsafe { *libc::__errno_location() = code };
}

/// Borrows one of the program's descriptors for the duration of a call.
pub(crate) fn borrow(fd: c_int) -> BorrowedFd<'static> {
    // SAFETY: the program passed an open descriptor that it keeps open during the call; it is not
    // used after the call. `table` has checked that it is not -1.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Reads an address.
///
/// # Errors
/// EINVAL for an impossible length, EFAULT for a null pointer with a nonzero length.
///
/// # Safety
/// `address` is null, or `len` bytes can be read there.
pub(crate) unsafe fn read_address(address: *const sockaddr, len: socklen_t) -> io::Result<Address> {
    if len > ADDRESS_MAX {
        return Err(errno(libc::EINVAL));
    }
    let len = len as usize;
    if address.is_null() && len > 0 {
        return Err(errno(libc::EFAULT));
    }
    if len < size_of::<libc::sa_family_t>() {
        return Err(errno(libc::EINVAL));
    }
    // SAFETY: the family is readable, by the caller's guarantee and the check above.
    let family = unsafe { address.cast::<libc::sa_family_t>().read_unaligned() };
    match c_int::from(family) {
        libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
            // SAFETY: that many bytes are readable.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(Address::Of(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into()))
        }
        libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
            // SAFETY: that many bytes are readable.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Ok(Address::Of(SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into()))
        }
        libc::AF_INET | libc::AF_INET6 => Err(errno(libc::EINVAL)),
        _ => Ok(Address::None),
    }
}

/// Writes the address that the program asked for.
///
/// # Errors
/// EFAULT for null pointers, EINVAL for a negative size.
///
/// # Safety
/// See [`write_address`].
pub(crate) unsafe fn answer_address(
    from: Option<SocketAddr>,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> io::Result<()> {
    // SAFETY: guaranteed by the caller.
    let size = *unsafe { len.as_ref() }.ok_or_else(|| errno(libc::EFAULT))?;
    if c_int::try_from(size).is_err() {
        return Err(errno(libc::EINVAL));
    }
    if address.is_null() && size > 0 {
        return Err(errno(libc::EFAULT));
    }
    // SAFETY: guaranteed by the caller.
    unsafe { write_address(from, address, len) }
}

/// Writes an address, truncated to the size in `len`, and stores its full length in `len`. `None`
/// means an address without a family.
///
/// # Safety
/// `len` is null, or the number of bytes that it specifies can be written to `address`.
pub(crate) unsafe fn write_address(
    from: Option<SocketAddr>,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> io::Result<()> {
    if address.is_null() || len.is_null() {
        return Ok(());
    }
    // SAFETY: all-zero bytes are valid for these structures.
    let mut v4: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    let mut v6: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
    let (bytes, size) = match from.map(|from| (from.ip(), from.port())) {
        Some((IpAddr::V6(ip), port)) => {
            v6.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            v6.sin6_port = port.to_be();
            v6.sin6_addr.s6_addr = ip.octets();
            ((&raw const v6).cast::<u8>(), size_of::<libc::sockaddr_in6>())
        }
        Some((IpAddr::V4(ip), port)) => {
            v4.sin_family = libc::AF_INET as libc::sa_family_t;
            v4.sin_port = port.to_be();
            v4.sin_addr.s_addr = u32::from(ip).to_be();
            ((&raw const v4).cast::<u8>(), size_of::<libc::sockaddr_in>())
        }
        None => ((&raw const v4).cast::<u8>(), size_of::<libc::sockaddr_in>()),
    };
    // SAFETY: `len` can be read and written, and as many bytes as it says can be written to
    // `address`; the structure has `size` bytes.
    unsafe {
        let room = usize::try_from(*len).unwrap_or(0);
        std::ptr::copy_nonoverlapping(bytes, address.cast::<u8>(), size.min(room));
        *len = size as socklen_t;
    }
    Ok(())
}

/// Returns a buffer to send from.
///
/// # Errors
/// EFAULT for a null pointer with a nonzero length.
///
/// # Safety
/// `len` bytes can be read at `buffer` for as long as the slice is in use.
pub(crate) unsafe fn source<'a>(buffer: *const c_void, len: usize) -> io::Result<&'a [u8]> {
    match (len, buffer.is_null()) {
        (0, _) => Ok(&[]),
        (_, true) => Err(errno(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), len) }),
    }
}

/// Returns a buffer to receive into.
///
/// # Errors
/// EFAULT for a null pointer with a nonzero length.
///
/// # Safety
/// `len` bytes can be written to `buffer`, and are not used elsewhere, for as long as the slice is
/// in use.
pub(crate) unsafe fn target<'a>(buffer: *mut c_void, len: usize) -> io::Result<&'a mut [u8]> {
    match (len, buffer.is_null()) {
        (0, _) => Ok(&mut []),
        (_, true) => Err(errno(libc::EFAULT)),
        // SAFETY: guaranteed by the caller; bytes have no invalid values, and uninitialized ones
        // are only written.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) }),
    }
}

/// Returns the vectors of a call.
///
/// # Errors
/// EFAULT for null with a nonzero count, EMSGSIZE for more vectors than the system accepts.
///
/// # Safety
/// `count` vectors can be read at `vectors`.
unsafe fn parts<'a>(vectors: *const iovec, count: usize) -> io::Result<&'a [iovec]> {
    match (count, vectors.is_null()) {
        (0, _) => Ok(&[]),
        (count, _) if count > PARTS_MAX => Err(errno(libc::EMSGSIZE)),
        (_, true) => Err(errno(libc::EFAULT)),
        // SAFETY: guaranteed by the caller.
        _ => Ok(unsafe { std::slice::from_raw_parts(vectors, count) }),
    }
}

/// Returns the buffers to send from.
///
/// # Errors
/// See [`parts`] and [`source`].
///
/// # Safety
/// `count` vectors can be read at `vectors`, and each satisfies [`source`].
pub(crate) unsafe fn sources<'a>(
    vectors: *const iovec,
    count: usize,
) -> io::Result<Vec<IoSlice<'a>>> {
    // SAFETY: guaranteed by the caller.
    let slice = |v: &iovec| unsafe { source(v.iov_base, v.iov_len) }.map(IoSlice::new);
    // SAFETY: guaranteed by the caller.
    unsafe { parts(vectors, count) }?.iter().map(slice).collect()
}

/// Returns the buffers to receive into.
///
/// # Errors
/// See [`parts`] and [`target`].
///
/// # Safety
/// `count` vectors can be read at `vectors`, and each satisfies [`target`].
pub(crate) unsafe fn targets<'a>(
    vectors: *const iovec,
    count: usize,
) -> io::Result<Vec<IoSliceMut<'a>>> {
    // SAFETY: guaranteed by the caller.
    let slice = |v: &iovec| unsafe { target(v.iov_base, v.iov_len) }.map(IoSliceMut::new);
    // SAFETY: guaranteed by the caller.
    unsafe { parts(vectors, count) }?.iter().map(slice).collect()
}

/// Returns the descriptors passed with a received message.
///
/// # Safety
/// `message` was filled by a receive, and the memory that it points to is readable.
pub(crate) unsafe fn passed_fds(message: &msghdr) -> Vec<c_int> {
    let mut fds = Vec::new();
    if message.msg_control.is_null() {
        return fds;
    }
    // SAFETY: the macros of the C library iterate over the control messages within their bounds,
    // and the length of each was written by the system.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(message);
        while let Some(head) = at.as_ref() {
            if (head.cmsg_level, head.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let len = head.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(at).cast::<c_int>();
                let count = len / size_of::<c_int>();
                fds.extend((0..count).map(|index| data.add(index).read_unaligned()));
            }
            at = libc::CMSG_NXTHDR(message, at);
        }
    }
    fds
}
