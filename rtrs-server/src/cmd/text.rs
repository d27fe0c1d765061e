//! Formatting of sizes in the output of commands.

/// Formats a size in the largest unit in which it is at least one.
pub(super) fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut size = bytes as f64;
    let mut unit = "B";
    for next in units {
        if size < 1024.0 {
            break;
        }
        size /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_their_largest_unit() {
        for (size, text) in
            [(0, "0 B"), (1023, "1023 B"), (1 << 30, "1.0 GiB"), (3 << 19, "1.5 MiB")]
        {
            assert_eq!(bytes(size), text);
        }
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
    }
}
