//! What is written to `bench/results`: for each experiment a page, its tables as CSV and a chart, and one summary of what
//! was promised. An experiment that is not run again keeps its results.

mod chart;
mod curves;
mod machine;
mod promise;
mod table;

pub use chart::{Chart, Scale};
pub use curves::Curves;
pub use machine::machine;
pub use promise::{Figure, Limit, Promise};
pub use table::{Table, number};

use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The results of one experiment.
pub struct Section {
    /// Its name, and that of its files.
    pub name: &'static str,
    /// What is measured, and how.
    pub about: String,
    /// Its tables.
    pub tables: Vec<Table>,
    /// Its picture.
    pub chart: Option<Chart>,
    /// Further pictures: their names behind its own, and what they show.
    pub pictures: Vec<(String, String)>,
    /// Its rows of the summary.
    pub promises: Vec<Promise>,
    /// What was skipped, and why.
    pub notes: Vec<String>,
}

impl Section {
    /// An empty one.
    pub fn new(name: &'static str, about: &str) -> Self {
        let about = about.to_owned();
        let (tables, pictures, promises, notes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Section { name, about, tables, chart: None, pictures, promises, notes }
    }

    /// Something that was skipped, and why.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        eprintln!("  {text}");
        self.notes.push(text);
    }

    /// A further picture, if there is anything on it.
    pub fn picture(&mut self, name: &str, svg: Option<String>) {
        self.pictures.extend(svg.map(|svg| (format!("{}-{name}", self.name), svg)));
    }

    fn page(&self, machine: &str) -> String {
        let mut page = format!("# {}\n\n{}\n\nMachine: {machine}.\n", self.name, self.about);
        for table in &self.tables {
            let _ = write!(page, "\n{}\n\n{}", table.title, table.markdown());
        }
        if self.chart.as_ref().is_some_and(|c| c.svg().is_some()) {
            let _ = write!(page, "\n![{0}]({0}.svg)\n", self.name);
        }
        for (name, _) in &self.pictures {
            let _ = write!(page, "\n![{name}]({name}.svg)\n");
        }
        for note in &self.notes {
            let _ = write!(page, "\n{note}.\n");
        }
        page
    }
}

/// The directory of results.
pub struct Report {
    directory: PathBuf,
    machine: String,
    /// Names of all experiments, in the order of the summary.
    order: Vec<&'static str>,
}

impl Report {
    /// Results of this machine for measurements in `workplace`, to be written to `directory`.
    pub fn new(directory: &Path, workplace: &Path, order: Vec<&'static str>) -> Result<Self> {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        Ok(Report { directory: directory.to_owned(), machine: machine(workplace)?, order })
    }

    fn put(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())
    }

    /// Writes the results of one experiment, and the summary anew.
    pub fn write(&self, section: &Section) -> Result<()> {
        self.put(&format!("{}.md", section.name), &section.page(&self.machine))?;
        for table in &section.tables {
            self.put(&format!("{}.csv", table.name), &table.csv())?;
        }
        if let Some(svg) = section.chart.as_ref().and_then(Chart::svg) {
            self.put(&format!("{}.svg", section.name), &svg)?;
        }
        for (name, svg) in &section.pictures {
            self.put(&format!("{name}.svg"), svg)?;
        }
        let mut all = self.promises()?;
        let rows = section.promises.iter().map(|p| p.record(&self.machine)).collect();
        all.insert(section.name.to_owned(), Value::Array(rows));
        self.put("promises.json", &(serde_json::to_string_pretty(&all)? + "\n"))?;
        self.put("summary.md", &self.summary(&all))
    }

    /// The rows of all experiments that were ever run.
    fn promises(&self) -> Result<Map<String, Value>> {
        let path = self.directory.join("promises.json");
        match std::fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Map::new()),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    fn summary(&self, promises: &Map<String, Value>) -> String {
        let mut text = String::from(
            "# What was measured\n\n\
             Written by `make bench`. Figures are medians; ours and the peer's were measured in turn, in one run. A pause is\n\
             the longest gap that a thread of the program saw that does nothing but look at the clock. Each experiment has a\n\
             page with its tables; [docs/pauses.md](../../docs/pauses.md) says what they mean.\n\n\
             | promise | reached | peer | ratio | machine |\n| --- | --- | --- | --- | --- |\n",
        );
        let run = || self.order.iter().filter_map(|name| Some((name, promises.get(*name)?)));
        for row in run().flat_map(|(_, rows)| rows.as_array().into_iter().flatten()) {
            let cell = |key: &str| row[key].as_str().unwrap_or("–").to_owned();
            let cells = ["promise", "reached", "peer", "ratio", "machine"].map(cell);
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        let pages: Vec<String> = run().map(|(name, _)| format!("[{name}]({name}.md)")).collect();
        let _ = write!(text, "\nExperiments: {}.\n", pages.join(", "));
        text
    }
}
