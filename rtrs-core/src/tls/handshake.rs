//! A TLS handshake, without sockets or clocks: received bytes go in, bytes to send come out.
//!
//! The handshake ends when both ends are authenticated and the first message inside TLS is
//! complete: the client sends its request together with its last flight, and the server has read
//! the request. From then on, the shard encrypts and decrypts records itself, with the keys in
//! [`Session`].

use std::fmt;
use std::sync::Arc;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use rustls::{
    CipherSuite, CommonState, ConnectionTrafficSecrets, Error, ExtractedSecrets,
    SupportedCipherSuite, Tls13CipherSuite,
};

use super::config::{ALPN, TlsClientConfig, TlsServerConfig};
use super::explain::{NO_NAME, at_server};
use super::keys::PublicKey;
use crate::fabric::peer::{PeerIdentity, Proof, ProofError};

/// Maximum number of buffered bytes of a peer's handshake: enough for many 4 KiB certificates.
const INPUT_MAX: usize = 64 << 10;
/// Space that a record needs in addition to its content.
const RECORD_ROOM: usize = 64;

/// Function that returns the length of a request, as far as its first bytes determine it; None if
/// it is not a request.
pub(crate) type RequestLen = fn(&[u8]) -> Option<usize>;

/// Parameters with which a handshake begins.
pub(crate) enum Begin {
    Server { config: TlsServerConfig, request_len: RequestLen },
    Client { config: TlsClientConfig, name: ServerName<'static>, request: Vec<u8> },
}

enum Conn {
    Begin(Begin),
    Server(Box<UnbufferedServerConnection>, TlsServerConfig, RequestLen),
    Client(Box<UnbufferedClientConnection>, Vec<u8>, Option<PublicKey>),
    Over,
}

/// TLS handshake in progress.
pub(crate) struct Handshake {
    conn: Conn,
    input: Vec<u8>,
    /// Data that the client has sent inside TLS.
    request: Vec<u8>,
}

/// Next action for the caller.
pub(crate) enum Step {
    /// Send the output, then receive more data.
    More,
    /// Send the output; TLS is established.
    Done(Box<Ended>),
    /// Send the output, which contains an alert, and close.
    Failed(ProofError),
}

/// Result of processing received bytes.
pub(crate) struct Progress {
    pub(crate) output: Vec<u8>,
    pub(crate) step: Step,
}

/// Completed handshake.
pub(crate) struct Ended {
    pub(crate) session: Session,
    /// On the server, the client's request.
    pub(crate) request: Vec<u8>,
    /// Received bytes of records after the request.
    pub(crate) rest: Vec<u8>,
}

/// Keys of a connection.
pub(crate) struct Session {
    pub(crate) suite: &'static Tls13CipherSuite,
    /// Number of the next record, and its keys.
    pub(crate) tx: (u64, ConnectionTrafficSecrets),
    pub(crate) rx: (u64, ConnectionTrafficSecrets),
    pub(crate) secrets: Secrets,
    pub(crate) credentials: Credentials,
    /// On the server, the client's identity.
    pub(crate) peer: PeerIdentity,
}

/// Kind of the credentials that both ends of a session have presented.
#[derive(Clone, Copy)]
pub(crate) struct Credentials {
    /// Both ends use raw keys instead of certificates.
    pub(crate) raw_keys: bool,
    /// The client's own key, if this end is the client and has one.
    pub(crate) own: Option<PublicKey>,
}

/// Secrets from which new keys are derived.
pub(crate) enum Secrets {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl Secrets {
    /// Derives new keys for sending.
    pub(crate) fn next_tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(kernel) => kernel.update_tx_secret(),
            Self::Server(kernel) => kernel.update_tx_secret(),
        }
    }

    /// Derives new keys for receiving.
    pub(crate) fn next_rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        match self {
            Self::Client(kernel) => kernel.update_rx_secret(),
            Self::Server(kernel) => kernel.update_rx_secret(),
        }
    }
}

/// Outcome of one rustls state.
enum Turn {
    Again,
    Blocked,
    Ready,
    Failed(ProofError),
}

impl Handshake {
    pub(crate) fn new(begin: Begin) -> Self {
        Self { conn: Conn::Begin(begin), input: Vec::new(), request: Vec::new() }
    }

    /// Processes received bytes; a client begins without any.
    pub(crate) fn advance(&mut self, received: &[u8]) -> Progress {
        let mut output = Vec::new();
        self.input.extend_from_slice(received);
        let step = match self.run(&mut output) {
            Ok(Some(ended)) => Step::Done(Box::new(ended)),
            Ok(None) if self.input.len() > INPUT_MAX => {
                Step::Failed("the peer's handshake is larger than 64 KiB".into())
            }
            Ok(None) => Step::More,
            Err(why) => Step::Failed(why),
        };
        Progress { output, step }
    }

