//! Counter samples, and the rates between two samples.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

use crate::metrics::Bucket;

/// Counters of reads and writes, separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadsWrites {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

/// Counters that only increase while the process is running.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of completed IOs.
    pub ios: u64,
    /// Number of bytes transferred.
    pub bytes: u64,
    /// Number of failed IOs.
    pub errors: u64,
    /// Total time of all IOs in nanoseconds.
    pub nanos: u64,
    /// Counts by direction, if available.
    pub by_direction: Option<ReadsWrites>,
    /// Histogram of IO times, if available, without empty buckets and in ascending order.
    pub times: Vec<Bucket>,
    /// Histograms of parts of these times, by name, if available.
    pub parts: BTreeMap<String, Vec<Bucket>>,
}

impl Counters {
    /// Returns true if these counters belong to the same process as earlier ones, which is the case
    /// if none has decreased.
    fn continues(&self, before: &Self) -> bool {
        let plain = |all: &Self| [all.ios, all.bytes, all.errors, all.nanos];
        let by_direction = |all: &Self| {
            let ReadsWrites { reads, read_bytes, writes, write_bytes } =
                all.by_direction.unwrap_or_default();
            [reads, read_bytes, writes, write_bytes]
        };
        let plain_now = plain(self).into_iter().zip(plain(before));
        let by_direction_now = by_direction(self).into_iter().zip(by_direction(before));
        plain_now.chain(by_direction_now).all(|(now, before)| now >= before)
    }
}

/// An entry of a sample: a session, a path or an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Name.
    pub name: String,
    /// Identifier, such as a process ID, that distinguishes the entry from a later one with the
    /// same name.
    pub instance: String,
    /// State.
    pub state: String,
    /// Number of connected paths and total number of paths, if the entry has paths.
    pub paths_up: Option<(usize, usize)>,
    /// Number of requests in flight.
    pub inflight: Option<u64>,
    /// Counters; None if there was no answer.
    pub counters: Option<Counters>,
    /// Paths.
    pub paths: Vec<Self>,
}

/// All entries of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Name of the kind: `sessions` or `exports`.
    pub name: &'static str,
    /// Time at which the counters were read.
    pub at: Instant,
    /// Entries.
    pub entries: Vec<Entry>,
}

/// Counters of one or more daemons at a point in time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Time of the sample.
    pub at: Instant,
    /// Groups of entries.
    pub groups: Vec<Group>,
}

/// A row of the view. There are no rates unless there are counters for the whole interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Name.
    pub name: String,
    /// State.
    pub state: String,
    /// Number of connected paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paths_connected: Option<usize>,
    /// Total number of paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paths_total: Option<usize>,
    /// Length in seconds of the interval that the rates cover. The daemons answer one after
    /// another, so this differs slightly from the interval of the view.
    pub interval_s: Option<f64>,
    /// Completed IOs per second.
    pub ios_per_s: Option<f64>,
    /// Reads per second.
    pub reads_per_s: Option<f64>,
    /// Writes per second.
    pub writes_per_s: Option<f64>,
    /// Bytes read per second.
    pub read_bytes_per_s: Option<f64>,
    /// Bytes written per second.
    pub write_bytes_per_s: Option<f64>,
    /// Average size of an IO.
    pub bytes_per_io: Option<f64>,
    /// Number of requests in flight at the end of the interval.
    pub inflight: Option<u64>,
    /// Average time of an IO in microseconds.
    pub latency_avg_us: Option<f64>,
    /// Median time of an IO in microseconds.
    pub latency_p50_us: Option<f64>,
    /// 99th percentile of the IO time in microseconds.
    pub latency_p99_us: Option<f64>,
    /// Failed IOs per second.
    pub errors_per_s: Option<f64>,
    /// Time spent in each part of IOs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parts_us: BTreeMap<String, PartTimes>,
    /// Rows of this row's paths.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<Self>,
}

/// Times for one part of the IOs, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PartTimes {
    /// Average.
    pub avg: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

/// The rates during an interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct View {
    /// End of the interval, in seconds since 1970.
    pub time: f64,
    /// Length of the interval in seconds.
    pub interval_s: f64,
    /// Rows by group.
    #[serde(flatten)]
    pub groups: BTreeMap<&'static str, Vec<Row>>,
}

impl View {
    /// Computes the rates between two samples; `time` is when the second was taken.
    #[must_use]
    pub fn between(before: &Sample, now: &Sample, time: f64) -> Self {
        let since = |now: Instant, before| now.saturating_duration_since(before).as_secs_f64();
        let seconds = since(now.at, before.at);
        let rows = |group: &Group| {
            let earlier = before.groups.iter().find(|earlier| earlier.name == group.name);
            let entries = earlier.map_or(&[][..], |earlier| earlier.entries.as_slice());
            // The groups are read one after another, and the server may be slow to answer.
            let seconds = earlier.map_or(seconds, |earlier| since(group.at, earlier.at));
            (group.name, rows(entries, &group.entries, seconds))
        };
        Self { time, interval_s: seconds, groups: now.groups.iter().map(rows).collect() }
    }
}

