//! IDs of the server and of its exports.
//!
//! Owns [`Sources`]: the system's information about its disks and files, or directories with
//! equivalent content in tests. An ID is *stable* if the system identifies the object itself (a
//! serial number, a UUID), and *weak* if it identifies the object only until the next boot. Objects
//! with the same ID (in-place restores, cloned disks, cloned machine IDs) cannot be distinguished
//! here (docs/explanation/identity.md).

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rtrs_core::identity::{ExportId, ServerId};
use rtrs_core::local::read_text;
use rtrs_core::rt::blkdev::{self, device_number, device_numbers};
use rtrs_core::rt::{boot_number, random_number};

use crate::settings::Target;

/// Maximum depth of nested loop devices and partitions.
const DEPTH_MAX: u32 = 8;

/// Sources of IDs.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    /// /sys
    sysfs: PathBuf,
    /// /run/udev/data
    udev: PathBuf,
    /// /etc/machine-id
    machine_id: PathBuf,
    /// Number that identifies the host's current boot, if known.
    boot: Option<u64>,
    /// Number that identifies this process.
    process: u64,
    /// Number of memory exports created so far.
    in_memory: Arc<AtomicU64>,
}

/// Data that identifies an object.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    kind: &'static str,
    parts: Vec<String>,
    /// Whether the system identifies the object itself.
    stable: bool,
}

impl Key {
    fn stable(kind: &'static str, parts: Vec<String>) -> Self {
        Self { kind, parts, stable: true }
    }

    fn weak(kind: &'static str, parts: Vec<String>) -> Self {
        Self { kind, parts, stable: false }
    }

    /// Returns the key of a part of this object.
    fn within(mut self, kind: &'static str, parts: impl IntoIterator<Item = String>) -> Self {
        let mut all = vec![self.kind.to_owned()];
        all.append(&mut self.parts);
        all.extend(parts);
        Self { kind, parts: all, stable: self.stable }
    }
}

/// Returns a warning for an ID that does not identify its export in all circumstances.
fn doubt(id: Option<ExportId>) -> Option<&'static str> {
    match id {
        None => Some(
            "cannot derive an identity for this export, so clients cannot tell it from other \
             exports; set id=TEXT for the export",
        ),
        Some(id) if id.is_weak() => Some(
            "no persistent ID for this export: its weak ID is valid only until the host reboots; \
             set id=TEXT for the export",
        ),
        Some(_) => None,
    }
}

impl Sources {
    /// Sources of the running system.
    pub(crate) fn system() -> Self {
        Self {
            sysfs: "/sys".into(),
            udev: "/run/udev/data".into(),
            machine_id: "/etc/machine-id".into(),
            boot: boot_number(),
            process: random_number(),
            in_memory: Arc::default(),
        }
    }

    /// ID of the server: from its configured name, or else from its host. Logs a warning if there
    /// is none.
    pub(crate) fn server(&self, set: Option<&str>) -> Option<ServerId> {
        let id = self.find_server(set);
        if id.is_none() {
            tracing::warn!("{}", self.no_server_id());
        }
        id
    }

    fn find_server(&self, set: Option<&str>) -> Option<ServerId> {
        if let Some(name) = set {
            return Some(ServerId::of_name(name));
        }
        let machine = read_text(&self.machine_id).filter(|id| {
            id.len() == 32
                && id.bytes().all(|b| b.is_ascii_hexdigit())
                && !id.trim_matches('0').is_empty()
        });
        machine.map(|id| ServerId::of_machine(id.as_bytes()))
    }

    fn no_server_id(&self) -> String {
        format!(
            "cannot derive an identity for this server, so clients cannot tell it from other \
             servers: {} has no machine ID; set server-id",
            self.machine_id.display()
        )
    }

    /// Returns the warning for a server without an ID.
    pub(crate) fn server_warning(&self, set: Option<&str>) -> Option<String> {
        self.find_server(set).is_none().then(|| self.no_server_id())
    }

    /// ID of an export: from the operator's setting, or else from its target. Logs a warning if it
    /// is weak or missing.
    pub(crate) fn export(
        &self,
        name: &str,
        set: Option<&str>,
        target: &Target,
    ) -> Option<ExportId> {
        let id = self.find_export(name, set, target);
        if let Some(text) = doubt(id) {
            tracing::warn!(export = name, "{text}");
        }
        id
    }

    /// Returns the warning for an export whose ID is weak or missing.
    pub(crate) fn export_warning(
        &self,
        name: &str,
        set: Option<&str>,
        target: &Target,
    ) -> Option<String> {
        let text = doubt(self.find_export(name, set, target))?;
        Some(format!("export {name:?}: {text}"))
    }

    fn find_export(&self, name: &str, set: Option<&str>, target: &Target) -> Option<ExportId> {
        if let Some(set) = set {
            return Some(ExportId::of_name(set));
        }
        let key = match target {
            Target::Path(path) => self.path(path, 0),
            // The backend provides a better ID.
            Target::Rbd(_) => None,
            // The target behind the URL is unknown.
            Target::Nbd(url) => Some(Key::weak("nbd", vec![url.to_string()])),
            // The contents are lost when the export is removed or the process ends: the next export
            // is a different one, even under the same name.
            Target::Memory(_) | Target::Null(_) => {
                let number = self.in_memory.fetch_add(1, Ordering::Relaxed);
                let parts = [self.process.to_string(), name.to_owned(), target.to_string()];
                let parts = parts.into_iter().chain([number.to_string()]);
                Some(Key::stable("process", parts.collect()))
            }
        };
        key.and_then(|key| self.id_of(&key))
    }

