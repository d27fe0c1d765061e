//! File that preserves an export's epoch across restarts of the server.
//!
//! Owns [`EpochFile`], which works on a [`Medium`]: in the daemon, a file in the state directory;
//! in tests and the simulator, a medium that fails and tears writes. The file holds two slots, each
//! in its own block. A slot is a line of text with a sequence number, an epoch and a checksum. The
//! file is allocated when the export is opened, and a save overwrites the older slot in place, so
//! that a save needs no free space.
//!
//! A server that starts trusts a file only if both slots are intact, and continues with the newer
//! one. A file that is missing, empty or torn may lack a save: the export then starts in a fresh
//! epoch, which every client with unflushed writes treats as a loss. For the same reason a save
//! that fails clears the file.

use std::io;

/// Offset of the second slot.
const SLOT_SIZE: usize = 4096;

/// Size of the file.
pub const FILE_SIZE: usize = 2 * SLOT_SIZE;

/// Size of the text in a slot.
const LINE_SIZE: usize = 72;

/// First bytes of a slot: format and version.
const MAGIC: &str = "rtrs-epoch 1";

/// Storage of an [`EpochFile`].
pub trait Medium {
    /// Returns the content of the file, or `None` if the file does not exist.
    ///
    /// # Errors
    /// The system's error.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the whole file with one whose blocks are allocated, or leaves the file unchanged.
    ///
    /// # Errors
    /// The system's error.
    fn replace(&mut self, content: &[u8]) -> io::Result<()>;

    /// Overwrites a part of the file in place and makes that part durable.
    ///
    /// # Errors
    /// The system's error. The file may then contain any part of the new bytes.
    fn overwrite(&mut self, at: usize, bytes: &[u8]) -> io::Result<()>;

    /// Makes the file empty, or removes the file.
    ///
    /// # Errors
    /// The system's error.
    fn clear(&mut self) -> io::Result<()>;
}

/// Outcome of a save.
#[derive(Debug)]
pub enum Saved {
    /// The next server continues with the saved epoch.
    Kept,
    /// The epoch could not be written, for this reason. The next server starts a fresh epoch.
    Cleared(io::Error),
}

/// The file of one export.
#[derive(Debug)]
pub struct EpochFile<M> {
    medium: M,
    sequence: u64,
    number: u64,
    /// Both slots hold what this process has written or read.
    intact: bool,
    /// Reason why the file has been empty since it was opened, until the reason is reported.
    cleared: Option<io::Error>,
}

impl<M: Medium> EpochFile<M> {
    /// Opens and allocates the file. `fresh` is the epoch for a file that cannot be trusted: a
    /// number that no server has used before.
    ///
    /// # Errors
    /// The file cannot be read, or can be neither allocated nor cleared.
    pub fn open(mut medium: M, fresh: u64) -> io::Result<Self> {
        let content = medium.read()?;
        let newest = content.as_deref().and_then(newest);
        let (sequence, number) = newest.unwrap_or((0, fresh));
        let intact = newest.is_some();
        let mut file = Self { medium, sequence, number, intact, cleared: None };
        if newest.is_none() {
            let known = content.as_deref().and_then(plain_number);
            file.allocate(known.unwrap_or(fresh))?;
        }
        Ok(file)
    }

    /// Saves the epoch of an export that is being opened.
    fn allocate(&mut self, number: u64) -> io::Result<()> {
        self.cleared = match self.save(number)? {
            Saved::Kept => None,
            Saved::Cleared(error) => Some(error),
        };
        Ok(())
    }

    /// Returns why the last open or reopen could not allocate the file, which is then empty. The
    /// next save tries again.
    pub fn take_cleared(&mut self) -> Option<io::Error> {
        self.cleared.take()
    }

