//! Namespaces that the program made for itself.

use crate::{Bytes, Mounts};
use minicbor::{Decode, Encode};

/// A namespace with what is in it. A process that is in none of a kind is in that of whoever restores it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Namespace {
    /// UTS: names of the machine.
    #[n(0)]
    Uts {
        /// Host name.
        #[n(0)]
        host: Bytes,
        /// NIS domain name.
        #[n(1)]
        domain: Bytes,
    },
    /// IPC. Shared memory of System V and POSIX message queues have tables of their own, whose rows name this one.
    #[n(1)]
    Ipc(#[n(0)] Ipc),
    /// Time: what its clocks differ by from those of the root, nanoseconds.
    #[n(2)]
    Time {
        /// `CLOCK_MONOTONIC`.
        #[n(0)]
        monotonic_ns: i64,
        /// `CLOCK_BOOTTIME`.
        #[n(1)]
        boottime_ns: i64,
    },
    /// Control groups: its processes are in that which is its root.
    #[n(3)]
    Cgroup,
    /// Network, with no interface in it but the loopback one.
    #[n(4)]
    Network {
        /// That is up.
        #[n(0)]
        up: bool,
        /// What was done then to a new one, to make it what this was.
        #[n(1)]
        #[cbor(default)]
        steps: Vec<NetworkStep>,
    },
    /// Process ids: those in it have one more.
    #[n(5)]
    Pid {
        /// The one that it lies in, a row before this; none: that of the root's parent.
        #[n(0)]
        parent: Option<u32>,
    },
    /// Mounts: those of whoever restores, or others.
    #[n(6)]
    Mount {
        /// What they share with these.
        #[n(0)]
        propagation: Propagation,
        /// On `/proc` is procfs of this pid namespace of the program's own, a row before this.
        #[n(1)]
        proc: Option<u32>,
        /// What else is different from what is mounted around it; then there is no `proc`.
        #[n(2)]
        mounts: Option<Mounts>,
    },
    /// Users and groups: what those in it are called outside, and what privileges count in.
    #[n(7)]
    User(#[n(0)] Users),
}

/// A change of a network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum NetworkStep {
    /// A setting gets a value.
    #[n(0)]
    Setting {
        /// Its name below `/proc/sys/net`.
        #[n(0)]
        name: String,
        /// What is written.
        #[n(1)]
        value: Bytes,
    },
    /// The loopback interface, an address, a rule or a route is changed. rtnetlink(7)
    #[n(1)]
    Request {
        /// What is asked of the kernel, `RTM_*`.
        #[n(0)]
        kind: u16,
        /// What follows the head of the message.
        #[n(1)]
        body: Bytes,
    },
}

/// Most changes of a network namespace that an image has.
pub const NETWORK_STEPS: usize = 1 << 16;
/// Longest value of a setting of a network namespace, and longest request, bytes: what the kernel takes at once.
pub const NETWORK_VALUE: usize = 1 << 16;

/// A user namespace. All ids but those within it are such as whoever restores sees. user_namespaces(7)
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Users {
    /// The one that it lies in, a row before this; none: that of whoever restores.
    #[n(0)]
    pub parent: Option<u32>,
    /// The user who made it: in the namespace around it he has all privileges over it.
    #[n(1)]
    pub owner: u32,
    /// Users that have a name in it; none if nobody has told yet.
    #[n(2)]
    pub uids: Vec<IdRange>,
    /// The same of groups.
    #[n(3)]
    pub gids: Vec<IdRange>,
    /// Whoever is in it may never change the list of his groups.
    #[n(4)]
    pub keeps_groups: bool,
}

/// Ids that follow each other, in a user namespace and outside of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct IdRange {
    /// The first, as it is called in the namespace.
    #[n(0)]
    pub inside: u32,
    /// The same, as whoever restores sees it.
    #[n(1)]
    pub outside: u32,
    /// How many there are.
    #[n(2)]
    pub count: u32,
}

/// What the mounts of a mount namespace share with those that they were copied from. mount_namespaces(7)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Propagation {
    /// The same as those share with others.
    #[n(0)]
    Unchanged,
    /// Nothing.
    #[n(1)]
    Private,
    /// They receive what is mounted there.
    #[n(2)]
    Slave,
}

/// Names of the settings of an IPC namespace in `/proc/sys`.
pub const IPC_SETTINGS: [&str; 12] = [
    "kernel/shmmax",
    "kernel/shmall",
    "kernel/shmmni",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "fs/mqueue/queues_max",
    "fs/mqueue/msg_max",
    "fs/mqueue/msgsize_max",
    "fs/mqueue/msg_default",
    "fs/mqueue/msgsize_default",
];

/// What is in an IPC namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Ipc {
    /// Settings, each by one of these [`IPC_SETTINGS`].
    #[n(0)]
    pub settings: Vec<Setting>,
    /// Sets of System V semaphores.
    #[n(1)]
    pub semaphores: Vec<SemaphoreSet>,
    /// System V message queues.
    #[n(2)]
    pub queues: Vec<SystemVQueue>,
}

/// A file in `/proc/sys` with numbers in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Setting {
    /// Its name there.
    #[n(0)]
    pub name: String,
    /// Its contents: digits and blanks.
    #[n(1)]
    pub value: String,
}

/// What System V semaphores and message queues have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SystemV {
    /// Its id, which programs remember.
    #[n(0)]
    pub id: i32,
    /// Its key; 0 (`IPC_PRIVATE`) for none.
    #[n(1)]
    pub key: i32,
    /// Access mode bits.
    #[n(2)]
    pub mode: u32,
    /// Owner.
    #[n(3)]
    pub uid: u32,
    /// Group.
    #[n(4)]
    pub gid: u32,
    /// User that made it.
    #[n(5)]
    pub creator_uid: u32,
    /// Group that made it.
    #[n(6)]
    pub creator_gid: u32,
}

/// A set of System V semaphores (`semget`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SemaphoreSet {
    /// Which it is.
    #[n(0)]
    pub common: SystemV,
    /// Their values.
    #[n(1)]
    pub values: Vec<u16>,
}

/// A System V message queue (`msgget`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SystemVQueue {
    /// Which it is.
    #[n(0)]
    pub common: SystemV,
    /// Most bytes in it.
    #[n(1)]
    pub capacity: u64,
    /// Messages in it, the oldest first.
    #[n(2)]
    pub messages: Vec<SystemVMessage>,
}

/// A message of System V.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct SystemVMessage {
    /// Its type, from 1.
    #[n(0)]
    pub kind: i64,
    /// Its text.
    #[n(1)]
    pub text: Bytes,
}

impl Namespace {
    /// What the kernel calls its kind (`/proc/PID/ns`).
    pub fn kind(&self) -> &'static str {
        match self {
            Namespace::Uts { .. } => "uts",
            Namespace::Ipc(_) => "ipc",
            Namespace::Time { .. } => "time",
            Namespace::Cgroup => "cgroup",
            Namespace::Network { .. } => "net",
            Namespace::Pid { .. } => "pid",
            Namespace::Mount { .. } => "mnt",
            Namespace::User(_) => "user",
        }
    }
}
