//! Directed graphs with weights, as text.

use std::fmt;
use std::str::FromStr;

/// A directed graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// Number of nodes; they are numbered from 0.
    pub nodes: usize,
    /// `(from, to, weight)`.
    pub edges: Vec<(usize, usize, u32)>,
}

/// Edges that leave each node of a random graph.
const DEGREE: usize = 8;
/// Largest weight. The longest shortest path, over all nodes, stays far below [`crate::paths::NO_PATH`].
const HEAVIEST: u32 = 1_000;

impl Graph {
    /// A random graph, always the same for the same seed.
    pub fn random(nodes: usize, seed: u64) -> Self {
        let mut state = seed;
        // SplitMix64 (Steele, Lea and Flood 2014).
        let mut random = |below: usize| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % below as u64) as usize
        };
        let edges =
            (0..nodes * DEGREE).map(|i| (i / DEGREE, random(nodes), 1 + random(HEAVIEST as usize) as u32));
        Self { nodes, edges: edges.collect() }
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.nodes, self.edges.len())?;
        self.edges.iter().try_for_each(|(from, to, weight)| writeln!(f, "{from} {to} {weight}"))
    }
}

impl FromStr for Graph {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
        let (nodes, count) = match lines.next().and_then(|(_, line)| line.split_once(' ')) {
            Some((nodes, count)) => (nodes.parse().ok(), count.trim().parse().ok()),
            None => (None, None),
        };
        let (Some(nodes), Some(count)) = (nodes, count) else {
            return Err("line 1 is not `NODES EDGES`".into());
        };
        let edge = |(number, line): (usize, &str)| {
            edge(line, nodes)
                .ok_or_else(|| format!("line {number} is not `FROM TO WEIGHT` with nodes below {nodes}"))
        };
        let edges = lines.map(edge).collect::<Result<Vec<_>, _>>()?;
        if edges.len() != count {
            return Err(format!("{} edges instead of {count}: the file is not complete", edges.len()));
        }
        Ok(Self { nodes, edges })
    }
}

fn edge(line: &str, nodes: usize) -> Option<(usize, usize, u32)> {
    let mut words = line.split_whitespace();
    let (from, to) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let weight = words.next()?.parse().ok().filter(|&w| w <= HEAVIEST)?;
    (from < nodes && to < nodes && words.next().is_none()).then_some((from, to, weight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let graph = Graph::random(20, 7);
        assert_eq!(graph.to_string().parse(), Ok(graph));
    }

    #[test]
    fn bad_text_is_named() {
        for bad in ["", "x", "2 1", "2 1\n0 2 1", "2 1\n0 1", "2 1\n0 1 1001", "2 0\n0 1 1"] {
            assert!(bad.parse::<Graph>().is_err(), "{bad:?}");
        }
    }
}
