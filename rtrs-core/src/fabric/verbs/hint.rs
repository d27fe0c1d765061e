//! Errors with hints: what is wrong with this host and how to fix it.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use crate::fabric::FabricError;
use crate::rt::locked_memory_limit;

/// Device file of the connection manager.
const CM_DEVICE: &str = "/dev/infiniband/rdma_cm";
/// Directory in which the kernel lists RDMA devices.
pub(super) const CLASS: &str = "/sys/class/infiniband";

/// Checks whether the connection manager can be used, to report a better error than librdmacm.
pub(super) fn check_connection_manager() -> Result<(), FabricError> {
    check_file(Path::new(CM_DEVICE), Path::new(CLASS))
}

fn check_file(device: &Path, class: &Path) -> Result<(), FabricError> {
    let Err(error) = fs::OpenOptions::new().read(true).write(true).open(device) else {
        return Ok(());
    };
    let device = device.display();
    let what = match error.kind() {
        io::ErrorKind::NotFound if class.exists() => {
            format!("no {device}: load the kernel module rdma_ucm (modprobe rdma_ucm)")
        }
        io::ErrorKind::NotFound => {
            format!(
                "no RDMA in this kernel: no {device}; load the module rdma_ucm and a driver \
                 module, e.g. rdma_rxe (modprobe rdma_ucm rdma_rxe), or use tcp://"
            )
        }
        io::ErrorKind::PermissionDenied => format!(
            "no permission to open {device}: run as root, or give the user read and write access \
             to it and to /dev/infiniband/uverbs*"
        ),
        _ => format!("cannot open {device}"),
    };
    Err(FabricError::system(what, error))
}

/// Returns the error for a local address that no RDMA device has.
pub(super) fn no_device(address: IpAddr, devices: &[String], error: io::Error) -> FabricError {
    let kind = error.kind();
    let what = if kind == io::ErrorKind::PermissionDenied {
        format!(
            "no permission to use the RDMA device of {address}: run as root, or give the user \
             read and write access to /dev/infiniband/uverbs*"
        )
    } else if kind == io::ErrorKind::AddrNotAvailable {
        format!("{address} is not an address of this host")
    } else if devices.is_empty() {
        format!(
            "no RDMA device on this host for {address}: load its driver module, or add a software \
             device (rdma link add rxe0 type rxe netdev IFACE), or use tcp://"
        )
    } else {
        format!(
            "no RDMA device has the address {address} (devices: {}): use an address of one of \
             them, or add a software device (rdma link add rxe0 type rxe netdev IFACE)",
            devices.join(", ")
        )
    };
    FabricError::system(what, error)
}

/// Returns the error for a failed memory registration.
pub(super) fn registration(device: &str, bytes: usize, error: io::Error) -> FabricError {
    registration_with(device, bytes, locked_memory_limit(), error)
}

fn registration_with(
    device: &str,
    bytes: usize,
    limit: Option<u64>,
    error: io::Error,
) -> FabricError {
    let what = match (error.raw_os_error(), limit) {
        (Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM), Some(limit)) => {
            format!(
                "cannot register {bytes} bytes with {device}: this process may lock only {limit} \
                 bytes (RLIMIT_MEMLOCK); raise the limit (ulimit -l, LimitMEMLOCK= of a systemd \
                 unit) or use smaller queues and chunks"
            )
        }
        _ => format!("cannot register {bytes} bytes with {device}"),
    };
    FabricError::system(what, error)
}

/// Returns the error for a device that cannot carry a session.
pub(super) fn no_immediates(device: &str) -> FabricError {
    FabricError::system(
        format!(
            "{device} is an iWARP device, which has no RDMA write with immediate: a session \
             cannot use it; use tcp://"
        ),
        io::ErrorKind::Unsupported.into(),
    )
}

/// Returns the error for a device without suitable windows.
pub(super) fn no_windows(device: &str) -> FabricError {
    FabricError::system(
        format!(
            "{device} has no memory windows of type 1, which a new key for each request requires; \
             use --always-invalidate=auto on a server, --invalidate-reads=off on a client"
        ),
        io::ErrorKind::Unsupported.into(),
    )
}

/// Returns the error for a device that is being removed.
pub(super) fn removed(device: &str) -> FabricError {
    FabricError::system(format!("{device} is being removed"), io::ErrorKind::NotConnected.into())
}

/// Returns the error for queues that are longer than the device supports.
pub(super) fn queue_too_long(device: &str, what: &str, wanted: u64, most: u32) -> FabricError {
    FabricError::system(
        format!("{device} cannot hold {wanted} {what}, at most {most}: use a smaller queue_depth"),
        io::ErrorKind::InvalidInput.into(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_include_their_hint() {
        let gone = Path::new("/nonexistent/rdma_cm");
        let text = check_file(gone, Path::new("/")).unwrap_err().to_string();
        assert!(text.contains("modprobe rdma_ucm)"), "{text}");
        let text = check_file(gone, Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(text.contains("rdma_rxe") && text.contains("tcp://"), "{text}");
        assert!(check_file(Path::new("/dev/null"), Path::new("/")).is_ok());
        let nodev = || io::Error::from_raw_os_error(libc::ENODEV);
        let here = IpAddr::from([10, 0, 0, 1]);
        let text = no_device(here, &[], nodev()).to_string();
        assert!(text.contains("10.0.0.1") && text.contains("rdma link add"), "{text}");
        let text = no_device(here, &["rxe0".into()], nodev()).to_string();
        assert!(text.contains("devices: rxe0"), "{text}");
        let enomem = || io::Error::from_raw_os_error(libc::ENOMEM);
        let text = registration_with("rxe0", 1 << 20, Some(65_536), enomem()).to_string();
        assert!(text.contains("65536") && text.contains("LimitMEMLOCK"), "{text}");
        let text = registration_with("rxe0", 1 << 20, None, enomem()).to_string();
        assert!(!text.contains("LimitMEMLOCK"), "{text}");
        assert!(no_windows("rxe0").to_string().contains("--always-invalidate=auto"));
        assert!(no_immediates("siw0").to_string().contains("tcp://"));
        assert!(
            queue_too_long("rxe0", "completions", 40_000, 32_767).to_string().contains("32767")
        );
    }
}
