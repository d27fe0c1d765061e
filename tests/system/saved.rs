//! Tests of `--save` with the commands that change exports: the next server starts with the current
//! exports.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rtrs_tests::{
    COMMAND_TIME_MAX, Finished, Proc, STOP_TIME_MAX, Scratch, Server, bin, is_root, requires, run,
    sparse_file,
};
use serde_json::Value;

/// Directory with a configuration, its exports and a volume.
struct Host {
    scratch: Scratch,
}

impl Host {
    /// Creates a configuration file with this text.
    fn new(config: &str) -> Self {
        let scratch = Scratch::new();
        fs::create_dir(scratch.path("exports.d")).expect("a directory");
        fs::write(scratch.path("server.yaml"), config).expect("a file");
        sparse_file(&scratch.path("vol1.img"), 1 << 20);
        Self { scratch }
    }

    fn start(&self) -> Server {
        let config = self.scratch.text("server.yaml");
        Server::builder().args(&["--config", &config]).start()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.scratch.path(name)).expect("a file")
    }

    /// Returns the names of the files in the exports directory.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.scratch.path("exports.d")).expect("a directory");
        let name = |entry: std::io::Result<fs::DirEntry>| {
            entry.expect("a file").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<String> = entries.map(name).collect();
        names.sort();
        names
    }

    /// Runs a server command in a shell, after these shell commands.
    fn run_after(&self, server: &Server, shell: &str, words: &[&str]) -> Finished {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{shell}; exec \"$@\""), "sh"]);
        command.arg(bin("rtrs-server")).args(words).arg("--run-dir").arg(server.run_dir());
        command.env("EXPORTS", self.scratch.path("exports.d"));
        Proc::start(command).wait(COMMAND_TIME_MAX)
    }
}

fn saved(server: &Server) -> Value {
    server.command(&["export", "save", "-o", "json"]).ok().json()
}