fn rows(before: &[Entry], now: &[Entry], seconds: f64) -> Vec<Row> {
    let earlier: BTreeMap<(&str, &str), &Entry> =
        before.iter().map(|entry| ((&*entry.name, &*entry.instance), entry)).collect();
    let row = |entry: &Entry| row(earlier.get(&(&*entry.name, &*entry.instance)), entry, seconds);
    now.iter().map(row).collect()
}

fn row(before: Option<&&Entry>, now: &Entry, seconds: f64) -> Row {
    let row = Row {
        name: now.name.clone(),
        state: now.state.clone(),
        paths_connected: now.paths_up.map(|(up, _)| up),
        paths_total: now.paths_up.map(|(_, all)| all),
        inflight: now.inflight,
        paths: rows(before.map_or(&[], |before| &before.paths), &now.paths, seconds),
        ..Row::default()
    };
    let counters = before.and_then(|before| before.counters.as_ref()).zip(now.counters.as_ref());
    match counters {
        Some((before, now)) if now.continues(before) && seconds > 0.0 => {
            with_rates(row, before, now, seconds)
        }
        _ => row,
    }
}

fn with_rates(row: Row, before: &Counters, now: &Counters, seconds: f64) -> Row {
    let rate = |now: u64, before: u64| Some((now - before) as f64 / seconds);
    let ratio = |sum: u64, count: u64| (count > 0).then(|| sum as f64 / count as f64);
    let directions = before.by_direction.zip(now.by_direction);
    let split = |of: fn(&ReadsWrites) -> u64| {
        directions.and_then(|(before, now)| rate(of(&now), of(&before)))
    };
    let ios = now.ios - before.ios;
    // A flush has no data, so it does not count towards the average size.
    let moved = directions
        .map_or(ios, |(before, now)| (now.reads - before.reads) + (now.writes - before.writes));
    let times = times_between(&before.times, &now.times);
    let parts = now.parts.iter().filter_map(|(name, now)| {
        let earlier = before.parts.get(name).map_or(&[][..], Vec::as_slice);
        Some((name.clone(), part_times(&times_between(earlier, now))?))
    });
    Row {
        interval_s: Some(seconds),
        ios_per_s: rate(now.ios, before.ios),
        reads_per_s: split(|count| count.reads),
        writes_per_s: split(|count| count.writes),
        read_bytes_per_s: split(|count| count.read_bytes),
        write_bytes_per_s: split(|count| count.write_bytes),
        bytes_per_io: ratio(now.bytes - before.bytes, moved),
        latency_avg_us: ratio(now.nanos - before.nanos, ios).map(|nanos| nanos / 1000.0),
        latency_p50_us: quantile(&times, 0.5),
        latency_p99_us: quantile(&times, 0.99),
        errors_per_s: rate(now.errors, before.errors),
        parts_us: parts.collect(),
        ..row
    }
}

/// Returns the times recorded between two states of a histogram.
fn times_between(before: &[Bucket], now: &[Bucket]) -> Vec<Bucket> {
    let earlier: BTreeMap<u64, u64> = before.iter().map(|one| (one.to, one.count)).collect();
    let newer = |one: &Bucket| {
        let count = one.count.saturating_sub(earlier.get(&one.to).copied().unwrap_or(0));
        Bucket { count, ..*one }
    };
    now.iter().map(newer).filter(|one| one.count > 0).collect()
}

/// Returns the statistics of these times, or None if there are no times.
fn part_times(times: &[Bucket]) -> Option<PartTimes> {
    let count: u64 = times.iter().map(|one| one.count).sum();
    let middle = |one: &Bucket| (one.from as f64 + one.to as f64) / 2.0;
    let sum: f64 = times.iter().map(|one| middle(one) * one.count as f64).sum();
    let avg = sum / count as f64 / 1000.0;
    Some(PartTimes { avg, p50: quantile(times, 0.5)?, p99: quantile(times, 0.99)? })
}

