//! Manifests that somebody hostile has made, with all checksums right: an error, or a description that can be used
//! without looking again. Never a panic, and never more memory than a multiple of what was read.
#![allow(clippy::unwrap_used)]

use crate::common::{body_len, reseal, sample, sample_map};
use minicbor::data::Type;
use minicbor::{Decoder, Encoder};
use proptest::prelude::*;
use stillpoint_image::wire::{self, HEADER};
use stillpoint_image::*;

/// What a description consists of, one behind the other.
#[derive(Clone, Debug)]
enum Token<'b> {
    Number(u64),
    Negative(i64),
    Bool(bool),
    Null,
    Bytes(&'b [u8]),
    Text(&'b str),
    Array(u64),
    Map(u64),
}

fn tokens(body: &[u8]) -> Vec<Token<'_>> {
    let mut decoder = Decoder::new(body);
    let mut tokens = Vec::new();
    while decoder.position() < body.len() {
        tokens.push(match decoder.datatype().unwrap() {
            Type::U8 | Type::U16 | Type::U32 | Type::U64 => Token::Number(decoder.u64().unwrap()),
            Type::I8 | Type::I16 | Type::I32 | Type::I64 => Token::Negative(decoder.i64().unwrap()),
            Type::Bool => Token::Bool(decoder.bool().unwrap()),
            Type::Null => decoder.null().map(|()| Token::Null).unwrap(),
            Type::Bytes => Token::Bytes(decoder.bytes().unwrap()),
            Type::String => Token::Text(decoder.str().unwrap()),
            Type::Array => Token::Array(decoder.array().unwrap().unwrap()),
            Type::Map => Token::Map(decoder.map().unwrap().unwrap()),
            other => panic!("nothing writes {other}"),
        });
    }
    tokens
}

