//! Tests with independent clients: the `nbd` crate, and common NBD programs if they are installed.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nbd::client::{NbdClient, NbdExt, handshake};
use nbd_bridge::{Bound, Endpoint};

use crate::client::pattern;
use crate::fixture::{Fixture, Message};

#[test]
fn the_nbd_crate_reads_its_writes() {
    let fixture = Fixture::new();
    let mut socket = fixture.socket();
    let export = handshake(&mut socket, b"vol0").unwrap();
    assert_eq!(export.size, 64 << 20);
    assert!(export.send_flush && !export.readonly);
    let mut client = NbdClient::new(socket, &export);
    for (seed, len) in [512usize, 4096, 1 << 20, 3 << 20].into_iter().enumerate() {
        let data = pattern(seed as u64, len);
        let at = SeekFrom::Start(4096 * seed as u64);
        client.seek(at).unwrap();
        client.write_all(&data).unwrap();
        client.flush().unwrap();
        client.seek(at).unwrap();
        let mut back = vec![0; len];
        client.read_exact(&mut back).unwrap();
        assert!(back == data, "{len} bytes differ");
    }
    client.seek(SeekFrom::Start(0)).unwrap();
    client.trim(1 << 20).unwrap();
    drop(client);
    fixture.finish();
}

/// A temporary directory of this test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nbd-bridge-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a program. Returns None, with a message, when it is not installed.
fn program(name: &str, arguments: &[&str]) -> Option<String> {
    let mut command = Command::new("timeout");
    command.arg("300").arg(name).args(arguments).stdin(Stdio::null());
    let probe = Command::new(name).arg("--version").stdout(Stdio::null()).status();
    if probe.is_err() {
        eprintln!("SKIPPED: {name} is not installed");
        return None;
    }
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{name} {arguments:?}: {}\n{text}\n{errors}", out.status);
    Some(text)
}

fn on_both_sockets(name: &str, run: impl Fn(&str, &Scratch)) {
    let scratch = Scratch::new(name);
    let path = scratch.0.join("nbd.sock");
    for endpoint in [Endpoint::Unix(path.clone()), Endpoint::Tcp("127.0.0.1:0".parse().unwrap())] {
        let fixture = Fixture::new();
        let bound = Bound::new(&endpoint).unwrap();
        if matches!(endpoint, Endpoint::Unix(_)) {
            let again = Bound::new(&endpoint).unwrap_err();
            assert_eq!(again.kind(), std::io::ErrorKind::AddrInUse);
        }
        let uri = bound.endpoint().uri("vol0");
        fixture.mail.send(Message::Listen(bound));
        run(&uri, &scratch);
        fixture.finish();
    }
    assert!(!path.exists(), "the listener removes its socket's path");
}

#[test]
fn nbdinfo_shows_the_export() {
    on_both_sockets("info", |uri, _| {
        let Some(text) = program("nbdinfo", &["--json", uri]) else { return };
        for word in ["\"export-size\": 67108864", "\"can_multi_conn\": true", "\"can_fua\": true"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }
        let list = program("nbdinfo", &["--list", uri]).unwrap();
        assert!(list.contains("vol0"), "{list}");
    });
}

#[test]
fn nbdcopy_copies_both_ways() {
    on_both_sockets("copy", |uri, scratch| {
        let (there, back) = (scratch.0.join("there"), scratch.0.join("back"));
        let data = pattern(3, 64 << 20);
        std::fs::write(&there, &data).unwrap();
        if program("nbdcopy", &[there.to_str().unwrap(), uri]).is_none() {
            return;
        }
        program("nbdcopy", &[uri, back.to_str().unwrap()]).unwrap();
        assert!(std::fs::read(&back).unwrap() == data, "the copy differs");
    });
}

#[test]
fn qemu_io_patterns_verify() {
    on_both_sockets("qemu", |uri, _| {
        let commands = [
            "write -P 0x5a 0 2M",
            "aio_write -P 0x11 4M 64k",
            "aio_write -P 0x22 5M 1M",
            "aio_flush",
            "read -P 0x5a 512 1M",
            "read -P 0x22 5M 1M",
            "write -z 1M 512k",
            "read -P 0 1M 512k",
            "read -P 0x5a 1536k 512k",
            "discard 4M 64k",
            "write -f -P 0x77 32M 4k",
            "read -P 0x77 32M 4k",
            "write -P 0x99 30M 31M",
            "read -P 0x99 30M 31M",
            "flush",
        ];
        let mut arguments = vec!["-f", "raw"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(uri);
        if let Some(text) = program("qemu-io", &arguments) {
            assert!(!text.contains("verification failed"), "{text}");
        }
    });
}
