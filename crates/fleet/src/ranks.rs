//! The same all-reduce without MPI: `doctor-node test collective` on every host at the same time, over SSH, with a
//! secret per run. The secret is passed on standard input, because command lines are visible to every user of a host.

use std::time::Duration;

use doctor_backend::ssh::{CommandStatus, Host, RemoteCommand, RootAccess, SshClient, run_on_each, shell_quote};
use doctor_core::{finding::Verdict, ids::NodeName};
use serde::Deserialize;

use super::nccl::{self, NcclTrialResult};

/// The port on which the first host listens.
const PORT: u16 = 29_481;
/// The output limit, for the table and NCCL's warnings.
const MAX_OUTPUT_BYTES: usize = 256 * 1024;

/// A participating host.
#[derive(Debug, Clone)]
pub struct Rank {
    pub host: Host,
    /// The address at which the other hosts reach it.
    pub address: String,
    /// The path of `doctor-node` there.
    pub program: String,
}

#[derive(Debug, Clone)]
pub struct Settings {
    /// Parameters of the test, `NAME=VALUE`.
    pub set: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub limit: Duration,
}

/// Runs an all-reduce over these hosts. `limit` is the expected bandwidth in bytes per second.
///
/// # Errors If the system provides no random bytes.
pub fn run(
    client: &SshClient,
    ranks: &[Rank],
    settings: &Settings,
    limit: Option<f64>,
) -> Result<NcclTrialResult, getrandom::Error> {
    let Some(first) = ranks.first() else {
        return Ok(NcclTrialResult::new(Verdict::Inconclusive, "there are no hosts"));
    };
    let mut bits = [0; 32];
    getrandom::fill(&mut bits)?;
    let secret: String = bits.iter().map(|byte| format!("{byte:02x}")).chain(["\n".to_owned()]).collect();
    let names: Vec<NodeName> = ranks.iter().map(|rank| rank.host.name.clone()).collect();
    let numbered: Vec<(usize, &Rank)> = ranks.iter().enumerate().collect();
    let work = |(number, rank): &(usize, &Rank)| {
        let script = script(rank, *number, &first.address, &names, settings);
        let order = RemoteCommand {
            script: &script,
            input: secret.as_bytes(),
            limit: settings.limit,
            max_output: MAX_OUTPUT_BYTES,
            root: RootAccess::IfConfigured,
        };
        client.run(&rank.host, &order)
    };
    let results = run_on_each(&numbered, ranks.len(), work, |_| {});
    let outputs = ranks.iter().zip(results).map(|(rank, result)| {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (rank.host.name.clone(), result.status, text(&result.stdout), text(&result.stderr))
    });
    Ok(combine(&outputs.collect::<Vec<_>>(), limit))
}

fn script(rank: &Rank, number: usize, first: &str, names: &[NodeName], settings: &Settings) -> String {
    // Not folded, because a folded list would not keep the order.
    let all = names.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
    let set = [
        "mode=nodes".to_owned(),
        format!("rank={number}"),
        format!("nodes={}", names.len()),
        format!("address={}", with_port(first)),
        format!("names={all}"),
    ];
    let set: String =
        set.iter().chain(&settings.set).map(|setting| format!(" --set {}", shell_quote(setting))).collect();
    let exports: String =
        settings.environment.iter().map(|(name, value)| format!("export {name}={}; ", shell_quote(value))).collect();
    format!(
        "read -r S; export DOCTOR_RENDEZVOUS_SECRET=\"$S\"; export DOCTOR_NODE_NAME={}; {exports}exec {} test collective --json --echo{set}",
        rank.host.name,
        shell_quote(&rank.program)
    )
}

fn with_port(address: &str) -> String {
    if address.contains(':') { format!("[{address}]:{PORT}") } else { format!("{address}:{PORT}") }
}

/// A row of the output of `doctor-node test --json`.
#[derive(Debug, Deserialize)]
struct Row {
    verdict: Verdict,
    reason: String,
    text: String,
}

/// Reasons for a failure that all hosts share and that accuse none of them.
const SHARED_REASONS: [&str; 3] = ["collective-slow", "collective-hung", "link-slow"];

