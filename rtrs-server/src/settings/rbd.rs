//! An image of a Ceph cluster, as `POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`.

use std::fmt;
use std::str::FromStr;

use rtrs_core::settings::ValueError;

/// Syntax hint for errors.
const FORM: &str = "write rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT], as in rbd:rbd/vol0";

/// Name of an image. No part is empty or contains a slash, an `@` or a NUL.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RbdName {
    /// Name of the pool.
    pub pool: String,
    /// Namespace in the pool.
    pub namespace: Option<String>,
    /// Name of the image.
    pub image: String,
    /// Snapshot of the image.
    pub snapshot: Option<String>,
}

impl FromStr for RbdName {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let refuse = |problem| Err(ValueError::new("RBD image", text, problem, FORM));
        let (place, snapshot) = match text.split_once('@') {
            Some((place, snapshot)) => (place, Some(snapshot)),
            None => (text, None),
        };
        let parts: Vec<&str> = place.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            _ => return refuse("does not name a pool and an image"),
        };
        let all = [Some(pool), namespace, Some(image), snapshot];
        if all.iter().flatten().any(|part| part.is_empty()) {
            return refuse("has an empty part");
        }
        if snapshot.is_some_and(|name| name.contains(['@', '/'])) {
            return refuse("has a bad snapshot name");
        }
        let owned = |part: Option<&str>| part.map(str::to_owned);
        let (namespace, snapshot) = (owned(namespace), owned(snapshot));
        Ok(Self { pool: pool.to_owned(), namespace, image: image.to_owned(), snapshot })
    }
}

impl fmt::Display for RbdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, namespace, image, snapshot } = self;
        write!(f, "{pool}/")?;
        namespace.iter().try_for_each(|namespace| write!(f, "{namespace}/"))?;
        f.write_str(image)?;
        snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_parsed_and_printed() {
        for text in ["rbd/vol0", "rbd/team/vol0", "rbd/vol0@monday", "rbd/team/vol.0@a-b"] {
            let name: RbdName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
        }
        let name: RbdName = "p/n/i@s".parse().unwrap();
        assert_eq!((&*name.pool, name.namespace.as_deref()), ("p", Some("n")));
        assert_eq!((&*name.image, name.snapshot.as_deref()), ("i", Some("s")));
        for (text, problem) in [
            ("vol0", "does not name a pool and an image"),
            ("", "does not name a pool and an image"),
            ("a/b/c/d", "does not name a pool and an image"),
            ("/vol0", "has an empty part"),
            ("rbd/", "has an empty part"),
            ("rbd//vol0", "has an empty part"),
            ("rbd/vol0@", "has an empty part"),
            ("rbd/vol0@a@b", "has a bad snapshot name"),
            ("rbd/vol0@a/b", "has a bad snapshot name"),
        ] {
            let error = text.parse::<RbdName>().unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("POOL"), "{error}");
        }
    }
}
