//! Parses the output of `scontrol show node -o` as far as hooks need it: state, partitions, reason and its time. Pure.

use doctor_core::time::Timestamp;

/// Prefix of all our reasons.
pub(super) const PREFIX: &str = "doctor:";
/// Suffix of a reason that a hook has set. The controller's reasons name their case there.
pub(super) const HOOK_SUFFIX: &str = "[hook]";
/// Slurm's own reason on a node whose prolog stopped a job.
const PROLOG_REASON: &str = "Prolog error";

/// One node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    /// As printed: `IDLE+DRAIN`.
    pub(super) state: String,
    pub(super) partitions: Vec<String>,
    pub(super) reason: Option<Reason>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reason {
    pub(super) text: String,
    /// When it was set, by slurmctld's clock.
    pub(super) at: Option<Timestamp>,
}

impl Reason {
    pub(super) fn is_ours(&self) -> bool {
        self.text.starts_with(PREFIX)
    }

    pub(super) fn is_from_hook(&self) -> bool {
        self.is_ours() && self.text.ends_with(HOOK_SUFFIX)
    }
}

impl Node {
    /// Whether Slurm or an operator has taken it out of service or is doing so.
    pub(super) fn is_out(&self) -> bool {
        const OUT: [&str; 6] = ["DOWN", "DRAIN", "FAIL", "REBOOT", "POWER", "FUTURE"];
        self.state.split('+').any(|flag| OUT.iter().any(|out| flag.starts_with(out)))
    }

    /// Whether we have it out of service. A reason left over from an ended drain does not count.
    pub(super) fn is_ours(&self) -> bool {
        self.is_out() && self.reason.as_ref().is_some_and(Reason::is_ours)
    }

    /// Whether it counts as taken out by a hook: by our reason, or by a prolog that had no time to set one.
    pub(super) fn is_drained_by_hook(&self) -> bool {
        let by_prolog = || self.reason.as_ref().is_some_and(|reason| reason.text.starts_with(PROLOG_REASON));
        self.is_ours() || self.is_out() && by_prolog()
    }

    /// Whether there is a machine that could run jobs, now or after a repair.
    pub(super) fn exists(&self) -> bool {
        !self.state.split('+').any(|flag| flag == "FUTURE" || flag == "POWERED_DOWN")
    }

    /// Whether the same jobs may run on both nodes.
    pub(super) fn shares_a_partition(&self, other: &Self) -> bool {
        self.partitions.iter().any(|one| other.partitions.contains(one))
    }

    /// Whether its state or reason was set by another party.
    pub(super) fn is_foreign(&self) -> bool {
        self.reason.as_ref().map_or_else(|| self.is_out(), |reason| !reason.is_ours())
    }

    /// Parses `NodeName=n1 … State=IDLE+DRAIN … Reason=text with blanks [user@2026-11-15T00:26:50] …`.
    fn parse(line: &str) -> Option<Self> {
        let name = line.strip_prefix("NodeName=")?.split(' ').next().filter(|name| !name.is_empty())?;
        // Fields with spaces in their values come after both of these, except for the OS field.
        let state = after(line, " State=")?.split(' ').next()?;
        let partitions = after(line, " Partitions=").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        Some(Self {
            name: name.to_owned(),
            state: state.to_owned(),
            partitions: partitions.split(',').filter(|one| !one.is_empty()).map(str::to_owned).collect(),
            reason: after(line, " Reason=").and_then(reason),
        })
    }
}

fn after<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.find(key).map(|index| &line[index + key.len()..])
}

/// Parses a reason up to its `[user@time]` stamp. Newer versions print further fields behind it.
fn reason(rest: &str) -> Option<Reason> {
    let stamps = rest.match_indices(" [").filter_map(|(index, _)| {
        let (stamp, _) = rest[index + 2..].split_once(']')?;
        let (who, when) = stamp.rsplit_once('@')?;
        let plain = !who.is_empty() && !who.contains(' ');
        let at: Option<Timestamp> = format!("{when}Z").parse().ok();
        (plain && (at.is_some() || when == "Unknown")).then_some((index, at))
    });
    // The first stamp: the fields behind it contain free text that may look like one.
    let (text, at) = stamps.into_iter().next().map_or((rest, None), |(index, at)| (&rest[..index], at));
    let text = text.trim_end();
    (!text.is_empty() && text != "(null)" && text != "none").then(|| Reason { text: text.to_owned(), at })
}

