//! Handshake of a path: connections arrive, then INFO_REQ, then requests are served.
//!
//! [`Joining`] collects the connections of one path; [`Joining::admit`] handles INFO_REQ, which
//! must not arrive before all connections are up (rtrs-srv.c, post_recv_path), and returns the
//! session name. Names are validated here; the session table checks whether a name is taken. If
//! INFO_REQ is refused, a client that accepts refusals learns the reason and closes the path.

use rtrs_core::ids::ConnIndex;
use rtrs_core::time::Instant;
use rtrs_core::wire::{InfoReq, Name};

use super::end::{InfoError, PathEnd};

/// A path whose connections are arriving; INFO_REQ may follow once it is complete.
#[derive(Debug)]
pub struct Joining {
    seen: Box<[bool]>,
    missing: u16,
    deadline: Instant,
    /// Reason for refusing INFO_REQ, if the client was sent a refusal.
    refused: Option<PathEnd>,
}

/// Reason why a connection cannot join its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The number of connections differs from the path's.
    #[error("the client announces {found} connections, but the path has {expected}")]
    Count {
        /// Number announced by this connection.
        found: u16,
        /// Number announced by the first connection.
        expected: u16,
    },
    /// The connection already exists.
    #[error("connection {0} already exists")]
    Twice(ConnIndex),
}

impl Joining {
    /// Creates a path that expects `cid_num` connections.
    pub fn new(cid_num: u16, deadline: Instant) -> Self {
        let seen = vec![false; usize::from(cid_num)].into();
        Self { seen, missing: cid_num, deadline, refused: None }
    }

    /// Deadline of the handshake.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Sets the deadline of the handshake.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Records the reason for refusing INFO_REQ, which the caller sends to the client.
    pub fn refuse(&mut self, why: PathEnd) {
        self.refused = Some(why);
    }

    /// Returns the reason for refusing INFO_REQ, if the client was sent a refusal.
    pub fn refused(&self) -> Option<&PathEnd> {
        self.refused.as_ref()
    }

    /// Checks whether a connection can be added.
    ///
    /// # Errors
    /// If the connection does not fit the path.
    pub fn check(&self, cid: ConnIndex, cid_num: u16) -> Result<(), JoinError> {
        let expected = u16::try_from(self.seen.len()).unwrap_or(u16::MAX);
        if cid_num != expected {
            return Err(JoinError::Count { found: cid_num, expected });
        }
        match self.seen.get(cid.index()) {
            Some(false) => Ok(()),
            _ => Err(JoinError::Twice(cid)),
        }
    }

    /// Adds a connection.
    ///
    /// # Errors
    /// See [`Self::check`].
    pub fn join(&mut self, cid: ConnIndex, cid_num: u16) -> Result<(), JoinError> {
        self.check(cid, cid_num)?;
        self.seen[cid.index()] = true;
        self.missing -= 1;
        Ok(())
    }

    /// Processes INFO_REQ.
    ///
    /// # Errors
    /// If INFO_REQ is malformed or too early, or its name is refused. The path must then end.
    pub fn admit(&self, bytes: &[u8]) -> Result<Name, InfoError> {
        if self.missing > 0 {
            return Err(InfoError::Early(self.missing));
        }
        let request = InfoReq::decode(bytes).map_err(InfoError::Wire)?;
        request.session_name.check_session_name().map_err(InfoError::Name)?;
        Ok(request.session_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_req_waits_for_all_connections() {
        let mut joining = Joining::new(3, Instant::ZERO);
        let info = InfoReq { session_name: Name::new(b"sess").unwrap() }.encode();
        joining.join(ConnIndex(0), 3).unwrap();
        assert_eq!(joining.join(ConnIndex(0), 3), Err(JoinError::Twice(ConnIndex(0))));
        assert_eq!(joining.join(ConnIndex(1), 4), Err(JoinError::Count { found: 4, expected: 3 }));
        assert_eq!(joining.join(ConnIndex(3), 3), Err(JoinError::Twice(ConnIndex(3))));
        assert_eq!(joining.admit(&info), Err(InfoError::Early(2)));
        joining.join(ConnIndex(2), 3).unwrap();
        joining.join(ConnIndex(1), 3).unwrap();
        assert_eq!(joining.admit(&info).unwrap().as_bytes(), b"sess");
    }

    #[test]
    fn invalid_names_are_refused() {
        let mut joining = Joining::new(1, Instant::ZERO);
        joining.join(ConnIndex(0), 1).unwrap();
        for name in [&b"a/b"[..], b"a.b", b"", b"/", b"."] {
            let info = InfoReq { session_name: Name::new(name).unwrap() }.encode();
            assert!(matches!(joining.admit(&info), Err(InfoError::Name(_))), "{name:?}");
        }
        let mut endless = InfoReq { session_name: Name::new(b"x").unwrap() }.encode();
        endless[2..257].fill(b'x');
        assert!(matches!(joining.admit(&endless), Err(InfoError::Wire(_))));
        assert!(matches!(joining.admit(&[0; 271]), Err(InfoError::Wire(_))));
        let mut wrong = InfoReq { session_name: Name::new(b"x").unwrap() }.encode();
        wrong[0] = 1;
        assert!(matches!(joining.admit(&wrong), Err(InfoError::Wire(_))));
    }
}
