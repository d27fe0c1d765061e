//! Many unproved paths from an attacker who knows the UUIDs of a session and its paths. They
//! connect before and after the session's client, with the numbers of the client's next connections
//! and a different queue depth, and stay for as long as the server allows.

use std::net::{IpAddr, SocketAddr};

use rtrs_core::fabric::sim::{NodeId, World};
use rtrs_core::fabric::{FabricEvent, PdUse};
use rtrs_core::prng::Prng;
use rtrs_core::tests::{PathOptions, PlayedClient};
use rtrs_core::time::{Duration, Instant};
use rtrs_core::wire::ClientExtensions;

/// Maximum number of unproved paths at a time, which is more than a session has room for.
const PATHS_MAX: usize = 48;
/// Maximum pause before the next path.
const PAUSE_MAX: Duration = Duration::from_millis(20);

struct Member {
    played: PlayedClient,
    introduced: bool,
}

/// All unproved paths of the attacker.
pub(super) struct Crowd {
    node: NodeId,
    from: [IpAddr; 2],
    server: SocketAddr,
    session: u8,
    /// UUIDs of the paths of the session's client.
    uuids: [u8; 2],
    members: Vec<Member>,
    next_at: Instant,
    count: u64,
}

impl Crowd {
    /// Creates the crowd of paths for this session, from two addresses of a node to a server.
    pub(super) fn new(
        node: NodeId,
        from: [IpAddr; 2],
        server: SocketAddr,
        session: u8,
        uuids: [u8; 2],
    ) -> Self {
        let (members, next_at) = (Vec::new(), Instant::ZERO);
        Self { node, from, server, session, uuids, members, next_at, count: 0 }
    }

    /// Returns when the next path connects.
    pub(super) fn next_at(&self) -> Instant {
        self.next_at
    }

    /// Returns the number of paths that introduced themselves and were asked to prove their
    /// identity.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Advances all paths. Returns whether anything happened.
    pub(super) fn turn(&mut self, world: &World, prng: &mut Prng) -> bool {
        let now = world.now();
        let mut any = false;
        for Member { played, introduced } in &mut self.members {
            any |= played.fabric.poll(now);
            played.drain();
            let established = |event: &FabricEvent| match event {
                FabricEvent::Established { qp, .. } => Some(*qp),
                _ => None,
            };
            let qp = played.events.iter().find_map(established).filter(|_| !*introduced);
            if let Some(qp) = qp {
                *introduced = played.asked(qp, false) == Some(Ok(())) && played.proof_wanted;
                self.count += u64::from(*introduced);
                played.introduce("crowd");
                any = true;
            }
        }
        let ended = |event: &FabricEvent| {
            matches!(event, FabricEvent::Closed { .. } | FabricEvent::ConnectFailed { .. })
        };
        self.members.retain(|member| !member.played.events.iter().any(ended));
        if now < self.next_at {
            return any;
        }
        self.next_at = now + prng.duration(Duration::ZERO..=PAUSE_MAX);
        if self.members.len() >= PATHS_MAX {
            self.members.remove(0);
        }
        let played = self.connect(world, prng);
        self.members.push(Member { played, introduced: false });
        true
    }

    fn connect(&self, world: &World, prng: &mut Prng) -> PlayedClient {
        let mut draw = |below: u8| u8::try_from(prng.below(below.into())).expect("below a u8");
        let path = match draw(3) {
            0 => 0x80 + draw(64),
            n => self.uuids[usize::from(n - 1)],
        };
        let extensions = ClientExtensions {
            authenticates: true,
            smaller_depth: true,
            queue_depth: 4 * u16::from(draw(5)),
            ..ClientExtensions::default()
        };
        let options = PathOptions {
            cid_num: 1,
            recon_cnt: 1 + u16::from(draw(4)),
            extensions,
            ..PathOptions::new(self.session, path)
        };
        let from = self.from[usize::from(draw(2))];
        let clock = world.clone();
        let fabric = Box::new(world.fabric(self.node));
        let pd = PdUse::Connect { local: None, remote: self.server };
        let mut played = PlayedClient::new(fabric, pd, options, move || clock.now());
        played.ask(from, self.server, &options.request(0).encode());
        played
    }
}
