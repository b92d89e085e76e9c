//! Explains NVIDIA's error numbers: `doctor explain xid 79`, `sxid 12028`, `dcgm 30`.

use doctor_checks::tables::{self, Class, DcgmError, Sxid, Table, Variant, Xid};
use doctor_core::{finding::Severity, policy::Rule};
use serde::Serialize;

use super::show_rule;
use crate::{
    failure::{Failure, Result},
    output::Page,
};

/// A row of an error table, with its source and the rules in force for it.
#[derive(Debug, Serialize)]
pub(super) struct ErrorNumber<'a> {
    #[serde(flatten)]
    row: TableRow,
    source: &'static str,
    table: &'static str,
    variants: Vec<&'static Variant>,
    rules: Vec<&'a Rule>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum TableRow {
    Xid(&'static Xid),
    Sxid(&'static Sxid),
    Dcgm(&'static DcgmError),
}

/// The families of numbers, as named on the command line.
pub(super) const FAMILIES: [&str; 3] = ["xid", "sxid", "dcgm"];

/// Splits a word in lower case such as `xid79`, `xid-79`, `sxid:12028` or `79` into the family and the number. A number
/// alone is an Xid if there is such an Xid, or else an SXid. `None`: it is something else.
pub(super) fn split(word: &str) -> Option<(&'static str, &str)> {
    // `sxid` ends in `xid`, so the order does not matter: only the beginning is compared.
    for family in FAMILIES {
        if let Some(rest) = word.strip_prefix(family) {
            let number = rest.trim_start_matches(['-', '_', ':', '=', ' ', '#']);
            return is_number(number).then_some((family, number));
        }
    }
    let is_xid = word.parse().is_ok_and(|number| tables::xid(number).is_some());
    is_number(word).then_some((if is_xid { "xid" } else { "sxid" }, word))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Explains a number. `rules` are those in force, including the site's.
pub(super) fn explain<'a>(family: &str, number: &str, rules: &'a [Rule]) -> Result<ErrorNumber<'a>> {
    let n = number.parse::<u32>().ok();
    let unknown = |what, known: &str| Failure::Unknown { what, name: number.to_owned(), known: known.to_owned() };
    match family {
        "xid" => {
            let row = n.and_then(|n| tables::xid(u16::try_from(n).ok()?));
            let row = row.ok_or_else(|| unknown("Xid", "1 to 172; any other is classified as `xid-other`"))?;
            Ok(from_table(TableRow::Xid(row), "gpu-xid", &format!("xid-{}", row.n), &tables::XIDS, rules))
        }
        "sxid" => {
            let row = n.and_then(tables::sxid);
            let known =
                "93 from 10001 to 24007; any other is classified by its record, as `sxid-fatal` or `sxid-nonfatal`";
            let row = row.ok_or_else(|| unknown("SXid", known))?;
            Ok(from_table(TableRow::Sxid(row), "nvswitch-sxid", &format!("sxid-{}", row.n), &tables::SXIDS, rules))
        }
        _ => {
            let row = n.and_then(tables::dcgm_error);
            let known = "0 to 132; any other is classified by the severity that DCGM reports";
            let row = row.ok_or_else(|| unknown("DCGM error", known))?;
            Ok(from_table(TableRow::Dcgm(row), "dcgm", &format!("dcgm-{}", row.n), &tables::DCGM, rules))
        }
    }
}

fn from_table<'a, T>(
    row: TableRow,
    check: &str,
    code: &str,
    table: &'static Table<T>,
    rules: &'a [Rule],
) -> ErrorNumber<'a> {
    // Matches `xid-64` and `xid-64-reboot`, but not `xid-640`.
    let is_about =
        |reason: &str| reason.strip_prefix(code).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    ErrorNumber {
        row,
        source: &table.source,
        table: &table.version,
        variants: table.variants.iter().filter(|variant| is_about(variant.code.as_str())).collect(),
        rules: rules.iter().filter(|rule| rule.check.as_str() == check && is_about(rule.reason.as_str())).collect(),
    }
}

