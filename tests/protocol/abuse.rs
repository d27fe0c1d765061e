//! Tests for bad input from users and from NBD clients, one test for each violation. Each offender
//! receives a clear error or has its connection closed, while an innocent client on the same front
//! continues undisturbed and the daemons stay alive. Exit codes: 1 for a failed operation, 2 for a
//! usage error. Violations by RTRS peers have their own tests.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, Finished, Front, Innocent, Proc, RawNbd, Reply, STOP_TIME_MAX,
    Scratch, Server, Stand, bin, consts, go_data, is_root, option_head, request_head, requires,
    resident_memory, run, sparse_file, wait_for,
};
use socket2::{Domain, Socket, Type};

const MIB: u64 = 1 << 20;

/// Runs rtrs-server with one export on a free port; the server is expected to refuse.
fn refused_export(export: &str) -> Finished {
    Server::builder().export(export).listen("tcp://127.0.0.1:0").run()
}

/// Attaches `vol0` from a new server with these arguments; the attach is expected to fail.
fn refused_attach(words: &[&str]) -> Finished {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol0").path(server.portal()).args(words).try_start();
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
    let _ = server.stop(STOP_TIME_MAX);
    done
}

// ---- user errors ------------------------------------------------------------------------------

#[test]
fn unknown_export() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let (client, done) = Client::attach("vol1").path(server.portal()).try_start();
    let _ = done.code(1).says("vol1");
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
    let Front::Unix(socket) = client.front() else { panic!("expected a unix socket") };
    assert!(!socket.exists(), "a refused attach left its socket behind");
    // The server serves the next client.
    Client::attach("vol0").path(server.portal()).start().detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn missing_path() {
    let path = Scratch::new().text("no-such-file.img");
    let export = format!("vol0={path}");
    for words in [&[][..], &["--strict"], &["--on-missing", "refuse"], &["--check"]] {
        let server = Server::builder().export(&*export).listen("tcp://127.0.0.1:0").args(words);
        let done = server.run().code(1).says(&path).says("does not exist");
        assert!(!done.stderr.contains("truncate"), "{}", done.stderr);
    }
}

#[test]
fn unreadable_path() {
    let scratch = Scratch::new();
    let path = scratch.path("secret.img");
    sparse_file(&path, MIB);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o000)).expect("take the rights");
    let mut command = Command::new(bin("rtrs-server"));
    if is_root() {
        // Root can read every file: run the server as nobody, from a directory closed to that user.
        if !requires(&["setpriv"]) {
            return;
        }
        let copy = scratch.path("rtrs-server");
        // Copied by another process: a program that is open for writing cannot be executed, and a
        // program that another test is starting briefly holds this process's descriptors.
        let _ = run("cp", &[bin("rtrs-server"), copy.clone()], COMMAND_TIME_MAX).ok();
        for path in [scratch.dir(), &copy] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("open it");
        }
        command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&copy);
    }
    let export = format!("vol0={}", path.display());
    command.args(["--export", &export, "--listen", "tcp://127.0.0.1:0"]);
    let done = Proc::start(command).wait(COMMAND_TIME_MAX);
    let _ = done.code(1).says("secret.img").says("permission denied");
}

#[test]
fn empty_file() {
    let scratch = Scratch::new();
    sparse_file(&scratch.path("empty.img"), 0);
    let _ = refused_export(&format!("vol0={}", scratch.text("empty.img"))).code(1).says("empty");
}

#[test]
fn directory_as_export() {
    let scratch = Scratch::new();
    let path = scratch.dir().display();
    let _ = refused_export(&format!("vol0={path}")).code(1).says("directory");
}

