//! Bar charts as SVG.

use super::table::number;
use std::fmt::Write;

/// Told apart by most eyes.
pub const COLOURS: [&str; 8] =
    ["#4477aa", "#cc6677", "#ddcc77", "#117733", "#88ccee", "#aa4499", "#999933", "#882255"];
const BAR: f64 = 34.0;
const GAP: f64 = 26.0;
const LEFT: f64 = 80.0;
const TOP: f64 = 50.0;
const TALL: f64 = 240.0;

/// How values become heights.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// Powers of ten.
    Logarithmic,
    /// From zero.
    Linear,
}

/// Groups of bars; bars with the same name have the same colour.
pub struct Chart {
    title: String,
    unit: &'static str,
    scale: Scale,
    groups: Vec<(String, Vec<(String, f64)>)>,
}

impl Chart {
    /// An empty one.
    pub fn new(title: &str, unit: &'static str, scale: Scale) -> Self {
        Chart { title: title.to_owned(), unit, scale, groups: Vec::new() }
    }

    /// One more bar, in the group of that name.
    pub fn bar(&mut self, group: &str, name: &str, value: f64) {
        if value.is_nan() {
            return;
        }
        let bar = (name.to_owned(), value);
        match self.groups.iter_mut().find(|(g, _)| g == group) {
            Some((_, bars)) => bars.push(bar),
            None => self.groups.push((group.to_owned(), vec![bar])),
        }
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.groups.iter().flat_map(|(_, bars)| bars.iter().map(|(_, v)| *v))
    }

    /// Names of the bars, in the order in which they first appear.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for (_, bars) in &self.groups {
            for (name, _) in bars {
                if !names.contains(&name.as_str()) {
                    names.push(name);
                }
            }
        }
        names
    }

    /// The values of the lines across: the first is the floor, the last the top.
    fn lines(&self) -> Vec<f64> {
        let most = self.values().fold(f64::MIN_POSITIVE, f64::max);
        match self.scale {
            Scale::Logarithmic => {
                let least = self.values().filter(|&v| v > 0.0).fold(most, f64::min);
                let (low, high) = (least.log10().floor() as i32, most.log10().ceil() as i32);
                (low..=high.max(low + 1)).map(|power| 10f64.powi(power)).collect()
            }
            Scale::Linear => {
                let step = 10f64.powf(most.log10().floor());
                let steps = (most / step).ceil() as i32;
                (0..=steps).map(|i| f64::from(i) * step).collect()
            }
        }
    }

    /// The picture; `None` if there is nothing to show.
    pub fn svg(&self) -> Option<String> {
        let lines = self.lines();
        let (floor, top) = (*lines.first()?, *lines.last()?);
        if self.groups.is_empty() {
            return None;
        }
        let share = |value: f64| match self.scale {
            Scale::Logarithmic => (value.max(floor).log10() - floor.log10()) / (top.log10() - floor.log10()),
            Scale::Linear => value.max(0.0) / top,
        };
        let y = |value: f64| TOP + TALL * (1.0 - share(value));
        let names = self.names();
        let bars = self.groups.iter().map(|(_, bars)| bars.len() as f64);
        let width = LEFT + bars.map(|n| n * BAR + GAP).sum::<f64>() + GAP;
        let width = width.max(LEFT + 110.0 * names.len() as f64);
        let mut svg = String::new();
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{:.0}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
            TOP + TALL + 40.0
        );
        text(&mut svg, 10.0, 18.0, "start", &format!("{} ({})", self.title, self.unit));
        for (i, name) in names.iter().enumerate() {
            let x = LEFT + 110.0 * i as f64;
            rectangle(&mut svg, (x, 28.0), (10.0, 10.0), COLOURS[i % COLOURS.len()]);
            text(&mut svg, x + 14.0, 37.0, "start", name);
        }
        for line in &lines {
            let at = y(*line);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{width:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"
            );
            text(&mut svg, LEFT - 6.0, at + 4.0, "end", &label(*line));
        }
        let mut x = LEFT + GAP / 2.0;
        for (group, bars) in &self.groups {
            let middle = x + BAR * bars.len() as f64 / 2.0;
            for (name, value) in bars {
                let colour = names.iter().position(|n| n == name).unwrap_or(0) % COLOURS.len();
                let (at, tall) = (y(*value), y(floor) - y(*value));
                rectangle(&mut svg, (x, at), (BAR - 4.0, tall.max(1.0)), COLOURS[colour]);
                text(&mut svg, x + BAR / 2.0 - 2.0, at - 3.0, "middle", &number(*value));
                x += BAR;
            }
            text(&mut svg, middle, TOP + TALL + 18.0, "middle", group);
            x += GAP;
        }
        svg += "</svg>\n";
        Some(svg)
    }
}

/// A round number without digits that say nothing.
pub fn label(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A text at a place, which is its start, middle or end.
pub fn text(svg: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{what}</text>");
}

/// A filled rectangle: its corner, its size.
pub fn rectangle(svg: &mut String, (x, y): (f64, f64), (wide, tall): (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{tall:.1}\" fill=\"{colour}\"/>"
    );
}

#[cfg(test)]
mod tests {
    use super::{Chart, Scale};

    #[test]
    fn nothing_to_show_is_no_picture() {
        assert!(Chart::new("empty", "ms", Scale::Logarithmic).svg().is_none());
    }

    #[test]
    fn lines_enclose_the_values() {
        let mut chart = Chart::new("pauses", "ms", Scale::Logarithmic);
        chart.bar("1 GiB", "stop", 180.0);
        chart.bar("1 GiB", "wp", 0.3);
        assert_eq!(chart.lines(), [0.1, 1.0, 10.0, 100.0, 1000.0]);
        let mut chart = Chart::new("slowdown", "%", Scale::Linear);
        chart.bar("MAT", "auto", 2.5);
        chart.bar("FFT", "auto", -1.0);
        assert_eq!(chart.lines(), [0.0, 1.0, 2.0, 3.0]);
        assert!(chart.svg().is_some_and(|svg| svg.contains("MAT") && !svg.contains("NaN")));
    }
}
