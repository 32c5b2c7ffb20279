//! Tables, as Markdown and as CSV.

use std::fmt::Write;

/// A number with three digits that mean something; a dash for none.
pub fn number(value: f64) -> String {
    match value.abs() {
        _ if value.is_nan() => "–".into(),
        v if v >= 99.95 || v == 0.0 => format!("{value:.0}"),
        v if v >= 9.995 => format!("{value:.1}"),
        v if v >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A table of an experiment.
pub struct Table {
    /// Name of its CSV file, without the ending.
    pub name: String,
    /// What it shows.
    pub title: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty one. Columns of numbers have their unit in their name.
    pub fn new(name: &str, title: &str, columns: &[&str]) -> Self {
        let columns = columns.iter().map(|&c| c.to_owned()).collect();
        Table { name: name.to_owned(), title: title.to_owned(), columns, rows: Vec::new() }
    }

    /// One more row, also shown on standard error.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        let named: Vec<String> = self.columns.iter().zip(&cells).map(|(c, v)| format!("{c} {v}")).collect();
        eprintln!("  {}", named.join(" · "));
        self.rows.push(cells);
    }

    /// As Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "| {} |", self.columns.join(" | "));
        let _ = writeln!(text, "|{}", " --- |".repeat(self.columns.len()));
        for row in &self.rows {
            let _ = writeln!(text, "| {} |", row.join(" | "));
        }
        text
    }

    /// As comma-separated values; a dash in the table is an empty value.
    pub fn csv(&self) -> String {
        let field = |cell: &String| match cell.as_str() {
            "–" => String::new(),
            c if c.contains([',', '"']) => format!("\"{}\"", c.replace('"', "\"\"")),
            c => c.to_owned(),
        };
        let line = |cells: &Vec<String>| cells.iter().map(field).collect::<Vec<_>>().join(",") + "\n";
        std::iter::once(&self.columns).chain(&self.rows).map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Table, number};

    #[test]
    fn numbers_have_three_digits() {
        let shown = [f64::NAN, 0.0, 0.12345, 1.2345, 12.345, 123.45, 99.97, -0.5].map(number);
        assert_eq!(shown, ["–", "0", "0.123", "1.23", "12.3", "123", "100", "-0.500"]);
    }

    #[test]
    fn fields_with_commas_are_quoted() {
        let mut table = Table::new("t", "", &["a", "b"]);
        table.row(vec!["1, \"2\"".into(), "–".into()]);
        assert_eq!(table.csv(), "a,b\n\"1, \"\"2\"\"\",\n");
        assert_eq!(table.markdown(), "| a | b |\n| --- | --- |\n| 1, \"2\" | – |\n");
    }
}