#[test]
fn malformed_exports() {
    for export in ["", "=", "vol0=", "vol0=mem:", "vol0=mem:12X", "vol0=mem:0", "vol0=mem:1M,bogus"]
    {
        let done = refused_export(export);
        assert!(!done.stderr.trim().is_empty(), "no message about export {export:?}: {done:#?}");
        let _ = done.code(2).says("export");
    }
    // A name must fit the wire's 255 bytes including its terminator.
    let _ = refused_export(&format!("{}=mem:1M", "n".repeat(255))).code(2).says("name");
    let builder = Server::builder().export("vol0=mem:1M").export("vol0=mem:2M");
    let _ = builder.listen("tcp://127.0.0.1:0").run().code(2).says("vol0");
}

#[test]
fn port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("bind a port");
    let port = taken.local_addr().expect("its address").port();
    let listen = format!("tcp://127.0.0.1:{port}");
    let done = Server::builder().export("vol0=mem:1M").listen(&*listen).run();
    let done = done.code(1).says(&port.to_string()).says("in use");
    assert_eq!(done.stderr.matches("in use").count(), 1, "reported twice: {}", done.stderr);

    let server = Server::builder().export("vol0=mem:1M").start();
    let builder = Client::attach("vol0").path(server.portal()).front(Front::Tcp(port));
    let (client, done) = builder.try_start();
    let _ = done.code(1).says("in use");
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn state_file_held_by_another_server() {
    let scratch = Scratch::new();
    let state = scratch.text("state");
    let server = |name: &str| {
        sparse_file(&scratch.path(name), MIB);
        let export = format!("vol0={}", scratch.text(name));
        let builder = Server::builder().export(export).listen("tcp://127.0.0.1:0");
        builder.args(&["--state-dir", &state, "--run-dir", &scratch.text("run")])
    };
    let first = server("vol").start();
    let entries = std::fs::read_dir(scratch.path("state").join("epochs")).expect("the epochs");
    let mut paths = entries.map(|entry| entry.expect("an entry").path());
    let is_lock = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "lock");
    let lock = paths.find(is_lock).expect("the lock of the epoch");
    // Servers may share the directory if they have different exports.
    let other = server("other").start();
    let _ = first.stop(STOP_TIME_MAX);
    let _ = other.stop(STOP_TIME_MAX);
    // Like a server in a different container, where the export's file is a different file.
    let held = File::create(&lock).expect("a lock file");
    held.try_lock().expect("the lock is free");
    let done = server("vol").run().code(1).says("vol0").says("--state-dir");
    let _ = done.says(&state);
    drop(held);
    let _ = server("vol").start().stop(STOP_TIME_MAX);
}

