//! `doctor bundle`: packs what a vendor or a cloud provider asks for about a case into one archive.

use std::{
    fs,
    io::Read,
    path::PathBuf,
    time::{Duration, Instant},
};

use doctor_backend::ReportProgress;
use doctor_core::{
    ids::{CaseId, IdSource, NodeName},
    lifecycle::NodeState,
    node::Occupancy,
    time::Timestamp,
};
use doctor_engine::{
    share::Share,
    support_bundle::{self, BundleFile, NodeEvidence},
};
use doctor_store::Store;
use serde::Serialize;

use super::confirmation::{Change, ChangeArgs};
use crate::{
    context::Context,
    controller::ClusterConnection,
    exit::Exit,
    failure::{Failure, Result},
};

/// Pack everything known about a case into one .tar.gz for the vendor or the cloud provider.
///
/// The archive holds a summary with serials, UUIDs and the physical host, the case and its steps, findings with their
/// evidence lines, the hardware inventory, results, the audit trail, evidence documents and logs of the newest runs,
/// firmware versions read by the node's checks, and the fields that Azure (guest-health category), AWS and Google ask
/// for. --from-node also queries the node: current firmware, its name at the cloud provider, and the output of
/// nvidia-bug-report.sh. A job on the node does that on Kubernetes, Slurm and dstack; if it fails, the summary gives the
/// reason. It asks for confirmation, is recorded in the audit trail, and is refused while the node is in use, tested or
/// repaired. Text that looks like a token, a password or a key is removed. The controller writes such an archive below handoff/ in the
/// shared directory before a step that destroys evidence.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Case id, as `doctor cases` prints it.
    #[arg(value_name = "CASE")]
    pub case: CaseId,
    /// File to write. Default: case-CASE.tar.gz in the current directory.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Run `doctor-node report` on the node and add its output. This may take minutes.
    #[arg(long)]
    from_node: bool,
    /// Add this file unchanged, such as nvidia-bug-report.log.gz from the node. At most 64 MiB.
    #[arg(long = "with", value_name = "FILE")]
    more: Vec<PathBuf>,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// The time to wait for a report, which is longer than a report may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(6 * 60);
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The size limit of one added file.
const MAX_FILE_BYTES: u64 = 64 << 20;

#[derive(Debug, Serialize)]
struct BundleView {
    case: CaseId,
    path: PathBuf,
    bytes: usize,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let store = context.store()?;
    let Some(case) = store.case(args.case)? else {
        let known = "those that `doctor cases --all` lists".to_owned();
        return Err(Failure::Unknown { what: "case", name: args.case.to_string(), known });
    };
    let more: Result<Vec<BundleFile>> = args.more.iter().map(read).collect();
    // Without the shared directory the archive lacks logs but is still useful.
    let share = context.share().ok();
    let from_node = if args.from_node {
        refuse_while_in_use(context, &store, &case.node)?;
        let world = ClusterConnection::open(context.loaded()?)?;
        args.confirm_report(context, &case.node, world.clock.now())?;
        collect_node_report(&world, &case.node)?
    } else {
        Err("not requested (`doctor bundle --from-node`)".to_owned())
    };
    let bytes = support_bundle::archive(&store, share.as_ref().map(Share::files), args.case, &from_node, more?)?;
    let mut remarks = Vec::new();
    if let (true, Err(why)) = (args.from_node, &from_node) {
        remarks.push(format!("The node sent no report: {why}."));
    }
    if share.is_none() {
        remarks.push("The shared directory could not be read: the archive has no logs.".to_owned());
    }
    args.save(context, &bytes, &remarks)
}

impl Args {
    /// Whether only this machine can pack the archive: with a new report of the node, or with more files.
    pub(crate) const fn needs_this_machine(&self) -> bool {
        self.from_node || !self.more.is_empty()
    }

    /// Asks for confirmation of a report on a node, and records it.
    fn confirm_report(&self, context: &Context, node: &NodeName, at: Timestamp) -> Result<()> {
        let by = self.change_args.operator_name();
        let why = format!("doctor bundle {} --from-node", self.case);
        self.change_args.confirm(&Change {
            plan: format!(
                "Run `doctor-node report` on {node}. It takes minutes, and its programs occupy the driver meanwhile."
            ),
            changes: Vec::new(),
            by: by.clone(),
            why: why.clone(),
            at,
            done: String::new(),
            next: String::new(),
        })?;
        let store = context.store_for_changes()?;
        Ok(store.operator_transaction(|commands| commands.record_report(node, &by, &why, at))?)
    }

    /// Writes the archive and reports that.
    pub(crate) fn save(&self, context: &Context, bytes: &[u8], remarks: &[String]) -> Result<Exit> {
        let path = self.out.clone().unwrap_or_else(|| PathBuf::from(format!("case-{}.tar.gz", self.case)));
        fs::write(&path, bytes).map_err(|source| Failure::File { operation: "writing", path: path.clone(), source })?;
        let packed = BundleView { case: self.case, path, bytes: bytes.len() };
        context.out.show(&packed, |page| {
            page.line(format!("Wrote {} ({} KiB).", packed.path.display(), packed.bytes.div_ceil(1024)));
            for remark in remarks {
                page.line(remark);
            }
            page.line("Review it before you share it: only text that looks like a secret is removed.");
        })?;
        Ok(Exit::Ok)
    }
}

/// Refuses a report that would disturb a user's job, a repair or a test: its programs take minutes and lock the driver.
fn refuse_while_in_use(context: &Context, store: &Store, node: &NodeName) -> Result<()> {
    let facts = context.facts(store)?;
    let Some(record) = facts.snapshot.nodes.iter().find(|record| record.node.name == *node) else { return Ok(()) };
    let why = match (&record.node.occupancy, &record.state) {
        (Occupancy::Busy { by }, _) => format!("{node} is in use by {by}, which the report would disturb"),
        (_, NodeState::Repairing { .. }) => format!("a repair step is in progress on {node}"),
        _ if facts.run_on(node).is_some() => format!("a validation run is on {node}"),
        _ => return Ok(()),
    };
    Err(Failure::Refused { why, instead: format!("`doctor why {node}`, or the archive without --from-node") })
}

/// Starts the report on the node and waits for it.
fn collect_node_report(world: &ClusterConnection, node: &NodeName) -> Result<NodeEvidence> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| Failure::Other(format!("reading random bytes: {error}")))?;
    let mut ids = IdSource::new(u64::from_le_bytes(random));
    ids.set_time(world.clock.now());
    let op = ids.op();
    let began = Instant::now();
    loop {
        match world.backend.collect_report(node, op) {
            ReportProgress::Done(report) => return Ok(Ok(*report)),
            ReportProgress::Failed { text } => return Ok(Err(text)),
            ReportProgress::InProgress if began.elapsed() > REPORT_TIMEOUT => {
                return Ok(Err(format!("the node did not finish it within {} minutes", REPORT_TIMEOUT.as_secs() / 60)));
            }
            ReportProgress::InProgress => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn read(path: &PathBuf) -> Result<BundleFile> {
    let failed = |source| Failure::File { operation: "reading", path: path.clone(), source };
    let mut bytes = Vec::new();
    fs::File::open(path).and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(Failure::Usage(format!("{} is larger than 64 MiB", path.display())));
    }
    let name = path.file_name().map_or_else(|| "file".to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(BundleFile { name, bytes })
}
