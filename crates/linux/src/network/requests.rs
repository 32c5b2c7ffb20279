//! Requests that change the loopback interface, addresses, rules and routes of a network namespace, made of the rows in which the
//! kernel tells of them. `rtnetlink(7)`.

use super::{PRIORITY, Table, Tables, without};
use crate::netlink::{ACKNOWLEDGE, Request, attributes, u16_at, u32_at};
use crate::{Error, Result};
use std::collections::HashMap;

/// Index of the loopback interface (`LOOPBACK_IFINDEX`).
const LOOPBACK: u32 = 1;
/// `NLM_F_EXCL`.
const EXCLUSIVE: u16 = 0x200;
/// `NLM_F_CREATE`.
const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`: what is there with the same key stays, before it.
const APPEND: u16 = 0x800;
/// Flags of an interface that are set, not told (`IFF_UP`, `IFF_DEBUG`, `IFF_NOARP`, `IFF_PROMISC`, `IFF_ALLMULTI`, `IFF_MULTICAST`).
const CHANGEABLE: u32 = 0x1385;
/// `RTNH_F_ONLINK`.
const ON_LINK: u32 = 4;
/// `FIB_RULE_INVERT`.
const INVERTED: u32 = 2;
/// `RTA_VIA`.
const VIA: u16 = 18;
/// `RTA_METRICS`, and in it `RTAX_CC_ALGO`.
const METRICS: u16 = 8;
const CONGESTION_CONTROL: u16 = 16;

/// What can be asked for.
struct Change {
    /// `RTM_*`.
    kind: u16,
    flags: u16,
    /// Table whose rows it is about.
    table: &'static str,
    what: &'static str,
    /// Attributes that may be in it. None of them leads out of the namespace, or to a program, or another module.
    attributes: &'static [u16],
}

const OF_LINK: [u16; 9] = [4, 13, 20, 27, 40, 41, 58, 63, 64];
const OF_ADDRESS: [u16; 7] = [1, 2, 3, 4, 8, 9, 11];
const OF_RULE: [u16; 25] =
    [1, 2, 3, 4, PRIORITY, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30];
const OF_ROUTE: [u16; 12] = [1, 2, 4, 5, 6, 7, METRICS, libc::RTA_MULTIPATH, 11, 15, VIA, 20];

const SET_LINK: Change = change(19, 0, "interface", "change the loopback interface", &OF_LINK);
const ADD_ADDRESS: Change = change(20, CREATE | EXCLUSIVE, "address", "add an address", &OF_ADDRESS);
const REMOVE_ADDRESS: Change = change(21, 0, "address", "remove an address", &OF_ADDRESS);
const ADD_RULE: Change = change(32, CREATE, "rule", "add a rule", &OF_RULE);
const REMOVE_RULE: Change = change(33, 0, "rule", "remove a rule", &OF_RULE);
const ADD_ROUTE: Change = change(24, CREATE | APPEND, "route", "add a route", &OF_ROUTE);
const REMOVE_ROUTE: Change = change(25, 0, "route", "remove a route", &OF_ROUTE);
const CHANGES: [Change; 7] =
    [SET_LINK, ADD_ADDRESS, REMOVE_ADDRESS, ADD_RULE, REMOVE_RULE, ADD_ROUTE, REMOVE_ROUTE];

const fn change(
    kind: u16,
    flags: u16,
    table: &'static str,
    what: &'static str,
    attributes: &'static [u16],
) -> Change {
    Change { kind, flags, table, what, attributes }
}

impl Change {
    fn of(kind: u16) -> Result<&'static Change> {
        let found = CHANGES.iter().find(|change| change.kind == kind);
        found.ok_or_else(|| Error::Other(format!("request {kind} is none that changes a network namespace")))
    }

    /// A row without what is only told.
    fn of_row(&self, row: &[u8]) -> Option<Vec<u8>> {
        let head = head_of(self.table);
        let (head, rest) = row.split_at_checked(head)?;
        let mut body = head.to_vec();
        let flags = match self.table {
            "route" => Some(ON_LINK),
            "rule" => Some(INVERTED),
            _ => None,
        };
        if let Some(mask) = flags {
            let flags = u32_at(&body, 8)? & mask;
            body[8..12].copy_from_slice(&flags.to_ne_bytes());
        }
        let mut has_priority = false;
        for (kind, value) in attributes(rest).flatten() {
            if self.attributes.contains(&kind) && self.may_have(kind, value) {
                has_priority |= kind == PRIORITY;
                add(&mut body, kind, value);
            }
        }
        // Nothing is told of the highest one.
        if self.table == "rule" && !has_priority {
            add(&mut body, PRIORITY, &[0; 4]);
        }
        Some(body)
    }

    fn may_have(&self, kind: u16, value: &[u8]) -> bool {
        let all = |value, wrong: &dyn Fn(u16) -> bool| {
            attributes(value).all(|attribute| attribute.is_some_and(|(kind, _)| !wrong(kind)))
        };
        match (self.table, kind) {
            // It is a name by which a module is loaded.
            ("route", METRICS) => all(value, &|kind| kind == CONGESTION_CONTROL),
            ("route", libc::RTA_MULTIPATH) => {
                let mut rest = value;
                while !rest.is_empty() {
                    let Some(hop) = u16_at(rest, 0).and_then(|len| rest.get(8..len.into())) else {
                        return false;
                    };
                    if !all(hop, &|kind| !matches!(kind, libc::RTA_GATEWAY | VIA | libc::RTA_FLOW)) {
                        return false;
                    }
                    rest = rest.get((8 + hop.len()).next_multiple_of(4)..).unwrap_or(&[]);
                }
                true
            }
            _ => true,
        }
    }

    /// Whether it is about nothing but this namespace.
    fn allows(&self, body: &[u8]) -> bool {
        let head = head_of(self.table);
        let Some((head, rest)) = body.split_at_checked(head) else { return false };
        let is_internet = [libc::AF_INET, libc::AF_INET6].contains(&head[0].into());
        let number = |at| u32_at(head, at).unwrap_or(u32::MAX);
        let is_sound = match self.table {
            "interface" => {
                head[0] == 0 && number(4) == LOOPBACK && (number(8) | number(12)) & !CHANGEABLE == 0
            }
            "address" => is_internet && number(4) == LOOPBACK,
            "route" => is_internet && number(8) & !ON_LINK == 0,
            _ => is_internet && number(8) & !INVERTED == 0,
        };
        let may_have = |(kind, value)| self.attributes.contains(&kind) && self.may_have(kind, value);
        is_sound && attributes(rest).all(|attribute| attribute.is_some_and(may_have))
    }
}

/// Length of the structure before the attributes of a row.
fn head_of(table: &str) -> usize {
    Table::called(table).map_or(0, |table| table.head)
}

fn add(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Whether it is a request that changes nothing but this namespace.
///
/// # Errors
/// That it is not.
pub(super) fn check(kind: u16, body: &[u8]) -> Result<()> {
    let change = Change::of(kind)?;
    match change.allows(body) {
        true => Ok(()),
        false => {
            Err(Error::Other(format!("a request to {} is about more than a network namespace", change.what)))
        }
    }
}

/// Asks the kernel for it.
pub(super) fn send(kind: u16, body: &[u8]) -> Result<()> {
    let change = Change::of(kind)?;
    let told = Table::called(change.table).map(|table| table.tell(body));
    let what = match told.filter(|_| change.table != "interface") {
        Some(told) => format!("{} of a network namespace ({told})", change.what),
        None => format!("{} of a network namespace", change.what),
    };
    let request =
        Request { family: libc::NETLINK_ROUTE, kind, flags: change.flags | ACKNOWLEDGE, body, what: &what };
    let netlink = request.send()?;
    match request.answers(&netlink, &mut Vec::new(), |_| Some(())) {
        // That is how it says that it is done.
        Err(e) if e.errno() == Some(0) => Ok(()),
        answered => answered,
    }
}

/// Whether after this request it must be waited until addresses are what they are to be.
pub(super) fn adds_address(kind: u16) -> bool {
    kind == ADD_ADDRESS.kind
}

/// What would make the loopback interface what is wanted.
pub(super) fn of_link(wanted: &Tables, made: &Tables) -> Vec<(u16, Vec<u8>)> {
    let find = |tables: &Tables| {
        let rows = tables.of(SET_LINK.table).iter();
        rows.clone().find(|row| u32_at(row, 4) == Some(LOOPBACK)).cloned()
    };
    let Some((wanted, made)) = find(wanted).zip(find(made)) else { return Vec::new() };
    let head = head_of(SET_LINK.table);
    let (Some((head, wanted)), Some((of_made, made))) =
        (wanted.split_at_checked(head), made.split_at_checked(head))
    else {
        return Vec::new();
    };
    let flags = |head| u32_at(head, 8).unwrap_or(0);
    let change = (flags(head) ^ flags(of_made)) & CHANGEABLE;
    let mut body = head.to_vec();
    body[8..12].copy_from_slice(&(flags(head) & change).to_ne_bytes());
    body[12..16].copy_from_slice(&change.to_ne_bytes());
    let now: HashMap<u16, &[u8]> = attributes(made).flatten().collect();
    for (kind, value) in attributes(wanted).flatten() {
        if OF_LINK.contains(&kind) && now.get(&kind) != Some(&value) {
            add(&mut body, kind, value);
        }
    }
    if change == 0 && body.len() == head.len() { Vec::new() } else { vec![(SET_LINK.kind, body)] }
}

/// What would make addresses what is wanted.
pub(super) fn of_addresses(wanted: &Tables, made: &Tables) -> Vec<(u16, Vec<u8>)> {
    let (removed, mut added) = of_rows(&REMOVE_ADDRESS, &ADD_ADDRESS, wanted, made);
    // The kernel puts newer ones of IPv6 before older ones.
    let is_newest_first = |(_, body): &(u16, Vec<u8>)| i32::from(body[0]) == libc::AF_INET6;
    let newest_first: Vec<_> = added.extract_if(.., |request| is_newest_first(request)).collect();
    removed.into_iter().chain(added).chain(newest_first.into_iter().rev()).collect()
}

/// What would make rules what is wanted.
pub(super) fn of_rules(wanted: &Tables, made: &Tables) -> Vec<(u16, Vec<u8>)> {
    let (removed, added) = of_rows(&REMOVE_RULE, &ADD_RULE, wanted, made);
    removed.into_iter().chain(added).collect()
}

/// What would make routes what is wanted.
pub(super) fn of_routes(wanted: &Tables, made: &Tables) -> Vec<(u16, Vec<u8>)> {
    let (removed, mut added) = of_rows(&REMOVE_ROUTE, &ADD_ROUTE, wanted, made);
    // How others are reached must be known first.
    added.sort_by_key(|(_, body)| {
        let mut all = attributes(&body[head_of(ADD_ROUTE.table)..]).flatten();
        all.any(|(kind, _)| matches!(kind, libc::RTA_GATEWAY | VIA | libc::RTA_MULTIPATH))
    });
    removed.into_iter().chain(added).collect()
}

type Requests = Vec<(u16, Vec<u8>)>;

/// Requests that take away the rows that are too many, and that add those that are not there.
fn of_rows(remove: &Change, add: &Change, wanted: &Tables, made: &Tables) -> (Requests, Requests) {
    let (wanted, made) = (wanted.of(add.table), made.of(add.table));
    let requests = |change: &Change, rows: Vec<&[u8]>| {
        let of_row = |row| Some((change.kind, change.of_row(row)?));
        rows.into_iter().filter_map(of_row).collect()
    };
    (requests(remove, without(made, wanted)), requests(add, without(wanted, made)))
}