    /// Returns the epoch that the file holds, without changing the file; `None` for a file that
    /// cannot be trusted.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn look(mut medium: M) -> io::Result<Option<u64>> {
        let content = medium.read()?;
        let content = content.as_deref();
        let number = content.and_then(newest).map(|(_, number)| number);
        Ok(number.or_else(|| content.and_then(plain_number)))
    }

    /// Returns the epoch to continue with when the export is reopened: the saved one, or `fresh` if
    /// the last save failed.
    ///
    /// # Errors
    /// The file can be neither written nor cleared.
    pub fn reopen(&mut self, fresh: u64) -> io::Result<u64> {
        if !self.intact {
            self.allocate(fresh)?;
        }
        Ok(self.number)
    }

    /// Returns the epoch that was read or saved last.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Saves the epoch.
    ///
    /// # Errors
    /// The file can be neither written nor cleared: the next server may continue with an earlier
    /// epoch.
    pub fn save(&mut self, number: u64) -> io::Result<Saved> {
        self.number = number;
        if self.intact {
            match self.overwrite() {
                Ok(()) => return Ok(Saved::Kept),
                Err(_) if rtrs_core::mutated!(FailedSaveCounts) => return Ok(Saved::Kept),
                Err(_) => self.intact = false,
            }
        }
        match self.replace() {
            Ok(()) => {
                self.intact = true;
                Ok(Saved::Kept)
            }
            Err(error) => match self.medium.clear() {
                Ok(()) => Ok(Saved::Cleared(error)),
                Err(_) => Err(error),
            },
        }
    }

    /// Writes the epoch to the older slot.
    fn overwrite(&mut self) -> io::Result<()> {
        self.sequence += 1;
        let line = encode(self.sequence, self.number);
        self.medium.overwrite(slot_of(self.sequence), line.as_bytes())
    }

    /// Writes the epoch to both slots of a new file.
    fn replace(&mut self) -> io::Result<()> {
        let mut content = vec![0; FILE_SIZE];
        for _ in 0..2 {
            self.sequence += 1;
            let at = slot_of(self.sequence);
            let line = encode(self.sequence, self.number);
            content[at..at + LINE_SIZE].copy_from_slice(line.as_bytes());
        }
        self.medium.replace(&content)
    }

    /// Returns the storage, for tests that break it.
    pub fn medium(&mut self) -> &mut M {
        &mut self.medium
    }
}

/// Returns the offset of the slot for a sequence number.
const fn slot_of(sequence: u64) -> usize {
    if sequence.is_multiple_of(2) { 0 } else { SLOT_SIZE }
}

/// FNV-1a, 64 bits: a checksum against accidental corruption.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn encode(sequence: u64, number: u64) -> String {
    let body = format!("{MAGIC} {sequence:020} {number:020} ");
    let sum = fnv1a(body.as_bytes());
    format!("{body}{sum:016x}\n")
}

/// Returns the sequence number and the epoch of an intact slot.
fn decode(slot: &[u8]) -> Option<(u64, u64)> {
    let line = std::str::from_utf8(slot.get(..LINE_SIZE)?).ok()?;
    let mut words = line.strip_prefix(MAGIC)?.split_whitespace();
    let (sequence, number) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    (line == encode(sequence, number)).then_some((sequence, number))
}

/// Returns the newer slot of a file whose slots are both intact.
fn newest(content: &[u8]) -> Option<(u64, u64)> {
    if content.len() != FILE_SIZE {
        return None;
    }
    let (first, second) = (decode(content)?, decode(&content[SLOT_SIZE..])?);
    Some(first.max(second))
}

