//! A listener that accepts reports as the controller's agent endpoint does and returns them unchanged.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

/// Larger than any report.
const MAX_REPORT_BYTES: usize = 64 << 20;

pub(crate) struct ReportSink {
    address: String,
    reports: Receiver<Vec<u8>>,
}

impl ReportSink {
    pub(crate) fn open() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listening on the loopback address")?;
        let address = format!("http://{}", listener.local_addr().context("reading the port")?);
        let (give, reports) = channel();
        // The thread ends with the process, so that the port stays taken.
        thread::spawn(move || listener.incoming().flatten().all(|stream| answer(stream, &give)));
        Ok(Self { address, reports })
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the next report as received, still signed.
    pub(crate) fn next(&self, within: Duration) -> Result<Vec<u8>> {
        self.reports.recv_timeout(within).context("no report from the agent")
    }

    /// Returns the reports that have been received and not read.
    pub(crate) fn unread(&self) -> impl Iterator<Item = Vec<u8>> {
        self.reports.try_iter()
    }
}

/// Returns false when the receiver is gone. The agent retries after a broken connection.
fn answer(mut stream: TcpStream, give: &Sender<Vec<u8>>) -> bool {
    let Some(report) = body(&stream) else { return true };
    let written = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nkept\n");
    written.is_err() || give.send(report).is_ok()
}

fn body(stream: &TcpStream) -> Option<Vec<u8>> {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim().split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => length = value.parse().ok()?,
            Some(_) => {}
            None if line.trim().is_empty() => break,
            // The request line.
            None => {}
        }
    }
    let mut bytes = vec![0; Some(length).filter(|length| *length <= MAX_REPORT_BYTES)?];
    reader.read_exact(&mut bytes).ok()?;
    Some(bytes)
}
