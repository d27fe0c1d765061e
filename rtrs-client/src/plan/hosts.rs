//! Resolution of the host names of paths, within a time limit.

use std::error::Error as _;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rtrs_core::settings::{Host, Portal};

use crate::engine::{Resolved, Unresolved};

/// Maximum time for the system's resolver at the start of a session. By default it tries a silent
/// name server for five seconds before trying the next.
const RESOLVE_TIME_MAX: Duration = Duration::from_secs(10);

/// Resolves the host of a path. Waits for the system's resolver if the host is a name, without a
/// limit.
pub(crate) fn resolve(path: &Portal) -> Resolved {
    path.resolve().map_err(|error| match error.source() {
        Some(source) => Unresolved(format!("{error}: {source}")),
        None => Unresolved(error.to_string()),
    })
}

/// Resolves the hosts of all paths concurrently; the results are in the order of the paths. A name
/// that takes too long is unresolved.
pub(crate) fn resolve_all(paths: &[Portal]) -> Vec<Resolved> {
    resolve_with(paths, RESOLVE_TIME_MAX, resolve)
}

fn resolve_with(
    paths: &[Portal],
    limit: Duration,
    look_up: impl Fn(&Portal) -> Resolved + Clone + Send + 'static,
) -> Vec<Resolved> {
    let deadline = Instant::now() + limit;
    let (answer, answers) = mpsc::channel();
    let mut all: Vec<Option<Resolved>> = paths.iter().map(|_| None).collect();
    for (at, path) in paths.iter().enumerate() {
        if matches!(path.host(), Host::Ip(_)) {
            all[at] = Some(resolve(path));
            continue;
        }
        let (answer, own, look_up) = (answer.clone(), path.clone(), look_up.clone());
        // The receiver is gone after the limit.
        let body = move || drop(answer.send((at, look_up(&own))));
        if let Err(error) = thread::Builder::new().name("rtrs-resolve".into()).spawn(body) {
            all[at] = Some(Err(unresolved(path, &error.to_string())));
        }
    }
    drop(answer);
    while all.contains(&None) {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((at, found)) = answers.recv_timeout(left) else { break };
        all[at] = Some(found);
    }
    let late = format!("no answer within {} s", limit.as_secs());
    let found = paths.iter().zip(all);
    found.map(|(path, found)| found.unwrap_or_else(|| Err(unresolved(path, &late)))).collect()
}

fn unresolved(path: &Portal, why: &str) -> Unresolved {
    Unresolved(format!("cannot resolve the host of {path}: {why}"))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn a_stuck_resolver_delays_only_its_own_path() {
        let path = |text: &str| text.parse::<Portal>().unwrap();
        let paths = [path("tcp://stuck.example:5"), path("tcp://127.0.0.1:6")];
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        let stuck = move |_: &Portal| {
            // Blocks until the end of the test.
            let _ = ended.lock().recv();
            Ok(Vec::new())
        };
        let found = resolve_with(&paths, Duration::from_millis(10), stuck);
        drop(end);
        let late = "cannot resolve the host of tcp://stuck.example:5: no answer within 0 s";
        assert_eq!(found[0], Err(Unresolved(late.to_owned())));
        assert_eq!(found[1], Ok(vec![SocketAddr::from(([127, 0, 0, 1], 6))]));

        let paths = [path("tcp://a.example:5"), path("tcp://b.example:6")];
        let address = |path: &Portal| SocketAddr::from(([10, 0, 0, 1], path.port()));
        let found =
            resolve_with(&paths, RESOLVE_TIME_MAX * 30, move |path| Ok(vec![address(path)]));
        assert_eq!(found, paths.iter().map(|path| Ok(vec![address(path)])).collect::<Vec<_>>());
    }
}