    fn run(&mut self, output: &mut Vec<u8>) -> Result<Option<Ended>, ProofError> {
        if matches!(self.conn, Conn::Begin(_)) {
            let Conn::Begin(begin) = std::mem::replace(&mut self.conn, Conn::Over) else {
                return Err("no handshake".into());
            };
            self.conn = start(begin).map_err(ProofError::from)?;
        }
        loop {
            let (discard, turn) = match &mut self.conn {
                Conn::Server(conn, ..) => {
                    let UnbufferedStatus { discard, state } =
                        conn.process_tls_records(&mut self.input);
                    (discard, take(state, output, &mut self.request))
                }
                Conn::Client(conn, ..) => {
                    let UnbufferedStatus { discard, state } =
                        conn.process_tls_records(&mut self.input);
                    (discard, take(state, output, &mut self.request))
                }
                Conn::Begin(_) | Conn::Over => return Err("the handshake is over".into()),
            };
            self.input.drain(..discard);
            match turn {
                Turn::Again => {}
                Turn::Blocked => return Ok(None),
                Turn::Failed(why) => {
                    self.alert(output);
                    return Err(match &self.conn {
                        Conn::Server(_, config, _) => at_server(why, config.clients.is_some()),
                        _ => why,
                    });
                }
                Turn::Ready => return self.ready(output),
            }
        }
    }

    /// Takes the alert that rustls has for the peer after an error. rustls remembers the positions
    /// of unprocessed messages in the input, so it must be given the same input again.
    fn alert(&mut self, output: &mut Vec<u8>) {
        let mut none = Vec::new();
        let before = output.len();
        let state = match &mut self.conn {
            Conn::Server(conn, ..) => {
                let state = conn.process_tls_records(&mut self.input).state;
                matches!(state, Ok(ConnectionState::EncodeTlsData(_)))
                    .then(|| take(state, output, &mut none))
            }
            Conn::Client(conn, ..) => {
                let state = conn.process_tls_records(&mut self.input).state;
                matches!(state, Ok(ConnectionState::EncodeTlsData(_)))
                    .then(|| take(state, output, &mut none))
            }
            Conn::Begin(_) | Conn::Over => None,
        };
        if !matches!(state, Some(Turn::Again)) {
            output.truncate(before);
        }
    }

    /// Completes the handshake if all received data has been processed and data may be sent.
    fn ready(&mut self, output: &mut Vec<u8>) -> Result<Option<Ended>, ProofError> {
        match &mut self.conn {
            Conn::Server(conn, _, request_len) => {
                if conn.is_handshaking() {
                    return Ok(None);
                }
                check_protocol(conn)?;
                let want = request_len(&self.request).ok_or("the peer does not speak RTRS")?;
                if self.request.len() < want {
                    return Ok(None);
                }
                if self.request.len() > want || !self.input.is_empty() {
                    return Err("the client did not wait for the answer to its request".into());
                }
            }
            Conn::Client(conn, request, _) => {
                if conn.is_handshaking() {
                    return Ok(None);
                }
                check_protocol(conn)?;
                let UnbufferedStatus { state, .. } = conn.process_tls_records(&mut self.input);
                let Ok(ConnectionState::WriteTraffic(mut write)) = state else {
                    return Err("TLS cannot send".into());
                };
                let at = output.len();
                output.resize(at + request.len() + RECORD_ROOM, 0);
                let len = write.encrypt(request, &mut output[at..]);
                let len = len.map_err(|_: EncryptError| "TLS cannot encrypt the request")?;
                output.truncate(at + len);
            }
            Conn::Begin(_) | Conn::Over => return Err("the handshake is over".into()),
        }
        let conn = std::mem::replace(&mut self.conn, Conn::Over);
        let session = session(conn)?;
        let (request, rest) = (std::mem::take(&mut self.request), std::mem::take(&mut self.input));
        Ok(Some(Ended { session, request, rest }))
    }
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("input", &self.input.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("peer", &self.peer).finish_non_exhaustive()
    }
}

fn start(begin: Begin) -> Result<Conn, Error> {
    Ok(match begin {
        Begin::Server { config, request_len } => {
            let conn = UnbufferedServerConnection::new(Arc::clone(&config.rustls))?;
            Conn::Server(Box::new(conn), config, request_len)
        }
        Begin::Client { config, name, request } => {
            let conn = UnbufferedClientConnection::new(Arc::clone(&config.rustls), name)?;
            Conn::Client(Box::new(conn), request, config.sources.key)
        }
    })
}

