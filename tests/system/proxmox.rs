//! Tests of the Proxmox VE storage plugin with a real server. Perl runs the plugin with stand-ins
//! for the Proxmox VE modules.

use std::fs;

use std::os::unix::fs::PermissionsExt;

use rtrs_tests::{
    COMMAND_TIME_MAX, Front, RawNbd, STOP_TIME_MAX, Scratch, Server, bin, run, wait_for,
};
use serde_json::{Value, json};

/// The Proxmox VE functions that the plugin uses: `run_command` dies if the command fails.
const TOOLS: &str = r#"
package PVE::Tools;
use base 'Exporter';
our @EXPORT_OK = ('run_command');
sub run_command {
    my ($cmd, %param) = @_;
    my ($out, $err) = map { "$main::scratch/$_" } qw(out err);
    my $quoted = join ' ', map { "'$_'" } @$cmd;
    system("$quoted >$out 2>$err");
    my $status = $?;
    for (['outfunc', $out], ['errfunc', $err]) {
        open(my $file, '<', $_->[1]) or die;
        while (my $line = <$file>) { chomp $line; $param{ $_->[0] }->($line) }
    }
    die "failed\n" if $status;
}
1;
"#;

/// Calls methods of a storage, as Proxmox VE does.
const CALLS: &str = r#"
use strict; use warnings;
use JSON::PP;
our $scratch = shift;
unshift @INC, $scratch;
require "./configs/proxmox/RtrsPlugin.pm";
my $plugin = 'PVE::Storage::Custom::RtrsPlugin';
$PVE::Storage::Custom::RtrsPlugin::CLIENT = shift;
my $scfg = { 'rtrs-config' => shift };
my %found = (
    api => $plugin->api(),
    images => $plugin->list_images('store1', $scfg),
    size => scalar $plugin->volume_size_info($scfg, 'store1', 'vol0'),
    path => scalar $plugin->path($scfg, 'vol0', 'store1'),
    active => ($plugin->status('store1', $scfg))[3],
);
for my $call (
    [missing => sub { $plugin->volume_size_info($scfg, 'store1', 'none') }],
    [snapshot => sub { $plugin->path($scfg, 'vol0', 'store1', 'monday') }],
    [name => sub { $plugin->parse_volname('a/b') }],
    [down => sub { $plugin->list_images('store1', { 'rtrs-config' => '/nonexistent' }) }],
) {
    eval { $call->[1]->() };
    $found{ $call->[0] } = $@;
}
print encode_json(\%found);
"#;

/// Calls one method with a volume, as Proxmox VE does.
const CALL: &str = r#"
use strict; use warnings;
use JSON::PP;
our $scratch = shift;
unshift @INC, $scratch;
$ENV{PATH} = "$scratch/bin:$ENV{PATH}";
require "./configs/proxmox/RtrsPlugin.pm";
$PVE::Storage::Custom::RtrsPlugin::CLIENT = shift;
$PVE::Storage::Custom::RtrsPlugin::LINKS = "$scratch/links";
my $scfg = { 'rtrs-config' => shift };
my ($method, $name) = @ARGV;
my $done = eval { PVE::Storage::Custom::RtrsPlugin->$method('store1', $scfg, $name) };
print encode_json({ done => $done, error => $@ });
"#;

/// Stand-in for `udevadm` that creates the link named by `--exit-if-exists=`.
const UDEVADM: &str = r#"#!/bin/sh
echo "$*" >>LOG
touch "${3#--exit-if-exists=}"
"#;

/// Runs the client with a run directory, and with a socket because tests have no device.
const CLIENT: &str = r#"#!/bin/sh
verb=$1
shift
for word; do
    shift
    case $word in
        --device) word=--socket ;;
        auto) word='SOCKET' ;;
    esac
    set -- "$@" "$word"
done
exec PROGRAM "$verb" --run-dir RUN "$@"
"#;

/// Writes the Proxmox VE modules, the script, and a storage's configuration file.
fn write_modules(scratch: &Scratch, calls: &str, server: &Server) {
    fs::create_dir_all(scratch.path("PVE/Storage")).expect("a directory");
    fs::write(scratch.path("PVE/Tools.pm"), TOOLS).expect("a file");
    fs::write(scratch.path("PVE/Storage/Plugin.pm"), "package PVE::Storage::Plugin; 1;\n")
        .expect("a file");
    fs::write(scratch.path("calls.pl"), calls).expect("a file");
    let paths = format!("path: ['tcp://127.0.0.1:1', '{}']\n", server.portal());
    fs::write(scratch.path("store1.yaml"), paths).expect("a file");
}

