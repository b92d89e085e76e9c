//! PCI devices as the kernel lists them: one `uevent` file per device has its class, identity and driver.

use doctor_core::observation::{Entity, EntityKind, Observation, ObservationBuilder};

use crate::{
    files::{glob_files, match_pattern, unexpected_content},
    probe::ProbeOutput,
};

pub const UEVENT: &str = "/sys/bus/pci/devices/*/uevent";
/// Each links to its location in the tree: `/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0`.
pub const DEVICES: &str = "/sys/bus/pci/devices/*";

/// One function on the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function<'a> {
    /// Such as `0000:18:00.0`.
    pub bus: &'a str,
    /// Base class, subclass and interface: `0x020700`.
    pub class: u32,
    /// Vendor and device in the kernel's format: `15B3:1021`.
    pub id: &'a str,
    pub driver: Option<&'a str>,
}

/// The kind of a function, as far as checks distinguish it.
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub enum Kind {
    Gpu,
    Nic,
    Nvme,
    Bridge,
    Other,
}

impl Function<'_> {
    pub fn kind(&self) -> Kind {
        match (self.class >> 8, self.class & 0xff) {
            (0x0300 | 0x0302, _) if self.id.starts_with("10DE:") => Kind::Gpu,
            (0x0200 | 0x0207 | 0x0280, _) => Kind::Nic,
            (0x0108, 0x02) => Kind::Nvme,
            (0x0604, _) => Kind::Bridge,
            _ => Kind::Other,
        }
    }

    pub fn is_efa(&self) -> bool {
        self.id.starts_with("1D0F:EFA")
    }

    pub fn entity(&self) -> Entity {
        let kind = match self.kind() {
            Kind::Gpu => EntityKind::Gpu,
            Kind::Nic => EntityKind::Nic,
            Kind::Nvme => EntityKind::Disk,
            Kind::Bridge | Kind::Other if self.is_efa() => EntityKind::Nic,
            Kind::Bridge | Kind::Other => EntityKind::Link,
        };
        Entity::new(kind, self.bus)
    }
}

/// Returns every function on the bus. Records those whose file cannot be read in `builder`.
///
/// # Errors
/// Returns the observation that the check should return.
pub fn functions<'a>(
    output: Option<&'a ProbeOutput>,
    builder: &mut ObservationBuilder,
) -> Result<Vec<Function<'a>>, Observation> {
    let mut all = Vec::new();
    for file in glob_files(output)? {
        match (match_pattern(UEVENT, &file.path).as_deref(), &file.text) {
            (Some([bus]), Ok(text)) => match parse_function(bus, text) {
                Some(function) => all.push(function),
                None => builder.unreadable(unexpected_content(&file.path, text)),
            },
            (Some(_), Err(failure)) => builder.unreadable(failure.clone()),
            _ => {}
        }
    }
    Ok(all)
}

fn parse_function<'a>(bus: &'a str, text: &'a str) -> Option<Function<'a>> {
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let class = u32::from_str_radix(value("PCI_CLASS")?, 16).ok()?;
    Some(Function { bus, class, id: value("PCI_ID")?, driver: value("DRIVER") })
}

/// Returns the bus id of the bridge above a device, from the target of its link. Returns `None` directly below the
/// root.
pub fn parent_bridge(sysfs_path: &str) -> Option<&str> {
    let mut parts = sysfs_path.rsplit('/').skip(1);
    parts.next().filter(|name| name.split(':').count() == 3)
}

/// Returns the bus ids of all bridges above a device, nearest first.
pub fn parent_bridges(sysfs_path: &str) -> impl Iterator<Item = &str> {
    sysfs_path.rsplit('/').skip(1).take_while(|name| name.split(':').count() == 3)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A `uevent` file in the kernel's format.
    pub(crate) fn uevent(class: &str, id: &str, driver: Option<&str>) -> String {
        let driver = driver.map(|name| format!("DRIVER={name}\n")).unwrap_or_default();
        format!("{driver}PCI_CLASS={class}\nPCI_ID={id}\nPCI_SUBSYS_ID=0000:0000\n")
    }

    // Captured: Linux 6.18, virtual machine, 2026-11-15; shortened.
    const VIRTIO: &str = "DRIVER=virtio-pci\nPCI_CLASS=20000\nPCI_ID=1AF4:1041\nPCI_SUBSYS_ID=1AF4:1041\n\
        PCI_SLOT_NAME=0000:00:03.0\nMODALIAS=pci:v00001AF4d00001041sv00001AF4sd00001041bc02sc00i00\n";

    #[test]
    fn functions_are_identified_by_their_class() {
        let path = "/sys/bus/pci/devices/0000:00:03.0/uevent";
        let kind_of = |text: &str| {
            let output = crate::files::tests::found(&[(path, text)]);
            functions(Some(&output), &mut ObservationBuilder::default())
                .unwrap()
                .first()
                .map(|f| (f.kind(), f.entity().to_string()))
        };
        for (text, kind, entity) in [
            (VIRTIO.to_owned(), Kind::Nic, "nic:0000:00:03.0"),
            (uevent("30200", "10DE:2335", Some("nvidia")), Kind::Gpu, "gpu:0000:00:03.0"),
            (uevent("30000", "1A03:2000", Some("ast")), Kind::Other, "link:0000:00:03.0"),
            (uevent("20700", "15B3:1021", Some("mlx5_core")), Kind::Nic, "nic:0000:00:03.0"),
            (uevent("10802", "144D:A80A", Some("nvme")), Kind::Nvme, "disk:0000:00:03.0"),
            (uevent("60400", "1000:C030", Some("pcieport")), Kind::Bridge, "link:0000:00:03.0"),
        ] {
            assert_eq!(kind_of(&text), Some((kind, entity.to_owned())), "{text}");
        }
        assert_eq!(kind_of("nonsense"), None);
    }

    #[test]
    fn bridges_are_found_in_the_path() {
        let sysfs_path = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0";
        assert_eq!(parent_bridge(sysfs_path), Some("0000:17:00.0"));
        assert_eq!(parent_bridges(sysfs_path).collect::<Vec<_>>(), ["0000:17:00.0", "0000:16:00.0", "0000:15:01.0"]);
        assert_eq!(parent_bridge("/sys/devices/pci0000:00/0000:00:03.0"), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "((PCI_CLASS|PCI_ID|DRIVER)?=?.{0,12}\n){0,5}", sysfs_path in ".{0,60}") {
            let output = crate::files::tests::found(&[("/sys/bus/pci/devices/x/uevent", &text)]);
            for function in functions(Some(&output), &mut ObservationBuilder::default()).unwrap() {
                function.entity();
            }
            parent_bridge(&sysfs_path);
        }
    }
}
