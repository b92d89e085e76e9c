//! The scene of this process, looked up by GPU and field.

use std::sync::{Mutex, PoisonError};

use crate::{
    cuda,
    fixture::{FakeGpu, Field, Fixture},
};

pub(crate) const NOT_SUPPORTED: u32 = 3;

/// Loaded by the first call, and again after the last session was closed: a long-running program opens a session per
/// read, and must neither see an old file nor accumulate old fixtures.
static FIXTURE: Mutex<Option<&'static Fixture>> = Mutex::new(None);

/// The number of open sessions: threads may have one each.
static SESSIONS: Mutex<u32> = Mutex::new(0);

/// Opens a session. Returns the fixture's error code, if it has one.
pub(crate) fn open_session() -> Result<(), u32> {
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    match fixture().init {
        0 => *sessions += 1,
        code => return Err(code),
    }
    Ok(())
}

/// Closes a session, and frees the fixture with the last one.
pub(crate) fn close_session() {
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    *sessions = sessions.saturating_sub(1);
    if *sessions == 0 {
        // SAFETY: by NVIDIA's header, no other call runs during the last shutdown.
        unsafe { free_fixture() };
    }
}

/// Returns the fixture. A file that cannot be read stands for a driver that does not work.
pub(crate) fn fixture() -> &'static Fixture {
    let mut cached = FIXTURE.lock().unwrap_or_else(PoisonError::into_inner);
    cached.get_or_insert_with(|| {
        let text = std::env::var_os("DOCTOR_FAKE_NVIDIA").and_then(|path| std::fs::read_to_string(path).ok());
        let loaded = match text.map(|text| Fixture::parse(&text)) {
            Some(Ok(loaded)) => loaded,
            Some(Err(error)) => {
                eprintln!("fake NVML: {error}");
                Fixture { init: 999, ..Fixture::default() }
            }
            None => Fixture { init: 999, ..Fixture::default() },
        };
        Box::leak(Box::new(loaded))
    })
}

/// Frees the fixture.
///
/// # Safety
/// No other function of this library may be running, as NVML requires for the last shutdown.
unsafe fn free_fixture() {
    if let Some(loaded) = FIXTURE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // SAFETY: created by `Box::leak`, just removed from its place, and unused, as the caller guarantees.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(loaded).cast_mut()) });
    }
}

/// Hangs if the fixture says so for this function.
pub(crate) fn maybe_hang(function: &str) {
    while fixture().hang == function {
        std::thread::sleep(std::time::Duration::from_secs(3600));
    }
}

impl FakeGpu {
    /// Hangs if the fixture says so for this GPU, or as long as the kernel blocks the write.
    pub(crate) fn maybe_hang(&self) {
        if !self.blocking_file.is_empty() {
            // The caller does not depend on the success of the write.
            let _touched = std::fs::write(&self.blocking_file, "");
        }
        if self.hang {
            loop {
                std::thread::sleep(std::time::Duration::from_secs(3600));
            }
        }
    }

    fn reading(&self, name: &str) -> Option<&Field> {
        self.field(name, !self.load.is_empty() && cuda::is_under_load(&self.bus))
    }

    pub(crate) fn number(&self, field: &str) -> Result<f64, u32> {
        match self.reading(field) {
            None | Some(Field::Text(_)) => Err(NOT_SUPPORTED),
            Some(Field::Error(code)) => Err(*code),
            Some(Field::Number(number)) => Ok(*number),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<&str, u32> {
        match self.reading(field) {
            None | Some(Field::Number(_)) => Err(NOT_SUPPORTED),
            Some(Field::Error(code)) => Err(*code),
            Some(Field::Text(text)) => Ok(text),
        }
    }

    /// Returns domain, bus and device.
    pub(crate) fn pci_location(&self) -> (u32, u32, u32) {
        place(&self.bus)
    }
}

pub(crate) fn place(bus: &str) -> (u32, u32, u32) {
    let hex = |text: Option<&str>| text.and_then(|text| u32::from_str_radix(text, 16).ok()).unwrap_or(0);
    let mut parts = bus.split([':', '.']);
    (hex(parts.next()), hex(parts.next()), hex(parts.next()))
}
