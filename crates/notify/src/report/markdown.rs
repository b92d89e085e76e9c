//! A report as Markdown, for a chat, a mail or a repository.

use doctor_core::{
    finding::Severity,
    view::{ReportView, format_percent, format_time},
};

use super::{headline, summary_facts, title};

/// Escapes characters that would end a table cell or be read as markup.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}

pub(super) fn page(view: &ReportView) -> String {
    let mut text = format!("# Cluster Doctor: {}\n\n{}\n\n", title(view), headline(view));
    text.push_str("| | |\n|---|---|\n");
    for (name, value) in summary_facts(view) {
        text.push_str(&format!("| {name} | {} |\n", escaped(&value)));
    }
    text.push_str("\n## Results\n\n| test | pass | fail | inconclusive | not applicable | nodes failing |\n|---|--:|--:|--:|--:|--:|\n");
    for row in &view.results {
        let (pass, fail, inconclusive) = (row.pass, row.fail, row.inconclusive);
        text.push_str(&format!(
            "| {} | {pass} | {fail} | {inconclusive} | {} | {} |\n",
            row.test, row.not_applicable, row.failing_nodes
        ));
    }
    text.push_str("\n## Coverage\n\n| test | covered | nodes | pass | fail | inconclusive | stale | never tested | not applicable | not judged |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    for row in &view.coverage {
        text.push_str(&format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            row.test,
            format_percent(row.percent),
            row.nodes,
            row.pass,
            row.fail,
            row.inconclusive,
            row.stale,
            row.never_tested,
            row.not_applicable,
            row.not_judged
        ));
    }
    if !view.faults.is_empty() {
        text.push_str(
            "\n## Faults found\n\n| opened (UTC) | node | severity | case | now | what |\n|---|---|---|---|---|---|\n",
        );
        for fault in &view.faults {
            let now = if fault.open { "open" } else { "closed" };
            let what = escaped(&fault.text);
            text.push_str(&format!(
                "| {} | {} | {} | {} | {now} | {what} |\n",
                format_time(fault.opened),
                fault.node,
                fault.severity,
                fault.case
            ));
        }
        if let Some(severities) = Severity::legend(view.faults.iter().map(|fault| fault.severity)) {
            text.push_str(&format!("\n{severities}\n"));
        }
    }
    text
}
