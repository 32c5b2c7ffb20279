//! The kernel interfaces: remote system calls, ptrace, `/proc`, pagemap, sockets' state.
//!
//! The only room with `unsafe` and architecture-specific code. Nothing here knows what a checkpoint is.
#![allow(unsafe_code)] // each block says why it holds

pub mod arch;
pub mod aside;
pub mod batch;
pub mod bpf;
pub mod cgroups;
pub mod datagrams;
pub mod descriptors;
pub mod devices;
pub mod digest;
pub mod dispatch;
pub mod error;
pub mod fanotify;
pub mod fdinfo;
pub mod features;
pub mod filling;
pub mod guard;
pub mod handshake;
pub mod headroom;
pub mod hold;
pub mod host;
pub mod inet_diag;
pub mod inject;
pub mod ipc;
pub mod layout;
pub mod limits;
pub mod line;
pub mod local;
pub mod locks;
pub mod memfd;
pub mod memory;
pub mod messages;
pub mod messenger;
pub mod mounts;
pub mod mqueue;
pub mod namespaces;
mod netlink;
pub mod network;
pub mod overlay;
pub mod packets;
pub mod pagemap;
pub mod pager;
pub mod passing;
pub mod pipes;
pub mod probe;
pub mod proc;
pub mod program;
pub mod ptrace;
pub mod remote;
pub mod rootless;
pub mod sched;
pub mod seccomp;
pub mod seeming;
pub mod shared;
pub mod sharing;
pub mod silent;
pub mod sockets;
pub mod spawn;
pub mod split;
pub mod supervise;
pub mod sysv;
pub mod tcp;
pub mod tty;
pub mod twin;
pub mod userfault;
pub mod watches;

pub use error::{Error, Result};

/// An address in another process. It is never dereferenced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteAddr(pub u64);

impl std::fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
