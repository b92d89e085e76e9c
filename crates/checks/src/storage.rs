//! storage: does every mount return the data that was written, and at its usual speed?
//!
//! What it does: runs fio on each mount. First it writes a file, reads it back and compares checksums. Then it measures
//! seven patterns, a few seconds each, bypassing the page cache (direct I/O): one large file and eight in parallel,
//! written and read in blocks of 1 MiB; random reads, random writes and both (70 % reads) in blocks of 4 KiB. It takes
//! about 45 s per mount, and never more than a tenth of the free space. Without a setting it measures the mounts that
//! users' work uses: up to four, network file systems first (NFS, Lustre, GPFS, Weka, BeeGFS, Ceph, …), then local disks
//! outside of the system's directories; not `/`, `/boot`, `/var`, read-only mounts and object stores behind FUSE. Where
//! there is none, it measures the root file system and calls it `/ (no user mount)`. Its files are in `MOUNT/.cluster-doctor/`, in a
//! directory of this node and run, and are removed when it ends, also when it is killed. It runs when it is named
//! (`doctor-node test storage`), and with the suites that include it (`doctor explain suites`).
//!
//! Why it matters: data loading and checkpoints wait for the slowest node. A mount that hangs keeps a job from ending,
//! and one that returns wrong bytes corrupts a checkpoint that may not be read for weeks.
//!
//! What to do: `doctor log RUN` shows each pass. If other nodes on the same mount are slow too, the server or the
//! network is at fault; if only this one is, its disk, its network adapter or its mount options.
//! - `storage-corrupt` is `isolate`: the data read back differs from the data written. Let no job write from this node.
//! - `storage-io-error` is `reboot`, confirmed by a second failure: the kernel returned an error instead of data. Read
//!   `dmesg`; replace a disk that does it again after a reboot.
//! - `storage-read-only` is `reboot`: nothing can be written. A file system that detects damage becomes read-only; see
//!   `mounts`.
//! - `storage-stalled` is `monitor`, confirmed by a second failure: fio, or creating a directory, did not return in
//!   time. A process that cannot be killed is left behind, and the mount is not tested again while it hangs.
//! - `storage-no-space` is `monitor`: less than 360 MiB are free, or the quota is used up.
//! - `storage-missing` is `monitor`: nothing is mounted there, or there is no such directory.
//! - `storage-slow` is `monitor`, confirmed by a second failure: less than half of the median of this mount's own last
//!   results (at least five), less than 70 % of the machine profile, or slower than one hard disk.
//!
//! Without any setting, the test detects errors, wrong bytes, stalls, and rates below those of one hard disk: a mount
//! without these passes, as no more is known of it. With further results, its own history becomes a limit. If all
//! mounts of this test should reach certain numbers, add them to the profile below `[expect]`, such as
//! `randread_iops = 50000`. A rule with `below_percent_of_peers` compares with other nodes of the type; it is not among
//! the default rules because it takes all mounts of a node together, which is right only where there is one.
//!
//! While other processes load the mount or the processors, a rate below its limit is not judged: inconclusive
//! (`disturbed`), with the name of the process and its owner. The limits for others are 20 % of the processors; before
//! the test 10 MB/s, or the disk busy for 30 % of the time; during the test 10 MB/s and 10 % of all bytes. The load of
//! other nodes on a file server is not visible, and of network file systems only NFS has counters.
//!
//! Latencies (`_p50`, `_p99`, `_p999`) are recorded without limits: they follow from the queue depth. Where a file
//! system rejects direct I/O, `storage_direct` is 0 and the numbers are those of the page cache. Without fio (3.0 or
//! newer) the test is not applicable (`no-fio`), which `doctor status` reports once for the fleet.
//!
//! Parameters, below `[tests.storage.params]` in the policy or by `doctor-node test storage --set NAME=VALUE`:
//! - `mounts`, a list of mount points, by default those that users' work uses; `directories`, a list of directories that
//!   need not be mount points.
//! - `size` of each of the two sets of files, by default `"1GiB"`; `pattern_time`, by default `"5s"`.
//! - `rate = "500MB"` and `iops = 5000` limit the load per second in each direction. The limits for `storage-slow` do
//!   not take them into account.
//! - `verify = false` skips the comparison.
//! - `stall`, by default `"30s"`: how long a pass may take beyond its time. `timeout` of the whole test, by default the
//!   sum of all these.
//!
//! A mount in `mounts` counts as shared by all nodes: by default one node at a time tests it. Mounts that the test finds
//! count together as one shared resource, `user-mounts`, because the planner does not know them in advance. For local disks
//! set `[tests.storage] shares = []`; `limits.per_share` sets how many nodes test one at a time.

