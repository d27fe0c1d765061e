//! RDMA devices on this host, as listed by the kernel under /sys/class/infiniband.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use super::hint::CLASS;
use super::windows;
use crate::fabric::FabricError;
use crate::fabric::rdma::device::{MemoryWindows, RdmaPort};
use crate::local::read_text;

/// Transport of an RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum Transport {
    /// RDMA over converged Ethernet, in hardware or software (rdma_rxe).
    RoCE,
    /// InfiniBand.
    InfiniBand,
    /// iWARP, which lacks RDMA write with immediate in verbs.
    #[serde(rename = "iWARP")]
    Iwarp,
    /// Another transport.
    Other,
}

/// RDMA device on this host.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Device name, as in `rdma link`.
    pub name: String,
    /// Transport.
    pub transport: Transport,
    /// Ports of the device.
    pub ports: Vec<RdmaPort>,
    /// Whether type 1 memory windows work; they are required for using a new key for each request.
    pub windows: MemoryWindows,
}

/// Returns the RDMA devices on this host, sorted by name; empty if there are none. Tests the
/// windows of each device, which may take a moment.
///
/// # Errors
/// `System` if the kernel's list cannot be read.
pub fn devices() -> Result<Vec<DeviceInfo>, FabricError> {
    let mut devices = list(Path::new(CLASS))
        .map_err(|e| FabricError::system(format!("cannot read {CLASS}"), e))?;
    for device in &mut devices {
        device.windows = windows::of_device(&device.name)
            .unwrap_or_else(|e| MemoryWindows::Untried(format!("it cannot be opened: {e}")));
    }
    Ok(devices)
}

/// Returns the names of the devices; empty if they cannot be read. Shards call this whenever an
/// address has no device, so nothing else is read: even a software device has 1,024 global
/// identifiers.
pub(super) fn names() -> Vec<String> {
    names_in(Path::new(CLASS))
}

fn names_in(class: &Path) -> Vec<String> {
    entries(class)
}

/// Returns true if the kernel reports that a port is not active. A port unknown to the kernel is
/// not considered down.
pub(super) fn port_is_down(device: &str, number: u8) -> bool {
    is_down(Path::new(CLASS), device, number)
}

fn is_down(class: &Path, device: &str, number: u8) -> bool {
    let state = read_text(&class.join(device).join(format!("ports/{number}/state")));
    // "1: DOWN"; nor can queue pairs use a port in the states between down and active.
    state.is_some_and(|state| !state.starts_with("4:"))
}

/// Returns the entries of a directory, sorted by name.
fn entries(path: &Path) -> Vec<String> {
    let Ok(read) = fs::read_dir(path) else { return Vec::new() };
    let mut names: Vec<String> =
        read.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn list(class: &Path) -> io::Result<Vec<DeviceInfo>> {
    match fs::read_dir(class) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    }
    Ok(names_in(class).iter().map(|name| device(&class.join(name), name)).collect())
}

fn device(path: &Path, name: &str) -> DeviceInfo {
    let ports_path = path.join("ports");
    let mut ports: Vec<RdmaPort> = entries(&ports_path)
        .iter()
        .filter_map(|number| Some(port(&ports_path.join(number), name, number.parse().ok()?)))
        .collect();
    ports.sort_by_key(|port| port.number);
    // "4: RNIC" is iWARP; a channel adapter ("1: CA") is identified by its first port's link.
    let node = read_text(&path.join("node_type")).unwrap_or_default();
    let link = read_text(&ports_path.join("1/link_layer")).unwrap_or_default();
    let transport = match (node.split(':').next(), link.as_str()) {
        (Some("4"), _) => Transport::Iwarp,
        (Some("1"), "Ethernet") => Transport::RoCE,
        (Some("1"), "InfiniBand") => Transport::InfiniBand,
        _ => Transport::Other,
    };
    DeviceInfo { name: name.to_owned(), transport, ports, windows: MemoryWindows::default() }
}

fn port(path: &Path, device: &str, number: u8) -> RdmaPort {
    // "4: ACTIVE".
    let state = read_text(&path.join("state")).unwrap_or_default();
    let state = state.rsplit(' ').next().unwrap_or_default().to_lowercase();
    let mut addresses = Vec::new();
    for index in entries(&path.join("gids")) {
        if let Some(gid) = read_text(&path.join("gids").join(index))
            && let Some(address) = address_of(&gid)
            && !addresses.contains(&address)
        {
            addresses.push(address);
        }
    }
    let netdev = read_text(&path.join("gid_attrs/ndevs/0"));
    RdmaPort { device: device.to_owned(), number, state, netdev, addresses }
}

/// Returns the IP address encoded in a global identifier: RoCE maps IPv4 addresses, and IPv6
/// addresses are used unchanged.
fn address_of(gid: &str) -> Option<IpAddr> {
    let address: Ipv6Addr = gid.parse().ok()?;
    if address.is_unspecified() || address.is_unicast_link_local() {
        return None;
    }
    Some(address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn device_names_are_listed_without_opening_devices() {
        let root = std::env::temp_dir().join(format!("rtrs-verbs-names-{}", std::process::id()));
        fs::create_dir_all(root.join("rxe1/ports/1/gids")).unwrap();
        fs::create_dir_all(root.join("mlx5_0")).unwrap();
        // Reading from a pipe without writers blocks.
        let pipe = root.join("rxe1/ports/1/gids/0");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let (sender, names) = mpsc::channel();
        let class = root.clone();
        thread::spawn(move || sender.send(names_in(&class)));
        let names = names.recv_timeout(Duration::from_secs(60));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(names.unwrap(), ["mlx5_0", "rxe1"]);
    }

    #[test]
    fn the_kernels_list_is_parsed() {
        let root = std::env::temp_dir().join(format!("rtrs-verbs-info-{}", std::process::id()));
        let make = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        make("rxe1/node_type", "1: CA\n");
        make("rxe1/ports/1/state", "4: ACTIVE\n");
        make("rxe1/ports/1/link_layer", "Ethernet\n");
        make("rxe1/ports/1/gids/0", "fe80:0000:0000:0000:0203:04ff:fe05:0607\n");
        make("rxe1/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        make("rxe1/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        make("rxe1/ports/1/gid_attrs/ndevs/0", "eth0\n");
        make("iw0/node_type", "4: RNIC\n");
        make("iw0/ports/1/state", "1: DOWN\n");
        make("ib0/node_type", "1: CA\n");
        make("ib0/ports/1/link_layer", "InfiniBand\n");
        assert!(!is_down(&root, "rxe1", 1) && is_down(&root, "iw0", 1));
        assert!(!is_down(&root, "ib0", 1), "not known to be down");
        let found = list(&root).unwrap();
        fs::remove_dir_all(&root).unwrap();
        let names: Vec<&str> = found.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["ib0", "iw0", "rxe1"]);
        assert_eq!(found[0].transport, Transport::InfiniBand);
        assert_eq!(
            (found[1].transport, found[1].ports[0].state.as_str()),
            (Transport::Iwarp, "down")
        );
        let rxe = &found[2];
        assert_eq!(rxe.transport, Transport::RoCE);
        let port = &rxe.ports[0];
        assert_eq!((port.state.as_str(), port.netdev.as_deref()), ("active", Some("eth0")));
        assert_eq!(port.addresses, [IpAddr::from([10, 0, 0, 1])]);
        assert!(list(&root).unwrap().is_empty());
    }
}
