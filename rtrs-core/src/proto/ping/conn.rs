//! Server side of a ping connection.
//!
//! ```text
//! ping-pong:  Start -> Reading -> Sink -> Start ...
//! the others: Start -> Serving -> Finishing -> Over
//! ```
//! In ping-pong mode, the server exposes no memory; it reads and writes the client's memory. In the
//! one-sided modes the client receives the key of one buffer of the requested size.

use std::sync::Arc;

use super::messages::{
    Buffer, Messages, RECVS, SAYS_ALIVE, SAYS_DONE, SEND, WR_DATA, WR_MESSAGE, remote,
};
use crate::fabric::{
    Access, Fabric, FabricError, ProtectionDomain, SgeList, WcOp, WcStatus, WorkCompletion,
    WorkRequest, WrOp,
};
use crate::ids::QpNum;
use crate::time::{Duration, Instant};
use crate::wire::{PingHello, PingInfo, PingMode, fill_pattern, text_len};

/// Result of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    On,
    /// A round of ping-pong was answered.
    Round,
}

/// Reason for ending a ping.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("a message of {0} bytes; expected 16")]
    Length(u32),
    #[error("unexpected data size of {found} bytes; {expected}")]
    Size { found: u32, expected: String },
    #[error("an unexpected message: {0}")]
    Turn(&'static str),
    #[error("the client was silent for {0:?}")]
    Silent(Duration),
    #[error("evicted in favor of a source with fewer pings")]
    GivesWay,
    #[error("a local request failed: {0}")]
    Failed(WcStatus),
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for the client to advertise its data.
    Start,
    /// Reading the data.
    Reading(PingInfo),
    /// Waiting for the client to advertise its sink.
    Sink,
    /// One-sided: the client's operations are running, and in duplex mode also the server's.
    Serving(PingInfo),
    /// The client is done; waiting for the server's own requests.
    Finishing,
    /// All messages were sent.
    Over,
    /// Being torn down.
    Ended,
}

/// Ping connection.
#[derive(Debug)]
pub(super) struct PingConn {
    qp: QpNum,
    hello: Option<PingHello>,
    size_max: u32,
    pd: Arc<dyn ProtectionDomain>,
    messages: Messages,
    /// Ping-pong: target of reads. One-sided: buffer accessible to the client.
    data: Option<Buffer>,
    /// One-sided: source or target of the server's own requests.
    own: Option<Buffer>,
    state: State,
    heard: Instant,
    /// Data requests in flight and completed.
    inflight: u16,
    done: u64,
    answers: u64,
}

impl PingConn {
    /// Allocates the resources of a connection before it is accepted. For rping, the data buffer is
    /// allocated on the first message.
    pub(super) fn new(
        now: Instant,
        pd: &Arc<dyn ProtectionDomain>,
        hello: Option<PingHello>,
        size_max: u32,
    ) -> Result<Self, FabricError> {
        let (mut data, mut own) = (None, None);
        if let Some(hello) = hello {
            let size = hello.size as usize;
            let access = match hello.mode {
                PingMode::PingPong => Access::LOCAL,
                PingMode::ReadLatency | PingMode::ReadBandwidth => Access::REMOTE_READ,
                PingMode::WriteLatency | PingMode::WriteBandwidth => Access::REMOTE_WRITE,
            };
            let buffer = Buffer::new(pd, size, access)?;
            let mut pattern = vec![0; size];
            fill_pattern(0, &mut pattern);
            buffer.all().copy_in(0, &pattern);
            data = Some(buffer);
            if hello.duplex && hello.mode.is_bandwidth() {
                own = Some(Buffer::new(pd, size, Access::LOCAL)?);
            }
        }
        Ok(Self {
            qp: QpNum(0),
            hello,
            size_max,
            pd: Arc::clone(pd),
            messages: Messages::new(pd)?,
            data,
            own,
            state: State::Start,
            heard: now,
            inflight: 0,
            done: 0,
            answers: 0,
        })
    }

