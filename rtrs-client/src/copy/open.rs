//! Opens the ends of a copy or comparison: volumes by URI, files and block devices by path, and
//! `-`.

use std::io;
use std::path::PathBuf;

use super::file::{FileIdentity, FileSide, OpenFile};
use super::side::{End, Setup, Side};
use super::stream::StreamSide;
use super::volume::{VolumeAccess, VolumeIdentity, VolumeSide};
use crate::error::{Error, ErrorKind, usage};

/// Text that names an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target<'a> {
    Volume(&'a str),
    File(PathBuf),
    Stream,
}

impl<'a> Target<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let is_scheme = |text: &str| text.chars().all(|char| char.is_ascii_alphanumeric());
        match text {
            "-" => Self::Stream,
            uri if uri.split_once("://").is_some_and(|(scheme, _)| is_scheme(scheme)) => {
                Self::Volume(uri)
            }
            path => Self::File(path.into()),
        }
    }
}

/// Identity of an end, to find out whether two are the same.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Identity {
    Volume(VolumeIdentity),
    File(FileIdentity),
    Stream,
}

/// Open end.
pub(super) struct Opened {
    pub(super) end: End,
    pub(super) identity: Identity,
    pub(super) size: Option<u64>,
}

impl Opened {
    fn volume(uri: &str, access: VolumeAccess, setup: Setup) -> Result<Self, Error> {
        let (side, identity) = VolumeSide::open(uri, access, setup)?;
        Ok(Self::new(uri, Box::new(side), Identity::Volume(identity)))
    }

    fn file(text: &str, open: OpenFile, setup: Setup) -> Result<Self, Error> {
        let identity = Identity::File(open.identity);
        Ok(Self::new(text, Box::new(FileSide::new(open, setup)?), identity))
    }

    fn new(name: &str, side: Box<dyn Side>, identity: Identity) -> Self {
        let size = side.limits().size;
        Self { end: End { side, name: name.to_owned() }, identity, size }
    }
}

/// Opens an end for reading.
pub(super) fn source(text: &str, setup: Setup) -> Result<Opened, Error> {
    match Target::new(text) {
        Target::Volume(uri) => Opened::volume(uri, VolumeAccess::Read, setup),
        Target::File(path) => Opened::file(text, OpenFile::source(&path)?, setup),
        Target::Stream => {
            let side = StreamSide::new(io::stdin(), setup)?;
            Ok(Opened::new("stdin", Box::new(side), Identity::Stream))
        }
    }
}

/// Opens an end for writing. A regular file is emptied once `source` is known to be suitable.
pub(super) fn destination(text: &str, source: &Opened, setup: Setup) -> Result<Opened, Error> {
    match Target::new(text) {
        Target::Volume(uri) => {
            let opened = Opened::volume(uri, VolumeAccess::Write, setup)?;
            Pair { source, text, identity: &opened.identity, size: opened.size }.check()?;
            Ok(opened)
        }
        Target::File(path) => {
            let mut open = OpenFile::destination(&path)?;
            let identity = &Identity::File(open.identity);
            Pair { source, text, identity, size: open.limit() }.check()?;
            open.empty(source.size)?;
            Opened::file(text, open, setup)
        }
        Target::Stream => {
            let side = StreamSide::new(io::stdout(), setup)?;
            Ok(Opened::new("stdout", Box::new(side), Identity::Stream))
        }
    }
}

/// Source, and properties of the destination.
struct Pair<'a> {
    source: &'a Opened,
    text: &'a str,
    identity: &'a Identity,
    /// Bytes that fit; None if the destination grows.
    size: Option<u64>,
}

impl Pair<'_> {
    /// Fails if the destination is the source, or is too small.
    fn check(&self) -> Result<(), Error> {
        let Self { source, text, identity, size } = self;
        let what = format!("cannot copy {} to {text}", source.end.name);
        if **identity == source.identity {
            return Err(usage(format!("{what}: both are the same")));
        }
        match (source.size, *size) {
            (Some(needed), Some(size)) if size < needed => {
                let text = format!("{what}: it has {size} bytes, and {needed} are needed");
                Err(Error::new(ErrorKind::System, text))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_a_volume_a_path_or_a_stream() {
        assert_eq!(Target::new("-"), Target::Stream);
        assert_eq!(Target::new("tcp://h/v"), Target::Volume("tcp://h/v"));
        assert_eq!(Target::new("./-"), Target::File("./-".into()));
        assert_eq!(Target::new("disk.img"), Target::File("disk.img".into()));
        assert_eq!(Target::new("./tcp://h/v"), Target::File("./tcp://h/v".into()));
    }
}
