//! The view as text: columns, their order and the keys that sort by them.

use std::cmp::Ordering;

use super::rates::{Row, View};
use crate::settings::printable;

/// Contents of a column.
#[derive(Clone, Copy)]
enum Shown {
    Text(fn(&Row) -> &str),
    Paths,
    Number(fn(&Row) -> Option<f64>),
    Count(fn(&Row) -> Option<u64>),
    /// Average duration of a part of the time, shown if any row has parts.
    Part(&'static str),
}

/// Column of the table.
struct Column {
    title: &'static str,
    /// Key that sorts by the column.
    key: Option<char>,
    shown: Shown,
    /// Order in which a narrow screen omits columns, among the loads and among the times: the
    /// highest number first. Columns with 0 are never omitted.
    rank: (u8, u8),
}

const MIB: f64 = 1_048_576.0;

const fn column(title: &'static str, key: Option<char>, shown: Shown, rank: (u8, u8)) -> Column {
    Column { title, key, shown, rank }
}

/// All columns, from left to right. The first is as wide as it needs to be.
const COLUMNS: [Column; 18] = [
    column("NAME", Some('n'), Shown::Text(|row| &row.name), (0, 0)),
    column("STATE", Some('s'), Shown::Text(|row| &row.state), (0, 2)),
    column("PATHS", None, Shown::Paths, (4, 5)),
    column("IO/s", Some('i'), Shown::Number(|row| row.ios_per_s), (0, 4)),
    column("r/s", Some('r'), Shown::Number(|row| row.reads_per_s), (5, 9)),
    column("w/s", Some('w'), Shown::Number(|row| row.writes_per_s), (5, 9)),
    column("rMB/s", Some('R'), Shown::Number(read_mib), (3, 9)),
    column("wMB/s", Some('W'), Shown::Number(write_mib), (3, 9)),
    column("kB/IO", None, Shown::Number(kib_per_io), (8, 9)),
    column("inflt", Some('d'), Shown::Count(|row| row.inflight), (2, 6)),
    column("avg us", Some('a'), Shown::Number(|row| row.latency_avg_us), (7, 0)),
    column("p50 us", None, Shown::Number(|row| row.latency_p50_us), (8, 7)),
    column("p99 us", Some('l'), Shown::Number(|row| row.latency_p99_us), (0, 3)),
    column("err/s", Some('e'), Shown::Number(|row| row.errors_per_s), (6, 8)),
    column("queue us", Some('Q'), Shown::Part("client_queue"), (9, 0)),
    column("net us", Some('N'), Shown::Part("network"), (9, 0)),
    column("srvq us", Some('S'), Shown::Part("server_queue"), (9, 0)),
    column("disk us", Some('D'), Shown::Part("backend"), (9, 0)),
];

fn read_mib(row: &Row) -> Option<f64> {
    row.read_bytes_per_s.map(|bytes| bytes / MIB)
}

fn write_mib(row: &Row) -> Option<f64> {
    row.write_bytes_per_s.map(|bytes| bytes / MIB)
}

fn kib_per_io(row: &Row) -> Option<f64> {
    row.bytes_per_io.map(|bytes| bytes / 1024.0)
}

/// Width of a number.
const NUMBER_WIDTH: usize = 8;
/// Width of all daemons' states, except for rare long ones.
const STATE_WIDTH: usize = 12;
/// Width of `2/2`.
const PATHS_WIDTH: usize = 7;

/// Layout of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Key of the column to sort by.
    sort: char,
    /// Whether paths are shown too.
    pub with_paths: bool,
    /// Whether times take precedence over loads if not all columns fit.
    pub times_first: bool,
    /// Number of characters per line.
    pub width: usize,
}

impl Default for Layout {
    fn default() -> Self {
        Self { sort: 'n', with_paths: true, times_first: false, width: usize::MAX }
    }
}

impl Layout {
    /// Sorts by the column of a key. Returns false if there is none.
    pub fn sort_by(&mut self, key: char) -> bool {
        let is_known = COLUMNS.iter().any(|column| column.key == Some(key));
        if is_known {
            self.sort = key;
        }
        is_known
    }

