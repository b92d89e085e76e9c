//! Tables: a header and aligned columns, separated by two spaces, without borders. Colour only repeats what a word
//! says.

use comfy_table::{Cell as Inner, CellAlignment, Color, ColumnConstraint, ContentArrangement, Width, presets};

use super::formatting::sanitize;

/// Spaces between columns.
const GAP: u16 = 2;
/// The least width of a wrapped last column. On a narrower terminal, the terminal breaks the line.
const MIN_LAST_COLUMN: u16 = 14;

/// A table under construction.
#[derive(Debug, Default)]
pub(crate) struct Table {
    header: Vec<String>,
    right_aligned: Vec<usize>,
    rows: Vec<Vec<Cell>>,
    indent: usize,
}

/// A cell and its colour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
    Faint,
}

/// A plain cell, without control characters.
pub(crate) fn cell(text: impl Into<String>) -> Cell {
    Cell { text: sanitize(&text.into()), tone: Tone::Plain }
}

impl Cell {
    #[must_use]
    pub(crate) const fn good(self) -> Self {
        self.tone(Tone::Good)
    }

    #[must_use]
    pub(crate) const fn warn(self) -> Self {
        self.tone(Tone::Warn)
    }

    #[must_use]
    pub(crate) const fn bad(self) -> Self {
        self.tone(Tone::Bad)
    }

    #[must_use]
    pub(crate) const fn faint(self) -> Self {
        self.tone(Tone::Faint)
    }

    const fn tone(mut self, tone: Tone) -> Self {
        self.tone = tone;
        self
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        cell(text)
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        cell(text)
    }
}

impl Table {
    pub(crate) fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Self {
        Self { header: header.into_iter().map(str::to_owned).collect(), ..Self::default() }
    }

    /// Right-aligns these columns, for numbers.
    #[must_use]
    pub(crate) fn right_align(mut self, columns: &[usize]) -> Self {
        self.right_aligned = columns.to_vec();
        self
    }

    #[must_use]
    pub(crate) const fn indent(mut self, columns: usize) -> Self {
        self.indent = columns;
        self
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) -> &mut Self {
        self.rows.push(cells.into_iter().collect());
        self
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn render(&self, colour: bool, width: Option<u16>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        if colour {
            table.enforce_styling();
        } else {
            table.force_no_tty();
        }
        table.set_header(self.header.iter().map(Inner::new));
        for row in &self.rows {
            table.add_row(row.iter().map(styled));
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, GAP));
            if self.right_aligned.contains(&index) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        self.fit(&mut table, width);
        let indent = " ".repeat(self.indent);
        table.lines().map(|line| format!("{indent}{}\n", line.trim_end())).collect()
    }

    /// Fits the table to a narrow terminal: headers break at spaces and the last column wraps. Names and numbers are
    /// never broken, so that they can be searched for.
    fn fit(&self, table: &mut comfy_table::Table, width: Option<u16>) {
        table.set_content_arrangement(ContentArrangement::Disabled);
        let Some(width) = width else { return };
        let width = width.saturating_sub(u16::try_from(self.indent).unwrap_or(0));
        let natural: u16 = table.column_max_content_widths().iter().map(|column| column + GAP).sum();
        if natural <= width + GAP {
            return;
        }
        let last = self.header.len().saturating_sub(1);
        let wraps = !self.right_aligned.contains(&last);
        let narrow: Vec<u16> = (0..self.header.len()).map(|index| self.min_column_width(index) + GAP).collect();
        let fixed: u16 = narrow[..last].iter().sum();
        let rest = (width + GAP).saturating_sub(fixed).max(MIN_LAST_COLUMN);
        for (index, column) in table.column_iter_mut().enumerate() {
            let wide = if index == last && wraps { rest } else { narrow[index] };
            column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(wide)));
        }
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(u16::MAX);
    }

    /// Returns the width of the longest cell of a column or of the longest word of its header, whichever is greater.
    fn min_column_width(&self, index: usize) -> u16 {
        let header = self.header[index].split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
        let cells = self.rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.text.chars().count()).max();
        u16::try_from(header.max(cells.unwrap_or(0))).unwrap_or(u16::MAX)
    }
}

fn styled(cell: &Cell) -> Inner {
    let inner = Inner::new(&cell.text);
    match cell.tone {
        Tone::Plain => inner,
        Tone::Good => inner.fg(Color::Green),
        Tone::Warn => inner.fg(Color::Yellow),
        Tone::Bad => inner.fg(Color::Red),
        Tone::Faint => inner.fg(Color::DarkGrey),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_right_aligned_and_lines_have_no_trailing_blanks() {
        let mut table = Table::new(["NODE", "RUNS"]).right_align(&[1]);
        table.row([cell("a").good(), cell("7")]).row([cell("node001"), cell("1234")]);
        assert_eq!(table.render(false, None), "NODE     RUNS\na           7\nnode001  1234\n");
    }

    #[test]
    fn colour_is_used_only_if_enabled() {
        let mut table = Table::new(["A"]);
        table.row([cell("x").bad()]);
        assert!(!table.render(false, Some(80)).contains('\x1b'));
        assert!(table.render(true, Some(80)).contains('\x1b'));
    }

    #[test]
    fn on_a_narrow_terminal_the_last_column_wraps_and_no_name_is_broken() {
        let mut table = Table::new(["NODE", "LAST RESULT", "WHY"]);
        table.row([
            cell("a-rather-long-node-name"),
            cell("within-limits"),
            cell("it was due and the node was free ".repeat(3)),
        ]);
        let text = table.render(false, Some(70));
        assert!(text.lines().all(|line| line.chars().count() <= 70), "{text}");
        assert!(text.contains("a-rather-long-node-name  within-limits"), "{text}");
        let mut numbers = Table::new(["TEST", "NEVER TESTED", "NOT APPLICABLE"]).right_align(&[1, 2]);
        numbers.row([cell("storage"), cell("1"), cell("2")]);
        assert_eq!(
            numbers.render(false, Some(30)),
            "TEST      NEVER         NOT\n         TESTED  APPLICABLE\nstorage       1           2\n"
        );
    }

    #[test]
    fn without_a_terminal_nothing_is_wrapped() {
        let mut table = Table::new(["A", "B"]);
        table.row([cell("x"), cell("long ".repeat(60))]);
        assert_eq!(table.render(false, None).lines().count(), 2);
        assert!(table.render(false, Some(80)).lines().count() > 2);
    }
}
