//! Start of requests that rate limits of exports have delayed (`delayed.rs`).

use super::Shard;
use super::pipeline::Step;
use super::request::{Reply, State, Wait};
use super::table::PathRow;
use crate::engine::ctx::Ctx;
use crate::export::ExportIndex;

impl Shard {
    /// Starts requests that the limits of an export no longer delay: at least one per turn, and no
    /// more once the turn is full. Returns whether there were any.
    pub(super) fn start_released(&mut self, export: ExportIndex, ctx: &mut Ctx<'_>) -> bool {
        let mut any = false;
        while let Some(released) = self.devices.next_released(export, ctx.now) {
            any = true;
            self.step(released, None, ctx, start);
            if self.devices.is_turn_full() {
                break;
            }
        }
        any
    }

    /// Starts all delayed requests of a path that is finishing.
    pub(super) fn release_path(&mut self, path: PathRow, ctx: &mut Ctx<'_>) {
        for released in self.devices.remove_delayed(path, ctx.now) {
            self.step(released, None, ctx, start);
        }
    }
}

/// Starts a request that was `Throttled`, or drops it if its path is broken.
fn start(step: &mut Step<'_>, ctx: &mut Ctx<'_>) {
    match *step.path.requests[step.at.permit].get() {
        State::Io(request, Wait::Throttled, io) if step.path.may_begin() => {
            // The size of the device may have changed meanwhile.
            match step.open_device(io.export) {
                Ok(()) => step.start(request, io, ctx),
                Err(errno) => step.finish(request, Reply::to_io(errno, &io), ctx),
            }
        }
        State::Io(_, Wait::Throttled, _) => step.release(ctx.out),
        _ => step.path.internal_error("a request waits for limits in a wrong state", ctx.out),
    }
}
