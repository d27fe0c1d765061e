//! RDMA portals that give each request a fresh key for its chunk.
//!
//! Owns [`check`], which compares `always-invalidate` with the capabilities of this host's devices
//! and logs the result for each portal. The decision is made for each path when it connects
//! (`SessionParams::fresh_keys`), so it also covers devices that appear later. `portals.rs` calls
//! [`check`] before anything listens.

use rtrs_core::fabric::rdma::{MemoryWindows, RdmaDevice};
use rtrs_core::settings::{AutoSwitch, Scheme};

use super::Target;
use crate::error::{Error, ErrorKind};

/// Logs each RDMA portal's capabilities. Drops automatic portals that do not meet the demand.
///
/// # Errors
/// [`ErrorKind::Listen`] if fresh keys are demanded and no device of a portal has memory windows.
pub(super) fn check(
    demand: AutoSwitch,
    targets: &mut Vec<Target>,
    devices: &[RdmaDevice],
) -> Result<(), Error> {
    let mut refused = None;
    targets.retain(|target| {
        if target.scheme != Scheme::Rdma || demand == AutoSwitch::Off {
            return true;
        }
        let portal = format!("rdma://{}", target.address);
        let (without, with) = devices_of(target, devices)
            .into_iter()
            .partition::<Vec<_>, _>(|device| device.windows.is_missing());
        for device in &with {
            let device_name = &*device.name;
            if let MemoryWindows::Untried(why) = &device.windows {
                tracing::info!(portal, device = device_name, why, "memory windows were not tried");
            } else {
                tracing::info!(portal, device = device_name, "each request gets a fresh key");
            }
        }
        if demand == AutoSwitch::On && with.is_empty() && !without.is_empty() {
            let text = format!(
                "{}, which always-invalidate: on needs; use always-invalidate: auto, or another \
                 device",
                without.iter().map(|device| why(device)).collect::<Vec<_>>().join("; ")
            );
            if target.automatic {
                tracing::warn!("not listening on {portal}: {text}");
            } else {
                let text = format!("cannot listen on {portal}: {text}");
                refused.get_or_insert_with(|| Error::new(ErrorKind::Listen, text));
            }
            return false;
        }
        for device in without {
            let (device, why) = (&*device.name, why(device));
            if demand == AutoSwitch::On {
                tracing::warn!(portal, device, why, "this device cannot serve sessions");
            } else {
                tracing::warn!(portal, device, why, "requests on this device use no fresh keys");
            }
        }
        true
    });
    refused.map_or(Ok(()), Err)
}

/// Devices that a portal may use.
fn devices_of<'d>(target: &Target, devices: &'d [RdmaDevice]) -> Vec<&'d RdmaDevice> {
    let has = |device: &&RdmaDevice| device.has(target.address.ip());
    let found: Vec<_> = devices.iter().filter(has).collect();
    // InfiniBand ports do not list IP addresses.
    if found.is_empty() { devices.iter().collect() } else { found }
}

/// Explains why a device has no windows.
fn why(device: &RdmaDevice) -> String {
    let reason = match &device.windows {
        MemoryWindows::Missing(why) | MemoryWindows::Untried(why) => why,
        MemoryWindows::Usable => "",
    };
    format!("{} has no memory windows ({reason})", device.name)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr, SocketAddr};

    use rtrs_core::fabric::rdma::RdmaPort;

    use super::*;

    fn device(name: &str, host: u8, windows: MemoryWindows) -> RdmaDevice {
        let port = RdmaPort {
            device: name.into(),
            number: 1,
            state: "active".into(),
            netdev: None,
            addresses: vec![IpAddr::from([10, 0, 0, host])],
        };
        RdmaDevice { name: name.into(), ports: vec![port], windows }
    }

    fn missing() -> MemoryWindows {
        MemoryWindows::Missing("the provider cannot create a window".into())
    }

    fn on(scheme: Scheme, host: u8) -> Target {
        Target { scheme, address: SocketAddr::from(([10, 0, 0, host], 1234)), automatic: false }
    }

    fn everywhere(automatic: bool) -> Target {
        let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 1234));
        Target { scheme: Scheme::Rdma, address, automatic }
    }

    /// Returns the number of targets that remain.
    fn left(
        demand: AutoSwitch,
        mut targets: Vec<Target>,
        devices: &[RdmaDevice],
    ) -> Result<usize, String> {
        check(demand, &mut targets, devices).map_err(|e| e.to_string())?;
        Ok(targets.len())
    }

    #[test]
    fn a_portal_without_windows_is_refused_if_they_are_required() {
        let devices = [device("bnxt_re0", 1, missing()), device("rxe0", 2, MemoryWindows::Usable)];
        let text = left(AutoSwitch::On, vec![on(Scheme::Rdma, 1)], &devices).unwrap_err();
        for part in
            ["rdma://10.0.0.1:1234", "bnxt_re0", "the provider cannot create a window", "auto"]
        {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        // The other device meets the demand, and TCP always does.
        let fine = vec![on(Scheme::Rdma, 2), on(Scheme::Tcp, 1)];
        assert_eq!(left(AutoSwitch::On, fine, &devices), Ok(2));
        // A portal on all devices serves the ones that have windows.
        assert_eq!(left(AutoSwitch::On, vec![everywhere(false)], &devices), Ok(1));
        left(AutoSwitch::On, vec![everywhere(false)], &devices[..1]).unwrap_err();
        // An automatic portal is dropped.
        let ours = vec![on(Scheme::Tcp, 1), everywhere(true)];
        assert_eq!(left(AutoSwitch::On, ours, &devices[..1]), Ok(1));
    }

    #[test]
    fn every_portal_is_served_if_windows_are_optional() {
        let untried = MemoryWindows::Untried("the port has no address".into());
        for windows in [missing(), untried, MemoryWindows::Usable] {
            let devices = [device("bnxt_re0", 1, windows)];
            for demand in [AutoSwitch::Auto, AutoSwitch::Off] {
                let targets = vec![on(Scheme::Rdma, 1), everywhere(true), everywhere(false)];
                assert_eq!(left(demand, targets, &devices), Ok(3));
            }
        }
    }

    #[test]
    fn a_portal_with_unknown_windows_is_not_refused() {
        let untried = device("rxe0", 1, MemoryWindows::Untried("the port has no address".into()));
        assert_eq!(left(AutoSwitch::On, vec![on(Scheme::Rdma, 1)], &[untried]), Ok(1));
        // No device has the address yet: listening will report that.
        assert_eq!(left(AutoSwitch::On, vec![on(Scheme::Rdma, 3)], &[]), Ok(1));
        // Any of these devices may turn out to have the address.
        let devices = [device("ib0", 1, missing()), device("ib1", 2, MemoryWindows::Usable)];
        assert_eq!(left(AutoSwitch::On, vec![on(Scheme::Rdma, 3)], &devices), Ok(1));
        left(AutoSwitch::On, vec![on(Scheme::Rdma, 3)], &devices[..1]).unwrap_err();
    }
}