/// Returns the epoch from a file in the format of earlier versions: a line with a number.
fn plain_number(content: &[u8]) -> Option<u64> {
    std::str::from_utf8(content).ok()?.strip_suffix('\n')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use rtrs_core::prng::{Prng, Ratio};

    use super::*;

    /// An in-memory file whose operations fail and tear what they write.
    #[derive(Debug)]
    struct Torn {
        content: Option<Vec<u8>>,
        prng: Prng,
        /// Proportion of replacements and overwrites that fail.
        fails: Ratio,
        /// Proportion of removals that fail.
        stays: Ratio,
    }

    impl Torn {
        fn refuse(&mut self, share: Ratio) -> io::Result<()> {
            if self.prng.chance(share) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            Ok(())
        }
    }

    impl Medium for &mut Torn {
        fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
            Ok(self.content.clone())
        }

        fn replace(&mut self, content: &[u8]) -> io::Result<()> {
            self.refuse(self.fails)?;
            self.content = Some(content.to_vec());
            Ok(())
        }

        fn overwrite(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
            let refused = self.refuse(self.fails);
            let done =
                if refused.is_err() { self.prng.index(bytes.len() + 1) } else { bytes.len() };
            let content = self.content.as_mut().expect("allocated");
            content[at..at + done].copy_from_slice(&bytes[..done]);
            refused
        }

        fn clear(&mut self) -> io::Result<()> {
            self.refuse(self.stays)?;
            self.content = Some(Vec::new());
            Ok(())
        }
    }

    fn torn(seed: u64, fails: Ratio, stays: Ratio) -> Torn {
        Torn { content: None, prng: Prng::new(seed), fails, stays }
    }

    #[test]
    fn a_slot_is_a_line_of_fixed_size() {
        for (sequence, number) in [(0, 0), (1, u64::MAX), (u64::MAX, 7)] {
            let line = encode(sequence, number);
            assert_eq!(line.len(), LINE_SIZE);
            assert_eq!(decode(line.as_bytes()), Some((sequence, number)));
            for cut in 0..LINE_SIZE {
                let mut part = line.as_bytes().to_vec();
                part[cut] ^= 1;
                assert_eq!(decode(&part), None, "byte {cut}");
                assert_eq!(decode(&line.as_bytes()[..cut]), None);
            }
        }
    }

    #[test]
    fn a_file_is_trusted_only_if_both_slots_are_intact() {
        let mut medium = torn(1, Ratio::ZERO, Ratio::ZERO);
        assert_eq!(EpochFile::look(&mut medium).unwrap(), None);
        let mut file = EpochFile::open(&mut medium, 100).unwrap();
        assert_eq!(file.number(), 100);
        file.save(101).unwrap();
        file.save(102).unwrap();
        assert_eq!(EpochFile::open(&mut medium, 7).unwrap().number(), 102);
        for at in [0, SLOT_SIZE] {
            let good = medium.content.clone();
            medium.content.as_mut().unwrap()[at + 20] ^= 1;
            assert_eq!(EpochFile::look(&mut medium).unwrap(), None);
            assert_eq!(EpochFile::open(&mut medium, 7).unwrap().number(), 7, "slot at {at}");
            medium.content = good;
        }
        medium.content.as_mut().unwrap().truncate(SLOT_SIZE + LINE_SIZE);
        assert_eq!(EpochFile::open(&mut medium, 8).unwrap().number(), 8);
    }

    #[test]
    fn a_number_of_an_earlier_version_is_read() {
        for (text, number) in [("14\n", 14), ("14", 7), ("", 7), ("seven\n", 7), ("\0\0\n", 7)] {
            let mut medium = torn(1, Ratio::ZERO, Ratio::ZERO);
            medium.content = Some(text.into());
            assert_eq!(EpochFile::open(&mut medium, 7).unwrap().number(), number, "{text:?}");
            assert_eq!(EpochFile::look(&mut medium).unwrap(), Some(number));
        }
    }

    #[test]
    fn a_full_disk_does_not_prevent_saving_an_epoch() {
        let mut medium = torn(1, Ratio::ZERO, Ratio::ZERO);
        let mut file = EpochFile::open(&mut medium, 100).unwrap();
        file.save(101).unwrap();
        // Overwriting in place needs no space.
        struct Full<'a>(&'a mut Torn);
        impl Medium for Full<'_> {
            fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
                self.0.content.clone().map_or(Ok(None), |content| Ok(Some(content)))
            }
            fn replace(&mut self, _content: &[u8]) -> io::Result<()> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn overwrite(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
                self.0.overwrite(at, bytes)
            }
            fn clear(&mut self) -> io::Result<()> {
                self.0.clear()
            }
        }
        let mut file = EpochFile::open(Full(&mut medium), 7).unwrap();
        assert_eq!(file.number(), 101);
        assert!(matches!(file.save(102), Ok(Saved::Kept)));
        assert_eq!(EpochFile::look(&mut medium).unwrap(), Some(102));
    }

    /// Servers start and stop over a failing medium: once a raised epoch has been reported as
    /// saved, no server uses an earlier one.
    #[test]
    fn a_failed_or_torn_save_never_hides_an_advance() {
        let (mut kept, mut cleared, mut refused) = (0, 0, 0);
        for seed in 0..2000 {
            let mut shares = Prng::new(seed ^ 0x5a5a);
            let mut share = || Ratio::new(shares.next_u32() % 4, 4);
            let mut medium = torn(seed, share(), share());
            // Epochs that ended when the epoch was raised and saved.
            let mut passed: Vec<u64> = Vec::new();
            for server in 1..7 {
                let Ok(mut file) = EpochFile::open(&mut medium, server << 32) else { continue };
                let mut used = vec![file.number()];
                assert!(!passed.contains(&used[0]), "seed {seed}, server {server}: {passed:?}");
                for rises in 1..=shares.below(4) {
                    let (number, was_refused) = (used[0] + rises, refused);
                    match file.save(number) {
                        Ok(Saved::Kept) => kept += 1,
                        Ok(Saved::Cleared(_)) => cleared += 1,
                        Err(_) => refused += 1,
                    }
                    if refused == was_refused {
                        passed.extend(&used);
                    }
                    used.push(number);
                }
            }
        }
        assert!(kept > 100 && cleared > 100 && refused > 100, "{kept} {cleared} {refused}");
    }
}
