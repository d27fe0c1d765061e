//! Real programs on an attached session: nbdinfo, nbdcopy, qemu-img, qemu-io, fio and the `nbd`
//! crate's client, over a unix socket and over TCP. Each test starts its own server and session;
//! the data that the programs write is compared byte by byte with the exported file.
#![forbid(unsafe_code)]

mod ceph;
mod gateways;
mod sparse;
mod tester;
mod upstream;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rtrs_tests::{
    COMMAND_TIME_MAX, COPY_TIME_MAX, ClientBuilder, Scratch, Server, Stand, equal_prefix,
    ext4_image, fill_pattern, nbd_client, pattern_file, quick, requires, run, sparse_file,
};

const MIB: u64 = 1 << 20;

/// Runs the same test with NBD on a unix socket and on TCP.
fn each_front(test: impl Fn(fn(ClientBuilder) -> ClientBuilder)) {
    for (name, front) in FRONTS {
        eprintln!("front: {name}");
        test(front);
    }
}

type Choose = fn(ClientBuilder) -> ClientBuilder;
const FRONTS: [(&str, Choose); 2] = [("unix", |c| c), ("tcp", ClientBuilder::tcp)];

/// Starts a stand with a sparse file of this size; also returns the file's path.
fn file_stand(size: u64, front: Choose, server_args: &[&str]) -> (Stand, std::path::PathBuf) {
    let scratch = Scratch::new();
    let path = scratch.path("vol0.img");
    sparse_file(&path, size);
    let server = Server::builder().export(format!("vol0={}", path.display())).args(server_args);
    (Stand::start(scratch, server, front), path)
}

#[test]
fn nbdinfo_shows_the_export() {
    if !requires(&["nbdinfo"]) {
        return;
    }
    each_front(|front| {
        let stand = Stand::start(Scratch::new(), Server::builder().export("vol0=mem:64M"), front);
        let uri = stand.uri();
        let text = run("nbdinfo", &[&uri], COMMAND_TIME_MAX).ok().stdout;
        assert!(text.contains("newstyle-fixed"), "{text}");
        assert!(text.contains(&format!("export-size: {}", 64 * MIB)), "{text}");
        for capability in [
            "is_read_only: false",
            "can_flush: true",
            "can_fua: true",
            "can_trim: true",
            "can_zero: true",
            "can_multi_conn: true",
            "can_cache: true",
        ] {
            assert!(text.contains(capability), "no {capability:?} in:\n{text}");
        }
        let size = run("nbdinfo", &["--size", &uri], COMMAND_TIME_MAX).ok().stdout;
        assert_eq!(size.trim(), (64 * MIB).to_string());

        let json = run("nbdinfo", &["--json", &uri], COMMAND_TIME_MAX).ok().json();
        assert_eq!(json["structured"], true, "{json}");
        assert_eq!(json["exports"][0]["export-name"], "vol0", "{json}");
        assert_eq!(json["exports"][0]["export-size"], 64 * MIB, "{json}");
        assert_eq!(json["exports"][0]["block_size_maximum"], 64 * MIB, "{json}");

        let list = run("nbdinfo", &["--list", "--json", &uri], COMMAND_TIME_MAX).ok().json();
        let names: Vec<_> = list["exports"].as_array().expect("a list of exports").iter().collect();
        assert_eq!(names.len(), 1, "{list}");
        assert_eq!(names[0]["export-name"], "vol0", "{list}");
        stand.finish();
    });
}

#[test]
fn nbdinfo_shows_a_read_only_export() {
    if !requires(&["nbdinfo"]) {
        return;
    }
    let scratch = Scratch::new();
    pattern_file(&scratch.path("ro.img"), 4 * MIB, 1);
    let export = format!("vol0={},ro", scratch.text("ro.img"));
    let stand = Stand::start(scratch, Server::builder().export(export), |c| c);
    let text = run("nbdinfo", &[&stand.uri()], COMMAND_TIME_MAX).ok().stdout;
    assert!(text.contains("is_read_only: true"), "{text}");
    stand.finish();
}

