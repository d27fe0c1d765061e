//! Alignment of requests to device blocks.

use std::ops::Range;

use crate::proto::Op;

/// A request split into whole blocks and the partial blocks at its ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Blocks that are submitted to the device unchanged.
    pub(crate) whole: Range<u64>,
    /// Changed bytes in the partial block before the whole blocks, and in the one after them;
    /// usually empty.
    pub(crate) rest: [Range<u64>; 2],
    /// All blocks that are read or changed.
    pub(crate) span: Range<u64>,
    /// Block size at the time the client connected; the device may have changed it since.
    pub(crate) block: u64,
}

impl Cut {
    /// Splits a request at block boundaries. `block` must be a power of two.
    pub(crate) const fn new(op: Op, bytes: Range<u64>, block: u64) -> Self {
        const NONE: Range<u64> = 0..0;
        let Range { start, end } = bytes;
        let (down, up) = (start & !(block - 1), (start + block - 1) & !(block - 1));
        let (last_down, last_up) = (end & !(block - 1), (end + block - 1) & !(block - 1));
        match op {
            // Includes the bytes around the range that were not requested.
            Op::Read | Op::Cache | Op::BlockStatus | Op::Flush | Op::Disconnect => {
                Self { whole: down..last_up, rest: [NONE, NONE], span: down..last_up, block }
            }
            // A discard is a hint and must not exceed its range.
            Op::Trim => {
                let whole = if up < last_down { up..last_down } else { end..end };
                Self { span: whole.start..whole.end, whole, rest: [NONE, NONE], block }
            }
            // The range covers part of a single block.
            Op::Write | Op::WriteZeroes if up >= end && down < start => {
                Self { whole: end..end, rest: [start..end, NONE], span: down..last_up, block }
            }
            Op::Write | Op::WriteZeroes => Self {
                whole: up..last_down,
                rest: [start..up, last_down..end],
                span: down..last_up,
                block,
            },
        }
    }

    /// Number of partial blocks that change.
    pub(crate) fn fragments(&self) -> usize {
        self.rest.iter().filter(|bytes| !bytes.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(op: Op, bytes: Range<u64>) -> (Range<u64>, [Range<u64>; 2], Range<u64>) {
        let Cut { whole, rest, span, .. } = Cut::new(op, bytes, 512);
        (whole, rest, span)
    }

    #[test]
    fn cuts_match_examples() {
        let none = || 0..0;
        assert_eq!(cut(Op::Read, 513..514), (512..1024, [none(), none()], 512..1024));
        assert_eq!(cut(Op::Trim, 1..1535), (512..1024, [none(), none()], 512..1024));
        assert!(cut(Op::Trim, 1..1023).0.is_empty() && cut(Op::Trim, 3..9).0.is_empty());
        assert_eq!(cut(Op::Write, 3..9), (9..9, [3..9, none()], 0..512));
        assert_eq!(cut(Op::Write, 3..512), (512..512, [3..512, none()], 0..512));
        assert_eq!(cut(Op::Write, 512..515), (512..512, [512..512, 512..515], 512..1024));
        assert_eq!(cut(Op::Write, 511..513), (512..512, [511..512, 512..513], 0..1024));
        assert_eq!(cut(Op::WriteZeroes, 1..1537), (512..1536, [1..512, 1536..1537], 0..2048));
    }

    proptest! {
        #[test]
        fn a_cut_covers_exactly_the_range(
            start in 0u64..10_000, len in 1u64..10_000, shift in 0u32..13,
        ) {
            let (block, end) = (1 << shift, start + len);
            let Cut { whole, rest: [first, last], span, .. } =
                Cut::new(Op::Write, start..end, block);
            prop_assert!(whole.is_empty() || whole.start % block == 0 && whole.end % block == 0);
            let mut at = start;
            for part in [&first, &whole, &last].into_iter().filter(|part| !part.is_empty()) {
                prop_assert_eq!(part.start, at);
                at = part.end;
            }
            prop_assert_eq!(at, end);
            for part in [&first, &last].into_iter().filter(|part| !part.is_empty()) {
                prop_assert_eq!(part.start / block, (part.end - 1) / block, "one block");
                prop_assert!(part.end - part.start < block, "less than a block");
            }
            prop_assert_eq!(span, start / block * block..end.next_multiple_of(block));
            let trim = Cut::new(Op::Trim, start..end, block).whole;
            prop_assert!(trim.is_empty() || start <= trim.start && trim.end <= end);
        }
    }
}
