//! Tests that compare the instruction counts of the hot paths with the stored baseline.

use std::process::Command;

use rtrs_tests::{bin, skip};

/// After a change that makes a path faster or slower, update the baseline with `rtrs-instructions
/// --update`.
#[test]
fn hot_paths_cost_as_many_instructions_as_before() {
    let output = Command::new(bin("rtrs-instructions")).output().unwrap();
    let (table, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match output.status.code() {
        Some(3) => skip(errors.trim()),
        Some(0) => print!("{table}"),
        _ => panic!("run rtrs-instructions --update if the change is intended\n{table}{errors}"),
    }
}
