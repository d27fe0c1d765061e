//! Tests of holes: `base:allocation` as seen by nbdinfo, nbdcopy and qemu-img.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, Client, Scratch, Server, Stand, equal_prefix, fill_pattern,
    requires, run,
};

use crate::{MIB, each_front, file_stand};

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Writes a MiB of data at these offsets of the exported file.
fn fill(exported: &Path, places: &[u64]) {
    let file = File::options().write(true).open(exported).expect("open the export");
    let mut data = vec![0; 1 << 20];
    for at in places {
        fill_pattern(&mut data, *at, 3);
        file.write_all_at(&data, *at).expect("fill the export");
    }
}

/// Returns offset, length and type of the extents that nbdinfo shows.
fn map(uri: &str) -> Vec<(u64, u64, u64)> {
    let json = run("nbdinfo", &["--map", "--json", uri], COMMAND_TIME_MAX).ok().json();
    let number = |extent: &serde_json::Value, key: &str| extent[key].as_u64().expect("a number");
    let extents = json.as_array().expect("a list").iter();
    extents.map(|e| (number(e, "offset"), number(e, "length"), number(e, "type"))).collect()
}

#[test]
fn nbdinfo_shows_holes() {
    if !requires(&["nbdinfo"]) {
        return;
    }
    each_front(|front| {
        let (stand, exported) = file_stand(8 * GIB, front, &[]);
        fill(&exported, &[MIB, 6 * GIB]);
        assert_eq!(
            map(&stand.uri()),
            [
                (0, MIB, 3),
                (MIB, MIB, 0),
                (2 * MIB, 6 * GIB - 2 * MIB, 3),
                (6 * GIB, MIB, 0),
                (6 * GIB + MIB, 2 * GIB - MIB, 3),
            ]
        );
        stand.finish();
    });
}

#[test]
fn memory_has_holes() {
    if !requires(&["nbdinfo", "qemu-io"]) {
        return;
    }
    let stand = Stand::start(Scratch::new(), Server::builder().export("vol0=mem:3G"), |c| c);
    let uri = stand.uri();
    assert_eq!(map(&uri), [(0, 3 * GIB, 3)]);
    let _ = run("qemu-io", &["-f", "raw", &uri, "-c", "write 1G 64k"], COMMAND_TIME_MAX).ok();
    let rest = 2 * GIB - (64 << 10);
    assert_eq!(map(&uri), [(0, GIB, 3), (GIB, 64 << 10, 0), (GIB + (64 << 10), rest, 3)]);
    stand.finish();
}

#[test]
fn nbdcopy_skips_the_holes_of_a_tebibyte() {
    if !requires(&["nbdcopy"]) {
        return;
    }
    let (stand, exported) = file_stand(TIB, |c| c, &[]);
    fill(&exported, &[0, 5 * MIB, 300 * GIB, TIB - MIB]);
    let copy = stand.scratch.text("copy.img");
    let _ = run("nbdcopy", &[&stand.uri(), &copy], COPY_TIME_MAX).ok();
    let facts = std::fs::metadata(&copy).expect("its metadata");
    assert_eq!(facts.len(), TIB);
    assert!(facts.blocks() * 512 < 16 * MIB, "{} blocks in the copy", facts.blocks());
    for at in [0, 5 * MIB, 300 * GIB, TIB - MIB] {
        let mut data = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for (path, data) in [exported.as_path(), Path::new(&copy)].into_iter().zip(&mut data) {
            let file = File::open(path).expect("open it");
            file.read_exact_at(data, at).expect("read it");
        }
        assert!(data[0] == data[1], "the copy differs at {at}");
    }
    let stats = stand.client.command(&["stats", "vol0", "-o", "json"]).ok().json();
    let read = stats["ops"]["read"]["bytes"].as_u64().expect("a number");
    assert!(read < 16 * MIB, "{read} bytes were read to copy 4 MiB of data");
    assert!(stats["ops"]["extents"]["count"].as_u64() > Some(0), "{}", stats["ops"]);
    stand.finish();
}

