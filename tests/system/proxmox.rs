//! Storage plugin of Proxmox VE with a real server, run by Perl with stand-ins for the modules of
//! Proxmox VE.

use std::fs;

use rtrs_tests::{COMMAND_TIME_MAX, STOP_TIME_MAX, Scratch, Server, bin, run};
use serde_json::json;

/// Modules of Proxmox VE as far as the plugin uses them: `run_command` dies if the command fails.
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

/// Calls each method of a storage, as Proxmox VE does.
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

#[test]
fn storage_plugin_of_proxmox_lists_exports() {
    let server = Server::builder().export("vol0=mem:16M").export("team/x=mem:1M").start();
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("PVE/Storage")).expect("a directory");
    fs::write(scratch.path("PVE/Tools.pm"), TOOLS).expect("a file");
    fs::write(scratch.path("PVE/Storage/Plugin.pm"), "package PVE::Storage::Plugin; 1;\n")
        .expect("a file");
    fs::write(scratch.path("calls.pl"), CALLS).expect("a file");
    let paths = format!("path: ['tcp://127.0.0.1:1', '{}']\n", server.portal());
    fs::write(scratch.path("store1.yaml"), paths).expect("a file");
    let client = bin("rtrs-client").display().to_string();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let command = format!(
        "cd {root} && perl {} {} {client} {}",
        scratch.text("calls.pl"),
        scratch.text(""),
        scratch.text("store1.yaml")
    );
    let found = run("sh", &["-c", &command], COMMAND_TIME_MAX).ok().json();
    let images = json!([{ "volid": "store1:vol0", "format": "raw", "size": 16 << 20 }]);
    // Names with a slash are not volumes, and one path that works is enough.
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
