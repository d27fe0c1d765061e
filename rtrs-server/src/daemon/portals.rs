//! Creates the providers for the configured portals.
//!
//! Defines [`Portals`]: the providers that a server needs, in the order of their indexes, and the
//! addresses they listen on. TCP is always available; RDMA is opened only when a portal requires
//! it, or when the portals are automatic and the host has a device. `serve.rs` creates them once
//! for the server; then each shard creates its providers, and shard 0 listens.

mod keys;
mod passed;

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rtrs_core::fabric::iwarp::{IwarpFabric, IwarpOptions, IwarpShared};
use rtrs_core::fabric::rdma::{Rdma, RdmaOptions};
use rtrs_core::fabric::{Fabric, FabricError};
use rtrs_core::local::{PassedSocket, check_tcp_address, passed_sockets};
use rtrs_core::rt::Ring;
use rtrs_core::settings::{PORT_DEFAULT, Portal, Scheme};
use rtrs_core::time::Duration;
use rtrs_core::tls::TlsEndpoint;
use rtrs_core::wire::RPING_PORT;

use crate::error::{Error, ErrorKind, failed};
use crate::plan::{Listen, Plan};

/// Maximum time to wait for an address that is in use.
const LISTEN_PATIENCE: Duration = Duration::from_secs(1);

/// Maximum number of outstanding RDMA reads from either end of a connection, for pings. Sessions
/// request none.
const READS_MAX: u8 = 16;

/// Number of RDMA requests that may wait for an answer in addition to `half-open-max`.
const RDMA_RESERVE: u32 = 256;

/// Factory for the providers of one scheme, one for each shard.
enum Provider {
    Tcp { shared: Arc<IwarpShared>, options: IwarpOptions },
    Tls { shared: Arc<IwarpShared>, options: IwarpOptions },
    Rdma { rdma: Rdma, options: RdmaOptions },
}

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    scheme: Scheme,
    address: SocketAddr,
    /// Chosen automatically: without IPv6, 0.0.0.0 is used instead, and RDMA may fail.
    automatic: bool,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.address)
    }
}

/// Returns the listening sockets that the service manager passed.
///
/// # Errors
/// [`ErrorKind::Listen`] for a descriptor that is not a listening stream socket.
pub(crate) fn passed() -> Result<Vec<PassedSocket>, Error> {
    passed_sockets().map_err(|error| {
        let text =
            "cannot use the sockets of the service manager (RDMA listeners cannot be passed)";
        Error::with_source(ErrorKind::Listen, text, error)
    })
}

/// Providers of a server, and the addresses they listen on.
pub(crate) struct Portals {
    providers: Vec<Provider>,
    /// Set with certificates or keys, for tls:// and for clients' proofs over other schemes.
    endpoint: Option<Arc<TlsEndpoint>>,
    targets: Vec<Target>,
    passed: Arc<[PassedSocket]>,
}

impl Portals {
    /// Determines the providers and addresses that the plan needs, with the listening sockets that
    /// the service manager passed.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`] if a host has no address, if RDMA is required but unavailable, or if a
    /// passed socket is for an RDMA portal.
    pub(crate) fn new(plan: &Plan, passed: Vec<PassedSocket>) -> Result<Self, Error> {
        let set = &plan.settings;
        let (mut targets, rdma) = match &plan.listen {
            Listen::On(portals) => (resolve(portals)?, plan.listen.open_rdma()?),
            Listen::Auto => automatic(plan, &passed),
        };
        passed::check(&passed, &targets)?;
        let passed: Arc<[PassedSocket]> = passed.into();
        if let Some(rdma) = &rdma {
            keys::check(set.always_invalidate, &mut targets, rdma.devices())?;
        }
        let rdma = rdma.filter(|_| targets.iter().any(|target| target.scheme == Scheme::Rdma));
        let startup_timeout = set.handshake_timeout.get();
        let half_open_max = set.half_open_max();
        let mut providers = Vec::new();
        let wanted = |scheme| targets.iter().any(|target: &Target| target.scheme == scheme);
        let options = IwarpOptions {
            crc: set.crc.is_on(),
            startup_timeout,
            half_open_max,
            passed: Arc::clone(&passed),
            ..IwarpOptions::default()
        };
        if wanted(Scheme::Tcp) {
            let options = options.clone();
            providers.push(Provider::Tcp { shared: IwarpShared::new(), options });
        }
        let endpoint = plan.load_tls()?.map(TlsEndpoint::server).transpose();
        let endpoint = endpoint.map_err(failed(ErrorKind::System, "cannot start a thread"))?;
        if wanted(Scheme::Tls) {
            providers.push(Provider::Tls { shared: IwarpShared::new(), options });
        }
        if let Some(rdma) = rdma {
            let options = RdmaOptions {
                startup_timeout,
                // The engine divides these among sources first; reconnects of sessions are counted
                // in addition.
                half_open_max: half_open_max.saturating_add(RDMA_RESERVE),
                reads_max: READS_MAX,
                path_timeout: None,
            };
            providers.push(Provider::Rdma { rdma, options });
        }
        Ok(Self { providers, endpoint, targets, passed })
    }

