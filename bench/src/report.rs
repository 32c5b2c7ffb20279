//! Tables and a plot of what was measured.

use anyhow::{Context, Result};
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

/// Measured times.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<Duration>);

impl Series {
    /// One more.
    pub fn add(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The median, milliseconds.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        let ms = |i: usize| sorted.get(i).map_or(f64::NAN, |d| d.as_secs_f64() * 1e3);
        let n = sorted.len();
        if n % 2 == 1 { ms(n / 2) } else { (ms((n / 2).wrapping_sub(1)) + ms(n / 2)) / 2.0 }
    }

    fn range(&self) -> (f64, f64) {
        let ms = |d: Option<&Duration>| d.map_or(f64::NAN, |d| d.as_secs_f64() * 1e3);
        (ms(self.0.iter().min()), ms(self.0.iter().max()))
    }
}

/// A promise and what became of it.
pub struct Row {
    /// What is promised or measured.
    pub promise: String,
    /// Ours.
    pub reached: Series,
    /// The other side, measured in turn.
    pub peer: Option<(String, Series)>,
    /// Largest ratio (ours to theirs) that keeps the promise.
    pub most: Option<f64>,
}

/// All that was measured.
pub struct Report {
    machine: String,
    rows: Vec<Row>,
    notes: Vec<String>,
    bars: Vec<(String, f64, f64)>,
}

impl Report {
    /// An empty one for this machine, for measurements in a directory.
    pub fn new(directory: &Path) -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": ").map(|p| p.1));
        let cpus = std::thread::available_parallelism()?;
        let meminfo = read("/proc/meminfo");
        let memory = meminfo.split_whitespace().nth(1).and_then(|k| k.parse::<u64>().ok()).unwrap_or(0) >> 20;
        let kernel = read("/proc/sys/kernel/osrelease");
        let mounts = read("/proc/self/mounts");
        let holds = |l: &&str| l.split(' ').nth(1).is_some_and(|at| directory.starts_with(at));
        let mount = mounts.lines().filter(holds).max_by_key(|l| l.split(' ').nth(1).map_or(0, str::len));
        let system = mount.and_then(|l| l.split(' ').nth(2)).unwrap_or("?").to_owned();
        let machine = format!(
            "{} × {}, {memory} GiB, Linux {}, {system}",
            cpus,
            model.unwrap_or("unknown processor").trim(),
            kernel.trim()
        );
        Ok(Report { machine, rows: Vec::new(), notes: Vec::new(), bars: Vec::new() })
    }

    /// Something that was skipped, and why.
    pub fn note(&mut self, text: &str) {
        eprintln!("{text}");
        self.notes.push(text.to_owned());
    }

    /// A result.
    pub fn row(&mut self, row: Row) {
        eprintln!("{}", Self::line(&row, ""));
        self.rows.push(row);
    }

    /// Pause and wall time of one size, for the plot.
    pub fn bar(&mut self, label: &str, pause: &Series, wall: &Series) {
        self.bars.push((label.to_owned(), pause.median(), wall.median()));
    }

    fn line(row: &Row, machine: &str) -> String {
        let (peer, ratio) = match &row.peer {
            None => ("–".to_owned(), "–".to_owned()),
            Some((name, series)) => {
                let ratio = row.reached.median() / series.median();
                let verdict = match row.most {
                    Some(most) if ratio <= most => " (kept)",
                    Some(_) => " (**not kept**)",
                    None => "",
                };
                (format!("{name} {:.1} ms", series.median()), format!("{ratio:.2}{verdict}"))
            }
        };
        format!("| {} | {:.1} ms | {peer} | {ratio} | {machine} |", row.promise, row.reached.median())
    }

    /// Writes `summary.md`, `runs.csv` and `checkpoint.svg`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        std::fs::create_dir_all(directory)?;
        let mut summary = String::from("# What was measured\n\n");
        summary += "Written by `make bench`. Times are medians; ours and the peer's were measured in turn, in one run.\n";
        summary += "The pause is the longest gap that a thread of the program saw that does nothing but look at the clock.\n\n";
        summary += "| promise | reached | peer | ratio | machine |\n| --- | --- | --- | --- | --- |\n";
        for row in &self.rows {
            writeln!(summary, "{}", Self::line(row, &self.machine))?;
        }
        for note in &self.notes {
            write!(summary, "\n{note}.\n")?;
        }
        let put = |name: &str, text: &str| {
            std::fs::write(directory.join(name), text)
                .with_context(|| format!("{}/{name}", directory.display()))
        };
        put("summary.md", &summary)?;
        let mut runs = String::from("promise,side,median_ms,min_ms,max_ms,runs\n");
        for row in &self.rows {
            let ours = [("stillpoint".to_owned(), &row.reached)];
            let peer = row.peer.iter().map(|(name, series)| (name.clone(), series));
            for (side, series) in ours.into_iter().chain(peer) {
                let (least, most) = series.range();
                let promise = &row.promise;
                writeln!(
                    runs,
                    "{promise},{side},{:.3},{least:.3},{most:.3},{}",
                    series.median(),
                    series.0.len()
                )?;
            }
        }
        put("runs.csv", &runs)?;
        put("checkpoint.svg", &self.plot()?)
    }

    /// Two bars for each size: pause and wall time, on a logarithmic scale.
    fn plot(&self) -> Result<String> {
        let (width, height, left, bottom) = (160 + 150 * self.bars.len(), 320, 70, 270);
        let y = |ms: f64| f64::from(bottom) - (ms.max(0.1).log10() + 1.0) * 45.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        for power in -1..5 {
            let ms = 10f64.powi(power);
            let at = y(ms);
            writeln!(svg, "<line x1=\"{left}\" x2=\"{width}\" y1=\"{at}\" y2=\"{at}\" stroke=\"#ddd\"/>")?;
            writeln!(svg, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{ms} ms</text>", left - 6, at + 4.0)?;
        }
        for (i, (label, pause, wall)) in self.bars.iter().enumerate() {
            let x = left + 30 + 150 * i as i32;
            for (shift, ms, colour, name) in
                [(0, pause, "#4477aa", "pause"), (50, wall, "#cc6677", "durable")]
            {
                let top = y(*ms);
                let (x, tall) = (x + shift, f64::from(bottom) - top);
                writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{top}\" width=\"42\" height=\"{tall}\" fill=\"{colour}\"/>"
                )?;
                writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{ms:.1}</text>",
                    x + 21,
                    top - 4.0
                )?;
                writeln!(
                    svg,
                    "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
                    x + 21,
                    bottom + 16
                )?;
            }
            writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                x + 46,
                bottom + 36
            )?;
        }
        svg += "</svg>\n";
        Ok(svg)
    }
}
