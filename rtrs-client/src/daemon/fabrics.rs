//! Fabric registry: creates the fabrics of a session's shards, and the path targets for portals.
//!
//! A shard has one fabric for each scheme that its session's paths use, in the order in which the
//! session began to use the schemes, which is the same on all shards. A path that is added to a
//! running session may need a new fabric.

use std::io;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rtrs_core::fabric::Fabric;
use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::fabric::rdma::{Rdma, RdmaOptions};
use rtrs_core::ids::ProviderIndex;
use rtrs_core::rt::Ring;
use rtrs_core::settings::{AutoSwitch, Host, Portal, Scheme};
use rtrs_core::tls::TlsEndpoint;

use crate::engine::{HeartbeatSettings, PathTarget, Resolved};
use crate::error::{Error, system};
use crate::plan::SessionPlan;
use crate::tls::TlsSources;

#[derive(Debug)]
pub(crate) struct FabricRegistry {
    /// Schemes of the session's initial paths.
    first: Vec<Scheme>,
    iwarp: IwarpOptions,
    shared: Arc<IwarpShared>,
    tls: TlsSources,
    endpoint: OnceLock<Arc<TlsEndpoint>>,
    rdma: OnceLock<Rdma>,
    connect_timeout: Duration,
    /// Transport timeout for paths over RDMA.
    path_timeout: Duration,
}

impl FabricRegistry {
    /// Creates a registry for the plan's paths. Opens RDMA only if a path needs it.
    ///
    /// # Errors
    /// Fails with [`ErrorKind::Path`](crate::error::ErrorKind) and the reason why RDMA cannot be
    /// used here.
    pub(crate) fn new(plan: &SessionPlan) -> Result<Self, Error> {
        let connect_timeout = plan.settings.connect_timeout.get();
        let rdma = OnceLock::new();
        if let Some(opened) = plan.open_rdma()? {
            rdma.get_or_init(|| opened);
        }
        let registry = Self {
            first: schemes(plan),
            iwarp: IwarpOptions {
                crc: plan.settings.crc.is_on(),
                user_timeout: Some(plan.transport_timeout_of(Scheme::Tcp)),
                ..IwarpOptions::default()
            },
            shared: IwarpShared::new(),
            tls: plan.tls_sources(),
            endpoint: OnceLock::new(),
            rdma,
            connect_timeout,
            path_timeout: plan.transport_timeout_of(Scheme::Rdma),
        };
        if registry.first.contains(&Scheme::Tls) {
            registry.open_tls()?;
        }
        Ok(registry)
    }

    /// Transport timeout for unacknowledged data, which is fixed when the session is attached.
    pub(crate) fn transport_timeout(&self, scheme: Scheme) -> Duration {
        match scheme {
            Scheme::Tcp | Scheme::Tls => self.iwarp.user_timeout.unwrap_or_default(),
            Scheme::Rdma => self.path_timeout,
        }
    }

    fn open_tls(&self) -> Result<(), Error> {
        if self.endpoint.get().is_none() {
            self.tls.check(&[])?;
            let opened = TlsEndpoint::client(self.tls.load()?);
            let opened = opened.map_err(system("cannot start a thread"))?;
            self.endpoint.get_or_init(|| opened);
        }
        Ok(())
    }

    /// Returns a shard's initial providers with their schemes.
    pub(crate) fn first(&self, ring: &Rc<Ring>) -> io::Result<Vec<(Scheme, Box<dyn Fabric>)>> {
        self.first.iter().map(|scheme| Ok((*scheme, self.make(*scheme, ring)?))).collect()
    }

    /// Makes sure that providers for a scheme can be created.
    pub(crate) fn open(&self, scheme: Scheme) -> Result<(), String> {
        if scheme == Scheme::Rdma && self.rdma.get().is_none() {
            let opened = Rdma::open().map_err(|missing| missing.to_string())?;
            self.rdma.get_or_init(|| opened);
        }
        if scheme == Scheme::Tls {
            self.open_tls().map_err(|error| error.chain().to_string())?;
        }
        Ok(())
    }

    /// Creates one shard's provider for a scheme.
    pub(crate) fn make(&self, scheme: Scheme, ring: &Rc<Ring>) -> io::Result<Box<dyn Fabric>> {
        let (shared, iwarp) = (Arc::clone(&self.shared), self.iwarp.clone());
        match (scheme, self.rdma.get()) {
            (Scheme::Tcp, _) => Ok(Box::new(IwarpFabric::new(ring, shared, iwarp))),
            (Scheme::Tls, _) => {
                let endpoint = self.endpoint.get().map(Arc::clone);
                let endpoint = endpoint.ok_or_else(|| io::Error::other("TLS was not opened"))?;
                Ok(Box::new(IwarpFabric::with_tls(ring, shared, iwarp, endpoint)?))
            }
            (Scheme::Rdma, Some(rdma)) => {
                let options = RdmaOptions {
                    startup_timeout: self.connect_timeout,
                    half_open_max: 1,
                    reads_max: 0,
                    path_timeout: Some(self.path_timeout),
                };
                rdma.fabric(ring, options).map_err(|e| io::Error::other(e.to_string()))
            }
            (Scheme::Rdma, None) => Err(io::Error::other("RDMA was not opened")),
        }
    }
}

/// Schemes that the plan's paths need, in the order of their first use.
pub(crate) fn schemes(plan: &SessionPlan) -> Vec<Scheme> {
    let mut schemes = Vec::with_capacity(2);
    for path in &plan.settings.path {
        if !schemes.contains(&path.scheme()) {
            schemes.push(path.scheme());
        }
    }
    schemes
}

/// Provider for a scheme on a shard that has one for each of `schemes`, in this order.
pub(crate) fn provider_of(schemes: &[Scheme], scheme: Scheme) -> Option<ProviderIndex> {
    let mut providers = ProviderIndex::all(schemes.len()).zip(schemes);
    providers.find(|(_, known)| **known == scheme).map(|(provider, _)| provider)
}

/// Returns a portal's target, with the addresses of its host or the reason why there are none.
/// `provider` is the index of the portal's scheme on all shards of the session.
pub(crate) fn path_target(
    portal: &Portal,
    found: Resolved,
    provider: ProviderIndex,
    invalidate_reads: AutoSwitch,
    heartbeat: HeartbeatSettings,
) -> PathTarget {
    let (remotes, unresolved) = match found {
        Ok(remotes) => (remotes, None),
        Err(why) => (Vec::new(), Some(why)),
    };
    let scheme = portal.scheme();
    let (name, transport) = (portal.to_string(), scheme.name());
    let invalidate_reads = match invalidate_reads {
        AutoSwitch::On => true,
        AutoSwitch::Off => false,
        // Costs a table entry over TCP, but two work requests and a wait over RDMA.
        AutoSwitch::Auto => scheme != Scheme::Rdma,
    };
    let local = portal.source();
    let peer_name = match portal.host() {
        Host::Name(name) if !name.contains(':') => Some(Arc::from(name.as_str())),
        _ => None,
    };
    PathTarget {
        peer_name,
        name,
        local,
        remotes,
        unresolved,
        transport,
        provider,
        invalidate_reads,
        heartbeat,
        // Over TLS, both ends are already authenticated; over TCP, nothing protects the result.
        proves: scheme == Scheme::Rdma,
    }
}
