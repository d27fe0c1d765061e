//! Volumes of a session with their current settings, shared by its threads.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rtrs_core::logging::change_filter;
use rtrs_core::settings::{AutoSwitch, Scheme, SettingValue};

use super::config::tuning;
use super::fabrics::{FabricRegistry, schemes};
use super::launch::ShardHandle;
use super::report::Identity;
use super::saved::SavedVolume;
use crate::engine::{Change, HeartbeatSettings};
use crate::plan::{AttachPlan, SessionPlan};

/// Settings from which the transports' timeout is computed when a session is attached.
const OF_TRANSPORT: [&str; 3] = ["connect-timeout", "heartbeat", "heartbeat-missed-max"];

/// Describes the transport timeouts in use if a new attach would use different ones.
fn transport_note(plan: &SessionPlan, registry: &FabricRegistry) -> Option<String> {
    let kept = schemes(plan).into_iter().filter_map(|scheme| {
        let in_use = registry.transport_timeout(scheme);
        let is_kept = in_use != plan.transport_timeout_of(scheme);
        is_kept.then(|| format!("{scheme}:// stays {} ms", in_use.as_millis()))
    });
    let kept: Vec<String> = kept.collect();
    let of = kept.join(", of ");
    (!kept.is_empty()).then(|| format!("the transport timeout of {of} until detach"))
}

#[derive(Debug)]
struct Member {
    identity: Identity,
    plan: AttachPlan,
}

/// Volumes, in the order in which they were attached.
#[derive(Debug, Default)]
pub(crate) struct Roster(Mutex<Vec<Member>>);

impl Roster {
    pub(crate) fn add(&self, identity: Identity, plan: AttachPlan) {
        self.0.lock().push(Member { identity, plan });
    }

    pub(crate) fn remove(&self, name: &str) {
        self.0.lock().retain(|member| member.identity.name != name);
    }

    /// Names of all volumes.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().iter().map(|member| member.identity.name.clone()).collect()
    }

    /// Identities of all volumes.
    pub(crate) fn identities(&self) -> Vec<Identity> {
        self.0.lock().iter().map(|member| member.identity.clone()).collect()
    }

    /// Volume that has been attached the longest, with its current settings.
    pub(crate) fn first(&self) -> Option<(AttachPlan, Identity)> {
        self.0.lock().first().map(|member| (member.plan.clone(), member.identity.clone()))
    }

    /// Saved state of a volume that shares the session.
    pub(crate) fn saved(&self, name: &str) -> Option<SavedVolume> {
        let members = self.0.lock();
        let plan = &members.iter().find(|member| member.identity.name == name)?.plan;
        let (session, settings) = (plan.session.session_name.clone(), plan.own());
        Some(SavedVolume { session, name: name.to_owned(), settings })
    }

    /// Settings of a volume. Those that differ from the ones that the transports use have a note.
    pub(crate) fn values(&self, name: &str, registry: &FabricRegistry) -> Vec<SettingValue> {
        let members = self.0.lock();
        let member = members.iter().find(|member| member.identity.name == name);
        let Some(member) = member else { return Vec::new() };
        let mut values = member.plan.values();
        let note = transport_note(&member.plan.session, registry);
        let of_transport = values.iter_mut().filter(|one| OF_TRANSPORT.contains(&&*one.name));
        of_transport.for_each(|one| one.note.clone_from(&note));
        values
    }

    /// Settings for an added path of this scheme.
    pub(crate) fn of_path(&self, scheme: Scheme) -> Option<(AutoSwitch, HeartbeatSettings)> {
        let members = self.0.lock();
        let session = &members.first()?.plan.session;
        Some((session.settings.invalidate_reads, session.own_heartbeat(scheme)))
    }

    /// Changes all of these session settings, or none. `name` is the volume in the request.
    ///
    /// # Errors
    /// Names the value that does not suit one of the volumes.
    pub(crate) fn change(
        &self,
        name: &str,
        settings: &BTreeMap<String, String>,
        shards: &ShardHandle,
    ) -> Result<(), String> {
        // Held until the change has begun: if two callers race, the later one's values take effect.
        let mut members = self.0.lock();
        let changed = |member: &Member| {
            member.plan.changed(settings).map_err(|error| {
                let text = error.chain().to_string();
                let own = &member.identity.name;
                if own == name { text } else { format!("{own}, of the same session: {text}") }
            })
        };
        let plans: Vec<AttachPlan> = members.iter().map(changed).collect::<Result<_, _>>()?;
        let Some(first) = plans.first() else { return Err("the session is ending".into()) };
        let log = &first.session.settings.log;
        if members.first().is_some_and(|member| member.plan.session.settings.log != *log) {
            change_filter(log)?;
        }
        shards.change(Change::Tune(Box::new(tuning(&first.session))))?;
        for (member, plan) in members.iter_mut().zip(plans) {
            member.plan = plan;
        }
        Ok(())
    }
}
