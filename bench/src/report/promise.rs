//! What is promised, and what became of it.

use super::table::number;
use serde_json::{Value, json};

/// A number and its unit.
#[derive(Clone, Copy)]
pub struct Figure(pub f64, pub &'static str);

impl std::fmt::Display for Figure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", number(self.0), self.1)
    }
}

/// When a promise is kept.
#[derive(Clone, Copy)]
pub enum Limit {
    /// Measured for comparison: nothing was promised.
    None,
    /// The figure is at most this.
    AtMost(f64),
    /// The figure is at most this many times the peer's.
    TimesPeer(f64),
    /// The figure is at least this many times the peer's.
    AtLeastTimesPeer(f64),
}

/// One row of the summary.
pub struct Promise {
    /// What is promised or measured.
    pub what: String,
    /// Ours.
    pub reached: Figure,
    /// The other side, measured in turn in the same run.
    pub peer: Option<(String, Figure)>,
    /// When it is kept.
    pub limit: Limit,
}

impl Promise {
    fn ratio(&self) -> Option<f64> {
        self.peer.as_ref().map(|(_, theirs)| self.reached.0 / theirs.0)
    }

    /// `None` if nothing was promised. What was not measured is not kept.
    fn kept(&self) -> Option<bool> {
        match self.limit {
            Limit::None => None,
            Limit::AtMost(most) => Some(self.reached.0 <= most),
            Limit::TimesPeer(most) => Some(self.ratio().is_some_and(|r| r <= most)),
            Limit::AtLeastTimesPeer(least) => Some(self.ratio().is_some_and(|r| r >= least)),
        }
    }

    /// The row, to be kept for the next summary.
    pub fn record(&self, machine: &str) -> Value {
        let verdict = match self.kept() {
            None => "",
            Some(true) => " (kept)",
            Some(false) => " (**not kept**)",
        };
        let ratio = self.ratio().map_or("–".into(), |r| match r {
            r if r < 0.001 => format!("1 / {:.0}", 1.0 / r),
            r => number(r),
        });
        let (reached, ratio) = match self.limit {
            Limit::TimesPeer(_) | Limit::AtLeastTimesPeer(_) => (self.reached.to_string(), ratio + verdict),
            _ => (format!("{}{verdict}", self.reached), ratio),
        };
        let peer = self.peer.as_ref().map_or("–".into(), |(name, figure)| format!("{name} {figure}"));
        json!({"promise": self.what, "reached": reached, "peer": peer, "ratio": ratio, "machine": machine})
    }
}

#[cfg(test)]
mod tests {
    use super::{Figure, Limit, Promise};

    #[test]
    fn verdicts() {
        let row = |reached, peer: Option<f64>, limit| {
            let peer = peer.map(|p| ("CRIU".to_owned(), Figure(p, "ms")));
            Promise { what: "pause".into(), reached: Figure(reached, "ms"), peer, limit }.record("here")
        };
        assert_eq!(row(0.5, None, Limit::AtMost(1.0))["reached"], "0.500 ms (kept)");
        assert_eq!(row(1.5, None, Limit::AtMost(1.0))["reached"], "1.50 ms (**not kept**)");
        assert_eq!(row(1.5, Some(2.0), Limit::TimesPeer(1.2))["ratio"], "0.750 (kept)");
        assert_eq!(row(0.5, Some(1000.0), Limit::TimesPeer(0.001))["ratio"], "1 / 2000 (kept)");
        assert_eq!(row(0.5, Some(1.0), Limit::AtLeastTimesPeer(0.8))["ratio"], "0.500 (**not kept**)");
        assert_eq!(row(0.9, Some(1.0), Limit::AtLeastTimesPeer(0.8))["ratio"], "0.900 (kept)");
        assert_eq!(row(1.5, None, Limit::TimesPeer(1.2))["ratio"], "– (**not kept**)");
        assert_eq!(row(f64::NAN, None, Limit::AtMost(1.0))["reached"], "– ms (**not kept**)");
    }
}
