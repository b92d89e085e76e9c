//! Runs: the list, the result of each, its logs and its evidence.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
};

use doctor_core::{
    ids::{NodeName, RunId, TestId},
    last_output::LastOutput,
    run::{RunEnd, RunState},
    view::{self, OutcomeView, RunFacts, RunView},
};
use doctor_engine::{
    redact::{REMOVED, redact_after, redact_json, replace_control_chars, unescape},
    share::{Share, ShareError},
};
use doctor_store::records::RunRecord;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    endpoint::{JSON, Page, RequestContext, Route},
    error::ApiError,
    nodes::{CURSOR, LIMIT, NODE},
    params::{Param, ParamSyntax},
    response_cache::CachePolicy,
    schema::{count, duration, flag, list, merged, object, one_of, or_null, page, purpose, text, timestamp, verdict},
};
use crate::response::RawBody;

const RUN: Param = Param::new("run", "a run's id", ParamSyntax::Name);

pub(super) const LIST: Route = Route {
    path: "/runs",
    name: "runs",
    summary: "Runs, newest first",
    description: "Test runs on nodes, from planned to ended. With `node`: its active runs and those with a result.",
    params: &[NODE, LIMIT, CURSOR],
    cache_policy: CachePolicy::Briefly,
    response_schema: || page(run_view()),
    content_type: JSON,
    handler: list_runs,
};

pub(super) const ONE: Route = Route {
    path: "/runs/{run}",
    name: "run",
    summary: "One run and its results",
    description: "`last_output`: for a run that ended without a complete result, the end of what its job printed on each node, and \
            how the cluster says it ended. At most 8 KiB for each node, without secrets and control characters.",
    params: &[RUN],
    cache_policy: CachePolicy::Briefly,
    response_schema: one_schema,
    content_type: JSON,
    handler: one_run,
};

pub(super) const LOG: Route = Route {
    path: "/runs/{run}/log",
    name: "runLog",
    summary: "The log of a test of a run",
    description: "At most 256 KiB, in whole lines: an `offset` within a line returns that line from its start. To follow a run, repeat \
            with `offset` = `next_offset` until `ended`. `ending` says how the job of a run without a complete result ended; if there is \
            no log, `text` is the last output of that job. Apparent secrets are redacted and control characters replaced, because \
            nodes are not trusted.",
    params: &[
        RUN,
        NODE,
        Param::new("test", "of this test; default: the first of the run", ParamSyntax::Name),
        Param::new("offset", "start at this byte", ParamSyntax::Offset),
        Param::new(
            "tail",
            "only this many bytes from the end",
            ParamSyntax::Count { most: MAX_LOG_BYTES as u32, usual: 65_536 },
        ),
    ],
    cache_policy: CachePolicy::Briefly,
    response_schema: log_schema,
    content_type: JSON,
    handler: log,
};

pub(super) const EVIDENCE: Route = Route {
    path: "/runs/{run}/evidence/{node}",
    name: "runEvidence",
    summary: "The raw evidence behind a result",
    description: "The run's observations on the node, as they were classified, for download. Without the signature; apparent secrets are \
            replaced by `[removed]`: values of names such as token, password, secret or api_key, Authorization headers, user parts \
            of URLs, well-known forms of credentials, private keys.",
    params: &[RUN, NODE],
    cache_policy: CachePolicy::Briefly,
    response_schema: || json!({ "type": "object" }),
    content_type: JSON,
    handler: evidence,
};

/// Maximum log bytes in one response.
const MAX_LOG_BYTES: u64 = 256 << 10;
/// How far before a part of a log to look for the start of its line and of a private key: no key is longer.
const REDACTION_CONTEXT: u64 = 64 << 10;

fn list_runs(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (params, limit) = (context.params, context.page_size());
    let (before, node): (Option<RunId>, Option<NodeName>) = (params.get("cursor")?, params.get("node")?);
    let rows = context.store.runs_before(before, limit + 1, node.as_ref())?;
    let rows: Vec<RunView> = rows.into_iter().map(|record| view::run_view(&run_facts(record))).collect();
    RawBody::json(&Page::from_rows(rows, limit, |row| row.run.to_string()))
}