#[test]
fn nbdcopy_copies_an_ext4_file_system_both_ways() {
    if !requires(&["nbdcopy", "mkfs.ext4", "e2fsck", "du"]) {
        return;
    }
    let images = Scratch::new();
    let image = images.path("ext4.img");
    let size = ext4_image(&image, if quick() { 40 } else { 200 });
    let image_text = images.text("ext4.img");
    each_front(|front| {
        let (stand, exported) = file_stand(size, front, &[]);
        let uri = stand.uri();
        let copy = stand.scratch.text("copy.img");
        let _ = run("nbdcopy", &["--flush", &image_text, &uri], COPY_TIME_MAX).ok();
        equal_prefix(&image, &exported, size);
        let _ = run("nbdcopy", &[&uri, &copy], COPY_TIME_MAX).ok();
        equal_prefix(&image, Path::new(&copy), size);
        let _ = run("e2fsck", &["-fn", &copy], COPY_TIME_MAX).ok();
        stand.finish();
    });
}

#[test]
fn qemu_img_converts_to_qcow2_and_compares() {
    if !requires(&["qemu-img"]) {
        return;
    }
    let images = Scratch::new();
    let raw = images.text("raw.img");
    pattern_file(Path::new(&raw), 24 * MIB, 7);
    each_front(|front| {
        let (stand, _) = file_stand(64 * MIB, front, &[]);
        let uri = stand.uri();
        let convert = ["convert", "-f", "raw", "-O", "qcow2", &raw, &uri];
        let _ = run("qemu-img", &convert, COPY_TIME_MAX).ok();
        let compare = ["compare", "-f", "raw", "-F", "qcow2", &raw, &uri];
        let _ = run("qemu-img", &compare, COPY_TIME_MAX).ok().says("identical");
        let _ = run("qemu-img", &["check", "-f", "qcow2", &uri], COPY_TIME_MAX).ok();
        stand.finish();
    });
}

#[test]
fn qemu_io_patterns_verify() {
    if !requires(&["qemu-io"]) {
        return;
    }
    each_front(|front| {
        let (stand, exported) = file_stand(16 * MIB, front, &[]);
        let commands = [
            "write -P 0xab 0 2M",
            "read -P 0xab 0 2M",
            "write -f -P 0x11 64k 4k",
            "read -P 0x11 64k 4k",
            "write -z 256k 256k",
            "read -P 0 256k 256k",
            "write -z -u 1M 64k",
            "read -P 0 1M 64k",
            "read -P 0xab 512k 512k",
            "discard 1536k 64k",
            "write -P 0x5a 3145728 512",
            "read -P 0x5a 3145728 512",
            "aio_write -P 0x77 8M 1M",
            "aio_write -P 0x78 9M 1M",
            "aio_flush",
            "read -P 0x77 8M 1M",
            "read -P 0x78 9M 1M",
            "flush",
        ];
        let uri = stand.uri();
        let mut args = vec!["-f", "raw", &uri];
        for command in commands {
            args.extend(["-c", command]);
        }
        let done = run("qemu-io", &args, COPY_TIME_MAX).ok();
        let words = format!("{}{}", done.stdout, done.stderr).to_lowercase();
        for bad in ["fail", "error", "invalid"] {
            assert!(!words.contains(bad), "{bad:?} in {done:#?}");
        }
        let file = File::open(exported).expect("open the export");
        let expected: [(u64, u8); 6] = [
            (0, 0xab),
            (64 << 10, 0x11),
            (256 << 10, 0),
            (MIB, 0),
            (8 * MIB, 0x77),
            (10 * MIB - 1, 0x78),
        ];
        for (offset, value) in expected {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).expect("read the export");
            assert_eq!(byte[0], value, "at {offset} of the exported file");
        }
        stand.finish();
    });
}

