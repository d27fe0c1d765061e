//! Queue pairs that are their own peer, so that work can be posted without a connection.
//!
//! Used for requests that send nothing, such as binds. The connection manager is not involved, so
//! the attributes that it would provide are read from the device here.

use std::io;

use rdma_sys::{ibv_gid, ibv_port_attr, ibv_port_state, ibv_qp_attr_mask as mask, ibv_qp_state};

use super::device::Context;
use super::qp::Qp;

/// `IBV_LINK_LAYER_ETHERNET`: the port is addressed only by global identifiers.
const LINK_LAYER_ETHERNET: u8 = 2;
/// Local ACK timeout, 4.096 us times two to this power: 67 ms. Unused, since nothing is sent.
const ACK_TIMEOUT: u8 = 14;

/// Attributes of a port that a queue pair connected to itself needs.
struct OwnPort {
    number: u8,
    attributes: ibv_port_attr,
    /// First global identifier that is set, with its index in the port's table.
    gid: Option<(u8, ibv_gid)>,
}

impl OwnPort {
    /// Returns the first port that is up; otherwise the first port.
    fn of(context: &Context) -> io::Result<Self> {
        let mut found = Err(io::Error::from(io::ErrorKind::NotFound));
        for number in 1..=context.limits().ports {
            let port = Self::read(context, number);
            let up = |port: &Self| port.attributes.state == ibv_port_state::IBV_PORT_ACTIVE;
            if port.as_ref().is_ok_and(up) {
                return port;
            }
            if found.is_err() {
                found = port;
            }
        }
        found
    }

    fn read(context: &Context, number: u8) -> io::Result<Self> {
        let attributes = context.port(number)?;
        let places = u8::try_from(attributes.gid_tbl_len.clamp(0, 255)).unwrap_or(0);
        let gid = (0..places).find_map(|at| Some((at, context.gid(number, at)?)));
        if gid.is_none() && attributes.link_layer == LINK_LAYER_ETHERNET {
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "the port has no address"));
        }
        Ok(Self { number, attributes, gid })
    }
}

impl Qp {
    /// Connects the queue pair to itself, ready to post.
    pub(crate) fn connect_to_itself(&mut self) -> io::Result<()> {
        let OwnPort { number, attributes: port, gid } = OwnPort::of(self.pd().context())?;
        let mut to = Self::no_attributes();
        to.port_num = number;
        to.qp_state = ibv_qp_state::IBV_QPS_INIT;
        let init = mask::IBV_QP_STATE.0
            | mask::IBV_QP_PKEY_INDEX.0
            | mask::IBV_QP_PORT.0
            | mask::IBV_QP_ACCESS_FLAGS.0;
        self.modify(&mut to, init.cast_signed())?;
        to.qp_state = ibv_qp_state::IBV_QPS_RTR;
        to.path_mtu = port.active_mtu;
        to.dest_qp_num = self.number();
        to.min_rnr_timer = 12;
        to.ah_attr.port_num = number;
        to.ah_attr.dlid = port.lid;
        if let Some((at, gid)) = gid {
            to.ah_attr.is_global = 1;
            to.ah_attr.grh.dgid = gid;
            to.ah_attr.grh.sgid_index = at;
            to.ah_attr.grh.hop_limit = 1;
        }
        let rtr = mask::IBV_QP_STATE.0
            | mask::IBV_QP_AV.0
            | mask::IBV_QP_PATH_MTU.0
            | mask::IBV_QP_DEST_QPN.0
            | mask::IBV_QP_RQ_PSN.0
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | mask::IBV_QP_MIN_RNR_TIMER.0;
        self.modify(&mut to, rtr.cast_signed())?;
        to.qp_state = ibv_qp_state::IBV_QPS_RTS;
        to.timeout = ACK_TIMEOUT;
        to.retry_cnt = 1;
        to.rnr_retry = 1;
        let rts = mask::IBV_QP_STATE.0
            | mask::IBV_QP_TIMEOUT.0
            | mask::IBV_QP_RETRY_CNT.0
            | mask::IBV_QP_RNR_RETRY.0
            | mask::IBV_QP_SQ_PSN.0
            | mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify(&mut to, rts.cast_signed())
    }
}
