//! Compares Slurm's settings, as `scontrol show config` prints them, with what our hooks and the shared file system need. Pure.

use std::{collections::BTreeMap, time::Duration};

use doctor_backend::inspection::InspectionItem;
use doctor_core::time::Span;

use super::super::config::SlurmConfig;

/// The default limits of our hooks: a prolog 5 s, a health check 8 s, an epilog 30 s.
const HEALTH_CHECK_LIMIT: Duration = Duration::from_secs(8);
const EPILOG_LIMIT: Duration = Duration::from_secs(30);
/// The default time for which a prolog uses the last health check's verdict: six minutes.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(360);
/// Slurm's own advice: a longer timeout hides nodes that are really gone.
const MAX_MESSAGE_TIMEOUT: Duration = Duration::from_secs(100);
/// `PrologEpilogTimeout` without a limit is 65534.
const UNLIMITED: u64 = 65_533;
/// The least time for which an ended run must stay in the queue, for a controller that was restarted meanwhile.
const SUFFICIENT_JOB_AGE: Duration = Duration::from_secs(120);
const DEPLOY_HINT: &str = "`doctor deploy slurm --what slurm-conf` prints the lines";

/// The response time of the shared directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShareLatency {
    Unknown,
    Measured(Duration),
}

/// Slurm's settings.
#[derive(Debug)]
pub(super) struct SlurmSettings(BTreeMap<String, String>);