#[test]
fn fio_verifies_random_io_of_two_jobs() {
    if !requires(&["fio"]) {
        return;
    }
    let (size, area) = if quick() { (64 * MIB, 16) } else { (256 * MIB, 96) };
    each_front(|front| {
        let (stand, _) = file_stand(size, front, &[]);
        let uri = format!("--uri={}", stand.uri());
        let per_job = format!("--size={area}m");
        let increment = format!("--offset_increment={area}m");
        let args = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bsrange=512-256k",
            "--iodepth=16",
            "--numjobs=2",
            &per_job,
            &increment,
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--thread=1",
            "--group_reporting=1",
            "--output-format=json",
        ];
        let done = run("fio", &args, COPY_TIME_MAX).ok();
        // fio's nbd engine prints a greeting on stdout before the JSON.
        let start = done.stdout.find('{').expect("JSON from fio");
        let json: serde_json::Value =
            serde_json::from_str(&done.stdout[start..]).expect("JSON from fio");
        let job = &json["jobs"][0];
        assert_eq!(job["error"], 0, "{done:#?}");
        for way in ["read", "write"] {
            assert!(job[way]["total_ios"].as_u64() > Some(100), "{way}: {done:#?}");
        }
        stand.finish();
    });
}

#[test]
fn the_nbd_crate_reads_and_writes() {
    each_front(|front| {
        let (stand, exported) = file_stand(64 * MIB, front, &[]);
        let mut client = nbd_client(&stand.client);
        assert_eq!(client.seek(SeekFrom::End(0)).expect("seek"), 64 * MIB);
        let mut data = vec![0; 3 << 20];
        for (round, length) in
            [512, 4096, 4608, 65_536, 131_072, 131_584, 3 << 20].into_iter().enumerate()
        {
            let offset = 512 * (1 + 4001 * round as u64);
            let data = &mut data[..length];
            fill_pattern(data, offset, round as u64);
            client.seek(SeekFrom::Start(offset)).expect("seek");
            client.write_all(data).expect("write");
            client.flush().expect("flush");
            let mut back = vec![0; length];
            client.seek(SeekFrom::Start(offset)).expect("seek");
            client.read_exact(&mut back).expect("read");
            assert!(back == *data, "{length} bytes at {offset} came back different");
            File::open(&exported)
                .and_then(|file| file.read_exact_at(&mut back, offset))
                .expect("read the export");
            assert!(back == *data, "{length} bytes at {offset} differ in the file");
        }
        drop(client);
        stand.finish();
    });
}

#[test]
fn four_concurrent_connections() {
    const AREA: u64 = 8 * MIB;
    each_front(|front| {
        let (stand, exported) = file_stand(4 * AREA, front, &[]);
        // All four connect before the first one starts its IO.
        let clients: Vec<_> = (0..4).map(|_| nbd_client(&stand.client)).collect();
        std::thread::scope(|scope| {
            for (index, mut client) in clients.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut data = vec![0; 1 << 17];
                    let start = index as u64 * AREA;
                    for offset in (start..start + AREA).step_by(data.len()) {
                        fill_pattern(&mut data, offset, 4);
                        client.seek(SeekFrom::Start(offset)).expect("seek");
                        client.write_all(&data).expect("write");
                    }
                    client.flush().expect("flush");
                });
            }
        });
        let expected = stand.scratch.path("expected");
        pattern_file(&expected, 4 * AREA, 4);
        equal_prefix(&expected, &exported, 4 * AREA);
        if requires(&["nbdcopy"]) {
            let copy = stand.scratch.text("copy");
            let args = ["--connections=4", "--requests=32", &stand.uri(), &copy];
            let _ = run("nbdcopy", &args, COPY_TIME_MAX).ok();
            equal_prefix(&expected, Path::new(&copy), 4 * AREA);
        }
        stand.finish();
    });
}

