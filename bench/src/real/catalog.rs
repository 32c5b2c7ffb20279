//! Which programs there are.

use super::client::Client;
use super::{Need, Real, Setting, Talk, python_with_numpy};
use anyhow::{Result, bail};
use std::fmt::Write;
use std::path::Path;

/// Where every program that looks something up begins.
const SEED: u64 = 7;
/// Entries of 1,000 bytes for each MiB of a server of keys and values.
const VALUES: u64 = 900;

/// All programs.
pub const ALL: &[Real] = &[
    Real {
        name: "redis",
        about: "a server with keys of 1 KB; GETs of random keys, one after the other",
        needs: &[Need::Command("redis-server")],
        command: |_| {
            // An empty word behind `--save`.
            let options = "--port 0 --save  --enable-debug-command yes --unixsocket socket";
            words("redis-server", options)
        },
        prepare: nothing,
        talk: Talk::Answers {
            fill: |client, setting| {
                let entries = setting.mebibytes * VALUES;
                client.line(&format!("DEBUG POPULATE {entries} key 1000")).map(drop)
            },
            work: |client, setting| values(client, setting, "GET", |head| head.starts_with("$1000")),
        },
    },
    Real {
        name: "memcached",
        about: "a server with keys of 1 KB and 4 threads; gets of random keys, one after the other",
        needs: &[Need::Command("memcached")],
        command: |_| words("memcached", "-u root -s socket -m 65536 -t 4"),
        prepare: nothing,
        talk: Talk::Answers {
            fill: |client, setting| {
                for n in 0..setting.mebibytes * VALUES {
                    client.send(&format!("set key:{n} 0 0 1000 noreply\r\n{n:01000}"))?;
                }
                client.line("version").map(drop)
            },
            work: |client, setting| {
                values(client, setting, "get", |head| head.starts_with("VALUE") && head.ends_with("1000\r\n"))
            },
        },
    },
    Real {
        name: "python",
        about: "a dictionary of numbers and strings and 4 threads; random lookups",
        needs: &[Need::Command("python3")],
        command: |setting| script("python3", "heap.py", setting),
        prepare: nothing,
        talk: LOOKUPS,
    },
    Real {
        name: "numpy",
        about: "a matrix of 64-bit numbers; products of rows that lie apart, one for each 20 lookups, and a vector",
        needs: &[Need::Numpy],
        command: |setting| script(python_with_numpy().unwrap_or("python3"), "matrix.py", setting),
        prepare: nothing,
        talk: Talk::Answers {
            fill: |_, _| Ok(()),
            work: |client, setting| client.line(&format!("3 {}", setting.lookups / 20)),
        },
    },
    Real {
        name: "java",
        about: "a hash map of arrays in the heap of a virtual machine with some twenty threads; random lookups",
        needs: &[Need::Command("java"), Need::Command("javac")],
        command: |setting| {
            let size = setting.mebibytes;
            words("java", &format!("-Xmx{}m -cp . Heap socket {size}", 2 * size))
        },
        prepare: |setting| {
            let mut javac = std::process::Command::new("javac");
            let output = javac.arg("-d").arg(&setting.place).arg(source("Heap.java")).output()?;
            match output.status.success() {
                true => Ok(()),
                false => bail!("javac: {}", String::from_utf8_lossy(&output.stderr)),
            }
        },
        talk: LOOKUPS,
    },
    Real {
        name: "node",
        about: "a map of arrays in a heap with a garbage collector's threads; random lookups",
        needs: &[Need::Command("node")],
        command: |setting| {
            let mut command = script("node", "heap.js", setting);
            command.insert(1, format!("--max-old-space-size={}", 4 * setting.mebibytes));
            command
        },
        prepare: nothing,
        talk: LOOKUPS,
    },
    Real {
        name: "ruby",
        about: "a hash of strings; random lookups",
        needs: &[Need::Command("ruby")],
        command: |setting| script("ruby", "heap.rb", setting),
        prepare: nothing,
        talk: LOOKUPS,
    },
    Real {
        name: "perl",
        about: "a hash of strings; random lookups",
        needs: &[Need::Command("perl")],
        command: |setting| script("perl", "heap.pl", setting),
        prepare: nothing,
        talk: LOOKUPS,
    },
    Real {
        name: "php",
        about: "an array of strings by names; random lookups",
        needs: &[Need::Command("php")],
        command: |setting| {
            let mut command = script("php", "heap.php", setting);
            command.splice(1..1, ["-d".to_owned(), "memory_limit=-1".to_owned()]);
            command
        },
        prepare: nothing,
        talk: LOOKUPS,
    },
    Real {
        name: "sqlite",
        about: "a database in memory; queries without end, each of 2,000 random keys",
        needs: &[Need::Command("sqlite3"), Need::Command("stdbuf")],
        command: |_| words("stdbuf", "-oL sqlite3 :memory:"),
        prepare: |setting| {
            let rows = setting.mebibytes * 4000;
            let mut script = format!(
                "CREATE TABLE t(k INTEGER PRIMARY KEY, v TEXT);\n\
                 INSERT INTO t SELECT value, printf('%0240d', value) FROM generate_series(0, {});\n",
                rows - 1
            );
            for seed in 1..20_000 {
                writeln!(
                    script,
                    "WITH RECURSIVE r(n, s) AS (SELECT 1, {seed} UNION ALL SELECT n + 1, s * 16807 % 2147483647 FROM r \
                     WHERE n <= 2000) SELECT {seed}, sum(substr(v, -1)) FROM r JOIN t ON t.k = s % {rows};"
                )?;
            }
            Ok(std::fs::write(setting.place.join("in"), script)?)
        },
        talk: Talk::Writes,
    },
    Real {
        name: "R",
        about: "a table of 64-bit numbers; the means of the groups of one part after the other, without end",
        needs: &[Need::Command("R")],
        command: |setting| {
            let script = source("table.R");
            words("R", &format!("--vanilla --no-echo -f {script} --args {}", setting.mebibytes))
        },
        prepare: nothing,
        talk: Talk::Writes,
    },
    Real {
        name: "lua",
        about: "a table of strings; 100,000 random lookups after the other, without end: each touches all of it",
        needs: &[Need::Command("lua5.4")],
        command: |setting| vec!["lua5.4".into(), source("heap.lua"), setting.mebibytes.to_string()],
        prepare: nothing,
        talk: Talk::Writes,
    },
];

