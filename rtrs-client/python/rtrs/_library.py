"""The C library librtrs, its declarations and its errors."""

from __future__ import annotations

import errno
import os
import re
from importlib import resources
from typing import Any

import cffi

SONAME = "librtrs.so.0"

# Declared in sys/uio.h.
_IOVEC = "struct iovec { void *iov_base; size_t iov_len; };"


class Error(OSError):
    """Failure of a call or request, with its errno and the reason."""


class PermissionDenied(Error, PermissionError):
    """Refused operation, such as the use of a volume in a child of the process that opened it."""


class TimedOut(Error, TimeoutError):
    """Request that was not answered in time; it may still take effect."""


_CLASSES = {
    errno.EPERM: PermissionDenied,
    errno.EACCES: PermissionDenied,
    errno.ETIMEDOUT: TimedOut,
}


def declarations(header: str) -> str:
    """Returns the declarations of a C header, without the parts for C++ and the preprocessor."""
    header = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^#.*$", "", header, flags=re.MULTILINE)


def _load() -> tuple[Any, Any]:
    header = resources.files(__package__).joinpath("rtrs.h").read_text(encoding="utf-8")
    ffi = cffi.FFI()
    ffi.cdef(_IOVEC + declarations(header))
    name = os.environ.get("RTRS_LIBRARY") or SONAME
    try:
        return ffi, ffi.dlopen(name)
    except OSError as error:
        hint = "install it with scripts/install-lib.sh, or set RTRS_LIBRARY to its path"
        raise ImportError(f"cannot load {name}: {error}; {hint}") from None


ffi, lib = _load()


def make_error(code: int, text: str) -> Error:
    """Returns the exception for an errno."""
    return _CLASSES.get(code, Error)(code, text)


def check(result: int) -> int:
    """Returns the result of a call, or raises its error with the library's message."""
    if result < 0:
        raise make_error(-result, decode(lib.rtrs_error_message()))
    return result


def decode(text: Any) -> str:
    """Decodes a string returned by the library."""
    return bytes(ffi.string(text)).decode("utf-8", "replace")


def library_version() -> str:
    """Returns the version of librtrs, such as "0.1.0"."""
    return decode(lib.rtrs_version())


def check_time(seconds: float) -> None:
    """Fails if a time is negative or not a number."""
    if not seconds >= 0:
        raise ValueError(f"a time of {seconds} s is not possible")


def millis(seconds: float) -> int:
    """Returns a time for the library: milliseconds, at most 49 days."""
    check_time(seconds)
    return int(min(seconds * 1000, 0xFFFFFFFF))
