//! What is in a network namespace besides sockets: everything that the kernel tells of it, so that one can be compared with
//! another that was just made, and [steps](steps) by which that becomes the same. All of it is about the namespace that the
//! calling thread is in. `rtnetlink(7)`, `network_namespaces(7)`.

mod requests;
mod steps;

pub use steps::{Remade, Step, open_wide, perform, remake, settle};

use crate::descriptors::check;
use crate::netlink::{DUMP, Request, attributes, u32_at};
use crate::proc::setting;
use crate::sockets;
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `IFA_F_TENTATIVE`: it is still asked whether anybody else has the address.
const TENTATIVE: u32 = 0x40;
/// `FRA_PRIORITY`.
const PRIORITY: u16 = 6;
const NETLINK_XFRM: i32 = 6;
const NETLINK_NETFILTER: i32 = 12;
/// `SIOCGSKNS`.
const GET_NAMESPACE: libc::c_ulong = 0x894c;

/// Files and what is in them, by their names.
pub type State = BTreeMap<String, Vec<u8>>;

/// Everything that is told of a namespace but its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Rows of each of the [`TABLES`], in the kernel's order.
    rows: [Vec<Vec<u8>>; TABLES.len()],
    /// Files that tell of packet filters.
    files: State,
}

/// A table that the kernel tells by netlink.
struct Table {
    name: &'static str,
    family: i32,
    request: u16,
    flags: u16,
    /// Length of the structure before the attributes.
    head: usize,
    /// Attributes that only count, or tell times.
    passing: &'static [u16],
}

const TABLES: [Table; 9] = [
    // Carrier changes and statistics.
    route("interface", 18, 16, &[7, 23, 26, 35, 47, 48]),
    route("address", 22, 8, &[]),
    route("route", 26, 12, &[]),
    route("rule", 34, 12, &[]),
    route("queueing discipline", 38, 20, &[3, 4, 7]),
    route("next hop", 106, 8, &[]),
    Table {
        name: "IPsec association",
        family: NETLINK_XFRM,
        request: 0x12,
        flags: DUMP,
        head: 0,
        passing: &[],
    },
    Table { name: "IPsec policy", family: NETLINK_XFRM, request: 0x15, flags: DUMP, head: 0, passing: &[] },
    // The number of changes to all of its rules; who asks is told, too.
    Table {
        name: "nftables generation",
        family: NETLINK_NETFILTER,
        request: 0xa10,
        flags: 0,
        head: 4,
        passing: &[2, 3],
    },
];

const fn route(name: &'static str, request: u16, head: usize, passing: &'static [u16]) -> Table {
    Table { name, family: libc::NETLINK_ROUTE, request, flags: DUMP, head, passing }
}

/// Files that tell of packet filters.
const FILES: [&str; 4] = ["ip_tables_names", "ip6_tables_names", "arp_tables_names", "ip_vs"];

/// A time that does not end (`INFINITY_LIFE_TIME`).
const FOREVER: u32 = u32::MAX;
/// Settings that change by themselves.
const PASSING: [&str; 1] = ["nf_conntrack_count"];
/// Where settings are.
const SETTINGS: &str = "/proc/sys/net";

/// The network namespace of a socket, by its inode number.
pub fn namespace_of(socket: impl AsFd) -> Result<u64> {
    // SAFETY: takes no argument; the result is a new descriptor nobody owns.
    let file = unsafe {
        let r = libc::ioctl(socket.as_fd().as_raw_fd(), GET_NAMESPACE);
        OwnedFd::from_raw_fd(check(|| "look for the network namespace of a socket".into(), r.into())? as i32)
    };
    let stat = rustix::fs::fstat(&file).map_err(|e| Error::call("look at a network namespace", e))?;
    Ok(stat.st_ino)
}

/// Everything that is told of this namespace but its settings.
pub fn tables() -> Result<Tables> {
    let mut all = Tables::default();
    for (rows, table) in all.rows.iter_mut().zip(&TABLES) {
        *rows = dump(table, lasting)?;
    }
    for name in FILES {
        if let Ok(text) = std::fs::read(format!("/proc/thread-self/net/{name}")) {
            all.files.insert(name.into(), text);
        }
    }
    Ok(all)
}

/// Whether nothing is asked any more about the addresses of the loopback interface: it takes a moment until they can be used, and
/// have the routes that they bring along. While it is down, nothing is asked.
///
/// # Errors
/// That they cannot be looked at.
pub fn is_settled() -> Result<bool> {
    let Some(table) = Table::called("address") else { return Ok(true) };
    let rows = dump(table, |_, body| Some(body.to_vec()))?;
    let is_asked = |row: &Vec<u8>| {
        let flags = attributes(row.get(table.head..)?).flatten().find(|(kind, _)| *kind == libc::IFA_FLAGS);
        Some(u32_at(row, 4)? == 1 && u32_at(flags?.1, 0)? & TENTATIVE != 0)
    };
    Ok(!rows.iter().any(|row| is_asked(row) == Some(true)) || !is_up()?)
}

