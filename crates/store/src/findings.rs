//! Findings open against nodes, and how a new result of a check changes them.

use std::collections::BTreeMap;

use doctor_core::{
    finding::{Evidence, Finding, OpenFinding, Severity, Verdict},
    ids::RunId,
    time::Timestamp,
};

use super::{
    audit::NewAuditLine,
    db::{ColumnType, Tx, vals},
    error::Result,
    json,
};

/// Entity and rule identify a finding.
type Key = (String, String);

/// Open findings, by node and check.
#[derive(Debug, Default)]
pub(super) struct OpenFindings {
    by_check: BTreeMap<(i64, i64), BTreeMap<Key, OpenFinding>>,
}

/// The current result of a check.
#[derive(Debug, Clone, Copy)]
pub(super) struct CheckFindings<'a> {
    pub(super) node: i64,
    pub(super) check: i64,
    pub(super) run: Option<RunId>,
    pub(super) at: Timestamp,
    pub(super) findings: &'a [Finding],
    /// Whether the result is a pass or a fail. An inconclusive one clears nothing.
    pub(super) is_conclusive: bool,
    /// Whether this is a requalification run: a finding that it does not show is cleared.
    pub(super) is_requalification: bool,
    /// Boot during which the check ran.
    pub(super) boot: Option<&'a str>,
}

impl CheckFindings<'_> {
    /// Whether a finding that this result does not show again is cleared. An event that has left the kernel log still
    /// happened: log rotation heals no node. A requalification run clears it, an operator does, and a reboot does where
    /// a reboot is the remedy.
    fn clears(&self, finding: &Finding) -> bool {
        if !self.is_conclusive {
            return false;
        }
        match &finding.evidence {
            Evidence::Event { known_by: Some((_, key)), .. } if finding.severity > Severity::Monitor => {
                let booted = self.boot.is_some_and(|boot| boot != key.boot);
                self.is_requalification || (booted && finding.severity <= Severity::Reboot)
            }
            _ => true,
        }
    }
}

/// Changes to write, collected over a batch.
#[derive(Debug, Default)]
pub(super) struct FindingChanges {
    rows: BTreeMap<(i64, i64, Key), Option<OpenFinding>>,
    /// Audit lines for new and cleared findings.
    pub(super) audit_lines: Vec<NewAuditLine>,
}

impl OpenFindings {
    pub(super) fn load(tx: &mut Tx<'_>, nodes: &[i64]) -> Result<Self> {
        let mut open = Self::default();
        let sql = "SELECT node, test, entity, rule, body FROM finding WHERE node IN {keys}";
        tx.rows_by_key("reading findings", sql, nodes, |row| {
            let key = (row.text(2)?.to_owned(), row.text(3)?.to_owned());
            let finding = json::read("finding", row.text(4)?)?;
            open.by_check.entry((row.int(0)?, row.int(1)?)).or_default().insert(key, finding);
            Ok(())
        })?;
        Ok(open)
    }

    /// Applies a result of a check: opens or renews the findings it shows and, if it is conclusive, clears the others.
    pub(super) fn apply(&mut self, reported: &CheckFindings<'_>, changes: &mut FindingChanges) {
        let check = (reported.node, reported.check);
        let failing: BTreeMap<Key, &Finding> = reported
            .findings
            .iter()
            .rev()
            .filter(|finding| finding.verdict == Verdict::Fail)
            .map(|finding| ((finding.entity.to_string(), finding.rule.to_string()), finding))
            .collect();
        if failing.is_empty() && !self.by_check.contains_key(&check) {
            return;
        }
        let open = self.by_check.entry(check).or_default();
        let removed = open.iter().filter(|(key, open)| !failing.contains_key(*key) && reported.clears(&open.finding));
        let removed: Vec<Key> = removed.map(|(key, _)| key.clone()).collect();
        for key in removed {
            if let Some(cleared) = open.remove(&key) {
                changes.audit_lines.push(line("finding-cleared", reported, &cleared.finding));
            }
            changes.rows.insert((reported.node, reported.check, key), None);
        }
        for (key, finding) in failing {
            let known = open.get(&key);
            if known.is_none() {
                changes.audit_lines.push(line("finding-opened", reported, finding));
            }
            let now = OpenFinding {
                finding: finding.clone(),
                run: reported.run,
                first_seen: known.map_or(reported.at, |known| known.first_seen),
                last_seen: reported.at,
                sightings: known.map_or(0, |known| known.sightings).saturating_add(1),
            };
            changes.rows.insert((reported.node, reported.check, key.clone()), Some(now.clone()));
            open.insert(key, now);
        }
    }
}

fn line(what: &'static str, reported: &CheckFindings<'_>, finding: &Finding) -> NewAuditLine {
    NewAuditLine {
        at: Some(reported.at),
        action: what,
        node: Some(reported.node),
        run: reported.run,
        code: finding.reason.as_str().to_owned(),
        text: format!("{}: {}: {}", finding.check, finding.entity, finding.text),
        ..NewAuditLine::default()
    }
}

impl FindingChanges {
    pub(super) fn write(&self, tx: &mut Tx<'_>) -> Result<()> {
        use ColumnType::{Int, Text};
        let mut bodies = Vec::new();
        for finding in self.rows.values() {
            bodies.push(finding.as_ref().map(json::write).transpose()?);
        }
        let (mut puts, mut deletes) = (Vec::new(), Vec::new());
        for (((node, check, (entity, rule)), finding), body) in self.rows.iter().zip(&bodies) {
            match (finding, body) {
                (Some(finding), Some(body)) => {
                    puts.extend_from_slice(vals![*node, *check, entity, rule, finding.run, body]);
                }
                _ => deletes.extend_from_slice(vals![*node, *check, entity, rule]),
            }
        }
        let into = "finding (node, test, entity, rule, run, body)";
        let conflict = "ON CONFLICT (node, test, entity, rule) DO UPDATE SET run = excluded.run, body = excluded.body";
        tx.insert_many("writing findings", into, &[Int, Int, Text, Text, Int, Text], &puts, conflict)?;
        let sqlite = "DELETE FROM finding WHERE node = $1 AND test = $2 AND entity = $3 AND rule = $4";
        let postgres = "DELETE FROM finding f USING UNNEST($1::int8[], $2::int8[], $3::text[], $4::text[]) \
                        AS d (node, test, entity, rule) WHERE f.node = d.node AND f.test = d.test \
                        AND f.entity = d.entity AND f.rule = d.rule";
        tx.execute_each("clearing findings", (sqlite, postgres), &[Int, Int, Text, Text], &deletes)
    }
}

/// Returns the findings open against one node, in a fixed order.
pub(super) fn open_findings(tx: &mut Tx<'_>, node: i64) -> Result<Vec<OpenFinding>> {
    let sql = "SELECT body FROM finding WHERE node = $1 ORDER BY test, entity, rule";
    tx.all("reading findings", sql, vals![node], |row| json::read("finding", row.text(0)?))
}