#[test]
fn malformed_paths_and_listens() {
    for path in
        ["", "tcp", "tcp://", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:x", "http://127.0.0.1:1"]
    {
        let (client, done) = Client::attach("vol0").path(path).try_start();
        let _ = done.code(2).says("path");
        assert!(client.pids().is_empty(), "a refused attach left a process behind");
        let done = Server::builder().export("vol0=mem:1M").listen(path).run();
        let _ = done.code(2).says("listen");
    }
}

#[test]
fn unresolvable_path() {
    // RFC 2606 reserves .invalid, so no host has such a name.
    let (client, done) = Client::attach("vol0").path("tcp://no-host.invalid:1234").try_start();
    let _ = done.code(1).says("no-host.invalid");
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
}

#[test]
fn no_listener_on_the_path() {
    // Bound but not listening, so that no other program listens there.
    let closed = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bind a port");
    let address = closed.local_addr().ok().and_then(|address| address.as_socket());
    let address = address.expect("its address");
    let (client, done) = Client::attach("vol0").path(format!("tcp://{address}")).try_start();
    let _ = done.code(1).says(&address.to_string());
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
}

#[test]
fn a_silent_server_does_not_block_attach_forever() {
    // The listener's backlog accepts connections, but nothing answers them.
    let mute = TcpListener::bind("127.0.0.1:0").expect("bind a port");
    let address = mute.local_addr().expect("its address");
    let (client, done) = Client::attach("vol0").path(format!("tcp://{address}")).try_start();
    let _ = done.code(1).says(&address.to_string());
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
}

#[test]
fn chunks_and_depth_beyond_28_bits() {
    for (chunk, depth, word) in [
        // 2^20 bytes in 2^10 chunks need 30 bits of the immediate.
        ("1M", "1024", "queue-depth"),
        ("128K", "65536", "queue-depth"),
        ("128K", "0", "queue-depth"),
        ("100000", "64", "chunk-size"),
        ("4K", "64", "chunk-size"),
        ("0", "64", "chunk-size"),
        ("lots", "64", "chunk-size"),
    ] {
        let args = ["--chunk-size", chunk, "--queue-depth", depth];
        let builder = Server::builder().export("vol0=mem:1M").listen("tcp://127.0.0.1:0");
        let _ = builder.args(&args).run().code(2).says(word);
    }
}

#[test]
fn socket_path_in_use() {
    let scratch = Scratch::new();
    let path = scratch.path("taken.sock");
    let _listener = UnixListener::bind(&path).expect("bind a socket");
    let server = Server::builder().export("vol0=mem:16M").start();
    let attach = |path| Client::attach("vol0").path(server.portal()).front(Front::Unix(path));
    let (client, done) = attach(path.clone()).try_start();
    let _ = done.code(1).says("taken.sock").says("in use");
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
    let _ = UnixStream::connect(&path).expect("the other's socket still works");

    // A file that is not a socket may hold user data, and must be kept.
    let file = scratch.path("data.txt");
    std::fs::write(&file, "precious").expect("write a file");
    let (client, done) = attach(file.clone()).try_start();
    let _ = done.code(1).says("data.txt");
    assert!(client.pids().is_empty(), "a refused attach left a process behind");
    assert_eq!(std::fs::read(&file).expect("the file"), b"precious");

    // A socket without a listener is left over from a crash, and does not block the attach.
    let stale = scratch.path("stale.sock");
    drop(UnixListener::bind(&stale).expect("bind a socket"));
    attach(stale).start().detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn socket_path_too_long_or_in_a_missing_directory() {
    let scratch = Scratch::new();
    let server = Server::builder().export("vol0=mem:16M").start();
    for (name, code, text) in [
        ("s".repeat(120), 2, "socket"),
        ("no/such/directory/nbd.sock".to_owned(), 1, "cannot serve NBD on "),
    ] {
        let front = Front::Unix(scratch.path(&name));
        let (client, done) = Client::attach("vol0").path(server.portal()).front(front).try_start();
        let _ = done.code(code).says(text);
        assert!(client.pids().is_empty(), "a refused attach left a process behind");
    }
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn attach_of_an_attached_volume() {
    let stand = Stand::memory("16M");
    let innocent = Innocent::start(stand.client.front(), "vol0");
    let other = stand.scratch.text("other.sock");
    let words = ["attach", "vol0", "--path", stand.server.portal(), "--socket", &other];
    let _ = stand.client.command(&words).code(1).says("vol0").says("already");
    assert!(!std::path::Path::new(&other).exists(), "a refused attach left its socket behind");
    innocent.check();
    stand.finish();
}

#[test]
fn commands_for_a_volume_that_is_not_attached() {
    let stand = Stand::memory("16M");
    for command in ["detach", "status", "stats"] {
        let done = stand.client.command(&[command, "vol9"]);
        let _ = done.code(1).says("vol9").says("not attached");
        // Names are not paths.
        let done = stand.client.command(&[command, "../../etc/passwd"]);
        assert!(matches!(done.code, Some(1 | 2)), "{done:#?}");
    }
    stand.client.detach();
    let _ = stand.client.command(&["detach", "vol0"]).code(1).says("not attached");
}

#[test]
fn attach_without_required_settings() {
    for words in [
        &["attach"][..],
        &["attach", "vol0"],
        &["attach", "vol0", "--path", "tcp://127.0.0.1:1", "--socket", "a", "--policy", "best"],
        &["bench", "vol0", "--path", "tcp://127.0.0.1:1", "--rw", "sideways"],
        &["bench", "vol0", "--path", "tcp://127.0.0.1:1", "--bs", "0"],
        &["bench", "vol0", "--path", "tcp://127.0.0.1:1", "--iodepth", "0"],
        &["frobnicate"],
    ] {
        let done = run(bin("rtrs-client"), words, COMMAND_TIME_MAX).code(2);
        assert!(!done.stderr.trim().is_empty(), "no message about {words:?}");
    }
    let _ = refused_attach(&["--no-such-flag"]).code(2).says("--no-such-flag");
}

#[test]
fn invalid_configurations() {
    let scratch = Scratch::new();
    let path = scratch.text("server.yaml");
    for (text, word) in [
        ("export: [", "server.yaml"),
        ("queue-depth: many\n", "queue-depth"),
        ("nonsense-key: 1\n", "nonsense-key"),
        ("- a\n- list\n", "server.yaml"),
        ("\u{0}\u{1}", "server.yaml"),
    ] {
        std::fs::write(&path, text).expect("write a configuration");
        let done = run(bin("rtrs-server"), &["--config", &path, "--check"], COMMAND_TIME_MAX);
        let _ = done.code(2).says(word);
    }
    let missing = scratch.text("missing.yaml");
    let done = run(bin("rtrs-server"), &["--config", &missing, "--check"], COMMAND_TIME_MAX);
    assert!(matches!(done.code, Some(1 | 2)), "{done:#?}");
    let _ = done.says("missing.yaml");
}

// ---- exports and their rules ------------------------------------------------------------------

#[test]
fn writing_to_a_read_only_export() {
    let scratch = Scratch::new();
    let path = scratch.path("ro.img");
    std::fs::write(&path, [0x33; 1 << 16]).expect("write a file");
    let export = format!("vol0={},ro", path.display());
    let stand = Stand::start(scratch, Server::builder().export(export), |c| c);
    let mut raw = RawNbd::go(stand.client.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(consts::EPERM));
    for command in [consts::CMD_TRIM, consts::CMD_WRITE_ZEROES] {
        assert_eq!(raw.call(0, command, 0, 4096), Reply::Error(consts::EPERM), "{command}");
    }
    let mut back = [0; 4096];
    assert_eq!(raw.read(0, &mut back), Ok(()));
    assert_eq!(back, [0x33; 4096]);
    drop(raw);
    assert_eq!(std::fs::read(&path).expect("the file"), [0x33; 1 << 16]);
    stand.finish();
}

#[test]
fn io_past_the_end() {
    let stand = Stand::memory("1M");
    let innocent = Innocent::start(stand.client.front(), "vol0");
    let mut raw = RawNbd::go(stand.client.front(), "vol0");
    for (offset, length) in [
        (MIB, 512),
        (MIB - 512, 1024),
        (u64::MAX - 511, 512),
        (u64::MAX - 4095, 8192),
        (1 << 63, 512),
    ] {
        let answer = raw.call(0, consts::CMD_READ, offset, length);
        assert_eq!(answer, Reply::Error(consts::EINVAL), "read {length} at {offset}");
        let answer = raw.write(0, offset, &vec![7; length as usize]);
        let good = [consts::ENOSPC, consts::EINVAL].map(Reply::Error);
        assert!(good.contains(&answer), "write {length} at {offset}: {answer:?}");
        for command in [consts::CMD_TRIM, consts::CMD_WRITE_ZEROES] {
            let answer = raw.call(0, command, offset, length);
            assert!(good.contains(&answer), "command {command}, {length} at {offset}: {answer:?}");
        }
    }
    // The same connection still works.
    assert_eq!(raw.write(0, MIB - 512, &[7; 512]), Reply::Error(0));
    assert_eq!(raw.read(MIB - 512, &mut [0; 512]), Ok(()));
    drop(raw);
    innocent.check();
    stand.finish();
}

// ---- NBD client errors ------------------------------------------------------------------------

/// Runs a violation alongside an innocent client, on the unix socket and on TCP; then checks that
/// the innocent client was not disturbed, that a new client is served, and that both daemons are
/// alive.
fn violation(bad: impl Fn(&Front)) {
    for mut stand in [Stand::memory("16M"), Stand::memory_tcp("16M")] {
        let front = stand.client.front().clone();
        let innocent = Innocent::start(&front, "vol0");
        bad(&front);
        innocent.check();
        assert_eq!(RawNbd::go(&front, "vol0").read(0, &mut [0; 512]), Ok(()));
        stand.server.check_alive();
        stand.finish();
    }
}

#[test]
fn nbd_wrong_client_flags() {
    violation(|front| {
        let mut raw = RawNbd::connect(front);
        raw.send(&0xffff_ffff_u32.to_be_bytes());
        raw.expect_closed();
    });
}

#[test]
fn nbd_wrong_option_magic() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        raw.send(b"IHAVEOPS\0\0\0\x07\0\0\0\0");
        raw.expect_closed();
        let mut raw = RawNbd::connect(front);
        raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
        raw.expect_closed();
    });
}