#[test]
fn the_next_server_starts_with_the_current_exports() {
    let host = Host::new("access: [anyone:rw]\nexport: ['base=null:1M']\n");
    let server = host.start();
    let added = format!("vol1={}", host.scratch.text("vol1.img"));
    let done = server.command(&["export", "add", &added, "--save", "-o", "json"]).ok().json();
    let file = host.scratch.text("exports.d/vol1.yaml");
    assert_eq!(done["saved"], *file, "{done}");
    let mode = fs::metadata(&file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o644, "a server without root reads it");
    let set = ["export", "set", "vol1", "block-size=4096", "access=anyone:ro"];
    let set = server.command(&[&set[..], &["--save", "--force"]].concat()).ok();
    let _ = set.says("vol1 changed\n").says(&format!("saved in {file}\n"));
    let running = saved(&server);
    let _ = server.stop(STOP_TIME_MAX);

    let server = host.start();
    assert_eq!(saved(&server), running);
    let reloaded = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(reloaded["unchanged"], 2, "{reloaded}");
    let _ = server.command(&["export", "remove", "vol1", "--save"]).ok().says("removed from ");
    assert_eq!(host.files(), [] as [&str; 0]);
    let running = saved(&server);
    let _ = server.stop(STOP_TIME_MAX);
    let server = host.start();
    assert_eq!(saved(&server), running);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_size_of_a_memory_export_is_saved() {
    let host = Host::new("");
    let text = format!("- mem1=mem:1M\n- disk={}\n", host.scratch.text("vol1.img"));
    fs::write(host.scratch.path("exports.d/m.yaml"), text).expect("a file");
    let server = host.start();
    let resize = |name: &str, size: &str| {
        let words = ["export", "resize", name, "--size", size, "--save", "-o", "json"];
        server.command(&words).ok().json()
    };
    let resized = resize("mem1", "2M");
    assert_eq!(resized["saved"], *host.scratch.text("exports.d/m.yaml"), "{resized}");
    let resized = resize("disk", "3M");
    assert_eq!(resized["size"], 3 << 20, "{resized}");
    let running = saved(&server);
    let _ = server.stop(STOP_TIME_MAX);
    let server = host.start();
    assert_eq!(saved(&server), running);
    let list = server.command(&["export", "list", "-o", "json"]).ok().json();
    let size = |name: &str| {
        let exports = list["exports"].as_array().expect("exports");
        let found = exports.iter().find(|export| export["name"] == name).expect("the export");
        found["size"].as_u64()
    };
    assert_eq!((size("disk"), size("mem1")), (Some(3 << 20), Some(2 << 20)), "{list}");

    // The resize is refused before the size changes.
    fs::remove_dir_all(host.scratch.path("exports.d")).expect("a directory");
    let words = ["export", "resize", "mem1", "--size", "4M", "--save"];
    let _ = server.command(&words).code(1).says("nothing changed");
    assert_eq!(saved(&server), running);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_file_with_several_exports_keeps_the_others() {
    let host = Host::new("");
    fs::write(
        host.scratch.path("exports.d/all.yaml"),
        "# Test volumes.\n- mem1=mem:1M\n- name: mem2\n  target: mem:2M # large\n",
    )
    .expect("a file");
    let server = host.start();
    let _ = server.command(&["export", "set", "mem1", "migration=deny", "--save"]).code(1);
    let _ = server.command(&["export", "set", "mem1", "ro", "--save"]).ok().says("all.yaml\n");
    assert_eq!(
        host.read("exports.d/all.yaml"),
        "# Test volumes.\n- name: mem1\n  target: mem:1M\n  ro: true\n- name: mem2\n  \
         target: mem:2M\n"
    );
    assert!(host.read("exports.d/all.yaml~").contains("# large"), "lost comments are kept");
    let running = saved(&server);
    let _ = server.stop(STOP_TIME_MAX);
    let server = host.start();
    assert_eq!(saved(&server), running);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_change_that_cannot_be_saved_is_refused_before_it_is_made() {
    let host = Host::new("export: ['base=null:1M']\n");
    let server = host.start();
    let before = saved(&server);
    let config = host.scratch.text("server.yaml");
    for words in [&["set", "base", "ro"][..], &["remove", "base"], &["add", "base=null:2M"]] {
        let words = [&["export"], words, &["--save"]].concat();
        let refused = server.command(&words).code(1);
        let _ = refused.says("nothing changed").says(&config).says("duplicate; move the entry");
    }
    fs::write(host.scratch.path("exports.d/wrong.yaml"), "name: x\n").expect("a file");
    let add = ["export", "add", "new=null:1M", "--save"];
    let _ = server.command(&add).code(1).says("wrong.yaml:1: missing field");
    fs::remove_dir_all(host.scratch.path("exports.d")).expect("a directory");
    let _ = server.command(&add).code(1).says("exports.d does not exist; create it");
    assert_eq!(saved(&server), before);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_unwritable_directory_is_detected_before_the_change() {
    let host = Host::new("export: ['base=null:1M']\n");
    let dir = host.scratch.path("exports.d");
    let server = host.start();
    let add = ["export", "add", "new=null:1M", "--save"];
    let refused = if is_root() {
        let usable = requires(&["unshare", "mount"])
            && run("unshare", &["-m", "true"], COMMAND_TIME_MAX).code == Some(0);
        if !usable {
            return;
        }
        let shell = "exec unshare -m sh -c 'mount --bind \"$EXPORTS\" \"$EXPORTS\" && \
                     mount -o remount,bind,ro \"$EXPORTS\" && exec \"$@\"' sh \"$@\"";
        host.run_after(&server, shell, &add)
    } else {
        fs::set_permissions(&dir, Permissions::from_mode(0o555)).expect("a directory");
        server.command(&add)
    };
    let _ = refused.code(1).says("nothing changed: cannot save in ");
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).expect("a directory");
    let list = server.command(&["export", "list"]).ok().stdout;
    assert!(!list.contains("new"), "{list}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_change_that_could_not_be_saved_is_reported() {
    let host = Host::new("export: ['base=null:1M']\n");
    let server = host.start();
    // Files may grow to one block of 512 or 1024 bytes, and the entry is larger: as on a full disk,
    // the command can create a file but write only part of its text.
    let full = "trap '' XFSZ; ulimit -f 1";
    let deep = format!("deep/{}", "d".repeat(200));
    let deep = vec![deep; 6].join("/");
    fs::create_dir_all(host.scratch.path(&deep)).expect("directories");
    let target = host.scratch.path(&deep).join("new.img");
    sparse_file(&target, 1 << 20);
    let add = format!("new={}", target.display());
    let failed = host.run_after(&server, full, &["export", "add", &add, "--save"]);
    let _ = failed
        .code(1)
        .says("new added\n")
        .says("\"new\" is added, but the change is not saved in ")
        .says("exports.d/new.yaml; write its entry from `rtrs-server export save` to that file");
    assert_eq!(host.files(), [] as [&str; 0], "no partial file");
    let _ = server.command(&["export", "list"]).ok().says("new ");
    let _ = server.command(&["export", "set", "new", "ro", "--save"]).ok();
    let before = host.read("exports.d/new.yaml");
    let failed = host.run_after(&server, full, &["export", "set", "new", "rw", "--save"]);
    let _ = failed.code(1).says("new changed\n").says("is changed, but the change is not saved");
    assert_eq!(host.read("exports.d/new.yaml"), before, "the old file is complete");
    let _ = server.stop(STOP_TIME_MAX);
}

/// Returns the access to exports without their own list, from the last line of `export list`.
fn unlisted(server: &Server) -> String {
    let list = server.command(&["export", "list"]).ok().stdout;
    list.lines().filter(|line| line.contains("without their own list")).collect()
}

#[test]
fn the_next_start_is_not_open_to_more_clients() {
    let host = Host::new("");
    let exports = [("a", "access: [anyone@10.1.1.1:rw]\n"), ("b", "")];
    for (name, access) in exports {
        let text = format!("name: {name}\ntarget: mem:1M\n{access}");
        fs::write(host.scratch.path(&format!("exports.d/{name}.yaml")), text).expect("a file");
    }
    let server = host.start();
    let (before, closed) = (saved(&server), unlisted(&server));
    for words in [&["remove", "a"][..], &["set", "a", "access=", "--force"]] {
        let words = [&["export"], words, &["--save"]].concat();
        let refused = server.command(&words).code(1).says("nothing changed");
        let _ = refused.says("would be open to all clients; set `access`");
        assert_eq!((saved(&server), unlisted(&server)), (before.clone(), closed.clone()));
        assert_eq!(host.files(), ["a.yaml", "b.yaml"]);
    }
    // The list was removed without --save: saving another change would make the next start open.
    let _ = server.command(&["export", "set", "a", "access=", "--force"]).ok();
    let _ = server.command(&["export", "set", "a", "ro", "--save"]).code(1).says("would be open");
    // With an access list, the next start stays closed.
    let _ = server.command(&["export", "set", "b", "access=db1:rw", "--save"]).ok();
    let _ = server.command(&["export", "remove", "a", "--save"]).ok();
    let running = (saved(&server), unlisted(&server));
    let _ = server.stop(STOP_TIME_MAX);
    let server = host.start();
    assert_eq!((saved(&server), unlisted(&server)), running);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn unapplied_changes_to_a_file_are_not_overwritten() {
    let host = Host::new("");
    let file = host.scratch.path("exports.d/a.yaml");
    fs::write(&file, "name: a\ntarget: mem:1M\n").expect("a file");
    let server = host.start();
    let edited = "name: a\ntarget: mem:1M\nblock-size: 4096\n";
    fs::write(&file, edited).expect("a file");
    // Memory cannot be reopened, so the export stays as it is.
    let _ = server.command(&["reload"]).ok().says("would lose its content");
    for words in [&["set", "a", "ro"][..], &["remove", "a"]] {
        let words = [&["export"], words, &["--save"]].concat();
        let refused = server.command(&words).code(1).says("nothing changed");
        let _ = refused.says("a.yaml has changes to this export that the server has not applied");
        assert_eq!(host.read("exports.d/a.yaml"), edited);
    }
    // An entry that the server has never read.
    let new = "name: b\ntarget: mem:1M\nmigration: deny\n";
    fs::write(host.scratch.path("exports.d/b.yaml"), new).expect("a file");
    let _ = server.command(&["export", "add", "b=mem:2M", "--save"]).code(1).says("not applied");
    assert_eq!(host.read("exports.d/b.yaml"), new);
    fs::write(&file, "name: a\ntarget: mem:1M\n").expect("a file");
    // Changes by commands are not edits, whether or not they were saved.
    for words in [&["ro"][..], &["rw", "--save"], &["ro"], &["access=db1:ro", "--save"]] {
        let _ = server.command(&[&["export", "set", "a"], words].concat()).ok();
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_command_that_saves_and_a_reload_wait_for_each_other() {
    let host = Host::new("");
    let file = host.scratch.path("exports.d/a.yaml");
    fs::write(&file, "name: a\ntarget: mem:1M\n").expect("a file");
    let server = host.start();
    let files = fs::read_dir(server.run_dir()).expect("a directory");
    let lock = files
        .map(|entry| entry.expect("a file").path())
        .find(|path| path.extension().is_some_and(|ending| ending == "lock"));
    let lock = fs::File::open(lock.expect("the lock")).expect("a file");
    let mode = lock.metadata().expect("its metadata").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only those who may use the control socket can lock it");

    // The lock is held exclusively, as by a command: a reload proceeds after some seconds, and logs
    // that.
    lock.lock().expect("the lock");
    let _ = server.command(&["reload"]).ok();
    let _ = server.wait_output("reloading without the lock");
    // The lock is held shared, as by a reload: a command waits for the lock, and then gives up.
    lock.unlock().expect("the lock");
    lock.lock_shared().expect("the lock");
    let refused = server.command(&["export", "set", "a", "ro", "--save"]).code(1);
    let _ = refused.says("nothing changed: another process holds the lock");
    lock.unlock().expect("the lock");
    let _ = server.command(&["export", "set", "a", "ro", "--save"]).ok();

    // The directory's lock excludes commands to another server.
    let dir = fs::File::open(host.scratch.path("exports.d")).expect("the directory");
    dir.lock().expect("the lock");
    let refused = server.command(&["export", "set", "a", "rw", "--save"]).code(1);
    let _ = refused.says("another process holds the lock").says("exports.d");
    drop(dir);
    let _ = server.command(&["export", "set", "a", "rw", "--save"]).ok();
    let _ = server.stop(STOP_TIME_MAX);
}