use doctor_core::{
    access::Access,
    observation::{FailureKind, Observation, ProbeFailure},
    software::Software,
    time::Span,
};

use crate::{
    measurements::interpret_measurements,
    probe::{Probe, ProbeOutput},
    check_params,
    software::not_applicable_without,
    spec::{Check, Params, Spec, page_of},
    storage_params::{MIN_SIZE, StorageTarget, StorageParams},
    user_mounts::MAX_USER_MOUNTS,
};

// The usual duration is that of two mounts: one network file system and one local disk.
const SPEC: Spec = Spec {
    shares: &["user-mounts"],
    ..Spec::deep("storage", "data integrity and speed of mounts", Span::from_secs(90), Span::minutes(30))
        .opt_in()
        .with_shared_param("mounts")
        .access(&[Access::Mounts])
};

macro_rules! rules {
    ($($metric:literal floor $floor:literal $unit:literal,)*) => {
        concat!(r#"
rules = [
  { id = "storage-corrupt", check = "storage", event = "storage-corrupt", reason = "storage-corrupt",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "storage-io-error", check = "storage", event = "storage-io-error", reason = "storage-io-error",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
  { id = "storage-read-only", check = "storage", event = "storage-read-only", reason = "storage-read-only",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "storage-stalled", check = "storage", event = "storage-stalled", reason = "storage-stalled",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
  { id = "storage-no-space", check = "storage", event = "storage-no-space", reason = "storage-no-space",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "storage-missing", check = "storage", event = "storage-missing", reason = "storage-missing",
    severity = "monitor", text = "{entity}: {value}" },
"#, $(
            "  { id = \"storage-", $metric, "-floor\", check = \"storage\", metric = \"", $metric, "\", below = ", $floor,
            ",\n    reason = \"storage-slow\", severity = \"monitor\", confirm = 2,\n    text = \"{entity}: ", $metric,
            " {value}", $unit, ", expected at least {limit}", $unit, " (one hard disk)\" },\n",
            "  { id = \"storage-", $metric, "-own\", check = \"storage\", metric = \"", $metric,
            "\", below_percent_of_own = 50.0,\n    reason = \"storage-slow\", severity = \"monitor\", confirm = 2,\n",
            "    text = \"{entity}: ", $metric, " {value}", $unit, ", expected at least {limit}", $unit, " (50 % of its past median",
            ")\" },\n",
            "  { id = \"storage-", $metric, "-profile\", check = \"storage\", metric = \"", $metric,
            "\", below_percent_of_profile = 70.0,\n    reason = \"storage-slow\", severity = \"monitor\", confirm = 2,\n",
            "    text = \"{entity}: ", $metric, " {value}", $unit, ", expected at least {limit}", $unit, " (70 % of the profile",
            ")\" },\n",
        )* "]\n")
    };
}

// In blocks of 1 MiB the bandwidth matters, in blocks of 4 KiB the operations; the other follows from it.
const RULES: &str = rules![
    "iodepth_write_1file_bw" floor "10000000.0" "B/s",
    "iodepth_read_1file_bw" floor "10000000.0" "B/s",
    "numjobs_write_nfiles_bw" floor "10000000.0" "B/s",
    "numjobs_read_nfiles_bw" floor "10000000.0" "B/s",
    "randwrite_iops" floor "50.0" " IOPS",
    "randread_iops" floor "50.0" " IOPS",
    "randrw_iops" floor "50.0" " IOPS",
];

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("storage.rs")), rules: RULES, probes, interpret };