impl SlurmSettings {
    /// Parses lines `Name = value`; a setting that is not set is `(null)` or missing.
    pub(super) fn parse(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| line.split_once(" = "));
        let pairs = pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
        Self(pairs.filter(|(_, value)| value != "(null)" && !value.is_empty()).collect())
    }

    fn get(&self, name: &str) -> Option<&str> {
        // Newer versions number settings that may be repeated.
        self.0.get(name).or_else(|| self.0.get(&format!("{name}[0]"))).map(String::as_str)
    }

    /// Parses `300 sec`, or a bare number.
    fn seconds(&self, name: &str) -> Option<Duration> {
        let seconds: u64 = self.get(name)?.split(' ').next()?.parse().ok()?;
        (seconds < UNLIMITED).then(|| Duration::from_secs(seconds))
    }

    fn words(&self, name: &str) -> Vec<&str> {
        self.get(name).map(|value| value.split(',').collect()).unwrap_or_default()
    }

    pub(super) fn version(&self) -> &str {
        self.get("SLURM_VERSION").unwrap_or("of an unknown version")
    }

    /// Parses `slurm(64030)`.
    pub(super) fn slurm_user(&self) -> Option<u32> {
        self.get("SlurmUser")?.split_once('(')?.1.strip_suffix(')')?.parse().ok()
    }

    pub(super) fn inspect(&self, config: &SlurmConfig, share: ShareLatency) -> Vec<InspectionItem> {
        let mut found = vec![self.health_check(), self.message_timeout(share), self.slurmd_timeout()];
        found.extend(self.prolog());
        found.extend(self.epilog_timeout());
        found.extend(self.min_job_age());
        found.extend(self.return_to_service());
        if config.reboot && self.get("RebootProgram").is_none() {
            let text = "`reboot` is enabled, and slurm.conf has no RebootProgram";
            let remedy = "set RebootProgram in slurm.conf, or `reboot = false` under [backend.slurm]";
            found.push(InspectionItem::bad("RebootProgram", text, remedy));
        }
        found
    }

    fn health_check(&self) -> InspectionItem {
        const WHAT: &str = "HealthCheckProgram";
        let Some(program) = self.get(WHAT) else {
            return InspectionItem::unknown(WHAT, "not set: between two tests only agents check the nodes")
                .with_remedy(DEPLOY_HINT);
        };
        let Some(every) = self.seconds("HealthCheckInterval").filter(|every| !every.is_zero()) else {
            let remedy = format!("set HealthCheckInterval=300; {DEPLOY_HINT}");
            return InspectionItem::bad(WHAT, format!("{program} is never run: HealthCheckInterval is 0"), remedy);
        };
        if every > MAX_CHECK_INTERVAL {
            let text = format!("{program} runs every {} s; a prolog accepts its verdict for 360 s", every.as_secs());
            return InspectionItem::bad(
                WHAT,
                text,
                "set HealthCheckInterval=300, or a longer `fresh` in hook.toml of the nodes",
            );
        }
        let states = self.words("HealthCheckNodeState");
        if !states.contains(&"ANY") {
            let text = format!("{program} runs only on nodes that are {}: the others go unchecked", states.join(", "));
            return InspectionItem::bad(
                WHAT,
                text,
                "set HealthCheckNodeState=ANY,CYCLE: our checks do not disturb jobs",
            );
        }
        let together = if states.contains(&"CYCLE") { "" } else { ", on all nodes at once: CYCLE would spread them" };
        InspectionItem::good(WHAT, format!("{program} every {} s{together}", every.as_secs()))
    }

    /// A node whose slurmd waits for the file system must not be set down, and a hook must end before the timeout.
    fn message_timeout(&self, share: ShareLatency) -> InspectionItem {
        const WHAT: &str = "MessageTimeout";
        let Some(limit) = self.seconds(WHAT) else { return InspectionItem::unknown(WHAT, "not reported by Slurm") };
        let seconds = limit.as_secs();
        if limit <= HEALTH_CHECK_LIMIT {
            let text = format!(
                "{seconds} s, expected more than our health check may take ({} s)",
                HEALTH_CHECK_LIMIT.as_secs()
            );
            return InspectionItem::bad(
                WHAT,
                text,
                "set MessageTimeout=30, or shorter limits in hook.toml of the nodes",
            );
        }
        match share {
            ShareLatency::Measured(latency) if latency * 2 > limit => {
                let text =
                    format!("{seconds} s, and the shared directory took {:.1} s to respond", latency.as_secs_f64());
                let recommended = (latency.as_secs() * 4).clamp(30, MAX_MESSAGE_TIMEOUT.as_secs());
                let remedy = format!(
                    "set MessageTimeout={recommended}: a stall of the file system would make healthy nodes DOWN"
                );
                InspectionItem::bad(WHAT, text, remedy)
            }
            _ if limit > MAX_MESSAGE_TIMEOUT => {
                let remedy = "set MessageTimeout to 100 or less, unless the file system really stalls for so long";
                InspectionItem::unknown(WHAT, format!("{seconds} s delays the detection of dead nodes"))
                    .with_remedy(remedy)
            }
            ShareLatency::Measured(latency) => {
                let millis = latency.as_millis();
                InspectionItem::good(WHAT, format!("{seconds} s; the shared directory responded within {millis} ms"))
            }
            ShareLatency::Unknown => {
                InspectionItem::unknown(WHAT, format!("{seconds} s; the shared directory could not be timed"))
            }
        }
    }

    fn slurmd_timeout(&self) -> InspectionItem {
        const WHAT: &str = "SlurmdTimeout";
        let Some(limit) = self.seconds(WHAT) else { return InspectionItem::unknown(WHAT, "not reported by Slurm") };
        if limit.is_zero() {
            let text = "0: an unreachable node is never set DOWN";
            return InspectionItem::bad(WHAT, text, "set SlurmdTimeout=300");
        }
        let message = self.seconds("MessageTimeout").unwrap_or_default();
        if limit < message * 2 {
            let text = format!(
                "{} s is less than twice the MessageTimeout of {} s: a stalled file system makes a healthy node DOWN",
                limit.as_secs(),
                message.as_secs()
            );
            return InspectionItem::bad(WHAT, text, format!("set SlurmdTimeout={}", (message.as_secs() * 10).max(300)));
        }
        InspectionItem::good(WHAT, format!("{} s", limit.as_secs()))
    }

    /// Only if there is a prolog: our blocking prolog needs these settings.
    fn prolog(&self) -> Option<InspectionItem> {
        let program = self.get("Prolog")?;
        let mut missing = Vec::new();
        let flags = self.words("PrologFlags");
        if !flags.iter().any(|flag| flag.eq_ignore_ascii_case("Alloc") || flag.eq_ignore_ascii_case("Contain")) {
            missing.push("PrologFlags=Alloc");
        }
        if !self.words("SchedulerParameters").contains(&"nohold_on_prolog_fail") {
            missing.push("SchedulerParameters=nohold_on_prolog_fail");
        }
        if missing.is_empty() {
            return Some(InspectionItem::good("Prolog", format!("{program}, and a job that it rejects is requeued")));
        }
        let text = format!("{program}; with `block` in hook.toml, a job that it rejects is held, or rejected too late");
        Some(
            InspectionItem::unknown("Prolog", text).with_remedy(format!("with `block`, set {}", missing.join(" and "))),
        )
    }

    fn epilog_timeout(&self) -> Option<InspectionItem> {
        const WHAT: &str = "PrologEpilogTimeout";
        let limit = self.seconds(WHAT)?;
        self.get("Epilog").or_else(|| self.get("Prolog"))?;
        let text = format!(
            "{} s is shorter than our epilog may take ({} s), and Slurm drains a node whose epilog times out",
            limit.as_secs(),
            EPILOG_LIMIT.as_secs()
        );
        (limit <= EPILOG_LIMIT).then(|| {
            InspectionItem::bad(
                WHAT,
                text,
                "set PrologEpilogTimeout=60, or a shorter limit under [epilog] in hook.toml",
            )
        })
    }

    /// With 2, a node that is down returns by itself, regardless of who set it down.
    fn return_to_service(&self) -> Option<InspectionItem> {
        const WHAT: &str = "ReturnToService";
        Some(match self.get(WHAT)? {
            "2" => InspectionItem::good(
                WHAT,
                "2: a node that is only DOWN returns when its slurmd starts; our isolated nodes are drained too and stay out",
            ),
            value @ ("0" | "1") => InspectionItem::good(WHAT, format!("{value}: a node that is set DOWN stays DOWN")),
            value => InspectionItem::unknown(WHAT, format!("unrecognised value `{value}`"))
                .with_remedy("set ReturnToService to 0, 1 or 2"),
        })
    }

    fn min_job_age(&self) -> Option<InspectionItem> {
        const WHAT: &str = "MinJobAge";
        let age = self.seconds(WHAT)?;
        let text =
            format!("{} s: a run that ends while the controller restarts is known only by its result", age.as_secs());
        (age < SUFFICIENT_JOB_AGE).then(|| {
            let usual = Span::minutes(5).secs();
            InspectionItem::unknown(WHAT, text).with_remedy(format!("set MinJobAge={usual}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_backend::inspection::InspectionStatus;

    // From `scontrol show config` of Slurm 24.11.5 (Debian 13, 2026-11-15), shortened and with other values.
    const GOOD: &str = "\
Configuration data as of 2026-11-15T23:40:00
HealthCheckInterval     = 300 sec
HealthCheckNodeState    = CYCLE,ANY
HealthCheckProgram      = /usr/lib/cluster-doctor/slurm/health
MessageTimeout          = 30 sec
MinJobAge               = 300 sec
Prolog[0]               = /usr/lib/cluster-doctor/slurm/prolog
PrologEpilogTimeout     = 65534
PrologFlags             = Alloc
RebootProgram           = (null)
ReturnToService         = 2
SchedulerParameters     = bf_interval=30,nohold_on_prolog_fail
SlurmUser               = slurm(64030)
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 24.11.5
";

    fn judge(text: &str, share: ShareLatency) -> Vec<InspectionItem> {
        SlurmSettings::parse(text).inspect(&SlurmConfig { reboot: false, ..SlurmConfig::default() }, share)
    }

    fn not_good(text: &str) -> Vec<(String, InspectionStatus)> {
        let found = judge(text, ShareLatency::Measured(Duration::from_millis(3)));
        let rest = found.into_iter().filter(|one| one.status != InspectionStatus::Good);
        rest.map(|one| {
            assert!(one.remedy.is_some(), "{one:?}");
            (one.subject, one.status)
        })
        .collect()
    }

    #[test]
    fn compatible_settings_are_good() {
        assert_eq!(not_good(GOOD), []);
        let settings = SlurmSettings::parse(GOOD);
        assert_eq!((settings.slurm_user(), settings.version()), (Some(64_030), "24.11.5"));
    }

    #[test]
    fn each_incompatible_setting_is_reported_with_its_remedy() {
        use InspectionStatus::{Bad, Unknown};
        for (from, to, what, status) in [
            ("/usr/lib/cluster-doctor/slurm/health", "(null)", "HealthCheckProgram", Unknown),
            ("HealthCheckInterval     = 300 sec", "HealthCheckInterval     = 0 sec", "HealthCheckProgram", Bad),
            ("HealthCheckInterval     = 300 sec", "HealthCheckInterval     = 3600 sec", "HealthCheckProgram", Bad),
            ("CYCLE,ANY", "IDLE", "HealthCheckProgram", Bad),
            ("MessageTimeout          = 30", "MessageTimeout          = 5", "MessageTimeout", Bad),
            ("SlurmdTimeout           = 300", "SlurmdTimeout           = 0", "SlurmdTimeout", Bad),
            ("SlurmdTimeout           = 300", "SlurmdTimeout           = 45", "SlurmdTimeout", Bad),
            ("PrologFlags             = Alloc", "PrologFlags             = (null)", "Prolog", Unknown),
            ("65534", "20 sec", "PrologEpilogTimeout", Bad),
            ("MinJobAge               = 300", "MinJobAge               = 2", "MinJobAge", Unknown),
            ("ReturnToService         = 2", "ReturnToService         = 9", "ReturnToService", Unknown),
        ] {
            assert_eq!(not_good(&GOOD.replace(from, to)), [(what.to_owned(), status)], "{to}");
        }
        let reboots = SlurmConfig { reboot: true, ..SlurmConfig::default() };
        let found = SlurmSettings::parse(GOOD).inspect(&reboots, ShareLatency::Unknown);
        assert!(found.iter().any(|one| one.subject == "RebootProgram" && one.status == Bad), "{found:?}");
    }

    #[test]
    fn return_to_service_is_reported() {
        let found = judge(GOOD, ShareLatency::Unknown);
        let item = found.iter().find(|one| one.subject == "ReturnToService").unwrap();
        assert!(item.text.contains("drained too"), "{item:?}");
    }

    #[test]
    fn a_file_system_slower_than_the_message_timeout_is_reported() {
        let of = |share| judge(GOOD, share).into_iter().find(|one| one.subject == "MessageTimeout").unwrap();
        assert_eq!(of(ShareLatency::Measured(Duration::from_secs(16))).status, InspectionStatus::Bad);
        assert_eq!(of(ShareLatency::Measured(Duration::from_secs(14))).status, InspectionStatus::Good);
        assert_eq!(of(ShareLatency::Unknown).status, InspectionStatus::Unknown);
    }

    #[test]
    fn missing_settings_are_unknown_and_never_good() {
        let found = judge("", ShareLatency::Measured(Duration::ZERO));
        assert!(!found.is_empty() && found.iter().all(|one| one.status == InspectionStatus::Unknown), "{found:?}");
    }
}
