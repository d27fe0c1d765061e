//! Tests of the table of exports: names, slots and their reuse.

use super::*;
use crate::backend::NullSource;
use crate::engine::finder::Search;

#[derive(Debug)]
struct NoMatch;

impl Finder for NoMatch {
    fn find(&self, _search: Search) -> bool {
        false
    }
}

fn export(name: &str) -> Export {
    Export::new(name, Arc::new(NullSource::new(4096, 512)))
}

#[test]
fn a_found_export_keeps_its_index_while_any_core_has_it() {
    let table = ExportTable::with_finder(vec![export("named")], Some(Box::new(NoMatch)));
    assert_eq!(table.get(ExportIndex(1)).map(|export| export.name.clone()), None);
    let (a, b) = (Arc::new(export("a")), Arc::new(export("b")));
    assert_eq!(table.place(&a), Some(ExportIndex(1)));
    assert_eq!(table.place(&a), Some(ExportIndex(1)), "already placed");
    assert_eq!(table.get(ExportIndex(1)).unwrap().name, "a");
    table.leave(ExportIndex(1));
    assert!(table.get(ExportIndex(1)).is_none());
    assert_eq!(table.place(&b), Some(ExportIndex(2)), "a core may still have a's device");
    assert_eq!(table.place(&a), Some(ExportIndex(1)), "the same index again");
    table.leave(ExportIndex(1));
    drop(a);
    assert_eq!(table.place(&Arc::new(export("c"))), Some(ExportIndex(1)));
    // Named exports stay.
    table.leave(ExportIndex(0));
    assert_eq!(table.get(ExportIndex(0)).unwrap().name, "named");
    assert_eq!(table.find(b"a"), None, "only named exports are found by name");
}

#[test]
fn named_exports_are_listed_by_name() {
    let table =
        ExportTable::with_finder(["c", "/a", "b"].map(export).into(), Some(Box::new(NoMatch)));
    table.place(&Arc::new(export("found")));
    let names = |after: &str, max| -> Vec<String> {
        let found = table.named_after(after.as_bytes(), max);
        found.into_iter().map(|(_, export)| export.name.clone()).collect()
    };
    assert_eq!(names("", 9), ["/a", "b", "c"]);
    assert_eq!(
        (names("", 1), names("/a", 1), names("bb", 9)),
        (vec!["/a".into()], vec!["b".into()], vec!["c".into()])
    );
    table.remove(table.find(b"b").unwrap(), true);
    assert_eq!(names("a", 9), ["c"], "neither removed nor found exports");
    assert!(names("c", 9).is_empty() && names("\u{7f}", 9).is_empty());
}

#[test]
fn the_number_of_found_exports_is_bounded() {
    let table = ExportTable::with_finder(Vec::new(), Some(Box::new(NoMatch)));
    let all: Vec<_> = (0..FOUND_MAX).map(|n| Arc::new(export(&n.to_string()))).collect();
    assert!(all.iter().all(|export| table.place(export).is_some()));
    assert_eq!(table.place(&Arc::new(export("one more"))), None);
    table.add(&Arc::new(export("named"))).unwrap();
}

#[test]
fn without_a_finder_only_named_exports_exist() {
    let table = ExportTable::new(vec![export("/dev/sda")]);
    assert_eq!((table.len(), table.is_empty()), (1, false));
    assert_eq!(table.find(b"dev/sda"), Some(ExportIndex(0)));
    assert_eq!((table.find(b""), table.find(b"//")), (None, None));
    assert!(table.finder().is_none() && ExportTable::new(Vec::new()).is_empty());
}

#[test]
fn a_removed_export_keeps_its_index_while_in_use() {
    let table = ExportTable::new(vec![export("a"), export("b")]);
    assert_eq!(table.add(&Arc::new(export("/a"))), Err(AddError::NameTaken));
    assert_eq!(table.add(&Arc::new(export("//"))), Err(AddError::NoName));
    let held = table.remove(ExportIndex(0), false).unwrap();
    assert!(table.remove(ExportIndex(0), false).is_none());
    assert_eq!(table.find(b"a"), None);
    assert_eq!(table.add(&Arc::new(export("a"))), Ok(ExportIndex(2)), "a shard may hold it");
    drop(held);
    assert_eq!(table.add(&Arc::new(export("c"))), Ok(ExportIndex(0)));
    // Removed exports that are open stay until they are left.
    table.remove(ExportIndex(1), true).unwrap();
    assert_eq!((table.find(b"b"), table.get(ExportIndex(1)).is_some()), (None, true));
    assert_eq!(table.all().len(), 3);
    table.leave(ExportIndex(1));
    assert!(table.get(ExportIndex(1)).is_none());
    assert_eq!(table.add(&Arc::new(export("b"))), Ok(ExportIndex(1)));
}

#[test]
fn the_number_of_exports_is_bounded() {
    let table = ExportTable::new(Vec::new());
    let one: Arc<dyn BlockSource> = Arc::new(NullSource::new(4096, 512));
    for n in 0..3 {
        table.add(&Arc::new(Export::new(n.to_string(), Arc::clone(&one)))).unwrap();
    }
    let mut places = table.places.lock();
    let full = places.slots.len();
    let named = Arc::new(Export::new("x", Arc::clone(&one)));
    places.slots.resize_with(EXPORTS_MAX, || Slot::Named(Arc::clone(&named)));
    drop(places);
    assert_eq!(table.add(&Arc::new(Export::new("y", one))), Err(AddError::Full));
    assert_eq!(full, 3);
}
