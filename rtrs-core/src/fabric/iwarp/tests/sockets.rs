//! Two fabrics on real sockets.
