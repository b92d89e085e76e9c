//! What `scontrol show node -o` says of nodes, as far as a hook needs it: state, partitions, and who set which reason when. Pure.

use doctor_core::time::Timestamp;

/// What begins every reason of ours.
pub(super) const PREFIX: &str = "doctor:";
/// What ends a reason that a hook has set, as against one of the controller's, which names its case there.
pub(super) const BY_HOOK: &str = "[hook]";
/// Slurm's own reason on a node whose prolog stopped a job.
const BY_PROLOG: &str = "Prolog error";

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
    /// When it was set, by the controller's clock.
    pub(super) at: Option<Timestamp>,
}

impl Reason {
    pub(super) fn is_ours(&self) -> bool {
        self.text.starts_with(PREFIX)
    }

    pub(super) fn is_of_a_hook(&self) -> bool {
        self.is_ours() && self.text.ends_with(BY_HOOK)
    }
}

impl Node {
    /// Whether Slurm itself, or somebody, has it out of service or on its way there.
    pub(super) fn is_out(&self) -> bool {
        const OUT: [&str; 6] = ["DOWN", "DRAIN", "FAIL", "REBOOT", "POWER", "FUTURE"];
        self.state.split('+').any(|word| OUT.iter().any(|out| word.starts_with(out)))
    }

    /// Whether we have it out of service. A reason that outlived its drain says nothing any more.
    pub(super) fn is_ours(&self) -> bool {
        self.is_out() && self.reason.as_ref().is_some_and(Reason::is_ours)
    }

    /// Whether it counts as one that hooks took out: by a reason of ours, or by a prolog that had no time to set one.
    pub(super) fn is_taken(&self) -> bool {
        let by_prolog = || self.reason.as_ref().is_some_and(|reason| reason.text.starts_with(BY_PROLOG));
        self.is_ours() || self.is_out() && by_prolog()
    }

    /// Whether there is a machine that jobs could run on now or once it is well.
    pub(super) fn is_there(&self) -> bool {
        !self.state.split('+').any(|word| word == "FUTURE" || word == "POWERED_DOWN")
    }

    /// Whether jobs that go to one may go to the other.
    pub(super) fn shares_a_partition(&self, other: &Self) -> bool {
        self.partitions.iter().any(|one| other.partitions.contains(one))
    }

    /// Whether somebody else has said something of it.
    pub(super) fn is_others(&self) -> bool {
        self.reason.as_ref().map_or_else(|| self.is_out(), |reason| !reason.is_ours())
    }

    /// `NodeName=n1 … State=IDLE+DRAIN … Reason=text with blanks [user@2026-11-15T00:26:50] …`
    fn parse(line: &str) -> Option<Self> {
        let name = line.strip_prefix("NodeName=")?.split(' ').next().filter(|name| !name.is_empty())?;
        // Words with blanks in them stand behind both of these, but for the system's own name.
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
    line.find(key).map(|place| &line[place + key.len()..])
}

/// Ends with who set it when; what newer versions say of the node behind that is not of the reason.
fn reason(rest: &str) -> Option<Reason> {
    let stamps = rest.match_indices(" [").filter_map(|(place, _)| {
        let (stamp, _) = rest[place + 2..].split_once(']')?;
        let (who, when) = stamp.rsplit_once('@')?;
        let plain = !who.is_empty() && !who.contains(' ');
        let at: Option<Timestamp> = format!("{when}Z").parse().ok();
        (plain && (at.is_some() || when == "Unknown")).then_some((place, at))
    });
    // The first: what stands behind it is another field, in which somebody may have written anything.
    let (text, at) = stamps.into_iter().next().map_or((rest, None), |(place, at)| (&rest[..place], at));
    let text = text.trim_end();
    (!text.is_empty() && text != "(null)" && text != "none").then(|| Reason { text: text.to_owned(), at })
}

/// Every node that can be read, one a line. What somebody wrote with a line break goes on in lines that are no nodes: one
/// such comment must not hide the whole cluster. `None`: there is not one node, and nobody knows anything.
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
    fn a_reason_has_its_words_and_its_moment_and_nothing_of_what_follows() {
        let parsed = parse(DRAINED).unwrap();
        let mut drained = node("node1", "IDLE+DRAIN", Some(("gpucheck: xid 79 gpu 3", 1_794_702_410)));
        drained.partitions.push("debug".to_owned());
        assert_eq!(parsed, [drained]);
        assert!(parsed[0].is_out() && !parsed[0].is_ours());
        let more = format!("{DRAINED} Comment=a [x@2026-11-15T00:26:50] b Extra=c\n");
        assert_eq!(parse(&more).unwrap()[0].reason, parsed[0].reason);
        let ours = DRAINED.replace("gpucheck:", "doctor: gpu [0] a@b").replace("gpu 3", "gpu 3 [hook]");
        let ours = parse(&ours).unwrap().remove(0).reason.unwrap();
        assert_eq!(ours.text, "doctor: gpu [0] a@b xid 79 gpu 3 [hook]");
        assert!(ours.is_of_a_hook());
    }

    proptest! {
        #[test]
        fn any_reason_that_slurm_prints_is_read_back_and_no_text_is_too_odd(
            words in "[!-~]([ -~]{0,80}[!-~])?", extra in "[ -~]{0,40}", any in "\\PC{0,200}",
        ) {
            // Who set it when stands behind it; a reason that looks as if that came earlier is cut there.
            prop_assume!(!words.contains(" [") && !["(null)", "none"].contains(&words.as_str()));
            let line = format!("NodeName=n1 State=IDLE+DRAIN Partitions=gpu Reason={words} [root@2026-11-15T00:26:50] Comment={extra}");
            prop_assert_eq!(parse(&line).unwrap(), [node("n1", "IDLE+DRAIN", Some((&words, 1_794_702_410)))]);
            let _parsed = parse(&any);
        }
    }

    #[test]
    fn a_line_break_in_somebodys_words_hides_no_other_node() {
        let broken = DRAINED.replace("xid 79 gpu 3", "xid 79\ngpu 3");
        let text = format!("{broken} Comment=see\n\nticket 7\nNodeName=node2 State=IDLE Partitions=gpu\n");
        let nodes = parse(&text).unwrap();
        assert_eq!(nodes.iter().map(|node| &*node.name).collect::<Vec<_>>(), ["node1", "node2"]);
        let reason = nodes[0].reason.as_ref().unwrap();
        assert_eq!((&*reason.text, reason.at), ("gpucheck: xid 79", None));
    }

    #[test]
    fn a_node_without_a_reason_has_none_and_other_text_is_not_guessed_at() {
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
