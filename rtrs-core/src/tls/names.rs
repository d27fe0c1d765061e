//! The name in a verified certificate: its first DNS name, else its first URI, else its common
//! name.
//!
//! Name constraints of a CA (RFC 5280 section 4.2.1.10) apply to forms of names, and verification
//! compares only names of a constrained form. So a CA that may sign certain DNS names could put any
//! name into a URI or a common name. Therefore, below a CA with constraints, a common name is not
//! accepted, and neither is a DNS name or a URI if the constraints apply only to the other form.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, TrustAnchor};
use webpki::{EndEntityCert, anchor_from_trusted_cert};

use super::keys::is_name;

/// OBJECT IDENTIFIER 2.5.4.3, common name, with tag and length.
const COMMON_NAME: [u8; 5] = [6, 3, 0x55, 4, 3];

/// Tags of name forms in constraints.
const DNS_NAME: u8 = 0x82;
const URI: u8 = 0x86;

/// Name forms to which a CA's constraints apply.
#[derive(Clone, Copy, Default)]
struct Constrained {
    dns: bool,
    uri: bool,
}

/// Returns the name of the first certificate of a chain, if it is printable and could not evade the
/// constraints of a CA in the chain, or of a CA in `roots` that has signed part of the chain.
pub(super) fn name_of(chain: &[CertificateDer<'_>], roots: &[TrustAnchor<'_>]) -> Option<Arc<str>> {
    let (first, others) = chain.split_first()?;
    let parsed = EndEntityCert::try_from(first).ok()?;
    let constraints = constraints(first, others, roots);
    let is_free = |covered: fn(&Constrained) -> bool, other: fn(&Constrained) -> bool| {
        constraints.iter().all(|one| covered(one) || !other(one))
    };
    let name = if let Some(dns) = parsed.valid_dns_names().next() {
        is_free(|one| one.dns, |one| one.uri).then(|| dns.to_owned())?
    } else if let Some(uri) = parsed.valid_uri_names().next() {
        is_free(|one| one.uri, |one| one.dns).then(|| uri.to_owned())?
    } else {
        constraints.is_empty().then(|| common_name(parsed.subject()))??
    };
    is_name(&name).then(|| Arc::from(name))
}

/// Returns the constraints of the CAs that may belong to a chain. A CA that cannot be parsed is
/// treated as a CA with constraints on other forms.
fn constraints(
    first: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
    roots: &[TrustAnchor<'_>],
) -> Vec<Constrained> {
    let mut found = Vec::new();
    for certificate in others {
        match anchor_from_trusted_cert(certificate) {
            Ok(ca) => found.extend(ca.name_constraints.map(|der| forms(&der))),
            Err(_) => found.push(Constrained::default()),
        }
    }
    for certificate in std::iter::once(first).chain(others) {
        let Ok(parsed) = EndEntityCert::try_from(certificate) else { continue };
        let signers = roots.iter().filter(|root| root.subject.as_ref() == parsed.issuer());
        found.extend(
            signers.filter_map(|root| root.name_constraints.as_ref()).map(|der| forms(der)),
        );
    }
    found
}

/// Returns the name forms in the contents of NameConstraints, which are lists of permitted and
/// excluded names.
fn forms(mut lists: &[u8]) -> Constrained {
    let mut found = Constrained::default();
    while let Some((_, mut subtrees, rest)) = element(lists) {
        lists = rest;
        while let Some((_, subtree, rest)) = element(subtrees) {
            subtrees = rest;
            match subtree.first() {
                Some(&DNS_NAME) => found.dns = true,
                Some(&URI) => found.uri = true,
                _ => {}
            }
        }
    }
    found
}

/// Returns the last common name of a subject, given the contents of a Name (RFC 5280 section
/// 4.1.2.4): sets of pairs of an identifier and a text.
pub(super) fn common_name(mut subject: &[u8]) -> Option<String> {
    let mut name = None;
    while !subject.is_empty() {
        let (tag, set, rest) = element(subject)?;
        subject = rest;
        let mut set = if tag == 0x31 { set } else { return None };
        while !set.is_empty() {
            let (_, pair, more) = element(set)?;
            set = more;
            if let Some(value) = pair.strip_prefix(&COMMON_NAME) {
                name = str::from_utf8(element(value)?.1).ok().map(str::to_owned);
            }
        }
    }
    name
}

/// Returns the tag and contents of the first DER element, and the data that follows.
pub(super) fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, len], rest) = bytes.split_first_chunk::<2>()?;
    let (len, rest) = match len {
        0..=0x7f => (usize::from(len), rest),
        0x81 => (usize::from(*rest.first()?), &rest[1..]),
        0x82 => {
            let (len, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_be_bytes(*len)), rest)
        }
        // Only revocation lists are that long.
        0x83 => {
            let (&[high, middle, low], rest) = rest.split_first_chunk::<3>()?;
            (usize::try_from(u32::from_be_bytes([0, high, middle, low])).ok()?, rest)
        }
        0x84 => {
            let (len, rest) = rest.split_first_chunk::<4>()?;
            (usize::try_from(u32::from_be_bytes(*len)).ok()?, rest)
        }
        _ => return None,
    };
    let (contents, rest) = rest.split_at_checked(len)?;
    Some((tag, contents, rest))
}
