//! What is told of a file without opening it, and how much that proves.

use super::systems::Systems;
use crate::Result;
use rustix::fs::{AtFlags, CWD, StatxFlags, StatxTimestamp, makedev, statx};
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::SystemTime;
use stillpoint_capture::files::is_view;
use stillpoint_linux::{Error as Kernel, host};

/// Which file it is. Inode numbers are used again, so when it was made is part of it, where that is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Device and inode number.
    pub inode: (u64, u64),
    born_ns: Option<i64>,
}

/// What changes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Bytes.
    pub size: u64,
    /// Modification time, nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Status change time, nanoseconds since 1970.
    pub ctime_ns: i64,
}

/// Who tells the times of its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// This kernel, and no change after a look has the time that was seen there (multigrain timestamps, Linux 6.13).
    Fine,
    /// This kernel, in ticks: changes within one have the same time.
    Ticks,
    /// Another machine or program, whom it may take long to ask.
    Foreign,
}

/// A file as it was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which file.
    pub identity: Identity,
    /// Size and times.
    pub stamp: Stamp,
    /// How many names it has.
    pub links: u64,
    /// Who tells its times.
    pub clock: Clock,
    /// Whether it is a view of the kernel, or a queue, rather than a file with contents of its own.
    pub is_view: bool,
    /// When it was seen, nanoseconds since 1970.
    at_ns: i64,
}

/// Times of files may be as coarse as this (a tick of the kernel's clock), nanoseconds.
const TICK_NS: i64 = 20_000_000;
/// Where they are told in seconds (ext4 with small inodes), or in two of them (FAT).
const COARSE_NS: i64 = 2_000_000_000 + TICK_NS;
const SECOND_NS: i64 = 1_000_000_000;

/// File systems of which this kernel alone has the files, by their magic numbers, and whether their times are fine from Linux 6.13 on.
const OWN: [(u64, bool); 14] = [
    (0xef53, true),       // ext4
    (0x5846_5342, true),  // XFS
    (0x9123_683e, true),  // btrfs
    (0x0102_1994, true),  // tmpfs
    (0x8584_58f6, false), // ramfs
    (0x794c_7630, false), // overlayfs
    (0xf2f5_2010, false), // F2FS
    (0x2fc1_2fc1, false), // ZFS
    (0xca45_1a4e, false), // bcachefs
    (0x3153_464a, false), // JFS
    (0x7366_746e, false), // NTFS
    (0x2011_bab0, false), // exFAT
    (0x4d44, false),      // FAT
    (0x9584_58f6, false), // hugetlbfs
];

impl Seen {
    /// Looks at what a path leads to. Nobody is asked for what the kernel does not know: a server may be part of what stands still.
    ///
    /// # Errors
    /// That it leads nowhere.
    pub fn at(way: &Path, systems: &Systems) -> Result<Self> {
        let (seen, mount) = Seen::look(way)?;
        // Whoever would have to be asked is somebody else.
        let magic = systems.magic(way, mount)?;
        Ok(Seen {
            clock: magic.map_or(Clock::Foreign, clock_of),
            is_view: magic.is_some_and(is_view),
            ..seen
        })
    }

    /// What is told of a file without its file system, and the number of its mount.
    fn look(way: &Path) -> Result<(Self, u64)> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID;
        let told = statx(CWD, way, AtFlags::STATX_DONT_SYNC, wanted).map_err(|e| Kernel::file(way, e))?;
        let is_born = StatxFlags::from_bits_retain(told.stx_mask).contains(StatxFlags::BTIME);
        let seen = Seen {
            identity: Identity {
                inode: (makedev(told.stx_dev_major, told.stx_dev_minor), told.stx_ino),
                born_ns: is_born.then(|| nanoseconds(&told.stx_btime)),
            },
            stamp: Stamp {
                size: told.stx_size,
                mtime_ns: nanoseconds(&told.stx_mtime),
                ctime_ns: nanoseconds(&told.stx_ctime),
            },
            links: told.stx_nlink.into(),
            clock: Clock::Foreign,
            is_view: false,
            at_ns: now_ns(),
        };
        Ok((seen, told.stx_mnt_id))
    }

    /// Looks once more, at what may be the same file: if it is, it is on the same file system.
    ///
    /// # Errors
    /// As [`Seen::at`].
    pub fn again(&self, way: &Path) -> Result<Self> {
        let (now, _) = Seen::look(way)?;
        Ok(Seen { clock: self.clock, is_view: self.is_view, ..now })
    }

    /// As [`Seen::again`], of an open file.
    ///
    /// # Errors
    /// As [`Seen::at`].
    pub fn again_of(&self, file: impl AsFd) -> Result<Self> {
        self.again(Path::new(&format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())))
    }

    /// Whether whoever changes the file after this look changes its times too, for certain: writes through a mapping may do so late.
    pub fn would_show_changes(&self) -> bool {
        let last = self.stamp.mtime_ns.max(self.stamp.ctime_ns);
        match self.clock {
            Clock::Fine if self.grain_ns() == TICK_NS => true,
            Clock::Fine | Clock::Ticks => self.at_ns - last > self.grain_ns(),
            Clock::Foreign => false,
        }
    }

    /// How coarse its times are, nanoseconds: what is told in whole seconds may always be.
    fn grain_ns(&self) -> i64 {
        if self.stamp.ctime_ns % SECOND_NS == 0 { COARSE_NS } else { TICK_NS }
    }

    /// Whether it was made after a moment that was noted by [`now_ns`], as far as that can be told.
    pub fn is_made_since(&self, moment_ns: i64) -> bool {
        self.clock != Clock::Foreign && self.identity.born_ns.is_some_and(|born| born > moment_ns)
    }

    /// Whether it has been modified after such a moment, as far as that can be told.
    pub fn is_modified_since(&self, moment_ns: i64) -> bool {
        self.clock != Clock::Foreign && self.stamp.mtime_ns > moment_ns
    }

    /// Whether it may have been written after such a moment.
    pub fn may_be_written_since(&self, moment_ns: i64) -> bool {
        // The kernel's clock for files may be a tick late.
        let last = self.stamp.mtime_ns.max(self.stamp.ctime_ns);
        self.clock == Clock::Foreign || last >= moment_ns - self.grain_ns()
    }
}