/// A program of `bench/programs` that fills its heap by itself and looks things up at random.
const LOOKUPS: Talk = Talk::Answers {
    fill: |_, _| Ok(()),
    work: |client, setting| {
        // What the answer must be: the entries are their numbers, with leading zeros, again and again.
        let last_digits =
            keys(setting.mebibytes * 2500, setting.lookups).map(|key| u64::from(b'0') + key % 10);
        let expected: u64 = last_digits.sum();
        let answer = client.line(&format!("{SEED} {}", setting.lookups))?;
        match answer.trim() == expected.to_string() {
            true => Ok(answer),
            false => bail!("the answer is {answer} instead of {expected}"),
        }
    },
};

fn nothing(_: &Setting) -> Result<()> {
    Ok(())
}

fn source(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name).display().to_string()
}

fn words(command: &str, options: &str) -> Vec<String> {
    std::iter::once(command).chain(options.split(' ')).map(str::to_owned).collect()
}

fn script(command: &str, name: &str, setting: &Setting) -> Vec<String> {
    [command.to_owned(), source(name), "socket".to_owned(), setting.mebibytes.to_string()].into()
}

/// The keys that a unit of work looks up: those of the programs in `bench/programs`.
fn keys(entries: u64, lookups: u64) -> impl Iterator<Item = u64> {
    let next = |seed: &u64| Some(seed * 16807 % 2_147_483_647);
    std::iter::successors(next(&SEED), next).take(lookups as usize).map(move |seed| seed % entries)
}

/// Gets values of random keys from a server, one after the other; tells a sum over all that it said.
fn values(client: &mut Client, setting: &Setting, verb: &str, is_right: fn(&str) -> bool) -> Result<String> {
    let mut sum = 0u64;
    for key in keys(setting.mebibytes * VALUES, setting.lookups) {
        let head = client.line(&format!("{verb} key:{key}"))?;
        if !is_right(&head) {
            bail!("the answer for key {key} is {head}");
        }
        let value = client.read()?;
        if verb == "get" {
            client.read()?; // END
        }
        sum = value.bytes().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    }
    Ok(sum.to_string())
}
