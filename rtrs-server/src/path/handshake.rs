//! The start of a path, a struct per step: connections arrive, then INFO_REQ, then it serves.
//!
//! [`Joining`] collects the connections of one path; [`Joining::admit`] takes INFO_REQ, which may
//! come only when all are there (rtrs-srv.c, post_recv_path), and yields the session's name. Names
//! are validated here; whether a name is taken is the session table's business.

use rtrs_core::ids::ConnIndex;
use rtrs_core::time::Instant;
use rtrs_core::wire::{InfoReq, Name, NameError, WireError};

/// Connections of a path arrive; INFO_REQ is to come when all are there.
#[derive(Debug)]
pub struct Joining {
    seen: Box<[bool]>,
    missing: u16,
    deadline: Instant,
}

/// Why a connection cannot join its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Its number of connections is not the path's.
    #[error("it belongs to {found} connections, the path has {expected}")]
    Count {
        /// What the connection says.
        found: u16,
        /// What the first one said.
        expected: u16,
    },
    /// That connection is there already.
    #[error("connection {0} already exists")]
    Twice(ConnIndex),
}

/// Why INFO_REQ was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    /// It is not an INFO_REQ.
    #[error("{0}")]
    Wire(WireError),
    /// Connections are missing.
    #[error("INFO_REQ came with {0} connections missing")]
    Early(u16),
    /// The name cannot be a session's.
    #[error("{0}")]
    Name(NameError),
}

impl Joining {
    /// A path of `cid_num` connections, none of them there yet.
    pub fn new(cid_num: u16, deadline: Instant) -> Self {
        Self { seen: vec![false; usize::from(cid_num)].into(), missing: cid_num, deadline }
    }

    /// When the handshake must be over.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// It must be over then.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// A connection arrives.
    ///
    /// # Errors
    /// It does not fit the path.
    pub fn join(&mut self, cid: ConnIndex, cid_num: u16) -> Result<(), JoinError> {
        let expected = u16::try_from(self.seen.len()).unwrap_or(u16::MAX);
        if cid_num != expected {
            return Err(JoinError::Count { found: cid_num, expected });
        }
        match self.seen.get_mut(cid.index()) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(JoinError::Twice(cid)),
        }
        self.missing -= 1;
        Ok(())
    }

    /// INFO_REQ arrives.
    ///
    /// # Errors
    /// It is malformed or early, or its name is refused: the path ends.
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
    fn bad_names_are_refused() {
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
