//! Chains of descriptors: the memory of one request.
//!
//! `virtio-queue` can read chains too, but it reports a malformed chain as the end of the chain.
//! This reader reports the fault, and can also read chains that are not in the available ring.

use rtrs_core::mem::MemSlice;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress};

use crate::fault::Fault;
use crate::memory::{GuestMemory, add_pieces};

/// Maximum number of descriptors of a chain, as in other devices.
const DESCRIPTORS_MAX: usize = 1024;
const DESCRIPTOR_LEN: u32 = 16;

/// Memory of a request, in the order of its descriptors.
#[derive(Debug)]
pub(crate) struct Chain {
    /// Memory for the device to read.
    pub(crate) readable: Vec<MemSlice>,
    /// Memory for the device to write.
    pub(crate) writable: Vec<MemSlice>,
}

impl Default for Chain {
    fn default() -> Self {
        let pieces = || Vec::with_capacity(DESCRIPTORS_MAX);
        Self { readable: pieces(), writable: pieces() }
    }
}

/// Table of descriptors.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) address: GuestAddress,
    /// Number of descriptors.
    pub(crate) len: u32,
}

impl Table {
    fn descriptor(self, memory: &GuestMemory, index: u16) -> Result<Descriptor, Fault> {
        if u32::from(index) >= self.len {
            return Err(Fault::Index(index, self.len));
        }
        let wrong = Fault::Address(self.address.raw_value());
        let offset = u64::from(index) * u64::from(DESCRIPTOR_LEN);
        let address = self.address.checked_add(offset).ok_or(wrong)?;
        memory.read_obj(address).map_err(|_| wrong)
    }
}

impl Chain {
    /// Releases the memory.
    pub(crate) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    /// Reads the chain that begins with this descriptor of the ring's table.
    ///
    /// # Errors
    /// The fault of the chain.
    pub(crate) fn read(
        &mut self,
        memory: &GuestMemory,
        mut table: Table,
        head: u16,
    ) -> Result<(), Fault> {
        self.clear();
        let (mut index, mut is_indirect) = (head, false);
        for _ in 0..DESCRIPTORS_MAX {
            // Copied once: the guest may change it meanwhile.
            let descriptor = table.descriptor(memory, index)?;
            if descriptor.refers_to_indirect_table() {
                if is_indirect {
                    return Err(Fault::Nested);
                }
                let len = descriptor.len();
                if len == 0 || !len.is_multiple_of(DESCRIPTOR_LEN) {
                    return Err(Fault::TableLength(len));
                }
                table = Table { address: descriptor.addr(), len: len / DESCRIPTOR_LEN };
                (index, is_indirect) = (0, true);
                continue;
            }
            self.add(memory, descriptor)?;
            if !descriptor.has_next() {
                return Ok(());
            }
            index = descriptor.next();
        }
        Err(Fault::TooLong)
    }

    fn add(&mut self, memory: &GuestMemory, descriptor: Descriptor) -> Result<(), Fault> {
        if descriptor.len() == 0 {
            return Err(Fault::Empty);
        }
        let pieces = if descriptor.is_write_only() {
            &mut self.writable
        } else if self.writable.is_empty() {
            &mut self.readable
        } else {
            return Err(Fault::Order);
        };
        add_pieces(memory, descriptor.addr(), descriptor.len(), pieces)
    }
}
