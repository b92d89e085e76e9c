//! A report as one HTML file without scripts or external resources, light and dark, to be stored or sent as it is.
//!
//! All text from nodes, rules and people goes through [`escaped`].

use doctor_core::{
    finding::Severity,
    view::{CoverageRow, FaultRow, ReportView, ResultsRow, Slot, format_percent, format_time},
};

use super::{
    headline,
    plot::{PlotSeries, bars, escaped, legend, share},
    summary_facts, title,
};

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#5b6570;--line:#d5dae0;--page:#fff;--pass:#2e7d4f;--fail:#c0392b;\
--doubt:#b9770e;--none:#98a2ad;--work:#2f6db3}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#9aa4af;--line:#39424c;--page:#14181d;--pass:#4fb477;\
--fail:#e36a5c;--doubt:#e0a43a;--none:#6b7682;--work:#6ba4e6}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p.when{color:var(--dim);margin:.2rem 0 1rem}\
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{padding:.3rem .6rem;text-align:left;\
border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}\
th{color:var(--dim);font-weight:600}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:0}\
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere}svg{width:100%;height:auto;display:block}svg.share{width:12rem}\
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}.axis{stroke:var(--line)}.pass{fill:var(--pass)}.fail{fill:var(--fail)}\
p.legend{margin:0 0 .3rem;color:var(--dim);font-size:.85rem}p.legend svg{display:inline;width:.7rem;margin:0 .3rem 0 .8rem}\
.doubt{fill:var(--doubt)}.none{fill:var(--none)}.work{fill:var(--work)}";

pub(super) fn page(view: &ReportView) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Cluster Doctor: {0}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{1}</h1>\n\
         <p class=\"when\">{0}</p>\n",
        escaped(&title(view)),
        escaped(&headline(view)),
    );
    page.push_str("<dl>\n");
    for (name, value) in summary_facts(view) {
        page.push_str(&format!("<dt>{}</dt><dd>{}</dd>\n", escaped(name), escaped(&value)));
    }
    page.push_str("</dl>\n");
    page.push_str(&plots(&view.slots));
    page.push_str(&section("Coverage", &coverage(&view.coverage)));
    page.push_str(&section("Results", &results(&view.results)));
    page.push_str(&section("Faults found", &faults(&view.faults)));
    page.push_str("</body>\n</html>\n");
    page
}

fn section(title: &str, body: &str) -> String {
    format!("<h2>{}</h2>\n<div class=\"wide\">{body}</div>\n", escaped(title))
}

fn plots(slots: &[Slot]) -> String {
    // Without year and seconds: six labels must fit side by side.
    let short = |slot: &Slot| format_time(slot.at).chars().skip(5).take(11).collect();
    let labels: Vec<String> = slots.iter().map(short).collect();
    let row =
        |name, class, value: fn(&Slot) -> f64| PlotSeries { name, class, values: slots.iter().map(value).collect() };
    let results = [
        row("failed", "fail", |slot| f64::from(slot.fail)),
        row("inconclusive", "doubt", |slot| f64::from(slot.inconclusive)),
        row("passed", "pass", |slot| f64::from(slot.pass)),
    ];
    let cases = [
        row("opened", "fail", |slot| f64::from(slot.cases_opened)),
        row("closed", "pass", |slot| f64::from(slot.cases_closed)),
    ];
    let spent = [row("node-hours", "work", |slot| slot.node_hours)];
    [("Results over time", &results[..]), ("Cases over time", &cases[..]), ("Validation over time", &spent[..])]
        .map(|(title, rows)| section(title, &(legend(rows) + &bars(title, &labels, rows))))
        .concat()
}

/// Formats a table of escaped cells; the columns in `numbers` are numeric.
fn table(head: &[&str], numbers: std::ops::Range<usize>, rows: &[Vec<String>]) -> String {
    let class = |index: usize| if numbers.contains(&index) { " class=\"n\"" } else { "" };
    let cells = |tag: &str, cells: &[String]| {
        let cells = cells.iter().enumerate().map(|(index, cell)| format!("<{tag}{}>{cell}</{tag}>", class(index)));
        format!("<tr>{}</tr>\n", cells.collect::<String>())
    };
    let head: Vec<String> = head.iter().map(|title| escaped(title)).collect();
    let body: String = rows.iter().map(|row| cells("td", row)).collect();
    format!("<table>\n<thead>{}</thead>\n<tbody>{body}</tbody>\n</table>", cells("th", &head))
}

