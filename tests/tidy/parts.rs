//! Type size: limits the number of methods and fields of types with state.
//!
//! Sizes are counted in source text as formatted by rustfmt: inherent methods in all files, and
//! fields of types that have a method with `&mut self`. Types without such a method are records
//! (settings, messages, JSON, statistics), whose fields are not limited. Test code does not count.

use std::collections::BTreeMap;

use super::{Breaches, Source, sources};

const METHODS_MAX: usize = 40;
const FIELDS_MAX: usize = 15;

/// Directories with product code.
const PRODUCT: &[&str] = &[
    "nbd-bridge/src/",
    "rds/src/",
    "rtrs-client/capi/src/",
    "rtrs-client/lib/src/",
    "rtrs-client/src/",
    "rtrs-core/base/src/",
    "rtrs-core/src/",
    "rtrs-server/src/",
    "rtrs-client/vhost-bridge/src/",
];

/// Directories and files within them that contain test code.
const TEST_CODE: &[&str] =
    &["/tests/", "/tests.rs", "/fuzz/", "/fuzz.rs", "fabric/conformance/", "fabric/sim/"];

/// Methods and fields of a type.
#[derive(Default, Debug, PartialEq, Eq)]
struct Size {
    methods: usize,
    fields: usize,
    is_changed_by_methods: bool,
}

/// Types in a file, by name, and which of them the file defines.
#[derive(Default)]
struct Counted {
    sizes: BTreeMap<String, Size>,
    defined: Vec<String>,
}

/// Returns the identifier at the start of the text.
fn identifier(text: &str) -> &str {
    let end = text.find(|char: char| !char.is_alphanumeric() && char != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Strips a function's visibility and qualifiers from a line.
fn bare(mut line: &str) -> &str {
    loop {
        let rest = if let Some(scope) = line.strip_prefix("pub(") {
            scope.split_once(") ").map(|(_, rest)| rest)
        } else {
            ["pub ", "const ", "async ", "unsafe "].iter().find_map(|word| line.strip_prefix(word))
        };
        let Some(rest) = rest else { return line };
        line = rest;
    }
}

/// Returns the type of an inherent `impl` that begins on this line.
fn inherent(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(generics) => {
            let mut depth = 1;
            let end = generics.char_indices().find_map(|(at, char)| {
                depth += i32::from(char == '<') - i32::from(char == '>');
                (depth == 0).then_some(at + 1)
            })?;
            generics[end..].trim_start()
        }
        None => rest.strip_prefix(' ')?,
    };
    (!rest.contains(" for ")).then(|| identifier(rest.rsplit("::").next().unwrap_or(rest)))
}

/// Counts methods and fields in the text of a file, up to its test module.
fn count(text: &str) -> Counted {
    let mut counted = Counted::default();
    let (mut owner, mut is_impl) = (None::<String>, false);
    let mut is_for_tests = false;
    for line in text.lines() {
        if line.starts_with("#[cfg(test)]") {
            is_for_tests = true;
            continue;
        }
        if line.starts_with('}') {
            owner = None;
        } else if !line.starts_with([' ', '/', '#']) && !line.is_empty() {
            if std::mem::take(&mut is_for_tests) {
                continue;
            }
            is_impl = line.starts_with("impl");
            let name = match bare(line).strip_prefix("struct ") {
                Some(rest) => Some(identifier(rest)),
                None => inherent(line),
            };
            owner = name.filter(|_| line.ends_with('{')).map(str::to_owned);
            if let Some(name) = name.filter(|_| !is_impl) {
                counted.defined.push(name.to_owned());
            }
        } else if let Some(name) = &owner
            && let Some(inner) = line.strip_prefix("    ")
            && !inner.starts_with([' ', '/', '#', '}', ')'])
        {
            let size = counted.sizes.entry(name.clone()).or_default();
            let method = bare(inner).strip_prefix("fn ");
            size.methods += usize::from(is_impl && method.is_some());
            size.fields += usize::from(!is_impl);
        }
        if is_impl
            && line.contains("&mut self")
            && let Some(name) = &owner
        {
            counted.sizes.entry(name.clone()).or_default().is_changed_by_methods = true;
        }
    }
    counted
}

/// Returns the defining file that shares the longest path with this one.
fn nearest<'a>(path: &str, defining: &'a [String]) -> Option<&'a str> {
    let common =
        |file: &&String| path.bytes().zip(file.bytes()).take_while(|(a, b)| a == b).count();
    defining.iter().max_by_key(common).map(String::as_str)
}

/// Returns the sizes of all types, by defining file and name.
fn sizes(files: &[&Source]) -> BTreeMap<(String, String), Size> {
    let counted: Vec<_> = files.iter().map(|file| (&file.path, count(&file.text))).collect();
    let mut defining = BTreeMap::<String, Vec<String>>::new();
    for (path, counted) in &counted {
        for name in &counted.defined {
            defining.entry(name.clone()).or_default().push((*path).clone());
        }
    }
    let mut sizes = BTreeMap::<_, Size>::new();
    for (path, counted) in counted {
        for (name, more) in counted.sizes {
            let home = defining.get(&name).and_then(|files| nearest(path, files));
            let Some(home) = home.map(str::to_owned) else { continue };
            let size = sizes.entry((home, name)).or_default();
            size.methods += more.methods;
            size.fields += more.fields;
            size.is_changed_by_methods |= more.is_changed_by_methods;
        }
    }
    sizes
}

#[test]
fn types_with_state_are_small() {
    let all = sources();
    let files: Vec<&Source> = all
        .iter()
        .filter(|source| source.is_rust())
        .filter(|source| PRODUCT.iter().any(|folder| source.path.starts_with(folder)))
        .filter(|source| !TEST_CODE.iter().any(|part| source.path.contains(part)))
        .collect();
    let sizes = sizes(&files);
    assert!(sizes.len() > 500, "only {} types found", sizes.len());
    let mut breaches = Breaches::default();
    let is_large = |size: &Size| {
        size.methods > METHODS_MAX || size.is_changed_by_methods && size.fields > FIELDS_MAX
    };
    for ((file, name), size) in &sizes {
        if is_large(size) {
            let Size { methods, fields, .. } = size;
            let what = format!(
                "{name} has {methods} methods (at most {METHODS_MAX}) and {fields} fields (at most \
                 {FIELDS_MAX}): move a part of its state into a type of its own"
            );
            breaches.add(file, 0, what);
        }
    }
    breaches.none("types with state are small");
}

#[test]
fn methods_and_fields_are_counted() {
    let text = "\
pub struct Part<T> {
    /// Unit.
    a: u8,
    #[cfg(x)]
    pub(crate) b: Vec<(u8, T)>,
}

impl<T: Into<Vec<u8>>> Part<T> {
    pub(crate) const fn a(&self) -> u8 {
        self.a
    }

    fn b(
        &mut self,
    ) {
    }
}

impl<T> Clone for Part<T> {
    fn clone(&self) -> Self {
    }
}

pub struct Unit;

#[cfg(test)]
impl Part<u8> {
    fn only_in_tests(&self) {}
}
";
    let counted = count(text);
    assert_eq!(counted.defined, ["Part", "Unit"]);
    let size = Size { methods: 2, fields: 2, is_changed_by_methods: true };
    assert_eq!(counted.sizes, BTreeMap::from([("Part".to_owned(), size)]));
    assert_eq!(nearest("a/b/io.rs", &["a/io.rs".into(), "a/b/mod.rs".into()]), Some("a/b/mod.rs"));
}
