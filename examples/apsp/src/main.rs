//! All-pairs shortest paths of a directed graph, by Floyd and Warshall's algorithm on several threads.
//!
//! ```text
//! apsp --generate NODES SEED GRAPH     writes a random graph
//! apsp GRAPH RESULT [THREADS]          computes all distances (default: one thread a processor)
//! ```
//!
//! A graph is a text file: a line `NODES EDGES`, then a line `FROM TO WEIGHT` for each edge. The result is a matrix of
//! little-endian `u32`, row by row; `u32::MAX` means that there is no path. The same graph always gives the same
//! bytes, whatever the number of threads and however often the program was interrupted.

mod graph;
mod paths;

use graph::Graph;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;
use std::thread::available_parallelism;

const USAGE: &str = "usage: apsp GRAPH RESULT [THREADS]\n       apsp --generate NODES SEED GRAPH";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["--generate", nodes, seed, graph] => generate(nodes, seed, graph.as_ref()),
        [graph, result] => {
            solve(graph.as_ref(), result.as_ref(), available_parallelism().map_or(1, usize::from))
        }
        [graph, result, threads] => {
            number(threads).and_then(|threads| solve(graph.as_ref(), result.as_ref(), threads))
        }
        _ => Err(USAGE.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("apsp: {message}");
            ExitCode::FAILURE
        }
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{text:?} is not a number that fits\n{USAGE}"))
}

fn generate(nodes: &str, seed: &str, path: &Path) -> Result<(), String> {
    let graph = Graph::random(number(nodes)?, number(seed)?);
    std::fs::write(path, graph.to_string()).map_err(|e| format!("{}: {e}", path.display()))
}

fn solve(graph: &Path, result: &Path, threads: usize) -> Result<(), String> {
    let text = std::fs::read_to_string(graph).map_err(|e| format!("{}: {e}", graph.display()))?;
    let graph: Graph = text.parse().map_err(|e| format!("{}: {e}", graph.display()))?;
    println!("{} nodes, {} edges, {threads} threads", graph.nodes, graph.edges.len());
    let mut shown = 0;
    let distances = paths::shortest(&graph, threads, |done| {
        let percent = done * 100 / graph.nodes;
        if percent > shown {
            shown = percent;
            println!("{percent} %");
        }
    });
    let failed = |e| format!("{}: {e}", result.display());
    let mut out = BufWriter::new(std::fs::File::create(result).map_err(failed)?);
    for distance in &distances {
        out.write_all(&distance.to_le_bytes()).map_err(failed)?;
    }
    out.flush().map_err(failed)?;
    println!("checksum {:016x}", checksum(&distances));
    Ok(())
}

/// FNV-1a over the words of the result.
fn checksum(distances: &[u32]) -> u64 {
    let step = |hash: u64, &word: &u32| (hash ^ u64::from(word)).wrapping_mul(0x100_0000_01b3);
    distances.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
