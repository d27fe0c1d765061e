//! The limit on open descriptors: raised at startup, and compared with what the session needs.
//!
//! A process without free descriptors cannot accept NBD clients or connect paths, so an attach
//! fails if the limit is below the session's minimum.

use rtrs_core::rt::raise_open_files;

use crate::error::{Error, ErrorKind};
use crate::plan::AttachPlan;

/// Number of descriptors of the process: standard streams, log, lock, signals, control socket, one
/// request on that socket, network changes.
const PROCESS: u64 = 14;
/// Number of descriptors of a shard: ring, mailbox, timer.
const SHARD: u64 = 3;
/// Number of descriptors of a volume: its listening socket, and one NBD client.
const VOLUME: u64 = 2;

/// Sizes of a session that determine how many descriptors it needs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    shards: u64,
    paths: u64,
    volumes: u64,
}

impl Sizes {
    /// Minimum number of descriptors. A path over TCP has one connection per shard, plus one.
    fn least(self) -> u64 {
        let Self { shards, paths, volumes } = self;
        PROCESS + shards * SHARD + paths * (shards + 1) + volumes * VOLUME
    }
}

/// Explains why a limit is too low; None if it is sufficient.
fn shortage(sizes: Sizes, limit: u64) -> Option<String> {
    let Sizes { shards, paths, volumes } = sizes;
    let least = sizes.least();
    (limit < least).then(|| {
        format!(
            "the limit of open files is {limit}, but this session needs {least} (paths: {paths}, \
             shards: {shards}, volumes: {volumes}), and one more for each further NBD client; \
             raise the hard limit (ulimit -Hn, LimitNOFILE= in a systemd unit), or use fewer shards"
        )
    })
}

/// Raises the limit on open descriptors.
///
/// # Errors
/// The limit is too low for the session.
pub(super) fn prepare(plan: &AttachPlan) -> Result<(), Error> {
    let limit = match raise_open_files() {
        Ok(limit) => limit,
        Err(error) => {
            tracing::warn!(%error, "cannot raise the limit of open files");
            return Ok(());
        }
    };
    let sizes = Sizes {
        shards: plan.session.shards().into(),
        paths: plan.session.settings.path.len() as u64,
        volumes: plan.volumes().count() as u64,
    };
    tracing::debug!(limit, least = sizes.least(), "open files");
    shortage(sizes, limit).map_or(Ok(()), |text| Err(Error::new(ErrorKind::System, text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_minimum_is_refused_with_the_minimum() {
        let sizes = Sizes { shards: 4, paths: 2, volumes: 1 };
        // 14 + 4 x 3 + 2 x 5 + 2.
        assert_eq!((sizes.least(), shortage(sizes, 38)), (38, None));
        let text = shortage(sizes, 37).unwrap();
        assert!(text.starts_with("the limit of open files is 37, but this session needs 38 ("));
        assert!(text.contains("(paths: 2, shards: 4, volumes: 1)"), "{text}");
    }
}