pub(super) fn text(page: &mut Page, number: &ErrorNumber<'_>) {
    match &number.row {
        TableRow::Xid(xid) => print_xid(page, xid),
        TableRow::Sxid(sxid) => print_sxid(page, sxid),
        TableRow::Dcgm(error) => print_dcgm(page, error),
    }
    for variant in &number.variants {
        page.field("Or", format!("{} ({}): {}", variant.code, variant.severity, variant.description));
    }
    page.field("Source", format!("{} (table version {})", number.source, number.table));
    page.heading("Rules");
    if number.rules.is_empty() {
        page.line("  none: it is only counted, or no check reports it");
    }
    for rule in &number.rules {
        show_rule(page, rule);
    }
    let of_variants = number.variants.iter().map(|variant| variant.severity);
    page.legend(number.rules.iter().map(|rule| rule.severity).chain(of_variants));
}

fn print_xid(page: &mut Page, xid: &Xid) {
    page.line(format!("Xid {}: {}.", xid.n, xid.description));
    page.field("Name", &xid.name);
    page.field("Found on", architectures(&xid.arch));
    page.field("NVIDIA now", action(&xid.immediate_action));
    page.field("NVIDIA later", action(&xid.investigation_action));
    if !xid.linked.is_empty() {
        let since = if xid.linked == "always" {
            "in every driver that has it".to_owned()
        } else {
            format!("from driver {}", xid.linked)
        };
        page.field("Xid 154", format!("follows it with the driver's recovery action, {since}"));
    }
    page.field("Ours", severity(xid.severity));
    page.field("Others", &xid.peers);
    if !xid.note.is_empty() {
        page.field("Note", &xid.note);
    }
    page.field("What to do", xid_remedy(xid));
}

fn print_sxid(page: &mut Page, sxid: &Sxid) {
    page.line(format!("SXid {}: {}.", sxid.n, sxid.description));
    page.field("NVIDIA", sxid.fatal.word());
    page.field("Ours", severity(sxid.severity));
    page.field(
        "Others",
        format!("gpud {}; NVSentinel uses the record's own severity; AWS warns; DCGM isolates (error 109)", sxid.gpud),
    );
    if !sxid.note.is_empty() {
        page.field("Note", &sxid.note);
    }
    let steps = match sxid.severity {
        Some(Severity::Reboot) => {
            "drain and reboot the node. If the same number recurs on the same port, hand the node over: a switch is bad. Xids 74 \
             and 45 beside it are consequences"
        }
        Some(Severity::Reset) => "drain the node, stop the fabric manager, reset all GPUs together, start it again",
        Some(Severity::Monitor | Severity::Isolate) => "monitor it; check cooling, cables and seating",
        None => "nothing: it was corrected or transient",
    };
    page.field("What to do", steps);
}

fn print_dcgm(page: &mut Page, error: &DcgmError) {
    page.line(format!("DCGM error {}: {}.", error.n, error.description));
    page.field("Name", format!("DCGM_FR_{}", error.name));
    page.field("DCGM", format!("{}, {}", error.dcgm.word(), error.category));
    page.field("Ours", severity(error.severity));
    page.field("Others", format!("NVSentinel: {}", error.nvsentinel));
    if !error.note.is_empty() {
        page.field("Note", &error.note);
    }
    page.field("What to do", severity_remedy(error.severity));
}

fn severity(severity: Option<Severity>) -> String {
    severity.map_or_else(|| "only counted".to_owned(), Severity::described)
}

fn xid_remedy(xid: &Xid) -> &'static str {
    match xid.class {
        Class::Application => {
            "nothing on the node: the owner of the program debugs it, for example with compute-sanitizer"
        }
        Class::Consequence => "check the other Xids of the same minute, and what ended the program",
        Class::Notice => "nothing",
        Class::Verdict => "the action that it names: reset the GPU or reboot the node",
        Class::Unused => "contact NVIDIA support: no current driver should report it",
        Class::Fault => severity_remedy(xid.severity),
    }
}