fn clock_of(magic: u64) -> Clock {
    match OWN.iter().find(|(own, _)| *own == magic) {
        None => Clock::Foreign,
        Some((_, true)) if has_fine_times() => Clock::Fine,
        Some(_) => Clock::Ticks,
    }
}

/// Whether the kernel has multigrain timestamps.
fn has_fine_times() -> bool {
    static FINE: OnceLock<bool> = OnceLock::new();
    *FINE.get_or_init(|| {
        let release = host::kernel();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
        let (major, minor): (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        (major, minor) >= (6, 13)
    })
}

fn nanoseconds(time: &StatxTimestamp) -> i64 {
    time.tv_sec.saturating_mul(SECOND_NS).saturating_add(time.tv_nsec.into())
}

/// A moment, by two clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Instant {
    /// Time of the day, nanoseconds since 1970.
    pub at_ns: i64,
    /// Nanoseconds since the system started.
    boot_ns: i64,
}

impl Instant {
    /// Now.
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::Boottime);
        Instant { at_ns: now_ns(), boot_ns: time.tv_sec * SECOND_NS + time.tv_nsec }
    }

    /// What the time of the day may have been at the earliest since this moment: less than then, if somebody has set the clock back.
    pub fn earliest_since(&self, now: Instant) -> i64 {
        let set_back = (self.at_ns - self.boot_ns) - (now.at_ns - now.boot_ns);
        self.at_ns - set_back.max(0)
    }
}

/// The time of the day, nanoseconds since 1970.
pub fn now_ns() -> i64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as i64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn where_times_are_fine_every_write_after_a_look_shows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        file.write_all_at(b"0", 0).unwrap();
        let mut before = Seen::at(&path, &Systems::default()).unwrap();
        for _ in 0..1000 {
            file.write_all_at(b"1", 0).unwrap();
            let now = Seen::at(&path, &Systems::default()).unwrap();
            assert_eq!(now.identity, before.identity);
            assert!(now.stamp != before.stamp || !before.would_show_changes(), "{before:?} {now:?}");
            before = now;
        }
    }

    #[test]
    fn a_change_of_long_ago_is_in_no_tick_with_what_comes() {
        let folder = tempfile::tempdir().unwrap();
        let mut seen = Seen::at(folder.path(), &Systems::default()).unwrap();
        seen.clock = Clock::Ticks;
        seen.stamp.ctime_ns |= 1;
        seen.at_ns = seen.stamp.mtime_ns.max(seen.stamp.ctime_ns) + TICK_NS;
        assert!(!seen.would_show_changes());
        seen.at_ns += 1;
        assert!(seen.would_show_changes());
        seen.clock = Clock::Foreign;
        assert!(!seen.would_show_changes());
        let second = seen.stamp.ctime_ns / SECOND_NS * SECOND_NS;
        (seen.clock, seen.stamp.mtime_ns, seen.stamp.ctime_ns) = (Clock::Fine, second, second);
        seen.at_ns = second + SECOND_NS;
        assert!(!seen.would_show_changes(), "they are told in seconds");
        seen.at_ns = second + COARSE_NS + 1;
        assert!(seen.would_show_changes());
    }

    #[test]
    fn a_clock_that_was_set_back_is_noticed() {
        let then = Instant { at_ns: 1000 * SECOND_NS, boot_ns: 100 * SECOND_NS };
        let later = |at: i64| Instant { at_ns: at * SECOND_NS, boot_ns: 110 * SECOND_NS };
        assert_eq!(then.earliest_since(later(1010)), then.at_ns);
        assert_eq!(then.earliest_since(later(2000)), then.at_ns, "it was set forward");
        assert_eq!(then.earliest_since(later(980)), 970 * SECOND_NS);
        let now = Instant::now();
        assert!(now.earliest_since(Instant::now()) > now.at_ns - SECOND_NS);
    }

    #[test]
    fn a_file_of_the_same_inode_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let (mut identities, mut inodes) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            std::fs::write(&path, "contents").unwrap();
            let Identity { inode, born_ns } = Seen::at(&path, &Systems::default()).unwrap().identity;
            if born_ns.is_some() {
                identities.push((inode, born_ns));
            }
            inodes.push(inode);
            std::fs::remove_file(&path).unwrap();
            std::thread::sleep(std::time::Duration::from_nanos(2 * TICK_NS as u64));
        }
        let all = identities.len();
        identities.sort_unstable();
        identities.dedup();
        assert_eq!(identities.len(), all, "of {inodes:?}");
    }
}
