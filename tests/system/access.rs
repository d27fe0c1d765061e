//! Tests of access lists: read or write permission by client address, and loss of access when the
//! lists change.

use std::fs;
use std::path::Path;

use rtrs_tests::{
    COMMAND_TIME_MAX, Client, ClientBuilder, Innocent, RawNbd, Reply, STOP_TIME_MAX, Scratch,
    Server, bin, run, wait_for,
};

/// Creates a client that connects from an address of this machine.
fn from(source: &str, server: &Server, export: &str) -> ClientBuilder {
    let name = format!("{export}-of-{source}").replace('.', "-");
    let path = format!("tcp://{source}@{}", server.address());
    Client::attach(export).path(path).args(&["--session-name", &name])
}

/// Waits until the only session of a server ends.
fn session_ends(server: &Server) {
    wait_for("the end of the session", COMMAND_TIME_MAX, || {
        server.sessions().is_empty().then_some(())
    });
}

/// Ends a client that is no longer admitted, and its server.
fn give_up(client: &Client, export: &str, server: Server) {
    let _ = client.command(&["detach", export, "--force", "--within", "0"]);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn clients_get_the_access_of_the_lists_and_a_reason_otherwise() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |vol0: &str, all: &str| {
        let text = format!(
            "access: [{all}]\nexport:\n  - {{name: vol0, target: 'mem:16M', access: [{vol0}]}}\n  \
             - {{name: vol1, target: 'mem:16M'}}\n"
        );
        fs::write(&config, text).expect("a file");
    };
    let readers = "'anyone@127.0.0.7:rw', 'anyone@127.0.0.0/24:ro'";
    write(readers, "'anyone@127.0.0.8/31:rw'");
    let server = Server::builder().args(&["--config", &config]).start();
    let writer = from("127.0.0.7", &server, "vol0").args(&["--no-path", "queue"]).start();
    let mut raw = RawNbd::go(writer.front(), "vol0");
    assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    let beside = from("127.0.0.9", &server, "vol1").start();
    let innocent = Innocent::start(beside.front(), "vol1");

    // A different address may only read, and the error names what is not permitted.
    let reader = from("127.0.0.6", &server, "vol0").args(&["--access", "rw"]);
    let (_, refused) = reader.try_start();
    let _ = refused.code(1).says("a client at 127.0.0.6 without a name may not open 'vol0' rw");
    let (reader, attached) = from("127.0.0.6", &server, "vol0").try_start();
    let _ = attached.ok().says("warning: vol0 is read-only: the server refused rw");
    let shown = reader.status();
    assert_eq!((&shown["read_only"], &shown["read_only_fallback"]), (&true.into(), &true.into()));
    let _ = reader.command(&["list"]).ok().says("read-only: the server refused rw");
    reader.detach();
    let (_, refused) = from("127.0.0.6", &server, "vol1").try_start();
    let _ =
        refused.code(1).says("may not open 'vol1' ro, and rw was refused before (access: auto)");
    let (_, refused) = from("127.0.1.1", &server, "vol0").try_start();
    let _ = refused.code(1).says("EACCES").says("access lists do not admit this client");
    let doctor = ["doctor", &format!("tcp://127.0.1.1@{}", server.address())];
    let got = run(bin("rtrs-client"), &doctor, COMMAND_TIME_MAX).code(1);
    assert!(got.stdout.contains("EACCES"), "{}", got.stdout);
    assert!(got.stdout.contains("ask its operator to add NAME:rw"), "{}", got.stdout);
    assert!(server.list()["refused"]["access"].as_u64().is_some_and(|count| count > 0));

    // From now on, the writer may only read. Other sessions are not affected.
    write("'anyone@127.0.0.0/24:ro'", "'anyone@127.0.0.8/31:rw'");
    let refused = server.command(&["reload"]).code(1).says("nothing changed: ");
    let _ = refused.says("sessions that would lose paths: vol0-of-127-0-0-7").says("--force");
    let _ = server.command(&["reload", "--force"]).ok().says("changed vol0");
    wait_for("the session to end", COMMAND_TIME_MAX, || {
        (writer.status()["state"] == "failed").then_some(())
    });
    assert!(writer.status()["reason"].to_string().contains("may not open 'vol0' rw"));
    let got = writer.command(&["status", "vol0"]).code(3).says("do not detach it");
    assert!(!got.stderr.contains("attach it again"), "{got:?}");
    innocent.progress();
    // The writer may write again.
    write(readers, "'anyone@127.0.0.8/31:rw'");
    let _ = server.command(&["reload"]).ok();
    assert_eq!(raw.write(0, 4096, &[2; 4096]), Reply::Error(0), "it waited for a path");
    let _ = server.command(&["export", "set", "vol0", "access=anyone:rw"]).ok();
    let stranger = from("127.0.1.1", &server, "vol0").args(&["--access", "ro"]).start();
    stranger.detach();
    drop((raw, innocent));
    writer.detach();
    beside.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn an_open_server_warns_unless_configured_otherwise() {
    let warning = "no access list: everyone who reaches the server can read and write all exports";
    for (args, warns) in [
        (&[][..], true),
        (&["--insecure-open"], false),
        (&["--access", "anyone@127.0.0.0/8:rw"], false),
    ] {
        let server = Server::builder().export("vol0=mem:1M").args(args).start();
        let ended = server.stop(STOP_TIME_MAX);
        assert_eq!(ended.stderr.contains(warning), warns, "{args:?}");
    }
}

#[test]
fn invalid_rules_are_refused_at_start() {
    for (rule, why) in [
        ("db1", "does not end with :ro or :rw"),
        ("anyone@10.0.0.0/40:rw", "bad network \"10.0.0.0/40\""),
        ("everyone:rw", "\"everyone:rw\" names no client; write anyone:rw"),
        ("10.0.0.0/24:rw", "write anyone@10.0.0.0/24:rw"),
    ] {
        let server = Server::builder().export("vol0=mem:1M").args(&["--access", rule, "--check"]);
        let _ = server.run().code(2).says(why);
        let export = format!("vol0=mem:1M,access={rule}");
        let _ = Server::builder().export(export).args(&["--check"]).run().code(2).says(why);
    }
}

fn discovered(source: &str, server: &Server) -> Vec<String> {
    let path = format!("tcp://{source}@{}", server.address());
    let words = ["discover", &path, "-o", "json"];
    let listed = run(bin("rtrs-client"), &words, COMMAND_TIME_MAX).ok().json();
    let exports = listed["servers"][0]["exports"].as_array().cloned().unwrap_or_default();
    exports.iter().filter_map(|export| Some(export["name"].as_str()?.to_owned())).collect()
}

#[test]
fn lists_are_printed_and_hide_exports() {
    let server = Server::builder()
        .export("vol0=mem:1M,access=anyone@127.0.0.7:ro")
        .export("vol1=mem:1M")
        .args(&["--access", "anyone@127.0.0.0/24:rw"])
        .start();
    assert_eq!(discovered("127.0.0.7", &server), ["vol0", "vol1"]);
    assert_eq!(discovered("127.0.0.8", &server), ["vol1"]);
    let shown = server.command(&["export", "list"]).ok().stdout;
    assert!(shown.contains("  access: anyone@127.0.0.7/32:ro\n"), "{shown}");
    assert!(shown.contains("without their own list: anyone@127.0.0.0/24:rw\n"), "{shown}");
    let listed = server.command(&["export", "list", "-o", "json"]).ok().json();
    assert_eq!(listed["exports"][0]["access"][0], "anyone@127.0.0.7/32:ro", "{listed}");
    assert_eq!(listed["access"][0], "anyone@127.0.0.0/24:rw", "{listed}");
    assert_eq!(listed["open_to_everyone"], false);
    let saved = server.command(&["export", "save"]).ok().stdout;
    assert!(saved.contains("anyone@127.0.0.7/32:ro"), "{saved}");
    let _ = server.command(&["export", "set", "vol0", "access="]).ok().says("vol0 changed");
    assert_eq!(discovered("127.0.0.8", &server), ["vol0", "vol1"]);
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_last_list_removed_does_not_open_the_server() {
    let server = Server::builder()
        .export("vol0=mem:1M,access=anyone@127.0.0.7:rw")
        .export("vol1=null:1M")
        .start();
    let _ = server.command(&["export", "remove", "vol0"]).ok();
    let _ = server.command(&["export", "set", "vol1", "migration=deny"]).ok();
    let (_, refused) = from("127.0.0.7", &server, "vol1").try_start();
    let _ = refused.code(1).says("access lists do not admit this client");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_removed_export_takes_its_list_along() {
    let server = Server::builder()
        .export("vol0=mem:1M,access=anyone@127.0.0.7:rw")
        .export("vol1=mem:1M,access=anyone@127.0.0.8:rw")
        .start();
    let client = from("127.0.0.7", &server, "vol0").start();
    assert_eq!(server.sessions().len(), 1);
    let removed = server.command(&["export", "remove", "vol0", "--force"]).ok();
    let _ = removed.says("vol0");
    session_ends(&server);
    // The client learns the reason before its path ends, or, if it was too slow for that, that the
    // lists no longer admit it.
    let got = wait_for("the session to fail", COMMAND_TIME_MAX, || {
        Some(client.status()).filter(|got| got["state"] == "failed")
    });
    assert_eq!(got["io_fails"], true, "{got}");
    let reason = got["reason"].to_string();
    let reasons = ["removed the export", "access lists do not admit this client"];
    assert!(reasons.iter().any(|known| reason.contains(known)), "{got}");
    let (_, refused) = from("127.0.0.7", &server, "vol1").try_start();
    let _ = refused.code(1).says("access lists do not admit this client");
    give_up(&client, "vol0", server);
}

#[test]
fn an_unlisted_client_is_disconnected_even_if_the_reload_fails() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |who: &str, more: &str| {
        let vol0 = format!("{{name: vol0, target: 'mem:1M', access: ['{who}']}}");
        fs::write(&config, format!("export: [{vol0}{more}]\n")).expect("a file");
    };
    write("anyone@127.0.0.7:rw", ", {name: vol1, target: 'mem:1M'}");
    let log = scratch.text("audit.log");
    let args = ["--strict", "--config", &config, "--audit-log", &log];
    let server = Server::builder().args(&args).start();
    let client = from("127.0.0.7", &server, "vol0").start();
    // A new export cannot be opened, so no export changes. The lists do.
    write("anyone@127.0.0.8:rw", ", {name: new, target: /none/there}");
    let dry = server.command(&["reload", "--dry-run"]).code(1).says("no export would change: ");
    let _ = dry.says("access list of export vol0; sessions that would lose paths: vol0-of-127");
    let failed = server.command(&["reload", "--force"]).code(1).says("no export changed: ");
    let failed = failed.says("; but this was applied: access list of export vol0; ");
    let _ = failed.says("sessions that lost paths: vol0-of-127-0-0-7");
    let _ = server.wait_output("reload: no export changed: ");
    session_ends(&server);
    // An export does not become open to all just because the only export with a list is missing.
    let (_, refused) = from("127.0.0.7", &server, "vol1").try_start();
    let _ = refused.code(1).says("access lists do not admit this client");
    let _ = server.command(&["reload"]).code(1).says("nothing changed: ");
    give_up(&client, "vol0", server);
    let text = fs::read_to_string(&log).expect("an audit log");
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("JSON"));
    let lines: Vec<serde_json::Value> = lines.collect();
    let reloads: Vec<_> = lines.iter().filter(|line| line["event"] == "reload").collect();
    assert_eq!(
        (&reloads[0]["result"], &reloads[1]["result"]),
        (&"partly".into(), &"refused".into())
    );
    let (before, after) = (["anyone@127.0.0.7/32:rw"], ["anyone@127.0.0.8/32:rw"]);
    let changed = serde_json::json!([{ "export": "vol0", "before": before, "after": after }]);
    assert_eq!(reloads[0]["access_changed"], changed, "{text}");
    assert_eq!(reloads[1].get("access_changed"), None, "{text}");
}

#[test]
fn a_withdrawn_export_serves_only_its_current_sessions() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let vol1 = "{name: vol1, target: 'mem:1M', access: ['anyone@127.0.0.8:rw']}";
    let vol0 = "{name: vol0, target: 'mem:1M', access: ['anyone@127.0.0.7:rw']}";
    fs::write(&config, format!("export: [{vol0}, {vol1}]\n")).expect("a file");
    let server = Server::builder().args(&["--config", &config]).start();
    let client = from("127.0.0.7", &server, "vol0").args(&["--no-path", "queue"]).start();
    let mut raw = RawNbd::go(client.front(), "vol0");
    let name = "vol0-of-127-0-0-7";
    let path = || {
        let sessions = server.sessions();
        let session = sessions.into_iter().find(|session| session["name"] == name)?;
        (session["paths"][0]["state"] == "connected").then(|| session["paths"][0]["path"].as_u64())
    };
    // First with a server-wide list that admits more clients, then without any list.
    for (round, all) in ["access: ['anyone@127.0.0.0/24:rw']\n", "", ""].into_iter().enumerate() {
        let rest = if round == 2 { "vol1, target: 'mem:1M'}" } else { &vol1[7..] };
        fs::write(&config, format!("{all}export: [{{name: {rest}]\n")).expect("a file");
        let _ = server.command(&["reload"]).ok().says("kept vol0");
        let shown = server.command(&["export", "list"]).ok().stdout;
        assert!(
            shown.contains("  access: only sessions that had the export open when it was removed"),
            "{shown}"
        );
        for mode in ["ro", "rw"] {
            let other = from("127.0.0.9", &server, "vol0").args(&["--access", mode]);
            let (_, refused) = other.try_start();
            let _ = refused.code(1).says(if round == 1 { "EACCES" } else { "may not open 'vol0'" });
        }
        let before = path();
        let _ = server.command(&["session", "disconnect", name]).ok();
        wait_for("the path to come back", COMMAND_TIME_MAX, || {
            let now = path();
            (now.is_some() && now != before).then_some(())
        });
        assert_eq!(raw.write(0, 0, &[1; 4096]), Reply::Error(0));
    }
    drop(raw);
    client.detach();
    let _ = server.command(&["reload"]).ok().says("removed vol0");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_listed_export_is_not_reachable_through_the_search_path() {
    let scratch = Scratch::new();
    let file = scratch.text("disk");
    fs::write(&file, vec![0; 1 << 20]).expect("a file");
    let below = scratch.path("").display().to_string();
    let server = Server::builder()
        .export(format!("vol0={file},access=anyone@127.0.0.7:rw"))
        .args(&["--search-path", &below, "--check"]);
    let _ = server.run().code(2).says("\"vol0\" has an access list").says("below search-path");
    let server = Server::builder()
        .export(format!("vol0={file}"))
        .args(&["--search-path", &below, "--access", "anyone@127.0.0.0/8:rw"])
        .start();
    let set = server.command(&["export", "set", "vol0", "access=anyone@127.0.0.7:rw"]);
    let _ = set.code(1).says("below search-path");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_reload_restricts_access_before_it_looks_at_files() {
    let scratch = Scratch::new();
    let (file, config) = (scratch.text("disk"), scratch.text("server.yaml"));
    fs::write(&file, vec![0; 1 << 20]).expect("a file");
    let write = |who: &str, listed: &str| {
        let text = format!(
            "access: ['anyone@127.0.0.0/8:rw']\nsearch-path: {}\nexport:\n- {{name: v, target: \
             'mem:1M', access: ['{who}']}}\n- {{name: file, target: {file}{listed}}}\n",
            scratch.path("").display()
        );
        fs::write(&config, text).expect("a file");
    };
    write("anyone@127.0.0.7:rw", "");
    let server = Server::builder().args(&["--config", &config]).start();
    let client = from("127.0.0.7", &server, "v").start();
    // The location of the file is an error in the configuration. Detecting it requires access to
    // the file system, which may hang.
    write("anyone@127.0.0.8:rw", ", access: ['anyone@127.0.0.7:rw']");
    let refused = server.command(&["reload", "--force"]).code(1).says("no export changed");
    let _ = refused.says("below search-path").says("but this was applied");
    session_ends(&server);
    give_up(&client, "v", server);
}

#[test]
fn the_logged_state_has_no_session_ids() {
    let mut server = Server::builder().export("vol0=mem:1M").start();
    let client = from("127.0.0.7", &server, "vol0").start();
    let uuid = client.status()["session_id"].as_str().expect("a UUID").to_owned();
    server.signal("USR1");
    let _ = server.wait_output("state: server");
    assert!(!server.wait_output("state: session").contains(&uuid));
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_forbidden_session_ends_within_a_second_of_the_reload() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |who: &str, options: &str| {
        let text = format!("export: [{{name: v, target: 'mem:1M', access: ['{who}']{options}}}]\n");
        fs::write(&config, text).expect("a file");
    };
    write("anyone@127.0.0.7:rw", "");
    let mut server = Server::builder().args(&["--config", &config]).start();
    let client = from("127.0.0.7", &server, "v").start();
    // The list applies even though another setting of the open export cannot change now.
    write("anyone@127.0.0.8:rw", ", direct: off, delay: 5ms");
    let dry = server.command(&["reload", "--dry-run"]).ok();
    let _ = dry.says("would be kept v");
    assert_eq!(server.sessions().len(), 1);
    // The export can change once its session has ended. A signal cannot be refused.
    server.signal("HUP");
    session_ends(&server);
    give_up(&client, "v", server);
}

#[test]
fn a_check_validates_the_audit_log() {
    let scratch = Scratch::new();
    let server = |args: &[&str]| Server::builder().export("vol0=mem:16M").args(args).run();
    let log = scratch.text("none/audit.log");
    for more in [&[][..], &["--check"]] {
        let words = [&["--audit-log", log.as_str()], more].concat();
        let _ = server(&words).code(1).says("cannot open the audit log").says("No such file");
    }
    let log = scratch.text("audit.log");
    let _ = server(&["--audit-log", &log, "--check"]).ok();
    assert!(!Path::new(&log).exists());
    let _ = server(&["--audit-log-max", "1M", "--check"]).code(2).says("needs audit-log");
}

#[test]
fn the_audit_log_records_clients_and_their_actions() {
    let scratch = Scratch::new();
    let log = scratch.text("audit.log");
    let server = Server::builder()
        .export("vol0=mem:1M,access=anyone@127.0.0.7:rw")
        .args(&["--access", "anyone@127.0.0.7:rw", "--audit-log", &log])
        .start();
    let client = from("127.0.0.7", &server, "vol0").start();
    let uuid = client.status()["session_id"].as_str().expect("a UUID").to_owned();
    let session = server.sessions()[0]["log_id"].clone();
    let (_, refused) = from("127.0.0.9", &server, "vol0").try_start();
    let _ = refused.code(1);
    let _ = server.command(&["export", "resize", "none", "--force"]).code(1);
    client.detach();
    let _ = server.command(&["export", "set", "vol0", "ro"]).ok();
    let _ = server.command(&["drain"]).ok();
    let output = server.wait(STOP_TIME_MAX).code(0).stderr;
    let text = fs::read_to_string(&log).expect("an audit log");
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let has = |event: &str, result: &str, address: &str| {
        lines.iter().any(|line| {
            let from = line["address"].as_str().unwrap_or_default();
            line["event"] == event && line["result"] == result && from.starts_with(address)
        })
    };
    for event in ["connect", "open", "close", "disconnect"] {
        assert!(has(event, "ok", "127.0.0.7:"), "{event}: {text}");
    }
    assert!(has("connect", "refused", "127.0.0.9:"), "{text}");
    for (event, result) in [("export-resize", "refused"), ("export-set", "ok"), ("drain", "ok")] {
        assert!(has(event, result, ""), "{event}: {text}");
    }
    let open = lines.iter().find(|line| line["event"] == "open").expect("an open");
    assert_eq!((&open["export"], &open["mode"]), (&"vol0".into(), &"rw".into()), "{text}");
    assert_eq!((&open["session"], &open["identity"]), (&session, &serde_json::Value::Null));
    assert!(open["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{text}");
    assert!(!text.contains(&uuid) && !output.contains(&uuid), "the UUID is a secret");
}

#[test]
fn a_check_warns_as_a_start_does() {
    let check = |args: &[&str]| {
        let server = Server::builder().export("vol0=mem:1M").args(&["--check"]).args(args);
        server.run().code(0).stderr
    };
    assert!(check(&[]).contains("warning: no access list"));
    assert_eq!(check(&["--insecure-open"]), "");
    assert!(check(&["--access", "db1:rw"]).contains("\"db1\" admits no client"));
    // The warning is printed on stderr if the log omits warnings.
    let server = Server::builder().export("vol0=mem:1M").args(&["--log", "error"]).start();
    assert!(server.stop(STOP_TIME_MAX).stderr.contains("warning: no access list"));
}

#[test]
fn a_reload_restores_the_lists_of_the_flags() {
    let server = Server::builder().export("vol0=mem:1M,access=anyone@127.0.0.7:rw").start();
    let _ = server.command(&["export", "set", "vol0", "access=anyone@127.0.0.8:rw"]).ok();
    let client = from("127.0.0.8", &server, "vol0").start();
    let line = "changed: access list of export vol0, from anyone@127.0.0.8/32:rw to \
                anyone@127.0.0.7/32:rw\n";
    let dry = server.command(&["reload", "--dry-run"]).ok();
    assert!(dry.stdout.contains(&format!("would be {line}")), "{dry:?}");
    assert_eq!(server.sessions().len(), 1);
    let done = server.command(&["reload", "--force"]).ok();
    assert!(done.stdout.contains(line) && done.stdout.contains("changed vol0\n"), "{done:?}");
    session_ends(&server);
    let done = server.command(&["reload", "-o", "json"]).ok().json();
    assert_eq!(done["access_changed"], serde_json::json!([]), "{done}");
    give_up(&client, "vol0", server);
}

#[test]
fn a_reload_prints_the_warnings_of_a_start() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    fs::write(&config, "access: ['anyone:rw']\nexport: ['v=mem:1M']\n").expect("a file");
    let server = Server::builder().args(&["--config", &config]).start();
    fs::write(&config, "access: ['db1:rw']\nexport: ['v=mem:1M']\n").expect("a file");
    let warning = "warning: the access rule for \"db1\" admits no client";
    let _ = server.command(&["reload", "--dry-run"]).ok().says(warning);
    let _ = server.command(&["reload"]).ok().says(warning);
    let done = server.command(&["reload", "-o", "json"]).ok().json();
    let got = done["warnings"][0].as_str().expect("a warning");
    assert!(got.starts_with(&warning["warning: ".len()..]), "{done}");
    let set = server.command(&["export", "set", "v", "access=db2:ro"]).ok();
    let _ = set.says("warning: the access rule for \"db2\" admits no client");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_first_list_closes_other_exports_only_when_forced() {
    let server = Server::builder().export("vol0=mem:1M").export("vol1=mem:1M").start();
    let client = from("127.0.0.7", &server, "vol0").start();
    for words in [
        ["export", "add", "new=mem:1M,access=anyone@127.0.0.9:rw"].as_slice(),
        &["export", "set", "vol1", "access=anyone@127.0.0.9:rw"],
    ] {
        let refused = server.command(words).code(1).says("cannot set the access list of ");
        let refused = refused.says("exports that no client may open: vol0");
        let refused = refused.says("sessions that would lose paths: vol0-of-127-0-0-7");
        let _ = refused.says("first `reload` a configuration").says("or use --force");
        let listed = server.command(&["export", "list", "-o", "json"]).ok().json();
        assert_eq!(listed["exports"].as_array().expect("a list").len(), 2, "{listed}");
        assert_eq!((&listed["open_to_everyone"], server.sessions().len()), (&true.into(), 1));
    }
    // An export whose list ends its own session.
    let set = ["export", "set", "vol0", "access=anyone@127.0.0.9:rw", "access=anyone@127.0.0.8:rw"];
    let _ = server.command(&set).code(1).says("sessions that would lose paths");
    let dry =
        server.command(&[&set[..], &["--dry-run"]].concat()).ok().says("vol0 would be changed");
    let dry = dry
        .says("would be ended: 1 path of session vol0-of-127-0-0-7 (anonymous) from 127.0.0.7\n");
    let _ = dry.says("1 session would be ended\nwithout --force, this change would be refused\n");
    let listed = server.command(&["export", "list", "-o", "json"]).ok().json();
    assert_eq!((&listed["open_to_everyone"], server.sessions().len()), (&true.into(), 1));
    let json = server.command(&[&set[..], &["--dry-run", "-o", "json"]].concat()).ok().json();
    assert_eq!(json["revoked"][0]["peers"], serde_json::json!(["127.0.0.7"]), "{json}");
    assert_eq!((&json["changed"], &json["needs_force"]), (&true.into(), &true.into()), "{json}");
    for (option, why) in [("ro", "it is open for writing"), ("block-size=4096", "it is open")] {
        let dry = server.command(&["export", "set", "vol0", option, "--dry-run"]).code(1);
        let _ = dry.says("export \"vol0\" would not change: ").says(why);
    }
    let dry = server.command(&["export", "set", "vol0", "rw", "--dry-run"]).ok();
    let _ = dry.says("vol0 already has these options\n");
    let forced = ["export", "add", "new=mem:1M,access=anyone@127.0.0.9:rw", "--force"];
    let added = server.command(&forced).ok().says("new added\nclosed: vol0; no client may open it");
    let _ = added
        .says("ended: 1 path of session vol0-of-127-0-0-7")
        .says("from 127.0.0.7\n1 session ended");
    session_ends(&server);
    let set = ["export", "set", "new", "access=", "--force", "-o", "json"];
    assert_eq!(server.command(&set).ok().json()["closed"], serde_json::json!(["new"]));
    let line = "changed: access to exports without their own list, from no client to everyone\n";
    let _ = server.command(&["reload", "--dry-run"]).ok().says(&format!("would be {line}"));
    let _ = server.command(&["reload"]).ok().says(line);
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn a_reload_that_closes_exports_must_be_forced() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |vol0: &str| {
        let exports = format!("[{{name: vol0, target: 'mem:1M'{vol0}}}, 'vol1=mem:1M']");
        fs::write(&config, format!("export: {exports}\n")).expect("a file");
    };
    write("");
    let server = Server::builder().args(&["--config", &config]).start();
    let client = from("127.0.0.7", &server, "vol1").start();
    write(", access: ['anyone:rw']");
    let dry = server.command(&["reload", "--dry-run"]).ok();
    let dry = dry.says("would be changed: access to exports without their own list, from everyone");
    let dry = dry.says("would be closed: vol1").says("1 session would be ended");
    let _ = dry.says("without --force, this change would be refused");
    let refused = server.command(&["reload"]).code(1).says("nothing changed: ");
    let _ = refused.says("exports that no client may open: vol1").says("--force");
    assert_eq!(server.sessions().len(), 1);
    let _ = server.command(&["reload", "--force"]).ok().says("closed: vol1");
    session_ends(&server);
    give_up(&client, "vol1", server);
}

#[test]
fn a_client_whose_access_was_revoked_reports_who_refused_it() {
    let scratch = Scratch::new();
    let config = scratch.text("server.yaml");
    let write = |who: &str| {
        let text = format!("export: [{{name: vol0, target: 'mem:1M', access: ['{who}:rw']}}]\n");
        fs::write(&config, text).expect("a file");
    };
    write("anyone@127.0.0.7");
    let server = Server::builder().args(&["--config", &config]).start();
    let client = from("127.0.0.7", &server, "vol0").args(&["--no-path", "queue"]).start();
    write("anyone@127.0.0.8");
    let _ = server.command(&["reload", "--force"]).ok().says("changed vol0");
    let path = format!("tcp://127.0.0.7@{}", server.address());
    let refused = format!("{path}: refused by the server: EACCES");
    let status = wait_for("the refusal", COMMAND_TIME_MAX, || {
        let status = client.status();
        status["reason"].as_str().is_some_and(|why| why.starts_with(&refused)).then_some(status)
    });
    assert_eq!((&status["state"], &status["io_fails"]), (&"no-path".into(), &false.into()));
    let _ = client.command(&["status", "vol0"]).code(3).says(&format!("IO waits; {refused}"));
    let _ = client.command(&["list"]).ok().says(&format!("no-path: IO waits; {refused}"));
    write("anyone@127.0.0.7");
    let _ = server.command(&["reload"]).ok();
    wait_for("the path to come back", COMMAND_TIME_MAX, || {
        (client.status()["state"] == "open").then_some(())
    });
    client.detach();
    let _ = server.stop(STOP_TIME_MAX);
}
