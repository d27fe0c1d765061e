//! Linux errno values by name, and their mapping to the nine error bits of an immediate.
//!
//! The kernel sends the absolute errno modulo 512, so its internal codes alias others: 524
//! (ENOTSUPP) arrives as ENOMEM, 512 as success. [`fit`] maps them to codes below 512 with the same
//! meaning. The numbers are those of the generic Linux ABI on every architecture, since a wire
//! value must not depend on the host.

macro_rules! errno {
    ($($number:literal $name:ident)*) => {
        $(
            #[doc = concat!("errno ", stringify!($number), ".")]
            pub const $name: u16 = $number;
        )*

        /// Returns the name of a positive errno, such as `ENOENT`, or a description for 0 and for
        /// unknown values.
        pub const fn errno_name(errno: u16) -> &'static str {
            match errno {
                0 => "no error",
                $($number => stringify!($name),)*
                _ => "unknown errno",
            }
        }
    };
}

errno! {
    1 EPERM 2 ENOENT 3 ESRCH 4 EINTR 5 EIO 6 ENXIO 7 E2BIG 8 ENOEXEC 9 EBADF 10 ECHILD 11 EAGAIN
    12 ENOMEM 13 EACCES 14 EFAULT 15 ENOTBLK 16 EBUSY 17 EEXIST 18 EXDEV 19 ENODEV 20 ENOTDIR
    21 EISDIR 22 EINVAL 23 ENFILE 24 EMFILE 25 ENOTTY 26 ETXTBSY 27 EFBIG 28 ENOSPC 29 ESPIPE
    30 EROFS 31 EMLINK 32 EPIPE 33 EDOM 34 ERANGE 35 EDEADLK 36 ENAMETOOLONG 37 ENOLCK 38 ENOSYS
    39 ENOTEMPTY 40 ELOOP 43 EIDRM 52 EBADE 61 ENODATA 62 ETIME 67 ENOLINK 70 ECOMM 71 EPROTO
    74 EBADMSG 75 EOVERFLOW 84 EILSEQ 85 ERESTART 87 EUSERS 90 EMSGSIZE 93 EPROTONOSUPPORT
    95 EOPNOTSUPP 98 EADDRINUSE 99 EADDRNOTAVAIL 100 ENETDOWN 101 ENETUNREACH 102 ENETRESET
    103 ECONNABORTED 104 ECONNRESET 105 ENOBUFS 106 EISCONN 107 ENOTCONN 108 ESHUTDOWN 110 ETIMEDOUT
    111 ECONNREFUSED 112 EHOSTDOWN 113 EHOSTUNREACH 114 EALREADY 115 EINPROGRESS 116 ESTALE
    117 EUCLEAN 121 EREMOTEIO 122 EDQUOT 123 ENOMEDIUM 124 EMEDIUMTYPE 125 ECANCELED 126 ENOKEY
    130 EOWNERDEAD 131 ENOTRECOVERABLE
}

/// Errors below this value fit in an immediate.
pub const ERRNO_END: u16 = 512;

/// Maps an errno of either sign to a positive code below 512, or 0 to 0.
pub const fn fit(errno: i32) -> u16 {
    match errno.unsigned_abs() {
        #[allow(clippy::cast_possible_truncation, reason = "below 512")]
        code @ 0..512 => code as u16,
        // The kernel's internal restart codes.
        512..=516 => EINTR,
        // EPROBE_DEFER and EJUKEBOX.
        517 | 528 => EAGAIN,
        518 => ESTALE,
        524 => EOPNOTSUPP,
        _ => EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_values_are_distinct() {
        assert_eq!(fit(0), 0);
        assert_eq!(fit(-5), 5);
        assert_eq!(fit(511), 511);
        assert_eq!(fit(512), EINTR);
        assert_eq!(fit(-524), EOPNOTSUPP);
        for errno in [i32::MIN, i32::MAX, 1024, -1024, 65536] {
            assert_eq!(fit(errno), EIO, "{errno}");
        }
        for errno in -5000..5000 {
            assert!(fit(errno) < ERRNO_END);
            assert_eq!(fit(errno) == 0, errno == 0);
        }
    }

    #[test]
    fn errno_values_match_this_system() {
        assert_eq!(i32::from(EOPNOTSUPP), libc::EOPNOTSUPP);
        assert_eq!(i32::from(ECONNRESET), libc::ECONNRESET);
        assert_eq!(i32::from(EBADE), libc::EBADE);
        assert_eq!(i32::from(EIDRM), libc::EIDRM);
        assert_eq!(i32::from(EREMOTEIO), libc::EREMOTEIO);
        assert_eq!(i32::from(EILSEQ), libc::EILSEQ);
        assert_eq!(i32::from(EUSERS), libc::EUSERS);
        assert_eq!(i32::from(EDQUOT), libc::EDQUOT);
        assert_eq!(i32::from(ENOTRECOVERABLE), libc::ENOTRECOVERABLE);
        assert_eq!(errno_name(2), "ENOENT");
        assert_eq!(errno_name(104), "ECONNRESET");
        assert_eq!(errno_name(60000), "unknown errno");
    }
}
