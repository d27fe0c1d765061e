//! Strict parser for the Prometheus text format, version 0.0.4, and a scrape client. Written from
//! the format's specification, independently of the code that produces the text. The parser is
//! stricter than the format: it also refuses text that Prometheus accepts but conventions forbid.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::time::Duration;

/// Sample of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Name of the sample, with the suffix of a histogram.
    pub name: String,
    /// Names and values of the labels, in order.
    pub labels: Vec<(String, String)>,
    /// Value of the sample.
    pub value: f64,
}

impl Sample {
    /// Returns the value of a label.
    #[must_use]
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| &**value)
    }

    /// Returns the labels without `le`, as text.
    fn series(&self) -> String {
        let others: Vec<_> = self.labels.iter().filter(|(name, _)| name != "le").collect();
        format!("{others:?}")
    }
}

/// Metric with all its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// Name of the metric.
    pub name: String,
    /// Type from the TYPE line.
    pub kind: String,
    /// Samples, at least one.
    pub samples: Vec<Sample>,
}

/// All metrics in an exposition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Exposition(pub Vec<Family>);

impl Exposition {
    /// Returns the value of the only sample with that name and these labels.
    ///
    /// # Panics
    /// Panics if there is none, or more than one.
    #[must_use]
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let all = self.0.iter().flat_map(|family| &family.samples);
        let fits = |sample: &&Sample| {
            sample.name == name
                && labels.iter().all(|(label, value)| sample.label(label) == Some(value))
        };
        let found: Vec<&Sample> = all.filter(fits).collect();
        assert!(found.len() == 1, "{} samples of {name} {labels:?}: {found:?}", found.len());
        found[0].value
    }

    /// Returns the number of samples with that name.
    #[must_use]
    pub fn count(&self, name: &str) -> usize {
        let all = self.0.iter().flat_map(|family| &family.samples);
        all.filter(|sample| sample.name == name).count()
    }

    /// Parses an exposition.
    ///
    /// # Errors
    /// Returns a description of the violation, with the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some(text) = text.strip_suffix('\n') else {
            return Err("the last line has no newline".into());
        };
        let mut families: Vec<Family> = Vec::new();
        let mut help: Option<String> = None;
        for line in text.split('\n') {
            let refused = |why: &str| format!("{why}: {line:?}");
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, about) = rest.split_once(' ').ok_or_else(|| refused("no help"))?;
                let fresh = families.iter().all(|family| family.name != name);
                if help.is_some() || !fresh || !is_name(name, true) || about.trim().is_empty() {
                    return Err(refused("HELP out of place"));
                }
                help = Some(name.to_owned());
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').ok_or_else(|| refused("no type"))?;
                if help.take().as_deref() != Some(name) {
                    return Err(refused("TYPE without its HELP"));
                }
                let ends = match kind {
                    "counter" => name.ends_with("_total"),
                    "gauge" => !["_total", "_count", "_sum", "_bucket"]
                        .iter()
                        .any(|suffix| name.ends_with(suffix)),
                    "histogram" => name.ends_with("_seconds"),
                    _ => false,
                };
                if !ends {
                    return Err(refused("unknown type, or unusual name for the type"));
                }
                let (name, kind) = (name.to_owned(), kind.to_owned());
                families.push(Family { name, kind, samples: Vec::new() });
            } else {
                if help.is_some() {
                    return Err(refused("HELP without TYPE"));
                }
                let sample = sample(line).ok_or_else(|| refused("not a sample"))?;
                let family = families.last_mut().ok_or_else(|| refused("sample before TYPE"))?;
                family.take(sample).map_err(|why| refused(&why))?;
            }
        }
        if help.is_some() {
            return Err("HELP without TYPE at the end".into());
        }
        families.iter().try_for_each(Family::check)?;
        Ok(Self(families))
    }
}