    /// Returns the title of the column by which rows are sorted.
    #[must_use]
    pub fn sorted_by(&self) -> &'static str {
        self.column().map_or("", |column| column.title)
    }

    fn column(&self) -> Option<&'static Column> {
        COLUMNS.iter().find(|column| column.key == Some(self.sort))
    }

    /// Compares two rows: text in ascending order, numbers in descending order, rows without a
    /// value last. Equal rows are ordered by name.
    fn compare(&self, a: &Row, b: &Row) -> Ordering {
        let fall = |of: &dyn Fn(&Row) -> Option<f64>| {
            let number = |row| of(row).unwrap_or(f64::NEG_INFINITY);
            number(b).total_cmp(&number(a))
        };
        let order = match self.column().map(|column| column.shown) {
            Some(Shown::Text(text)) => text(a).cmp(text(b)),
            Some(Shown::Number(number)) => fall(&number),
            Some(Shown::Count(count)) => fall(&|row| count(row).map(|count| count as f64)),
            Some(Shown::Part(name)) => fall(&|row| row.parts_us.get(name).map(|part| part.avg)),
            Some(Shown::Paths) | None => Ordering::Equal,
        };
        order.then_with(|| a.name.cmp(&b.name))
    }

    /// Formats a view: for each group, a line of titles, followed by its rows.
    #[must_use]
    pub fn lines(&self, view: &View) -> Vec<String> {
        let mut lines = Vec::new();
        // Sessions come before exports, which is the reverse order of their names.
        for (name, rows) in view.groups.iter().rev() {
            if !lines.is_empty() {
                lines.push(String::new());
            }
            self.group(name, rows, &mut lines);
        }
        lines
    }

    /// Returns the columns that fit on a line.
    fn fitting(
        &self,
        with_parts: bool,
        width_of: &dyn Fn(&Column) -> usize,
    ) -> Vec<&'static Column> {
        let is_shown = |column: &&Column| with_parts || !matches!(column.shown, Shown::Part(_));
        let rank = |column: &Column| {
            let (loads, times) = column.rank;
            if self.times_first && with_parts { times } else { loads }
        };
        let mut columns: Vec<_> = COLUMNS.iter().filter(is_shown).collect();
        while columns.iter().map(|column| width_of(column)).sum::<usize>() > self.width {
            match columns.iter().map(|column| rank(column)).max() {
                None | Some(0) => break,
                Some(last) => columns.retain(|column| rank(column) < last),
            }
        }
        columns
    }

    fn group(&self, name: &str, rows: &[Row], lines: &mut Vec<String>) {
        let mut sorted: Vec<&Row> = rows.iter().collect();
        sorted.sort_by(|a, b| self.compare(a, b));
        let length = |row: &Row| printable(&row.name).chars().count();
        let below = |row: &Row| {
            let longest = row.paths.iter().map(|path| length(path) + 2).max();
            longest.filter(|_| self.with_paths).unwrap_or(0)
        };
        let widths = rows.iter().map(|row| length(row).max(below(row)));
        let width = widths.max().unwrap_or(0).max(name.len());
        let state = rows.iter().map(|row| row.state.len()).max().unwrap_or(0).max(STATE_WIDTH);
        let knows = |row: &Row| !row.parts_us.is_empty();
        let with_parts = rows.iter().any(|row| knows(row) || row.paths.iter().any(knows));
        let width_of = |column: &Column| match (column.title, column.shown) {
            ("NAME", _) => width,
            (_, Shown::Text(_)) => 1 + state,
            (_, Shown::Paths) => 1 + PATHS_WIDTH,
            _ => 1 + NUMBER_WIDTH,
        };
        let columns = self.fitting(with_parts, &width_of);
        let cells = |cell: &dyn Fn(&Column) -> String| {
            let padded = columns.iter().map(|column| match (column.title, column.shown) {
                ("NAME", _) => format!("{:<width$}", cell(column)),
                (_, Shown::Text(_)) => format!(" {:<state$}", cell(column)),
                (_, Shown::Paths) => format!(" {:>PATHS_WIDTH$}", cell(column)),
                _ => format!(" {:>NUMBER_WIDTH$}", cell(column)),
            });
            padded.collect::<String>().trim_end().to_owned()
        };
        let title = |column: &Column| match column.title {
            "NAME" => name.to_uppercase(),
            title => title.to_owned(),
        };
        lines.push(cells(&title));
        for row in sorted {
            lines.push(cells(&|column| text(column, row)));
            if self.with_paths {
                for path in &row.paths {
                    let path = Row { name: format!("  {}", path.name), ..path.clone() };
                    lines.push(cells(&|column| text(column, &path)));
                }
            }
        }
    }

    /// Describes the keys, one per line.
    #[must_use]
    pub fn help() -> Vec<String> {
        let mut lines = vec!["Sort by:".to_owned()];
        let keys = COLUMNS.iter().filter_map(|column| Some((column.key?, column.title)));
        lines.extend(keys.map(|(key, title)| format!("  {key}  {title}")));
        lines.extend(
            [
                "",
                "  p  show or hide paths",
                "  t  switch between times and loads if not all columns fit",
                "  h  show or hide this help",
                "  q  quit",
            ]
            .map(str::to_owned),
        );
        lines
    }
}

