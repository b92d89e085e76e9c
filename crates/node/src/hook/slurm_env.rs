//! Locates scontrol and slurm.conf: Slurm gives its HealthCheckProgram the node's name but no PATH and no SLURM_CONF.
//!
//! The slurmd that started the hook leads to both. It is found among the parent processes: its program is beside
//! scontrol, and its command line or environment names the configuration. A cluster without local configuration
//! ("configless") has its copy in a known directory.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use doctor_core::ids::NodeName;

use super::settings::Settings;
use crate::runner::hung_probes::stat_of;

/// Most processes between slurmd and the hook: a shell, a site's wrapper, slurmd's own helper.
const MAX_ANCESTORS: usize = 8;

const PROGRAMS: [&str; 6] =
    ["/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/local/slurm/bin", "/usr/sbin", "/bin"];

/// The first is slurmd's copy of the configuration that slurmctld sent.
const CONFIGURATIONS: [&str; 4] =
    ["/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/usr/local/etc/slurm.conf"];

/// The environment, and the slurmd among the parent processes.
#[derive(Debug, Default)]
pub(super) struct SlurmEnv {
    variables: BTreeMap<String, String>,
    slurmd: Option<Slurmd>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Slurmd {
    program: PathBuf,
    conf: Option<PathBuf>,
}

impl SlurmEnv {
    pub(super) fn new(variables: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        Self { variables: variables.filter_map(text).collect(), slurmd: find_parent_slurmd() }
    }

    /// Returns a variable that is set and not empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Returns Slurm's name of this node.
    pub(super) fn node(&self, settings: &Settings) -> Option<NodeName> {
        let from_env = || self.get("SLURMD_NODENAME").and_then(|name| NodeName::new(name).ok());
        settings.node.clone().or_else(from_env)
    }

    /// Returns the directories that may hold Slurm's programs, the likeliest first.
    pub(super) fn programs(&self, settings: &Settings) -> Vec<PathBuf> {
        let mut folders: Vec<PathBuf> = settings.slurm_programs.iter().cloned().collect();
        if let Some(folder) = self.slurmd.as_ref().and_then(|slurmd| slurmd.program.parent()) {
            folders.extend(folder.parent().map(|prefix| prefix.join("bin")));
            folders.push(folder.to_owned());
        }
        folders
            .extend(self.get("PATH").unwrap_or_default().split(':').filter(|one| one.starts_with('/')).map(Into::into));
        folders.extend(PROGRAMS.map(PathBuf::from));
        folders
    }

    /// Returns the path of slurm.conf. `None` leaves it to Slurm's programs.
    pub(super) fn conf(&self, settings: &Settings) -> Option<PathBuf> {
        let of_slurmd = || self.slurmd.as_ref().and_then(|slurmd| slurmd.conf.clone());
        let next_to_program = || {
            let prefix = self.slurmd.as_ref()?.program.parent()?.parent()?;
            let candidates = [prefix.join("etc/slurm.conf"), prefix.join("etc/slurm/slurm.conf")];
            candidates.into_iter().find(|path| path.exists())
        };
        let default = || CONFIGURATIONS.iter().map(PathBuf::from).find(|path| path.exists());
        let configured = settings.slurm_conf.clone().or_else(|| self.get("SLURM_CONF").map(PathBuf::from));
        configured.or_else(of_slurmd).or_else(default).or_else(next_to_program)
    }
}

fn find_parent_slurmd() -> Option<Slurmd> {
    let mut pid = std::process::id();
    for _ in 0..MAX_ANCESTORS {
        pid = stat_of(pid)?.parent;
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let Ok(program) = fs::read_link(folder.join("exe")) else { continue };
        if program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("slurm")) {
            let args = zero_separated(&folder.join("cmdline"));
            let conf = conf_argument(&args).or_else(|| {
                let variables = zero_separated(&folder.join("environ"));
                variables.iter().find_map(|one| one.strip_prefix("SLURM_CONF=").map(PathBuf::from))
            });
            // A relative path is relative to slurmd's working directory.
            let conf =
                conf.map(|conf| fs::read_link(folder.join("cwd")).map_or_else(|_| conf.clone(), |cwd| cwd.join(&conf)));
            return Some(Slurmd { program, conf });
        }
    }
    None
}

/// Finds `-f FILE` or `-fFILE` on slurmd's command line.
fn conf_argument(args: &[String]) -> Option<PathBuf> {
    let mut args = args.iter().skip(1);
    while let Some(arg) = args.next() {
        match arg.strip_prefix("-f") {
            Some("") => return args.next().map(PathBuf::from),
            Some(path) => return Some(path.into()),
            None => {}
        }
    }
    None
}

fn zero_separated(path: &Path) -> Vec<String> {
    let bytes = fs::read(path).unwrap_or_default();
    let args = bytes.split(|byte| *byte == 0).filter(|arg| !arg.is_empty());
    args.map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn of(variables: &[(&str, &str)]) -> SlurmEnv {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        SlurmEnv { variables, slurmd: None }
    }

    #[test]
    fn settings_go_first_then_the_parent_slurmd_then_the_default_paths() {
        let settings = Settings::default();
        let mut env = of(&[("SLURMD_NODENAME", "n7")]);
        assert_eq!(env.node(&settings).unwrap().as_str(), "n7");
        assert!(env.programs(&settings).contains(&PathBuf::from("/usr/bin")), "without any PATH");
        env.slurmd = Some(Slurmd { program: "/opt/s/sbin/slurmd".into(), conf: Some("/opt/s/etc/slurm.conf".into()) });
        assert_eq!(env.programs(&settings)[0], PathBuf::from("/opt/s/bin"));
        assert_eq!(env.conf(&settings), Some("/opt/s/etc/slurm.conf".into()));
        env.variables.insert("SLURM_CONF".into(), "/run/a.conf".into());
        assert_eq!(env.conf(&settings), Some("/run/a.conf".into()));
        let settings = Settings {
            node: NodeName::new("n8").ok(),
            slurm_conf: Some("/x.conf".into()),
            slurm_programs: Some("/x/bin".into()),
            ..settings
        };
        assert_eq!(env.node(&settings).unwrap().as_str(), "n8");
        assert_eq!(env.conf(&settings), Some("/x.conf".into()));
        assert_eq!(env.programs(&settings)[0], PathBuf::from("/x/bin"));
    }

    #[test]
    fn the_command_line_of_slurmd_names_its_configuration_file() {
        let args = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (text, conf) in [
            ("slurmd -N node1 -f /tmp/a/slurm.conf", Some("/tmp/a/slurm.conf")),
            ("slurmd -D -f/etc/s.conf -s", Some("/etc/s.conf")),
            ("slurmd -D -s", None),
            ("slurmd --conf-server ctl:6817", None),
        ] {
            assert_eq!(conf_argument(&args(text)), conf.map(PathBuf::from), "{text}");
        }
    }
}