/// Performs the action that a rustls state requires.
fn take<D>(
    state: Result<ConnectionState<'_, '_, D>, Error>,
    output: &mut Vec<u8>,
    plain: &mut Vec<u8>,
) -> Turn {
    match state {
        Err(error) => Turn::Failed(error.into()),
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let at = output.len();
            let mut room = 4096;
            loop {
                output.resize(at + room, 0);
                match data.encode(&mut output[at..]) {
                    Ok(len) => {
                        output.truncate(at + len);
                        return Turn::Again;
                    }
                    Err(EncodeError::InsufficientSize(need)) if need.required_size > room => {
                        room = need.required_size;
                    }
                    Err(error) => {
                        return Turn::Failed(ProofError::new(
                            "TLS cannot answer",
                            error.to_string(),
                        ));
                    }
                }
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Turn::Again
        }
        Ok(ConnectionState::ReadTraffic(mut data)) => {
            while let Some(record) = data.next_record() {
                match record {
                    Ok(record) => plain.extend_from_slice(record.payload),
                    Err(error) => return Turn::Failed(error.into()),
                }
            }
            Turn::Again
        }
        Ok(ConnectionState::BlockedHandshake) => Turn::Blocked,
        Ok(ConnectionState::WriteTraffic(_)) => Turn::Ready,
        Ok(_) => Turn::Failed("the peer closed the connection during the handshake".into()),
    }
}

/// Requires the ALPN protocol: rustls accepts a peer that names no protocol at all.
fn check_protocol(conn: &CommonState) -> Result<(), ProofError> {
    match conn.alpn_protocol() {
        Some(ALPN) => Ok(()),
        _ => Err("the peer does not speak RTRS (ALPN rtrs/1)".into()),
    }
}

/// Returns true if the peer has presented a raw key.
fn is_raw_key(conn: &CommonState) -> bool {
    let shown = conn.peer_certificates().and_then(<[_]>::first);
    shown.is_some_and(|shown| PublicKey::from_spki(shown).is_some())
}

fn session(conn: Conn) -> Result<Session, ProofError> {
    let (ExtractedSecrets { tx, rx }, secrets, peer, suite, credentials) = match conn {
        Conn::Server(conn, config, _) => {
            let credentials = Credentials { raw_keys: is_raw_key(&conn), own: None };
            let chain = conn.peer_certificates().unwrap_or_default();
            let who = config.who(chain).ok_or(NO_NAME)?;
            let chain = chain.iter().cloned().map(CertificateDer::into_owned).collect();
            let proof = Some(Arc::new(Proof { chain, generation: config.generation }));
            let peer = PeerIdentity { who, proof, cipher: None };
            let (keys, kernel) =
                conn.dangerous_into_kernel_connection().map_err(ProofError::from)?;
            let suite = kernel.negotiated_cipher_suite();
            (keys, Secrets::Server(kernel), peer, suite, credentials)
        }
        Conn::Client(conn, _, own) => {
            let credentials = Credentials { raw_keys: is_raw_key(&conn), own };
            let (keys, kernel) =
                conn.dangerous_into_kernel_connection().map_err(ProofError::from)?;
            let suite = kernel.negotiated_cipher_suite();
            (keys, Secrets::Client(kernel), PeerIdentity::default(), suite, credentials)
        }
        Conn::Begin(_) | Conn::Over => return Err("the handshake is over".into()),
    };
    let cipher = cipher_name(suite.suite()).ok_or("an unknown cipher suite")?;
    let SupportedCipherSuite::Tls13(suite) = suite else {
        return Err("a version older than TLS 1.3".into());
    };
    let peer = PeerIdentity { cipher: Some(cipher), ..peer };
    Ok(Session { suite, tx, rx, secrets, credentials, peer })
}

/// Returns the name of a supported cipher suite (RFC 8446 appendix B.4, RFC 5289 and RFC 7905).
#[must_use]
pub fn cipher_name(suite: CipherSuite) -> Option<&'static str> {
    Some(match suite {
        CipherSuite::TLS13_AES_128_GCM_SHA256 => "TLS_AES_128_GCM_SHA256",
        CipherSuite::TLS13_AES_256_GCM_SHA384 => "TLS_AES_256_GCM_SHA384",
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => "TLS_CHACHA20_POLY1305_SHA256",
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 => {
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256"
        }
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384 => {
            "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
        }
        CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256 => {
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256"
        }
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 => {
            "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"
        }
        CipherSuite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384 => {
            "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"
        }
        CipherSuite::TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256 => {
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256"
        }
        _ => return None,
    })
}
