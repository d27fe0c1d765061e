//! A TLS client that shakes hands and does nothing else.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::ClientConnection;
use rustls::pki_types::ServerName;

use crate::tls::TlsClientConfig;

/// A whole handshake over a connected stream, as far as its time limits allow.
///
/// # Errors
/// What the stream or the other end had against it.
pub fn tls_handshake(config: &TlsClientConfig, stream: &mut TcpStream) -> io::Result<()> {
    let name = ServerName::IpAddress(stream.peer_addr()?.ip().into());
    let conn = ClientConnection::new(Arc::clone(&config.rustls), name);
    let mut conn = conn.map_err(io::Error::other)?;
    while conn.is_handshaking() {
        conn.complete_io(stream)?;
    }
    Ok(())
}
