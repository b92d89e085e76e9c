//! Formats answers as a table for people and as rows for programs.

use std::{collections::BTreeMap, fmt::Write as _};

use doctor_core::{
    classify::is_not_judged,
    finding::{Severity, Verdict},
    ids::{CheckId, RuleId},
    observation::Entity,
    reason::ReasonCode,
    time::Span,
};
use serde::Serialize;

use super::CheckResult;

/// One finding, or one check without findings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row<'a> {
    check: &'a CheckId,
    entity: Entity,
    verdict: Verdict,
    severity: Option<Severity>,
    reason: &'a ReasonCode,
    text: &'a str,
    rule: Option<&'a RuleId>,
}

/// Flattens answers in the order of checks, the worst finding of each check first.
pub fn rows(results: &[CheckResult]) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for result in results {
        if result.findings.is_empty() {
            rows.push(Row {
                check: &result.check,
                entity: Entity::node(),
                verdict: result.verdict,
                severity: None,
                reason: &result.reason,
                text: &result.text,
                rule: None,
            });
        }
        rows.extend(result.findings.iter().map(|finding| Row {
            check: &result.check,
            entity: finding.entity.clone(),
            verdict: finding.verdict,
            severity: Some(finding.severity),
            reason: &finding.reason,
            text: &finding.text,
            rule: Some(&finding.rule),
        }));
    }
    rows
}

/// Renders a table: failures by severity, then inconclusive, then passed checks, then the meaning of the severities.
/// Checks that do not apply are grouped by reason, or listed one per line with `every_line`; those without any expected
/// value come last, as not judged.
pub fn table(results: &[CheckResult], every_line: bool) -> String {
    let rows = rows(results);
    let rows_with = |verdict: Verdict| rows.iter().filter(move |row| row.verdict == verdict);
    let width = rows.iter().map(|row| row.check.as_str().len()).max().unwrap_or(0).max("CHECK".len());
    let mut out = format!("{:width$}  {:14}  {:8}  WHY\n", "CHECK", "VERDICT", "SEVERITY");
    let mut failing: Vec<_> = rows_with(Verdict::Fail).collect();
    failing.sort_by_key(|row| std::cmp::Reverse(row.severity));
    let listed = if every_line { vec![Verdict::NotApplicable] } else { Vec::new() };
    let rest = [Verdict::Inconclusive, Verdict::Pass].into_iter().chain(listed).flat_map(rows_with);
    let mut severities = Vec::new();
    for row in failing.into_iter().chain(rest) {
        severities.extend(row.severity);
        let severity = row.severity.map_or("-", Severity::code);
        let Row { check, verdict, reason, text, .. } = row;
        let _infallible = writeln!(out, "{check:width$}  {verdict:14}  {severity:8}  {reason}: {text}");
    }
    if let Some(legend) = Severity::legend(severities) {
        let _infallible = writeln!(out, "\n{legend}");
    }
    if !every_line {
        out.push_str(&not_applicable(rows_with(Verdict::NotApplicable)));
    }
    out.push_str(&summary(results));
    out
}

fn not_applicable<'a>(rows: impl Iterator<Item = &'a Row<'a>>) -> String {
    let mut by_reason: BTreeMap<(&str, &str, &str), Vec<&str>> = BTreeMap::new();
    for row in rows {
        let heading = if is_not_judged(row.reason) { "not judged" } else { "not applicable" };
        by_reason.entry((heading, row.reason.as_str(), row.text)).or_default().push(row.check.as_str());
    }
    let mut out = String::new();
    for ((heading, reason, text), checks) in by_reason {
        let _infallible = write!(out, "\n{heading}, {reason}: {text}\n");
        for line in wrapped(&checks) {
            let _infallible = writeln!(out, "  {line}");
        }
    }
    out
}

fn wrapped(items: &[&str]) -> Vec<String> {
    const WIDTH: usize = 110;
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        match lines.last_mut() {
            Some(line) if line.len() + item.len() + 2 <= WIDTH => {
                line.push_str(", ");
                line.push_str(item);
            }
            _ => lines.push((*item).to_owned()),
        }
    }
    lines
}

/// Returns one line with the counts per verdict and the total time.
pub fn summary(results: &[CheckResult]) -> String {
    let count = |verdict: Verdict| results.iter().filter(|result| result.verdict == verdict).count();
    let does_not_apply = |result: &&CheckResult| result.verdict == Verdict::NotApplicable;
    let not_judged = results.iter().filter(does_not_apply).filter(|result| is_not_judged(&result.reason)).count();
    let elapsed =
        results.iter().fold(Span::ZERO, |sum, result| Span::from_millis(sum.millis() + result.duration.millis()));
    format!(
        "\n{} {}: {} fail, {} inconclusive, {} pass, {} not applicable{}; {elapsed}\n",
        results.len(),
        if results.len() == 1 { "check" } else { "checks" },
        count(Verdict::Fail),
        count(Verdict::Inconclusive),
        count(Verdict::Pass),
        count(Verdict::NotApplicable) - not_judged,
        if not_judged == 0 { String::new() } else { format!(", {not_judged} not judged") },
    )
}
