//! Output: prints a view as JSON or as text. Text is coloured only on a terminal. Names, reasons and outputs come from nodes and
//! clusters and are not trusted: a page and a table show them without control characters.

mod captured;
mod formatting;
mod table;

use std::{
    io::{self, IsTerminal, Write},
    sync::Arc,
};

use doctor_core::finding::Severity;
use serde::Serialize;

pub(crate) use self::{
    captured::CapturedOutput,
    formatting::{
        ago, comma_separated, format_hours, format_percent, format_time, plural, sanitize, sanitize_page,
        short_duration,
    },
    table::{Cell, Table, cell},
};

/// How this command prints, and where.
#[derive(Debug, Clone)]
pub(crate) struct Output {
    json: bool,
    colour: bool,
    /// Columns of the terminal. `None` without a terminal: lines are not wrapped, so that scripts read one line per
    /// entry.
    width: Option<u16>,
    /// `None`: standard output and standard error of this process.
    captured: Option<Arc<CapturedOutput>>,
}

/// A text page under construction: lines and tables.
#[derive(Debug)]
pub(crate) struct Page {
    text: String,
    colour: bool,
    width: Option<u16>,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        let terminal = io::stdout().is_terminal();
        let colour = terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let width = terminal.then(|| comfy_table::Table::new().width().unwrap_or(100));
        Self { json, colour, width, captured: None }
    }

    /// Returns an output that is kept in memory, for a client of the API.
    pub(crate) const fn captured(json: bool, colour: bool, width: Option<u16>, captured: Arc<CapturedOutput>) -> Self {
        Self { json, colour, width, captured: Some(captured) }
    }

    pub(crate) const fn is_coloured(&self) -> bool {
        self.colour
    }

    pub(crate) const fn width(&self) -> Option<u16> {
        self.width
    }

    pub(crate) const fn is_json(&self) -> bool {
        self.json
    }

    /// Prints a view as JSON or as text.
    ///
    /// # Errors If standard output cannot be written.
    pub(crate) fn show<T: Serialize>(&self, view: &T, text: impl FnOnce(&mut Page)) -> io::Result<()> {
        if self.json {
            return self.json(view);
        }
        let mut page = Page { text: String::new(), colour: self.colour, width: self.width };
        text(&mut page);
        self.print(&page.text)
    }

    /// Prints one JSON value.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub(crate) fn json<T: Serialize>(&self, view: &T) -> io::Result<()> {
        if let Some(captured) = &self.captured {
            // Written piece by piece, so that the limit holds before the whole text is in memory.
            let mut writer: &CapturedOutput = captured;
            serde_json::to_writer_pretty(&mut writer, view)?;
            return writer.write_all(b"\n");
        }
        let mut text = serde_json::to_string_pretty(view)?;
        text.push('\n');
        self.print(&text)
    }

    /// Prints text unchanged. A closed pipe (`| head`) is not an error.
    ///
    /// # Errors If standard output cannot be written.
    pub(crate) fn print(&self, text: &str) -> io::Result<()> {
        if let Some(captured) = &self.captured {
            let mut writer: &CapturedOutput = captured;
            return writer.write_all(text.as_bytes());
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }

    /// Prints a remark on standard error, after the name of the program.
    pub(crate) fn note(&self, text: &str) {
        let text = sanitize(text);
        match &self.captured {
            Some(captured) => captured.note(&format!("doctor: {text}\n")),
            None => eprintln!("doctor: {text}"),
        }
    }
}

impl Page {
    /// Appends a line, wrapped to the width of the terminal.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) -> &mut Self {
        for line in formatting::wrap(text.as_ref(), self.width.map(usize::from)) {
            self.text.push_str(line.trim_end());
            self.text.push('\n');
        }
        self
    }

    pub(crate) fn blank(&mut self) -> &mut Self {
        self.text.push('\n');
        self
    }

    /// Appends a blank line and a heading.
    pub(crate) fn heading(&mut self, text: &str) -> &mut Self {
        self.blank();
        let text = sanitize(text);
        let text = if self.colour { format!("\x1b[1m{text}\x1b[0m\n") } else { format!("{text}\n") };
        self.text.push_str(&text);
        self
    }

    /// Appends a name and its value, aligned with other fields.
    pub(crate) fn field(&mut self, name: &str, value: impl AsRef<str>) -> &mut Self {
        const NAMES: usize = 13;
        let room = self.width.map(|width| usize::from(width).saturating_sub(NAMES).max(NAMES));
        for (index, line) in formatting::wrap(value.as_ref(), room).into_iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            self.text.push_str(format!("{name:<NAMES$}{line}").trim_end());
            self.text.push('\n');
        }
        self
    }

    pub(crate) fn table(&mut self, table: &Table) -> &mut Self {
        let text = table.render(self.colour, self.width);
        self.text.push_str(&text);
        self
    }

    /// Appends a line with the meaning of each of these severities. Nothing if there are none.
    pub(crate) fn legend(&mut self, severities: impl IntoIterator<Item = Severity>) -> &mut Self {
        if let Some(legend) = Severity::legend(severities) {
            self.line(legend);
        }
        self
    }
}
