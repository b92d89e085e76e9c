//! The accepted forms of the values of a cluster file. They are narrower than Azure's rules for values that end up in a
//! shell or a file.

use std::net::Ipv4Addr;

use super::TAG;

/// A predicate for a value, and its description for errors.
pub(super) struct ValueFormat(pub(super) fn(&str) -> bool, pub(super) &'static str);

fn plain(text: &str, extra: &str, max_length: usize) -> bool {
    let first = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    first
        && text.len() <= max_length
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || extra.contains(byte as char))
}

fn lower_plain(text: &str, extra: &str, max_length: usize) -> bool {
    plain(text, extra, max_length) && !text.bytes().any(|byte| byte.is_ascii_uppercase())
}

pub(super) const GROUP: ValueFormat = ValueFormat(
    |text| plain(text, "._-()", 90) && !text.ends_with('.'),
    "the name of a resource group: up to 90 letters, digits and ._-()",
);
pub(super) const NAME: ValueFormat = ValueFormat(
    |text| plain(text, "._-", 60) && !text.ends_with(['.', '-']),
    "a name: up to 60 letters, digits and ._-",
);
pub(super) const LOCATION: ValueFormat =
    ValueFormat(|text| lower_plain(text, "", 40), "a region as `az account list-locations` prints it, such as westus3");
pub(super) const SKU: ValueFormat =
    ValueFormat(|text| plain(text, "_-", 80), "a VM size, such as Standard_ND96isr_H200_v5");
pub(super) const PREFIX: ValueFormat = ValueFormat(
    |text| lower_plain(text, "-", 40),
    "the beginning of host names: up to 40 lower-case letters, digits and -",
);
pub(super) const SUBSCRIPTION: ValueFormat =
    ValueFormat(|text| plain(text, "-_ .()", 64), "the id or name of a subscription, as `az account list` prints it");
pub(super) const NETWORK_BLOCK: ValueFormat = ValueFormat(
    |text| parse_block(text).is_some_and(|(_, bits)| (8..=29).contains(&bits)),
    "a block such as 10.0.0.0/16",
);
pub(super) const ADDRESS_RANGE: ValueFormat = ValueFormat(
    |text| {
        matches!(text, "Internet" | "*" | "VirtualNetwork")
            || parse_block(text).is_some()
            || text.parse::<Ipv4Addr>().is_ok()
    },
    "an address, a block such as 203.0.113.0/24, or Internet",
);
pub(super) const URL: ValueFormat = ValueFormat(
    |text| {
        text.starts_with("https://")
            && text.len() < 1000
            && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"'\"`\\$<>".contains(&byte))
    },
    "an address that begins with https:// and has no quotes",
);
pub(super) const SHA256: ValueFormat = ValueFormat(
    |text| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')),
    "64 hexadecimal digits, as sha256sum prints them",
);
pub(super) const TAG_NAME: ValueFormat = ValueFormat(
    |text| plain(text, "._-", 128) && text != TAG,
    "a tag's name: letters, digits and ._-, and not cluster-doctor, which is reserved",
);
/// `az` has two tag syntaxes, one of which interprets spaces, quotes and brackets.
pub(super) const TAG_VALUE: ValueFormat =
    ValueFormat(|text| plain(text, "._-/:@+", 256), "a tag's value: up to 256 letters, digits and ._-/:@+");

/// User names that Azure rejects.
const RESERVED: [&str; 14] = [
    "root",
    "admin",
    "administrator",
    "user",
    "user1",
    "test",
    "guest",
    "console",
    "david",
    "john",
    "support",
    "sys",
    "owner",
    "server",
];

pub(super) const ADMIN: ValueFormat = ValueFormat(
    |text| {
        lower_plain(text, "_-", 32) && text.starts_with(|c: char| c.is_ascii_lowercase()) && !RESERVED.contains(&text)
    },
    "a user name that Azure accepts, such as azureuser: lower-case letters, digits, _ and -, not root or admin",
);

fn is_image(text: &str) -> bool {
    match text.starts_with('/') {
        true => is_id(text),
        false => matches!(text.split(':').count(), 1 | 4) && text.split(':').all(|part| plain(part, "._-", 80)),
    }
}

pub(super) const IMAGE: ValueFormat = ValueFormat(
    is_image,
    "publisher:offer:sku:version, such as microsoft-dsvm:ubuntu-hpc:2204:latest, or an image's resource id",
);

pub(super) fn is_id(text: &str) -> bool {
    text.starts_with("/subscriptions/")
        && text.len() < 500
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-()".contains(&byte))
}

fn parse_block(text: &str) -> Option<(Ipv4Addr, u8)> {
    let (address, bits) = text.split_once('/')?;
    Some((address.parse().ok()?, bits.parse().ok().filter(|bits| *bits <= 32)?))
}