/// Parses one node per line. A line break in free text continues on lines that are not nodes; one such comment must not
/// hide the cluster. `None` if there is no node at all.
pub(super) fn parse(text: &str) -> Option<Vec<Node>> {
    let nodes: Vec<Node> = text.lines().map(str::trim_end).filter_map(Node::parse).collect();
    (!nodes.is_empty()).then_some(nodes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in super::super) fn node(name: &str, state: &str, reason: Option<(&str, i64)>) -> Node {
        let reason = reason.map(|(text, at)| Reason { text: text.to_owned(), at: Some(Timestamp::from_secs(at)) });
        Node { name: name.to_owned(), state: state.to_owned(), partitions: vec!["gpu".to_owned()], reason }
    }

    // Captured from Slurm 22.05.8 of Debian 12 with TZ=UTC, 2026-11-15, and cut.
    const DRAINED: &str = "NodeName=node1 Arch=x86_64 CoresPerSocket=48  CPUAlloc=0 Version=22.05.8 OS=Linux 6.18.44-fc-v310 #1 SMP @0  RealMemory=1900000 State=IDLE+DRAIN ThreadsPerCore=1 Partitions=gpu,debug  BootTime=2026-11-15T00:10:06 ExtSensorsTemp=n/s Reason=gpucheck: xid 79 gpu 3 [root@2026-11-15T00:26:50]";

    #[test]
    fn a_reason_has_its_text_and_time_and_nothing_that_follows() {
        let parsed = parse(DRAINED).unwrap();
        let mut drained = node("node1", "IDLE+DRAIN", Some(("gpucheck: xid 79 gpu 3", 1_794_702_410)));
        drained.partitions.push("debug".to_owned());
        assert_eq!(parsed, [drained]);
        assert!(parsed[0].is_out() && !parsed[0].is_ours());
        let more = format!("{DRAINED} Comment=a [x@2026-11-15T00:26:50] b Extra=c\n");
        assert_eq!(parse(&more).unwrap()[0].reason, parsed[0].reason);
        let with_our_reason = DRAINED.replace("gpucheck:", "doctor: gpu [0] a@b").replace("gpu 3", "gpu 3 [hook]");
        let with_our_reason = parse(&with_our_reason).unwrap().remove(0).reason.unwrap();
        assert_eq!(with_our_reason.text, "doctor: gpu [0] a@b xid 79 gpu 3 [hook]");
        assert!(with_our_reason.is_from_hook());
    }

    proptest! {
        #[test]
        fn any_reason_that_slurm_prints_is_parsed(
            text in "[!-~]([ -~]{0,80}[!-~])?", extra in "[ -~]{0,40}", any in "\\PC{0,200}",
        ) {
            // The stamp follows the reason; a reason that contains something like a stamp is cut there.
            prop_assume!(!text.contains(" [") && !["(null)", "none"].contains(&text.as_str()));
            let line = format!("NodeName=n1 State=IDLE+DRAIN Partitions=gpu Reason={text} [root@2026-11-15T00:26:50] Comment={extra}");
            prop_assert_eq!(parse(&line).unwrap(), [node("n1", "IDLE+DRAIN", Some((&text, 1_794_702_410)))]);
            let _parsed = parse(&any);
        }
    }

    #[test]
    fn a_line_break_in_a_reason_hides_no_other_node() {
        let with_line_break = DRAINED.replace("xid 79 gpu 3", "xid 79\ngpu 3");
        let text = format!("{with_line_break} Comment=see\n\nticket 7\nNodeName=node2 State=IDLE Partitions=gpu\n");
        let nodes = parse(&text).unwrap();
        assert_eq!(nodes.iter().map(|node| &*node.name).collect::<Vec<_>>(), ["node1", "node2"]);
        let reason = nodes[0].reason.as_ref().unwrap();
        assert_eq!((&*reason.text, reason.at), ("gpucheck: xid 79", None));
    }

    #[test]
    fn a_node_without_a_reason_has_none_and_other_text_is_not_parsed() {
        let idle = "NodeName=node2 Arch=x86_64 State=IDLE ThreadsPerCore=1 Partitions=gpu \n";
        assert_eq!(parse(idle).unwrap(), [node("node2", "IDLE", None)]);
        for text in ["", "\n", "slurm_load_node error: x\n", "NodeName= State=IDLE", "NodeName=n1 Arch=x"] {
            assert_eq!(parse(text), None, "{text}");
        }
        for (state, out) in [
            ("IDLE", false),
            ("MIXED+PLANNED", false),
            ("IDLE+COMPLETING", false),
            ("ALLOCATED+DRAIN", true),
            ("DOWN+NOT_RESPONDING", true),
            ("IDLE+REBOOT_REQUESTED", true),
            ("IDLE+POWERING_DOWN", true),
            ("FAIL", true),
        ] {
            assert_eq!(node("n", state, None).is_out(), out, "{state}");
        }
    }
}