/// Returns a quantile of the times, in microseconds. Times are assumed to be evenly distributed
/// within a bucket.
fn quantile(times: &[Bucket], part: f64) -> Option<f64> {
    let total: u64 = times.iter().map(|one| one.count).sum();
    let wanted = part * total as f64;
    let mut below = 0.0;
    for one in times {
        let count = one.count as f64;
        if below + count >= wanted {
            let (from, to) = (one.from as f64, one.to as f64);
            return Some((from + (to - from) * (wanted - below) / count) / 1000.0);
        }
        below += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn counters(ios: u64) -> Counters {
        let by_direction = Some(ReadsWrites {
            reads: ios / 2,
            read_bytes: ios / 2 * 4096,
            writes: ios / 4,
            write_bytes: ios / 4 * 8192,
        });
        Counters {
            ios,
            bytes: ios * 4096,
            errors: ios / 100,
            nanos: ios * 50_000,
            by_direction,
            times: vec![Bucket { from: 40_000, to: 60_000, count: ios }],
            parts: [
                ("backend", vec![Bucket { from: 10_000, to: 20_000, count: ios }]),
                ("network", vec![Bucket { from: 7000, to: 7000, count: 8 }]),
            ]
            .map(|(name, times)| (name.to_owned(), times))
            .into(),
        }
    }

    fn entry(name: &str, instance: &str, ios: u64) -> Entry {
        Entry {
            name: name.into(),
            instance: instance.into(),
            state: "open".into(),
            paths_up: Some((1, 2)),
            inflight: Some(7),
            counters: Some(counters(ios)),
            paths: Vec::new(),
        }
    }

    fn view(before: Vec<Entry>, now: Vec<Entry>) -> Vec<Row> {
        let at = Instant::now();
        let sample = |at, entries| {
            let group = Group { name: "sessions", at, entries };
            Sample { at, groups: vec![group] }
        };
        let (before, now) = (sample(at, before), sample(at + Duration::from_secs(2), now));
        let mut view = View::between(&before, &now, 3.5);
        assert!((view.interval_s - 2.0).abs() < 1e-9 && (view.time - 3.5).abs() < 1e-9);
        view.groups.remove("sessions").unwrap()
    }

    #[test]
    fn rates_are_differences_of_two_samples() {
        let rows = view(vec![entry("v", "1", 1000)], vec![entry("v", "1", 1800)]);
        let expected = Row {
            name: "v".into(),
            state: "open".into(),
            paths_connected: Some(1),
            paths_total: Some(2),
            interval_s: Some(2.0),
            ios_per_s: Some(400.0),
            reads_per_s: Some(200.0),
            writes_per_s: Some(100.0),
            read_bytes_per_s: Some(200.0 * 4096.0),
            write_bytes_per_s: Some(100.0 * 8192.0),
            bytes_per_io: Some(800.0 * 4096.0 / 600.0),
            inflight: Some(7),
            latency_avg_us: Some(50.0),
            latency_p50_us: Some(50.0),
            latency_p99_us: Some(59.8),
            errors_per_s: Some(4.0),
            // The other part had no times in this interval.
            parts_us: [("backend".to_owned(), PartTimes { avg: 15.0, p50: 15.0, p99: 19.9 })]
                .into(),
            paths: Vec::new(),
        };
        assert_eq!(rows, [expected]);
    }

    #[test]
    fn each_group_has_its_own_interval() {
        let begin = Instant::now();
        let group = |name, ms, ios| {
            let at = begin + Duration::from_millis(ms);
            Group { name, at, entries: vec![entry("v", "1", ios)] }
        };
        let sample =
            |sessions: Group, exports| Sample { at: sessions.at, groups: vec![sessions, exports] };
        // The second list of exports arrives late.
        let before = sample(group("sessions", 0, 1000), group("exports", 0, 1000));
        let now = sample(group("sessions", 1000, 1100), group("exports", 1500, 1150));
        let view = View::between(&before, &now, 0.0);
        let rates = view.groups.values().map(|rows| rows[0].ios_per_s);
        assert_eq!(rates.collect::<Vec<_>>(), [Some(100.0); 2]);
    }

    #[test]
    fn rates_need_two_samples_of_one_process() {
        let silent = Entry { counters: None, ..entry("silent", "1", 0) };
        let before = vec![entry("restarted", "1", 900), entry("reset", "1", 900), silent.clone()];
        let now = vec![
            entry("restarted", "2", 1000),
            entry("reset", "1", 100),
            entry("new", "1", 5),
            silent,
        ];
        let rows = view(before, now);
        let names: Vec<&str> = rows.iter().map(|row| &*row.name).collect();
        assert_eq!(names, ["restarted", "reset", "new", "silent"], "dead sessions are removed");
        for row in rows {
            assert_eq!((row.ios_per_s, row.errors_per_s), (None, None), "{}", row.name);
            assert_eq!((row.latency_p99_us, row.inflight), (None, Some(7)), "{}", row.name);
        }
    }

    #[test]
    fn paths_have_separate_rates_and_no_latency_when_idle() {
        let with_paths = |all: Vec<Entry>| vec![Entry { paths: all, ..entry("v", "1", 100) }];
        let before = with_paths(vec![entry("a", "", 100), entry("b", "", 100)]);
        let rows = view(before, with_paths(vec![entry("a", "", 300), entry("b", "", 100)]));
        let [busy, idle] = rows[0].paths.as_slice() else { panic!("{rows:?}") };
        assert_eq!((busy.ios_per_s, idle.ios_per_s), (Some(100.0), Some(0.0)));
        let nothing = (idle.latency_avg_us, idle.latency_p50_us, idle.bytes_per_io);
        assert_eq!(nothing, (None, None, None));
    }

    #[test]
    fn a_quantile_covers_only_the_interval() {
        let bucket = |from, to, count| Bucket { from, to, count };
        let before = [bucket(1000, 2000, 1000)];
        let now = [bucket(1000, 2000, 1000), bucket(4000, 5000, 90), bucket(8000, 9000, 10)];
        let times = times_between(&before, &now);
        assert_eq!(times, now[1..]);
        assert_eq!(quantile(&times, 0.45), Some(4.5));
        assert_eq!(quantile(&times, 0.99), Some(8.9));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