fn run_facts(record: RunRecord) -> RunFacts {
    RunFacts { run: record.run, started: record.started, ended: record.ended }
}

fn find_run(context: &RequestContext<'_>) -> Result<RunRecord, ApiError> {
    let run: RunId = context.params.path_segment("run")?;
    let known = "GET /api/v1/runs lists them".to_owned();
    context.store.run(run)?.ok_or_else(|| ApiError::UnknownName { what: "run", name: run.to_string(), known })
}

#[derive(Debug, Serialize)]
struct RunDetails {
    #[serde(flatten)]
    run: RunView,
    outcomes: Vec<OutcomeView>,
    last_output: Vec<LastOutput>,
}

fn one_run(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let record = find_run(context)?;
    let last_output = last_output(context, &record)?;
    let facts = run_facts(record);
    RawBody::json(&RunDetails { run: view::run_view(&facts), outcomes: view::outcomes(&facts), last_output })
}

/// Returns the last output of the job of a run without a complete result. It was cleaned before it was stored.
fn last_output(context: &RequestContext<'_>, record: &RunRecord) -> Result<Vec<LastOutput>, ApiError> {
    match &record.run.state {
        RunState::Planned | RunState::Ended(RunEnd::Incomplete { .. } | RunEnd::NotStarted(_)) => {
            Ok(context.store.job_output(record.run.id)?)
        }
        RunState::Submitted { .. } | RunState::Running { .. } | RunState::Ended(RunEnd::Completed(_)) => Ok(Vec::new()),
    }
}

#[derive(Debug, Serialize)]
struct LogResponse {
    run: RunId,
    node: NodeName,
    test: TestId,
    /// Current size of the log.
    size: u64,
    offset: u64,
    next_offset: u64,
    /// Nothing will be appended.
    ended: bool,
    text: String,
    /// How the job of a run without a complete result ended.
    ending: Option<String>,
}

fn log(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let record = find_run(context)?;
    let run = &record.run;
    let node = pick_from_run(context.params.get("node")?, &run.nodes, "node")?;
    let test = pick_from_run(context.params.get("test")?, &run.tests, "test")?;
    // Read before the log, so that everything written before the end is in it.
    let ended = matches!(run.state, RunState::Ended(_));
    let job = last_output(context, &record)?.into_iter().find(|output| output.node == node);
    let (job_text, ending) = job.map_or((String::new(), None), |output| (output.text, output.ending));
    let file = match &context.state.share {
        Some(share) => open_log(share, Share::log_path(&test, &node, run.planned)).map_err(|error| {
            tracing::warn!(%error, run = %run.id, "cannot read a log");
            ApiError::StoreUnavailable
        })?,
        None if job_text.is_empty() && ending.is_none() => return Err(ApiError::Gone),
        None => None,
    };
    let (offset, tail): (Option<u64>, Option<u64>) = (context.params.get("offset")?, context.params.get("tail")?);
    let Some(file) = file else {
        // Not written yet, deleted by retention, or the job died before its test.
        let (run, size) = (run.id, job_text.len() as u64);
        let text = if offset == Some(size) { String::new() } else { job_text };
        return RawBody::json(&LogResponse {
            run,
            node,
            test,
            size,
            offset: 0,
            next_offset: size,
            ended,
            text,
            ending,
        });
    };
    let part = read_slice(file, offset, tail, ended).map_err(|error| {
        tracing::warn!(%error, run = %run.id, "cannot read a log");
        ApiError::StoreUnavailable
    })?;
    RawBody::json(&LogResponse {
        run: run.id,
        node,
        test,
        size: part.size,
        offset: part.start,
        next_offset: part.next,
        ended: ended && part.next >= part.size,
        text: part.redacted_text(),
        ending,
    })
}

/// Opens a log. `None`: it does not exist, or a node put something else in its place.
fn open_log(share: &Share, path: PathBuf) -> Result<Option<File>, ShareError> {
    match share.read("reading a log", move |files| files.open_log(&path))? {
        Err(error) if error.is_wrong_kind() => {
            tracing::warn!(%error, "no log");
            Ok(None)
        }
        opened => opened,
    }
}

