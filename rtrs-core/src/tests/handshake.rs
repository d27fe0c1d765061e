//! TLS client that performs a handshake and nothing else.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::ClientConnection;
use rustls::pki_types::ServerName;

use crate::tls::TlsClientConfig;

/// Performs a complete handshake over a connected stream, within the stream's time limits.
///
/// # Errors
/// Returns the error of the stream or the TLS error.
pub fn tls_handshake(config: &TlsClientConfig, stream: &mut TcpStream) -> io::Result<()> {
    let name = ServerName::IpAddress(stream.peer_addr()?.ip().into());
    let conn = ClientConnection::new(Arc::clone(&config.rustls), name);
    let mut conn = conn.map_err(io::Error::other)?;
    while conn.is_handshaking() {
        conn.complete_io(stream)?;
    }
    Ok(())
}
