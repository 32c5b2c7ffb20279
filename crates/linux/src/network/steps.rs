//! Making a new network namespace what another one is, step by step, and doing those steps again in yet another one.

use super::{SETTINGS, State, Tables, bring_up, differences, is_settled, is_up, requests, settings, tables};
use crate::proc::setting;
use crate::{Error, Result};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// So often it is looked what still differs. Some settings change others: `conf/all` those of every interface.
const MOST_ROUNDS: usize = 8;
/// Folders below `/proc/sys/net` whose settings each namespace has for itself. What others there may be is not known here.
const FOLDERS: [&str; 8] = ["bridge", "core", "ipv4", "ipv6", "mptcp", "netfilter", "sctp", "unix"];
/// Its value is a name by which a module is loaded.
const CONGESTION_CONTROL: &str = "ipv4/tcp_congestion_control";
/// Settings in them that are told, and can be changed, in each namespace, and are the whole machine's.
const MACHINES: [&str; 1] = ["netfilter/nf_hooks_lwtunnel"];

/// A change of a network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A setting gets a value.
    Setting {
        /// Its name below `/proc/sys/net`.
        name: String,
        /// What is written.
        value: Vec<u8>,
    },
    /// The loopback interface, an address, a rule or a route is changed.
    Request {
        /// What is asked of the kernel, `RTM_*`.
        kind: u16,
        /// What follows the head of the message.
        body: Vec<u8>,
    },
}

/// A new network namespace that was made what another one is, as far as that can be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remade {
    /// Its loopback interface was brought up first.
    pub up: bool,
    /// What was done then.
    pub steps: Vec<Step>,
    /// What is told of it but its settings.
    pub tables: Tables,
    /// Its settings.
    pub settings: State,
}

impl Step {
    fn check(&self) -> Result<()> {
        match self {
            Step::Setting { name, value } if name == CONGESTION_CONTROL => is_available(value),
            Step::Setting { name, .. } if is_own(name) => Ok(()),
            Step::Setting { name, .. } => Err(Error::Other(format!(
                "setting net/{name} is none that a network namespace has for itself"
            ))),
            Step::Request { kind, body } => requests::check(*kind, body),
        }
    }

    fn perform(&self) -> Result<()> {
        match self {
            Step::Setting { name, value } => set(name, value),
            Step::Request { kind, body } => requests::send(*kind, body),
        }
    }
}

/// Makes the new namespace that this thread is in what another one is, of which this is told.
///
/// # Errors
/// That the new one cannot be looked at. What cannot be made the same is no error: it differs in the end.
pub fn remake(up: bool, wanted: (&Tables, &State)) -> Result<Remade> {
    if up {
        bring_up()?;
        settle()?;
    }
    let mut made = Remade { up, steps: Vec::new(), tables: tables()?, settings: settings() };
    for _ in 0..MOST_ROUNDS {
        let before = made.steps.len();
        for steps_to in [link, to_settings, addresses, rules, routes] {
            let steps = steps_to(wanted, &made);
            if steps.is_empty() {
                continue;
            }
            let can_be = |step: &Step| step.check().and_then(|()| step.perform()).is_ok();
            made.steps.extend(steps.into_iter().filter(can_be));
            settle()?;
            made.tables = tables()?;
        }
        if made.steps.len() == before {
            break;
        }
        made.settings = settings();
    }
    Ok(made)
}

