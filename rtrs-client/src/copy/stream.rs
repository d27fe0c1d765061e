//! Standard input and output as ends of a copy: one thread each, requests in the order of their
//! offsets.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;

use super::failure::Failure;
use super::side::{Answer, Limits, Op, Request, Results, Setup, Side};
use crate::error::{Error, system};

/// Size of the memory from which zeroes are written.
const ZEROES_LEN: usize = 256 << 10;

/// Stream as an end of a copy.
#[derive(Debug)]
pub(super) struct StreamSide {
    limits: Limits,
    jobs: mpsc::Sender<Request>,
    results: Results,
    /// Requests that wait for those at earlier offsets.
    waiting: BTreeMap<u64, Request>,
    /// Offset of the next request.
    next: u64,
}

impl StreamSide {
    /// Starts the thread that reads or writes a stream.
    pub(super) fn new(stream: impl AsFd, setup: Setup) -> Result<Self, Error> {
        let Setup { sizes, results } = setup;
        let owned = stream.as_fd().try_clone_to_owned().map_err(system("cannot use the stream"))?;
        let limits = Limits {
            size: None,
            block: 1,
            io_max: sizes.io_max,
            zeroes_max: u64::from(u32::MAX),
            extents: false,
            is_zero: false,
        };
        let (jobs, queue) = mpsc::channel::<Request>();
        let reports = results.clone();
        let work = move || {
            let mut stream = Stream { file: owned.into(), has_ended: false };
            for mut request in queue {
                let result = stream.run(&mut request).map_err(Failure::from);
                if !reports.send(request, result) {
                    return;
                }
            }
        };
        let spawned = thread::Builder::new().name("rtrs-stream".into()).spawn(work);
        spawned.map_err(system("cannot start a thread"))?;
        Ok(Self { limits, jobs, results, waiting: BTreeMap::new(), next: 0 })
    }
}

impl Side for StreamSide {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, request: Request) {
        self.waiting.insert(request.offset, request);
        while let Some(entry) = self.waiting.first_entry()
            && (*entry.key() == self.next || matches!(entry.get().op, Op::Finish { .. }))
        {
            let request = entry.remove();
            self.next += request.len;
            if let Err(mpsc::SendError(request)) = self.jobs.send(request) {
                let failure = Failure::Other("its thread has ended".into());
                self.results.send(request, Err(failure));
            }
        }
    }
}

struct Stream {
    file: File,
    has_ended: bool,
}

impl Stream {
    fn run(&mut self, request: &mut Request) -> io::Result<Answer> {
        let len = request.len;
        let bytes = usize::try_from(len).ok();
        let memory = bytes.and_then(|bytes| request.buffer.as_mut()?.get_mut(..bytes));
        let found = match (request.op, memory) {
            (Op::Read, Some(memory)) => self.fill(memory)?,
            (Op::Write, Some(memory)) => self.file.write_all(memory).map(|()| len)?,
            (Op::Zero, _) => self.write_zeroes(len).map(|()| len)?,
            (Op::Finish { durable }, _) => {
                if durable && self.file.metadata()?.is_file() {
                    self.file.sync_all()?;
                }
                0
            }
            (Op::Read | Op::Write | Op::Extents, _) => {
                return Err(io::ErrorKind::InvalidInput.into());
            }
        };
        Ok(Answer { len: found, extents: Vec::new() })
    }

    /// Fills memory up to the end of the stream. Returns the number of bytes.
    fn fill(&mut self, memory: &mut [u8]) -> io::Result<u64> {
        let mut found = 0;
        while found < memory.len() && !self.has_ended {
            match self.file.read(&mut memory[found..]) {
                Ok(0) => self.has_ended = true,
                Ok(count) => found += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found as u64)
    }

    fn write_zeroes(&mut self, len: u64) -> io::Result<()> {
        let zeroes = vec![0; ZEROES_LEN];
        let mut left = len;
        while left > 0 {
            let part = left.min(ZEROES_LEN as u64);
            let bytes = usize::try_from(part).unwrap_or(ZEROES_LEN);
            self.file.write_all(&zeroes[..bytes])?;
            left -= part;
        }
        Ok(())
    }
}