#[test]
fn a_sparse_file_of_one_tebibyte() {
    const TIB: u64 = 1 << 40;
    let (stand, exported) = file_stand(TIB, |c| c, &[]);
    if requires(&["nbdinfo"]) {
        let size = run("nbdinfo", &["--size", &stand.uri()], COMMAND_TIME_MAX).ok().stdout;
        assert_eq!(size.trim(), TIB.to_string());
    }
    let mut client = nbd_client(&stand.client);
    let mut data = vec![0; 1 << 20];
    let mut back = vec![0; 1 << 20];
    // The last bytes, and both sides of 4 GiB and of 512 GiB, which 32-bit numbers cannot reach.
    for offset in [TIB - MIB, (4 << 30) - 512 * 1024, (512 << 30) - 4096, 0] {
        fill_pattern(&mut data, offset, 9);
        client.seek(SeekFrom::Start(offset)).expect("seek");
        client.write_all(&data).expect("write");
    }
    for offset in [TIB - MIB, (4 << 30) - 512 * 1024, (512 << 30) - 4096, 0] {
        fill_pattern(&mut data, offset, 9);
        client.seek(SeekFrom::Start(offset)).expect("seek");
        client.read_exact(&mut back).expect("read");
        assert!(back == data, "at {offset} through NBD");
        let file = File::open(&exported).expect("open the export");
        file.read_exact_at(&mut back, offset).expect("read the export");
        assert!(back == data, "at {offset} in the file");
    }
    client.seek(SeekFrom::Start(700 << 30)).expect("seek");
    client.read_exact(&mut back).expect("read a hole");
    assert!(back.iter().all(|&byte| byte == 0), "a hole is not zero");
    drop(client);
    let allocated = std::os::unix::fs::MetadataExt::blocks(
        &std::fs::metadata(&exported).expect("its metadata"),
    ) * 512;
    assert!(allocated < 16 * MIB, "4 MiB of writes allocated {allocated} bytes");
    stand.finish();
}

#[test]
fn sizes_not_divisible_by_4096() {
    for size in [512, 512 * 21, MIB + 512] {
        each_front(|front| {
            let (stand, exported) = file_stand(size, front, &[]);
            let expected = stand.scratch.path("expected");
            pattern_file(&expected, size, size);
            let data = std::fs::read(&expected).expect("read the pattern");
            let mut client = nbd_client(&stand.client);
            assert_eq!(client.seek(SeekFrom::End(0)).expect("seek"), size);
            client.rewind().expect("seek");
            client.write_all(&data).expect("the whole write");
            client.flush().expect("flush");
            let mut last = [0; 512];
            client.seek(SeekFrom::Start(size - 512)).expect("seek");
            client.read_exact(&mut last).expect("read the last sector");
            assert!(last[..] == data[data.len() - 512..], "the last sector");
            drop(client);
            assert_eq!(std::fs::metadata(&exported).expect("metadata").len(), size);
            equal_prefix(&expected, &exported, size);
            if requires(&["nbdcopy"]) {
                let copy = stand.scratch.text("copy");
                let _ = run("nbdcopy", &[&stand.uri(), &copy], COPY_TIME_MAX).ok();
                assert_eq!(std::fs::metadata(&copy).expect("metadata").len(), size);
                equal_prefix(&expected, Path::new(&copy), size);
            }
            stand.finish();
        });
    }
}

#[test]
fn small_and_large_chunks() {
    for (chunk, depth) in [("64K", "256"), ("1M", "128")] {
        let args = ["--chunk-size", chunk, "--queue-depth", depth];
        each_front(|front| {
            let (stand, exported) = file_stand(128 * MIB, front, &args);
            let mut client = nbd_client(&stand.client);
            // Up to the largest request that NBD clients send, and sizes around the chunk size.
            let lengths =
                [512, 61_440, 65_024, 65_536, 66_048, 1_044_480, 1 << 20, (1 << 20) + 512]
                    .into_iter()
                    .chain([32 << 20]);
            let mut offset = 512;
            for length in lengths {
                let mut data = vec![0; length];
                fill_pattern(&mut data, offset, length as u64);
                client.seek(SeekFrom::Start(offset)).expect("seek");
                // A single request: write, not write_all, with all bytes accepted.
                assert_eq!(client.write(&data).expect("write"), length);
                let mut back = vec![0; length];
                client.seek(SeekFrom::Start(offset)).expect("seek");
                assert_eq!(client.read(&mut back).expect("read"), length);
                assert!(back == data, "chunk {chunk}: {length} bytes at {offset} through NBD");
                let file = File::open(&exported).expect("open the export");
                file.read_exact_at(&mut back, offset).expect("read the export");
                assert!(back == data, "chunk {chunk}: {length} bytes at {offset} in the file");
                offset += length as u64 + 1024;
            }
            drop(client);
            stand.finish();
        });
    }
}
