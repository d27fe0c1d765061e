//! The name in a certificate that was verified: its first DNS name, else its first URI, else its
//! common name.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use super::keys::is_name;

/// OBJECT IDENTIFIER 2.5.4.3, common name, with tag and length.
const COMMON_NAME: [u8; 5] = [6, 3, 0x55, 4, 3];

/// The name, if it has one that can be printed.
#[must_use]
pub fn name_of(certificate: &CertificateDer<'_>) -> Option<Arc<str>> {
    let parsed = EndEntityCert::try_from(certificate).ok()?;
    let dns = parsed.valid_dns_names().next();
    let name = dns.or_else(|| parsed.valid_uri_names().next());
    let name = match name {
        Some(name) => name.to_owned(),
        None => common_name(parsed.subject())?,
    };
    is_name(&name).then(|| Arc::from(name))
}

/// The last common name of a subject: the contents of a Name (RFC 5280 section 4.1.2.4), which is
/// sets of pairs of an identifier and a text.
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

/// Tag and contents of the first DER element, and what follows it.
pub(super) fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, len], rest) = bytes.split_first_chunk::<2>()?;
    let (len, rest) = match len {
        0..=0x7f => (usize::from(len), rest),
        0x81 => (usize::from(*rest.first()?), &rest[1..]),
        0x82 => {
            let (len, rest) = rest.split_first_chunk::<2>()?;
            (usize::from(u16::from_be_bytes(*len)), rest)
        }
        // Only revocation lists are so long.
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
