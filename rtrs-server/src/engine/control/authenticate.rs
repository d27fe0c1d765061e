//! Results of CHALLENGE and AUTH (`proofs.rs`): clients authenticate separately on each path.
//!
//! The [`Authenticator`](crate::engine::authenticator) creates and verifies signatures, and its
//! results arrive as messages. A proof is checked against the access lists and keys when the path
//! is admitted, as for a TLS connection. A reconnecting path replaces its predecessor once it has
//! authenticated. The answer to its AUTH waits until the shards have stopped serving the
//! predecessor, and thus acts as a fence, like the answer to any reconnecting path.

use std::sync::Arc;

use rtrs_core::fabric::{PeerIdentity, Who};
use rtrs_core::ids::SessionId;
use rtrs_core::limits::PATHS_PER_SESSION_MAX;
use rtrs_core::wire::{Name, errno};

use super::Control;
use super::connect::route_of;
use super::info::{end_others, name_taken, refuse_name};
use super::path::Path;
use super::permission::check_proof;
use super::refusal::Refusal;
use crate::access_list::Client;
use crate::engine::authenticator::{ProofDone, ProofResult};
use crate::engine::ctx::Ctx;
use crate::engine::message::{ControlAnswer, ReplyTo};
use crate::path::{PathEnd, PathKey};

impl Control {
    /// Processes the result of a signature operation, unless its path has ended since.
    pub(super) fn proof_done(&mut self, done: ProofDone, ctx: &mut Ctx<'_>) {
        let ProofDone { reply_to, result } = done;
        let key = reply_to.path;
        let path = self.registry.path_mut(key).filter(|path| !path.state().is_ending());
        let Some(proving) = path.and_then(Path::proving_mut) else { return };
        match result {
            Ok(ProofResult::Proved(answer, exchange)) => {
                proving.challenged(exchange);
                reply_to.answer(ControlAnswer::Challenged(answer), ctx.out);
            }
            Ok(ProofResult::Checked(identity)) => match self.admit_proof(key, &identity) {
                Ok(()) => self.proved(key, identity, reply_to, ctx),
                Err(refusal) => self.refuse_proof(reply_to, &identity.who, &refusal, ctx),
            },
            Err(why) => {
                let refusal = Refusal::Unproved(why);
                self.refuse_proof(reply_to, &Who::Anonymous, &refusal, ctx);
            }
        }
    }

    /// Refuses a proof. `who` is the proven identity, if any.
    fn refuse_proof(&mut self, reply_to: ReplyTo, who: &Who, refusal: &Refusal, ctx: &mut Ctx<'_>) {
        let Some(path) = self.registry.path_mut(reply_to.path) else { return };
        let peer = path.shared().origin.peer;
        path.proving_mut().into_iter().for_each(|proving| proving.failed());
        if let Refusal::Unproved(why) = refusal {
            self.log.authentication_failed(ctx.now, peer, why);
        } else {
            self.log.refused.count(refusal.reason());
            self.log.refused(ctx.now, peer, who, refusal);
        }
        let errno = match refusal {
            Refusal::NameTaken(_) => errno::EEXIST,
            _ => errno::EACCES,
        };
        reply_to.answer(ControlAnswer::Refused(errno), ctx.out);
    }

    /// Checks whether the authenticated client may use this path.
    fn admit_proof(&self, key: PathKey, identity: &PeerIdentity) -> Result<(), Refusal> {
        let path = self.registry.path(key).ok_or(Refusal::PathExists)?;
        let id = path.shared().session.id;
        let client = Client::of(&identity.who, path.shared().origin.peer, id);
        if self.evicted.contains(id) {
            return Err(Refusal::Evicted(self.params.eviction_key.secret(id)));
        }
        check_proof(&self.exports, identity, client, id, &self.registry)?;
        // The session began with other limits, while its client was unknown.
        let session = self.registry.session(id).ok_or(Refusal::PathExists)?;
        if session.shared().who().is_some() && !session.is_of(path) {
            return Err(Refusal::PathExists);
        }
        // The client has since reconnected the path, so it no longer uses this connection attempt.
        let newer = |other: &Path| {
            path.is_older_than(other) && !other.is_unproved() && other.state().may_begin()
        };
        if self.registry.paths_of(id).any(newer) {
            return Err(Refusal::PathExists);
        }
        let origin = &path.shared().origin;
        let others = self.registry.paths_of(id).filter(|other| {
            let serves = !other.is_unproved() && other.state().may_begin();
            serves && other.shared().origin.uuid != origin.uuid
        });
        let others: Vec<&Path> = others.collect();
        if others.len() >= PATHS_PER_SESSION_MAX {
            return Err(Refusal::Paths(others.len()));
        }
        if others.iter().any(|other| route_of(&other.shared().origin) == route_of(origin)) {
            return Err(Refusal::SameAddresses);
        }
        self.connector.check_memory(session, others.len(), &self.registry)
    }

