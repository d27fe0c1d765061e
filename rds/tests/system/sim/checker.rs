//! Message checker: each message arrives unchanged, in order, at most once, and at least once if
//! both nodes ran throughout.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use rtrs_core::prng::Prng;

/// A node, and the number of its run.
pub(super) type Life = (usize, u32);

/// Number of bytes at the start of the payload that the checker reads.
pub(super) const STAMP: usize = 8;
/// Maximum length of the payload after the stamp.
pub(super) const LEN_MAX: usize = 6000;
/// Number of offsets in the pattern at which a payload may begin.
const SHIFTS: usize = 1000;

#[derive(Debug)]
struct Sent {
    from: Life,
    to: Life,
    ports: (u16, u16),
    len: usize,
    /// Runs of the receiving node in which the message was read.
    read_in: Vec<u32>,
}

/// All messages of a run.
#[derive(Debug, Default)]
pub(super) struct Checker {
    sent: Vec<Sent>,
    /// Newest message read, by source and destination.
    newest: BTreeMap<(Life, u16, Life, u16), usize>,
}

impl Checker {
    /// Returns the payload of the next message, of this length after the stamp.
    pub(super) fn payload(&self, len: usize) -> Vec<u8> {
        let number = self.sent.len();
        [&(number as u64).to_be_bytes(), pattern(number, len)].concat()
    }

    /// Records that the next message was sent.
    pub(super) fn sent(&mut self, from: Life, to: Life, ports: (u16, u16), len: usize) {
        self.sent.push(Sent { from, to, ports, len, read_in: Vec::new() });
    }

    /// Checks a message that was read. `announces` is whether the reader's node announces its
    /// restarts.
    pub(super) fn read(
        &mut self,
        from: (usize, u16),
        to: (Life, u16),
        payload: &[u8],
        announces: bool,
    ) -> Result<(), String> {
        let (stamp, rest) = payload.split_first_chunk::<STAMP>().ok_or("data: too short")?;
        let number = usize::try_from(u64::from_be_bytes(*stamp)).map_err(|_| "data: no stamp")?;
        let sent = self.sent.get_mut(number).ok_or("data: never sent")?;
        let what = |rule| format!("{rule}: message {number} {sent:?} read by {to:?}");
        if (sent.from.0, sent.ports.0) != from || (sent.to.0, sent.ports.1) != (to.0.0, to.1) {
            return Err(what("address"));
        }
        if rest.len() != sent.len || rest != pattern(number, sent.len) {
            return Err(what("data"));
        }
        let run = to.0.1;
        if sent.read_in.contains(&run) || (announces && !sent.read_in.is_empty()) {
            return Err(what("once"));
        }
        let key = (sent.from, sent.ports.0, to.0, to.1);
        if self.newest.get(&key).is_some_and(|newest| *newest > number) {
            return Err(what("order"));
        }
        sent.read_in.push(run);
        self.newest.insert(key, number);
        Ok(())
    }

    /// Describes a message, if any, that has not arrived although both nodes ran throughout.
    /// `lives` are the runs of the nodes at the end.
    pub(super) fn missing(&self, lives: &[u32]) -> Option<String> {
        let lasts = |life: Life| lives.get(life.0) == Some(&life.1);
        let missing = (0_usize..)
            .zip(&self.sent)
            .find(|(_, sent)| lasts(sent.from) && lasts(sent.to) && sent.read_in.is_empty());
        missing.map(|(number, sent)| format!("lost: message {number} {sent:?}"))
    }
}

/// Returns the bytes after a message's stamp, which differ among any thousand consecutive messages.
fn pattern(number: usize, len: usize) -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        let mut bytes = vec![0; LEN_MAX + SHIFTS];
        Prng::new(7).fill(&mut bytes);
        bytes
    });
    &bytes[number % SHIFTS..][..len]
}