/// Combines the hosts' results into one.
fn combine(outputs: &[(NodeName, CommandStatus, String, String)], limit: Option<f64>) -> NcclTrialResult {
    let (mut named, mut failed, mut unclear) = (Vec::new(), None, None);
    let mut figures = None;
    for (host, how, stdout, stderr) in outputs {
        let rows = match (how, serde_json::from_str::<Vec<Row>>(stdout)) {
            (CommandStatus::Exited(_), Ok(rows)) if !rows.is_empty() => rows,
            (CommandStatus::TimedOut { .. }, _) => {
                failed.get_or_insert(format!("{host}: not finished in time"));
                continue;
            }
            (how, _) => {
                unclear.get_or_insert(format!("{host}: {}", failure_text(how, stderr)));
                continue;
            }
        };
        for row in rows {
            let text = format!("{host}: {}", row.text.chars().take(300).collect::<String>());
            match row.verdict {
                Verdict::Fail if SHARED_REASONS.contains(&row.reason.as_str()) => drop(failed.get_or_insert(text)),
                Verdict::Fail => named.push((host.clone(), text)),
                Verdict::Inconclusive | Verdict::NotApplicable => drop(unclear.get_or_insert(text)),
                Verdict::Pass => {}
            }
        }
        figures = figures.or_else(|| last_row(stderr));
    }
    let measured = figures.map(|(bytes, bandwidth, wrong)| nccl::classify_bandwidth(bytes, bandwidth, wrong, limit));
    let mut judged = match (named.first(), failed, unclear, measured.clone()) {
        (Some((_, text)), ..) => NcclTrialResult::new(Verdict::Fail, text.clone()),
        (None, Some(text), ..) => NcclTrialResult::new(Verdict::Fail, text),
        (None, None, Some(text), _) => NcclTrialResult::new(Verdict::Inconclusive, text),
        (None, None, None, Some(measured)) => measured,
        (None, None, None, None) => NcclTrialResult::new(Verdict::Inconclusive, "no host printed the table of sizes"),
    };
    if let Some(measured) = measured {
        (judged.bytes, judged.bus_bandwidth_bytes_per_s) = (measured.bytes, measured.bus_bandwidth_bytes_per_s);
    }
    judged.faulty_hosts = named.into_iter().map(|(host, _)| host).collect();
    judged.faulty_hosts.dedup();
    judged
}

fn failure_text(how: &CommandStatus, stderr: &str) -> String {
    let last = stderr.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no result printed");
    match how {
        CommandStatus::NotStarted(why) | CommandStatus::ConnectionLost(why) => why.clone(),
        CommandStatus::Exited(code) => format!("ended with {code}: {}", last.chars().take(300).collect::<String>()),
        CommandStatus::TimedOut { .. } => "not finished in time".to_owned(),
    }
}

/// Returns the last line of the table of sizes: bytes, bytes per second, wrong values.
fn last_row(stderr: &str) -> Option<(u64, f64, u64)> {
    let mut lines = stderr.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.find(|fields| fields[..] == ["bytes", "us", "bus", "GB/s", "wrong"])?;
    let row = |fields: Vec<&str>| match fields[..] {
        [bytes, _, rate, wrong] => {
            let rate: f64 = rate.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate >= 0.0)?;
            Some((bytes.parse().ok()?, rate * 1e9, wrong.parse().ok()?))
        }
        _ => None,
    };
    lines.map_while(row).last()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "16 GPUs of 2 nodes, NCCL 2.28.9\n         bytes           us     bus GB/s    wrong\n\
        1048576       100.0        20.00        0\n    8589934592     35920.0       418.49        0\n\
        host1 0000:18:00.0 to host2 0000:18:00.0: 45.00 GB/s\n";

    fn host(name: &str, code: i32, rows: &str, stderr: &str) -> (NodeName, CommandStatus, String, String) {
        (NodeName::new(name).unwrap(), CommandStatus::Exited(code), rows.to_owned(), stderr.to_owned())
    }

    fn row(verdict: &str, reason: &str) -> String {
        format!(
            r#"[{{"check":"collective","verdict":"{verdict}","reason":"{reason}","text":"words","severity":null}}]"#
        )
    }

    #[test]
    fn all_hosts_must_pass_and_the_bandwidth_must_suffice() {
        let passed = row("pass", "within-limits");
        let both = [host("host1", 0, &passed, TABLE), host("host2", 0, &passed, "")];
        let judged = combine(&both, Some(431e9));
        assert_eq!((judged.verdict, judged.bytes), (Verdict::Pass, Some(8 << 30)));
        assert_eq!(combine(&both, Some(480e9)).verdict, Verdict::Fail);
        assert_eq!(combine(&both, None).verdict, Verdict::Inconclusive);
        assert_eq!(combine(&both[1..], Some(431e9)).verdict, Verdict::Inconclusive, "no table, no bandwidth");
    }

    #[test]
    fn a_failure_of_one_host_names_it_and_a_shared_failure_names_none() {
        let (passed, slow) = (row("pass", "within-limits"), row("fail", "collective-hung"));
        let wrong =
            combine(&[host("host1", 0, &passed, TABLE), host("host2", 2, &row("fail", "collective-wrong"), "")], None);
        assert_eq!((wrong.verdict, wrong.faulty_hosts), (Verdict::Fail, vec![NodeName::new("host2").unwrap()]));
        let hung = combine(&[host("host1", 1, &slow, ""), host("host2", 1, &slow, "")], None);
        assert!(hung.verdict == Verdict::Fail && hung.faulty_hosts.is_empty(), "{hung:?}");
    }

    #[test]
    fn a_host_without_output_has_not_passed() {
        let passed = host("host1", 0, &row("pass", "within-limits"), TABLE);
        for other in [
            host("host2", 3, "", "doctor-node: no such test"),
            host("host2", 0, "[]", ""),
            host("host2", 3, &row("inconclusive", "missing"), ""),
            (
                NodeName::new("host2").unwrap(),
                CommandStatus::NotStarted("refused".to_owned()),
                String::new(),
                String::new(),
            ),
        ] {
            let judged = combine(&[passed.clone(), other], Some(1e9));
            assert!(judged.verdict == Verdict::Inconclusive && judged.why.contains("host2"), "{judged:?}");
        }
    }
}