    /// Returns the ID of a file or block device itself, whatever ID the operator has set.
    pub(crate) fn target(&self, path: &Path) -> Option<ExportId> {
        self.path(path, 0).and_then(|key| self.id_of(&key))
    }

    fn id_of(&self, key: &Key) -> Option<ExportId> {
        let parts: Vec<&[u8]> = key.parts.iter().map(String::as_bytes).collect();
        match (key.stable, self.boot) {
            (true, _) => Some(ExportId::stable(key.kind, &parts)),
            (false, boot) => Some(ExportId::weak(boot?, key.kind, &parts)),
        }
    }

    fn path(&self, path: &Path, depth: u32) -> Option<Key> {
        let meta = fs::metadata(path).ok()?;
        if meta.file_type().is_block_device() {
            return self.device(meta.rdev(), depth);
        }
        let file = fs::File::open(path).ok()?;
        let meta = file.metadata().ok()?;
        let born = meta.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
        let generation = blkdev::file_generation(&file).ok().map(|number| number.to_string());
        let inode = meta.ino().to_string();
        let born = born.map(|at| at.as_nanos().to_string());
        // On a file system without its own device (tmpfs, overlay, NFS, a subvolume), the file
        // system's ID does not determine which inode numbers are meant.
        let filesystem = (device_numbers(meta.dev()).0 != 0)
            .then(|| {
                let uuid = blkdev::filesystem_uuid(&file).ok();
                uuid.map(|uuid| uuid.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
                    .or_else(|| self.udev(meta.dev(), "ID_FS_UUID").map(|uuid| undashed(&uuid)))
            })
            .flatten();
        Some(match (filesystem, generation.or_else(|| born.clone())) {
            (Some(uuid), Some(generation)) => Key::stable("file", vec![uuid, inode, generation]),
            _ => Key::weak("file", vec![meta.dev().to_string(), inode, born.unwrap_or_default()]),
        })
    }

    /// Key of a block device.
    fn device(&self, dev: u64, depth: u32) -> Option<Key> {
        if depth > DEPTH_MAX {
            return None;
        }
        let numbers = numbers(dev);
        let Ok(dir) = fs::canonicalize(self.sysfs.join("dev/block").join(&numbers)) else {
            return Some(Key::weak("device", vec![numbers]));
        };
        if let Some(number) = read_text(&dir.join("partition")) {
            let whole = read_text(&dir.parent()?.join("dev"))?;
            let (major, minor) = whole.split_once(':')?;
            let whole = device_number(major.parse().ok()?, minor.parse().ok()?);
            let whole = self.device(whole, depth + 1)?;
            let uuid = self.udev(dev, "ID_PART_ENTRY_UUID").or_else(|| uevent(&dir, "PARTUUID"));
            return Some(match uuid {
                Some(uuid) => whole.within("partition", [uuid]),
                // The partition table may differ after the next boot.
                None => {
                    let start = read_text(&dir.join("start")).unwrap_or_default();
                    Key { stable: false, ..whole.within("partition", [number, start]) }
                }
            });
        }
        if let Some(file) = read_text(&dir.join("loop/backing_file"))
            && !file.ends_with(" (deleted)")
            && let Some(file) = self.path(Path::new(&file), depth + 1)
        {
            let offset = read_text(&dir.join("loop/offset")).unwrap_or_default();
            return Some(file.within("loop", [offset]));
        }
        for (kind, file) in [
            ("dm", "dm/uuid"),
            ("md", "md/uuid"),
            ("wwid", "wwid"),
            ("wwid", "device/wwid"),
            ("serial", "serial"),
            ("cid", "device/cid"),
        ] {
            if let Some(id) = read_text(&dir.join(file)) {
                return Some(Key::stable(kind, vec![id]));
            }
        }
        for (kind, property) in
            [("md", "MD_UUID"), ("wwn", "ID_WWN_WITH_EXTENSION"), ("wwn", "ID_WWN")]
        {
            if let Some(id) = self.udev(dev, property) {
                return Some(Key::stable(kind, vec![id]));
            }
        }
        // Used only with a serial number of the device, not with its model alone.
        if self.udev(dev, "ID_SERIAL_SHORT").is_some()
            && let Some(id) = self.udev(dev, "ID_SERIAL")
        {
            return Some(Key::stable("serial", vec![id]));
        }
        let name = dir.file_name()?.to_string_lossy().into_owned();
        // `diskseq` counts the disks that the kernel has had since boot.
        let diskseq = read_text(&dir.join("diskseq")).unwrap_or_default();
        Some(Key::weak("device", vec![name, numbers, diskseq]))
    }

    /// Reads a property of a block device from udev's database.
    fn udev(&self, dev: u64, property: &str) -> Option<String> {
        let path = self.udev.join(format!("b{}", numbers(dev)));
        let entries = fs::read_to_string(path).ok()?;
        let mut values = entries.lines().filter_map(|line| {
            let (name, value) = line.strip_prefix("E:")?.split_once('=')?;
            (name == property && !value.is_empty()).then(|| value.to_owned())
        });
        values.next()
    }
}

/// Formats device numbers as in /sys/dev/block and udev.
fn numbers(dev: u64) -> String {
    let (major, minor) = device_numbers(dev);
    format!("{major}:{minor}")
}

/// Reads a value of a device's `uevent` file.
fn uevent(dir: &Path, key: &str) -> Option<String> {
    let lines = read_text(&dir.join("uevent"))?;
    let mut values = lines.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    values.next().filter(|value| !value.is_empty()).map(str::to_owned)
}

/// Formats a UUID as the system call does: digits only.
fn undashed(uuid: &str) -> String {
    uuid.replace('-', "").to_lowercase()
}

#[cfg(test)]
mod tests;
