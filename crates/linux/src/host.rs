//! What this machine and kernel are.

use crate::memory::Memory;
use crate::proc::Proc;
use crate::{Error, RemoteAddr, Result};
use std::sync::OnceLock;

/// `uname -m`.
pub fn machine() -> String {
    rustix::system::uname().machine().to_string_lossy().into_owned()
}

/// `uname -r`.
pub fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Identity of this boot; empty if the kernel does not tell.
pub fn boot_id() -> String {
    static ID: OnceLock<String> = OnceLock::new();
    let read = || std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    ID.get_or_init(|| read().trim_end().to_owned()).clone()
}

/// How many processors there are for us; one if that cannot be told. To ask takes longer than many a thing for which it is to be known,
/// so it is asked once.
pub fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Whether anything of this machine's memory is in its swap space. (`/proc/meminfo` may be one of a container.) sysinfo(2)
pub fn has_swapped() -> bool {
    let told = rustix::system::sysinfo();
    told.freeswap != told.totalswap
}

/// How many mappings a process may have (`vm.max_map_count`); without a limit if the kernel does not tell.
pub fn most_mappings() -> usize {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim_end().parse().unwrap_or(usize::MAX)
}

/// Whether the machine is being shut down or started anew, as far as its first process tells: systemd while it stops units, or
/// once it has made way for what kills all processes; or, with the init of System V and others that note their runlevel, 0 or 6.
pub fn is_going_down() -> bool {
    let first = std::fs::read_to_string("/proc/1/comm").unwrap_or_default();
    if first.starts_with("systemd-shutdow") {
        return true;
    }
    if std::path::Path::new("/run/systemd/system").is_dir() {
        let state = std::process::Command::new("systemctl")
            .arg("is-system-running")
            .stdin(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .output();
        return state.is_ok_and(|state| state.stdout.starts_with(b"stopping"));
    }
    let records = ["/run/utmp", "/var/run/utmp"].into_iter().find_map(|path| std::fs::read(path).ok());
    records.is_some_and(|records| matches!(runlevel(&records), Some(b'0' | b'6')))
}

/// The runlevel in a file of `utmp(5)` records.
fn runlevel(records: &[u8]) -> Option<u8> {
    const SIZE: usize = 384;
    const RUN_LVL: i16 = 1;
    let level = |record: &[u8]| {
        let kind = i16::from_le_bytes(record[..2].try_into().ok()?);
        let pid = i32::from_le_bytes(record[4..8].try_into().ok()?);
        (kind == RUN_LVL).then_some((pid % 256) as u8)
    };
    records.chunks_exact(SIZE).filter_map(level).next_back()
}

/// The code that this kernel maps into every process (`vdso(7)`).
pub fn vdso() -> Result<Vec<u8>> {
    let pid = std::process::id();
    let maps = Proc::process(pid)?.maps()?;
    let vdso = maps.iter().find(|v| v.name == b"[vdso]");
    let vdso = vdso.ok_or_else(|| Error::Other("this kernel maps no vdso".into()))?;
    let mut code = vec![0; vdso.len() as usize];
    Memory::open(pid)?.read(RemoteAddr(vdso.start), &mut code)?;
    Ok(code)
}

/// Instructions of this processor that not every one has and that it may use here, by name. Programs find out when they start which
/// there are.
pub fn instructions() -> Vec<String> {
    macro_rules! found {
        ($($name:tt)*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name)),)*]
        };
    }
    let all = found! {
        "sse3" "ssse3" "sse4.1" "sse4.2" "sse4a" "popcnt" "lzcnt" "bmi1" "bmi2" "movbe" "adx" "tbm"
        "aes" "pclmulqdq" "vaes" "vpclmulqdq" "gfni" "sha" "rdrand" "rdseed" "cmpxchg16b" "rtm"
        "avx" "avx2" "fma" "f16c" "xsave" "xsavec" "xsaveopt" "xsaves"
        "avx512f" "avx512cd" "avx512bw" "avx512dq" "avx512vl" "avx512ifma" "avx512vbmi" "avx512vbmi2"
        "avx512vnni" "avx512bitalg" "avx512vpopcntdq" "avx512bf16" "avx512vp2intersect" "avx512fp16"
    };
    all.into_iter().filter(|(_, there)| *there).map(|(name, _)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runlevels_are_read() {
        let record = |kind: i16, pid: i32| {
            let mut record = vec![0; 384];
            record[..2].copy_from_slice(&kind.to_le_bytes());
            record[4..8].copy_from_slice(&pid.to_le_bytes());
            record
        };
        let boot =
            [record(2, 0), record(1, i32::from(b'2') + 256 * i32::from(b'N')), record(7, 4711)].concat();
        assert_eq!(runlevel(&boot), Some(b'2'));
        let halt = [boot, record(1, i32::from(b'0') + 256 * i32::from(b'2'))].concat();
        assert_eq!(runlevel(&halt), Some(b'0'));
        assert_eq!(runlevel(&[]), None);
    }
}
