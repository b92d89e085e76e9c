//! The machine type of the agent's node, detected as `doctor-node check` does, with the site's profiles from the
//! controller.
//!
//! What the machine says of itself is kept in the state directory until the next boot: a GPU that disappears must not
//! change the type by which it is missed. The cloud's metadata service is queried on a thread of its own, so that one
//! that does not answer delays no check.

use std::{
    fs, io,
    io::Write,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver},
    thread,
};

use doctor_checks::site_profiles::{MAX_REPLY_BYTES, SiteProfiles};
use doctor_core::{
    ids::Sku,
    profile::{MachineTypes, Profile, ProfileFile},
    sku_detection::MachineFacts,
};
use serde::{Deserialize, Serialize};

use crate::{
    job::output::write_atomically,
    profile::{self, GatheredFacts},
    runner::ProbeRunner,
};

const MACHINE_FILE: &str = "machine.json";
const PROFILES_FILE: &str = "profiles.json";
/// A machine file has a few KiB.
const MAX_MACHINE_BYTES: u64 = 1 << 20;

/// Where facts beyond the machine's own files come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineSources {
    /// The cluster's label for the machine type.
    pub label: Option<Sku>,
    /// URL of the cloud's metadata service.
    pub metadata: String,
}

/// What is kept until the next boot. Hooks read it too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct StoredMachine {
    boot: Option<String>,
    facts: MachineFacts,
    profile: Option<Profile>,
}

/// The detected machine.
#[derive(Debug)]
pub(super) struct Machine {
    state: PathBuf,
    boot: Option<String>,
    facts: Option<MachineFacts>,
    /// Of this type, if it is known.
    profile: Option<Profile>,
    /// The site's profiles that were used last.
    site: SiteProfiles,
    /// The pending answer of the cloud.
    cloud: Option<Receiver<String>>,
    wake: UnixStream,
}

impl Machine {
    /// Loads the site's profiles that were received last. The machine itself is looked at later. A byte on `wake` tells
    /// that the cloud has answered.
    pub(super) fn load(state: &Path, wake: UnixStream) -> Self {
        let site = read_limited(&state.join(PROFILES_FILE), MAX_REPLY_BYTES as u64)
            .and_then(|text| SiteProfiles::new(serde_json::from_str(&text).ok()?).ok());
        Self {
            state: state.to_owned(),
            boot: None,
            facts: None,
            profile: None,
            site: site.filter(|site| machine_types(site).is_ok()).unwrap_or_default(),
            cloud: None,
            wake,
        }
    }

    /// Digest of the site's profiles in use.
    pub(super) fn site_digest(&self) -> String {
        self.site.digest()
    }

    pub(super) const fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// The machine's facts for a report.
    pub(super) fn facts(&self) -> Option<MachineFacts> {
        self.facts.clone()
    }

    /// Looks at the machine again, and starts to query its cloud if that has not answered during this boot. Returns a
    /// line for the log if the machine type changed.
    pub(super) fn refresh(&mut self, sources: &MachineSources, runner: &dyn ProbeRunner) -> Option<String> {
        let boot = profile::boot_id(runner);
        if self.facts.is_none() || self.boot != boot {
            self.facts = stored(&self.state, boot.as_deref()).map(|stored| stored.facts);
            self.boot = boot;
        }
        let mut now = profile::local_facts(sources.label.clone(), runner).bounded();
        let cached = || profile::cached_instance_type(&self.state, self.boot.as_deref()?);
        now.instance_type = now.cloud().and_then(|_| cached());
        self.query_cloud(&now, sources);
        self.learn(now)
    }

    /// Adopts the cloud's answer, if it has arrived. Returns a line for the log if the machine type changed.
    pub(super) fn take_cloud_answer(&mut self) -> Option<String> {
        let answer = self.cloud.as_ref()?.try_recv();
        if answer == Err(mpsc::TryRecvError::Empty) {
            return None;
        }
        self.cloud = None;
        let now = MachineFacts { instance_type: Some(answer.ok()?), ..MachineFacts::default() };
        self.learn(now.bounded())
    }

    /// Adopts profiles that the controller has sent. Returns a line for the log: whether they are used, and what that
    /// changed.
    pub(super) fn set_site_profiles(&mut self, site: SiteProfiles) -> String {
        if let Err(error) = machine_types(&site) {
            return format!("the controller's profiles are not usable, the previous ones stay in force: {error}");
        }
        let written = serde_json::to_vec(site.files()).map_err(io::Error::from);
        // If they cannot be stored, they are sent again after a restart.
        let _stored = written.and_then(|text| write_atomically(&self.state.join(PROFILES_FILE), &text));
        self.site = site;
        let changed = self.detect().unwrap_or_else(|| "the machine type is unchanged".to_owned());
        format!("using {} of the controller's profiles: {changed}", self.site.files().len())
    }

