//! A Linux guest under verified load moves from one QEMU to another, after a migration that was
//! cancelled.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use super::*;

/// QEMU with a control socket.
struct Machine {
    proc: Proc,
    replies: BufReader<UnixStream>,
}

impl Machine {
    /// Starts QEMU. `incoming` is the socket on which it awaits a guest, if it does not boot one.
    fn start(host: &Host, client: &Client, name: &str, incoming: Option<&str>) -> Self {
        let control = host.scratch.path(&format!("{name}.qmp"));
        let archive = host.scratch.path("initramfs");
        let kernel = Kernel::find().expect("a kernel");
        let mut command = qemu_command(&kernel, &archive, &client.run_dir().join("v.vhost"));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", control.display()));
        if let Some(socket) = incoming {
            command.arg("-incoming").arg(format!("unix:{socket}"));
        }
        let proc = Proc::start(command);
        let stream =
            wait_for("the control socket", COMMAND_TIME_MAX, || UnixStream::connect(&control).ok());
        stream.set_read_timeout(Some(GUEST_TIME_MAX)).expect("a time limit");
        let mut machine = Self { proc, replies: BufReader::new(stream) };
        assert!(machine.reply()["QMP"].is_object());
        machine.run("qmp_capabilities", &json!({}));
        machine
    }

    fn reply(&mut self) -> Value {
        let mut line = String::new();
        self.replies.read_line(&mut line).expect("a reply");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    /// Runs a command of QEMU and returns its result.
    fn run(&mut self, command: &str, arguments: &Value) -> Value {
        let request = json!({ "execute": command, "arguments": arguments });
        self.replies.get_mut().write_all(request.to_string().as_bytes()).expect("a request");
        loop {
            let reply = self.reply();
            assert!(reply["error"].is_null(), "{command}: {reply}");
            if !reply["return"].is_null() {
                return reply["return"].clone();
            }
        }
    }

    /// Waits until a migration has this status.
    fn wait_migration(&mut self, status: &str) {
        wait_for(&format!("a migration that is {status}"), GUEST_TIME_MAX, || {
            let reply = self.run("query-migrate", &json!({}));
            let is = reply["status"].as_str().unwrap_or_default().to_owned();
            assert_ne!(is, "failed", "{reply}");
            (is == status).then_some(())
        });
    }

    fn migrate(&mut self, socket: &str) {
        self.run("migrate", &json!({ "uri": format!("unix:{socket}") }));
    }

    /// Sets the rate of the copy. The guest may stand still for seconds, so that the copy also ends
    /// on a busy machine.
    fn limit(&mut self, bytes_per_second: u64) {
        let limits = json!({ "max-bandwidth": bytes_per_second, "downtime-limit": 5000 });
        self.run("migrate-set-parameters", &limits);
    }

    fn quit(mut self) -> String {
        self.run("quit", &json!({}));
        self.proc.wait(GUEST_TIME_MAX).ok().stdout
    }
}

#[test]
fn linux_moves_to_another_host_under_load() {
    let Some(kernel) = Kernel::find() else {
        return skip("no kernel in /boot with its modules; scripts/lab.sh setup installs one");
    };
    if !requires(&[&PROGRAMS[..], &["qemu-system-x86_64", "ldd"]].concat()) {
        return;
    }
    let host = Host::new(None);
    fs::write(host.scratch.path("initramfs"), initramfs(&kernel)).expect("the initramfs");
    let new = Client::attach("v").unattached();
    let attach_new = || {
        let socket = new.run_dir().join("v.vhost").display().to_string();
        let words = ["attach", "v", "--path", &host.portals[0], "--vhost-user", &socket];
        let own = ["--access=migration", "--session-name=new", "--shards=2"];
        let _ = new.command(&[&words[..], &own].concat()).ok();
    };
    let sectors = |bytes: u64| (bytes / 512).to_string();
    let socket = host.scratch.text("moving");
    let mut here = Machine::start(&host, &host.client, "here", None);
    assert_eq!(here.proc.wait_lines("@@ disk ", 1, GUEST_TIME_MAX), [sectors(64 << 20)]);
    here.proc.wait_lines("@@ round ", 1, GUEST_TIME_MAX);

    // The first attempt is so slow that it can only be cancelled.
    attach_new();
    let there = Machine::start(&host, &new, "there", Some(&socket));
    here.limit(64 << 10);
    here.migrate(&socket);
    here.wait_migration("active");
    host.await_load();
    here.run("migrate_cancel", &json!({}));
    here.wait_migration("cancelled");
    // A target without its source ends with an error.
    let _ = there.proc.wait(GUEST_TIME_MAX);
    new.detach();
    let rounds = here.proc.wait_lines("@@ round ", 1, GUEST_TIME_MAX).len();
    here.proc.wait_lines("@@ round ", rounds + 1, GUEST_TIME_MAX);

    // The second attempt succeeds: the guest continues once the old session has ended.
    attach_new();
    fs::remove_file(&socket).ok();
    let mut there = Machine::start(&host, &new, "again", Some(&socket));
    here.limit(1 << 30);
    host.await_load();
    here.migrate(&socket);
    here.wait_migration("completed");
    wait_for("the guest to wait", COMMAND_TIME_MAX, || {
        let status = new.status();
        let complaint = status["complaint"].as_str().unwrap_or_default();
        complaint.contains("another session still has the export open").then_some(())
    });
    let mut console = here.quit();
    host.client.detach();
    there.proc.wait_lines("@@ round ", 2, GUEST_TIME_MAX);

    host.grow();
    assert_eq!(there.proc.wait_lines("@@ size ", 1, GUEST_TIME_MAX), [sectors(96 << 20)]);
    let disks = there.proc.wait_lines("@@ disk ", 1, GUEST_TIME_MAX);
    assert_eq!(disks, [sectors(96 << 20)], "after the reboot");
    let checked = there.proc.wait_lines("@@ checked ", 1, GUEST_TIME_MAX);
    assert_eq!(checked, ["0"], "{}", there.proc.output());
    console += &there.proc.wait(GUEST_TIME_MAX).ok().stdout;
    for error in ["I/O error", "EXT4-fs error", "FAILED"] {
        assert!(!console.contains(error), "{console}");
    }
    assert_eq!(new.status()["state"], "open");
}