#[test]
fn nbd_unknown_options() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        for option in [0, 4, 200, u32::MAX] {
            raw.send_option(option, b"some data");
            let reply = raw.option_reply().map(|(kind, _)| kind);
            assert_eq!(reply, Some(consts::REP_ERR_UNSUP), "option {option}");
        }
        raw.enter("vol0");
        assert_eq!(raw.read(0, &mut [0; 512]), Ok(()));
    });
}

#[test]
fn nbd_oversize_options() {
    violation(|front| {
        for length in [1 << 20, 1 << 28, u32::MAX] {
            for option in [consts::OPT_GO, consts::OPT_LIST, consts::OPT_EXPORT_NAME, 77] {
                let mut raw = RawNbd::hello(front);
                raw.send(&option_head(option, length));
                raw.send(&[0x41; 65_536]);
                // The option is refused immediately, or read and then refused: the test must not
                // send 4 GiB.
                if length == 1 << 20 {
                    for _ in 0..15 {
                        raw.send(&[0x41; 65_536]);
                    }
                    match raw.option_reply() {
                        None => continue,
                        Some((kind, _)) => assert!(kind >> 31 == 1, "answered {kind:#x}"),
                    }
                    continue;
                }
                raw.expect_closed();
            }
        }
    });
}

#[test]
fn nbd_malformed_option_data() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        let many = [&[0, 0, 0, 4][..], b"vol0", &[0xff, 0xff], &[0, 3]].concat();
        for data in [
            &[][..],
            &[0, 0, 0],
            // A name longer than the option.
            &[0, 0, 1, 0, b'v', 0, 0],
            &[0xff, 0xff, 0xff, 0xff, b'v', 0, 0],
            // 65535 information requests in two bytes.
            &many,
        ] {
            for option in [consts::OPT_GO, consts::OPT_INFO] {
                raw.send_option(option, data);
                let reply = raw.option_reply().map(|(kind, _)| kind);
                assert_eq!(reply, Some(consts::REP_ERR_INVALID), "option {option}: {data:?}");
            }
        }
        raw.send_option(consts::OPT_LIST, b"list takes no data");
        let reply = raw.option_reply().map(|(kind, _)| kind);
        assert_eq!(reply, Some(consts::REP_ERR_INVALID));
        raw.enter("vol0");
        assert_eq!(raw.read(0, &mut [0; 512]), Ok(()));
    });
}

