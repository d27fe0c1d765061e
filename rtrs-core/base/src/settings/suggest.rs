//! "Did you mean": the known word nearest to a mistyped one.
//!
//! Defines [`nearest`], used for unknown keys in a configuration file and unknown parts of an
//! export specification.

/// Returns the candidate nearest to `word`, if at most a third of the letters (but at least one)
/// are inserted, dropped, replaced or swapped with a neighbor. Case and `_` for `-` do not count.
/// Words of more than 64 characters match nothing.
#[must_use]
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let folded = fold(word);
    if folded.len() > 64 {
        return None;
    }
    let distance_max = (folded.len() / 3).max(1);
    candidates
        .into_iter()
        .map(|candidate| (distance(&folded, &fold(candidate)), candidate))
        .filter(|(distance, _)| *distance <= distance_max)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn fold(word: &str) -> Vec<char> {
    word.chars().map(|c| if c == '_' { '-' } else { c.to_ascii_lowercase() }).collect()
}

/// Returns the optimal string alignment distance: edits of one letter and swaps of two neighbors.
fn distance(left: &[char], right: &[char]) -> usize {
    let width = right.len() + 1;
    let mut rows = vec![0; (left.len() + 1) * width];
    for (j, cell) in rows[..width].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=left.len() {
        rows[i * width] = i;
        for j in 1..width {
            let changed = usize::from(left[i - 1] != right[j - 1]);
            let mut best = (rows[(i - 1) * width + j] + 1)
                .min(rows[i * width + j - 1] + 1)
                .min(rows[(i - 1) * width + j - 1] + changed);
            if i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1] {
                best = best.min(rows[(i - 2) * width + j - 2] + 1);
            }
            rows[i * width + j] = best;
        }
    }
    rows[left.len() * width + right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_similar_words_are_suggested() {
        let keys = ["queue-depth", "chunk-size", "listen", "ro", "pin"];
        for (word, found) in [
            ("queue-dept", Some("queue-depth")),
            ("queue_depth", Some("queue-depth")),
            ("Chunk-Size", Some("chunk-size")),
            ("lisetn", Some("listen")),
            ("or", Some("ro")),
            ("pni", Some("pin")),
            ("banana", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, keys), found, "{word}");
        }
        assert_eq!(nearest(&"x".repeat(100_000), keys), None);
    }
}
