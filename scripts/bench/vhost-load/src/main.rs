//! Random or sequential IO on a vhost-user-blk device, through libblkio's driver.
//!
//!     vhost-load SOCKET randread|randwrite|read|write BYTES DEPTH SECONDS
//!
//! One ring keeps DEPTH requests of BYTES bytes in flight. Prints IOs per second and latencies in
//! microseconds as JSON. Exits with 1 if the device fails a request.

use std::error::Error;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// Longest wait for a request.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// Most completions that are taken at once.
const BATCH: usize = 64;

struct Load {
    queue: Blkioq,
    /// Address of the memory of the first request; that of the others follows.
    memory: usize,
    len: usize,
    blocks: u64,
    is_random: bool,
    writes: bool,
    next: u64,
    /// Start of the request in each slot.
    started: Vec<Instant>,
}

impl Load {
    /// Returns the offset of the next request.
    fn next_offset(&mut self) -> u64 {
        if self.is_random {
            // xorshift64
            self.next ^= self.next << 13;
            self.next ^= self.next >> 7;
            self.next ^= self.next << 17;
        } else {
            self.next += 1;
        }
        self.next % self.blocks * self.len as u64
    }

    fn submit(&mut self, slot: usize) {
        let (offset, data) = (self.next_offset(), self.memory + slot * self.len);
        self.started[slot] = Instant::now();
        match self.writes {
            true => self.queue.write(offset, data as _, self.len, slot, ReqFlags::empty()),
            false => self.queue.read(offset, data as _, self.len, slot, ReqFlags::empty()),
        }
    }

    /// Waits for completions. Calls `ended` with the slot and latency of each.
    fn wait(&mut self, mut ended: impl FnMut(&mut Self, usize, Duration)) -> Result<(), String> {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; BATCH];
        let mut left = REQUEST_MAX;
        let count = self.queue.do_io(&mut completions, 1, Some(&mut left), None);
        for completion in &completions[..count.map_err(|error| error.to_string())?] {
            // SAFETY: `do_io` has initialized as many completions as it returned.
            let (slot, result) = unsafe {
                let completion = completion.assume_init_ref();
                (completion.user_data, completion.ret)
            };
            if result != 0 {
                return Err(format!("a request failed with {result}"));
            }
            let latency = self.started[slot].elapsed();
            ended(self, slot, latency);
        }
        Ok(())
    }
}

fn open(socket: &str, len: usize, depth: usize) -> Result<(Blkio, Load), Box<dyn Error>> {
    let mut device = Blkio::new("virtio-blk-vhost-user")?;
    device.set_str("path", socket)?;
    device.connect()?;
    device.set_i32("num-queues", 1)?;
    let capacity = device.get_u64("capacity")?;
    let queue = device.start()?.queues.pop().ok_or("the device has no queue")?;
    let region = device.alloc_mem_region(len.checked_mul(depth).ok_or("too much memory")?)?;
    device.map_mem_region(&region)?;
    let blocks = capacity / len as u64;
    if blocks == 0 {
        return Err(format!("the device has {capacity} bytes, less than a request").into());
    }
    let load = Load {
        queue,
        memory: region.addr,
        len,
        blocks,
        is_random: false,
        writes: false,
        next: 0x9e37_79b9_7f4a_7c15,
        started: vec![Instant::now(); depth],
    };
    Ok((device, load))
}

fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    let [socket, kind, len, depth, seconds] = args else {
        return Err(
            "usage: vhost-load SOCKET randread|randwrite|read|write BYTES DEPTH SECONDS".into()
        );
    };
    let (len, depth) = (len.parse()?, depth.parse()?);
    let (_device, mut load) = open(socket, len, depth)?;
    load.is_random = kind.starts_with("rand");
    load.writes = kind.ends_with("write");
    let (begin, lasts) = (Instant::now(), Duration::from_secs_f64(seconds.parse()?));
    let (mut latencies, mut inflight) = (Vec::<u32>::with_capacity(1 << 20), depth);
    (0..depth).for_each(|slot| load.submit(slot));
    let mut elapsed = begin.elapsed();
    while elapsed < lasts {
        load.wait(|load, slot, latency| {
            latencies.push(latency.as_nanos().try_into().unwrap_or(u32::MAX));
            load.submit(slot);
        })?;
        elapsed = begin.elapsed();
    }
    while inflight > 0 {
        load.wait(|_, _, _| inflight -= 1)?;
    }
    let (count, sum) = (latencies.len(), latencies.iter().map(|ns| f64::from(*ns)).sum::<f64>());
    latencies.sort_unstable();
    let part = |share: usize| latencies.get(count * share / 100).map_or(0.0, |ns| f64::from(*ns));
    let [mean, p50, p99] = [sum / count.max(1) as f64, part(50), part(99)].map(|ns| ns / 1e3);
    println!(
        "{{\"ios\": {count}, \"iops\": {:.1}, \"lat_us\": {mean:.2}, \"p50_us\": {p50:.2}, \
         \"p99_us\": {p99:.2}, \"longest_us\": {:.1}}}",
        count as f64 / elapsed.as_secs_f64(),
        latencies.last().map_or(0.0, |ns| f64::from(*ns) / 1e3),
    );
    Ok(())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&args) {
        eprintln!("vhost-load: {error}");
        std::process::exit(1);
    }
}
