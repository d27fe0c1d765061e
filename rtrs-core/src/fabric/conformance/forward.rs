//! `forward_fabric!` and `forward_listener!`: implement the methods that a wrapper around a fabric
//! leaves unchanged.

/// Generates the methods of `impl Listener` that a wrapper forwards to the fabric in its field:
/// listening, accepting and rejecting.
#[macro_export]
macro_rules! forward_listener {
    ($inner:ident) => {
        fn listen(
            &mut self,
            address: std::net::SocketAddr,
        ) -> Result<std::net::SocketAddr, $crate::fabric::FabricError> {
            self.$inner.listen(address)
        }

        fn stop_listening(&mut self) {
            self.$inner.stop_listening();
        }

        fn accept(
            &mut self,
            now: $crate::time::Instant,
            pd: &std::sync::Arc<dyn $crate::fabric::ProtectionDomain>,
            request: $crate::fabric::ConnRequest,
            limits: $crate::fabric::QpLimits,
            private_data: &$crate::fabric::PrivateData,
        ) -> Result<$crate::ids::QpNum, $crate::fabric::FabricError> {
            self.$inner.accept(now, pd, request, limits, private_data)
        }

        fn reject(
            &mut self,
            now: $crate::time::Instant,
            request: $crate::fabric::ConnRequest,
            private_data: &$crate::fabric::PrivateData,
        ) {
            self.$inner.reject(now, request, private_data);
        }
    };
}

/// Generates the methods of `impl Fabric` that a wrapper forwards to the fabric in its field:
/// connecting, graceful disconnect, the local address, and the counters.
#[macro_export]
macro_rules! forward_fabric {
    ($inner:ident) => {
        fn connect(
            &mut self,
            now: $crate::time::Instant,
            pd: &std::sync::Arc<dyn $crate::fabric::ProtectionDomain>,
            params: &$crate::fabric::ConnectParams,
        ) -> Result<$crate::ids::QpNum, $crate::fabric::FabricError> {
            self.$inner.connect(now, pd, params)
        }

        fn disconnect(&mut self, now: $crate::time::Instant, qp: $crate::ids::QpNum) {
            self.$inner.disconnect(now, qp);
        }

        fn local_ip(&self, qp: $crate::ids::QpNum) -> Option<std::net::IpAddr> {
            self.$inner.local_ip(qp)
        }

        fn counters(&self) -> $crate::fabric::FabricCounters {
            self.$inner.counters()
        }
    };
}
