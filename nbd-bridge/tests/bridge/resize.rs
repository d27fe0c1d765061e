//! Tests of a device whose size changes while clients are connected.

use std::io::{Read, Write};
use std::sync::atomic::Ordering::SeqCst;

use crate::client::{Client, READ, ZEROES, go};
use crate::fixture::Fixture;

const ENOSPC: u32 = 28;
const EINVAL: u32 = 22;
const MIB: u64 = 1 << 20;

/// Returns the size in the handshake of a new connection.
fn offered_size(fixture: &Fixture) -> u64 {
    let mut stream = fixture.socket();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(&go("vol0")).unwrap();
    loop {
        let (kind, data) = Client::option_reply(&mut stream);
        assert_eq!(kind, 3, "an information reply");
        if data[..2] == [0, 0] {
            return u64::from_be_bytes(data[2..10].try_into().unwrap());
        }
    }
}

#[test]
fn a_new_size_applies_to_new_and_existing_connections() {
    let fixture = Fixture::new();
    let mut client = fixture.client(true);
    assert_eq!(offered_size(&fixture), 64 * MIB);
    assert_eq!(client.error_of(ZEROES, 0, 64 * MIB, 4096), ENOSPC);

    fixture.switches.resize.store(96 * MIB, SeqCst);
    assert_eq!(offered_size(&fixture), 96 * MIB);
    client.write(96 * MIB - 4096, &[7; 4096]);
    assert!(client.read(96 * MIB - 4096, 4096) == [7; 4096]);
    assert_eq!(client.error_of(ZEROES, 0, 96 * MIB, 4096), ENOSPC);

    fixture.switches.resize.store(32 * MIB, SeqCst);
    assert_eq!(offered_size(&fixture), 32 * MIB);
    let submitted = fixture.switches.submitted.load(SeqCst);
    assert_eq!(client.error_of(READ, 0, 32 * MIB, 4096), EINVAL);
    client.send_write(0, 1, 32 * MIB - 2048, &[1; 4096]);
    assert_eq!(client.reply(|_| 0).error, ENOSPC);
    assert_eq!(fixture.switches.submitted.load(SeqCst), submitted, "the bridge refuses them");
    client.send_write(0, 2, 32 * MIB - 4096, &[2; 4096]);
    assert_eq!(client.reply(|_| 0).error, 0);
    client.disconnect();
    fixture.finish();
}
