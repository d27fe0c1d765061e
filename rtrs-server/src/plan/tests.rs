//! Tests of every validation of a plan, with its message, and of the round trip through printed
//! settings.

use super::*;
use crate::settings::OnMissing;
use rtrs_core::settings::print;
use rtrs_core::skip::skip;
use std::path::PathBuf;

/// A directory for this test, removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rtrs-plan-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, len: u64) -> String {
        let path = self.0.join(name);
        File::create(&path).unwrap().set_len(len).unwrap();
        path.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn plan(yaml: &str) -> Result<Plan, Error> {
    Plan::new(Settings::from_yaml(yaml, "s.yaml").unwrap())
}

fn export(spec: &str) -> Plan {
    Plan::new(Settings { export: vec![spec.parse().unwrap()], ..Settings::default() }).unwrap()
}

fn check_error(spec: &str) -> String {
    let mut plan = export(spec);
    plan.settings.on_missing = OnMissing::Refuse;
    let error = plan.check().unwrap_err();
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Export, 1));
    error.chain().to_string()
}

#[test]
fn startup_waits_for_missing_targets_as_configured() {
    let check = |exports: &[&str], on_missing| {
        let export = exports.iter().map(|spec| spec.parse().unwrap()).collect();
        let set = Settings { export, on_missing, ..Settings::default() };
        let checked = Plan::new(set).unwrap().check();
        checked.map_err(|error| error.chain().to_string())
    };
    let (auto, refuse) = (OnMissing::Auto, OnMissing::Refuse);
    for exports in [&["/none/a", "m=mem:1M"], &["/dev/null", "m=mem:1M"]] {
        check(exports, auto).unwrap();
        let why = check(exports, refuse).unwrap_err();
        assert!(!why.contains("truncate"), "{why}");
    }
    let why = check(&["/dev/null"], auto).unwrap_err();
    assert!(why.contains("neither a regular file nor a block device"), "{why}");
    check(&["/none/a", "/none/b"], OnMissing::Wait).unwrap();
    let why = check(&["/none/a", "/none/b"], auto).unwrap_err();
    assert!(why.contains("/none/a does not exist"), "{why}");
    let both = check(&["/none/a", "m=mem:1M", "/none/b"], refuse).unwrap_err();
    assert!(both.contains("/none/a does not") && both.contains("/none/b does not"), "{both}");
}

#[test]
fn a_missing_file_under_the_search_path_also_needs_the_servers_list() {
    let dir = std::env::temp_dir().join(format!("rtrs-below-{}", std::process::id()));
    let (below, beside) = (dir.join("below"), dir.join("beside"));
    fs::create_dir_all(&below).unwrap();
    fs::create_dir_all(&beside).unwrap();
    let _ = std::os::unix::fs::symlink("../below/later", beside.join("link"));
    let search: SearchSpec = below.display().to_string().parse().unwrap();
    let check = |path: &Path| {
        let spec = format!("v={},access=db1:rw", path.display()).parse().unwrap();
        check_below(&spec, &search).map_err(|error| error.to_string())
    };
    let last_up = below.join("none/../later");
    for path in [below.join("later"), below.join("a/b"), beside.join("link"), last_up] {
        let why = check(&path).unwrap_err();
        assert!(why.contains("is below search-path"), "{}: {why}", path.display());
    }
    check(&beside.join("later")).unwrap();
    check(&below.join("none/../../beside/later")).unwrap();
    fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn defaults_yield_a_plan() {
    let plan = Plan::new(Settings::default()).unwrap();
    assert_eq!((plan.settings.queue_depth.get(), plan.chunk_bytes()), (512, 262_144));
    assert_eq!(plan.listen, Listen::Auto);
    assert_eq!(plan.settings, Settings::default());
    let error = plan.check().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(error.to_string(), "nothing to export; use --export PATH, or export: in the file");
}

#[test]
fn a_search_path_is_validated_and_sufficient() {
    let of = |path: &str| plan(&format!("{{search-path: {path}, listen: 'tcp://127.0.0.1:0'}}"));
    of("/").unwrap().check().unwrap();
    of("/%SESSNAME%").unwrap().check().unwrap();
    for (path, text) in [
        ("/no-such-directory", "search-path /no-such-directory cannot be read; create it"),
        (
            "/dev/null/%SESSNAME%",
            "search-path /dev/null is not a directory; use a directory or off",
        ),
    ] {
        let error = of(path).unwrap().check().unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Export, 1));
        assert!(error.to_string().starts_with(text), "{error}");
    }
}

