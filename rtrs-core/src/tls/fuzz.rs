//! Body of the fuzz target `tls`: the handshakes. The body for records is
//! `fabric/iwarp/tests/fuzz_records.rs`.
//!
//! The first byte of the input selects the kind: the rest is either sent by a client, in pieces, or
//! a list of changes to the messages of two conforming ends. The target fails if anything panics,
//! or if an end completes the handshake with a peer that it does not know.

use std::sync::{Arc, OnceLock};

use rustls::pki_types::ServerName;

use super::config::{TlsClientConfig, TlsServerConfig};
use super::handshake::{Begin, Ended, Handshake, Session, Step};
use super::keys::{Clients, PrivateKey};
use crate::fabric::Who;

const REQUEST: &[u8] = b"ping";

fn configs() -> &'static (TlsClientConfig, TlsServerConfig) {
    static CONFIGS: OnceLock<(TlsClientConfig, TlsServerConfig)> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let key = || PrivateKey::generate().expect("random numbers");
        let (client, server) = (key(), key());
        let mut clients = Clients::default();
        clients.add("db1", client.public());
        let known = TlsClientConfig::with_keys(&client, &[server.public()]).expect("a key");
        (known, TlsServerConfig::with_keys(&server, clients).expect("a key"))
    })
}

fn request_len(_: &[u8]) -> Option<usize> {
    Some(REQUEST.len())
}

fn server() -> Handshake {
    Handshake::new(Begin::Server { config: configs().1.clone(), request_len })
}

/// Callback that may change the data sent by an end, given the number of the flight.
type Change<'a> = &'a mut dyn FnMut(usize, &mut Vec<u8>);

/// Runs a handshake between both ends. Returns None for an end that did not complete it.
fn run_handshake(change: Change<'_>) -> (Option<Box<Ended>>, Option<Box<Ended>>) {
    let (config, request) = (configs().0.clone(), REQUEST.to_vec());
    let name = ServerName::try_from("localhost").expect("a name");
    let mut ends = [Handshake::new(Begin::Client { config, name, request }), server()];
    let mut done = [None, None];
    let mut bytes = Vec::new();
    for turn in 0..10 {
        let at = turn % 2;
        let progress = ends[at].advance(&bytes);
        match progress.step {
            Step::More => {}
            Step::Done(ended) => done[at] = Some(ended),
            Step::Failed(_) => break,
        }
        bytes = progress.output;
        change(turn, &mut bytes);
        if done[1 - at].is_some() {
            break;
        }
    }
    let [client, server] = done;
    (client, server)
}

/// Returns established sessions of a client and a server that know each other.
pub(crate) fn sessions() -> (Session, Session) {
    let (client, server) = run_handshake(&mut |_, _| {});
    (client.expect("a client session").session, server.expect("a server session").session)
}

/// Runs the handshakes of an input.
///
/// # Panics
/// Panics if an end misbehaves.
#[doc(hidden)]
pub fn fuzz_tls(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    match kind % 3 {
        0 => unknown_client(rest),
        1 => changed(rest),
        _ => crate::fabric::iwarp::fuzz_records(rest),
    }
}

/// Sends the bytes of an arbitrary client, in pieces of chosen lengths.
fn unknown_client(mut data: &[u8]) {
    let mut server = server();
    while let Some((len, rest)) = data.split_first() {
        let (piece, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        match server.advance(piece).step {
            Step::More => data = rest,
            Step::Failed(_) => return,
            Step::Done(_) => panic!("an unknown client is accepted"),
        }
    }
}

/// Applies changes of four bytes each: the flight, the offset in it (two bytes), and the bits to
/// flip.
fn changed(data: &[u8]) {
    let (client, server) = run_handshake(&mut |turn, bytes| {
        for change in data.chunks_exact(4) {
            let at = usize::from(u16::from_be_bytes([change[1], change[2]]));
            if usize::from(change[0] % 4) == turn && at < bytes.len() {
                bytes[at] ^= change[3];
            }
        }
    });
    if let Some(server) = server {
        assert_eq!(server.session.peer.who, Who::Key(Arc::from("db1")));
        assert_eq!(server.request, REQUEST);
        assert!(client.is_some(), "the server is done with a client that is not");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn flipped_bits_never_authenticate() {
        let mut flights = [0; 10];
        let (client, server) = run_handshake(&mut |turn, bytes| flights[turn] = bytes.len());
        assert!(client.is_some() && server.is_some());
        for (turn, len) in flights.into_iter().enumerate() {
            for at in (0..len).step_by(7) {
                let at = u16::try_from(at).unwrap().to_be_bytes();
                fuzz_tls(&[1, u8::try_from(turn).unwrap(), at[0], at[1], 1]);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn random_programs_hold_invariants(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            fuzz_tls(&data);
        }
    }
}
