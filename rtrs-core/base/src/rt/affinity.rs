//! CPUs that this process may use, and binding of shards to CPUs.

use std::io;

use super::syscall::check;
use crate::settings::AutoSwitch;

/// Returns the numbers of the CPUs that this process may use, in ascending order.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: cpu_set_t is plain data, and all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid and its size is passed.
    let rc = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if rc != 0 {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    // SAFETY: CPU numbers below CPU_SETSIZE are inside the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Minimum number of CPUs with which `auto` binds shards. With fewer, the scheduler's freedom to
/// move a shard away from other threads is worth more than a warm cache.
const AUTO_PIN_CPUS_MIN: usize = 8;

/// Returns the CPU to which each of `shards` shards is bound; empty if none is bound. `auto` binds
/// only if there are enough CPUs and every shard can have its own CPU.
pub fn pin_plan(pin: AutoSwitch, shards: u16) -> Vec<usize> {
    let cpus = allowed_cpus();
    let wanted = match pin {
        AutoSwitch::Off => false,
        AutoSwitch::On => true,
        AutoSwitch::Auto => cpus.len() >= AUTO_PIN_CPUS_MIN && usize::from(shards) <= cpus.len(),
    };
    if !wanted {
        return Vec::new();
    }
    cpus.iter().copied().cycle().take(usize::from(shards)).collect()
}

/// Binds the calling thread to one CPU.
///
/// # Errors
/// Returns the system's error if the CPU does not exist or is not allowed.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: cpu_set_t is plain data; the CPU number was just checked.
    let rc = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    check(rc)
}