    /// Creates the providers of one shard.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if RDMA is refused.
    pub(crate) fn fabrics(&self, ring: &Rc<Ring>) -> Result<Vec<Box<dyn Fabric>>, Error> {
        let make = |provider: &Provider| -> Result<Box<dyn Fabric>, Error> {
            match provider {
                Provider::Tcp { shared, options } => {
                    Ok(Box::new(IwarpFabric::new(ring, Arc::clone(shared), options.clone())))
                }
                Provider::Tls { shared, options } => {
                    let endpoint = self.endpoint.as_ref().map(Arc::clone);
                    let endpoint = endpoint.ok_or_else(|| {
                        Error::new(ErrorKind::Listen, "tls:// needs certificates or keys")
                    })?;
                    let shared = Arc::clone(shared);
                    let fabric = IwarpFabric::with_tls(ring, shared, options.clone(), endpoint);
                    Ok(Box::new(fabric.map_err(failed(ErrorKind::System, "cannot set up TLS"))?))
                }
                Provider::Rdma { rdma, options } => rdma
                    .fabric(ring, *options)
                    .map_err(failed(ErrorKind::System, "cannot set up RDMA")),
            }
        };
        self.providers.iter().map(make).collect()
    }

    /// Whether paths will register memory, which pins it.
    pub(crate) fn pins_memory(&self) -> bool {
        self.providers.iter().any(|provider| matches!(provider, Provider::Rdma { .. }))
    }

    /// Portals of this plan that are in the given list.
    pub(crate) fn held_by(&self, portals: &[String]) -> impl Iterator<Item = String> {
        let held = |target: &&Target| portals.contains(&target.to_string());
        self.targets.iter().filter(held).map(ToString::to_string)
    }

    /// Portals that use a socket from the service manager.
    pub(crate) fn activated(&self) -> Vec<String> {
        let of_manager = |target: &&Target| passed::has(&self.passed, target);
        self.targets.iter().filter(of_manager).map(ToString::to_string).collect()
    }

    /// Endpoint with the certificates or keys, if configured.
    pub(crate) fn tls(&self) -> Option<Arc<TlsEndpoint>> {
        self.endpoint.as_ref().map(Arc::clone)
    }

    /// Checks that the TCP addresses can be listened on, except those that this server or the
    /// service manager already holds. No client can connect in the meantime.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`] for a portal that cannot be listened on.
    pub(crate) fn check(&self, held: &[String]) -> Result<(), Error> {
        let deadline = Instant::now() + LISTEN_PATIENCE;
        for target in self.targets.iter().filter(|target| target.scheme != Scheme::Rdma) {
            if held.contains(&target.to_string()) || passed::has(&self.passed, target) {
                continue;
            }
            let bound = listen_on(*target, |address| {
                patiently(deadline, || {
                    let checked = check_tcp_address(address).map(|()| address);
                    checked.map_err(|error| FabricError::system("bind", error))
                })
            });
            bound.map_err(|error| self.cannot_listen(*target, error))?;
        }
        Ok(())
    }

    /// Listens on all addresses. Returns the portals in the form announced to users.
    ///
    /// # Errors
    /// [`ErrorKind::Listen`] for a portal that cannot be listened on.
    pub(crate) fn listen(&self, fabrics: &mut [Box<dyn Fabric>]) -> Result<Vec<String>, Error> {
        let mut listening = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let scheme = target.scheme.name();
            let Some(fabric) =
                fabrics.iter_mut().find(|fabric| fabric.capabilities().scheme == scheme)
            else {
                continue;
            };
            let listened = listen_on(*target, |address| listen_patiently(fabric.as_mut(), address));
            match listened {
                Ok(address) => listening.push(format!("{scheme}://{address}")),
                Err(error) if target.automatic && target.scheme == Scheme::Rdma => {
                    tracing::warn!("not listening on {scheme}://{}: {error}", target.address);
                }
                Err(error) => return Err(self.cannot_listen(*target, error)),
            }
        }
        Ok(listening)
    }

    /// Error for a portal that cannot be listened on.
    fn cannot_listen(&self, target: Target, error: FabricError) -> Error {
        let text = format!("cannot listen on {target}");
        match error {
            // The error's own text would repeat the address.
            FabricError::System { source, .. } if target.scheme != Scheme::Rdma => {
                let passed = passed::hint(&self.passed, &source);
                let text = text + passed.as_deref().unwrap_or_else(|| listen_hint(&source));
                Error::with_source(ErrorKind::Listen, text, source)
            }
            error => Error::with_source(ErrorKind::Listen, text, error),
        }
    }
}

