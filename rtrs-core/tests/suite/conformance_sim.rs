//! Runs the conformance suite for the simulated provider with all options: completions at departure
//! or at acknowledgement, binds effective immediately or at their completion, slow links with
//! jitter.

use std::net::SocketAddr;

use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::conformance::{Harness, Side, run_all};
use rtrs_core::fabric::sim::{BindMode, LinkOptions, SimFabric, World, WorldOptions, sim_ip};
use rtrs_core::prng::{Prng, Ratio};
use rtrs_core::time::{Duration, Instant};

struct Sim {
    world: World,
    a: SimFabric,
    b: SimFabric,
    second: SimFabric,
}

impl Sim {
    fn new(seed: u64, options: WorldOptions) -> Self {
        let world = World::with_options(seed, options);
        let (listener, connector) = (world.node(sim_ip(1)), world.node(sim_ip(2)));
        let (a, second) = (world.fabric(listener), world.fabric(listener));
        let b = world.fabric(connector);
        Self { world, a, b, second }
    }
}

impl Harness for Sim {
    fn now(&self) -> Instant {
        self.world.now()
    }

    fn step(&mut self) {
        if !self.world.step() {
            self.world.advance_to(self.world.now() + Duration::from_millis(1));
        }
    }

    fn fabric(&mut self, side: Side) -> Option<&mut dyn Fabric> {
        Some(match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
            Side::SecondA => &mut self.second,
        })
    }

    fn listen_address(&self) -> SocketAddr {
        SocketAddr::new(sim_ip(1), 0)
    }

    fn refusing_address(&mut self) -> SocketAddr {
        SocketAddr::new(sim_ip(1), 9)
    }

    fn silent_address(&mut self) -> Option<SocketAddr> {
        Some(SocketAddr::new(sim_ip(99), 9))
    }
}

mod like_iwarp {
    use super::{Sim, WorldOptions};

    fn make() -> Sim {
        Sim::new(1, WorldOptions::default())
    }

    rtrs_core::fabric_conformance!(make);
}

mod like_verbs {
    use super::{BindMode, Sim, WorldOptions};

    fn make() -> Sim {
        let (bind, bounces) = (BindMode::Pending, true);
        Sim::new(2, WorldOptions { acknowledged: true, bind, bounces, ..WorldOptions::default() })
    }

    rtrs_core::fabric_conformance!(make);
}

mod slow_and_uneven {
    use super::{BindMode, Duration, LinkOptions, Sim, WorldOptions};

    fn make() -> Sim {
        let link = LinkOptions {
            delay: Duration::from_micros(200),
            jitter: Duration::from_millis(3),
            bandwidth: Some(4_000_000_000),
            detect: None,
        };
        let bind = BindMode::Pending;
        Sim::new(3, WorldOptions { link, bind, buffered_max: 64 << 10, ..Default::default() })
    }

    rtrs_core::fabric_conformance!(make);
}

#[test]
fn conformance_holds_for_many_seeds_and_behaviors() {
    for seed in 0..40 {
        let mut prng = Prng::new(seed);
        let link = LinkOptions {
            delay: prng.duration(Duration::ZERO..=Duration::from_micros(500)),
            jitter: prng.duration(Duration::ZERO..=Duration::from_millis(2)),
            bandwidth: prng.chance(Ratio::new(1, 2)).then(|| prng.range(1 << 30..=1 << 34)),
            detect: None,
        };
        let pending = prng.chance(Ratio::new(1, 2));
        let options = WorldOptions {
            acknowledged: prng.chance(Ratio::new(1, 2)),
            bind: if pending { BindMode::Pending } else { BindMode::Done },
            link,
            buffered_max: 1 << prng.range(10..=24),
            ..WorldOptions::default()
        };
        run_all(&mut || Box::new(Sim::new(seed, options.clone())));
    }
}