#[test]
fn nbd_unknown_exports() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        for name in ["vol1", "VOL0", "vol0/../vol0", "\u{0}", "vol0\u{0}"] {
            raw.send_option(consts::OPT_GO, &go_data(name));
            let reply = raw.option_reply().map(|(kind, _)| kind);
            let good = [consts::REP_ERR_UNKNOWN, consts::REP_ERR_INVALID];
            assert!(reply.is_some_and(|kind| good.contains(&kind)), "{name:?}: {reply:?}");
        }
        // Invalid UTF-8.
        raw.send_option(consts::OPT_GO, &[0, 0, 0, 2, 0xff, 0xfe, 0, 0]);
        let reply = raw.option_reply().map(|(kind, _)| kind);
        assert!(reply.is_some_and(|kind| kind >> 31 == 1), "{reply:?}");
        raw.enter("vol0");
        // NBD_OPT_EXPORT_NAME can only be refused by closing the connection.
        let mut raw = RawNbd::hello(front);
        raw.send_option(consts::OPT_EXPORT_NAME, b"vol1");
        raw.expect_closed();
    });
}

#[test]
fn nbd_endless_options() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        // The server may close the connection, but must not die.
        for _ in 0..20_000 {
            raw.send_option(consts::OPT_LIST, b"");
            loop {
                match raw.option_reply() {
                    None => return,
                    Some((consts::REP_SERVER, _)) => {}
                    Some(_) => break,
                }
            }
        }
    });
}

