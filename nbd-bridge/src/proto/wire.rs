//! The NBD protocol constants used here, and the protocol's fixed-size headers.
//!
//! Constants are grouped by field, as in the "Values" section of the NBD specification. All
//! integers on the wire are big-endian. A header is a plain struct with `LEN`, `encode` to an array
//! and `decode` from a slice; decoding reads exactly `LEN` bytes, never panics, and validates
//! nothing but length and magic.

/// Maximum length of a string (name, description, message) in bytes ("Conventions").
pub const STRING_MAX: usize = 4096;
/// Largest read or write served in one request.
pub const PAYLOAD_MAX: u32 = 64 << 20;
/// Maximum payload that clients may assume without asking ("Size constraints").
pub const PAYLOAD_DEFAULT: u32 = 32 << 20;
/// Longest read whose reply is one chunk, so that it fails as a whole or not at all.
pub const CHUNK_MAX: u32 = 32 << 20;
/// Largest minimum block size that may be advertised.
pub const MIN_BLOCK_MAX: u32 = 1 << 16;
/// Zero bytes after the `NBD_OPT_EXPORT_NAME` reply unless both sides agreed to omit them.
pub const EXPORT_NAME_ZEROES: usize = 124;

/// Magic numbers.
pub mod magic {
    /// `NBDMAGIC`, the first bytes that the server sends.
    pub const INIT: u64 = 0x4e42_444d_4147_4943;
    /// `IHAVEOPT`, the second item that the server sends and the start of every option.
    pub const OPTION: u64 = 0x4948_4156_454f_5054;
    /// Header of every option reply.
    pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
    /// Header of a request.
    pub const REQUEST: u32 = 0x2560_9513;
    /// Header of a simple reply.
    pub const SIMPLE_REPLY: u32 = 0x6744_6698;
    /// Header of a structured reply chunk.
    pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;
    /// Extended header of a request.
    pub const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
    /// Extended header of a reply chunk.
    pub const EXTENDED_REPLY: u32 = 0x6e8a_278c;
}

