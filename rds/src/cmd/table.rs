//! Text tables: columns as wide as their longest cell.

/// Formats rows of cells, indented by two; the first line contains the headings. Columns whose
/// heading begins with `>` are right-aligned.
pub(super) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let names: Vec<&str> = headings.iter().map(|name| name.trim_start_matches('>')).collect();
    let first: Vec<String> = names.iter().map(ToString::to_string).collect();
    let lines = || std::iter::once(&first).chain(rows);
    let width = |column: usize| lines().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let mut text = String::new();
    for line in lines() {
        let mut shown = String::new();
        for ((cell, width), heading) in line.iter().zip(widths.iter().copied()).zip(headings) {
            shown += &match heading.starts_with('>') {
                true => format!("  {cell:>width$}"),
                false => format!("  {cell:<width$}"),
            };
        }
        text += &format!("{}\n", shown.trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_aligned() {
        let rows = [["10.0.0.1", "9", "up"], ["fd00::1:2:3", "4000", "down"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        let text =
            "  PEER         PORT  STATE\n  10.0.0.1        9  up\n  fd00::1:2:3  4000  down\n";
        assert_eq!(table(&["PEER", ">PORT", "STATE"], &rows), text);
    }
}
