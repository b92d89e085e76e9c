//! Names of the tests that are compiled into this program. The runner looks them up here; `builtin` implements them.

/// A test that is compiled into the program.
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