/// Handshake flags, 16 bits, server to client.
pub mod handshake_flags {
    /// `NBD_FLAG_FIXED_NEWSTYLE`.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// `NBD_FLAG_NO_ZEROES`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Client flags, 32 bits, sent in reply to the handshake flags.
pub mod client_flags {
    /// `NBD_FLAG_C_FIXED_NEWSTYLE`.
    pub const FIXED_NEWSTYLE: u32 = 1 << 0;
    /// `NBD_FLAG_C_NO_ZEROES`.
    pub const NO_ZEROES: u32 = 1 << 1;
    /// All flags that a client may set.
    pub const KNOWN: u32 = FIXED_NEWSTYLE | NO_ZEROES;
}

/// Transmission flags, 16 bits, describing the features of an export.
pub mod transmission_flags {
    /// `NBD_FLAG_HAS_FLAGS`, always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// `NBD_FLAG_READ_ONLY`.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `NBD_FLAG_SEND_FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `NBD_FLAG_SEND_FUA`.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `NBD_FLAG_ROTATIONAL`.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// `NBD_FLAG_SEND_TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `NBD_FLAG_SEND_WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `NBD_FLAG_SEND_DF`.
    pub const SEND_DF: u16 = 1 << 7;
    /// `NBD_FLAG_CAN_MULTI_CONN`.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `NBD_FLAG_SEND_CACHE`.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `NBD_FLAG_SEND_FAST_ZERO`.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Option types.
pub mod opt {
    /// `NBD_OPT_EXPORT_NAME`.
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`.
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`.
    pub const LIST: u32 = 3;
    /// `NBD_OPT_PEEK_EXPORT`, withdrawn.
    pub const PEEK_EXPORT: u32 = 4;
    /// `NBD_OPT_STARTTLS`.
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`.
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`.
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`.
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Option reply types. Errors have bit 31 set.
pub mod rep {
    /// `NBD_REP_ACK`.
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`.
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`.
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`.
    pub const META_CONTEXT: u32 = 4;
    /// The bit that marks a reply type as an error.
    pub const ERROR_BIT: u32 = 1 << 31;
    /// `NBD_REP_ERR_UNSUP`.
    pub const ERR_UNSUP: u32 = ERROR_BIT + 1;
    /// `NBD_REP_ERR_POLICY`.
    pub const ERR_POLICY: u32 = ERROR_BIT + 2;
    /// `NBD_REP_ERR_INVALID`.
    pub const ERR_INVALID: u32 = ERROR_BIT + 3;
    /// `NBD_REP_ERR_TLS_REQD`.
    pub const ERR_TLS_REQD: u32 = ERROR_BIT + 5;
    /// `NBD_REP_ERR_UNKNOWN`.
    pub const ERR_UNKNOWN: u32 = ERROR_BIT + 6;
    /// `NBD_REP_ERR_TOO_BIG`.
    pub const ERR_TOO_BIG: u32 = ERROR_BIT + 9;
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: extended headers are in use.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR_BIT + 10;
}

/// Information types of `NBD_REP_INFO`.
pub mod info {
    /// `NBD_INFO_EXPORT`: size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`: canonical name.
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`.
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`: minimum, preferred, maximum payload.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Request types.
pub mod cmd {
    /// `NBD_CMD_READ`.
    pub const READ: u16 = 0;
    /// `NBD_CMD_WRITE`.
    pub const WRITE: u16 = 1;
    /// `NBD_CMD_DISC`.
    pub const DISC: u16 = 2;
    /// `NBD_CMD_FLUSH`.
    pub const FLUSH: u16 = 3;
    /// `NBD_CMD_TRIM`.
    pub const TRIM: u16 = 4;
    /// `NBD_CMD_CACHE`.
    pub const CACHE: u16 = 5;
    /// `NBD_CMD_WRITE_ZEROES`.
    pub const WRITE_ZEROES: u16 = 6;
    /// `NBD_CMD_BLOCK_STATUS`.
    pub const BLOCK_STATUS: u16 = 7;
    /// `NBD_CMD_RESIZE`, an extension.
    pub const RESIZE: u16 = 8;
}

/// Command flags, 16 bits in every request.
pub mod cmd_flags {
    /// `NBD_CMD_FLAG_FUA`.
    pub const FUA: u16 = 1 << 0;
    /// `NBD_CMD_FLAG_NO_HOLE`.
    pub const NO_HOLE: u16 = 1 << 1;
    /// `NBD_CMD_FLAG_DF`.
    pub const DF: u16 = 1 << 2;
    /// `NBD_CMD_FLAG_REQ_ONE`.
    pub const REQ_ONE: u16 = 1 << 3;
    /// `NBD_CMD_FLAG_FAST_ZERO`.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// `NBD_CMD_FLAG_PAYLOAD_LEN`: with extended headers, `len` is the length of the payload.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// The metadata context that this server supports.
pub mod base_allocation {
    /// Name of the context.
    pub const NAME: &str = "base:allocation";
    /// Query for all contexts in the namespace.
    pub const NAMESPACE: &str = "base:";
    /// ID of the context in replies.
    pub const ID: u32 = 1;
    /// `NBD_STATE_HOLE`: the range is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// `NBD_STATE_ZERO`: the range reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Structured reply flags, 16 bits in every chunk.
pub mod reply_flags {
    /// `NBD_REPLY_FLAG_DONE`: last chunk of the reply.
    pub const DONE: u16 = 1 << 0;
}

/// Structured reply types. Errors have bit 15 set.
pub mod reply_type {
    /// `NBD_REPLY_TYPE_NONE`: success without data.
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`.
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`.
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`: with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// `NBD_REPLY_TYPE_ERROR`.
    pub const ERROR: u16 = (1 << 15) + 1;
}

/// Errors that a reply may contain ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum NbdError {
    /// `NBD_EPERM`: a write to a read-only export.
    Perm = 1,
    /// `NBD_EIO`: the device failed.
    Io = 5,
    /// `NBD_ENOMEM`: not enough memory.
    NoMem = 12,
    /// `NBD_EINVAL`: the request is invalid.
    Inval = 22,
    /// `NBD_ENOSPC`: no space, or a write past the end.
    NoSpc = 28,
    /// `NBD_EOVERFLOW`: the length is more than one request can cover.
    Overflow = 75,
    /// `NBD_ENOTSUP`: a fast zero that would not be fast.
    NotSup = 95,
    /// `NBD_ESHUTDOWN`: the server is shutting down.
    Shutdown = 108,
}

impl NbdError {
    /// All errors, in order of their codes.
    pub const ALL: [Self; 8] = [
        Self::Perm,
        Self::Io,
        Self::NoMem,
        Self::Inval,
        Self::NoSpc,
        Self::Overflow,
        Self::NotSup,
        Self::Shutdown,
    ];

    /// Returns the error's wire code.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Returns the error for a wire code; None for 0 and for codes that the specification does not
    /// list.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.code() == code)
    }
}

/// Reason why a header could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Fewer bytes than the length of the header.
    #[error("{have} bytes where {need} are needed")]
    Short {
        /// Length of the header.
        need: usize,
        /// Length of the slice.
        have: usize,
    },
    /// The header does not start with its magic; the stream is out of sync and must be closed.
    #[error("magic {0:#x} does not match this header")]
    Magic(u64),
}

impl WireError {
    /// Whether more bytes may help; otherwise the connection must be closed.
    pub fn is_short(&self) -> bool {
        matches!(self, Self::Short { .. })
    }
}

/// Returns the longest prefix of `text` that has at most `max` bytes and ends at a character
/// boundary.
pub(crate) fn clip(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// Splits `N` bytes off the front. The headers below use it to decode field by field.
pub(crate) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*head)
}

/// Joins fields into an array. `head!` asserts at compile time that they fill it.
fn join<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut out = [0; N];
    let mut rest = out.as_mut_slice();
    for part in parts {
        let Some((room, next)) = rest.split_at_mut_checked(part.len()) else {
            break;
        };
        room.copy_from_slice(part);
        rest = next;
    }
    out
}

/// Defines a header: its fields in wire order, after an optional magic.
macro_rules! head {
    ($(#[$doc:meta])* $name:ident, $len:literal, $magic:path as $magic_ty:ty,
     { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }

        impl $name {
            /// Length on the wire.
            pub const LEN: usize = $len;

            /// Encodes the header.
            pub fn encode(&self) -> [u8; $len] {
                join(&[&$magic.to_be_bytes(), $(&self.$field.to_be_bytes(),)*])
            }

            /// Decodes the header from the first `LEN` bytes.
            ///
            /// # Errors
            /// Too few bytes, or a different magic.
            pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
                let short = WireError::Short { need: $len, have: bytes.len() };
                let mut rest = bytes.get(..$len).ok_or(short)?;
                let magic = <$magic_ty>::from_be_bytes(take(&mut rest).ok_or(short)?);
                if magic != $magic {
                    return Err(WireError::Magic(u64::from(magic)));
                }
                Ok(Self { $($field: <$ty>::from_be_bytes(take(&mut rest).ok_or(short)?),)* })
            }
        }

        const _: () = assert!($len == size_of::<$magic_ty>() $(+ size_of::<$ty>())*);
    };
}

head! {
    /// First bytes of a connection, server to client.
    Greeting, 18, magic::INIT as u64, {
        /// [`magic::OPTION`]: newstyle.
        version: u64,
        /// [`handshake_flags`].
        flags: u16,
    }
}

head! {
    /// Header of an option; `len` bytes of data follow.
    OptionHeader, 16, magic::OPTION as u64, {
        /// One of [`opt`], or any other value.
        option: u32,
        /// Bytes of data.
        len: u32,
    }
}

head! {
    /// Header of an option reply; `len` bytes of data follow.
    OptionReplyHeader, 20, magic::OPTION_REPLY as u64, {
        /// The option being answered.
        option: u32,
        /// One of [`rep`].
        reply: u32,
        /// Bytes of data.
        len: u32,
    }
}

head! {
    /// Header of a request; for a write, `len` bytes of data follow.
    RequestHeader, 28, magic::REQUEST as u32, {
        /// [`cmd_flags`].
        flags: u16,
        /// One of [`cmd`], or any other value.
        command: u16,
        /// Chosen by the client, returned in every reply.
        cookie: u64,
        /// First byte in the export.
        offset: u64,
        /// Length in bytes.
        len: u32,
    }
}

head! {
    /// Extended header of a request; for a write, `len` bytes of data follow.
    ExtendedRequest, 32, magic::EXTENDED_REQUEST as u32, {
        /// [`cmd_flags`].
        flags: u16,
        /// One of [`cmd`], or any other value.
        command: u16,
        /// Chosen by the client, returned in every reply.
        cookie: u64,
        /// First byte in the export.
        offset: u64,
        /// Length in bytes.
        len: u64,
    }
}

impl From<RequestHeader> for ExtendedRequest {
    fn from(request: RequestHeader) -> Self {
        let RequestHeader { flags, command, cookie, offset, len } = request;
        Self { flags, command, cookie, offset, len: len.into() }
    }
}

head! {
    /// A simple reply; data follows a successful read.
    SimpleReply, 16, magic::SIMPLE_REPLY as u32, {
        /// 0 or the code of an [`NbdError`].
        error: u32,
        /// The cookie of the request.
        cookie: u64,
    }
}

head! {
    /// Header of a structured reply chunk; `len` bytes of payload follow.
    ChunkHeader, 20, magic::STRUCTURED_REPLY as u32, {
        /// [`reply_flags`].
        flags: u16,
        /// One of [`reply_type`].
        kind: u16,
        /// The cookie of the request.
        cookie: u64,
        /// Bytes of payload.
        len: u32,
    }
}

head! {
    /// Extended header of a reply chunk; `len` bytes of payload follow.
    ExtendedChunkHeader, 32, magic::EXTENDED_REPLY as u32, {
        /// [`reply_flags`].
        flags: u16,
        /// One of [`reply_type`].
        kind: u16,
        /// The cookie of the request.
        cookie: u64,
        /// The offset of the request.
        offset: u64,
        /// Bytes of payload.
        len: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn magics_match_the_specification() {
        assert_eq!(&magic::INIT.to_be_bytes(), b"NBDMAGIC");
        assert_eq!(&magic::OPTION.to_be_bytes(), b"IHAVEOPT");
    }

    #[test]
    fn golden_headers() {
        let greeting = Greeting { version: magic::OPTION, flags: 3 };
        assert_eq!(&greeting.encode(), b"NBDMAGICIHAVEOPT\x00\x03");
        let option = OptionHeader { option: opt::GO, len: 0x0102 };
        assert_eq!(&option.encode(), b"IHAVEOPT\x00\x00\x00\x07\x00\x00\x01\x02");
        let reply = OptionReplyHeader { option: opt::LIST, reply: rep::ERR_UNSUP, len: 5 };
        assert_eq!(
            &reply.encode(),
            b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x03\x80\x00\x00\x01\x00\x00\x00\x05"
        );
        let request = RequestHeader {
            flags: cmd_flags::FUA,
            command: cmd::WRITE,
            cookie: 0x1122_3344_5566_7788,
            offset: 0x0000_0001_0000_0200,
            len: 0x1000,
        };
        assert_eq!(
            &request.encode(),
            b"\x25\x60\x95\x13\x00\x01\x00\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \x00\x00\x00\x01\x00\x00\x02\x00\x00\x00\x10\x00"
        );
        let request = ExtendedRequest { len: 1 << 44, ..request.into() };
        assert_eq!(
            &request.encode(),
            b"\x21\xe4\x1c\x71\x00\x01\x00\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \x00\x00\x00\x01\x00\x00\x02\x00\x00\x00\x10\x00\x00\x00\x00\x00"
        );
        let simple = SimpleReply { error: 22, cookie: 9 };
        assert_eq!(&simple.encode(), b"\x67\x44\x66\x98\0\0\0\x16\0\0\0\0\0\0\0\x09");
        let chunk = ChunkHeader { flags: 1, kind: reply_type::ERROR, cookie: 9, len: 6 };
        assert_eq!(
            &chunk.encode(),
            b"\x66\x8e\x33\xef\x00\x01\x80\x01\0\0\0\0\0\0\0\x09\0\0\0\x06"
        );
    }

    #[test]
    fn short_and_foreign_headers_are_errors() {
        for have in 0..28 {
            let got = RequestHeader::decode(&[0x25; 28][..have]);
            assert_eq!(got, Err(WireError::Short { need: 28, have }));
        }
        assert_eq!(RequestHeader::decode(&[0; 28]), Err(WireError::Magic(0)));
        assert_eq!(OptionHeader::decode(&[1; 16]), Err(WireError::Magic(0x0101_0101_0101_0101)));
    }

    #[test]
    fn errors_and_codes_map_both_ways() {
        assert_eq!(NbdError::ALL.map(NbdError::code), [1, 5, 12, 22, 28, 75, 95, 108]);
        for error in NbdError::ALL {
            assert_eq!(NbdError::from_code(error.code()), Some(error));
        }
        assert_eq!(NbdError::from_code(0), None);
        assert_eq!(NbdError::from_code(u32::MAX), None);
    }

    proptest! {
        #[test]
        fn decoded_bytes_encode_back(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..40),
            real_magic in any::<bool>(),
        ) {
            if real_magic && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&magic::REQUEST.to_be_bytes());
            }
            if let Ok(head) = RequestHeader::decode(&bytes) {
                prop_assert_eq!(&head.encode()[..], &bytes[..28]);
            }
            if let Ok(head) = OptionHeader::decode(&bytes) {
                prop_assert_eq!(&head.encode()[..], &bytes[..16]);
            }
            let _ = Greeting::decode(&bytes);
            let _ = OptionReplyHeader::decode(&bytes);
            let _ = SimpleReply::decode(&bytes);
            let _ = ChunkHeader::decode(&bytes);
        }
    }
}