impl Tables {
    fn of(&self, table: &str) -> &[Vec<u8>] {
        let found = TABLES.iter().zip(&self.rows).find(|(t, _)| t.name == table);
        found.map_or(&[], |(_, rows)| rows.as_slice())
    }

    /// What differs between two of them, in words.
    pub fn differences(&self, other: &Tables) -> Vec<String> {
        let mut told = Vec::new();
        for (table, (one, other)) in TABLES.iter().zip(self.rows.iter().zip(&other.rows)) {
            let rows = without(one, other).into_iter().chain(without(other, one));
            let before = told.len();
            for what in rows.map(|row| table.tell(row)) {
                // One that has changed is there in both.
                if !told[before..].contains(&what) {
                    told.push(what);
                }
            }
            if told.len() == before && one != other {
                told.push(format!("the order of each {}", table.name));
            }
        }
        told.extend(differences(&self.files, &other.files));
        told
    }
}

/// Rows that another table does not have, each as often as it has it less.
fn without<'r>(rows: &'r [Vec<u8>], other: &[Vec<u8>]) -> Vec<&'r [u8]> {
    let mut counts: HashMap<&[u8], usize> = HashMap::new();
    other.iter().for_each(|row| *counts.entry(row.as_slice()).or_default() += 1);
    let mut left = Vec::new();
    for row in rows {
        match counts.get_mut(row.as_slice()).filter(|count| **count > 0) {
            Some(count) => *count -= 1,
            None => left.push(row.as_slice()),
        }
    }
    left
}

impl Table {
    fn called(name: &str) -> Option<&'static Table> {
        TABLES.iter().find(|table| table.name == name)
    }

    /// A row in words.
    fn tell(&self, row: &[u8]) -> String {
        let name = self.name;
        let attribute = |wanted: u16| {
            let mut all = attributes(row.get(self.head..).unwrap_or(&[])).flatten();
            all.find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
        };
        let number = |wanted: u16| attribute(wanted).and_then(|value| u32_at(value, 0)).unwrap_or(0);
        let address = |value: &[u8]| match (<[u8; 4]>::try_from(value), <[u8; 16]>::try_from(value)) {
            (Ok(four), _) => Ipv4Addr::from(four).to_string(),
            (_, Ok(sixteen)) => Ipv6Addr::from(sixteen).to_string(),
            _ => "unknown".into(),
        };
        let prefix = row.get(1).copied().unwrap_or(0);
        match name {
            "interface" => {
                let text = attribute(libc::IFLA_IFNAME).unwrap_or(&[]);
                format!(
                    "interface {}",
                    String::from_utf8_lossy(text.split(|b| *b == 0).next().unwrap_or(&[]))
                )
            }
            "address" => {
                let its = attribute(libc::IFA_LOCAL).or_else(|| attribute(libc::IFA_ADDRESS));
                format!("address {}/{prefix}", address(its.unwrap_or(&[])))
            }
            "route" => {
                let to = attribute(libc::RTA_DST).map(|to| format!("{}/{prefix}", address(to)));
                let to = to.unwrap_or_else(|| "everywhere".into());
                format!("route to {to} in table {}", number(libc::RTA_TABLE))
            }
            "rule" => format!("rule {}", number(PRIORITY)),
            _ => name.into(),
        }
    }
}

/// Its settings, by their names below `/proc/sys/net`, hundreds of files: this takes some 10 ms.
pub fn settings() -> State {
    let mut state = State::new();
    add_settings("", &mut state);
    state
}

/// Names of files that differ between two states.
pub fn differences(one: &State, other: &State) -> Vec<String> {
    let keys = one.keys().chain(other.keys().filter(|key| !one.contains_key(*key)));
    keys.filter(|key| one.get(*key) != other.get(*key)).cloned().collect()
}

fn add_settings(folder: &str, state: &mut State) {
    let Ok(entries) = std::fs::read_dir(format!("{SETTINGS}/{folder}")) else { return };
    for entry in entries.flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        let name = if folder.is_empty() { file.to_string() } else { format!("{folder}/{file}") };
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            add_settings(&name, state);
        } else if !PASSING.contains(&&*file)
            && let Ok(value) = setting(&entry.path())
        {
            // Those that can only be written, or have no value, cannot be read.
            state.insert(name, value);
        }
    }
}