/// Waits until the addresses of the loopback interface can be used; a second at most. Returns whether they can.
///
/// # Errors
/// That they cannot be looked at.
pub fn settle() -> Result<bool> {
    for _ in 0..200 {
        if is_settled()? {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(false)
}

fn link((wanted, _): (&Tables, &State), made: &Remade) -> Vec<Step> {
    asked(requests::of_link(wanted, &made.tables))
}

fn addresses((wanted, _): (&Tables, &State), made: &Remade) -> Vec<Step> {
    asked(requests::of_addresses(wanted, &made.tables))
}

fn rules((wanted, _): (&Tables, &State), made: &Remade) -> Vec<Step> {
    asked(requests::of_rules(wanted, &made.tables))
}

fn routes((wanted, _): (&Tables, &State), made: &Remade) -> Vec<Step> {
    asked(requests::of_routes(wanted, &made.tables))
}

fn asked(requests: Vec<(u16, Vec<u8>)>) -> Vec<Step> {
    requests.into_iter().map(|(kind, body)| Step::Request { kind, body }).collect()
}

fn to_settings((_, wanted): (&Tables, &State), made: &Remade) -> Vec<Step> {
    let differ = differences(wanted, &made.settings).into_iter();
    differ
        .filter_map(|name| {
            let value = wanted.get(&name)?.clone();
            Some(Step::Setting { name, value })
        })
        .collect()
}

/// Does steps in the new namespace that this thread is in, in their order, and looks whether they have come to what they were to.
///
/// # Errors
/// Which of them cannot be done; then some may have been.
pub fn perform(steps: &[Step]) -> Result<()> {
    steps.iter().try_for_each(Step::check)?;
    let adds = |step: &Step| matches!(step, Step::Request { kind, .. } if requests::adds_address(*kind));
    for (at, step) in steps.iter().enumerate() {
        step.perform()?;
        // Routes can lead from addresses only that can be used, and what is made next may be bound to them.
        if adds(step) && !steps.get(at + 1).is_some_and(adds) && !settle()? {
            let why =
                "addresses of the loopback interface of a network namespace cannot be used after a second";
            return Err(Error::Other(why.into()));
        }
    }
    // An address is told as one that can be used a moment before there is a route to it. Both are done under one lock of the kernel,
    // which who sets the flags of an interface takes, too.
    if steps.iter().any(adds) && is_up()? {
        bring_up()?;
    }
    // Of what is set several times, the value is the same each time.
    for step in steps {
        let Step::Setting { name, value } = step else { continue };
        let path = format!("{SETTINGS}/{name}");
        let now = setting(Path::new(&path)).map_err(|e| Error::file(&path, e))?;
        if now != *value {
            let text = |value: &[u8]| String::from_utf8_lossy(value.trim_ascii()).into_owned();
            let (now, wanted) = (text(&now), text(value));
            return Err(Error::Other(format!(
                "setting net/{name} is {now:?} in a new network namespace of this machine, where it was {wanted:?}"
            )));
        }
    }
    Ok(())
}

/// Whether a namespace has such a setting for itself. The kernel lets nobody write others, but for those of [`MACHINES`]
/// (`ensure_safe_net_sysctl`).
fn is_own(name: &str) -> bool {
    let mut parts = name.split('/');
    parts.next().is_some_and(|folder| FOLDERS.contains(&folder))
        && parts.clone().next().is_some()
        && parts.all(|part| !matches!(part, "" | "." | ".."))
        && !MACHINES.contains(&name)
}

/// Refuses a congestion control that this machine does not have: to ask for it would load a module of that name.
fn is_available(wanted: &[u8]) -> Result<()> {
    let path = format!("{SETTINGS}/ipv4/tcp_available_congestion_control");
    let all = setting(Path::new(&path)).map_err(|e| Error::file(&path, e))?;
    let wanted = wanted.trim_ascii();
    if all.split(u8::is_ascii_whitespace).any(|one| !one.is_empty() && one == wanted) {
        return Ok(());
    }
    let wanted = String::from_utf8_lossy(wanted);
    Err(Error::Other(format!(
        "setting net/{CONGESTION_CONTROL} was {wanted:?}, which this machine does not have: load tcp_{wanted} (modprobe)"
    )))
}

/// Lets sockets be made that settings may not allow any more, in the network namespace that this thread is in. `longest`: so many
/// datagrams are to have room in a unix socket; `pings`: there are ICMP sockets of datagrams. Returns the steps by which the settings become
/// what they were.
///
/// # Errors
/// That one cannot be read or changed.
pub fn open_wide(longest: usize, pings: bool) -> Result<Vec<Step>> {
    let mut back = Vec::new();
    let own_group = rustix::process::getegid().as_raw();
    let wide = [
        ("ipv4/ip_unprivileged_port_start", Some("0".to_owned())),
        ("core/somaxconn", Some(i32::MAX.to_string())),
        ("ipv4/ping_group_range", pings.then(|| format!("{own_group}\t{own_group}"))),
        // Each socket keeps that which it was made under.
        ("unix/max_dgram_qlen", Some(longest.to_string())),
    ];
    for (name, wide) in wide.into_iter().filter_map(|(name, wide)| Some((name, wide?))) {
        let path = format!("{SETTINGS}/{name}");
        let value = match setting(Path::new(&path)) {
            // Not all kernels have all of them.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            value => value.map_err(|e| Error::file(&path, e))?,
        };
        let now = String::from_utf8_lossy(&value).trim().parse::<usize>();
        if name == "unix/max_dgram_qlen" && now.is_ok_and(|now| now >= longest) {
            continue;
        }
        // What cannot be written as it is told (groups without a name in our user namespace) is left alone.
        if set(name, &value).is_ok() {
            set(name, wide.as_bytes())?;
            back.push(Step::Setting { name: name.into(), value });
        }
    }
    Ok(back)
}

fn set(name: &str, value: &[u8]) -> Result<()> {
    let told = || format!("set net/{name}");
    let folder: OwnedFd =
        openat(CWD, SETTINGS, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| Error::call(told(), e))?;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let file = openat2(&folder, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty(), within);
    let file = file.map_err(|e| Error::call(told(), e))?;
    let written = rustix::io::write(&file, value).map_err(|e| Error::call(told(), e))?;
    match written == value.len() {
        true => Ok(()),
        false => Err(Error::Other(format!("{}: the kernel takes a part of the value only", told()))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::namespaces::make;
    use crate::proc::NamespaceKind;
    use crate::sockets;

    /// More than the first 32 bytes are told at the beginning only.
    const RESERVED: &str = "8000,8002,8004,8006,8008,8010,8012,8014,8016,8018,8020,8022,8024,8026,8028,8030,8032,8034,8036,8038\n";

    fn to(name: &str, value: &str) -> Step {
        Step::Setting { name: name.into(), value: value.into() }
    }

    #[test]
    fn only_settings_of_a_namespace_are_written() {
        let all = [
            "netfilter/nf_hooks_lwtunnel",
            "../kernel/core_pattern",
            "ipv4/../../kernel/core_pattern",
            "ipv4",
        ];
        for name in
            all.into_iter().chain(["/proc/sys/net/ipv4/ip_forward", "", "ipv4//ip_forward", "netrom/x"])
        {
            assert!(to(name, "1\n").check().is_err(), "{name}");
        }
        to("ipv4/ip_forward", "1\n").check().unwrap();
    }

    #[test]
    fn no_module_is_loaded_for_a_name() {
        let refused = to(CONGESTION_CONTROL, "nobody_has_it\n").check().unwrap_err().to_string();
        assert!(refused.contains("tcp_nobody_has_it"), "{refused}");
        assert!(to(CONGESTION_CONTROL, "\n").check().is_err());
        to(CONGESTION_CONTROL, "reno\n").check().unwrap();
    }

    #[test]
    fn settings_let_sockets_be_made_for_a_while() {
        let made = make(NamespaceKind::Network, || {
            set("ipv4/ping_group_range", b"1\t0\n")?;
            let before = settings();
            let ping = || sockets::socket(libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP);
            assert!(ping().is_err());
            let back = open_wide(100, true)?;
            ping()?;
            assert_eq!(settings().get("unix/max_dgram_qlen").unwrap(), b"100\n");
            perform(&back)?;
            assert_eq!(differences(&before, &settings()), Vec::<String>::new());
            Ok::<_, Error>(())
        });
        assert!(made.is_ok_and(|_| true) || !rustix::process::geteuid().is_root());
    }

    #[test]
    fn a_new_one_becomes_what_another_is() {
        let wanted = [
            ("ipv4/ip_local_port_range", "100\t200\n"),
            ("ipv4/ip_unprivileged_port_start", "80\n"),
            ("ipv4/ping_group_range", "0\t2147483647\n"),
            ("ipv6/conf/all/disable_ipv6", "1\n"),
            ("ipv6/conf/default/disable_ipv6", "1\n"),
            ("ipv6/conf/lo/disable_ipv6", "0\n"),
            ("core/somaxconn", "77\n"),
            ("ipv4/ip_forward", "1\n"),
            ("ipv4/ip_local_reserved_ports", RESERVED),
            ("ipv4/tcp_fastopen_key", "00000001-00000002-00000003-00000004\n"),
        ];
        let (mut other, mut remade, mut again) = (None, None, None);
        let of_other = make(NamespaceKind::Network, || {
            bring_up()?;
            // The first range is not allowed before the second setting.
            wanted[1..]
                .iter()
                .chain(&wanted[..1])
                .try_for_each(|(name, value)| set(name, value.as_bytes()))?;
            other = Some((tables()?, settings()));
            Ok::<_, Error>(())
        });
        if of_other.is_err_and(|e| e.errno() == Some(libc::EPERM)) {
            return; // not permitted
        }
        let (tables_of_other, settings_of_other) = other.unwrap();
        make(NamespaceKind::Network, || {
            remade = Some(remake(true, (&tables_of_other, &settings_of_other))?);
            Ok::<_, Error>(())
        })
        .unwrap();
        let remade = remade.unwrap();
        assert_eq!(differences(&remade.settings, &settings_of_other), Vec::<String>::new());
        assert_eq!(remade.tables.differences(&tables_of_other), Vec::<String>::new());
        make(NamespaceKind::Network, || {
            bring_up()?;
            perform(&remade.steps)?;
            again = Some((tables()?, settings()));
            let file = std::fs::File::open(format!("{SETTINGS}/ipv4/ip_local_reserved_ports")).unwrap();
            let mut room = [0; 300];
            let len = rustix::io::read(&file, &mut room).unwrap();
            assert_eq!(&room[..len], RESERVED.as_bytes());
            Ok::<_, Error>(())
        })
        .unwrap();
        assert!(again.unwrap() == (tables_of_other, settings_of_other));
    }
}
