//! The Prometheus text format, version 0.0.4: metric definitions, their samples, and formatting.
//!
//! This module escapes label values and help texts. All samples of a metric are grouped under one
//! HELP and one TYPE line, even if the samples come from several processes.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::times::{BOUNDS, Times};

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Value that only grows while its process runs. Its name ends with `_total`.
    Counter,
    /// Value that can go up or down.
    Gauge,
    /// Distribution of times in buckets. Its name ends with `_seconds`.
    Histogram,
}

impl Kind {
    /// Returns the name of the type in a TYPE line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Definition of a metric. A daemon declares each metric once; its documentation is generated from
/// that declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: Kind,
    /// Label names, in the order of their values.
    pub labels: &'static [&'static str],
    /// Meaning, in one sentence.
    pub help: &'static str,
}

/// Value of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Integer.
    Whole(u64),
    /// Any other number.
    Real(f64),
}

impl From<u64> for Number {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

impl From<bool> for Number {
    fn from(value: bool) -> Self {
        Self::Whole(u64::from(value))
    }
}

impl Number {
    /// Converts nanoseconds to seconds.
    #[must_use]
    pub fn seconds(nanos: u64) -> Self {
        Self::Real(nanos as f64 / 1e9)
    }

    fn write(self, out: &mut String) {
        // Writing to a string cannot fail.
        let _ = match self {
            Self::Whole(value) => write!(out, "{value}"),
            Self::Real(value) if value.is_nan() => write!(out, "NaN"),
            Self::Real(value) if value.is_infinite() => {
                write!(out, "{}", if value > 0.0 { "+Inf" } else { "-Inf" })
            }
            Self::Real(value) => write!(out, "{value}"),
        };
    }
}

/// Samples of metrics: formatted lines by metric name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Samples(BTreeMap<String, String>);

impl Samples {
    /// Adds a sample. The number of labels must match the metric's.
    pub fn add(&mut self, metric: &Metric, labels: &[&str], value: impl Into<Number>) {
        let lines = self.lines(metric);
        write_sample(lines, metric, "", labels, None, value.into());
    }

    /// Adds the samples of a histogram.
    pub fn add_times(&mut self, metric: &Metric, labels: &[&str], times: &Times) {
        let lines = self.lines(metric);
        let mut count = 0;
        let bounds = BOUNDS.iter().map(|(_, text)| *text).chain(["+Inf"]);
        for (bucket, bound) in times.buckets.iter().zip(bounds) {
            count += bucket;
            write_sample(lines, metric, "_bucket", labels, Some(bound), count.into());
        }
        write_sample(lines, metric, "_sum", labels, None, Number::seconds(times.nanos));
        write_sample(lines, metric, "_count", labels, None, count.into());
    }

    /// Adds the samples of another process.
    pub fn merge(&mut self, other: &Self) {
        for (name, lines) in &other.0 {
            self.0.entry(name.clone()).or_default().push_str(lines);
        }
    }

    /// Formats all samples of these metrics, in this order. Metrics without samples are omitted.
    #[must_use]
    pub fn text(&self, metrics: &[&Metric]) -> String {
        let mut text = String::with_capacity(self.0.values().map(|lines| lines.len() + 200).sum());
        for metric in metrics {
            let Some(lines) = self.0.get(metric.name) else { continue };
            let (name, kind) = (metric.name, metric.kind.name());
            let help = metric.help.replace('\\', r"\\").replace('\n', r"\n");
            // Writing to a string cannot fail.
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
        }
        text
    }

    fn lines(&mut self, metric: &Metric) -> &mut String {
        if !self.0.contains_key(metric.name) {
            self.0.insert(metric.name.to_owned(), String::new());
        }
        self.0.get_mut(metric.name).unwrap_or_else(|| unreachable!("it was just inserted"))
    }
}

fn write_sample(
    out: &mut String,
    metric: &Metric,
    suffix: &str,
    labels: &[&str],
    bound: Option<&str>,
    value: Number,
) {
    debug_assert_eq!(metric.labels.len(), labels.len(), "labels of {}", metric.name);
    out.push_str(metric.name);
    out.push_str(suffix);
    let named = metric.labels.iter().copied().zip(labels.iter().copied());
    let mut before = '{';
    for (name, value) in named.chain(bound.map(|bound| ("le", bound))) {
        out.push(before);
        before = ',';
        out.push_str(name);
        out.push_str("=\"");
        escape(out, value);
        out.push('"');
    }
    if before == ',' {
        out.push('}');
    }
    out.push(' ');
    value.write(out);
    out.push('\n');
}

/// Writes a label value. Prometheus treats a NUL as the end of the text, so NULs are replaced.
fn escape(out: &mut String, value: &str) {
    for char in value.chars() {
        match char {
            '\\' => out.push_str(r"\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str(r"\n"),
            '\0' => out.push(char::REPLACEMENT_CHARACTER),
            char => out.push(char),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UP: Metric = Metric {
        name: "x_up",
        kind: Kind::Gauge,
        labels: &["name"],
        help: "With a \\ and\na break.",
    };
    const ALL: Metric = Metric { name: "x_total", kind: Kind::Counter, labels: &[], help: "All." };
    const TOOK: Metric =
        Metric { name: "x_seconds", kind: Kind::Histogram, labels: &["op"], help: "Times." };

    #[test]
    fn samples_are_grouped_and_escaped() {
        let mut samples = Samples::default();
        samples.add(&ALL, &[], u64::MAX);
        samples.add(&UP, &["a\"b\\c\nd\0e"], true);
        let mut other = Samples::default();
        other.add(&UP, &["ß"], f64::INFINITY);
        other.add(&UP, &[""], f64::NAN);
        samples.merge(&other);
        assert_eq!(
            samples.text(&[&UP, &TOOK, &ALL]),
            "# HELP x_up With a \\\\ and\\na break.\n# TYPE x_up gauge\n\
             x_up{name=\"a\\\"b\\\\c\\nd\u{fffd}e\"} 1\nx_up{name=\"ß\"} +Inf\n\
             x_up{name=\"\"} NaN\n\
             # HELP x_total All.\n# TYPE x_total counter\nx_total 18446744073709551615\n"
        );
    }

    #[test]
    fn buckets_are_cumulative() {
        let mut times = Times::default();
        [1_000, 20_000, 70_000_000_000].into_iter().for_each(|nanos| times.record(nanos));
        let mut samples = Samples::default();
        samples.add_times(&TOOK, &["read"], &times);
        let text = samples.text(&[&TOOK]);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines.len(), 24);
        assert_eq!(lines[0], "x_seconds_bucket{op=\"read\",le=\"1e-05\"} 1");
        assert_eq!(lines[1], "x_seconds_bucket{op=\"read\",le=\"2.5e-05\"} 2");
        assert_eq!(lines[20], "x_seconds_bucket{op=\"read\",le=\"60\"} 2");
        assert_eq!(lines[21], "x_seconds_bucket{op=\"read\",le=\"+Inf\"} 3");
        assert_eq!(lines[22], "x_seconds_sum{op=\"read\"} 70.000021");
        assert_eq!(lines[23], "x_seconds_count{op=\"read\"} 3");
    }
}
