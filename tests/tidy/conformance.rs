//! Checks that the functions and tests named in the protocol's conformance table exist.

use super::{Breaches, sources};

const PAGE: &str = "docs/PROTOCOL.md";
/// Title of the section with the table.
const TITLE: &str = "### Point by point";

/// Folders that the paths in the table are relative to.
const FOLDERS: &[&str] = &["rtrs-client/src/", "rtrs-core/src/", "rtrs-server/src/"];

/// A name in a cell of the table.
#[derive(Debug, PartialEq, Eq)]
enum Name<'a> {
    /// File, and a function or type in it.
    InFile(&'a str, &'a str),
    /// Test, in any file.
    Test(&'a str),
}

/// Returns the names in a cell: `path.rs:name`, and the words after `test` or `tests` that can only
/// be the names of functions.
fn names(cell: &str) -> Vec<Name<'_>> {
    let mut names = Vec::new();
    let mut is_test = false;
    for word in cell.split([' ', ',', ';', '(', ')']).filter(|word| !word.is_empty()) {
        if let Some((path, name)) = word.split_once(".rs:") {
            is_test = false;
            names.push(Name::InFile(&word[..path.len() + 3], name));
        } else if ["test", "tests"].contains(&word) {
            is_test = true;
        } else if is_test && word.contains('_') && !word.contains(['.', '`', '/']) {
            names.push(Name::Test(word));
        }
    }
    names
}

#[test]
fn conformance_table_names_what_exists() {
    let all = sources();
    let page = all.iter().find(|source| source.path == PAGE).expect("the protocol");
    let section = (1..).zip(page.text.lines()).skip_while(|(_, line)| *line != TITLE).skip(1);
    let rows: Vec<(usize, &str)> = section
        .take_while(|(_, line)| !line.starts_with('#'))
        .filter(|(_, line)| line.starts_with("| "))
        .collect();
    assert!(rows.len() > 20, "the table has {} rows", rows.len());
    let mut breaches = Breaches::default();
    let is_in = |text: &str, name: &str| {
        ["fn ", "struct ", "const "].iter().any(|word| {
            text.match_indices(&format!("{word}{name}")).any(|(at, found)| {
                !text[at + found.len()..]
                    .starts_with(|next: char| next.is_alphanumeric() || next == '_')
            })
        })
    };
    for (number, row) in rows {
        for cell in row.split('|') {
            for name in names(cell) {
                let exists = match name {
                    Name::InFile(path, name) => all.iter().any(|source| {
                        FOLDERS.iter().any(|folder| source.path == format!("{folder}{path}"))
                            && is_in(&source.text, name.rsplit("::").next().unwrap_or(name))
                    }),
                    Name::Test(name) => {
                        all.iter().any(|source| source.is_rust() && is_in(&source.text, name))
                    }
                };
                if !exists {
                    breaches.add(PAGE, number, format!("{name:?} does not exist"));
                }
            }
        }
    }
    breaches.none("the conformance table names what exists");
}

#[test]
fn names_of_a_cell_are_found() {
    assert_eq!(
        names("engine/io/mod.rs:accept; tests a_b, c_d; captured"),
        [Name::InFile("engine/io/mod.rs", "accept"), Name::Test("a_b"), Name::Test("c_d")]
    );
}
