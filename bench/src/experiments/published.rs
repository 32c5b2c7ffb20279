//! What the papers state. Only figures that their published abstracts give are here.

use crate::report::{Table, number};
use crate::series::Series;

/// A published figure.
#[derive(Clone, Copy)]
pub struct Published {
    what: &'static str,
    figure: &'static str,
    source: &'static str,
}

/// Downtime of TIC-CKPT's first version against tools that stop the program.
pub const LESS_DOWNTIME_THAN_STOP: Published = Published {
    what: "`wp`: downtime less than that of `stop`, %",
    figure: "47.4 to 89.8",
    source: "Liao and Ishikawa, COMPSAC 2010",
};

/// Downtime of TIC-CKPT against CLL.
pub const LESS_DOWNTIME_THAN_CLL: Published = Published {
    what: "`wp`: downtime less than that of CLL, %",
    figure: "more than 10 (2010), more than 10.1 (2012), around 10 (2013)",
    source: "Liao and Ishikawa, COMPSAC 2010; Liao, Computing and Informatics 31(3), 2012; Liao, JISE 29(6), 2013",
};

/// Checkpoint time of TIC-CKPT against CLL.
pub const LESS_TIME_THAN_CLL: Published = Published {
    what: "`wp`: checkpoint time less than that of CLL, %",
    figure: "more than 2.2 (2010), more than 2 (2013)",
    source: "Liao and Ishikawa, COMPSAC 2010; Liao, JISE 29(6), 2013",
};

/// A copy-on-write checkpoint call against copying.
pub const FORK_AGAINST_COPY: Published = Published {
    what: "`fork`: times shorter than copying all memory",
    figure: "up to 67",
    source: "Carothers and Szymanski, Dr. Dobb's Journal 339, 2002",
};

/// Incremental checkpoints of a matrix multiplication, every 10 s.
pub const INCREMENTAL_10: Published = Published {
    what: "MAT, every 10 s: incremental checkpoint time less than that of a full one, %",
    figure: "more than 95.5",
    source: "Liao, Computing and Informatics 31(3), 2012",
};

/// The same every 20 s.
pub const INCREMENTAL_20: Published = Published {
    what: "MAT, every 20 s: incremental checkpoint time less than that of a full one, %",
    figure: "more than 89.2",
    source: "Liao, Computing and Informatics 31(3), 2012",
};

/// Published figures beside ours: the range of what was measured.
pub fn table(name: &str, rows: &[(Published, Series)]) -> Table {
    let title = "As published (other machines, other programs of the same names), and here.";
    let mut table = Table::new(name, title, &["what", "published", "here, least", "here, most", "source"]);
    for (published, here) in rows {
        let Published { what, figure, source } = *published;
        let range = [here.least(), here.most()].map(number);
        let [least, most] = range;
        table.row(vec![what.to_owned(), figure.to_owned(), least, most, source.to_owned()]);
    }
    table
}
