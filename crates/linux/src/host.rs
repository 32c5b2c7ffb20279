//! What this machine and kernel are.

use crate::memory::Memory;
use crate::proc::Proc;
use crate::{Error, RemoteAddr, Result};

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
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_end().to_string()
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