#[test]
fn nbd_abort() {
    violation(|front| {
        let mut raw = RawNbd::hello(front);
        raw.send_option(consts::OPT_ABORT, b"");
        raw.expect_closed();
    });
}

#[test]
fn nbd_wrong_request_magic() {
    violation(|front| {
        let mut raw = RawNbd::go(front, "vol0");
        let mut head = request_head(0, consts::CMD_READ, 1, 0, 512);
        head[0] ^= 0xff;
        raw.send(&head);
        raw.expect_closed();
    });
}

#[test]
fn nbd_unknown_commands_and_flags() {
    violation(|front| {
        let mut raw = RawNbd::go(front, "vol0");
        for command in [8, 100, u16::MAX] {
            let answer = raw.call(0, command, 0, 512);
            assert_eq!(answer, Reply::Error(consts::EINVAL), "command {command}");
        }
        let answer = raw.call(0xff00, consts::CMD_READ, 0, 512);
        assert_eq!(answer, Reply::Error(consts::EINVAL), "unknown flags");
        assert_eq!(raw.read(0, &mut [0; 512]), Ok(()));
    });
}

#[test]
fn nbd_huge_lengths() {
    violation(|front| {
        let refused = |raw: &mut RawNbd, answer, length| match answer {
            Reply::Closed => {}
            Reply::Error(error) => {
                let good = [consts::EINVAL, consts::ENOSPC, consts::EOVERFLOW];
                assert!(good.contains(&error), "{length} bytes: error {error}");
                assert_eq!(raw.read(0, &mut [0; 512]), Ok(()));
            }
        };
        for length in [(32 << 20) + 512, 1 << 30, u32::MAX] {
            let mut raw = RawNbd::go(front, "vol0");
            let answer = raw.call(0, consts::CMD_READ, 0, length);
            refused(&mut raw, answer, length);
        }
        // A slightly too long payload may be read and refused.
        let mut raw = RawNbd::go(front, "vol0");
        let answer = raw.write(0, 0, &vec![1; (32 << 20) + 512]);
        refused(&mut raw, answer, (32 << 20) + 512);
        // Gigabytes are not worth reading: the connection ends.
        for length in [1 << 30, u32::MAX] {
            let mut raw = RawNbd::go(front, "vol0");
            raw.send_request(0, consts::CMD_WRITE, 0, length);
            raw.send(&[1; 4096]);
            raw.expect_closed();
        }
        // Commands without data may be as long as the export, and no longer.
        let mut raw = RawNbd::go(front, "vol0");
        let answer = raw.call(0, consts::CMD_TRIM, 0, u32::MAX);
        let good = [consts::ENOSPC, consts::EINVAL].map(Reply::Error);
        assert!(good.contains(&answer), "{answer:?}");
        assert_eq!(raw.read(0, &mut [0; 512]), Ok(()));
    });
}

