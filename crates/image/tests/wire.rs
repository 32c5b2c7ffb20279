//! Manifests from anywhere: whole ones come back as they were, all others give an error.

use crate::common::{body_len, reseal, sample, sample_map, stored};
use proptest::prelude::*;
use stillpoint_image::wire::{self, HEADER, WireError};
use stillpoint_image::*;

/// What is made wrong, and how.
type Spoiler<T> = (&'static str, fn(&mut T));

/// A manifest of version 1, whose page map has records of 48 bytes.
fn version_1(image: &Image, map: &PageMap) -> Vec<u8> {
    let mut manifest = wire::encode(image, &PageMap::default());
    let body = body_len(&manifest);
    for extent in &map.extents {
        let (kind, row) = match extent.owner {
            Owner::Space(row) => (0_u32, row),
            Owner::Object(row) => (1, row),
            Owner::File(row) => (2, row),
        };
        let (is_stored, mut rest) = (matches!(extent.place, Place::Stored { .. }), vec![0; 28]);
        if let Place::Stored { segment, offset, length, block_pages, skip, crc, .. } = extent.place {
            rest[..4].copy_from_slice(&length.to_le_bytes());
            rest[4..12].copy_from_slice(&segment.to_le_bytes());
            rest[12..20].copy_from_slice(&offset.to_le_bytes());
            rest[20..24].copy_from_slice(&crc.to_le_bytes());
            rest[24..26].copy_from_slice(&block_pages.to_le_bytes());
            rest[26..].copy_from_slice(&skip.to_le_bytes());
        }
        manifest.extend_from_slice(&(kind | u32::from(is_stored) << 8).to_le_bytes());
        manifest.extend_from_slice(&row.to_le_bytes());
        manifest.extend_from_slice(&extent.address.to_le_bytes());
        manifest.extend_from_slice(&extent.pages.to_le_bytes());
        manifest.extend_from_slice(&rest);
    }
    let lengths = [manifest.len() - HEADER - body, manifest.len()];
    manifest[24..32].copy_from_slice(&(lengths[0] as u64).to_le_bytes());
    manifest[32..40].copy_from_slice(&(lengths[1] as u64).to_le_bytes());
    manifest[8] = 1;
    reseal(&mut manifest, body);
    manifest
}

#[test]
fn version_1_is_read() {
    let manifest = version_1(&sample(), &sample_map());
    assert_eq!(wire::decode(&manifest), Ok((sample(), sample_map())));
    assert_eq!(wire::decode_meta(&manifest), Ok(sample().meta));
    let newer = wire::with_pages(&manifest, &sample_map()).expect("same description");
    assert_eq!((u32::from(newer[8]), wire::decode(&newer)), (wire::VERSION, Ok((sample(), sample_map()))));
    let mut cut = version_1(&sample(), &sample_map());
    let body = body_len(&cut);
    cut.pop();
    let lengths = [cut.len() - HEADER - body, cut.len()];
    cut[24..32].copy_from_slice(&(lengths[0] as u64).to_le_bytes());
    cut[32..40].copy_from_slice(&(lengths[1] as u64).to_le_bytes());
    reseal(&mut cut, body);
    assert_eq!(wire::decode(&cut), Err(WireError::Header));
}

#[test]
fn comes_back_as_it_was() {
    let manifest = wire::encode(&sample(), &sample_map());
    assert_eq!(wire::decode(&manifest), Ok((sample(), sample_map())));
    assert_eq!(wire::decode_meta(&manifest), Ok(sample().meta));
    assert_eq!(wire::decode_pages(&manifest), Ok(sample_map()));
    let empty = PageMap::default();
    let other = wire::with_pages(&manifest, &empty).expect("same description");
    assert_eq!(wire::decode(&other), Ok((sample(), empty)));
}

#[test]
fn every_flipped_bit_is_noticed() {
    let manifest = wire::encode(&sample(), &sample_map());
    for bit in 0..manifest.len() * 8 {
        let mut flipped = manifest.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(wire::decode(&flipped).is_err(), "bit {bit}");
    }
}

#[test]
fn every_other_length_is_noticed() {
    let manifest = wire::encode(&sample(), &sample_map());
    for len in 0..manifest.len() {
        assert!(wire::decode(&manifest[..len]).is_err(), "{len} bytes");
    }
    let longer = [manifest.as_slice(), &[0]].concat();
    assert!(matches!(wire::decode(&longer), Err(WireError::Length { .. })));
}

#[test]
fn says_what_is_wrong() {
    let manifest = wire::encode(&sample(), &sample_map());
    let body = body_len(&manifest);
    let changed = |at: usize, seal: bool, to: &[u8]| {
        let mut other = manifest.clone();
        other[at..at + to.len()].copy_from_slice(to);
        if seal {
            reseal(&mut other, body);
        }
        wire::decode(&other).expect_err("changed")
    };
    assert_eq!(wire::decode(b"#!/bin/sh"), Err(WireError::Foreign));
    assert_eq!(changed(0, true, b"X"), WireError::Foreign);
    let newer = wire::VERSION + 1;
    assert_eq!(changed(8, true, &newer.to_le_bytes()), WireError::Newer { found: newer });
    assert_eq!(changed(8, true, &[0]), WireError::Header);
    assert_eq!(changed(52, true, &[1]), WireError::Header);
    assert_eq!(changed(16, true, &[0xff; 8]), WireError::Header);
    assert!(matches!(changed(16, false, &[0xff]), WireError::Checksum { part: "header", .. }));
    assert!(matches!(changed(HEADER + 9, false, &[0xff]), WireError::Checksum { part: "description", .. }));
    assert!(matches!(changed(HEADER + body, false, &[0xff]), WireError::Checksum { part: "page map", .. }));
    // Zeros that are in a segment.
    assert_eq!(changed(HEADER + body, true, &[0x10]), WireError::Record(0));
    // The last one wants more than there is.
    assert_eq!(changed(manifest.len() - 5, true, &[0xff; 5]), WireError::Record(4));
    let expected = manifest.len() as u64;
    assert_eq!(wire::decode(&manifest[..100]), Err(WireError::Length { expected, found: 100 }));
}

#[test]
fn page_maps_are_validated() {
    let wrong: [Spoiler<PageMap>; 10] = [
        ("swapped", |map| map.extents.swap(0, 1)),
        ("overlapping", |map| map.extents[1].address = 3 * PAGE),
        ("empty", |map| map.extents[1].pages = 0),
        ("misaligned", |map| map.extents[1].address += 1),
        ("past the end", |map| map.extents[2].address = u64::MAX - PAGE + 1),
        ("no such space", |map| map.extents[0].owner = Owner::Space(1)),
        ("no such object", |map| map.extents[3].owner = Owner::Object(2)),
        ("outside its block", |map| map.extents[2].pages = 2),
        ("longer than its block", |map| map.extents[4].pages = 65),
        ("misaligned block", |map| {
            let Place::Stored { offset, .. } = &mut map.extents[0].place else { panic!("stored") };
            *offset += 512;
        }),
    ];
    for (what, spoil) in wrong {
        let mut map = sample_map();
        spoil(&mut map);
        let result = wire::decode(&wire::encode(&sample(), &map));
        assert!(matches!(result, Err(WireError::Invalid(_))), "{what}: {result:?}");
    }
}

#[test]
fn connections_come_back_as_they_were() {
    let mut image = sample();
    let end = |peer, place| Socket {
        peer: Some(peer),
        local: b"here".to_vec().into(),
        kept: Some(place),
        unaccepted: Some(3),
        queue: vec![b"unread".to_vec().into()],
        senders: Some(vec![b"somebody".to_vec().into()]),
        connection: Some(Connection {
            state: 8,
            remote: b"there".to_vec().into(),
            unsent: b"unsent".to_vec().into(),
            failed: true,
        }),
        ..Socket::default()
    };
    image.sockets.extend([end(2, 1), end(1, 0)]);
    (image.kept, image.network) = (Some(b"name".to_vec().into()), None);
    let (back, _) = wire::decode(&wire::encode(&image, &sample_map())).expect("decode");
    assert_eq!(back, image);
}

#[test]
fn references_are_validated() {
    let wrong: [Spoiler<Image>; 87] = [
        ("space", |i| i.processes[0].space = 2),
        ("clocks of one with the same memory", |i| i.processes[1].space = 0),
        ("another program in the same memory", |i| {
            i.paths.push(PathFile::default());
            i.processes[1].namespaces = vec![1];
            (i.processes[1].space, i.processes[1].exe) = (0, 1);
        }),
        ("shared actions of other memory", |i| i.processes[1].shares_actions = Some(0)),
        ("shared actions of a later one", |i| i.processes[0].shares_actions = Some(1)),
        ("shared actions that differ", |i| {
            i.processes[1].namespaces = vec![1];
            (i.processes[1].space, i.processes[1].shares_actions) = (0, Some(0));
            i.processes[1].actions.push(SignalAction { signal: 1, handler: 1, ..SignalAction::default() });
        }),
        ("table", |i| i.processes[0].table = 1),
        ("exe", |i| i.processes[0].exe = 1),
        ("cwd", |i| i.processes[0].cwd = u32::MAX),
        ("root", |i| i.processes[0].root = 1),
        ("threads", |i| i.processes[0].threads.clear()),
        ("shared directories", |i| i.processes[0].shares_fs = Some(0)),
        ("directories of a later one", |i| i.processes[0].shares_fs = Some(u32::MAX)),
        ("child of a thread", |i| i.processes[0].parent_thread = Some(1)),
        ("ended child of a thread", |i| {
            let ended = Ended { pid: 77, parent_thread: Some(78), ..Ended::default() };
            i.processes[0].ended = Some(vec![ended]);
        }),
        ("dispatch of calls within no region", |i| {
            let dispatch = Dispatch { offset: 4096, len: 0, selector: 0 };
            i.processes[0].threads[0].dispatch = Some(dispatch);
        }),
        ("selector of the kernel's", |i| {
            let dispatch = Dispatch { offset: 4096, len: 4096, selector: u64::MAX };
            i.processes[0].threads[0].dispatch = Some(dispatch);
        }),
        ("directories of the main thread", |i| {
            i.processes[0].threads[0].directories = Some(Directories::default());
        }),
        ("directory of a thread", |i| {
            let directories = Some(Directories { cwd: 99, ..Directories::default() });
            i.processes[0].threads.push(Thread { tid: 79, directories, ..Thread::default() });
        }),
        ("directories of no thread", |i| {
            let directories = Some(Directories { shares: Some(80), ..Directories::default() });
            i.processes[0].threads.push(Thread { tid: 79, directories, ..Thread::default() });
        }),
        ("mapping order", |i| i.spaces[0].mappings.swap(0, 1)),
        ("mapping end", |i| i.spaces[0].mappings[0].end = 0),
        ("guard", |i| i.spaces[0].mappings[0].guards[0].len = u64::MAX),
        ("mapped file", |i| {
            i.spaces[0].mappings[1].backing = Backing::File { path: 1, offset: 0, may_write: false };
        }),
        ("mapped object", |i| {
            i.spaces[0].mappings[2].backing = Backing::Object { object: 2, offset: 0, may_write: false };
        }),
        ("descriptor", |i| i.tables[0].descriptors[0].file = 99),
        ("descriptor order", |i| i.tables[0].descriptors.swap(0, 1)),
        ("pipe", |i| i.files[1].kind = FileKind::Pipe(1)),
        ("socket", |i| i.files[2].kind = FileKind::Socket(1)),
        ("pty", |i| i.files[3].kind = FileKind::PtyMaster(1)),
        ("watched file", |i| {
            i.files[7].kind = FileKind::Epoll(vec![EpollWatch { file: 99, ..EpollWatch::default() }]);
        }),
        ("fifo", |i| i.pipes[0].fifo = Some(1)),
        ("peer", |i| i.sockets[0].peer = Some(1)),
        ("own peer", |i| i.sockets[0].connection = Some(Connection::default())),
        ("another's peer", |i| {
            let end = |peer| Socket {
                peer: Some(peer),
                local: b"here".to_vec().into(),
                connection: Some(Connection { remote: b"there".to_vec().into(), ..Connection::default() }),
                ..Socket::default()
            };
            i.sockets.extend([end(2), end(3), end(2)]);
        }),
        ("listening connection", |i| {
            i.sockets[0] =
                Socket { listening: Some(1), connection: Some(Connection::default()), ..Socket::default() };
        }),
        ("pieces", |i| {
            let queue = vec![Bytes::default(), Bytes::default()];
            i.sockets[0] = Socket { queue, connection: Some(Connection::default()), ..Socket::default() };
        }),
        ("senders", |i| i.sockets[0].senders = Some(vec![Bytes::default()])),
        ("kept by nobody", |i| i.sockets[0].kept = Some(0)),
        ("pipe kept by nobody", |i| {
            i.pipes[0].outside = Some("process 7 (tee)".into());
            i.pipes[0].kept = Some(0);
        }),
        ("kept pipe that leads nowhere", |i| {
            i.kept = Some(b"name".to_vec().into());
            i.pipes[0].kept = Some(0);
        }),
        ("two that are kept in one place", |i| {
            i.network = None;
            i.kept = Some(b"name".to_vec().into());
            i.sockets[0].kept = Some(0);
            i.pipes[0].outside = Some("process 7 (tee)".into());
            i.pipes[0].kept = Some(0);
        }),
        ("kept out of order", |i| {
            i.network = None;
            i.kept = Some(b"name".to_vec().into());
            i.sockets[0].kept = Some(1);
        }),
        ("segment of no object", |i| i.objects[1].segment = None),
        ("part of a segment", |i| {
            i.spaces[0].mappings[4].backing =
                Backing::Segment { object: 1, offset: 2 * PAGE, may_write: true };
        }),
        ("part of a segment at the end of all", |i| {
            i.spaces[0].mappings[4].backing =
                Backing::Segment { object: 1, offset: u64::MAX - PAGE + 1, may_write: true };
        }),
        ("private segment", |i| i.spaces[0].mappings[4].shared = false),
        ("descriptor of a segment", |i| i.files[5].kind = FileKind::Memory(1)),
        ("size of a segment", |i| i.objects[1].size = u64::MAX),
        ("size asked for", |i| i.objects[1].size = PAGE),
        ("page size", |i| i.objects[0].huge_page = 3),
        ("queue", |i| i.files[10].kind = FileKind::Queue(1)),
        ("host name that is too long", |i| i.namespaces[0] = uts(&[b'x'; 65])),
        ("host name that ends", |i| i.namespaces[0] = uts(b"a\0b")),
        ("namespace that is not there", |i| i.processes[0].namespaces.push(5)),
        ("root whose clocks differ from its own", |i| i.processes[0].namespaces.push(2)),
        ("sockets in a namespace of another kind", |i| i.network = Some(3)),
        ("sockets in a namespace that is not there", |i| i.network = Some(5)),
        ("kept sockets of a namespace", |i| {
            i.kept = Some(b"name".to_vec().into());
            i.sockets[0].kept = Some(0);
        }),
        ("namespace that nobody is in", |i| i.namespaces.push(Namespace::Cgroup)),
        ("namespaces of one kind", |i| i.processes[0].namespaces.push(0)),
        ("segment in a namespace that is not there", |i| segment(i).namespace = Some(5)),
        ("segment in a namespace of another kind", |i| segment(i).namespace = Some(0)),
        ("segment of a namespace that the process is not in", |i| segment(i).namespace = None),
        ("queue in a namespace of another kind", |i| i.queues[0].namespace = Some(0)),
        ("setting of no name", |i| ipc(i).settings[0].name = "kernel/../../core_pattern".into()),
        ("setting that is no number", |i| ipc(i).settings[0].value = "|/bin/sh".into()),
        ("setting of a network by another way", |i| {
            let name = "ipv4/../../kernel/core_pattern".into();
            *network(i) = NetworkStep::Setting { name, value: b"|/bin/sh".to_vec().into() };
        }),
        ("setting of a network that is too long", |i| {
            let name = "ipv4/ip_forward".into();
            *network(i) = NetworkStep::Setting { name, value: vec![b'1'; NETWORK_VALUE + 1].into() };
        }),
        ("request that is too long", |i| {
            *network(i) = NetworkStep::Request { kind: 20, body: vec![0; NETWORK_VALUE + 1].into() };
        }),
        ("set without semaphores", |i| ipc(i).semaphores[0].values.clear()),
        ("semaphore that is too high", |i| ipc(i).semaphores[0].values[0] = 32768),
        ("set with a negative id", |i| ipc(i).semaphores[0].common.id = -1),
        ("message without a type", |i| ipc(i).queues[0].messages[0].kind = 0),
        ("two queues with one id", |i| {
            let queue = ipc(i).queues[0].clone();
            ipc(i).queues.push(queue);
        }),
        ("queue of no name", |i| i.queues[0].name.0.clear()),
        ("queue in a folder", |i| i.queues[0].name.0 = b"../q".to_vec()),
        ("group above the top", |i| i.groups[0].path = "/../etc".into()),
        ("group nowhere", |i| i.groups[0].path = "a".into()),
        ("setting elsewhere", |i| i.groups[0].settings[0].0 = "../passwd".into()),
        ("file in a message", |i| i.sockets[0].messages[0].files[1] = 99),
        ("files in a message", |i| i.sockets[0].messages[0].files = vec![2; 254]),
        ("waits", |i| i.sockets[0].pending[0] = 1),
        ("waits for nobody", |i| i.sockets[0].listening = None),
        ("mapped range", |i| i.paths[0].mapped_ranges.push(Range { start: 1, len: u64::MAX })),
        ("reader of a FIFO that is none", |i| (i.pipes[0].fifo, i.pipes[0].hung_up) = (None, Some(vec![0]))),
        ("connected, and listens", |i| (i.sockets[0].listening, i.sockets[0].orphan) = (Some(1), true)),
    ];
    for (what, spoil) in wrong {
        let mut image = sample();
        spoil(&mut image);
        let result = wire::decode(&wire::encode(&image, &sample_map()));
        assert!(matches!(result, Err(WireError::Invalid(_))), "{what}: {result:?}");
    }
}

/// A root, process 1 of a pid namespace with a thread and an ended child in it, process 1 of another one within that, and a session
/// in the first whose leader is no more.
fn in_pid_namespaces() -> Image {
    let mut image = sample();
    let outer = image.namespaces.len() as u32;
    image.namespaces.extend([Namespace::Pid { parent: None }, Namespace::Pid { parent: Some(outer) }]);
    let root = image.processes[0].pid;
    let space = image.spaces.len() as u32;
    image.spaces.push(AddressSpace::default());
    let process = |pid: u32, parent, namespace, inner: &[u32]| Process {
        pid,
        parent: Some(parent),
        space,
        namespaces: vec![namespace],
        threads: vec![Thread { tid: pid, inner: inner.to_vec(), ..Thread::default() }],
        ..Process::default()
    };
    let mut first = process(root + 10, 0, outer, &[1]);
    first.threads.push(Thread { tid: root + 11, inner: vec![2], ..Thread::default() });
    let ended = Ended { pid: root + 12, namespace: Some(outer), inner: vec![3], ..Ended::default() };
    first.ended = Some(vec![ended]);
    let mut second = process(root + 13, 2, outer + 1, &[4, 1]);
    second.session = Some(root + 14);
    image.processes.extend([first, second]);
    image.leaders = vec![LostLeader { pid: root + 14, namespace: outer, inner: vec![5] }];
    image
}

#[test]
fn pid_namespaces_are_validated() {
    let (back, _) = wire::decode(&wire::encode(&in_pid_namespaces(), &sample_map())).expect("it is sound");
    assert_eq!(back, in_pid_namespaces());
    fn outer(i: &Image) -> usize {
        i.namespaces.iter().position(|n| matches!(n, Namespace::Pid { .. })).expect("there are two")
    }
    let wrong: [Spoiler<Image>; 24] = [
        ("in itself", |i| {
            let row = outer(i);
            i.namespaces[row] = Namespace::Pid { parent: Some(row as u32) };
        }),
        ("in a circle", |i| {
            let row = outer(i);
            i.namespaces[row] = Namespace::Pid { parent: Some(row as u32 + 1) };
        }),
        ("in one of another kind", |i| {
            let row = outer(i);
            i.namespaces[row + 1] = Namespace::Pid { parent: Some(0) };
        }),
        ("in none that is there", |i| {
            let row = outer(i);
            i.namespaces[row + 1] = Namespace::Pid { parent: Some(99) };
        }),
        ("empty", |i| i.namespaces.push(Namespace::Pid { parent: None })),
        ("too few ids", |i| i.processes[3].threads[0].inner = vec![1]),
        ("too many ids", |i| i.processes[2].threads[0].inner.push(1)),
        ("ids of a process outside", |i| i.processes[0].threads[0].inner.push(7)),
        ("no id", |i| i.processes[2].threads[1].inner[0] = 0),
        ("too high an id", |i| i.processes[2].threads[1].inner[0] = u32::MAX),
        ("an id twice", |i| i.processes[2].threads[1].inner[0] = 3),
        ("an id of a process within", |i| i.processes[2].threads[1].inner[0] = 4),
        ("process 1 twice", |i| i.processes[3].threads[0].inner[0] = 1),
        ("a thread as process 1", |i| {
            i.processes[2].threads[0].inner[0] = 2;
            i.processes[2].threads[1].inner[0] = 1;
        }),
        ("no process 1", |i| i.processes[3].threads[0].inner[1] = 2),
        ("an ended one elsewhere", |i| i.processes[2].ended.as_mut().expect("one")[0].namespace = Some(0)),
        ("an ended one nowhere", |i| i.processes[2].ended.as_mut().expect("one")[0].namespace = Some(99)),
        ("a leader nowhere", |i| i.leaders[0].namespace = 99),
        ("a leader with an id that is taken", |i| i.leaders[0].inner[0] = 2),
        ("a leader of nobody", |i| i.processes[3].session = None),
        ("a leader as process 1", |i| i.leaders[0].inner[0] = 1),
        ("children nowhere", |i| i.processes[0].children_in = Some(99)),
        ("children in one around", |i| {
            let row = outer(i) as u32;
            i.processes[3].children_in = Some(row);
        }),
        ("children of a process with threads", |i| i.processes[2].children_apart = true),
    ];
    for (what, spoil) in wrong {
        let mut image = in_pid_namespaces();
        spoil(&mut image);
        let result = wire::decode(&wire::encode(&image, &sample_map()));
        assert!(matches!(result, Err(WireError::Invalid(_))), "{what}: {result:?}");
    }
    // As deep as the kernel lets them be, and one more.
    for (depth, sound) in [(32, true), (33, false)] {
        let mut image = in_pid_namespaces();
        for level in 3..=depth {
            let mut deeper = image.processes[level].clone();
            let namespace = image.namespaces.len() as u32;
            image.namespaces.push(Namespace::Pid { parent: Some(namespace - 1) });
            deeper.pid += 1;
            (deeper.parent, deeper.namespaces) = (Some(level as u32), vec![namespace]);
            deeper.threads[0].tid = deeper.pid;
            deeper.threads[0].inner.iter_mut().for_each(|id| *id += 1);
            deeper.threads[0].inner.push(1);
            deeper.session = Some(image.leaders[0].pid);
            image.processes.push(deeper);
        }
        image.leaders[0].pid += 1000;
        image.processes[3..].iter_mut().for_each(|p| p.session = Some(image.leaders[0].pid));
        image.leaders[0].inner[0] = 1000;
        let result = wire::decode(&wire::encode(&image, &sample_map()));
        assert_eq!(result.is_ok(), sound, "{depth}: {:?}", result.err());
    }
}

/// A user namespace that a process is in, behind one that nobody is in, and a UTS namespace that belongs to that.
fn in_user_namespaces() -> Image {
    let mut image = sample();
    let range = |inside, outside| IdRange { inside, outside, count: 10 };
    let outer = Users { owner: 5, uids: vec![range(0, 1000), range(10, 0)], ..Users::default() };
    let first = image.namespaces.len() as u32;
    let inner =
        Users { parent: Some(first), uids: vec![range(7, 1000)], keeps_groups: true, ..Users::default() };
    let uts = Namespace::Uts { host: Vec::new().into(), domain: Vec::new().into() };
    image.namespaces.extend([Namespace::User(outer), Namespace::User(inner), uts]);
    image.owners = vec![None; first as usize + 2];
    image.owners.push(Some(first));
    image.processes[1].namespaces = vec![1, 2, first + 1, first + 2];
    image
}

#[test]
fn user_namespaces_are_validated() {
    let (back, _) = wire::decode(&wire::encode(&in_user_namespaces(), &sample_map())).expect("it is sound");
    assert_eq!(back, in_user_namespaces());
    fn users(image: &mut Image, place: usize) -> &mut Users {
        let mut all = image.namespaces.iter_mut().filter_map(|namespace| match namespace {
            Namespace::User(users) => Some(users),
            _ => None,
        });
        all.nth(place).expect("there are two")
    }
    type Change = fn(&mut Image);
    let wrong: [(&str, Change); 8] = [
        ("one that lies in itself", |i| users(i, 1).parent = users(i, 1).parent.map(|row| row + 1)),
        ("one that lies in one of another kind", |i| users(i, 1).parent = Some(0)),
        ("a namespace that belongs to one of another kind", |i| *i.owners.last_mut().expect("one") = Some(1)),
        ("a namespace that belongs to none that is there", |i| *i.owners.last_mut().expect("one") = Some(99)),
        ("an owner of nothing", |i| i.owners.push(None)),
        ("an id that has two names", |i| users(i, 0).uids[1].outside = 1009),
        ("a name that two have", |i| users(i, 0).uids[1].inside = 9),
        ("ranges without end", |i| users(i, 0).uids[1].count = u32::MAX),
    ];
    for (what, change) in wrong {
        let mut image = in_user_namespaces();
        change(&mut image);
        assert!(wire::decode(&wire::encode(&image, &sample_map())).is_err(), "{what}");
    }
}

#[test]
fn mount_namespaces_are_validated() {
    let sound = || {
        let mut image = in_pid_namespaces();
        let outer = image.namespaces.len() as u32 - 2;
        let (propagation, proc) = (Propagation::Slave, Some(outer));
        image.processes[2].namespaces.push(outer + 2);
        image.processes[3].namespaces.push(outer + 2);
        image.namespaces.push(Namespace::Mount { propagation, proc, mounts: None });
        image
    };
    let (back, _) = wire::decode(&wire::encode(&sound(), &sample_map())).expect("it is sound");
    assert_eq!(back, sound());
    let wrong: [Spoiler<Image>; 5] = [
        ("procfs that others would have, too", |i| *mounts(i).0 = Propagation::Unchanged),
        ("procfs of no pid namespace", |i| *mounts(i).1 = Some(0)),
        ("procfs of nothing", |i| *mounts(i).1 = Some(99)),
        ("procfs of itself", |i| {
            let own = i.namespaces.len() as u32 - 1;
            *mounts(i).1 = Some(own);
        }),
        ("procfs of somebody outside", |i| i.processes[2].namespaces.truncate(1)),
    ];
    for (what, spoil) in wrong {
        let mut image = sound();
        spoil(&mut image);
        let result = wire::decode(&wire::encode(&image, &sample_map()));
        assert!(matches!(result, Err(WireError::Invalid(_))), "{what}: {result:?}");
    }
}

/// As version 5 had them.
#[test]
fn mount_namespaces_without_mounts_of_their_own_are_read() {
    #[derive(minicbor::Encode)]
    enum Before {
        #[n(6)]
        Mount {
            #[n(0)]
            propagation: Propagation,
            #[n(1)]
            proc: Option<u32>,
        },
    }
    let before = Before::Mount { propagation: Propagation::Slave, proc: Some(1) };
    let bytes = minicbor::to_vec(before).expect("it can be encoded");
    let now: Namespace = minicbor::decode(&bytes).expect("it can be read");
    assert_eq!(now, Namespace::Mount { propagation: Propagation::Slave, proc: Some(1), mounts: None });
}

#[test]
fn mounts_of_its_own_are_validated() {
    let file = |path: &str, mode: u32| Entry { path: bytes(path), mode, ..Entry::default() };
    let sound = || {
        let mut image = in_pid_namespaces();
        let outer = image.namespaces.len() as u32 - 2;
        image.processes[2].namespaces.push(outer + 2);
        let entries = vec![
            file("", 0o040_755),
            file("folder", 0o040_755),
            Entry { also: vec![bytes("other")], content: Some(0), ..file("folder/file", 0o100_644) },
            Entry { target: bytes("/anywhere"), ..file("link", 0o120_777) },
        ];
        let memory = FileSystem { kind: "tmpfs".into(), entries, ..FileSystem::default() };
        let shown = FileSystem { kind: "proc".into(), namespace: Some(outer), ..FileSystem::default() };
        let sharing = Some(Sharing { shares: Some(0), ..Sharing::default() });
        let system = |row| Mounted::System { row, root: bytes("/") };
        let on = |point: &str, parent, what| Mount { point: bytes(point), parent, what, ..Mount::default() };
        let all = vec![
            Mount { sharing, ..on("/", None, system(0)) },
            on("/proc", Some(0), system(1)),
            on("/folder/file", Some(0), Mounted::Around(bytes("/etc/hostname"))),
        ];
        let layer = |role, name: &str, at| Layer { role, name: bytes(name), at, id: bytes("id") };
        let layers = vec![
            layer(Role::Lower, "/", Mounted::Around(bytes("/"))),
            layer(Role::Upper, "/folder/upper", Mounted::System { row: 0, root: bytes("/upper") }),
            layer(Role::Work, "work", Mounted::System { row: 0, root: bytes("/work") }),
        ];
        let over = FileSystem { kind: OVERLAY.into(), layers, ..FileSystem::default() };
        let systems = vec![memory, shown, over];
        let mounts = Some(Mounts { is_apart: true, systems, all, ..Mounts::default() });
        image.namespaces.push(Namespace::Mount { propagation: Propagation::Private, proc: None, mounts });
        image.paths[0].namespace = Some(outer + 2);
        image
    };
    let (back, _) = wire::decode(&wire::encode(&sound(), &sample_map())).expect("it is sound");
    assert_eq!(back, sound());
    let wrong: [Spoiler<Mounts>; 31] = [
        ("a root that is on something", |m| m.all[0].parent = Some(1)),
        ("a root elsewhere", |m| m.all[0].point = bytes("/root")),
        ("what is around it, in another root", |m| m.all[2].what = Mounted::Kept),
        ("a mount before what it is on", |m| m.all[1].parent = Some(2)),
        ("a mount on nothing", |m| m.all[1].parent = None),
        ("a mount beside what it is on", |m| m.all[2].parent = Some(1)),
        ("a way out", |m| m.all[2].point = bytes("/folder/../../file")),
        ("what is nowhere", |m| m.all[2].what = Mounted::Around(bytes("etc"))),
        ("no such file system", |m| m.all[1].what = Mounted::System { row: 3, root: bytes("/") }),
        ("a file system that cannot be made", |m| m.systems[0].kind = "ext4".into()),
        ("processes of another kind", |m| m.systems[1].namespace = Some(0)),
        ("files in procfs", |m| m.systems[1].entries = m.systems[0].entries.clone()),
        ("a file behind a link", |m| m.systems[0].entries.push(file_in_link())),
        ("a name behind a link", |m| m.systems[0].entries[2].also[0] = bytes("link/file")),
        ("a name that leads out", |m| m.systems[0].entries[2].also[0] = bytes("folder/../../file")),
        ("contents that are not there", |m| m.systems[0].entries[2].content = Some(99)),
        ("an overlay over nothing", |m| m.systems[2].layers.clear()),
        ("what lies over something and is no overlay", |m| m.systems[0].layers = m.systems[2].layers.clone()),
        ("an overlay that reads nothing", |m| drop(m.systems[2].layers.remove(0))),
        ("an overlay that can prepare nothing", |m| drop(m.systems[2].layers.pop())),
        ("two upper directories", |m| {
            let upper = m.systems[2].layers[1].clone();
            m.systems[2].layers.insert(1, upper);
        }),
        ("directories out of order", |m| m.systems[2].layers.swap(0, 1)),
        ("a directory without a name", |m| m.systems[2].layers[1].name = bytes("")),
        ("a name in another", |m| m.systems[2].layers[2].name = bytes("x/../folder/./upper/work")),
        ("the root among others", |m| m.systems[2].layers[2].name = bytes("/")),
        ("a directory that is nowhere", |m| m.systems[2].layers[0].at = Mounted::Kept),
        ("a directory without a path", |m| m.systems[2].layers[0].at = Mounted::Around(bytes("a"))),
        ("a directory that could be any", |m| m.systems[2].layers[0].id = bytes("")),
        ("a directory of processes", |m| m.systems[2].layers[1].at = at(1)),
        ("an overlay over itself", |m| m.systems[2].layers[1].at = at(2)),
        ("an overlay over no file system", |m| m.systems[2].layers[1].at = at(3)),
    ];
    for (what, spoil) in wrong {
        let mut image = sound();
        let Some(Namespace::Mount { mounts: Some(mounts), .. }) = image.namespaces.last_mut() else {
            panic!()
        };
        spoil(mounts);
        let result = wire::decode(&wire::encode(&image, &sample_map()));
        assert!(matches!(result, Err(WireError::Invalid(_))), "{what}: {result:?}");
    }
    let mut image = sound();
    image.paths[0].namespace = Some(0);
    let result = wire::decode(&wire::encode(&image, &sample_map()));
    assert!(matches!(result, Err(WireError::Invalid(_))), "a path in something else: {result:?}");
}

fn at(row: u32) -> Mounted {
    Mounted::System { row, root: bytes("/") }
}

fn file_in_link() -> Entry {
    Entry { path: bytes("link/file"), mode: 0o100_644, ..Entry::default() }
}

fn bytes(text: &str) -> Bytes {
    Bytes(text.into())
}

fn mounts(image: &mut Image) -> (&mut Propagation, &mut Option<u32>) {
    match image.namespaces.last_mut() {
        Some(Namespace::Mount { propagation, proc, .. }) => (propagation, proc),
        _ => panic!("the last one is"),
    }
}

fn uts(host: &[u8]) -> Namespace {
    Namespace::Uts { host: host.to_vec().into(), domain: Bytes::default() }
}

fn segment(image: &mut Image) -> &mut Segment {
    image.objects[1].segment.as_mut().expect("a segment")
}

/// As version 8 had it.
#[test]
fn a_network_of_an_earlier_version() {
    let decoded: Namespace = minicbor::decode(&[0x82, 4, 0x81, 0xf5]).expect("it can be read");
    assert_eq!(decoded, Namespace::Network { up: true, steps: Vec::new() });
}

fn network(image: &mut Image) -> &mut NetworkStep {
    match &mut image.namespaces[4] {
        Namespace::Network { steps, .. } => &mut steps[0],
        other => panic!("{other:?}"),
    }
}

fn ipc(image: &mut Image) -> &mut Ipc {
    match &mut image.namespaces[1] {
        Namespace::Ipc(ipc) => ipc,
        other => panic!("{other:?}"),
    }
}

fn owner() -> impl Strategy<Value = Owner> {
    (0..3, 0_u32..2).prop_map(|(kind, row)| match kind {
        0 => Owner::Space(row),
        1 => Owner::Object(row),
        _ => Owner::File(row),
    })
}

prop_compose! {
    fn any_map()(
        runs in prop::collection::vec((owner(), 0_u64..5, 1_u32..65, 0_u16..9, any::<bool>(), any::<u32>()), 0..40),
    ) -> PageMap {
        let mut runs = runs;
        runs.sort_by_key(|run| run.0);
        let mut page = 0;
        let mut extents = Vec::new();
        for (owner, gap, pages, skip, zero, checksum) in runs {
            page += gap;
            let mut extent = stored(owner, page, pages, skip);
            match &mut extent.place {
                place if zero => *place = Place::Zero,
                Place::Stored { crc, .. } => *crc = checksum,
                Place::Zero => {}
            }
            extents.push(extent);
            page += u64::from(pages);
        }
        PageMap { extents }
    }
}

proptest! {
    #[test]
    fn any_page_map_comes_back(map in any_map()) {
        let mut image = sample();
        image.spaces.push(AddressSpace::default());
        image.objects.push(MemoryObject::default());
        image.paths.push(PathFile::default());
        let manifest = wire::encode(&image, &map);
        prop_assert_eq!(wire::decode(&manifest), Ok((image, map)));
    }

    #[test]
    fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(wire::decode(&bytes).is_err());
        let headed = [wire::MAGIC.as_slice(), &bytes].concat();
        prop_assert!(wire::decode(&headed).is_err());
    }

    /// Sealed again after the change, so that the decoders behind the checksums are reached.
    #[test]
    fn sealed_changes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut manifest = wire::encode(&sample(), &sample_map());
        let body = body_len(&manifest);
        let len = manifest.len() - HEADER;
        for (at, value) in changes {
            manifest[HEADER + at.index(len)] = value;
        }
        reseal(&mut manifest, body);
        let _ = wire::decode(&manifest);
        let _ = wire::decode_meta(&manifest);
        let _ = wire::decode_pages(&manifest);
    }

    #[test]
    fn sealed_noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut manifest = wire::encode(&Image::default(), &PageMap::default());
        manifest.truncate(HEADER);
        manifest.extend_from_slice(&bytes);
        let total = manifest.len() as u64;
        manifest[16..24].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        manifest[32..40].copy_from_slice(&total.to_le_bytes());
        reseal(&mut manifest, bytes.len());
        let _ = wire::decode(&manifest);
        let _ = wire::decode_meta(&manifest);
    }
}