const DEFAULT_SIZE: u64 = 1 << 30;
const DEFAULT_PATTERN_TIME: Span = Span::from_secs(5);
/// A shorter time measures only how fio starts.
const MIN_PATTERN_TIME: Span = Span::from_millis(100);
const DEFAULT_STALL: Span = Span::from_secs(30);
/// The time of a pass besides its pattern: starting fio, and waiting for operations in flight.
const PASS_OVERHEAD: Span = Span::from_secs(5);
/// Time to start and to write the report.
const TEST_OVERHEAD: Span = Span::from_secs(15);
/// The patterns and the verification.
const PASSES: i64 = 8;

const KNOWN_PARAMS: [(&str, &str); 9] = [
    ("mounts", "mounts = [\"/data\", \"/scratch\"]"),
    ("directories", "directories = [\"/var/tmp\"]"),
    ("size", "size = \"1GiB\""),
    ("pattern_time", "pattern_time = \"5s\""),
    ("stall", "stall = \"30s\""),
    ("verify", "verify = true"),
    ("rate", "rate = \"500MB\""),
    ("iops", "iops = 5000"),
    ("timeout", "timeout = \"5m\""),
];

fn test_params(params: &Params) -> Result<StorageParams, Observation> {
    let example = check_params::reject_unknown(params, &KNOWN_PARAMS)?;
    let mounts = check_params::string_list(params, "mounts", example("mounts"))?;
    let directories = check_params::string_list(params, "directories", example("directories"))?;
    let targets: Vec<_> = match (mounts, directories) {
        // The test finds the mounts that users' work uses.
        (None, None) => Vec::new(),
        (mounts, directories) => {
            let mounts = mounts.into_iter().flatten().map(StorageTarget::Mount);
            mounts.chain(directories.into_iter().flatten().map(StorageTarget::Directory)).collect()
        }
    };
    if let Some(target) = targets.iter().find(|target| !target.path().starts_with('/')) {
        let name = if matches!(target, StorageTarget::Mount(_)) { "mounts" } else { "directories" };
        return Err(check_params::invalid_param(name, example(name)));
    }
    let span = |name, default| Ok::<_, Observation>(check_params::duration(params, name, example(name))?.unwrap_or(default));
    let (pattern_time, stall) = (span("pattern_time", DEFAULT_PATTERN_TIME)?, span("stall", DEFAULT_STALL)?);
    if pattern_time < MIN_PATTERN_TIME {
        return Err(below_minimum("pattern_time", "100ms"));
    }
    let each = (pattern_time.millis() + PASS_OVERHEAD.millis()) * PASSES + stall.millis() * 2;
    let mounts = if targets.is_empty() { MAX_USER_MOUNTS } else { targets.len() };
    let all = Span::from_millis(each.saturating_mul(i64::try_from(mounts).unwrap_or(i64::MAX)));
    let size = check_params::bytes(params, "size", example("size"))?.unwrap_or(DEFAULT_SIZE);
    if size < MIN_SIZE {
        return Err(below_minimum("size", "16MiB"));
    }
    let iops = check_params::number(params, "iops", example("iops"))?;
    if iops.is_some_and(|iops| iops < 1.0) {
        return Err(below_minimum("iops", "1"));
    }
    Ok(StorageParams {
        targets,
        size,
        pattern_time,
        stall,
        verify: check_params::flag(params, "verify", example("verify"))?.unwrap_or(true),
        rate: check_params::bytes(params, "rate", example("rate"))?,
        iops: iops.map(|iops| iops as u64),
        timeout: span("timeout", all)?,
    })
}

fn below_minimum(name: &str, least: &str) -> Observation {
    let text = format!("parameter `{name}` is too small; expected at least {least}");
    Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text))
}

