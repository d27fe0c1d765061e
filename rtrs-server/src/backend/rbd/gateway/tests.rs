//! Tests of two gateways for one image on a cluster on this machine.

use std::sync::Arc;
use std::sync::mpsc;

use rtrs_core::block::{BlockSource, IoOp};
use rtrs_core::gateway::{Gateway, GatewayEvent};
use rtrs_core::ids::SessionId;
use rtrs_core::rt::Clock;
use rtrs_core::status::IoStatus;
use rtrs_core::tests::Ceph;
use rtrs_core::time::Duration;

use crate::backend::conformance::{Keeps, Rig, run as conforms};
use crate::backend::open_target;

const WAIT_MAX: Duration = Duration::from_secs(90);
const ONE: SessionId = SessionId([1; 16]);
const OTHER: SessionId = SessionId([2; 16]);

/// A gateway, and its notifications.
struct OpenGateway {
    source: Arc<dyn BlockSource>,
    events: mpsc::Receiver<GatewayEvent>,
}

impl OpenGateway {
    fn open(ceph: &Ceph, image: &str) -> Self {
        let spec = format!("rbd:rbd/{image},gateway,conf={}", ceph.conf()).parse().unwrap();
        let source = open_target(&spec).unwrap();
        let (say, events) = mpsc::channel();
        source.gateway().unwrap().on_change(Box::new(move |event| say.send(event).unwrap_or(())));
        Self { source, events }
    }

    fn gateway(&self) -> &dyn Gateway {
        self.source.gateway().unwrap()
    }

    fn expect(&self, event: GatewayEvent) {
        assert_eq!(self.events.recv_timeout(WAIT_MAX), Ok(event));
        assert_eq!(self.gateway().standing().active, event == GatewayEvent::Active);
    }

    fn take_over(&self, session: SessionId) -> u64 {
        self.gateway().take_over(session).unwrap();
        self.expect(GatewayEvent::Active);
        self.gateway().standing().term
    }
}

/// Returns the address of the client that holds an image's lock, such as "127.0.0.1:0/1234".
fn lock_holder(ceph: &Ceph, image: &str) -> String {
    let text = ceph.run("rbd", &["lock", "ls", image]);
    let address = text.split_whitespace().find(|word| word.contains(":0/"));
    address.unwrap_or_else(|| panic!("no holder in {text:?}")).into()
}

#[test]
fn a_standby_runs_no_io_and_an_active_gateway_conforms() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("gateway", 64);
    let gateway = OpenGateway::open(ceph, "gateway");
    assert_eq!(gateway.gateway().standing().term, 0);
    let mut rig = Rig::new(&*gateway.source, 0);
    assert_eq!(rig.write(0, &[1; 512]), IoStatus::Moved);
    let io = rig.transfer(IoOp::Read, 0, 0, 512);
    assert_eq!(rig.run(io), IoStatus::Moved);
    assert_eq!(gateway.take_over(ONE), 1);
    assert_eq!(gateway.gateway().take_over(ONE), Ok(()), "it is active");
    conforms(&gateway.source, Keeps::Data);
}

#[test]
fn a_gateway_that_lost_its_lock_writes_nothing_and_recovers() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("forced", 8);
    let (a, b) = (OpenGateway::open(ceph, "forced"), OpenGateway::open(ceph, "forced"));
    assert_eq!(a.source.identity(), b.source.identity());
    let (mut at_a, mut at_b) = (Rig::new(&*a.source, 0), Rig::new(&*b.source, 0));
    assert_eq!(a.take_over(ONE), 1);
    assert_eq!(at_a.write(0, &[1; 512]), IoStatus::Ok);
    assert_eq!(b.take_over(ONE), 2);
    assert_eq!(at_b.write(0, &[2; 512]), IoStatus::Ok);
    // Refused whether or not `a` has noticed.
    assert_eq!(at_a.write(0, &[3; 512]), IoStatus::Moved);
    a.expect(GatewayEvent::Standby);
    assert_eq!(at_b.read(0, 512), vec![2; 512]);
    // The next take-over by `a` may break the lock, because `a` has not broken one yet.
    let end = Clock.now() + WAIT_MAX;
    while a.gateway().take_over(ONE).is_err() || a.events.recv_timeout(WAIT_MAX).is_err() {
        assert!(Clock.now() < end, "a does not take over again");
    }
    assert_eq!(a.gateway().standing().term, 3);
    assert_eq!(at_a.read(0, 512), vec![2; 512]);
    assert_eq!(at_a.write(0, &[4; 512]), IoStatus::Ok);
    assert_eq!(at_b.write(0, &[5; 512]), IoStatus::Moved);
    assert_eq!(at_a.read(0, 512), vec![4; 512]);
}

#[test]
fn another_session_cannot_take_over_by_force() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("owned", 8);
    let (a, b) = (OpenGateway::open(ceph, "owned"), OpenGateway::open(ceph, "owned"));
    a.take_over(ONE);
    let mut at_a = Rig::new(&*a.source, 0);
    b.gateway().take_over(OTHER).unwrap();
    // Waits until the attempt is over.
    let end = Clock.now() + WAIT_MAX;
    while b.gateway().take_over(OTHER).is_err() {
        assert!(Clock.now() < end, "the attempt hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(at_a.write(0, &[1; 512]), IoStatus::Ok);
    assert!(!b.gateway().standing().active && a.gateway().standing().active);
    // Meanwhile another session writes.
    a.gateway().opened_by(OTHER);
    let end = Clock.now() + WAIT_MAX;
    while !b.gateway().standing().active {
        // Refused while the previous attempt is running.
        let _ = b.gateway().take_over(OTHER);
        assert!(Clock.now() < end, "b does not take over");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_released_lock_is_taken_without_force() {
    let Some(ceph) = Ceph::get() else { return };
    ceph.image("given", 8);
    let (a, b) = (OpenGateway::open(ceph, "given"), OpenGateway::open(ceph, "given"));
    a.take_over(ONE);
    let (mut at_a, mut at_b) = (Rig::new(&*a.source, 0), Rig::new(&*b.source, 0));
    assert_eq!(at_a.write(0, &[1; 512]), IoStatus::Ok);
    let (holder, begin) = (lock_holder(ceph, "given"), Clock.now());
    a.gateway().release(WAIT_MAX).unwrap();
    a.expect(GatewayEvent::Standby);
    // Two seconds later, `a` may take over again.
    if Clock.now().since(begin) < Duration::from_secs(1) {
        assert!(a.gateway().take_over(ONE).is_err(), "it has just left");
    }
    assert_eq!(at_a.write(0, &[3; 512]), IoStatus::Moved);
    assert_eq!(b.take_over(ONE), 2);
    assert_eq!(at_b.write(0, &[2; 512]), IoStatus::Ok);
    // Other tests on this cluster blocklist clients of their own.
    let blocklist = ceph.run("ceph", &["osd", "blocklist", "ls"]);
    assert!(!blocklist.contains(&holder), "{holder} is blocklisted: {blocklist}");
    b.gateway().release(WAIT_MAX).unwrap();
    b.expect(GatewayEvent::Standby);
    let end = Clock.now() + WAIT_MAX;
    while a.gateway().take_over(ONE).is_err() {
        assert!(Clock.now() < end);
        std::thread::sleep(Duration::from_millis(20));
    }
    a.expect(GatewayEvent::Active);
    assert_eq!(at_a.read(0, 512), vec![2; 512]);
}