/// Each answer covers as much as its format can express, and takes one request to the server.
#[test]
fn a_hole_of_15_tebibytes_is_mapped_with_few_requests() {
    if !requires(&["nbdinfo", "qemu-img"]) {
        return;
    }
    let (stand, exported) = file_stand(15 * TIB, |c| c, &[]);
    fill(&exported, &[TIB]);
    let count = || {
        let stats = stand.client.command(&["stats", "vol0", "-o", "json"]).ok().json();
        stats["ops"]["extents"]["count"].as_u64().expect("a number")
    };
    let (hole, data) = ((0, TIB, 3), (TIB, MIB, 0));
    assert_eq!(map(&stand.uri()), [hole, data, (TIB + MIB, 14 * TIB - MIB, 3)]);
    let narrow = count();
    assert!(narrow <= 2000, "{narrow} requests of at most 8 GiB each");
    let uri = stand.uri();
    let json = ["map", "--output=json", "-f", "raw", &uri];
    let map = run("qemu-img", &json, COMMAND_TIME_MAX).ok().json();
    assert_eq!(map.as_array().map(Vec::len), Some(3), "{map}");
    let wide = count() - narrow;
    let version = run("qemu-img", &["--version"], COMMAND_TIME_MAX).ok().stdout;
    let version = version.split_whitespace().nth(2).and_then(|v| v.split('.').next()?.parse().ok());
    // QEMU added extended headers in 8.2.
    if version.is_some_and(|major: u32| major >= 9) {
        assert!(wide <= 20, "{wide} requests");
    }
    stand.finish();
}

#[test]
fn qemu_img_maps_and_converts_sparse_files() {
    if !requires(&["qemu-img"]) {
        return;
    }
    each_front(|front| {
        let (stand, exported) = file_stand(16 * GIB, front, &[]);
        fill(&exported, &[3 * MIB, 9 * GIB]);
        let uri = stand.uri();
        let json = ["map", "--output=json", "-f", "raw", &uri];
        let map = run("qemu-img", &json, COMMAND_TIME_MAX).ok().json();
        let data = |e: &&serde_json::Value| e["data"] == true && e["zero"] == false;
        let data: Vec<_> = map.as_array().expect("a list").iter().filter(data).collect();
        let places: Vec<_> =
            data.iter().map(|e| (e["start"].as_u64(), e["length"].as_u64())).collect();
        assert_eq!(places, [(Some(3 * MIB), Some(MIB)), (Some(9 * GIB), Some(MIB))], "{map}");
        let copy = stand.scratch.text("copy.img");
        let convert = ["convert", "-f", "raw", "-O", "raw", &uri, &copy];
        let _ = run("qemu-img", &convert, COPY_TIME_MAX).ok();
        let facts = std::fs::metadata(&copy).expect("its metadata");
        assert!(facts.len() == 16 * GIB && facts.blocks() * 512 < 16 * MIB, "{facts:?}");
        equal_prefix(&exported, Path::new(&copy), 4 * MIB);
        let compare = ["compare", "-f", "raw", "-F", "raw", &uri, &copy];
        let _ = run("qemu-img", &compare, COPY_TIME_MAX).ok().says("identical");
        let stats = stand.client.command(&["stats", "vol0", "-o", "json"]).ok().json();
        let read = stats["ops"]["read"]["bytes"].as_u64().expect("a number");
        assert!(read < 64 * MIB, "{read} bytes were read");
        stand.finish();
    });
}

/// Returns the start of each data extent that qemu-img finds; it requests extents one by one.
fn data_starts(uri: &str) -> Vec<u64> {
    let json = ["map", "--output=json", "-f", "raw", uri];
    let map = run("qemu-img", &json, COMMAND_TIME_MAX).ok().json();
    let data = map.as_array().expect("a list").iter().filter(|extent| extent["data"] == true);
    data.map(|extent| extent["start"].as_u64().expect("a number")).collect()
}

/// The server caches extents of earlier maps.
#[test]
fn a_map_includes_later_writes_of_another_client() {
    if !requires(&["qemu-img", "qemu-io"]) {
        return;
    }
    let (stand, exported) = file_stand(GIB, |c| c, &[]);
    let mut expected: Vec<u64> = (0..100).map(|n| n * 4 * MIB).collect();
    fill(&exported, &expected);
    let attach = |access, name| {
        let args = ["--access", access, "--session-name", name];
        Client::attach("vol0").path(stand.server.portal()).args(&args).start()
    };
    let (reader, second) = (attach("ro", "reader"), attach("migration", "second"));
    let uris = [stand.uri(), reader.uri(), second.uri()];
    for round in 0..8 {
        for uri in &uris {
            assert_eq!(data_starts(uri), expected, "round {round}");
        }
        let at = (100 + round) * 4 * MIB;
        let writer = &uris[if round % 2 == 0 { 0 } else { 2 }];
        let write = format!("write {at} 64k");
        let _ = run("qemu-io", &["-f", "raw", writer, "-c", &write], COMMAND_TIME_MAX).ok();
        expected.push(at);
    }
    second.detach();
    reader.detach();
    stand.finish();
}
