//! The workflows of the seeds on real Slurm clusters of two versions: users come first, a node that we took out stays
//! closed to users whenever the controller dies, and changes by operators and broken daemons are left alone.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use doctor_testbed::slurm::{Daemon, Generation, Layout, Slurm};
use serde_json::{Value, json};

use crate::{
    out_of_the_box,
    this_machine::Service,
    workdir::{Workdir, doctor_node, wait_until},
};

/// Fails everywhere, because every machine has more than 0 bytes of memory.
const BAD: &str = "version = 2\n[[rules]]\nid = \"bad\"\ncheck = \"memory\"\nmetric = \"mem_total_bytes\"\nabove = 0.0\n\
    severity = \"isolate\"\nreason = \"bad-memory\"\ntext = \"a planted fault\"\n";

/// The seed's limit: users get a node under test within a minute.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(60);

/// Runs the real program, and kills the service at each new change: once before it is made, once after.
const KILLER: &str = r#"#!/bin/sh
name=$(basename "$0")
case "$name $1" in
sbatch* | scancel* | 'scontrol update' | 'scontrol create' | 'scontrol delete' | 'scontrol reboot') ;;
*) exec REAL/"$name" "$@" ;;
esac
# Names of runs and operations, and what is noted on the node, are rebuilt; what is done stays the same.
key=KILLED/$(printf %s "$name $*" | sed -E 's/Extra=.*//; s/[[:alnum:]]{10,}//g; s/[0-9]//g' | cksum | cut -d ' ' -f 1)
if [ ! -e "$key.before" ]; then
  echo "$name $*" >"$key.before"
  kill -KILL $PPID
  exit 1
fi
[ -e "$key.after" ] && exec REAL/"$name" "$@"
REAL/"$name" "$@"
echo "$name $*" >"$key.after"
kill -KILL $PPID
"#;

/// A Slurm cluster, and the service's directory with a share. A failing test prints their state.
pub(crate) struct SlurmFixture {
    pub(crate) workdir: Workdir,
    pub(crate) slurm: Slurm,
}

impl SlurmFixture {
    /// Starts the cluster. `None`: this machine has no Slurm, which is printed; in CI it is a failure.
    pub(crate) fn start(what: &str, layout: &Layout) -> Option<Self> {
        let slurm = match Slurm::start(layout) {
            Ok(slurm) => slurm,
            Err(why) => {
                why.skip_tests(&format!("{what} ({:?})", layout.generation));
                return None;
            }
        };
        let workdir = Workdir::new();
        fs::create_dir(workdir.path("data")).unwrap();
        Some(Self { workdir, slurm })
    }
}

impl Drop for SlurmFixture {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for question in [&["show", "node", "-o"][..], &["show", "reservation", "-o"], &["show", "job", "-o"]] {
            println!("{question:?}: {:#?}", self.slurm.run("scontrol", question));
        }
        for node in self.slurm.nodes() {
            println!("{}", self.workdir.doctor(&["why", node]).out);
        }
        for question in ["history", "audit"] {
            println!("{}", self.workdir.doctor(&[question]).out);
        }
    }
}

/// Configures a service for this cluster that runs these programs, with further backend settings.
pub(crate) fn configure(workdir: &Workdir, slurm: &Slurm, programs: &Path, settings: &str) {
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n\
             [backend.slurm]\nprograms = \"{}\"\nslurm_conf = \"{}\"\ndoctor_node = \"{}\"\nnode_state = \"{}\"\n{settings}",
            programs.display(),
            slurm.conf().display(),
            doctor_node().display(),
            workdir.path("node").display(),
        ),
    );
}

pub(crate) fn rows(workdir: &Workdir, test: &str) -> Vec<Value> {
    if !workdir.path("doctor.db").exists() {
        return Vec::new();
    }
    workdir.json(&["history", "--test", test]).as_array().cloned().unwrap_or_default()
}

/// Returns our jobs that Slurm remembers: name, state, node.
fn our_jobs(slurm: &Slurm) -> Vec<[String; 3]> {
    let listed = slurm.run("squeue", &["--noheader", "--states=all", "--format=%j|%T|%N|"]).unwrap_or_default();
    let fields = listed.lines().map(|line| line.split_terminator('|').map(str::to_owned).collect::<Vec<_>>());
    fields
        .filter_map(|fields| <[String; 3]>::try_from(fields).ok())
        .filter(|job| job[0].starts_with("doctor-"))
        .collect()
}

