//! Behavior of the scripted server.

use rtrs_core::identity::ExportId;
use rtrs_core::wire::{ConnReq, ConnRsp, IoHeader, OpenRsp, RkeyRsp};

use super::gateways::Gateways;

/// Produces the bytes to send in place of a correct message.
pub(super) type Rewrite<T> = Box<dyn Fn(T) -> Vec<u8>>;
pub(super) type RewriteAccept = Box<dyn Fn(&ConnReq, ConnRsp) -> Vec<u8>>;
type Judge = Box<dyn Fn(&IoHeader) -> u16>;

/// Behavior of the server.
pub(super) struct How {
    pub(super) queue_depth: u16,
    pub(super) max_io: u32,
    pub(super) new_rkey: bool,
    /// Reports that discards and write zeroes keep their length, as `rtrs-server` does.
    pub(super) keeps_lengths: bool,
    /// Size of the device in bytes.
    pub(super) size: usize,
    /// Refuses every connection with this private data.
    pub(super) refuse: Option<Vec<u8>>,
    /// Replaces accepts.
    pub(super) con_rsp: Option<RewriteAccept>,
    /// Replaces INFO_RSP; an empty result sends nothing.
    pub(super) info_rsp: Option<Rewrite<Vec<u8>>>,
    /// Replaces RKEY_RSP.
    pub(super) rkey_rsp: Option<Rewrite<RkeyRsp>>,
    pub(super) open_rsp: Option<Box<dyn Fn(OpenRsp) -> OpenRsp>>,
    pub(super) open_errno: u16,
    /// Refuses access `rw` because of another session.
    pub(super) rw_errno: u16,
    /// Whether another client has written meanwhile, so that returning clients are refused.
    pub(super) displaced: bool,
    /// Refuses to open for writing.
    pub(super) read_only: bool,
    /// Decides which IO fails.
    pub(super) io_errno: Option<Judge>,
    /// Keeps IO requests in `held`.
    pub(super) hold: bool,
    /// Keeps probes of IO connections in `held`.
    pub(super) hold_probes: bool,
    /// Keeps control requests in `held`.
    pub(super) hold_control: bool,
    /// Keeps FENCE in `held`.
    pub(super) hold_fences: bool,
    /// Refuses FENCE for paths to a different process.
    pub(super) refuse_fences: bool,
    /// Keeps OPEN requests for this export in `held`.
    pub(super) hold_volume: Option<&'static str>,
    /// Answers heartbeats.
    pub(super) heartbeats: bool,
    /// Reports support for FENCE, as `rtrs-server` does and a kernel server does not.
    pub(super) fence: bool,
    /// Epoch of the server's cache; 0 to report none.
    pub(super) cache_id: u64,
    /// Reports the server's ID (this one; all zeroes for none) and the export's ID.
    pub(super) server_id: Option<[u8; 16]>,
    pub(super) export_id: Option<ExportId>,
    /// Keeps a copy of the chunk with each request.
    pub(super) keep_chunks: bool,
    /// Connects the paths to servers that share the export; `server_id` is then not used.
    pub(super) gateways: Option<Gateways>,
}

impl Default for How {
    fn default() -> Self {
        Self {
            queue_depth: 16,
            max_io: 126_976,
            new_rkey: true,
            keeps_lengths: true,
            size: 4 << 20,
            refuse: None,
            con_rsp: None,
            info_rsp: None,
            rkey_rsp: None,
            open_rsp: None,
            open_errno: 0,
            rw_errno: 0,
            displaced: false,
            read_only: false,
            io_errno: None,
            hold: false,
            hold_probes: false,
            hold_control: false,
            hold_fences: false,
            refuse_fences: false,
            hold_volume: None,
            heartbeats: true,
            fence: false,
            cache_id: 0,
            server_id: None,
            export_id: None,
            keep_chunks: false,
            gateways: None,
        }
    }
}
