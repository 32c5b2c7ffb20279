//! Character devices that keep nothing of who has them open, as long as that is so: they are opened again.

use super::descriptions::Description;
use super::{Scan, paths};
use crate::Result;
use rustix::fs::minor;
use stillpoint_image::{FileKind, Usage, is_kernel_log, is_miscellaneous};
use stillpoint_linux::descriptors::{poll_now, reopen};
use stillpoint_linux::namespaces;
use stillpoint_linux::proc::NamespaceKind;
use stillpoint_linux::{Error, devices, network};

/// What `/proc/misc` calls devices that never keep anything: what is asked of them is done at once, or gives another descriptor.
const STATELESS: [&str; 7] =
    ["autofs", "btrfs-control", "hw_random", "kvm", "loop-control", "userfaultfd", "vsock"];
/// What nobody asks of `cpu_dma_latency`, microseconds (`PM_QOS_CPU_LATENCY_DEFAULT_VALUE` of the kernel).
const NO_LATENCY: i32 = 2_000_000_000;
const CLOSE: &str = "close it before the checkpoint";

/// A device that can be opened again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// It keeps nothing.
    Stateless,
    /// `/dev/kmsg`: it keeps what was read.
    KernelLog,
    /// `/dev/net/tun`: it may be an interface.
    Tunnel,
    /// `/dev/cpu_dma_latency`: it may keep a wish.
    Latency,
}

/// Which of these a description is.
pub(crate) fn known(d: &Description) -> Option<Device> {
    if is_kernel_log(d.stat.st_rdev) {
        return Some(Device::KernelLog);
    }
    if !is_miscellaneous(d.stat.st_rdev) {
        return None;
    }
    let all = std::fs::read_to_string("/proc/misc").ok()?;
    let mut lines = all.lines().filter_map(|line| line.trim().split_once(' '));
    let (_, name) = lines.find(|(number, _)| number.parse() == Ok(minor(d.stat.st_rdev)))?;
    match name.trim() {
        "tun" => Some(Device::Tunnel),
        "cpu_dma_latency" => Some(Device::Latency),
        name => STATELESS.contains(&name).then_some(Device::Stateless),
    }
}

/// Captures it, unless it keeps something just now.
pub(crate) fn capture(scan: &mut Scan<'_>, d: &Description, device: Device) -> Result<Option<FileKind>> {
    let against = match why_not(d, device) {
        Err(e) if matches!(e.errno(), Some(libc::EPERM | libc::EACCES)) => {
            Some(("whether it keeps something cannot be seen by this user", CLOSE))
        }
        told => told?,
    };
    if let Some((why, hint)) = against {
        return scan.refuse(d, why, hint);
    }
    let row = paths::path_file(scan.builder, &d.link, &d.file, Usage::Path, &d.name())?;
    Ok(row.map(FileKind::Path))
}

fn why_not(
    d: &Description,
    device: Device,
) -> stillpoint_linux::Result<Option<(&'static str, &'static str)>> {
    Ok(match device {
        Device::Stateless => None,
        Device::KernelLog if d.can_read() && poll_now(&d.file, libc::POLLIN)? != 0 => Some((
            "it has messages of the kernel that were not yet read",
            "try again when the program has read them",
        )),
        Device::KernelLog => None,
        Device::Tunnel if devices::is_interface(&d.file)? => {
            Some(("it is a network interface (tun, tap)", CLOSE))
        }
        Device::Tunnel => {
            let ours = namespaces::open("/proc/self", NamespaceKind::Network)?.1.id;
            (network::namespace_of(&d.file)? != ours)
                .then_some(("it is for interfaces in another network namespace than ours", CLOSE))
        }
        Device::Latency => {
            let mut least = [0; 4];
            rustix::io::pread(reopen(&d.file, libc::O_RDONLY)?, &mut least, 0)
                .map_err(|e| Error::call("read cpu_dma_latency", e))?;
            (i32::from_ne_bytes(least) != NO_LATENCY)
                .then_some(("a wish for short latencies is in force, and may be by it", CLOSE))
        }
    })
}