    fn query_cloud(&mut self, now: &MachineFacts, sources: &MachineSources) {
        let Some(cloud) = now.cloud().filter(|_| now.instance_type.is_none() && self.cloud.is_none()) else { return };
        let (give, answer) = mpsc::channel();
        let (url, state, boot) = (sources.metadata.clone(), self.state.clone(), self.boot.clone());
        let Ok(mut wake) = self.wake.try_clone() else { return };
        let query = move || {
            let cache = boot.as_deref().map(|boot| (state.as_path(), boot));
            if let Ok(name) = profile::instance_type(cloud, &url, cache) {
                // Nothing to do if the agent has ended.
                let _received = give.send(name);
                let _woken = wake.write(&[1]);
            }
        };
        let started = thread::Builder::new().name("doctor-metadata".to_owned()).spawn(query);
        self.cloud = started.ok().map(|_| answer);
    }

    /// Adds new facts to those of this boot.
    fn learn(&mut self, now: MachineFacts) -> Option<String> {
        let known = self.facts.clone().unwrap_or_default();
        let longer = |known: Vec<String>, now: Vec<String>| if now.len() >= known.len() { now } else { known };
        let merged = MachineFacts {
            instance_type: now.instance_type.or(known.instance_type),
            declared_sku: now.declared_sku.or(known.declared_sku),
            vendor: now.vendor.or(known.vendor),
            product: now.product.or(known.product),
            asset_tag: now.asset_tag.or(known.asset_tag),
            gpu_ids: longer(known.gpu_ids, now.gpu_ids),
            gpu_names: longer(known.gpu_names, now.gpu_names),
        };
        if self.facts.as_ref() == Some(&merged) && self.profile.is_some() {
            return None;
        }
        self.facts = Some(merged);
        self.detect()
    }

    /// Detects the type from the known facts, and stores the result.
    fn detect(&mut self) -> Option<String> {
        let facts = self.facts.clone()?;
        let types = machine_types(&self.site).unwrap_or_else(|_| doctor_checks::profiles::built_in());
        let choice = profile::choose(&types, GatheredFacts { machine: facts.clone(), notes: Vec::new() });
        let changed = choice.profile != self.profile;
        let summary = format!("machine type {}", choice.summary());
        self.profile = choice.profile;
        let stored = StoredMachine { boot: self.boot.clone(), facts, profile: self.profile.clone() };
        let text = serde_json::to_vec(&stored).map_err(io::Error::from);
        // If it cannot be stored, the machine is looked at again after a restart.
        let _stored = text.and_then(|text| write_atomically(&self.state.join(MACHINE_FILE), &text));
        changed.then_some(summary)
    }
}

/// Returns the profile that the agent of this state directory has detected during this boot.
pub(crate) fn stored_profile(state: &Path, runner: &dyn ProbeRunner) -> Option<Profile> {
    stored(state, profile::boot_id(runner).as_deref())?.profile
}

/// Returns the facts that the agent of this state directory has last gathered.
pub(super) fn stored_facts(state: &Path) -> Option<MachineFacts> {
    read_stored(state).map(|stored| stored.facts)
}

fn stored(state: &Path, boot: Option<&str>) -> Option<StoredMachine> {
    read_stored(state).filter(|stored| boot.is_some() && stored.boot.as_deref() == boot)
}

fn read_stored(state: &Path) -> Option<StoredMachine> {
    serde_json::from_str(&read_limited(&state.join(MACHINE_FILE), MAX_MACHINE_BYTES)?).ok()
}

fn read_limited(path: &Path, max_bytes: u64) -> Option<String> {
    let is_short = fs::metadata(path).is_ok_and(|file| file.len() <= max_bytes);
    is_short.then(|| fs::read_to_string(path).ok())?
}

