//! Tests of images on this machine's cluster: the backend contract, sizes, a slow OSD, and
//! refusals. `tests/interop/ceph.rs` covers tools and daemons.

use std::cell::Cell;
use std::fs;
use std::sync::Arc;
use std::time::Instant;

use rtrs_core::block::{BlockSource, IoFlags, IoOp};
use rtrs_core::rt::Clock;
use rtrs_core::status::IoStatus;
use rtrs_core::tests::Ceph;
use rtrs_core::time::Duration;

use crate::backend::conformance::{Keeps, Rig, run as conforms};
use crate::backend::open_target;

const MIB: u64 = 1 << 20;
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Opens a target on the cluster as the server does.
fn open(ceph: &Ceph, target: &str) -> Result<Arc<dyn BlockSource>, String> {
    let spec = format!("{target},conf={}", ceph.conf()).parse().unwrap();
    open_target(&spec).map_err(|error| error.to_string())
}

fn wait_for(what: &str, done: impl Fn() -> bool) {
    let end = Clock.now() + WAIT_MAX;
    while !done() {
        assert!(Clock.now() < end, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn images_conform() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("conforms", 64);
    ceph.run("rbd", &["snap", "create", "rbd/conforms@empty"]);
    let source = open(ceph, "rbd:rbd/conforms").unwrap();
    let g = source.geometry();
    assert_eq!((g.size, g.io_max, g.discard_granularity), (64 * MIB, 4 << 20, 64 << 10));
    conforms(&source, Keeps::Data);
    drop(source);
    for options in [",block-size=4096", ",ro", "@empty,ro"] {
        conforms(&open(ceph, &format!("rbd:rbd/conforms{options}")).unwrap(), Keeps::Data);
    }
    // Objects of a different size, in a namespace.
    ceph.run("rbd", &["namespace", "create", "rbd/team"]);
    ceph.run("rbd", &["create", "--size", "20", "--object-size", "64K", "rbd/team/small"]);
    conforms(&open(ceph, "rbd:rbd/team/small").unwrap(), Keeps::Data);
}

#[test]
fn an_image_is_identified_by_its_id() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("known", 8);
    ceph.image("other", 8);
    ceph.run("rbd", &["snap", "create", "rbd/known@s"]);
    let id = |target: &str| open(ceph, target).unwrap().identity().unwrap();
    let known = id("rbd:rbd/known,ro");
    ceph.run("rbd", &["rename", "rbd/known", "rbd/renamed"]);
    assert_eq!(id("rbd:rbd/renamed,ro"), known);
    assert!(!known.is_weak() && id("rbd:rbd/other,ro") != known);
    assert_ne!(id("rbd:rbd/renamed@s,ro"), known, "a snapshot is a different disk");
}

#[test]
fn images_that_cannot_be_exported_are_refused_with_a_reason() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("plain", 8);
    ceph.run("rbd", &["create", "--size", "8", "--image-feature", "layering", "rbd/unlocked"]);
    ceph.image("cached", 8);
    ceph.run("rbd", &["config", "image", "set", "rbd/cached", "rbd_cache", "true"]);
    let refuse = |target: &str, words: &[&str]| {
        let error = open(ceph, target).err().unwrap_or_else(|| panic!("{target} opens"));
        assert!(words.iter().all(|word| error.contains(word)), "{error} lacks {words:?}");
    };
    let missing = "does not exist";
    refuse("rbd:none/plain", &["names the pool \"none\"", missing, "ceph osd pool ls"]);
    refuse("rbd:rbd/none", &[missing, "rbd ls"]);
    refuse("rbd:rbd/none/plain", &[missing]);
    refuse("rbd:rbd/plain@none,ro", &[missing, "rbd snap ls"]);
    refuse("rbd:rbd/unlocked", &["lacks the exclusive-lock feature", "rbd feature enable"]);
    open(ceph, "rbd:rbd/unlocked,no-lock").unwrap();
    open(ceph, "rbd:rbd/unlocked,ro").unwrap();
    refuse("rbd:rbd/cached", &["would lose acknowledged writes", "rbd config image ls"]);
    open(ceph, "rbd:rbd/cached,ro").unwrap();
    let first = open(ceph, "rbd:rbd/plain").unwrap();
    refuse("rbd:rbd/plain", &["is in use", "still holds the lock", "export it with `ro`"]);
    open(ceph, "rbd:rbd/plain,ro").unwrap();
    drop(first);
    open(ceph, "rbd:rbd/plain").unwrap();

    let dir = std::env::temp_dir().join(format!("rtrs-rbd-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let conf = |name: &str, text: &str| {
        let file = dir.join(name);
        fs::write(&file, text).unwrap();
        let options = format!("connect-timeout=2s,user=guest,conf={}", file.display());
        let spec = format!("rbd:rbd/plain,{options}").parse().unwrap();
        open_target(&spec).map(drop).unwrap_err().to_string()
    };
    let begin = Instant::now();
    let error = conf("away", "[global]\nmon host = 127.0.0.1:1\nauth client required = none\n");
    assert!(error.contains("cannot reach a monitor within 2 s"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let real = fs::read_to_string(ceph.conf()).unwrap();
    let keyless = real.replace("client required = none", "client required = cephx");
    let error = conf("keyless", &keyless);
    assert!(error.contains("cannot connect as client.guest"), "{error}");
    let error = conf("broken", "[global]\nfoo\n");
    assert!(error.contains("cannot use ") && error.contains("broken"), "{error}");
    fs::remove_dir_all(&dir).unwrap();
    let error = open_target(&"rbd:rbd/plain,conf=/nonexistent".parse().unwrap());
    let error = error.map(drop).unwrap_err().to_string();
    assert!(error.contains("cannot use /nonexistent: No such file"), "{error}");
}

#[test]
fn a_grown_image_grows_its_export_and_a_shrunk_one_is_detected() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("grows", 8);
    let source = open(ceph, "rbd:rbd/grows").unwrap();
    let mut rig = Rig::new(&*source, 0);
    assert_eq!(rig.write(8 * MIB, &[1; 512]), IoStatus::NoSpace);
    ceph.run("rbd", &["resize", "--no-progress", "--size", "12", "rbd/grows"]);
    wait_for("the new size", || source.geometry().size == 12 * MIB);
    assert_eq!(rig.write(8 * MIB, &[1; 512]), IoStatus::Ok);
    let shrink = ["resize", "--no-progress", "--allow-shrink", "--size", "4", "rbd/grows"];
    ceph.run("rbd", &shrink);
    wait_for("the cut", || source.is_cut());
    assert_eq!(rig.write(5 * MIB, &[1; 512]), IoStatus::Beyond);
    let io = rig.transfer(IoOp::Read, 5 * MIB, 0, 512);
    assert_eq!(rig.run(io), IoStatus::Beyond);
    assert_eq!(rig.write(3 * MIB, &[1; 512]), IoStatus::Ok);
    let size = source.target_size().unwrap();
    assert_eq!((size.bytes, size.was_cut), (4 * MIB, Some(4 * MIB)));
    let lost = Cell::new(false);
    source
        .resize(6 * MIB, &|| {
            lost.set(true);
            Ok(())
        })
        .unwrap();
    assert!(lost.get() && !source.is_cut() && source.geometry().size == 6 * MIB);
    assert_eq!(rig.write(5 * MIB, &[1; 512]), IoStatus::Ok);
}

#[test]
fn a_slow_osd_is_awaited() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("slow", 8);
    let source = open(ceph, "rbd:rbd/slow").unwrap();
    let mut rig = Rig::new(&*source, 0);
    assert_eq!(rig.write(0, &[1; 4096]), IoStatus::Ok);
    ceph.signal_osd("STOP");
    let io = rig.transfer(IoOp::Write, 4096, 0, 4096);
    rig.device.submit(io).unwrap();
    let waits = (0..100).all(|_| {
        rig.turn();
        rig.device.reap().is_none()
    });
    ceph.signal_osd("CONT");
    let ended = rig.drain();
    assert!(waits && matches!(ended[..], [(_, IoStatus::Ok)]), "{waits} {ended:?}");
    assert_eq!(rig.clear(IoOp::Discard, 0, 4096, IoFlags::default()), IoStatus::Ok);
}

#[test]
fn a_blocklisted_client_fails_io_and_closes() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("fenced", 8);
    let source = open(ceph, "rbd:rbd/fenced").unwrap();
    let mut rig = Rig::new(&*source, 0);
    assert_eq!(rig.write(0, &[1; 512]), IoStatus::Ok);
    ceph.run("ceph", &["osd", "blocklist", "add", &ceph.watcher("rbd/fenced"), "600"]);
    let end = Clock.now() + WAIT_MAX;
    let refused = loop {
        match rig.write(0, &[2; 512]) {
            // The OSD has not received the blocklist entry yet.
            IoStatus::Ok => assert!(Clock.now() < end, "not refused"),
            refused => break refused,
        }
    };
    assert_eq!(refused, IoStatus::NoDevice);
    drop((rig, source));
    let source = open(ceph, "rbd:rbd/fenced").unwrap();
    assert_eq!(Rig::new(&*source, 0).write(0, &[9; 512]), IoStatus::Ok);
}