fn coverage(rows: &[CoverageRow]) -> String {
    let row = |row: &CoverageRow| {
        let parts = [
            ("pass", "pass", row.pass),
            ("fail", "fail", row.fail),
            ("inconclusive", "doubt", row.inconclusive),
            ("stale", "none", row.stale),
            ("never tested", "none", row.never_tested),
        ];
        let numbers = [
            row.nodes,
            row.pass,
            row.fail,
            row.inconclusive,
            row.stale,
            row.never_tested,
            row.not_applicable,
            row.not_judged,
        ];
        let mut cells = vec![escaped(row.test.as_str()), share(&parts), format_percent(row.percent)];
        cells.extend(numbers.map(|number| number.to_string()));
        cells
    };
    let head = [
        "test",
        "status",
        "covered",
        "nodes",
        "pass",
        "fail",
        "inconclusive",
        "stale",
        "never tested",
        "not applicable",
        "not judged",
    ];
    table(&head, 2..11, &rows.iter().map(row).collect::<Vec<_>>())
}

fn results(rows: &[ResultsRow]) -> String {
    if rows.is_empty() {
        return "<p>None: nothing was tested.</p>".to_owned();
    }
    let row = |row: &ResultsRow| {
        let numbers = [row.pass, row.fail, row.inconclusive, row.not_applicable, row.failing_nodes];
        let mut cells = vec![escaped(row.test.as_str())];
        cells.extend(numbers.map(|number| number.to_string()));
        cells
    };
    let head = ["test", "pass", "fail", "inconclusive", "not applicable", "nodes failing"];
    table(&head, 1..6, &rows.iter().map(row).collect::<Vec<_>>())
}

fn faults(rows: &[FaultRow]) -> String {
    if rows.is_empty() {
        return "<p>None.</p>".to_owned();
    }
    let row = |row: &FaultRow| {
        let state = if row.open { "open" } else { "closed" };
        let cells = [
            format_time(row.opened),
            row.node.to_string(),
            row.severity.to_string(),
            row.case.to_string(),
            state.to_owned(),
            row.text.clone(),
        ];
        cells.iter().map(|cell| escaped(cell)).collect()
    };
    let head = ["opened (UTC)", "node", "severity", "case", "now", "what"];
    let faults = table(&head, 0..0, &rows.iter().map(row).collect::<Vec<Vec<_>>>());
    let severities = Severity::legend(rows.iter().map(|row| row.severity)).unwrap_or_default();
    format!("{faults}\n<p class=\"legend\">{}</p>", escaped(&severities))
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        ids::{CaseId, NodeName},
        time::Timestamp,
    };

    use super::*;

    fn view(text: &str) -> ReportView {
        let (since, until) = (Timestamp::from_secs(0), Timestamp::from_secs(86_400));
        let fault = FaultRow {
            case: CaseId::from_number(7),
            node: NodeName::new("n1").unwrap(),
            opened: since,
            severity: Severity::Isolate,
            text: text.to_owned(),
            open: true,
        };
        let slot =
            Slot { at: since, pass: 3, fail: 1, inconclusive: 0, cases_opened: 1, cases_closed: 0, node_hours: 0.5 };
        ReportView {
            since,
            until,
            nodes: 1,
            queued: 1,
            run: 1,
            completed: 1,
            incomplete: Vec::new(),
            not_started: Vec::new(),
            skipped: Vec::new(),
            results: Vec::new(),
            busy: 0,
            unknown: 0,
            overdue: Vec::new(),
            coverage: Vec::new(),
            faults: vec![fault],
            open_findings: 1,
            cases_opened: 1,
            cases_closed: 0,
            cases_open: 1,
            node_hours: 0.5,
            node_hours_per_fault: Some(0.5),
            slots: vec![slot],
        }
    }

    #[test]
    fn text_from_nodes_is_escaped_and_the_page_loads_nothing() {
        let hostile = "</td><script>alert(1)</script><img src=x onerror=alert(1)>\"'&";
        let page = page(&view(hostile));
        for part in ["<script", "<img", "onerror=alert(1)>", "http://", "https://", "src=\""] {
            assert!(!page.contains(part), "{part} in {page}");
        }
        assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{page}");
        assert!(page.contains("isolate: keep the node out of service until repaired"), "{page}");
        // Every opened tag is closed.
        for tag in ["table", "tr", "td", "div", "svg", "dl", "body", "html"] {
            let (opened, closed) =
                (page.matches(&format!("<{tag}")).count(), page.matches(&format!("</{tag}>")).count());
            assert_eq!(opened, closed, "{tag}");
        }
    }
}