#[test]
fn nbd_clients_that_stop_midway() {
    // A complete short conversation; then one client for each position at which it can break off.
    let mut talk = consts::CLIENT_FLAGS.to_be_bytes().to_vec();
    let go = go_data("vol0");
    talk.extend(option_head(consts::OPT_GO, go.len() as u32));
    talk.extend(&go);
    let handshake = talk.len();
    talk.extend(request_head(0, consts::CMD_WRITE, 1, 1 << 20, 512));
    talk.extend([5; 512]);
    let mut stops: Vec<usize> = (0..handshake + 28).collect();
    stops.extend([handshake + 29, handshake + 300, talk.len() - 1, talk.len()]);
    violation(|front| {
        let mut silent = Vec::new();
        for &stop in &stops {
            let mut raw = RawNbd::connect(front);
            raw.send(&talk[..stop]);
            silent.push(raw);
        }
        // All of these clients hang there, and a new client is served nevertheless.
        assert_eq!(RawNbd::go(front, "vol0").read(0, &mut [0; 512]), Ok(()));
        drop(silent);
    });
}

#[test]
fn nbd_clients_that_do_not_read_their_replies() {
    violation(|front| {
        let deaf: Vec<RawNbd> = (0..4)
            .map(|_| {
                let mut raw = RawNbd::go(front, "vol0");
                // 64 MiB of replies that are never read; 28 bytes for each request.
                for _ in 0..64 {
                    raw.send_request(0, consts::CMD_READ, 0, 1 << 20);
                }
                raw
            })
            .collect();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(RawNbd::go(front, "vol0").read(0, &mut [0; 512]), Ok(()));
        drop(deaf);
    });
}

#[test]
fn nbd_connections_open_and_close() {
    let stand = Stand::memory("16M");
    let front = stand.client.front().clone();
    let pid = stand.client.pid();
    let descriptors = || std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its files").count();
    let innocent = Innocent::start(&front, "vol0");
    let (before, memory) = (descriptors(), resident_memory(pid));
    for round in 0..500 {
        let mut raw = RawNbd::connect(&front);
        if round % 3 > 0 {
            raw.send(&consts::CLIENT_FLAGS.to_be_bytes());
        }
        if round % 3 > 1 {
            raw.enter("vol0");
            raw.send_request(0, consts::CMD_DISC, 0, 0);
        }
    }
    wait_for("closed connections to be freed", COMMAND_TIME_MAX, || {
        (descriptors() <= before + 2).then_some(())
    });
    let grown = resident_memory(pid).saturating_sub(memory);
    assert!(grown < 64 * MIB, "500 short connections left {grown} bytes");
    innocent.check();
    stand.finish();
}

#[test]
fn garbage_on_the_control_socket() {
    let stand = Stand::memory("16M");
    let innocent = Innocent::start(stand.client.front(), "vol0");
    let sockets: Vec<_> = std::fs::read_dir(stand.client.run_dir())
        .expect("the run directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| *path != stand.client.run_dir().join("nbd.sock"))
        .filter(|path| UnixStream::connect(path).is_ok())
        .collect();
    assert!(!sockets.is_empty(), "no control socket in the run directory");
    for path in &sockets {
        for bytes in [&b"\xff\xfe\x00garbage\n"[..], &b"{\"command\":"[..], &[b'x'; 1 << 17], b"\n"]
        {
            let mut stream = UnixStream::connect(path).expect("connect to the control socket");
            stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
            stream.set_write_timeout(Some(Duration::from_secs(1))).expect("a timeout");
            // Refusing and closing are both correct; the session must survive.
            let _ = stream.write_all(bytes);
            let _ = stream.read(&mut [0; 4096]);
        }
    }
    // A silent connection must not keep others out.
    let silent = UnixStream::connect(&sockets[0]).expect("connect to the control socket");
    let _ = stand.client.command(&["status", "vol0"]).ok();
    drop(silent);
    innocent.check();
    stand.finish();
}