/// Runs the script with this client, and returns what it prints.
fn perl(scratch: &Scratch, client: &str, words: &[&str]) -> Value {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let command = format!(
        "cd {root} && perl {} {} {client} {} {}",
        scratch.text("calls.pl"),
        scratch.text("").trim_end_matches('/'),
        scratch.text("store1.yaml"),
        words.join(" ")
    );
    run("sh", &["-c", &command], COMMAND_TIME_MAX).ok().json()
}

#[test]
fn the_proxmox_plugin_attaches_and_detaches() {
    let server = Server::builder().export("vol0=mem:16M").start();
    let scratch = Scratch::new();
    write_modules(&scratch, CALL, &server);
    let program = |file: &str, text: String| {
        fs::write(scratch.path(file), text).expect("a file");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(scratch.path(file), mode).expect("its mode");
    };
    for name in ["bin", "links"] {
        fs::create_dir(scratch.path(name)).expect("a directory");
    }
    program("bin/udevadm", UDEVADM.replace("LOG", &scratch.text("udev.log")));
    let client = CLIENT.replace("PROGRAM", &bin("rtrs-client").display().to_string());
    let client = client.replace("SOCKET", &scratch.text("{name}.nbd"));
    program("client", client.replace("RUN", &scratch.text("run")));
    let call = |method: &str, name: &str| perl(&scratch, &scratch.text("client"), &[method, name]);
    let list = || {
        let words = ["list", "-o", "json", "--run-dir", &scratch.text("run")];
        run(bin("rtrs-client"), &words, COMMAND_TIME_MAX).ok().json()
    };
    let done = json!({ "done": 1, "error": "" });
    assert_eq!(call("deactivate_volume", "vol0"), done, "it is not attached");
    assert_eq!(call("activate_volume", "vol0"), done);
    let listed = list();
    // Nothing listens on the other path.
    assert_eq!((&listed[0]["name"], &listed[0]["state"]), (&json!("vol0"), &json!("degraded")));
    let waited = || fs::read_to_string(scratch.path("udev.log")).expect("the calls of udevadm");
    let expected = format!("settle --timeout=20 --exit-if-exists={}\n", scratch.text("links/vol0"));
    assert_eq!(waited(), expected);
    // A second activation changes nothing.
    assert_eq!(call("activate_volume", "vol0"), done);
    assert_eq!((&list()[0]["pid"], waited()), (&listed[0]["pid"], expected));
    // A volume in use stays attached.
    let raw = RawNbd::go(&Front::Unix(scratch.path("vol0.nbd")), "vol0");
    let refused = call("deactivate_volume", "vol0");
    let why = refused["error"].as_str().unwrap_or_default();
    assert!(refused["done"].is_null() && why.contains("is served to NBD clients"), "{refused}");
    assert_eq!(list()[0]["pid"], listed[0]["pid"]);
    drop(raw);
    wait_for("the client to be gone", COMMAND_TIME_MAX, || {
        (call("deactivate_volume", "vol0") == done).then_some(())
    });
    assert_eq!(list(), json!([]));
    assert_eq!(call("deactivate_volume", "vol0"), done, "again");
    let missing = call("activate_volume", "none");
    let why = missing["error"].as_str().unwrap_or_default();
    assert!(missing["done"].is_null() && why.contains("cannot attach none: "), "{missing}");
    let _ = server.stop(STOP_TIME_MAX);
}

#[test]
fn the_proxmox_plugin_lists_exports() {
    let server = Server::builder().export("vol0=mem:16M").export("team/x=mem:1M").start();
    let scratch = Scratch::new();
    write_modules(&scratch, CALLS, &server);
    let found = perl(&scratch, &bin("rtrs-client").display().to_string(), &[]);
    let images = json!([{ "volid": "store1:vol0", "format": "raw", "size": 16 << 20 }]);
    // Names with a slash are not volumes, and one working path is enough.
    assert_eq!(found["images"], images, "{found}");
    assert_eq!((&found["size"], &found["active"]), (&json!(16 << 20), &json!(1)), "{found}");
    assert_eq!((&found["path"], &found["api"]), (&json!("/dev/rtrs/vol0"), &json!(15)), "{found}");
    let error = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    assert!(error("missing").contains("no export \"none\""), "{found}");
    assert!(error("snapshot").contains("no snapshots"), "{found}");
    assert!(error("name").contains("\"a/b\""), "{found}");
    assert!(error("down").contains("/nonexistent"), "{found}");
    let _ = server.stop(STOP_TIME_MAX);
}
