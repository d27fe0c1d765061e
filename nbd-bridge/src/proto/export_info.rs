//! `ExportInfo`: the properties of an export that clients see.
//!
//! Used in both phases: the handshake advertises it, and the transmission phase validates requests
//! against it. It holds no device. Call [`ExportInfo::check`] once at startup; the handshake
//! repeats the check and refuses an export whose values violate the NBD specification.

use super::wire::{self, transmission_flags as tf};

/// An export as the protocol describes it. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Canonical name, at most [`wire::STRING_MAX`] bytes long, with no NUL.
    pub name: String,
    /// One line for users, with the same limits; may be empty.
    pub description: String,
    /// Size of the export.
    pub size: u64,
    /// Writes, trims and write zeroes are refused with EPERM.
    pub read_only: bool,
    /// `NBD_CMD_FLUSH` is offered.
    pub flush: bool,
    /// The device has a volatile cache, so a flush has an effect. A kernel device without a cache
    /// is "write through" and sends no flushes; clients of a socket are offered flushes anyway.
    pub write_cache: bool,
    /// `NBD_CMD_FLAG_FUA` is offered.
    pub fua: bool,
    /// `NBD_CMD_TRIM` is offered.
    pub trim: bool,
    /// `NBD_CMD_WRITE_ZEROES` is offered, with `NBD_CMD_FLAG_NO_HOLE`.
    pub write_zeroes: bool,
    /// `NBD_CMD_FLAG_FAST_ZERO` is offered; ignored without `write_zeroes`.
    pub fast_zero: bool,
    /// `NBD_CMD_CACHE` is offered.
    pub cache: bool,
    /// A flush or FUA on one connection covers all connections.
    pub multi_conn: bool,
    /// Seeks are slow.
    pub rotational: bool,
    /// Minimum block size. Clients that requested it must use multiples of it as offsets and
    /// lengths. A power of two from 1 to 65,536.
    pub min_block: u32,
    /// Preferred block size: a power of two, at least 512 and `min_block`.
    pub preferred_block: u32,
    /// Largest read or write in one request: at least `preferred_block`, at most
    /// [`wire::PAYLOAD_MAX`].
    pub max_payload: u32,
    /// Holes can be reported: the context `base:allocation` is offered.
    pub extents: bool,
    /// Another host may write at the same time, so parts of blocks cannot be changed. Not
    /// advertised.
    pub shared_writes: bool,
}

/// Reason why an [`ExportInfo`] cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadExport {
    /// The name is longer than [`wire::STRING_MAX`] bytes or contains a NUL.
    #[error("the export name must be at most 4096 bytes long and must not contain NUL")]
    Name,
    /// The description is longer than [`wire::STRING_MAX`] bytes or contains a NUL.
    #[error("the export description must be at most 4096 bytes long and must not contain NUL")]
    Description,
    /// The minimum block size is not a power of two from 1 to 65,536.
    #[error("the minimum block size {0} is not a power of two from 1 to 65536")]
    MinBlock(u32),
    /// The preferred block size is not a power of two, or is below 512 or the minimum block size.
    #[error("the preferred block size {0} is not a power of two, or is below 512 or the minimum")]
    PreferredBlock(u32),
    /// The maximum payload is below the preferred block size or above [`wire::PAYLOAD_MAX`].
    #[error("the maximum payload {0} is not between the preferred block size and 64 MiB")]
    MaxPayload(u32),
}