impl Family {
    fn take(&mut self, sample: Sample) -> Result<(), String> {
        let suffix = sample.name.strip_prefix(&self.name).ok_or("a sample of another metric")?;
        let has_bound = sample.label("le").is_some();
        let fits = match &*self.kind {
            "histogram" => match suffix {
                "_bucket" => has_bound,
                "_sum" | "_count" => !has_bound,
                _ => false,
            },
            _ => suffix.is_empty() && !has_bound,
        };
        let is_valid = self.kind == "gauge" || sample.value.is_finite() && sample.value >= 0.0;
        if !fits || !is_valid {
            return Err(format!("not a sample of a {}", self.kind));
        }
        self.samples.push(sample);
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let name = &self.name;
        let mut seen = BTreeSet::new();
        for sample in &self.samples {
            if !seen.insert((sample.name.clone(), format!("{:?}", sample.labels))) {
                return Err(format!("twice: {sample:?}"));
            }
        }
        let first = self.samples.first().ok_or_else(|| format!("{name} has no samples"))?;
        let names = |sample: &Sample| -> Vec<String> {
            let names = sample.labels.iter().map(|(name, _)| name.clone());
            names.filter(|name| name != "le").collect()
        };
        if let Some(other) = self.samples.iter().find(|sample| names(sample) != names(first)) {
            return Err(format!("other labels: {other:?}"));
        }
        if self.kind != "histogram" {
            return Ok(());
        }
        // The samples of a series are adjacent: its buckets, then its sum, then its count.
        let mut rest = &self.samples[..];
        while let Some(begin) = rest.first() {
            let series = begin.series();
            let len = rest.iter().take_while(|sample| sample.series() == series).count();
            let (these, others) = rest.split_at(len);
            rest = others;
            let wrong = || format!("{name} {series} is not a histogram");
            let [buckets @ .., sum, count] = these else { return Err(wrong()) };
            let mut before = (f64::NEG_INFINITY, 0.0);
            for bucket in buckets {
                let bound = number(bucket.label("le").unwrap_or_default()).ok_or_else(wrong)?;
                if !bucket.name.ends_with("_bucket") || bound <= before.0 || bucket.value < before.1
                {
                    return Err(wrong());
                }
                before = (bound, bucket.value);
            }
            let ends = sum.name.ends_with("_sum") && count.name.ends_with("_count");
            #[allow(clippy::float_cmp, reason = "both are whole numbers")]
            let agrees = before.0 == f64::INFINITY && before.1 == count.value;
            if !ends || !agrees {
                return Err(wrong());
            }
        }
        Ok(())
    }
}

/// Whether this is a valid name of a metric, which may contain colons, or of a label.
fn is_name(name: &str, colons: bool) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphabetic() || byte == b'_' || colons && byte == b':';
    let mut bytes = name.bytes();
    bytes.next().is_some_and(letter) && bytes.all(|byte| letter(byte) || byte.is_ascii_digit())
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ if text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.e".contains(&byte)) => {
            text.parse().ok()
        }
        _ => None,
    }
}

/// Parses a sample line without a timestamp.
fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels: Vec<(String, String)> = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            if !is_name(label, false) || labels.iter().any(|(other, _)| other == label) {
                return None;
            }
            labels.push((label.to_owned(), value));
            rest = match after.strip_prefix(',') {
                Some(more) => more,
                None => break rest = after.strip_prefix('}')?,
            };
        }
    }
    let value = number(rest.strip_prefix(' ')?)?;
    is_name(name, true).then(|| Sample { name: name.to_owned(), labels, value })
}

/// Returns the value up to its closing quote, and the remaining text.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                same @ ('\\' | '"') => same,
                _ => return None,
            }),
            '\0' => return None,
            char => value.push(char),
        }
    }
    None
}

/// Sends `GET /metrics` over a connection and returns the text.
///
/// # Panics
/// Panics if the response is not 200 or its text does not follow the format.
#[must_use]
pub fn scrape(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").expect("a request");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("a response");
    let (head, text) = response.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", text.len())), "{head}");
    text.to_owned()
}

/// Sends `GET /metrics` over TCP and returns the text.
///
/// # Panics
/// Panics as [`scrape`] does, or if there is no answer in time.
#[must_use]
pub fn scrape_tcp(at: &str) -> String {
    let stream = std::net::TcpStream::connect(at).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
    scrape(stream)
}
