//! Control socket of an attached session.
//!
//! The socket is served off the IO path, on its own thread (`rtrs_core::local`), which queries the
//! shards by message. A change to a path or to the policy is validated and begun immediately. The
//! command then polls `status` until the change is complete, so that the control socket can serve
//! other commands in the meantime.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use rtrs_core::local::{ControlSocket, reply};
use rtrs_core::settings::{Portal, SettingValues};
use rtrs_core::time::Duration;

use super::config::random_uuid;
use super::events::Wake;
use super::fabrics::{FabricRegistry, path_target};
use super::launch::ShardHandle;
use super::metrics;
use super::report::{self, Identity};
use super::roster::Roster;
use super::waiting::{Add, Detach};
use crate::control_protocol::{Changed, Leave, Request};
use crate::engine::{Change, Leaving, Reported};
use crate::frontend::FrontEndClient;
use crate::plan::{path_name, resolve};

/// Maximum number of clients named in an error.
const CLIENTS_NAMED: usize = 8;

/// Context of the requests to a volume's control socket: the volume and its session.
pub(crate) struct Session {
    pub(crate) identity: Identity,
    pub(crate) shards: ShardHandle,
    pub(crate) registry: Arc<FabricRegistry>,
    pub(crate) roster: Arc<Roster>,
    /// Receives every detach and every added volume.
    pub(crate) wakes: mpsc::Sender<Wake>,
}

pub(crate) fn serve(control: &ControlSocket, session: Session) -> io::Result<()> {
    control.serve(move |request, stream| session.handle(&request, stream))
}

impl Session {
    fn handle(&self, request: &Request, stream: UnixStream) {
        let leaving = |leave: &Leave| Leaving {
            path: path_name(&leave.path),
            within: Duration::from_millis(leave.within_ms),
            force: leave.force,
        };
        let change = match request {
            Request::Status => {
                let reports = self.shards.reports(Reported::One(self.identity.index));
                let status = report::status(&self.identity, &self.roster.names(), &reports);
                return reply(&stream, Ok(status));
            }
            Request::Stats { times } => {
                let reports = self.shards.reports(Reported::One(self.identity.index));
                let stats = report::stats(&self.identity, &reports, *times);
                return reply(&stream, Ok(stats));
            }
            Request::Metrics => {
                let (names, reports) = (self.roster.names(), self.shards.reports(Reported::All));
                let samples = metrics::samples(&self.identity, &names, &reports);
                return reply(&stream, Ok(samples));
            }
            Request::Detach { within_ms, force } => {
                let permitted = if *force { Ok(()) } else { self.refuse_if_served() };
                return match permitted {
                    Ok(()) => self.detach(stream, *within_ms),
                    Err(why) => reply::<()>(&stream, Err(why)),
                };
            }
            Request::VolumeAdd { name, settings } => {
                let (name, settings) = (name.clone(), settings.clone());
                return self.pass_on(Wake::Add(Add { name, settings, stream }));
            }
            Request::PathAdd { path, replaces } => self.addition(path, replaces),
            Request::PathRemove(leave) => Ok(Change::Remove(leaving(leave))),
            Request::PathDisconnect(leave) => Ok(Change::Disconnect(leaving(leave))),
            Request::PathReconnect(leave) => Ok(Change::Reconnect(leaving(leave))),
            Request::PathSwitch => {
                Ok(Change::SwitchVolume { export: self.identity.export.clone() })
            }
            Request::Get => {
                let mut settings = self.roster.values(&self.identity.name, &self.registry);
                report::set_paths(&mut settings, &self.shards.reports(Reported::None));
                return reply(&stream, Ok(SettingValues { settings }));
            }
            Request::Set { settings } => return reply(&stream, self.set(settings)),
            Request::Policy { policy } => {
                let settings = BTreeMap::from([("policy".to_owned(), policy.to_string())]);
                return reply(&stream, self.set(&settings));
            }
        };
        let changed = change.and_then(|change| self.shards.change(change));
        reply(&stream, changed.map(|()| Changed { changed: true }));
    }

