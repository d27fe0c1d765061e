//! Resizing of a connected device. Called by `device` and `takeover`.

use std::time::Duration;

use super::error::DeviceError;
use super::netlink::{Attr, open_netlink};
use super::sysfs::{Places, await_that};

/// Time for the kernel to show the new size.
const SIZE_PATIENCE: Duration = Duration::from_secs(5);

/// Resizes a connected device. The kernel requires the identifier that it was connected with.
pub(super) fn resize(places: &Places, index: u32, size: u64) -> Result<(), DeviceError> {
    let refused = |source| DeviceError::Refused {
        device: format!("/dev/nbd{index} with a size of {size} bytes"),
        why: "",
        source,
    };
    let mut attrs = vec![Attr::Index(index), Attr::SizeBytes(size)];
    attrs.extend(places.backend(index).map(Attr::BackendIdentifier));
    open_netlink()?.reconfigure(attrs).map_err(refused)?;
    if await_that(SIZE_PATIENCE, || places.size(index) == Some(size)) {
        return Ok(());
    }
    let what = "the kernel has not applied the new size; see the kernel log".to_owned();
    Err(DeviceError::Odd { index, what })
}