fn probes(params: &Params) -> Vec<Probe> {
    let Ok(order) = test_params(params) else { return Vec::new() };
    let Ok(written) = serde_json::to_string(&order) else { return Vec::new() };
    // The test enforces its own timeout. This one applies only if the test does not return although it touches no mount
    // itself.
    let millis = order.timeout.millis() + order.stall.millis() * 2 + TEST_OVERHEAD.millis();
    let timeout = Span::from_millis(millis);
    vec![Probe::Builtin { test: SPEC.id.to_owned(), args: vec![written], timeout }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    match test_params(params) {
        Ok(_) => not_applicable_without(Software::Fio, interpret_measurements(params, outputs)),
        Err(instead) => instead,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        document::Measurements,
        classify_fixture::classify_outputs_with,
        Catalogue,
        storage_params::{Direction, Pattern},
    };
    use doctor_core::{
        classify::{Baselines, ExpectationSources, classify_with},
        ids::CheckId,
        observation::{Entity, EntityKind, Event, Metric, Unit},
        policy::Policy,
        profile::Profile,
    };

    fn params(text: &str) -> Params {
        toml::from_str(text).unwrap()
    }

    fn data() -> Entity {
        Entity::new(EntityKind::Mount, "/data")
    }

    /// A complete run, with every rate multiplied by this factor.
    fn measured(factor: f64, events: Vec<Event>) -> ProbeOutput {
        let metrics = Pattern::ALL.iter().flat_map(|pattern| {
            let name = |what: &str| format!("{}_{what}", pattern.code());
            [
                Metric::new(&name("bw"), data(), 2e9 * factor, Unit::BytesPerSecond),
                Metric::new(&name("iops"), data(), 50_000.0 * factor, Unit::OperationsPerSecond),
            ]
        });
        let measurements = Measurements { metrics: metrics.collect(), events, failures: Vec::new() };
        ProbeOutput::Text(serde_json::to_string(&measurements).unwrap())
    }

    fn judged(output: ProbeOutput) -> Vec<String> {
        classify_outputs_with(&CHECK, &Params::new(), None, &[output])
    }

    #[test]
    fn a_verified_mount_without_peers_history_or_profile_passes() {
        assert_eq!(judged(measured(1.0, Vec::new())), ["pass within-limits"]);
    }

    #[test]
    fn every_event_has_its_finding() {
        for (code, finding) in [
            ("storage-corrupt", "isolate"),
            ("storage-io-error", "reboot"),
            ("storage-read-only", "reboot"),
            ("storage-stalled", "monitor"),
            ("storage-no-space", "monitor"),
            ("storage-missing", "monitor"),
        ] {
            let event = vec![Event::seen(code, data(), "what fio said")];
            assert_eq!(judged(measured(1.0, event)), [format!("fail {code} {finding} mount:/data")]);
        }
    }

    #[test]
    fn slowness_is_classified_by_minimum_profile_and_the_mounts_history() {
        let slow = judged(measured(1e-3, Vec::new()));
        assert_eq!(slow.len(), 4, "2 MB/s in four patterns: {slow:?}");
        let expect = [("randread_iops".to_owned(), 80_000.0.into())].into();
        let profile = Profile { sku: "hgx".parse().unwrap(), version: 1, expect };
        let judge = classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &[measured(1.0, Vec::new())]);
        assert_eq!(judge, ["fail storage-slow monitor mount:/data"]);
        let rules = Catalogue::new([CHECK]).rules(&Policy::built_in()).unwrap();
        let id = CheckId::new("storage").unwrap();
        let observation = interpret(&Params::new(), &[measured(1.0, Vec::new())]);
        let own = |values: &[f64]| Baselines {
            own_values: [(("iodepth_read_1file_bw".to_owned(), data()), values.to_vec())].into(),
            ..Baselines::default()
        };
        let faster = classify_with(&rules, ExpectationSources::of_profile(None, &own(&[5e9; 5])), &id, &observation);
        assert_eq!(faster.findings.len(), 1);
        assert!(faster.text.contains("iodepth_read_1file_bw 2 GB/s, expected at least"), "{}", faster.text);
        assert!(classify_with(&rules, ExpectationSources::of_profile(None, &own(&[5e9; 4])), &id, &observation).findings.is_empty(), "too few results");
    }

    #[test]
    fn every_pattern_is_classified() {
        for pattern in Pattern::ALL {
            let what = if pattern.spec().block == 1 << 20 { "bw" } else { "iops" };
            assert!(RULES.contains(&format!("metric = \"{}_{what}\"", pattern.code())), "{}", pattern.code());
            assert_eq!(pattern.spec().direction == Direction::Both, pattern.spec().rw == "randrw");
        }
    }

    #[test]
    fn a_test_that_could_not_run_is_inconclusive() {
        let missing = ProbeFailure::new(FailureKind::NotInstalled, "fio is not installed");
        assert_eq!(judged(ProbeOutput::Failed(missing)), ["not-applicable no-fio"]);
        let old = ProbeFailure::new(FailureKind::Missing, "fio supports none of the engines");
        assert_eq!(judged(ProbeOutput::Failed(old)), ["inconclusive missing"]);
        assert_eq!(classify_outputs_with(&CHECK, &Params::new(), None, &[]), ["inconclusive empty"]);
        let half = Measurements {
            metrics: vec![Metric::new("randread_iops", data(), 9e4, Unit::OperationsPerSecond)],
            ..Measurements::default()
        };
        let half = ProbeOutput::Text(serde_json::to_string(&half).unwrap());
        assert_eq!(judged(half), ["inconclusive metric-missing"]);
    }

    #[test]
    fn parameters_reach_the_test() {
        let default = test_params(&Params::new()).unwrap();
        assert_eq!(default.targets, [], "the test finds them");
        assert_eq!((default.size, default.verify, default.timeout), (1 << 30, true, Span::from_secs(4 * 140)));
        let set = test_params(&params(
            "mounts = ['/data']\ndirectories = ['/var/tmp']\nsize = '64MiB'\npattern_time = '30s'\nrate = '500MB'",
        ));
        let set = set.unwrap();
        assert_eq!(set.targets, [StorageTarget::Mount("/data".to_owned()), StorageTarget::Directory("/var/tmp".to_owned())]);
        assert_eq!((set.size, set.rate, set.timeout), (64 << 20, Some(500_000_000), Span::from_secs(680)));
        let [Probe::Builtin { args, timeout, .. }] = &probes(&params("timeout = '1m'"))[..] else { panic!("one probe") };
        assert_eq!(serde_json::from_str::<StorageParams>(&args[0]).unwrap().timeout, Span::minutes(1));
        assert!(*timeout > Span::minutes(2), "the test ends before the probe's timeout");
    }

    #[test]
    fn an_invalid_parameter_is_reported() {
        for text in [
            "mounts = '/data'",
            "mounts = []",
            "mounts = ['data']",
            "size = '1kB'",
            "size = '1 giga'",
            "pattern_time = 5",
            "pattern_time = '10ms'",
            "verify = 'no'",
            "rate = -1",
            "iops = 0",
            "iops = 'many'",
            "sizes = '1GiB'",
        ] {
            let answer = classify_outputs_with(&CHECK, &params(text), None, &[measured(1.0, Vec::new())]);
            assert_eq!(answer, ["inconclusive unparseable"], "{text}");
            assert!(probes(&params(text)).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_named_mount_is_shared_until_the_site_says_otherwise() {
        let shares = |text: &str| {
            let policy = Policy::with_site_settings(text).unwrap();
            let tests = Catalogue::built_in().tests(&policy);
            tests.into_iter().find(|test| test.id.as_str() == "storage").map(|test| test.shares)
        };
        let mounts = "[tests.storage.params]\nmounts = [\"/data\"]\n";
        assert_eq!(shares(mounts), None, "it is opt-in");
        let unnamed = Some(vec!["user-mounts".to_owned()]);
        assert_eq!(shares("[tests.storage]\nenabled = true\n"), unnamed, "they may be one file system of all nodes");
        assert_eq!(shares(&format!("[tests.storage]\nenabled = true\n{mounts}")), Some(vec!["/data".to_owned()]));
        let local = format!("[tests.storage]\nenabled = true\nshares = []\n{mounts}");
        assert_eq!(shares(&local), Some(Vec::new()));
    }
}