#[test]
fn values_and_combinations_are_validated() {
    for (yaml, text) in [
        (
            "chunk-size: 4k",
            "chunk-size 4k is not usable; use a power of two from 8k to 16M, as in 128k",
        ),
        ("chunk-size: 100k", "chunk-size 100k is not usable; use a power of two"),
        ("chunk-size: 32M", "chunk-size 32M is not usable"),
        ("chunk-size: 8G", "chunk-size 8G is not usable"),
        (
            "{queue-depth: 4096, chunk-size: 128k}",
            "queue-depth 4096 with chunk-size 128k needs 29 bits, but the protocol has 28; use a \
             queue-depth of at most 2048, or a chunk-size of at most 64k",
        ),
        (
            "{queue-depth: 257, chunk-size: 1M}",
            "queue-depth 257 with chunk-size 1M needs 29 bits, but the protocol has 28; use a \
             queue-depth of at most 256, or a chunk-size of at most 512k",
        ),
        ("listen: []", "listen is empty; omit it or use auto"),
        ("listen: [auto, tcp://h]", "listen mixes auto with portals; use one or the other"),
        ("listen: [auto, auto]", "listen mixes auto with portals"),
        ("listen: [rdma://h, rdma://h:1234]", "listen contains rdma://h:1234 twice; drop one"),
        ("listen: tcp://1.1.1.1@2.2.2.2", "has a source address, which a listener cannot use"),
        ("listen: [tcp://h, tcp://h:1234]", "listen contains tcp://h:1234 twice; drop one"),
        ("export: [/a/v, /b/v]", "two exports have the name \"v\"; rename one with NAME=TARGET"),
        ("export: /", "export \"/\" has no file name to be exported under"),
        (
            "export: m=mem:0",
            "export \"m\": size 0 is not a positive multiple of the block size, 512 bytes",
        ),
        ("export: m=mem:1000", "size 1000 is not a positive multiple of the block size, 512 bytes"),
        (
            "export: 'm=mem:1k,block-size=4096'",
            "is not a positive multiple of the block size, 4096 bytes",
        ),
        ("export: n=null:8E", "size 8E is too large; use less than 8E"),
        ("export: 'n=null:1M,direct=on'", "direct=on needs a file or block device; leave it out"),
        ("{ping-only: true, no-ping: true}", "ping-only and no-ping are mutually exclusive"),
        ("{rping: true, no-ping: true}", "rping and no-ping are mutually exclusive; drop one"),
    ] {
        let error = plan(yaml).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Usage, 2), "{yaml}");
        let chain = error.chain().to_string();
        assert!(chain.contains(text), "{chain}\nlacks\n{text}");
    }
}

#[test]
fn the_28_bit_rule_has_exact_edges() {
    for (depth, chunk, fits) in [
        (1, 16 << 20, true),
        (16, 16 << 20, true),
        (17, 16 << 20, false),
        (2048, 128 << 10, true),
        (2049, 128 << 10, false),
        (512, 512 << 10, true),
        (512, 1 << 20, false),
        (32768, 8 << 10, true),
        (65535, 8 << 10, false),
    ] {
        assert_eq!(check_immediate_bits(depth, chunk).is_ok(), fits, "{depth} x {chunk}");
    }
    // No chunk size would be small enough.
    let text = check_immediate_bits(65535, 16 << 20).unwrap_err().to_string();
    assert!(text.ends_with("use a queue-depth of at most 16"), "{text}");
    let text = check_immediate_bits(32768, 16 << 20).unwrap_err().to_string();
    assert!(text.ends_with("at most 16, or a chunk-size of at most 8k"), "{text}");
    for yaml in ["{queue-depth: 256, chunk-size: 1M}", "listen: [tcp://h:0, tcp://h:0]"] {
        assert!(plan(yaml).is_ok(), "{yaml}");
    }
}

#[test]
fn printed_settings_yield_the_same_plan() {
    let yaml = "export:\n- /srv/vol0.img\n- r=/srv/x\\,y,ro,direct=on,block-size=4096\n\
        - e=mem:1M,delay=10ms,error-rate=0.001\n- 'null:1T'\nlisten: ['tcp://[::1]:0', tcp://h]\n\
        queue-depth: 128\nchunk-size: 1M\nshards: 3\npin: off\nalways-invalidate: off\ncrc: off\n\
        heartbeat: 100ms\nheartbeat-missed-max: 3\nheartbeat-idle-max: 9s\n\
        handshake-timeout: 100ms\n\
        half-open-max: 5\nsessions-max: 6\nmemory-max: 7M\nshutdown-grace: 7ms\n\
        poll: 8us\nping-only: true\n\
        no-ping: false\nrping: true\nserver-id: s\n\
        log: info,rtrs_server=debug\n";
    let plan = plan(yaml).unwrap();
    let printed = serde_yaml::to_string(&print(&plan.settings)).unwrap();
    assert_eq!(Plan::new(Settings::from_yaml(&printed, "p").unwrap()).unwrap(), plan, "{printed}");
    let json = serde_json::to_string_pretty(&print(&plan.settings)).unwrap();
    assert_eq!(Plan::new(Settings::from_yaml(&json, "p").unwrap()).unwrap(), plan, "{json}");
}

