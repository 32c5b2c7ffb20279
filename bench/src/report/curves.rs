//! Curves over time as SVG: what has happened by each moment. Time goes by powers of ten.

use super::chart::{COLOURS, label, rectangle, text};
use std::fmt::Write;

const LEFT: f64 = 80.0;
const TOP: f64 = 50.0;
const TALL: f64 = 240.0;
const WIDE: f64 = 560.0;

/// A time, and what had happened by then.
type Point = (f64, f64);

/// Curves in one picture.
pub struct Curves {
    title: String,
    unit: &'static str,
    what: &'static str,
    lines: Vec<(String, Vec<Point>)>,
}

impl Curves {
    /// None yet. `unit` is that of time, `what` is counted.
    pub fn new(title: &str, unit: &'static str, what: &'static str) -> Self {
        Curves { title: title.to_owned(), unit, what, lines: Vec::new() }
    }

    /// One more, of times that grow. One without any is a name only.
    pub fn line(&mut self, name: &str, points: Vec<Point>) {
        self.lines.push((name.to_owned(), points));
    }

    fn points(&self) -> impl Iterator<Item = Point> {
        self.lines.iter().flat_map(|(_, points)| points.iter().copied()).filter(|(time, _)| *time > 0.0)
    }

    /// The picture; `None` if there is nothing to show.
    pub fn svg(&self) -> Option<String> {
        let first = self.points().map(|p| p.0).reduce(f64::min)?.log10().floor();
        let last = self.points().map(|p| p.0).reduce(f64::max)?.log10().ceil().max(first + 1.0);
        let most = self.points().map(|p| p.1).reduce(f64::max)?;
        let step = 10f64.powf(most.log10().floor());
        let top = (most / step).ceil() * step;
        let x = |time: f64| LEFT + WIDE * ((time.log10() - first) / (last - first)).clamp(0.0, 1.0);
        let y = |count: f64| TOP + TALL * (1.0 - count / top);
        let mut svg = String::new();
        let _ = writeln!(
            svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{:.0}\" font-family=\"sans-serif\" \
             font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
            LEFT + WIDE + 40.0,
            TOP + TALL + 40.0
        );
        text(&mut svg, 10.0, 18.0, "start", &format!("{} ({}, {})", self.title, self.what, self.unit));
        for line in 0..=(top / step).round() as u32 {
            let at = y(f64::from(line) * step);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{:.0}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>",
                LEFT + WIDE
            );
            text(&mut svg, LEFT - 6.0, at + 4.0, "end", &label(f64::from(line) * step));
        }
        for power in first as i32..=last as i32 {
            let time = 10f64.powi(power);
            text(&mut svg, x(time), TOP + TALL + 18.0, "middle", &label(time));
        }
        for (i, (name, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let at = LEFT + WIDE / self.lines.len() as f64 * i as f64;
            rectangle(&mut svg, (at, 28.0), (10.0, 10.0), colour);
            text(&mut svg, at + 14.0, 37.0, "start", name);
            // Nothing before the first, and no more behind the last.
            let (mut path, mut before) = (format!("M{LEFT} {:.1}", y(0.0)), 0.0);
            for (time, count) in points {
                let _ = write!(path, " L{:.1} {:.1} L{:.1} {:.1}", x(*time), y(before), x(*time), y(*count));
                before = *count;
            }
            let _ = write!(path, " L{:.1} {:.1}", LEFT + WIDE, y(before));
            let _ =
                writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>");
        }
        svg += "</svg>\n";
        Some(svg)
    }
}

#[cfg(test)]
mod tests {
    use super::Curves;

    #[test]
    fn curves_lie_within_the_picture() {
        let mut curves = Curves::new("waits", "ms", "waits");
        assert!(curves.svg().is_none());
        curves.line("first", vec![(0.001, 1.0), (5.0, 40.0), (120.0, 4286.0)]);
        curves.line("then", Vec::new());
        let svg = curves.svg().unwrap_or_default();
        assert!(svg.contains("first") && svg.contains("then") && svg.contains(">4000<"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
