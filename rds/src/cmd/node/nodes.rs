//! Nodes of a daemon, and their settings.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use rtrs_base::logging::change_filter;
use rtrs_base::settings::{SettingValue, SettingValues, print};
use serde_json::Value;

use crate::error::{Error, ErrorKind};
use crate::node::NodeHandle;
use crate::settings::{CHANGEABLE, Settings};

/// The setting that applies to all nodes of a daemon.
const LOG: &str = "log";
/// The setting that lists the nodes.
const ADDRESS: &str = "address";

/// Nodes of a daemon.
#[derive(Debug)]
pub(super) struct Nodes {
    all: Vec<NodeHandle>,
    /// Current settings of each node.
    settings: Mutex<BTreeMap<IpAddr, Settings>>,
}

impl Nodes {
    pub(super) fn new(all: Vec<NodeHandle>, settings: &Settings) -> Self {
        let settings = all.iter().map(|node| (node.address(), settings.clone())).collect();
        Self { all, settings: Mutex::new(settings) }
    }

    pub(super) fn all(&self) -> &[NodeHandle] {
        &self.all
    }

    pub(super) fn find(&self, address: IpAddr) -> Option<&NodeHandle> {
        self.all.iter().find(|node| node.address() == address)
    }

    /// Returns the settings of a node.
    pub(super) fn values(&self, address: IpAddr) -> Option<SettingValues> {
        let settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        settings.get(&address).map(values)
    }

    /// Changes settings of a node, all or none. Returns the named settings.
    pub(super) fn change(
        &self,
        address: IpAddr,
        changes: &BTreeMap<String, String>,
    ) -> Result<Option<SettingValues>, String> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(node), Some(current)) = (self.find(address), settings.get(&address)) else {
            return Ok(None);
        };
        let new = current.changed(changes).map_err(|error| error.to_string())?;
        check_system_limits(&new, changes).map_err(|error| error.to_string())?;
        if changes.contains_key(LOG) {
            change_filter(&new.log)?;
            settings.values_mut().for_each(|each| each.log = new.log.clone());
        }
        let tuned = node.tune(&new.tunables());
        let mut values = values(&new);
        values.settings.retain(|setting| changes.contains_key(&setting.name));
        for setting in &values.settings {
            let SettingValue { name, value, .. } = setting;
            tracing::warn!(node = %address, %name, %value, "setting changed");
        }
        settings.insert(address, new);
        tuned.map_err(|error| format!("the change applies only to new connections: {error}"))?;
        Ok(Some(values))
    }
}

/// Checks that the system allows the changed buffer sizes of TCP connections.
fn check_system_limits(
    settings: &Settings,
    changes: &BTreeMap<String, String>,
) -> Result<(), Error> {
    for (name, size, limit) in [
        ("tcp-sndbuf", settings.tcp_sndbuf, "wmem_max"),
        ("tcp-rcvbuf", settings.tcp_rcvbuf, "rmem_max"),
    ] {
        // Network namespaces other than the first do not show the limit.
        let most = fs::read_to_string(format!("/proc/sys/net/core/{limit}"));
        let most = most.ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(most) = most.filter(|most| *most < size.bytes() && changes.contains_key(name)) {
            let text = format!(
                "{name} {size} exceeds the limit of the system; use up to {most}, or raise \
                 net.core.{limit}"
            );
            return Err(Error::new(ErrorKind::Usage, text));
        }
    }
    Ok(())
}

fn values(settings: &Settings) -> SettingValues {
    let all = print(settings).into_iter().filter_map(|(name, value)| {
        let name = name.as_str().filter(|name| *name != ADDRESS)?.to_owned();
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        let changeable = CHANGEABLE.contains(&name.as_str());
        Some(SettingValue { changeable, name, value, note: None })
    });
    let mut settings: Vec<SettingValue> = all.collect();
    settings.sort_by(|a, b| a.name.cmp(&b.name));
    SettingValues { settings }
}