fn no_run_has_two_jobs(slurm: &Slurm) {
    let mut names: Vec<String> = our_jobs(slurm).into_iter().map(|[name, ..]| name).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all, "{:?}", our_jobs(slurm));
}

fn reason(slurm: &Slurm, node: &str) -> String {
    let line = slurm.run("scontrol", &["show", "node", "-o", node]).unwrap_or_default();
    line.split_once("Reason=").map(|(_, reason)| reason.to_owned()).unwrap_or_default()
}

fn is_closed(slurm: &Slurm, node: &str) -> bool {
    let state = slurm.node_state(node).unwrap_or_default();
    state.contains("DRAIN") || state.contains("MAINT") || state.contains("RESERVED")
}

fn users_have_priority(generation: Generation) {
    let layout = Layout { generation, nodes: 3, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("users come first on Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    configure(workdir, slurm, slurm.programs(), "");
    // A test that runs until it is ended.
    workdir.policy_for(
        &[],
        "[limits]\nresult_grace = \"1s\"\n[retry]\ninconclusive = \"1h\"\n\
         [tests.slow.params]\ntimeout = \"15m\"\ncommand = [\"/bin/sh\", \"-c\", \"exec sleep 600\"]\n",
    );
    let busy = slurm.submit(&["--exclusive", "--nodelist=node1", "--wrap=exec sleep 600"]).unwrap();
    slurm.wait_for_job(busy, "RUNNING").unwrap();
    let service = Service::start(workdir);
    let running = |slurm: &Slurm| {
        let jobs = our_jobs(slurm).into_iter().filter(|[_, state, _]| state == "RUNNING");
        let mut nodes: Vec<String> = jobs.map(|[_, _, node]| node).collect();
        nodes.sort_unstable();
        nodes
    };
    wait_until("a run on each free node", || running(slurm) == ["node2", "node3"]);

    // A user job wants one node, and one is given up.
    let wants = slurm.submit(&["--exclusive", "--gres=gpu:8", "--wrap=exec sleep 600"]).unwrap();
    let submitted_at = Instant::now();
    slurm.wait_for_job(wants, "RUNNING").unwrap();
    assert!(submitted_at.elapsed() < GIVEN_UP_WITHIN, "{:?}", submitted_at.elapsed());
    assert_eq!(running(slurm).len(), 1, "{:?}", our_jobs(slurm));
    wait_until("the history row of the active run", || rows(workdir, "slow").len() == 1);
    let row = &rows(workdir, "slow")[0];
    assert_eq!((&row["verdict"], &row["reason"]), (&json!("inconclusive"), &json!("node-taken")), "{row}");
    assert!(our_jobs(slurm).iter().all(|[.., node]| node != "node1"), "{:?}", our_jobs(slurm));
    no_run_has_two_jobs(slurm);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_node_whose_declared_gpus_are_gone_is_not_healthy_on_slurm() {
    let layout = Layout { nodes: 1, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("missing GPUs on Slurm", &layout) else { return };
    configure(&fixture.workdir, &fixture.slurm, fixture.slurm.programs(), "");
    // The shipped policy. Gres declares eight GPUs; this machine has none.
    fixture.workdir.write("policy.toml", "");
    let service = Service::start(&fixture.workdir);
    wait_until("the store", || fixture.workdir.path("doctor.db").exists());
    out_of_the_box::wait_until_gpus_are_missed(&fixture.workdir, "node1");
    assert_eq!(service.stop().0, Some(0));
}

#[test]
fn users_have_priority_on_slurm_22_05() {
    users_have_priority(Generation::Debian12);
}

#[test]
fn users_have_priority_on_slurm_24_11() {
    users_have_priority(Generation::Debian13);
}

#[test]
fn a_job_that_does_not_start_is_abandoned_and_started_jobs_give_results() {
    let layout = Layout { nodes: 2, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("results and pending jobs on Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    workdir.policy_for(&["memory"], "version = 1\n");
    configure(workdir, slurm, slurm.programs(), "");
    workdir.expect(0, &["plan"]).stdout_contains("node1").stdout_contains("node2").stdout_contains("never tested");
    let service = Service::start(workdir);
    wait_until("both nodes to pass", || {
        rows(workdir, "memory").iter().filter(|row| row["verdict"] == "pass").count() == 2
    });
    let run = rows(workdir, "memory")[0]["run"].as_str().unwrap().to_owned();
    workdir.expect(0, &["log", &run]).stdout_contains("memory");
    assert_eq!(our_jobs(slurm).len(), 2, "{:?}", our_jobs(slurm));
    assert_eq!(service.stop().0, Some(0));

    // Slurm itself delays the next jobs.
    workdir.policy_for(&["memory"], "version = 2\n[limits]\npending = \"3s\"\n[retry]\nnot_started = \"1h\"\n");
    configure(workdir, slurm, slurm.programs(), "job = { arguments = [\"--begin=now+1hour\"] }\n");
    let service = Service::start(workdir);
    workdir.expect(0, &["test", "node1", "--test", "memory", "--yes"]);
    wait_until("a job that waits", || our_jobs(slurm).iter().any(|[_, state, _]| state == "PENDING"));
    wait_until("its end", || our_jobs(slurm).iter().any(|[_, state, _]| state == "CANCELLED"));
    wait_until("why it was", || workdir.doctor(&["why", "node1"]).out.contains("pending"));
    assert_eq!(rows(workdir, "memory").len(), 2, "a run that never started has no history row");
    no_run_has_two_jobs(slurm);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    program_is_missing(&fixture);
}

/// A job that dies at once says why: in `doctor log`, in `doctor why`, and in its history.
fn program_is_missing(SlurmFixture { workdir, slurm }: &SlurmFixture) {
    workdir.policy_for(&["memory"], "version = 3\n[limits]\nresult_grace = \"1s\"\n[retry]\nnot_started = \"1h\"\n");
    configure(workdir, slurm, slurm.programs(), "");
    let settings = workdir.read("doctor.toml").replace(&doctor_node().display().to_string(), "/usr/bin/no-doctor-node");
    workdir.write("doctor.toml", &settings);
    let service = Service::start(workdir);
    workdir.expect(0, &["test", "node2", "--test", "memory", "--yes"]);
    wait_until("why the job died", || workdir.why("node2")["without_result"]["last_output"].is_string());
    let ended = workdir.why("node2")["without_result"].clone();
    let quote = ended["last_output"].as_str().unwrap();
    assert!(quote.contains("/usr/bin/no-doctor-node: not found"), "{ended}");
    assert!(quote.contains("FAILED, exit code 127"), "{ended}");
    let run = ended["run"].as_str().unwrap();
    let log = workdir.expect(0, &["log", run]);
    log.stdout_contains("== last output of the job on node2").stdout_contains("no-doctor-node: not found");
    log.stdout_contains("== on node2: Slurm job").stdout_contains("FAILED, exit code 127");
    workdir.doctor(&["why", "node2"]).stdout_contains("no-doctor-node: not found").stdout_contains("doctor log r");
    assert_eq!(service.stop().0, Some(0));
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

/// A service that is restarted whenever it was killed.
struct Restarted<'a> {
    workdir: &'a Workdir,
    service: Service,
    starts: usize,
}

impl<'a> Restarted<'a> {
    fn start(workdir: &'a Workdir) -> Self {
        Self { workdir, service: Service::start(workdir), starts: 1 }
    }

    #[track_caller]
    fn until(&mut self, what: &str, mut level: impl FnMut() -> bool) {
        let before = self.starts;
        // Each start has the full time limit of a wait.
        loop {
            let began = self.starts;
            wait_until(&format!("{what} (after {before} to {began} starts)"), || {
                if self.service.has_ended() {
                    self.service = Service::start(self.workdir);
                    self.starts += 1;
                }
                self.starts > began || level()
            });
            if self.starts == began {
                return;
            }
        }
    }
}

/// Creates a directory of programs that kill the service at each change, and returns it with the directory of their
/// records.
fn killers(workdir: &Workdir, slurm: &Slurm) -> (PathBuf, PathBuf) {
    let (programs, killed) = (workdir.path("killers"), workdir.path("killed"));
    fs::create_dir(&killed).unwrap();
    fs::create_dir(&programs).unwrap();
    let script = KILLER
        .replace("REAL", &slurm.programs().display().to_string())
        .replace("KILLED", &killed.display().to_string());
    for name in ["sacct", "sbatch", "scancel", "scontrol", "squeue"] {
        fs::write(programs.join(name), &script).unwrap();
        fs::set_permissions(programs.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    (programs, killed)
}

fn stays_drained_while_quarantined(generation: Generation) {
    let layout = Layout { generation, nodes: 2, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("quarantine with a controller that is killed", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    let (programs, killed) = killers(workdir, slurm);
    configure(workdir, slurm, &programs, "");
    // What a kill prevented is retried soon.
    workdir.policy_for(
        &["memory"],
        "mode = \"act\"\n[allow]\ndrain = true\n[repair]\nexamine = [\"memory\"]\n\
         [retry]\ninconclusive = \"1s\"\nnot_started = \"1s\"\n",
    );
    let mut service = Restarted::start(workdir);
    service.until("both nodes to pass", || rows(workdir, "memory").len() == 2);

    workdir.expect(0, &["quarantine", "node1", "--why", "it smells", "--yes"]);
    service.until("the drain", || slurm.node_state("node1").is_ok_and(|state| state.contains("DRAIN")));
    assert!(reason(slurm, "node1").starts_with("doctor:"), "{}", reason(slurm, "node1"));
    // If the node opens for users at any moment, this job starts and keeps running.
    let user = slurm.submit(&["--nodelist=node1", "--no-requeue", "--wrap=exec sleep 600"]).unwrap();
    service.until("the examination", || {
        assert_eq!(slurm.job_state(user).unwrap(), "PENDING", "node1 is {:?}", slurm.node_state("node1"));
        // A run that was killed at the wrong moment has no result; the advice is then to examine again.
        workdir.doctor(&["why", "node1"]).out.contains("the examination recommends")
    });
    service.until("the node to be drained again", || {
        let reservations = slurm.run("scontrol", &["show", "reservation", "-o"]).unwrap();
        slurm.node_state("node1").is_ok_and(|state| state == "IDLE+DRAIN") && !reservations.contains("doctor-")
    });
    assert_eq!(slurm.job_state(user).unwrap(), "PENDING", "an operator decides");
    let before = rows(workdir, "memory").len();

    workdir.expect(0, &["release", "node1", "--why", "it does not", "--yes"]);
    service.until("the node to be back", || slurm.job_state(user).is_ok_and(|state| state == "RUNNING"));
    let proven = rows(workdir, "memory");
    assert_eq!(proven.len(), before + 1, "requalified once: {proven:?}");
    assert!(proven.iter().all(|row| row["verdict"] == "pass"), "{proven:?}");
    service.until("nothing of ours to be left", || !is_closed(slurm, "node1"));
    no_run_has_two_jobs(slurm);

    let killed_calls = fs::read_dir(&killed).unwrap().flatten().map(|entry| fs::read_to_string(entry.path()).unwrap());
    let killed_calls: Vec<String> = killed_calls.collect();
    for change in ["sbatch", "create reservation", "delete reservation", "state=drain", "state=resume"] {
        let times = killed_calls.iter().filter(|line| line.to_lowercase().contains(change)).count();
        assert!(times >= 2, "killed before and after `{change}`: {killed_calls:#?}");
    }
    assert!(service.starts > 10, "{} starts, {} kills", service.starts, killed_calls.len());
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_quarantined_node_stays_drained_on_slurm_22_05_while_the_controller_is_killed() {
    stays_drained_while_quarantined(Generation::Debian12);
}

#[test]
fn a_quarantined_node_stays_drained_on_slurm_24_11_while_the_controller_is_killed() {
    stays_drained_while_quarantined(Generation::Debian13);
}

/// The words of the operator as Slurm shows them.
fn words_of(slurm: &Slurm, node: &str) -> String {
    let text = reason(slurm, node);
    text.split(" [").next().unwrap_or_default().to_owned()
}

fn a_repair_reboots_once(generation: Generation) {
    let layout = Layout { generation, nodes: 3, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("an operator's repair with a controller that is killed", &layout) else {
        return;
    };
    let SlurmFixture { workdir, slurm } = &fixture;
    let (programs, killed) = killers(workdir, slurm);
    configure(workdir, slurm, &programs, "");
    // No step is allowed: the operator's command needs no permission.
    let policy = |mode: &str| {
        let retry = "[retry]\ninconclusive = \"1s\"\nnot_started = \"1s\"\n";
        let allow = "allow = { mark = false, drain = false }\n";
        let requalify = "[repair]\nrequalification = [\"memory\"]\nexamine = [\"memory\"]\n";
        workdir.policy_for(&["memory"], &format!("mode = \"{mode}\"\n{allow}{requalify}{retry}"));
    };
    policy("observe");
    let mut service = Restarted::start(workdir);
    service.until("all nodes to pass", || rows(workdir, "memory").len() == 3);
    // A controller that was killed in its first cycle has stored results and no observation.
    service.until("an observation", || !workdir.json(&["status"])["observed_at"].is_null());
    let repair = ["repair", "node1", "--step", "reboot", "--why", "hangs in NCCL"];
    let confirmed = [&repair[..], &["--yes"]].concat();
    workdir.expect(1, &confirmed).stderr_contains("refused: mode `observe`").stderr_contains("mode = \"recommend\"");
    policy("recommend");
    service.until("the mode to change", || workdir.json(&["status"])["mode"] == "recommend");

    workdir
        .expect(1, &["repair", "node1", "--step", "replace", "--why", "x", "--yes"])
        .stderr_contains("refused: this cluster cannot replace a node")
        .stderr_contains("--step reboot");
    workdir.expect(6, &repair).stderr_contains("Would reboot 1 node (node1).");
    workdir
        .expect(6, &["repair", "node[1-3]", "--step", "reboot", "--why", "x", "--yes"])
        .stderr_contains("the circuit breaker would allow 1 now")
        .stderr_contains("--confirm-nodes 3");
    assert!(slurm.reboots().is_empty() && !is_closed(slurm, "node1"));

    // A node that another party drained is refused by name.
    slurm.run("scontrol", &["update", "nodename=node2", "state=drain", "reason=ticket 4711: fan 3"]).unwrap();
    service.until("the refusal", || {
        let refused =
            workdir.doctor(&["repair", "node2", "--step", "reboot", "--why", "x", "--yes", "--confirm-nodes", "2"]);
        refused.code == 1 && refused.err.contains("keeps node2 out of service") && refused.err.contains("ticket 4711")
    });
    slurm.run("scontrol", &["update", "nodename=node2", "state=resume"]).unwrap();

    // A pause refuses it, and one that begins later stops what has not begun.
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    workdir.expect(1, &confirmed).stderr_contains("paused by").stderr_contains("`doctor resume --why …`");
    workdir.expect(0, &["resume", "--why", "done", "--yes"]);
    let user = slurm.submit(&["--nodelist=node1", "--no-requeue", "--wrap=exec sleep 600"]).unwrap();
    slurm.wait_for_job(user, "RUNNING").unwrap();
    workdir.expect(0, &confirmed).stdout_contains("Requested reboot of 1 node.");
    service.until("the drain", || slurm.node_state("node1").is_ok_and(|state| state.contains("DRAIN")));
    assert_eq!(words_of(slurm, "node1"), "doctor: operator reboot requested by ann: hangs in NCCL");
    service.until("what it waits for", || workdir.doctor(&["why", "node1"]).out.contains("waits for this: user work"));
    workdir.expect(0, &["pause", "--why", "upgrade", "--yes"]);
    slurm.run("scancel", &[user.to_string().as_str()]).unwrap();
    service.until("the pause to be what it waits for", || {
        slurm.job_state(user).is_ok_and(|state| state != "RUNNING")
            && workdir.doctor(&["why", "node1"]).out.contains("everything is paused by")
    });
    assert!(slurm.reboots().is_empty(), "it has not begun");

    workdir.expect(0, &["resume", "--why", "done", "--yes"]);
    service.until("the reboot", || slurm.reboots() == ["node1"]);
    service.until("the node to be back", || {
        workdir.json(&["cases", "--all", "node1"])[0]["state"]["how"] == "returned" && !is_closed(slurm, "node1")
    });
    assert_eq!(slurm.reboots(), ["node1"], "once");
    no_run_has_two_jobs(slurm);
    let killed_calls = fs::read_dir(&killed).unwrap().flatten().map(|entry| fs::read_to_string(entry.path()).unwrap());
    let killed_calls: Vec<String> = killed_calls.collect();
    let reboots = killed_calls.iter().filter(|line| line.starts_with("scontrol reboot")).count();
    assert_eq!(reboots, 2, "killed before and after the reboot: {killed_calls:#?}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn an_operators_repair_reboots_once_on_slurm_22_05_while_the_controller_is_killed() {
    a_repair_reboots_once(Generation::Debian12);
}

#[test]
fn an_operators_repair_reboots_once_on_slurm_24_11_while_the_controller_is_killed() {
    a_repair_reboots_once(Generation::Debian13);
}

#[test]
fn an_injected_fault_drains_the_node_and_an_operators_drain_is_kept() {
    let layout = Layout { nodes: 3, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("drains on Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    configure(workdir, slurm, slurm.programs(), "");
    workdir.policy_for(&["memory"], "version = 1\nmode = \"act\"\n[allow]\ndrain = true\n");
    let mut service = Service::start(workdir);
    wait_until("all nodes to pass", || rows(workdir, "memory").len() == 3);

    workdir.policy_for(&["memory"], &BAD.replace("version = 2", "version = 2\nmode = \"act\"\n[allow]\ndrain = true"));
    service.wait_for_log("configuration reloaded policy=2");
    workdir.expect(0, &["test", "node1", "--test", "memory", "--why", "a planted fault", "--yes"]);
    wait_until("the drain", || slurm.node_state("node1").is_ok_and(|state| state.contains("DRAIN")));
    wait_until("the reason", || reason(slurm, "node1").starts_with("doctor:"));
    let operators = ["update", "nodename=node3", "state=drain", "reason=ticket 4711: fan 3"];
    slurm.run("scontrol", &operators).unwrap();
    let theirs = reason(slurm, "node3");

    workdir.policy_for(&["memory"], "version = 3\nmode = \"act\"\n[allow]\ndrain = true\n");
    service.wait_for_log("configuration reloaded policy=3");
    workdir.expect(0, &["release", "node1", "--why", "it was planted", "--yes"]);
    wait_until("the node to be back", || slurm.node_state("node1").is_ok_and(|state| state == "IDLE"));
    let proven = rows(workdir, "memory").into_iter().find(|row| row["node"] == "node1").unwrap();
    assert_eq!(proven["verdict"], "pass", "requalified: {proven}");

    assert!(slurm.node_state("node3").unwrap().contains("DRAIN"));
    assert_eq!(reason(slurm, "node3"), theirs);
    let of_theirs = rows(workdir, "memory").iter().filter(|row| row["node"] == "node3").count();
    assert_eq!(of_theirs, 1, "nothing was started on it since");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn stopped_daemons_make_nodes_unknown_and_nothing_runs_twice() {
    let layout = Layout { nodes: 2, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("broken daemons of Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    configure(workdir, slurm, slurm.programs(), "deadline = \"15s\"\n");
    workdir.policy_for(&["memory"], "version = 1\n");
    let mut service = Service::start(workdir);
    wait_until("both nodes to pass", || rows(workdir, "memory").len() == 2);
    let used = |node: &str| {
        let nodes = workdir.json(&["nodes"]);
        let row = nodes.as_array().and_then(|all| all.iter().find(|row| row["node"] == node).cloned());
        row.map(|row| row["occupancy"].as_str().unwrap_or_default().to_owned()).unwrap_or_default()
    };
    assert_eq!(used("node1"), "free");

    // Slurm cannot be queried: nothing is concluded, and the problem is reported once.
    slurm.kill(Daemon::Munge).unwrap();
    wait_until("the problem in status", || workdir.doctor(&["status"]).out.contains("read the nodes"));
    slurm.restart(Daemon::Munge).unwrap();
    service.wait_for_log("problems resolved");
    slurm.stop(Daemon::Controller).unwrap();
    wait_until("the problem in status", || workdir.doctor(&["status"]).out.contains("read the nodes"));
    slurm.restart(Daemon::Controller).unwrap();
    // Until a query succeeds, the node states are those from before slurmctld stopped; and a newly started slurmctld
    // knows no node until its slurmd has registered.
    wait_until("the problem to be resolved", || !workdir.doctor(&["status"]).out.contains("read the nodes"));
    for node in ["node1", "node2"] {
        wait_until("slurmd to register", || slurm.node_state(node).is_ok_and(|state| state == "IDLE"));
    }
    wait_until("the nodes to be free again", || used("node1") == "free" && used("node2") == "free");

    slurm.kill(Daemon::Node("node2")).unwrap();
    wait_until("a node that does not answer", || used("node2") == "unknown");
    assert_eq!(used("node1"), "free");
    assert!(!reason(slurm, "node2").starts_with("doctor:"), "silence is no fault of the node");
    slurm.restart(Daemon::Node("node2")).unwrap();
    wait_until("the node to be free again", || used("node2") == "free");
    assert_eq!(rows(workdir, "memory").len(), 2, "nothing was due");
    no_run_has_two_jobs(slurm);
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
