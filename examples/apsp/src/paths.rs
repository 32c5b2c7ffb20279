//! Floyd and Warshall's algorithm. Each thread owns a band of rows; the threads go in step through the pivots, each of
//! which its owner publishes one step ahead.

use crate::graph::Graph;
use std::sync::{Barrier, PoisonError, RwLock};

/// Distance to a node that cannot be reached.
pub const NO_PATH: u32 = u32::MAX;
/// Stands for [`NO_PATH`] while we compute: the sum of two does not overflow, nor become negative as `i32`, whose
/// minimum baseline x86-64 computes faster.
const FAR: i32 = i32::MAX / 2;

/// Distances between all pairs of nodes, row by row. `progress` hears how many pivots are done.
pub fn shortest(graph: &Graph, threads: usize, progress: impl FnMut(usize) + Send) -> Vec<u32> {
    let n = graph.nodes;
    if n == 0 {
        return Vec::new();
    }
    let mut distances = direct(graph);
    let height = n.div_ceil(threads.clamp(1, n));
    let bands = n.div_ceil(height);
    let pivots = [RwLock::new(distances[..n].to_vec()), RwLock::new(vec![FAR; n])];
    let barrier = Barrier::new(bands);
    let mut progress = Some(progress);
    std::thread::scope(|scope| {
        for (i, rows) in distances.chunks_mut(height * n).enumerate() {
            let (pivots, barrier, mut progress) = (&pivots, &barrier, progress.take());
            let work = move || {
                for k in 0..n {
                    relax(rows, i * height, k, n, pivots);
                    barrier.wait();
                    if let Some(progress) = &mut progress {
                        progress(k + 1);
                    }
                }
            };
            let named = std::thread::Builder::new().name(format!("band-{i}"));
            if let Err(e) = named.spawn_scoped(scope, work) {
                eprintln!("apsp: cannot start a thread: {e}");
                std::process::exit(1); // the others would wait for it at the barrier
            }
        }
    });
    distances.into_iter().map(|d| if d < FAR { d as u32 } else { NO_PATH }).collect()
}

/// The distances by a single edge.
fn direct(graph: &Graph) -> Vec<i32> {
    let n = graph.nodes;
    let mut distances = vec![FAR; n * n];
    for node in 0..n {
        distances[node * n + node] = 0;
    }
    for &(from, to, weight) in &graph.edges {
        let distance = &mut distances[from * n + to];
        *distance = (*distance).min(weight as i32);
    }
    distances
}

/// Shortens the paths of a band (whose first row is `first`) by going through node `k`, and publishes row `k + 1` if it
/// is here. Nobody reads the other pivot meanwhile: its readers passed the barrier.
fn relax(rows: &mut [i32], first: usize, k: usize, n: usize, pivots: &[RwLock<Vec<i32>>; 2]) {
    let pivot = pivots[k % 2].read().unwrap_or_else(PoisonError::into_inner);
    for (i, row) in rows.chunks_exact_mut(n).enumerate() {
        let to_pivot = row[k];
        if to_pivot < FAR {
            for (distance, &from_pivot) in row.iter_mut().zip(pivot.iter()) {
                *distance = (*distance).min(to_pivot + from_pivot);
            }
        }
        if first + i == k + 1 {
            pivots[(k + 1) % 2].write().unwrap_or_else(PoisonError::into_inner).copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_graph() {
        let graph: Graph = "3 3\n0 1 5\n1 2 7\n0 2 20\n".parse().expect("a graph");
        let far = NO_PATH;
        assert_eq!(shortest(&graph, 2, |_| {}), [0, 5, 12, far, 0, 7, far, far, 0]);
    }

    #[test]
    fn any_number_of_threads_gives_the_same() {
        let graph = Graph::random(67, 3);
        let alone = shortest(&graph, 1, |_| {});
        for threads in [0, 2, 3, 5, 67, 200] {
            assert_eq!(shortest(&graph, threads, |_| {}), alone, "{threads} threads");
        }
    }

    #[test]
    fn an_empty_graph_has_no_paths() {
        assert!(shortest(&Graph::default(), 2, |_| {}).is_empty());
    }
}