/// Returns the named one, if the run has it; by default the first.
fn pick_from_run<T: Clone + PartialEq + ToString>(
    named: Option<T>,
    all: &[T],
    what: &'static str,
) -> Result<T, ApiError> {
    match named {
        Some(one) if all.contains(&one) => Ok(one),
        Some(one) => {
            let known = all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            Err(ApiError::UnknownName { what, name: one.to_string(), known })
        }
        None => all.first().cloned().ok_or(ApiError::Gone),
    }
}

/// A part of a log. Redaction needs whole lines and the first line of a key, so neither is separated from what follows.
#[derive(Debug)]
struct LogSlice {
    /// Size of the whole log.
    size: u64,
    start: u64,
    next: u64,
    /// The preceding bytes, as far as they were read.
    before: Vec<u8>,
    bytes: Vec<u8>,
}

impl LogSlice {
    fn redacted_text(&self) -> String {
        replace_control_chars(&redact_after(
            &String::from_utf8_lossy(&self.before),
            &String::from_utf8_lossy(&self.bytes),
        ))
    }
}

/// Reads a part of a log that starts and ends with whole lines. Of a line longer than [`REDACTION_CONTEXT`], only the start is
/// shown.
fn read_slice(mut file: File, offset: Option<u64>, tail: Option<u64>, ended: bool) -> std::io::Result<LogSlice> {
    let size = file.metadata()?.len();
    let from = match (offset, tail) {
        (Some(offset), _) => offset.min(size),
        (None, Some(tail)) => size.saturating_sub(tail),
        (None, None) => 0,
    };
    let window = from.saturating_sub(REDACTION_CONTEXT);
    file.seek(SeekFrom::Start(window))?;
    let mut bytes = Vec::new();
    file.take(from - window + MAX_LOG_BYTES).read_to_end(&mut bytes)?;
    let read = window + bytes.len() as u64;
    let from_index = usize::try_from(from - window).unwrap_or(usize::MAX).min(bytes.len());
    let line = bytes[..from_index].iter().rposition(|byte| *byte == b'\n').map(|index| index + 1);
    let line = line.or((from < REDACTION_CONTEXT).then_some(0));
    let next_line = bytes[from_index..].iter().position(|byte| *byte == b'\n').map(|index| from_index + index + 1);
    let begin = match (line, next_line) {
        _ if from == size => from_index,
        (Some(line), _) if line == from_index => line,
        (line, Some(next)) if offset.is_none() || line.is_none() => next,
        (Some(line), _) => line,
        (None, _) => {
            let bytes = REMOVED.as_bytes().to_vec();
            return Ok(LogSlice { size, start: from, next: read, before: Vec::new(), bytes });
        }
    };
    let mut part = bytes.split_off(begin);
    let complete = (part.len() as u64) < MAX_LOG_BYTES;
    part.truncate(MAX_LOG_BYTES as usize);
    // An incomplete line is sent when it ends. A line that never ends is not waited for.
    if !(ended && complete) {
        match part.iter().rposition(|byte| *byte == b'\n') {
            Some(index) => part.truncate(index + 1),
            None if complete && (part.len() as u64) < REDACTION_CONTEXT => part.clear(),
            None => {}
        }
    }
    let start = window + begin as u64;
    Ok(LogSlice { size, start, next: start + part.len() as u64, before: bytes, bytes: part })
}

fn evidence(context: &RequestContext<'_>) -> Result<RawBody, ApiError> {
    let (run, node): (RunId, NodeName) = (context.params.path_segment("run")?, context.params.path_segment("node")?);
    let stored = context.store.evidence(run, &node)?;
    let known = "evidence is stored for `retention.evidence`".to_owned();
    let name = format!("{run} on {node}");
    let stored = stored.ok_or(ApiError::UnknownName { what: "evidence", name, known })?;
    // The first line is the signature.
    let body = stored.bytes.iter().position(|byte| *byte == b'\n').map_or(&[][..], |index| &stored.bytes[index + 1..]);
    let mut document: Value = match serde_json::from_slice(body) {
        Ok(document) => document,
        // A truncated document is not valid JSON.
        Err(_) => json!({ "cut": true, "text": unescape(&String::from_utf8_lossy(body)) }),
    };
    redact_json(&mut document);
    let response = RawBody::json(&document)?;
    Ok(RawBody { file_name: Some(format!("{run}_{node}.json")), ..response })
}

