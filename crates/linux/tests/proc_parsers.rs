//! No parser panics, whatever the text.
#![allow(missing_docs, clippy::unwrap_used)]

use proptest::prelude::*;
use std::path::Path;
use stillpoint_linux::proc::{auxv, maps, sched, smaps, stat, status, syscall, timers};

fn all(text: &[u8]) {
    let path = Path::new("/proc/1/any");
    let _ = maps::parse(text, path);
    let _ = smaps::parse(text, path);
    let _ = stat::parse(text, path);
    let _ = status::parse(text, path);
    let _ = timers::parse(text, path);
    let _ = auxv::parse(text);
    let _ = sched::parse(text);
    let _ = syscall::parse(text);
}

/// Real text with some bytes changed: gets further into a parser than noise does.
fn damaged(real: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let len = real.len();
    proptest::collection::vec((0..len, any::<u8>()), 0..8).prop_map(move |changes| {
        let mut text = real.clone();
        for (at, byte) in changes {
            text[at] = byte;
        }
        text
    })
}

fn real(name: &str) -> Vec<u8> {
    let mut text = std::fs::read(format!("/proc/self/{name}")).unwrap();
    text.truncate(4000);
    text
}

proptest! {
    #[test]
    fn noise(text in proptest::collection::vec(any::<u8>(), 0..300)) {
        all(&text);
    }

    #[test]
    fn words(text in "[0-9a-f:/.() \t\n-]{0,200}") {
        all(text.as_bytes());
    }

    #[test]
    fn almost_maps(text in damaged(real("maps"))) {
        all(&text);
    }

    #[test]
    fn almost_smaps(text in damaged(real("smaps"))) {
        all(&text);
    }

    #[test]
    fn almost_stat(text in damaged(real("stat"))) {
        all(&text);
    }

    #[test]
    fn almost_status(text in damaged(real("status"))) {
        all(&text);
    }
}
