//! Proofs in the programs of `server_paths`: the server's computations and its clients' messages.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rtrs_core::fabric::sim::sim_ip;
use rtrs_core::ids::{PathUuid, SessionId};
use rtrs_core::tls::{Clients, PrivateKey, ProofFacts, TlsClientConfig, TlsServerConfig};
use rtrs_core::wire::{AUTH_VERSION, Auth, Challenge, ChallengeRsp};

use crate::engine::authenticator::{Authenticator, ProofTask};
use crate::engine::message::{ControlMessage, Message};

fn configs() -> &'static (TlsClientConfig, TlsServerConfig) {
    static CONFIGS: OnceLock<(TlsClientConfig, TlsServerConfig)> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let key = |seed| PrivateKey::from_seed([seed; 32]).expect("a key");
        let mut clients = Clients::default();
        clients.add("db1", key(1).public());
        let client = TlsClientConfig::with_keys(&key(1), &[key(2).public()]).expect("a key");
        (client, TlsServerConfig::with_keys(&key(2), clients).expect("a key"))
    })
}

/// Queue of pending computations.
#[derive(Clone, Debug, Default)]
pub(super) struct Tasks(Arc<Mutex<VecDeque<ProofTask>>>);

impl Authenticator for Tasks {
    fn begin(&self, task: ProofTask) -> bool {
        let mut tasks = self.0.lock();
        let has_room = tasks.len() < 4;
        if has_room {
            tasks.push_back(task);
        }
        has_room
    }
}

impl Tasks {
    /// Runs the next computation, for the control shard.
    pub(super) fn next(&self) -> Option<Message> {
        let task = self.0.lock().pop_front()?;
        let done = task.run(&configs().1, [8; 32]);
        Some(Message::Control(ControlMessage::Proof(Box::new(done))))
    }
}

/// A CHALLENGE from the client that the server knows, or an invalid one.
pub(super) fn challenge(fields: u8) -> Vec<u8> {
    let good = configs().0.challenge([7; 32]);
    let asked = match fields & 6 {
        0 => good,
        2 => Challenge { version: AUTH_VERSION + 1, ..good },
        4 => Challenge { credential: [fields; 32], ..good },
        _ => Challenge { nonce: [fields; 32], ..good },
    };
    asked.encode().to_vec()
}

/// An AUTH and its proof. The proof answers the server's message in the client's memory, if there
/// is one, for this session and path; otherwise it is arbitrary data.
pub(super) fn auth(fields: u8, session: u8, path: u8, answer: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let facts = ProofFacts {
        session: SessionId([session; 16]),
        path: PathUuid([path; 16]),
        client: sim_ip(2),
        server: sim_ip(1),
    };
    let client = &configs().0;
    let good = ChallengeRsp::decode(answer).ok();
    let good = good
        .and_then(|answer| client.answer(facts, None, &client.challenge([7; 32]), &answer).ok());
    let mut proof = good.filter(|_| fields & 8 == 0).unwrap_or_else(|| vec![fields; 120]);
    if fields & 16 != 0 {
        let at = usize::from(fields) % proof.len();
        proof[at] ^= 1;
    }
    (Auth { version: AUTH_VERSION }.encode().to_vec(), proof)
}