/// Portals of a server without `listen`: TCP, on the service manager's sockets if there are any,
/// and RDMA if it is available. If the server has certificates or keys, TLS instead of both.
fn automatic(plan: &Plan, passed: &[PassedSocket]) -> (Vec<Target>, Option<Rdma>) {
    let (set, has_tls) = (&plan.settings, plan.has_tls());
    let port = if set.ping_only && set.rping && !has_tls { RPING_PORT } else { PORT_DEFAULT };
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
    let target = |scheme| Target { scheme, address: any, automatic: true };
    let tcp = if has_tls { Scheme::Tls } else { Scheme::Tcp };
    let mut targets = passed::targets(passed, tcp);
    if targets.is_empty() {
        targets.push(target(tcp));
    }
    if has_tls {
        return (targets, None);
    }
    let rdma =
        Rdma::open().inspect_err(|missing| tracing::info!("not listening on rdma://: {missing}"));
    targets.extend(rdma.is_ok().then(|| target(Scheme::Rdma)));
    (targets, rdma.ok())
}

/// Hint for an address that cannot be listened on.
fn listen_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; choose another port, or stop the process that uses it (ss -ltnp); if systemd uses \
             it, start the service of its socket unit"
        }
        io::ErrorKind::AddrNotAvailable => "; choose an address of this host (ip addr)",
        io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need root or CAP_NET_BIND_SERVICE; choose a higher port"
        }
        _ => "",
    }
}

/// Listens on an address. If the address was chosen automatically and the host has no IPv6, listens
/// on all IPv4 addresses.
fn listen_on(
    target: Target,
    mut listen: impl FnMut(SocketAddr) -> Result<SocketAddr, FabricError>,
) -> Result<SocketAddr, FabricError> {
    match listen(target.address) {
        Err(FabricError::System { source, .. })
            if target.automatic && target.address.is_ipv6() && is_without_ipv6(&source) =>
        {
            let address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), target.address.port());
            listen(address)
        }
        done => done,
    }
}

/// Errno from a kernel without IPv6.
const EAFNOSUPPORT: i32 = 97;
/// Errno if IPv6 is disabled on all interfaces.
const EADDRNOTAVAIL: i32 = 99;

fn is_without_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(EAFNOSUPPORT | EADDRNOTAVAIL))
}

/// Listens, and retries briefly while the address is in use: the kernel releases the sockets of a
/// killed predecessor's io_uring only some time after that process has ended.
fn listen_patiently(
    fabric: &mut dyn Fabric,
    address: SocketAddr,
) -> Result<SocketAddr, FabricError> {
    patiently(Instant::now() + LISTEN_PATIENCE, || fabric.listen(address))
}

fn patiently(
    deadline: Instant,
    mut listen: impl FnMut() -> Result<SocketAddr, FabricError>,
) -> Result<SocketAddr, FabricError> {
    loop {
        match listen() {
            Err(FabricError::System { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}

fn resolve(portals: &[Portal]) -> Result<Vec<Target>, Error> {
    let mut targets = Vec::new();
    for portal in portals {
        let found = portal.resolve().map_err(failed(ErrorKind::Listen, "cannot listen"))?;
        for address in found {
            let target = Target { scheme: portal.scheme(), address, automatic: false };
            // Each use of port 0 results in a different port.
            if address.port() == 0 || !targets.contains(&target) {
                targets.push(target);
            }
            if address.port() == 0 {
                break;
            }
        }
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;

    fn portals(yaml: &str) -> Result<Portals, Error> {
        let set = Settings::from_yaml(yaml, "s.yaml").unwrap();
        Portals::new(&Plan::new(set).unwrap(), Vec::new())
    }

    #[test]
    fn tcp_portals_open_no_rdma_device() {
        let portals =
            portals("listen: ['tcp://127.0.0.1:0', 'tcp://127.0.0.1:0', 'tcp://127.0.0.1:7']")
                .unwrap();
        assert!(matches!(portals.providers[..], [Provider::Tcp { .. }]));
        assert_eq!(portals.targets.len(), 3);
        assert!(
            portals.targets.iter().all(|target| !target.automatic && target.scheme == Scheme::Tcp)
        );
    }

    #[test]
    fn the_default_is_tcp_and_available_rdma() {
        let portals = portals("").unwrap();
        assert!(matches!(portals.providers[0], Provider::Tcp { .. }));
        assert_eq!(portals.targets[0].address.to_string(), "[::]:1234");
        assert_eq!(portals.providers.len(), portals.targets.len());
        assert_eq!(portals.providers.len() == 2, Rdma::open().is_ok());
    }

    #[test]
    fn a_host_without_ipv6_listens_on_ipv4_by_default() {
        for errno in [EAFNOSUPPORT, EADDRNOTAVAIL] {
            let no_ipv6 = |address: SocketAddr| match address {
                SocketAddr::V4(_) => Ok(address),
                SocketAddr::V6(_) => {
                    Err(FabricError::system("listen", io::Error::from_raw_os_error(errno)))
                }
            };
            let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 1234);
            let target = |automatic| Target { scheme: Scheme::Tcp, address: any, automatic };
            assert_eq!(listen_on(target(true), no_ipv6).unwrap().to_string(), "0.0.0.0:1234");
            listen_on(target(false), no_ipv6).unwrap_err();
        }
        let taken = |_| Err(FabricError::system("listen", io::Error::from_raw_os_error(98)));
        let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 1234);
        listen_on(Target { scheme: Scheme::Tcp, address: any, automatic: true }, taken)
            .unwrap_err();
    }
}
