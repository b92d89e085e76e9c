//! The tests that this program brings along, by name. The runner knows them by this list; `builtin` has their work.

/// A test that comes with the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuiltinTest {
    Collective,
    Dcgm,
    Dl,
    Fabric,
    Storage,
}

impl BuiltinTest {
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "collective" => Self::Collective,
            "dcgm" => Self::Dcgm,
            "dl" => Self::Dl,
            "fabric" => Self::Fabric,
            "storage" => Self::Storage,
            _ => return None,
        })
    }
}