/// Formats a cell. Names come from peers and other users' processes.
fn text(column: &Column, row: &Row) -> String {
    let dash = || "-".to_owned();
    match column.shown {
        Shown::Text(text) => printable(text(row)),
        Shown::Paths => match (row.paths_connected, row.paths_total) {
            (Some(up), Some(all)) => format!("{up}/{all}"),
            _ => dash(),
        },
        Shown::Number(number) => number(row).map_or_else(dash, number_text),
        Shown::Count(count) => count(row).map_or_else(dash, |count| count.to_string()),
        Shown::Part(name) => {
            row.parts_us.get(name).map_or_else(dash, |times| number_text(times.avg))
        }
    }
}

/// Formats a number with as many digits as are needed to tell it apart from others.
fn number_text(number: f64) -> String {
    if number < 10.0 {
        format!("{number:.2}")
    } else if number < 1000.0 {
        format!("{number:.1}")
    } else {
        format!("{number:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::PartTimes;
    use super::*;

    /// Returns the view of these groups.
    fn view_of(groups: impl IntoIterator<Item = (&'static str, Vec<Row>)>) -> View {
        View { time: 0.0, interval_s: 1.0, groups: groups.into_iter().collect() }
    }

    fn row(name: &str, ios: Option<f64>, p99: Option<f64>) -> Row {
        Row {
            name: name.into(),
            state: "open".into(),
            ios_per_s: ios,
            latency_p99_us: p99,
            ..Row::default()
        }
    }

    /// Returns the names in the order of the view.
    fn names(layout: Layout, rows: &[Row]) -> Vec<String> {
        let lines = layout.lines(&view_of([("sessions", rows.to_vec())]));
        let first = |line: &String| line.split_whitespace().next().unwrap_or("").to_owned();
        lines[1..].iter().map(first).collect()
    }

    #[test]
    fn keys_sort_and_rows_without_a_value_come_last() {
        let rows = [
            row("c", Some(5.0), Some(900.0)),
            row("a", None, None),
            row("b", Some(70.0), Some(30.0)),
            row("d", Some(5.0), Some(1000.0)),
        ];
        let mut layout = Layout::default();
        assert_eq!(names(layout, &rows), ["a", "b", "c", "d"]);
        assert_eq!(layout.sorted_by(), "NAME");
        for (key, title, order) in [
            ('i', "IO/s", ["b", "c", "d", "a"]),
            ('l', "p99 us", ["d", "c", "b", "a"]),
            ('r', "r/s", ["a", "b", "c", "d"]),
            ('n', "NAME", ["a", "b", "c", "d"]),
        ] {
            assert!(layout.sort_by(key));
            assert_eq!(
                (layout.sorted_by(), names(layout, &rows)),
                (title, order.map(str::to_owned).into())
            );
        }
        assert!(!layout.sort_by('x') && !layout.sort_by('q') && !layout.sort_by('p'));
        assert_eq!(layout.sorted_by(), "NAME");
    }

    #[test]
    fn lines_are_aligned_and_paths_can_be_hidden() {
        let path = Row { state: "connected".into(), ..row("tcp://10.0.0.2:1234", Some(9.5), None) };
        let session = Row {
            paths_connected: Some(1),
            paths_total: Some(2),
            reads_per_s: Some(12_345.6),
            read_bytes_per_s: Some(50.25 * MIB),
            bytes_per_io: Some(4096.0),
            inflight: Some(32),
            paths: vec![path],
            ..row("v\n\u{1b}[31m", Some(12_345.6), Some(812.34))
        };
        let view = view_of([("exports", vec![row("e", None, None)]), ("sessions", vec![session])]);
        let lines = Layout::default().lines(&view);
        let expected = [
            "SESSIONS              STATE          PATHS     IO/s      r/s      w/s    rMB/s    \
             wMB/s    kB/IO    inflt   avg us   p50 us   p99 us    err/s",
            "v\\n\\u{1b}[31m         open             1/2    12346    12346        -     50.2    \
             \x20   -     4.00       32        -        -    812.3        -",
            "  tcp://10.0.0.2:1234 connected          -     9.50        -        -        -        \
             -        -        -        -        -        -        -",
            "",
            "EXPORTS STATE          PATHS     IO/s      r/s      w/s    rMB/s    wMB/s    kB/IO    \
             inflt   avg us   p50 us   p99 us    err/s",
            "e       open               -        -        -        -        -        -        -    \
             \x20   -        -        -        -        -",
        ];
        assert_eq!(lines, expected);
        let times = PartTimes { avg: 12.5, p50: 10.0, p99: 99.0 };
        let split = Row { parts_us: [("network".into(), times)].into(), ..row("p", None, None) };
        let lines_of_parts = Layout::default().lines(&view_of([(
            "sessions",
            vec![Row { paths: vec![split], ..row("v", None, None) }],
        )]));
        assert!(lines_of_parts[0].ends_with(" queue us   net us  srvq us  disk us"));
        assert!(lines_of_parts[2].ends_with("        -     12.5        -        -"));
        let brief = Layout { with_paths: false, ..Layout::default() }.lines(&view);
        assert_eq!(brief.len(), lines.len() - 1);
        assert!(!brief.concat().contains("tcp://"));
    }

    #[test]
    fn columns_that_do_not_fit_are_dropped_in_order() {
        let times = PartTimes { avg: 12.5, p50: 10.0, p99: 99.0 };
        let parts = ["client_queue", "network", "server_queue", "backend"];
        let parts = parts.map(|name| (name.to_owned(), times)).into();
        let paths = vec![row("tcp://10.0.0.2:1234", Some(1.0), None)];
        let rows = vec![Row { parts_us: parts, paths, ..row("v", Some(1.0), Some(2.0)) }];
        let view = view_of([("sessions", rows)]);
        let titles = |width: usize, times_first: bool| {
            let lines = Layout { width, times_first, ..Layout::default() }.lines(&view);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{lines:#?}");
            lines[0].clone()
        };
        let all = titles(usize::MAX, false);
        assert_eq!(all, titles(all.len(), false));
        let without_parts = titles(all.len() - 1, false);
        assert_eq!(without_parts, all[..all.len() - 36]);
        for words in ["STATE", "IO/s", "rMB/s", "wMB/s", "p99 us"] {
            assert!(titles(80, false).contains(words), "{words}");
        }
        for words in ["avg us", "queue us", "net us", "srvq us", "disk us"] {
            assert!(titles(80, true).contains(words), "{words}");
        }
        // The screen truncates the remaining columns.
        let least = Layout { width: 10, ..Layout::default() }.lines(&view);
        assert!(least[0].starts_with("SESSIONS") && least[0].ends_with("p99 us"), "{least:?}");
    }

    #[test]
    fn every_key_belongs_to_one_column_and_is_in_the_help() {
        let help = Layout::help().join("\n");
        let mut keys: Vec<char> = COLUMNS.iter().filter_map(|column| column.key).collect();
        for key in &keys {
            assert!(help.contains(&format!("\n  {key}  ")), "{key}");
        }
        keys.extend(['p', 't', 'h', 'q']);
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count, "a key has two meanings");
    }
}