/// The rows of a table, in the kernel's order; none if this kernel does not have it.
fn dump(table: &Table, parse: impl Fn(&Table, &[u8]) -> Option<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
    let Table { family, request: kind, flags, .. } = *table;
    let (body, what) = (vec![0; table.head], format!("ask for every {}", table.name));
    let request = Request { family, kind, flags, body: &body, what: &what };
    let netlink = match request.send() {
        Err(e) if e.errno() == Some(libc::EPROTONOSUPPORT) => return Ok(Vec::new()),
        netlink => netlink?,
    };
    let mut rows = Vec::new();
    match request.answers(&netlink, &mut rows, |body| parse(table, body)) {
        // Nothing of the kind is built in, or loaded.
        Err(e) if matches!(e.errno(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOENT)) => Ok(rows),
        answered => answered.map(|()| rows),
    }
}

/// A row without attributes that pass.
fn lasting(table: &Table, body: &[u8]) -> Option<Vec<u8>> {
    let (head, mut rest) = body.split_at_checked(table.head)?;
    let mut row = head.to_vec();
    if table.head == 0 {
        return Some(body.to_vec());
    }
    if table.name == "address" {
        row[2] &= !(TENTATIVE as u8);
    }
    while rest.len() >= 4 {
        let len = usize::from(u16::from_ne_bytes([rest[0], rest[1]]));
        let kind = u16::from_ne_bytes([rest[2], rest[3]]) & 0x3fff;
        let attribute = rest.get(..len).filter(|a| a.len() >= 4)?;
        match (table.name, kind) {
            ("address", libc::IFA_FLAGS) => {
                let flags = u32_at(attribute, 4)? & !TENTATIVE;
                row.extend_from_slice(&attribute[..4]);
                row.extend_from_slice(&flags.to_ne_bytes());
            }
            // How long it will be there passes, that it will not stay does not.
            ("address", libc::IFA_CACHEINFO) => {
                if u32_at(attribute, 4)? != FOREVER || u32_at(attribute, 8)? != FOREVER {
                    row.extend_from_slice(&attribute[..4]);
                }
            }
            ("route", libc::RTA_CACHEINFO) => {
                if u32_at(attribute, 12)? != 0 {
                    row.extend_from_slice(&attribute[..4]);
                }
            }
            _ if table.passing.contains(&kind) => {}
            _ => {
                row.extend_from_slice(attribute);
                row.resize(row.len().next_multiple_of(4), 0);
            }
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Some(row)
}

/// Whether the loopback interface is up.
pub fn is_up() -> Result<bool> {
    Ok(flags(None)? & libc::IFF_UP as i16 != 0)
}

/// Brings the loopback interface up.
pub fn bring_up() -> Result<()> {
    let now = flags(None)?;
    flags(Some(now | libc::IFF_UP as i16)).map(drop)
}

/// Flags of the loopback interface, or new ones.
fn flags(wanted: Option<i16>) -> Result<i16> {
    let socket = sockets::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    // SAFETY: the structure has numbers only, for all of which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = wanted.unwrap_or(0);
    let command = if wanted.is_some() { libc::SIOCSIFFLAGS } else { libc::SIOCGIFFLAGS };
    // SAFETY: the request is a valid ifreq, which is all that both commands read or write.
    let r = unsafe { libc::ioctl(socket.as_raw_fd(), command, &raw mut request) };
    check(|| "flags of the loopback interface".into(), r.into())?;
    // SAFETY: both commands leave flags there.
    Ok(unsafe { request.ifr_ifru.ifru_flags })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::namespaces::{make, open};
    use crate::proc::NamespaceKind;

    #[test]
    fn what_differs_is_told() {
        let fresh = |up: bool| {
            let mut state = (Tables::default(), State::new());
            let made = make(NamespaceKind::Network, || {
                if up {
                    bring_up()?;
                }
                assert_eq!(is_up()?, up);
                let socket = sockets::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
                assert_eq!(namespace_of(&socket)?, open("/proc/thread-self", NamespaceKind::Network)?.1.id);
                state = (tables()?, settings());
                Ok::<_, Error>(())
            });
            made.map(|_| state)
        };
        let (Ok(down), Ok(up)) = (fresh(false), fresh(true)) else { return }; // not permitted
        assert!(down == fresh(false).unwrap());
        assert!(up == fresh(true).unwrap());
        let told = down.0.differences(&up.0);
        for what in ["interface lo", "address 127.0.0.1/8", "route to 127.0.0.0/8 in table 255"] {
            assert!(told.iter().any(|told| told == what), "{told:?}");
        }
        assert!(up.1.contains_key("ipv4/ip_forward"));
    }
}
