//! Tests that compare the results of the socket API over the library with those of the kernel.

use std::collections::BTreeMap;

use rtrs_tests::{COPY_TIME_MAX, requires};

use crate::preload::{compile, start};
use crate::stand::Stand;

/// Maximum number of results that may differ.
const DIFFERENCES_MAX: usize = 5;

/// Reads lines with a name and a result.
fn results(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).collect()
}

#[test]
fn results_differ_from_the_kernel_only_where_documented() {
    if !requires(&["cc"]) {
        return;
    }
    let stand = Stand::new(2);
    std::fs::write(stand.dir().join("api.h"), include_str!("../../lab/api.h")).expect("a file");
    let program = compile(&stand, include_str!("../../lab/api.c"));
    let finished = start(&stand, &program, &["127.0.0.1", "127.0.0.2"]).wait(COPY_TIME_MAX).ok();
    let kernel = results(include_str!("../../lab/api.kernel"));
    let ours = results(&finished.stdout);
    let documented = include_str!("../../lab/api.differences").lines();
    let mut documented: Vec<&str> =
        documented.filter_map(|line| Some(line.split_once(": ")?.0)).collect();
    documented.sort_unstable();
    assert!(documented.len() <= DIFFERENCES_MAX, "{documented:?}");
    let names: Vec<&&str> = kernel.keys().collect();
    assert_eq!(ours.keys().collect::<Vec<_>>(), names, "every check has a result");
    let differing = ours.into_iter().filter(|(name, result)| kernel[name] != *result);
    let differing: Vec<(&str, &str)> = differing.collect();
    let found: Vec<&str> = differing.iter().map(|(name, _)| *name).collect();
    assert_eq!(found, documented, "{differing:?}");
}
