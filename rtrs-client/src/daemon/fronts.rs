//! Front ends of a shard: one for each device of the session.

use std::rc::Rc;

use rtrs_core::block::{BlockDevice, Geometry};
use rtrs_core::front_end::FrontEndStats;
use rtrs_core::ids::CoreIndex;
use rtrs_core::rt::Ring;
use rtrs_core::time::{Instant, earliest};

use super::endings::FrontsStopped;
use crate::engine::{ClientEngine, DeviceIndex};
use crate::frontend::{
    Complaint, FrontEnd, FrontEndClient, FrontEndPools, FrontRequest, FrontSocket, MakeFrontEnd,
    MemoryChange, Place,
};

/// Front end to be created on its shard.
pub(crate) struct NewFront {
    pub(crate) device: DeviceIndex,
    /// Name of the volume on this host, which clients of the front end request.
    pub(crate) name: String,
    pub(crate) make: MakeFrontEnd,
}

/// Progress of stopping a front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Serving.
    None,
    /// Finishing requests in flight until this deadline.
    Stopping(Instant),
    /// Stopped.
    Stopped,
}

/// Front end of a device.
struct Slot {
    device: DeviceIndex,
    name: String,
    front: Box<dyn FrontEnd>,
    /// Whether the front end has been given the device.
    opened: bool,
    end: End,
    /// Whether the front end was stopped individually and this has not been reported yet.
    is_awaited: bool,
    /// Number of the device's IOs that had not ended when the front end stopped.
    abandoned: usize,
    /// Whether clients may reconnect to the next process.
    may_return: bool,
}

impl Slot {
    fn stop(&mut self, deadline: Instant) {
        self.may_return |= self.front.may_clients_return();
        self.front.stop();
        if self.end != End::Stopped {
            self.end = End::Stopping(deadline);
        }
    }
}

pub(crate) struct Fronts {
    shard: CoreIndex,
    ring: Rc<Ring>,
    slots: Vec<Slot>,
    /// Front ends of removed devices, whose memory may still be written to.
    leaving: Vec<Box<dyn FrontEnd>>,
    pools: FrontEndPools,
}

/// Result of passing a device to a front end.
pub(crate) enum Opened {
    /// The front end has the device.
    Ready(DeviceIndex, Box<Geometry>),
    /// The front end cannot use the device.
    Failed(DeviceIndex, std::io::Error),
}

impl Fronts {
    pub(crate) fn new(shard: CoreIndex, ring: &Rc<Ring>, fronts: Vec<NewFront>) -> Self {
        let (slots, leaving, pools) = (Vec::new(), Vec::new(), FrontEndPools::default());
        let mut all = Self { shard, ring: Rc::clone(ring), slots, leaving, pools };
        fronts.into_iter().for_each(|front| all.add(front));
        all
    }

    /// Adds the front end for a new device.
    pub(crate) fn add(&mut self, NewFront { device, name, make }: NewFront) {
        let (opened, end, is_awaited, abandoned) = (false, End::None, false, 0);
        let (front, may_return) = (make(), false);
        let slot = Slot { device, name, front, opened, end, is_awaited, abandoned, may_return };
        self.slots.push(slot);
    }

    /// Removes the front end of a device. Its memory is reused only after its requests on the
    /// server have ended.
    pub(crate) fn remove(&mut self, device: DeviceIndex) {
        for mut slot in self.slots.extract_if(.., |slot| slot.device == device) {
            slot.front.stop();
            slot.front.abort();
            self.leaving.push(slot.front);
        }
    }