fn written(tokens: &[Token<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = Encoder::new(&mut out);
    for token in tokens {
        let done = match token {
            Token::Number(n) => encoder.u64(*n).map(drop),
            Token::Negative(n) => encoder.i64(*n).map(drop),
            Token::Bool(b) => encoder.bool(*b).map(drop),
            Token::Null => encoder.null().map(drop),
            Token::Bytes(b) => encoder.bytes(b).map(drop),
            Token::Text(s) => encoder.str(s).map(drop),
            Token::Array(n) => encoder.array(*n).map(drop),
            Token::Map(n) => encoder.map(*n).map(drop),
        };
        done.unwrap();
    }
    out
}

/// A manifest with this description, sealed.
fn manifest_of(body: &[u8]) -> Vec<u8> {
    let whole = wire::encode(&sample(), &sample_map());
    let map = &whole[HEADER + body_len(&whole)..];
    let mut manifest = [&whole[..HEADER], body, map].concat();
    let total = manifest.len() as u64;
    manifest[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
    manifest[32..40].copy_from_slice(&total.to_le_bytes());
    reseal(&mut manifest, body.len());
    manifest
}

fn body() -> Vec<u8> {
    let whole = wire::encode(&sample(), &sample_map());
    whole[HEADER..HEADER + body_len(&whole)].to_vec()
}

/// What a value is replaced by.
#[derive(Clone, Debug)]
enum Change {
    Number(u64),
    Negative(i64),
    Bytes(Vec<u8>),
    Flip,
    /// It says that so many follow.
    Longer(u64),
    Null,
}

fn change() -> impl Strategy<Value = Change> {
    let numbers = [
        0,
        1,
        2,
        7,
        255,
        4095,
        4096,
        1 << 31,
        u64::from(u32::MAX),
        1 << 47,
        1 << 63,
        u64::MAX - 4095,
        u64::MAX,
    ];
    let texts = [&b""[..], b"\0", b"/", b"../../etc/passwd", b"a\0b", b"\xff\xfe", &[b'x'; 5000], &[0; 128]];
    prop_oneof![
        5 => prop::sample::select(numbers.to_vec()).prop_map(Change::Number),
        2 => any::<u64>().prop_map(Change::Number),
        2 => prop::sample::select(vec![-1, i64::MIN, -4096]).prop_map(Change::Negative),
        3 => prop::sample::select(texts.map(<[u8]>::to_vec).to_vec()).prop_map(Change::Bytes),
        2 => Just(Change::Flip),
        1 => prop::sample::select(vec![1, 1 << 20, 1 << 40, u64::MAX]).prop_map(Change::Longer),
        1 => Just(Change::Null),
    ]
}

fn changed<'b>(token: Token<'b>, change: &'b Change) -> Token<'b> {
    match (change, token) {
        (Change::Longer(n), Token::Array(_)) => Token::Array(*n),
        (Change::Longer(n), Token::Map(_)) => Token::Map(*n),
        // What holds others stays: the rest would only be another mess.
        (_, token @ (Token::Array(_) | Token::Map(_))) => token,
        (Change::Flip, Token::Bool(b)) => Token::Bool(!b),
        (Change::Bytes(b), Token::Bytes(_)) => Token::Bytes(b),
        (Change::Number(n), _) => Token::Number(*n),
        (Change::Negative(n), _) => Token::Negative(*n),
        (Change::Null, _) => Token::Null,
        (_, token) => token,
    }
}

fn spoil(body: &[u8], changes: &[(prop::sample::Index, Change)]) -> Vec<u8> {
    let mut tokens = tokens(body);
    for (at, change) in changes {
        let at = at.index(tokens.len());
        tokens[at] = changed(tokens[at].clone(), change);
    }
    written(&tokens)
}

/// Does what whoever restores does without looking again.
fn use_it(image: &Image, map: &PageMap) {
    for process in &image.processes {
        assert_eq!(process.threads[0].tid, process.pid);
        let _ = (&image.spaces[process.space as usize], &image.tables[process.table as usize]);
        let _ = [process.exe, process.cwd, process.root].map(|row| &image.paths[row as usize]);
        let mut kinds: Vec<_> =
            process.namespaces.iter().map(|row| image.namespaces[*row as usize].kind()).collect();
        kinds.sort_unstable();
        assert!(kinds.windows(2).all(|two| two[0] != two[1]));
    }
    let _ = tree::steps(image);
    for space in &image.spaces {
        let mut end = 0;
        for m in &space.mappings {
            assert!(m.start >= end && !m.is_empty() && m.guards.iter().all(|g| g.end() <= m.end));
            end = m.end;
            if let Backing::Segment { object, offset, .. } = m.backing {
                let object = &image.objects[object as usize];
                let whole = object.size.next_multiple_of(object.huge_page.max(PAGE));
                assert!(object.segment.is_some() && offset + m.len() <= whole);
            }
        }
    }
    for path in &image.paths {
        assert!(path.mapped_ranges.iter().all(|r| r.end() >= r.start));
    }
    for descriptor in image.tables.iter().flat_map(|t| &t.descriptors) {
        let _ = &image.files[descriptor.file as usize];
    }
    for socket in &image.sockets {
        let is_row = |row: u32, len: usize| (row as usize) < len;
        assert!(socket.pending.iter().chain(&socket.peer).all(|s| is_row(*s, image.sockets.len())));
        assert!(socket.messages.iter().flat_map(|m| &m.files).all(|f| is_row(*f, image.files.len())));
    }
    for extent in &map.extents {
        assert!(extent.end() > extent.address);
    }
}

/// The most memory that this process has had, bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn the_sample_reaches_every_kind_of_value() {
    let body = body();
    let tokens = tokens(&body);
    let has = |pick: fn(&Token<'_>) -> bool| tokens.iter().filter(|t| pick(t)).count();
    assert!(tokens.len() > 300, "{}", tokens.len());
    assert!(has(|t| matches!(t, Token::Bytes(_))) > 10 && has(|t| matches!(t, Token::Bool(_))) > 5);
    assert_eq!(wire::decode(&manifest_of(&spoil(&body, &[]))), Ok((sample(), sample_map())));
}

#[test]
fn lengths_that_nothing_follows_take_no_memory() {
    let before = peak();
    let body = body();
    let mut decoder = Decoder::new(&body);
    let mut places = Vec::new();
    while let Ok(kind) = decoder.datatype() {
        if matches!(kind, Type::Array | Type::Map | Type::Bytes | Type::String) {
            places.push((decoder.position(), kind));
        }
        match kind {
            Type::Array => drop(decoder.array().unwrap()),
            Type::Map => drop(decoder.map().unwrap()),
            _ => decoder.skip().unwrap(),
        }
    }
    assert!(places.len() > 50);
    for (at, kind) in places {
        let major = match kind {
            Type::Bytes => 0x5b,
            Type::String => 0x7b,
            Type::Array => 0x9b,
            _ => 0xbb,
        };
        for length in [1_u64 << 32, 1 << 40, u64::MAX] {
            let long = [&body[..at], &[major], &length.to_be_bytes()[..], &body[at + 1..]].concat();
            assert!(wire::decode(&manifest_of(&long)).is_err());
            assert!(wire::decode(&manifest_of(&long[..at + 9])).is_err());
        }
    }
    assert!(peak() - before < 64 << 20, "{} MiB", (peak() - before) >> 20);
}

#[test]
fn depth_without_end_is_no_way_out() {
    for nest in [0x81, 0xa1, 0x9f, 0xbf, 0xc1] {
        let deep = vec![nest; 1 << 20];
        assert!(wire::decode(&manifest_of(&deep)).is_err());
        // Below a key that nobody knows, which is skipped.
        let unknown = [&[0xa1, 0x19, 0x03, 0xe7], deep.as_slice()].concat();
        assert!(wire::decode(&manifest_of(&unknown)).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn spoilt_descriptions_are_refused_or_sound(
        changes in prop::collection::vec((any::<prop::sample::Index>(), change()), 1..4),
    ) {
        let manifest = manifest_of(&spoil(&body(), &changes));
        if let Ok((image, map)) = wire::decode(&manifest) {
            use_it(&image, &map);
            let again = wire::encode(&image, &map);
            prop_assert_eq!(wire::decode(&again), Ok((image, map)));
        }
        let _ = wire::decode_meta(&manifest);
    }
}