const fn severity_remedy(severity: Option<Severity>) -> &'static str {
    match severity {
        Some(Severity::Monitor) => "monitor it; the node stays in service",
        Some(Severity::Reset) => {
            "drain the node, `nvidia-smi --gpu-reset -i BUS`, test the node before it returns to service"
        }
        Some(Severity::Reboot) => {
            "run `nvidia-bug-report.sh`, drain and reboot the node, test it before it returns to service; if the error recurs, \
             hand the node over"
        }
        Some(Severity::Isolate) => "keep the node out of service, run `nvidia-bug-report.sh` and hand it to the vendor",
        None => "nothing",
    }
}

fn architectures(letters: &str) -> String {
    let names = [('A', "A100"), ('H', "Hopper"), ('B', "B100"), ('G', "GB200")];
    let found: Vec<&str> =
        names.iter().filter(|(letter, _)| letters.contains(*letter)).map(|(_, name)| *name).collect();
    if found.is_empty() { "none of A100, Hopper, B100, GB200".to_owned() } else { found.join(", ") }
}

/// Returns NVIDIA's word for an action and its meaning.
fn action(word: &str) -> String {
    let means = match word {
        "" => return "none given".to_owned(),
        "RESTART_APP" => "restart the program; no reset is needed",
        "IGNORE" => "nothing",
        "IGNORE (sympathetic)" => "nothing: it accompanies another error",
        "RESET_GPU" => "drain and reset the GPU",
        "RESTART_BM" => "reboot the machine",
        "RESTART_VM" => "restart the virtual machine",
        "CONTACT_SUPPORT" => "contact support",
        "CHECK_MECHANICALS" => "check seating and power cables",
        "UPDATE_SWFW" => "update driver and firmware",
        "CHECK_APP/CUDA" => "check the program",
        "CHECK_UVM" => "reset the GPU if unified memory or vGPU is used, else nothing",
        "INVESTIGATE_SW" | "INVESTIGATE_SW_USER" => "check the software, the users' and NVIDIA's",
        "INVESTIGATE_LINK_SI" => "check the link's signal",
        "SYMPATHETIC_REPORT_SOLO" => "report it if it occurs alone",
        "INFORMATIONAL" => "nothing: it describes another Xid",
        "XID_154" => "what its text says",
        "XID_137_FLOW" => "check the program's accesses to other GPUs",
        "WORKFLOW_XID_13" => "repeatedly on one GPC and TPC: diagnose the GPU; else the program",
        "WORKFLOW_XID_31" => "repeatedly on one GPU: diagnose it; on several: the program",
        "WORKFLOW_XID_45" => "alone: restart the fabric manager; else follow the other Xid",
        "WORKFLOW_XID_48" => "alone: reset the GPU; with 63 or 64: drain first. SRAM: check its error threshold",
        "WORKFLOW_NVLINK_ERR" => "by the registers in its text: nothing, seating, or the vendor's diagnostic",
        "WORKFLOW_NVLINK5_ERR" => "by unit and registers in its text: nothing, or reset the GPU",
        _ => return word.to_owned(),
    };
    format!("{word}: {means}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_split_from_its_family() {
        for (word, expected) in [
            ("79", Some(("xid", "79"))),
            ("xid79", Some(("xid", "79"))),
            ("xid-79", Some(("xid", "79"))),
            ("xid:79", Some(("xid", "79"))),
            ("sxid12028", Some(("sxid", "12028"))),
            ("12028", Some(("sxid", "12028"))),
            ("dcgm-30", Some(("dcgm", "30"))),
            ("xid", None),
            ("xid-64-reboot", None),
            ("xid-other", None),
            ("dcgm", None),
            ("disk-space", None),
            ("", None),
        ] {
            assert_eq!(split(word), expected, "{word}");
        }
    }
}
