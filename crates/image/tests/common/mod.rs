//! A description with something in every table, and the means to seal a manifest again that was changed.
#![allow(dead_code)] // each test uses its part

use stillpoint_image::wire::HEADER;
use stillpoint_image::*;

/// An image with at least one row in every table.
pub fn sample() -> Image {
    let thread =
        Thread { tid: 7, name: b"main".to_vec().into(), regs: vec![1; 216].into(), ..Thread::default() };
    let process =
        Process { pid: 7, threads: vec![thread], namespaces: vec![0, 1, 3, 4], ..Process::default() };
    let thread = Thread { tid: 9, ..Thread::default() };
    let child = Process {
        pid: 9,
        space: 1,
        parent: Some(0),
        threads: vec![thread],
        namespaces: vec![1, 2],
        ..Process::default()
    };
    let mapping = |start: u64, backing| Mapping {
        start,
        end: start + 4 * PAGE,
        prot: 3,
        shared: false,
        backing,
        flags: MappingFlags::HEAP | MappingFlags::LOCKED,
        pkey: 0,
        huge_page: 0,
        guards: vec![Range { start, len: PAGE }],
        name: Some(b"arena".to_vec().into()),
    };
    let mappings = vec![
        mapping(0x1000, Backing::Anonymous),
        mapping(0x10000, Backing::File { path: 0, offset: 0, may_write: false }),
        mapping(0x20000, Backing::Object { object: 0, offset: 0, may_write: true }),
        mapping(0x30000, Backing::Special("[vdso]".into())),
        Mapping {
            shared: true,
            ..mapping(0x40000, Backing::Segment { object: 1, offset: PAGE, may_write: true })
        },
    ];
    let segment = Segment { id: 7, key: 8, size: 5 * PAGE - 1, namespace: Some(1), ..Segment::default() };
    let kinds = [
        FileKind::Path(0),
        FileKind::Pipe(0),
        FileKind::Socket(0),
        FileKind::PtyMaster(0),
        FileKind::PtySlave(0),
        FileKind::Memory(0),
        FileKind::Event { count: 3, semaphore: true },
        FileKind::Epoll(vec![EpollWatch { fd: 3, ..EpollWatch::default() }]),
        FileKind::Inotify(vec![InotifyWatch { wd: 1, mask: 2, path: 0 }]),
        FileKind::Timer(TimerFd::default()),
        FileKind::Queue(0),
        FileKind::Fanotify(Fanotify { marks: vec![FanotifyMark::default()], ..Fanotify::default() }),
    ];
    let file = |kind| OpenFile { flags: 2, position: 9, kind, owner: None, locks: Vec::new() };
    let descriptors = (0..kinds.len() as u32).map(|fd| Descriptor { fd, file: fd, close_on_exec: fd == 1 });
    Image {
        meta: Meta { job: "web".into(), id: 3, label: Some("first".into()), ..Meta::default() },
        processes: vec![process, child],
        spaces: vec![AddressSpace { mappings, ..AddressSpace::default() }, AddressSpace::default()],
        objects: vec![
            MemoryObject { size: 4 * PAGE, ..MemoryObject::default() },
            MemoryObject { size: 5 * PAGE - 1, segment: Some(segment), ..MemoryObject::default() },
        ],
        tables: vec![FileTable { descriptors: descriptors.collect() }],
        files: kinds.into_iter().map(file).collect(),
        paths: vec![PathFile { path: b"/bin/\xff".to_vec().into(), ..PathFile::default() }],
        pipes: vec![Pipe { data: vec![b"unread".to_vec().into()], fifo: Some(0), ..Pipe::default() }],
        sockets: vec![Socket {
            path: Some(0),
            messages: vec![Message { files: vec![2, 3], ..Message::default() }],
            listening: Some(1),
            pending: vec![0],
            ..Socket::default()
        }],
        ptys: vec![Pty::default()],
        terminal: Some(Terminal::default()),
        kept: None,
        groups: vec![ControlGroup {
            controllers: "memory".into(),
            path: "/a/b".into(),
            settings: vec![("memory.limit_in_bytes".into(), "1048576".into())],
            shared: false,
        }],
        queues: vec![MessageQueue { name: b"q".to_vec().into(), ..MessageQueue::default() }],
        namespaces: vec![
            Namespace::Uts { host: b"still".to_vec().into(), domain: b"point".to_vec().into() },
            Namespace::Ipc(ipc()),
            Namespace::Time { monotonic_ns: -5, boottime_ns: 1 << 40 },
            Namespace::Cgroup,
            Namespace::Network {
                up: true,
                steps: vec![
                    NetworkStep::Setting { name: "ipv4/ip_forward".into(), value: b"1\n".to_vec().into() },
                    NetworkStep::Request { kind: 20, body: vec![2, 8, 128, 0, 1, 0, 0, 0].into() },
                ],
            },
        ],
        network: Some(4),
        leaders: Vec::new(),
        owners: Vec::new(),
    }
}

/// An IPC namespace with an object of each kind.
fn ipc() -> Ipc {
    let common = |id| SystemV { id, key: 5, mode: 0o600, ..SystemV::default() };
    let message = SystemVMessage { kind: 1, text: b"unread".to_vec().into() };
    Ipc {
        settings: vec![Setting { name: "kernel/sem".into(), value: "250\t32000\t32\t128".into() }],
        semaphores: vec![SemaphoreSet { common: common(3), values: vec![0, 32767] }],
        queues: vec![SystemVQueue { common: common(3), capacity: 100, messages: vec![message] }],
    }
}

pub fn stored(owner: Owner, page: u64, pages: u32, skip: u16) -> Extent {
    let block_pages = pages as u16 + skip;
    let place = Place::Stored {
        segment: 2,
        offset: PAGE * (1 + page),
        length: u32::from(block_pages) * PAGE as u32,
        block_pages,
        skip,
        codec: Codec::Raw,
        crc: 0x1234_5678,
    };
    Extent { owner, address: page * PAGE, pages, place }
}

pub fn sample_map() -> PageMap {
    PageMap {
        extents: vec![
            stored(Owner::Space(0), 1, 3, 0),
            Extent { owner: Owner::Space(0), address: 4 * PAGE, pages: 9, place: Place::Zero },
            stored(Owner::Space(0), 16, 1, 5),
            stored(Owner::Object(0), 0, 4, 0),
            stored(Owner::File(0), 2, 64, 0),
        ],
    }
}

/// Makes all checksums right again, as somebody hostile would.
pub fn reseal(manifest: &mut [u8], body: usize) {
    let crc = |bytes: &[u8]| crc32fast::hash(bytes).to_le_bytes();
    let (body_crc, map_crc) = (crc(&manifest[HEADER..HEADER + body]), crc(&manifest[HEADER + body..]));
    manifest[40..44].copy_from_slice(&body_crc);
    manifest[44..48].copy_from_slice(&map_crc);
    let header = crc(&manifest[..HEADER - 4]);
    manifest[HEADER - 4..HEADER].copy_from_slice(&header);
}

pub fn body_len(manifest: &[u8]) -> usize {
    u64::from_le_bytes(std::array::from_fn(|i| manifest[16 + i])) as usize
}