    fn get(&mut self, device: DeviceIndex) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.device == device)
    }

    /// Devices that have a front end.
    pub(crate) fn devices(&self) -> impl Iterator<Item = DeviceIndex> + Clone {
        self.slots.iter().map(|slot| slot.device)
    }

    /// Passes an opened device to the front end that is waiting for it.
    pub(crate) fn open_next(&mut self, now: Instant, engine: &ClientEngine) -> Option<Opened> {
        let waits = |slot: &&mut Slot| !slot.opened && slot.end == End::None;
        for slot in self.slots.iter_mut().filter(waits) {
            let Some(device) = engine.device(slot.device) else { continue };
            slot.opened = true;
            let geometry = Box::new(device.geometry().clone());
            let (shard, ring, pools) = (self.shard, &self.ring, &self.pools);
            let place = Place { shard, ring, pools, export: &slot.name };
            return Some(match slot.front.open(now, &place, device) {
                Ok(()) => Opened::Ready(slot.device, geometry),
                Err(error) => Opened::Failed(slot.device, error),
            });
        }
        None
    }

    /// Lets the front end of an open device accept clients.
    pub(crate) fn serve(&mut self, device: DeviceIndex) {
        let ring = Rc::clone(&self.ring);
        if let Some(slot) = self.get(device) {
            slot.front.serve(&ring);
        }
    }

    /// Passes a socket to the front end of a device.
    pub(crate) fn take_socket(&mut self, now: Instant, device: DeviceIndex, socket: FrontSocket) {
        if let Some(slot) = self.get(device) {
            slot.front.take_socket(now, socket);
        }
    }

    /// Passes a change of registered memory to the front end of a device.
    pub(crate) fn change_memory(&mut self, device: DeviceIndex, change: MemoryChange) {
        match self.get(device) {
            Some(slot) => slot.front.change_memory(change),
            None => change.reply(Err(std::io::ErrorKind::NotConnected.into())),
        }
    }

    /// Runs a turn of all front ends. Returns whether anything happened.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let any = self.slots.iter_mut().fold(false, |any, slot| slot.front.turn(now) | any);
        if self.leaving.is_empty() {
            return any;
        }
        let any = self.leaving.iter_mut().fold(any, |any, front| front.turn(now) | any);
        self.leaving.retain(|front| !front.is_idle());
        any
    }

    /// Whether a front end has input that no event of the ring reports.
    pub(crate) fn has_input(&self) -> bool {
        self.slots.iter().any(|slot| slot.front.has_input())
    }

    /// Prepares the front ends for sleep. Returns false if any has input.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.slots.iter_mut().all(|slot| slot.front.prepare_sleep())
    }

    /// Takes the next request that a front end has for the driver.
    pub(crate) fn next_request(&mut self) -> Option<(DeviceIndex, FrontRequest)> {
        let request = |slot: &mut Slot| Some((slot.device, slot.front.next_request()?));
        self.slots.iter_mut().find_map(request)
    }

    /// Time at which `turn` must be called even if nothing happens.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let leaving = self.leaving.iter().filter_map(|front| front.deadline()).min();
        self.slots.iter().fold(leaving, |at, slot| {
            let end = match slot.end {
                End::Stopping(deadline) => Some(deadline),
                End::None | End::Stopped => None,
            };
            earliest(earliest(at, slot.front.deadline()), end)
        })
    }

    /// Stops the front end of a device: it starts nothing new, and requests in flight finish until
    /// the deadline.
    pub(crate) fn stop(&mut self, device: DeviceIndex, deadline: Instant) {
        if let Some(slot) = self.get(device) {
            slot.is_awaited = true;
            slot.stop(deadline);
        }
    }

    /// Stops all front ends.
    pub(crate) fn stop_all(&mut self, deadline: Instant) {
        self.slots.iter_mut().for_each(|slot| slot.stop(deadline));
    }

    /// Checks the front ends that are stopping. Returns whether any has stopped.
    pub(crate) fn poll_stopping(&mut self, now: Instant, engine: &ClientEngine) -> bool {
        let mut any = false;
        for slot in &mut self.slots {
            let End::Stopping(deadline) = slot.end else { continue };
            // Includes IOs whose client has disconnected.
            let (over, running) = (now >= deadline, engine.device_inflight(slot.device));
            if over {
                slot.front.abort();
            }
            if over || (running == 0 && slot.front.is_idle()) {
                (slot.end, slot.abandoned) = (End::Stopped, running);
                any = true;
            }
        }
        any
    }

    /// Takes the next individually stopped front end.
    pub(crate) fn next_stopped(&mut self) -> Option<(DeviceIndex, FrontsStopped)> {
        let is_due = |slot: &&mut Slot| slot.is_awaited && slot.end == End::Stopped;
        let slot = self.slots.iter_mut().find(is_due)?;
        slot.is_awaited = false;
        let may_return = slot.may_return.then_some(slot.device).into_iter().collect();
        Some((slot.device, FrontsStopped { abandoned: slot.abandoned, may_return }))
    }

    /// Result of the front ends, once all have stopped.
    pub(crate) fn all_stopped(&self) -> Option<FrontsStopped> {
        let stopped = self.slots.iter().all(|slot| slot.end == End::Stopped);
        let left = self.slots.iter().filter(|slot| slot.may_return);
        let may_return = left.map(|slot| slot.device);
        stopped.then(|| FrontsStopped {
            abandoned: self.slots.iter().map(|slot| slot.abandoned).sum(),
            may_return: may_return.collect(),
        })
    }

    /// Counters for `stats`, by device.
    pub(crate) fn stats(&self) -> Vec<(DeviceIndex, FrontEndStats)> {
        self.slots.iter().map(|slot| (slot.device, slot.front.stats())).collect()
    }

    /// Complaints about clients, by device.
    pub(crate) fn complaints(&self) -> Vec<(DeviceIndex, Complaint)> {
        let complaint = |slot: &Slot| Some((slot.device, slot.front.complaint()?));
        self.slots.iter().filter_map(complaint).collect()
    }

    /// The device's clients whose connections a detach would cut.
    pub(crate) fn clients(&self, device: DeviceIndex) -> Vec<FrontEndClient> {
        let of_device = self.slots.iter().filter(|slot| slot.device == device);
        of_device.flat_map(|slot| slot.front.clients()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::engine::SessionDevice;

    /// State of a front end whose IO ends when the test says so.
    #[derive(Default)]
    struct Busy {
        running: Cell<bool>,
        aborted: Cell<bool>,
        turns: Cell<u32>,
        gone: Cell<bool>,
    }

    struct Front(Rc<Busy>);

    impl FrontEnd for Front {
        fn open(&mut self, _: Instant, _: &Place<'_>, _: SessionDevice) -> std::io::Result<()> {
            Ok(())
        }

        fn take_socket(&mut self, _: Instant, _: FrontSocket) {}

        fn turn(&mut self, _: Instant) -> bool {
            self.0.turns.set(self.0.turns.get() + 1);
            false
        }

        fn next_request(&mut self) -> Option<FrontRequest> {
            None
        }

        fn deadline(&self) -> Option<Instant> {
            None
        }

        fn stop(&mut self) {}

        fn abort(&mut self) {
            self.0.aborted.set(true);
        }

        fn is_idle(&self) -> bool {
            self.0.aborted.get() && !self.0.running.get()
        }
    }

    impl Drop for Front {
        fn drop(&mut self) {
            self.0.gone.set(true);
        }
    }

    #[test]
    fn a_front_end_without_its_device_stays_until_its_io_ends() {
        let ring = Ring::new(8).unwrap();
        let mut fronts = Fronts::new(CoreIndex(0), &ring, Vec::new());
        let busy = Rc::new(Busy::default());
        busy.running.set(true);
        let device = DeviceIndex::FIRST;
        fronts.slots.push(Slot {
            device,
            name: "v".into(),
            front: Box::new(Front(Rc::clone(&busy))),
            opened: true,
            end: End::None,
            is_awaited: false,
            abandoned: 0,
            may_return: false,
        });
        fronts.remove(device);
        assert_eq!(fronts.devices().count(), 0, "the number is free");
        for turns in 1..4 {
            fronts.turn(Instant::ZERO);
            assert_eq!((busy.turns.get(), busy.gone.get()), (turns, false), "its IO runs");
        }
        busy.running.set(false);
        fronts.turn(Instant::ZERO);
        assert!(busy.gone.get());
    }
}
