//! Small file systems in memory.

use std::path::PathBuf;
use std::process::Command;

/// A file system in memory of some size, unmounted in the end.
#[derive(Debug)]
pub struct Tmpfs(pub PathBuf);

impl Tmpfs {
    /// Mounted there; nothing if that is not permitted. `size` as `mount(8)` takes it.
    pub fn new(at: PathBuf, size: &str) -> Option<Self> {
        let options = format!("size={size}");
        let done = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&at).output();
        done.ok()?.status.success().then_some(Tmpfs(at))
    }

    /// Gives it another size.
    #[track_caller]
    pub fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        let done = Command::new("mount").args(["-o", &options]).arg(&self.0).status().expect("mount");
        assert!(done.success(), "remounting {} with {size}: {done}", self.0.display());
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