    /// Posts the receives, before the reply is sent.
    pub(super) fn open(&mut self, fabric: &mut dyn Fabric, qp: QpNum) -> Result<(), FabricError> {
        self.qp = qp;
        self.messages.post_all(fabric, qp)
    }

    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// Returns the time of the client's last message; None while the connection is being torn down.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.state != State::Ended).then_some(self.heard)
    }

    /// Marks the connection as ended. Returns false if it had ended before.
    pub(super) fn end(&mut self) -> bool {
        std::mem::replace(&mut self.state, State::Ended) != State::Ended
    }

    pub(super) fn handle_completion(
        &mut self,
        now: Instant,
        wc: &WorkCompletion,
        fabric: &mut dyn Fabric,
    ) -> Result<Turn, Fault> {
        if self.state == State::Ended || wc.status == WcStatus::Flushed {
            return Ok(Turn::On);
        }
        if wc.status != WcStatus::Success {
            return Err(Fault::Failed(wc.status));
        }
        match (wc.op, wc.wr_id) {
            (WcOp::Recv, at) if at < RECVS => {
                self.heard = now;
                let info = self.messages.take(at, wc.byte_len).map_err(Fault::Length)?;
                // The peer may send again only after the answer, which is posted next.
                self.messages.post_recv(fabric, self.qp, at)?;
                self.on_message(&info, fabric)
            }
            (WcOp::RecvRdmaWithImm, at) if at < RECVS => {
                self.heard = now;
                self.messages.post_recv(fabric, self.qp, at)?;
                self.on_immediate(wc.imm, fabric)
            }
            (_, WR_DATA) => self.on_data(fabric),
            _ => Ok(Turn::On),
        }
    }

    fn mode(&self) -> PingMode {
        self.hello.map_or(PingMode::PingPong, |hello| hello.mode)
    }

    fn on_message(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<Turn, Fault> {
        match self.state {
            State::Start => {
                self.check_size(info)?;
                if self.mode() == PingMode::PingPong {
                    self.read(info, fabric)?;
                    self.state = State::Reading(*info);
                } else {
                    self.serve(info, fabric)?;
                }
                Ok(Turn::On)
            }
            State::Sink => {
                self.check_size(info)?;
                self.write_back(info, fabric)?;
                self.state = State::Start;
                Ok(Turn::Round)
            }
            State::Serving(_) if info.rkey.0 == 0 && info.size == SAYS_ALIVE => Ok(Turn::On),
            State::Serving(_) if info.rkey.0 == 0 && info.size == SAYS_DONE => {
                self.state = State::Finishing;
                self.finish(fabric)
            }
            State::Serving(_) => Err(Fault::Turn("neither an end nor a keepalive")),
            State::Reading(_) => Err(Fault::Turn("the go-ahead has not been sent yet")),
            State::Finishing | State::Over => {
                Err(Fault::Turn("the client has already ended its requests"))
            }
            State::Ended => Ok(Turn::On),
        }
    }

    fn check_size(&self, info: &PingInfo) -> Result<(), Fault> {
        let found = info.size;
        match self.hello {
            Some(hello) if found != hello.size => {
                Err(Fault::Size { found, expected: format!("{} bytes were announced", hello.size) })
            }
            None if found == 0 || found > self.size_max => Err(Fault::Size {
                found,
                expected: format!("1 to {} bytes are allowed", self.size_max),
            }),
            _ => Ok(()),
        }
    }

    /// Ping-pong: reads the client's data.
    fn read(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<(), Fault> {
        let size = info.size as usize;
        if self.data.as_ref().is_none_or(|data| data.len < size) {
            // rping: this is the first message, or a later one with a larger size.
            self.data = Some(Buffer::new(&self.pd, size, Access::LOCAL)?);
        }
        let Some(data) = &self.data else { return Ok(()) };
        let op = WrOp::RdmaRead { remote: remote(info) };
        let sges = SgeList::one(data.sge(0, size));
        fabric.post_send(self.qp, WorkRequest { wr_id: WR_DATA, op, sges, signaled: true })?;
        Ok(())
    }

    /// Ping-pong: writes the data back and sends the go-ahead. The requests execute in order, so
    /// the second does not wait for the first to complete.
    fn write_back(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<(), Fault> {
        let Some(data) = &self.data else { return Err(Fault::Turn("no data was read")) };
        let size = info.size as usize;
        if size > data.len {
            let expected = format!("{} bytes were read", data.len);
            return Err(Fault::Size { found: info.size, expected });
        }
        // rping's server writes only a string; this one writes all the data.
        let len = match self.hello {
            Some(_) => size,
            None => text_len(&data.slice(0, size).to_vec()),
        };
        let op = WrOp::RdmaWrite { remote: remote(info), imm: None };
        let sges = SgeList::one(data.sge(0, len));
        fabric.post_send(self.qp, WorkRequest { wr_id: WR_MESSAGE, op, sges, signaled: true })?;
        self.go_ahead(info, fabric)
    }

    fn go_ahead(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<(), Fault> {
        let invalidate = self.hello.filter(|hello| hello.server_invalidate).map(|_| info.rkey);
        let op = WrOp::Send { imm: None, invalidate };
        self.messages.send(fabric, self.qp, &PingInfo::GO_AHEAD, op)?;
        Ok(())
    }

    /// One-sided: advertises the server's buffer, and begins the server's own requests.
    fn serve(&mut self, info: &PingInfo, fabric: &mut dyn Fabric) -> Result<(), Fault> {
        let Some(data) = &self.data else { return Err(Fault::Turn("no buffer")) };
        let ours = data.info();
        self.messages.send(fabric, self.qp, &ours, SEND)?;
        self.state = State::Serving(*info);
        self.keep_going(fabric)
    }

    /// Duplex: keeps the agreed number of the server's own requests in flight.
    fn keep_going(&mut self, fabric: &mut dyn Fabric) -> Result<(), Fault> {
        let (State::Serving(info), Some(hello), Some(own)) = (self.state, self.hello, &self.own)
        else {
            return Ok(());
        };
        let remote = remote(&info);
        let op = if hello.mode.writes() {
            WrOp::RdmaWrite { remote, imm: None }
        } else {
            WrOp::RdmaRead { remote }
        };
        while self.inflight < hello.depth {
            let sges = SgeList::one(own.sge(0, own.len));
            fabric.post_send(self.qp, WorkRequest { wr_id: WR_DATA, op, sges, signaled: true })?;
            self.inflight += 1;
        }
        Ok(())
    }

    /// Write latency: sends the same data back.
    fn on_immediate(&mut self, imm: Option<u32>, fabric: &mut dyn Fabric) -> Result<Turn, Fault> {
        let (State::Serving(info), PingMode::WriteLatency, Some(data)) =
            (self.state, self.mode(), &self.data)
        else {
            return Err(Fault::Turn("an immediate that was not negotiated"));
        };
        let op = WrOp::RdmaWrite { remote: remote(&info), imm };
        let sges = SgeList::one(data.sge(0, data.len));
        fabric.post_send(self.qp, WorkRequest { wr_id: WR_MESSAGE, op, sges, signaled: true })?;
        self.answers += 1;
        Ok(Turn::On)
    }

    /// Handles the completion of a data request.
    fn on_data(&mut self, fabric: &mut dyn Fabric) -> Result<Turn, Fault> {
        match self.state {
            State::Reading(info) => {
                if self.hello.is_some_and(|hello| hello.read_invalidate)
                    && let Some(data) = &mut self.data
                {
                    // The key of the read sink is invalidated when the read ends.
                    let region = Arc::clone(data.registration.region());
                    data.registration = self.pd.register(&region, Access::LOCAL)?;
                }
                self.go_ahead(&info, fabric)?;
                self.state = State::Sink;
                Ok(Turn::On)
            }
            _ => {
                self.inflight = self.inflight.saturating_sub(1);
                self.done += 1;
                self.keep_going(fabric)?;
                self.finish(fabric)
            }
        }
    }

    /// Reports the server's request count once the client is done and the server's own requests
    /// have completed.
    fn finish(&mut self, fabric: &mut dyn Fabric) -> Result<Turn, Fault> {
        if self.state == State::Finishing && self.inflight == 0 {
            let count = PingInfo { addr: self.done + self.answers, ..PingInfo::GO_AHEAD };
            self.messages.send(fabric, self.qp, &count, SEND)?;
            self.state = State::Over;
        }
        Ok(Turn::On)
    }
}