fn run_view() -> Value {
    object(json!({
        "run": text(),
        "nodes": list(text()),
        "tests": list(text()),
        "state": one_of(&["planned", "pending", "running", "completed", "incomplete", "not-started"]),
        "end": or_null(text()),
        "purpose": purpose(),
        "code": text(),
        "because": text(),
        "case": or_null(text()),
        "planned": timestamp(),
        "started": or_null(timestamp()),
        "ended": or_null(timestamp()),
        "limit": duration(),
    }))
}

fn one_schema() -> Value {
    let outcome = object(json!({
        "node": text(), "test": text(), "verdict": verdict(), "reason": text(), "at": timestamp(), "duration": duration(),
    }));
    let output = object(json!({ "node": text(), "ending": or_null(text()), "text": text() }));
    merged(&[run_view(), object(json!({ "outcomes": list(outcome), "last_output": list(output) }))])
}

fn log_schema() -> Value {
    object(json!({
        "run": text(), "node": text(), "test": text(), "size": count(), "offset": count(), "next_offset": count(),
        "ended": flag(), "text": text(), "ending": or_null(text()),
    }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_log_slice_starts_and_ends_at_line_boundaries() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"one\ntwo\nthree").unwrap();
        let part = |offset, tail| {
            let part = read_slice(file.try_clone().unwrap(), offset, tail, false).unwrap();
            assert_eq!(part.size, 13);
            (part.start, String::from_utf8(part.bytes).unwrap())
        };
        assert_eq!(part(None, None), (0, "one\ntwo\n".to_owned()));
        assert_eq!(part(Some(4), None), (4, "two\n".to_owned()));
        assert_eq!(part(Some(8), None), (8, String::new()), "an incomplete line is not sent");
        assert_eq!(part(None, Some(7)), (8, String::new()));
        assert_eq!(part(None, Some(10)), (4, "two\n".to_owned()));
        assert_eq!(part(Some(99), None), (13, String::new()));
        assert_eq!(part(Some(5), None), (4, "two\n".to_owned()), "from the start of its line");
        let rest = read_slice(file.try_clone().unwrap(), Some(8), None, true).unwrap();
        assert_eq!(rest.bytes, b"three", "the log of an ended run is complete");
    }

    #[test]
    fn no_offset_or_tail_separates_a_secret_from_the_text_that_identifies_it() {
        let mut file = tempfile::tempfile().unwrap();
        let key = "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\nhunter2\n-----END OPENSSH PRIVATE KEY-----\n";
        let text = format!("a\nHF_TOKEN=hf_hunter2\nb\n{key}c\nPASSWORD=hunter2");
        file.write_all(text.as_bytes()).unwrap();
        for position in 0..=text.len() as u64 {
            for ended in [false, true] {
                for (offset, tail) in [(Some(position), None), (None, Some(position))] {
                    let part = read_slice(file.try_clone().unwrap(), offset, tail, ended).unwrap();
                    let redacted = part.redacted_text();
                    assert!(!redacted.contains("er2"), "{offset:?} {tail:?}: {redacted}");
                    assert!(part.next >= part.start && part.next <= part.size, "{part:?}");
                }
            }
        }
        let all = read_slice(file.try_clone().unwrap(), None, None, true).unwrap().redacted_text();
        assert_eq!(all, "a\nHF_TOKEN=[removed]\nb\n[removed]\nc\nPASSWORD=[removed]");
    }

    #[test]
    fn only_the_start_of_an_overlong_line_is_shown_and_reading_continues_after_it() {
        let mut file = tempfile::tempfile().unwrap();
        let line = format!("{} TOKEN={}\nend\n", "x".repeat(300 << 10), "hunter2".repeat(20 << 10));
        file.write_all(line.as_bytes()).unwrap();
        let (mut at, mut output) = (0, String::new());
        while at < line.len() as u64 {
            let part = read_slice(file.try_clone().unwrap(), Some(at), None, false).unwrap();
            assert!(part.next > at, "it goes on: {at}");
            at = part.next;
            output += &part.redacted_text();
        }
        assert!(output.starts_with("xxx") && output.ends_with("end\n") && !output.contains("hunter2"));
    }
}
