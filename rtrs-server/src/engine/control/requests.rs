//! Scheduling of client requests on the control shard (`backlog.rs`).

use rtrs_core::wire::errno;

use super::Control;
use super::backlog::{self, Asker, Waiting};
use super::discover::{PageRequest, SLICE, Step, Tables};
use crate::engine::ctx::Ctx;
use crate::engine::message::{ControlAnswer, ControlRequest};

impl Control {
    /// Serves as many client requests as fit into a turn. Returns whether any were queued.
    pub(super) fn serve_backlog(&mut self, ctx: &mut Ctx<'_>) -> bool {
        let busy = !self.backlog.is_empty();
        self.backlog.begin_turn();
        while busy
            && !self.backlog.is_turn_full()
            && let Some((asker, waiting)) = self.backlog.take()
        {
            self.backlog.spend(backlog::cost(&waiting.request));
            let reply_to = waiting.reply_to;
            let answer = match waiting.request {
                ControlRequest::Discover { .. } => self.discover(asker, waiting),
                request => self.request(reply_to, request, ctx),
            };
            answer.into_iter().for_each(|answer| reply_to.answer(answer, ctx.out));
        }
        self.backlog.begin_turn();
        busy
    }

    /// Answers a DISCOVER, or puts it back until more exports have been visited.
    fn discover(&mut self, asker: Asker, mut waiting: Waiting) -> Option<ControlAnswer> {
        let ControlRequest::Discover { after, room } = &waiting.request else { return None };
        let session = self.registry.path(waiting.reply_to.path)?.shared().session.id;
        if !self.params.discovery {
            return Some(ControlAnswer::Refused(errno::EINVAL));
        }
        if self.evicted.contains(session) {
            return Some(ControlAnswer::Refused(errno::ESTALE));
        }
        let request = PageRequest { session, after, room: *room };
        let tables =
            Tables { exports: &self.exports, opens: &self.opens, registry: &self.registry };
        match self.lists.page(&request, waiting.draft.take(), tables) {
            Step::Answer(answer) => Some(answer),
            Step::Again(draft) => {
                waiting.draft = Some(draft);
                self.backlog.spend(u32::from(SLICE));
                self.backlog.put_back(asker, waiting);
                None
            }
        }
    }

    /// Whether client requests have used up the time of this turn.
    pub fn is_turn_full(&self) -> bool {
        self.backlog.is_turn_full()
    }
}