impl ExportInfo {
    /// Creates a writable export of `size` bytes with the specification's default block sizes (1,
    /// 4096), the largest payload, flush and FUA, and no other features.
    pub fn plain(name: impl Into<String>, size: u64) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            size,
            read_only: false,
            flush: true,
            write_cache: true,
            fua: true,
            trim: false,
            write_zeroes: false,
            fast_zero: false,
            cache: false,
            multi_conn: false,
            rotational: false,
            min_block: 1,
            preferred_block: 4096,
            max_payload: wire::PAYLOAD_MAX,
            extents: false,
            shared_writes: false,
        }
    }

    /// Checks names and sizes against the NBD specification's "Size constraints" and string rules.
    ///
    /// # Errors
    /// The first rule that is violated.
    pub fn check(&self) -> Result<(), BadExport> {
        let is_string = |s: &str| s.len() <= wire::STRING_MAX && !s.contains('\0');
        if !is_string(&self.name) {
            return Err(BadExport::Name);
        }
        if !is_string(&self.description) {
            return Err(BadExport::Description);
        }
        if !self.min_block.is_power_of_two() || self.min_block > wire::MIN_BLOCK_MAX {
            return Err(BadExport::MinBlock(self.min_block));
        }
        let preferred = self.preferred_block;
        if !preferred.is_power_of_two() || preferred < self.min_block.max(512) {
            return Err(BadExport::PreferredBlock(preferred));
        }
        if self.max_payload < preferred || self.max_payload > wire::PAYLOAD_MAX {
            return Err(BadExport::MaxPayload(self.max_payload));
        }
        Ok(())
    }

    /// Returns the 16 transmission flags. DF may be offered only if `structured_replies` have been
    /// negotiated. A read-only export offers no command that writes, and fast zero requires write
    /// zeroes ("Transmission flags").
    pub fn transmission_flags(&self, structured_replies: bool) -> u16 {
        let writable = !self.read_only;
        let zeroes = self.write_zeroes && writable;
        [
            (true, tf::HAS_FLAGS),
            (self.read_only, tf::READ_ONLY),
            (self.flush, tf::SEND_FLUSH),
            (self.fua, tf::SEND_FUA),
            (self.rotational, tf::ROTATIONAL),
            (self.trim && writable, tf::SEND_TRIM),
            (zeroes, tf::SEND_WRITE_ZEROES),
            (structured_replies, tf::SEND_DF),
            (self.multi_conn, tf::CAN_MULTI_CONN),
            (self.cache, tf::SEND_CACHE),
            (zeroes && self.fast_zero, tf::SEND_FAST_ZERO),
        ]
        .into_iter()
        .fold(0, |flags, (on, flag)| if on { flags | flag } else { flags })
    }

    /// Whether clients must learn the export's sizes to avoid errors, because they differ from the
    /// sizes that the specification lets clients assume.
    pub(crate) fn has_own_sizes(&self) -> bool {
        self.min_block != 1 || self.max_payload < wire::PAYLOAD_DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::{BadExport, ExportInfo};
    use crate::wire::transmission_flags as tf;

    fn with(change: impl FnOnce(&mut ExportInfo)) -> Result<(), BadExport> {
        let mut info = ExportInfo::plain("vol0", 1 << 20);
        change(&mut info);
        info.check()
    }

    #[test]
    fn errors_name_the_invalid_limit() {
        assert_eq!(with(|_| ()), Ok(()));
        assert_eq!(with(|i| i.name = "x".repeat(4096)), Ok(()));
        assert_eq!(with(|i| i.name = "x".repeat(4097)), Err(BadExport::Name));
        assert_eq!(with(|i| i.name = "a\0b".into()), Err(BadExport::Name));
        assert_eq!(with(|i| i.description = "x".repeat(4097)), Err(BadExport::Description));
        for min in [0, 3, 1 << 17, u32::MAX] {
            assert_eq!(with(|i| i.min_block = min), Err(BadExport::MinBlock(min)));
        }
        for preferred in [0, 256, 4095] {
            let got = with(|i| i.preferred_block = preferred);
            assert_eq!(got, Err(BadExport::PreferredBlock(preferred)));
        }
        let below_min = with(|i| (i.min_block, i.preferred_block) = (4096, 512));
        assert_eq!(below_min, Err(BadExport::PreferredBlock(512)));
        for max in [0, 4095, (64 << 20) + 1, u32::MAX] {
            assert_eq!(with(|i| i.max_payload = max), Err(BadExport::MaxPayload(max)));
        }
    }

    #[test]
    fn each_capability_sets_its_flag() {
        let mut info = ExportInfo::plain("", 0);
        (info.flush, info.fua) = (false, false);
        assert_eq!(info.transmission_flags(false), 0x0001);
        assert_eq!(info.transmission_flags(true), 0x0081);
        (info.flush, info.fua, info.rotational) = (true, true, true);
        (info.trim, info.write_zeroes, info.fast_zero) = (true, true, true);
        (info.cache, info.multi_conn) = (true, true);
        assert_eq!(info.transmission_flags(false), 0x0d7d);
    }

    #[test]
    fn a_read_only_export_offers_no_writes() {
        let mut info = ExportInfo::plain("", 0);
        (info.read_only, info.trim, info.write_zeroes, info.fast_zero) = (true, true, true, true);
        let flags = info.transmission_flags(false);
        assert_eq!(flags & (tf::SEND_TRIM | tf::SEND_WRITE_ZEROES | tf::SEND_FAST_ZERO), 0);
        assert_ne!(flags & tf::READ_ONLY, 0);
    }

    #[test]
    fn fast_zero_needs_write_zeroes() {
        let mut info = ExportInfo::plain("", 0);
        info.fast_zero = true;
        assert_eq!(info.transmission_flags(false) & tf::SEND_FAST_ZERO, 0);
    }
}
