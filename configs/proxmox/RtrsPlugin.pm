# Storage plugin of Proxmox VE: exports of an rtrs-server as disks of virtual machines and
# containers. Install it on each node as
#   /usr/share/perl5/PVE/Storage/Custom/RtrsPlugin.pm
# and declare the storage in /etc/pve/storage.cfg:
#   rtrs: store1
#       rtrs-config /etc/rtrs/store1.yaml
#       content images
#       shared 1
# The file holds the paths, and the keys or certificates, of `rtrs-client attach --config`. Exports
# are created, grown and removed at the server.
package PVE::Storage::Custom::RtrsPlugin;

use strict;
use warnings;

use JSON::PP qw(decode_json);
use PVE::Storage::Plugin;
use PVE::Tools qw(run_command);

use base qw(PVE::Storage::Plugin);

our $CLIENT = '/usr/bin/rtrs-client';
our $LINKS = '/dev/rtrs';

# Versions of the storage API that this plugin was checked with: 10 to 15.
my ($API_MIN, $API_MAX) = (10, 15);

# Names of exports that are also names of Proxmox VE volumes.
my $NAME = qr/[A-Za-z0-9][A-Za-z0-9._-]*/;

sub api {
    my $version = eval { PVE::Storage::APIVER() } // $API_MAX;
    return $version > $API_MAX ? $API_MAX : $version < $API_MIN ? $API_MIN : $version;
}

sub type { return 'rtrs' }

sub plugindata {
    return {
        content => [{ images => 1, rootdir => 1, none => 1 }, { images => 1 }],
        format => [{ raw => 1 }, 'raw'],
        select_existing => 1,
        'sensitive-properties' => {},
    };
}

sub properties {
    return {
        'rtrs-config' => {
            description => 'Configuration file of rtrs-client with the paths and keys.',
            type => 'string',
        },
    };
}

sub options {
    return {
        'rtrs-config' => { fixed => 1 },
        bwlimit => { optional => 1 },
        content => { optional => 1 },
        disable => { optional => 1 },
        nodes => { optional => 1 },
        shared => { optional => 1 },
    };
}

# Runs rtrs-client and returns its output and its error, which is empty on success.
sub run_client {
    my (@args) = @_;
    my ($out, $err) = ('', '');
    eval {
        run_command(
            [$CLIENT, @args],
            outfunc => sub { $out .= "$_[0]\n" },
            errfunc => sub { $err .= "$_[0]\n" },
        );
    };
    return ($out, $@ ? $err || $@ : '');
}

# Runs rtrs-client. Dies with its error.
sub client {
    my ($out, $err) = run_client(@_);
    die $err if $err;
}

# Returns the exports of the server by name, with size in bytes and mode. One path that works is
# enough.
sub exports {
    my ($scfg) = @_;
    my ($out, $err) = run_client('discover', '--config', $scfg->{'rtrs-config'}, '-o', 'json');
    my $servers = $out ? decode_json($out)->{servers} : [];
    my @listed = grep { !defined($_->{error}) } @$servers;
    die $err if !@listed;
    my %exports;
    for my $server (@listed) {
        $exports{ $_->{name} } //= $_ for grep { $_->{name} =~ /^$NAME\z/ } @{ $server->{exports} };
    }
    return \%exports;
}

sub is_attached {
    my ($name) = @_;
    return eval { client('get', $name, 'path'); 1 } // 0;
}

sub parse_volname {
    my ($class, $volname) = @_;
    die "\"$volname\" is no export name of rtrs that Proxmox VE can use\n"
        if $volname !~ /^($NAME)\z/;
    return ('images', $1, undef, undef, undef, undef, 'raw');
}

sub path {
    my ($class, $scfg, $volname, $storeid, $snapname) = @_;
    die "rtrs has no snapshots; take them at the server\n" if defined($snapname);
    my ($vtype, $name, $vmid) = $class->parse_volname($volname);
    my $path = "$LINKS/$name";
    return wantarray ? ($path, $vmid, $vtype) : $path;
}

sub filesystem_path {
    my ($class, $scfg, $volname, $snapname) = @_;
    return $class->path($scfg, $volname, undef, $snapname);
}

sub list_images {
    my ($class, $storeid, $scfg, $vmid, $vollist, $cache) = @_;
    # Exports have no owner among virtual machines.
    return [] if defined($vmid) && !$vollist;
    my $exports = exports($scfg);
    my @images;
    for my $name (sort keys %$exports) {
        my $volid = "$storeid:$name";
        next if $vollist && !grep { $_ eq $volid } @$vollist;
        push @images, { volid => $volid, format => 'raw', size => $exports->{$name}->{size} };
    }
    return \@images;
}

sub volume_size_info {
    my ($class, $scfg, $storeid, $volname, $timeout) = @_;
    my $export = exports($scfg)->{$volname} // die "the server has no export \"$volname\"\n";
    return wantarray ? ($export->{size}, 'raw', 0, undef) : $export->{size};
}

# The server has no total: each export has its own size.
sub status {
    my ($class, $storeid, $scfg, $cache) = @_;
    my $active = eval { exports($scfg); 1 } // 0;
    warn "storage $storeid: $@" if !$active;
    return (0, 0, 0, $active);
}

sub activate_storage { return 1 }

sub deactivate_storage { return 1 }

sub activate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache) = @_;
    my $path = $class->path($scfg, $volname, $storeid, $snapname);
    my $name = ($class->parse_volname($volname))[1];
    if (!is_attached($name)) {
        client('attach', '--config', $scfg->{'rtrs-config'}, '--device', 'auto', '--', $name);
    }
    # udev creates the link once the device exists.
    run_command(['udevadm', 'settle', '--timeout=20', "--exit-if-exists=$path"]) if !-e $path;
    return 1;
}

# Refused while the device is in use.
sub deactivate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache) = @_;
    my $name = ($class->parse_volname($volname))[1];
    client('detach', '--', $name) if is_attached($name);
    return 1;
}

sub alloc_image { die "create the export at the server (rtrs-server export add)\n" }

sub free_image { die "remove the export at the server (rtrs-server export remove)\n" }

sub create_base { die "rtrs has no base images\n" }

sub clone_image { die "rtrs has no clones; copy the volume\n" }

# An attached device adopts the new size automatically.
sub volume_resize { die "grow the export at the server (rtrs-server export resize), then rescan\n" }

sub volume_snapshot { die "rtrs has no snapshots; take them at the server\n" }

sub volume_snapshot_rollback { die "rtrs has no snapshots\n" }

sub volume_snapshot_delete { die "rtrs has no snapshots\n" }

sub volume_has_feature {
    my ($class, $scfg, $feature, $storeid, $volname, $snapname, $running) = @_;
    return $feature eq 'copy' && !$snapname ? 1 : undef;
}

1;
