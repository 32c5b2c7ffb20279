//! STUB
use crate::*;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::*;
use stillpoint_image::*;
use stillpoint_linux::remote::Remote;
pub trait Contents {
    fn read(&self, owner: Owner, offset: u64, buf: &mut [u8]) -> Result<()>;
}
pub type KeepTail<'a> = dyn FnMut(&std::path::Path, u64, &mut dyn std::io::Read) -> Result<()> + 'a;
pub struct OpenFiles {
    f: HashMap<u32, File>,
}
pub fn open(i: &Image, _c: &dyn Contents, _p: FilesPolicy, _s: Stdio) -> Result<OpenFiles> {
    Ok(OpenFiles {
        f: i.paths
            .iter()
            .enumerate()
            .filter_map(|(n, p)| Some((n as u32, File::open(p.path.as_path()).ok()?)))
            .collect(),
    })
}
impl OpenFiles {
    pub fn mapping_source(&self, p: u32, _w: bool) -> Result<i32> {
        Ok(self.f[&p].as_raw_fd())
    }
    pub fn object(&self, _o: u32) -> Result<i32> {
        todo!()
    }
    pub fn install(&self, _i: &Image, _t: u32, _r: &mut Remote<'_>) -> Result<()> {
        Ok(())
    }
    pub fn cut_back(&mut self, _k: &mut KeepTail<'_>) -> Result<()> {
        Ok(())
    }
    pub fn notes(&self) -> Vec<String> {
        vec![]
    }
    pub fn take_stdin_pump(&mut self) -> Option<OwnedFd> {
        None
    }
}