    fn set(&self, settings: &BTreeMap<String, String>) -> Result<Changed, String> {
        self.roster.change(&self.identity.name, settings, &self.shards)?;
        for (name, value) in settings {
            tracing::info!("{name} set to {value}");
        }
        Ok(Changed { changed: true })
    }

    /// Refuses a detach that would cut the connections of NBD clients. While another detach is in
    /// progress, every detach is accepted: the new one may allow less time.
    fn refuse_if_served(&self) -> Result<(), String> {
        let (name, clients) = (&self.identity.name, self.shards.clients(self.identity.index));
        if self.identity.ending.load(Ordering::Relaxed) {
            return Ok(());
        }
        match clients {
            Some(clients) if clients.is_empty() => Ok(()),
            Some(clients) => Err(served_to(name, &clients)),
            None => Err(format!(
                "{name:?} may be in use: a shard does not answer; try again, or use --force, which \
                 ends the connections of its clients"
            )),
        }
    }

    /// Passes the detach on; `status` still works until the volume has ended.
    fn detach(&self, stream: UnixStream, within_ms: u64) {
        let (name, within) = (self.identity.name.clone(), Duration::from_millis(within_ms));
        self.pass_on(Wake::Detach(Detach { name, within, stream }));
    }

    /// Passes a request to the main thread, which replies.
    fn pass_on(&self, wake: Wake) {
        if let Err(mpsc::SendError(wake)) = self.wakes.send(wake) {
            let ending = "the session is ending";
            match wake {
                Wake::Detach(Detach { name, stream, .. }) => {
                    reply::<()>(&stream, Err(format!("{name}: {ending}")));
                }
                Wake::Add(add) => add.reply(Err(ending.into())),
                _ => {}
            }
        }
    }

    fn addition(&self, path: &str, replaces: &[String]) -> Result<Change, String> {
        let portal: Portal = path.parse().map_err(|e| format!("path {path:?}: {e}"))?;
        portal.check_connect().map_err(|e| e.to_string())?;
        self.registry.open(portal.scheme())?;
        let provider = self.shards.provide(portal.scheme())?;
        let of_path = self.roster.of_path(portal.scheme());
        let (invalidate_reads, heartbeat) = of_path.ok_or("the session is ending")?;
        let found = resolve(&portal).map_err(|why| why.to_string())?;
        let target = path_target(&portal, Ok(found), provider, invalidate_reads, heartbeat);
        let uuid = random_uuid().map_err(|e| format!("cannot get random numbers: {e}"))?;
        Ok(Change::Add { target, uuid, replaces: replaces.to_vec() })
    }
}

/// Error for a volume with connected clients.
fn served_to(name: &str, clients: &[FrontEndClient]) -> String {
    let mut users: Vec<String> =
        clients.iter().take(CLIENTS_NAMED).map(FrontEndClient::describe).collect();
    if clients.len() > CLIENTS_NAMED {
        users.push(format!("and {} more", clients.len() - CLIENTS_NAMED));
    }
    let users = users.join(", ");
    match clients {
        [FrontEndClient::Machine(_)] => {
            format!(
                "{name:?} is used by a virtual machine: {users}; stop it first, or use --force, \
                 which removes its disk"
            )
        }
        _ => format!(
            "{name:?} is served to NBD clients: {users}; end them first, or use --force, which \
             ends their connections"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn connected_clients_are_named() {
        let client = |port: u16| FrontEndClient::Address(SocketAddr::from(([10, 0, 0, 7], port)));
        let clients: Vec<FrontEndClient> = (1..=10).map(client).collect();
        assert_eq!(
            served_to("vol1", &clients[..2]),
            "\"vol1\" is served to NBD clients: 10.0.0.7:1, 10.0.0.7:2; end them first, or use \
             --force, which ends their connections"
        );
        assert!(served_to("vol1", &clients).contains("10.0.0.7:8, and 2 more; end them first"));
        assert_eq!(
            served_to("vol1", &[FrontEndClient::Machine(None)]),
            "\"vol1\" is used by a virtual machine: unknown; stop it first, or use --force, which \
             removes its disk"
        );
    }
}