    /// Completes a client's authentication and closes the path's older connection attempts.
    fn proved(
        &mut self,
        key: PathKey,
        identity: PeerIdentity,
        reply_to: ReplyTo,
        ctx: &mut Ctx<'_>,
    ) {
        let Some(path) = self.registry.path_mut(key) else { return };
        let id = path.shared().session.id;
        if let Some(proving) = path.proving_mut() {
            proving.proved(identity, reply_to);
        }
        let Some(path) = self.registry.path(key) else { return };
        let older = self.registry.paths_of(id).filter(|other| other.is_older_than(path));
        let older = older.map(Path::key).collect();
        self.end_all(older, &PathEnd::Replaced, ctx);
        self.open_proved(id, ctx);
    }

    /// Opens the authenticated paths of a session whose older connection attempts can no longer
    /// begin any work.
    pub(super) fn open_proved(&mut self, id: SessionId, ctx: &mut Ctx<'_>) {
        let registry = &self.registry;
        let serves = |path: &Path| path.state().may_begin() && !path.is_unproved();
        let waits = |path: &&Path| {
            let older = |other: &Path| other.is_older_than(path) && serves(other);
            !path.state().is_ending()
                && path.proving().is_some_and(|proving| proving.waiting().is_some())
                && !registry.paths_of(id).any(older)
        };
        let ready: Vec<PathKey> = registry.paths_of(id).filter(waits).map(Path::key).collect();
        for key in ready {
            let path = self.registry.path(key).and_then(Path::proving);
            let proof = path.and_then(|proving| Some((proving.waiting()?, proving.name()?)));
            let Some(((identity, reply_to), name)) = proof else { continue };
            let identity = identity.clone();
            // Access lists and keys may have changed in the meantime.
            match self.admit_proof(key, &identity) {
                Ok(()) => self.open_path(key, identity, name, reply_to, ctx),
                Err(refusal) => self.refuse_proof(reply_to, &identity.who, &refusal, ctx),
            }
        }
    }

    fn open_path(
        &mut self,
        key: PathKey,
        identity: PeerIdentity,
        name: Name,
        reply_to: ReplyTo,
        ctx: &mut Ctx<'_>,
    ) {
        let Some(path) = self.registry.path_mut(key) else { return };
        let shared = Arc::clone(path.shared());
        if self.evicted.is_taken(name, shared.session.id, &self.registry) {
            // A client that supports refusals closes the path itself.
            if shared.origin.takes_info_refusals {
                let refusal = name_taken(self, name, shared.session.id, ctx);
                return self.refuse_proof(reply_to, &identity.who, &refusal, ctx);
            }
            return refuse_name(self, key, name, &identity.who, ctx);
        }
        if !shared.session.prove(&identity.who) || !shared.prove(identity) {
            tracing::error!(path = %key, "internal error: a client authenticated twice on a path");
            self.registry.count_internal_error();
            return;
        }
        let id = shared.session.id;
        self.registry.path_mut(key).into_iter().for_each(Path::end_proving);
        self.limiter.authenticated(&shared, self.connector.meter());
        self.registry.session_mut(id).into_iter().for_each(|session| session.adopt(&shared));
        self.registry.note_paths(id);
        let opened = shared.session.has_opened();
        shared.chunks.get().into_iter().for_each(|pool| pool.let_write(opened));
        end_others(self, id, ctx);
        self.log.proved(&shared, name);
        self.path_up(&shared, name, ctx);
        reply_to.answer(ControlAnswer::Done, ctx.out);
    }
}