#[test]
fn targets_are_checked_before_anything_starts() {
    let scratch = Scratch::new("targets");
    let file = scratch.file("good.img", 4096);
    let empty = scratch.file("empty.img", 0);
    let small = scratch.file("small.img", 100);
    let odd = scratch.file("odd.img", 5000);
    let dir = scratch.0.display().to_string();
    for good in [&file, &odd, "m=mem:1M", "n=null:1T"] {
        export(good).check().unwrap();
    }
    for (spec, text) in [
        (format!("v={dir}"), format!("cannot export \"v\": {dir} is a directory; export a file")),
        (empty, "is empty; restore its data, or set its size".into()),
        (small, "has 100 bytes, less than one block of 512; enlarge it".into()),
        (format!("{dir}/missing"), format!("{dir}/missing does not exist; check the path")),
        (
            format!("{file}/x"),
            "make it readable and writable for this user, or export it with ,ro: Not a dir".into(),
        ),
        ("/dev/null".into(), "is neither a regular file nor a block device".into()),
    ] {
        let error = check_error(&spec);
        assert!(error.contains(&text), "{error}\nlacks\n{text}");
    }
}

#[test]
fn a_target_without_permission_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    const WHERE: &str = "RTRS_LOCKED";
    if let Some(file) = std::env::var_os(WHERE) {
        return validate_locked(&file.display().to_string());
    }
    let scratch = Scratch::new("rights");
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let file = scratch.file("locked.img", 4096);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    if File::open(&file).is_err() {
        return validate_locked(&file);
    }
    // Permissions do not bind root: run this test again as another user.
    let again = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plan::tests::a_target_without_permission_is_refused", "--nocapture"])
        .env(WHERE, &file)
        .uid(65534)
        .gid(65534)
        .output();
    match again {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
        }
        Err(error) => skip(&format!("cannot run as another user: {error}")),
    }
}

fn validate_locked(file: &str) {
    let read = format!("may not read {file} (mode 0, owner 0:0); make it ");
    for (export, hint) in [
        (file.to_owned(), "readable and writable for this user, or export it with ,ro: Permission"),
        (format!("{file},ro"), "readable for this user: Permission"),
    ] {
        let error = check_error(&export);
        assert!(error.contains(&format!("{read}{hint}")), "{error}");
        assert!(error.contains(": user ") && !error.contains("user 0"), "{error}");
    }
}

#[test]
fn a_read_only_target_is_refused_for_writing() {
    // A running program cannot be opened for writing, not even by root.
    let own = std::env::current_exe().unwrap().display().to_string();
    let error = check_error(&format!("v={own}"));
    assert!(
        error.contains(
            "cannot be read and written; make it readable and writable for this user, or export \
             it with ,ro: "
        ),
        "{error}"
    );
    export(&format!("v={own},ro")).check().unwrap();
}

#[test]
fn missing_rdma_is_refused_with_what_is_missing() {
    let yaml = "{export: 'n=null:1M', listen: ['rdma://10.0.0.1', 'tcp://127.0.0.1:0']}";
    if !Rdma::BUILT_IN {
        let error = plan(yaml).unwrap_err();
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Usage, 2));
        let text = error.to_string();
        assert!(
            text.starts_with("cannot listen on rdma://10.0.0.1:1234: this build has"),
            "{text}"
        );
        return;
    }
    let plan = plan(yaml).unwrap();
    let Err(error) = plan.check() else { return skip("this host has an RDMA device") };
    assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Listen, 1));
    let text = error.chain().to_string();
    assert!(text.starts_with("cannot listen on rdma://10.0.0.1:1234: "), "{text}");
    assert!(["modprobe", "rdma link add"].iter().any(|remedy| text.contains(remedy)), "{text}");
}

#[test]
fn paths_to_certificates_and_keys_are_made_absolute() {
    let here = std::env::current_dir().unwrap();
    let set = plan("{key-file: k, clients-file: /c, exports-dir: e}").unwrap().settings;
    assert_eq!(set.key_file, Some(here.join("k")));
    assert_eq!(set.clients_file, Some("/c".into()));
    assert_eq!(set.exports_dir, Some(here.join("e")));
    assert_eq!(plan("tls-dir: t").unwrap().settings.tls_dir, Some(here.join("t")));
}