/// Returns the built-in machine types with the site's merged over them.
fn machine_types(site: &SiteProfiles) -> Result<MachineTypes, String> {
    let files: Result<Vec<ProfileFile>, _> = site.files().iter().map(|text| ProfileFile::read(text)).collect();
    profile::with_site_files(files.map_err(|error| error.to_string())?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use doctor_checks::probe::{FileText, Probe, ProbeOutput};

    use super::*;
    use crate::runner::FixtureRunner;

    const SOURCES: MachineSources = MachineSources { label: None, metadata: String::new() };

    /// A machine with this many H100 on its bus.
    fn h100s(count: usize, boot: &str, vendor: &str) -> FixtureRunner {
        let read = |path: &str, text: &str| (Probe::read(path), ProbeOutput::Text(format!("{text}\n")));
        let gpu = FileText { path: String::new(), text: Ok("PCI_CLASS=30200\nPCI_ID=10DE:2330\n".to_owned()) };
        let nic = FileText { path: String::new(), text: Ok("PCI_CLASS=20700\nPCI_ID=15B3:1021\n".to_owned()) };
        let files = std::iter::repeat_n(gpu, count).chain([nic]).collect();
        FixtureRunner::new([
            read("/proc/sys/kernel/random/boot_id", boot),
            read("/sys/class/dmi/id/sys_vendor", vendor),
            (Probe::glob("/sys/bus/pci/devices/*/uevent"), ProbeOutput::Files(files)),
        ])
    }

    fn machine(state: &Path) -> (Machine, UnixStream) {
        let (wake, woken) = UnixStream::pair().unwrap();
        (Machine::load(state, wake), woken)
    }

    fn sku(machine: &Machine) -> Option<&str> {
        machine.profile().map(|profile| profile.sku.as_str())
    }

    #[test]
    fn a_type_is_kept_until_the_next_boot_even_if_all_gpus_disappear() {
        let state = tempfile::tempdir().unwrap();
        let (mut first, _woken) = machine(state.path());
        assert_eq!((sku(&first), first.facts()), (None, None));
        let line = first.refresh(&SOURCES, &h100s(8, "boot-1", "")).unwrap();
        assert!(line.contains("hgx-h100"), "{line}");
        assert_eq!(first.refresh(&SOURCES, &h100s(0, "boot-1", "")), None);
        assert_eq!((sku(&first), first.facts().unwrap().gpu_ids.len()), (Some("hgx-h100"), 8));
        // The agent restarts, and a hook looks.
        let (mut second, _woken) = machine(state.path());
        second.refresh(&SOURCES, &h100s(2, "boot-1", ""));
        assert_eq!(sku(&second), Some("hgx-h100"));
        let of_hook = |boot: &str| stored_profile(state.path(), &h100s(2, boot, "")).map(|profile| profile.sku);
        assert_eq!(of_hook("boot-1").as_ref().map(Sku::as_str), Some("hgx-h100"));
        assert_eq!(of_hook("boot-2"), None);
        second.refresh(&SOURCES, &h100s(2, "boot-2", ""));
        assert_eq!(
            (sku(&second), second.facts().unwrap().gpu_ids.len()),
            (Some("h100-sxm"), 2),
            "only the chip is known"
        );
    }

    #[test]
    fn the_sites_profiles_are_used_and_kept_and_invalid_ones_change_nothing() {
        let state = tempfile::tempdir().unwrap();
        let site = |text: &str| SiteProfiles::new(vec![text.to_owned()]).unwrap();
        let (mut first, _woken) = machine(state.path());
        let none = first.site_digest();
        first.refresh(&SOURCES, &h100s(8, "boot-1", ""));
        let ours = site("sku = \"hgx-h100\"\nversion = 40\n[expect]\nnvme_disks = 4\n");
        let line = first.set_site_profiles(ours.clone());
        assert!(line.contains("using 1 of the controller's profiles: machine type hgx-h100"), "{line}");
        assert_eq!(
            (first.site_digest(), first.profile().map(|profile| profile.version)),
            (ours.digest(), Some(41)),
            "with that of the chip"
        );
        for bad in ["sku = 1\n", "sku = \"x\"\nversion = 1\nlike = \"no-such-type\"\n"] {
            let line = first.set_site_profiles(site(bad));
            assert!(line.contains("not usable, the previous ones stay in force: "), "{line}");
        }
        let (mut second, _woken) = machine(state.path());
        assert_eq!(second.site_digest(), ours.digest());
        second.refresh(&SOURCES, &h100s(8, "boot-1", ""));
        assert_eq!(second.profile().map(|profile| profile.version), Some(41));
        fs::write(state.path().join(PROFILES_FILE), "[\"sku").unwrap();
        assert_eq!(machine(state.path()).0.site_digest(), none, "a damaged file");
    }

    #[test]
    fn a_cloud_is_queried_beside_the_checks_and_its_answer_is_adopted() {
        let state = tempfile::tempdir().unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sources = MachineSources { label: None, metadata: format!("http://{}", listener.local_addr().unwrap()) };
        let (mut aws, mut woken) = machine(state.path());
        aws.refresh(&sources, &h100s(8, "boot-1", "Amazon EC2"));
        assert_eq!(sku(&aws), Some("hgx-h100"), "the checks do not wait for the cloud");
        for response in ["TOKEN=", "p5.48xlarge"] {
            let (mut stream, _) = listener.accept().unwrap();
            let _request = io::Read::read(&mut stream, &mut [0; 4096]).unwrap();
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{response}", response.len()).unwrap();
        }
        io::Read::read_exact(&mut woken, &mut [0]).unwrap();
        assert!(aws.take_cloud_answer().unwrap().contains("p5.48xlarge"));
        assert_eq!(sku(&aws), Some("p5.48xlarge"));
        // The answer is cached: the service is gone.
        drop(listener);
        let (mut again, _woken) = machine(state.path());
        again.refresh(&sources, &h100s(8, "boot-1", "Amazon EC2"));
        assert_eq!(sku(&again), Some("p5.48xlarge"));
        assert_eq!(again.take_cloud_answer(), None);
    }
}
