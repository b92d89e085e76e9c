//! A stand-in for DCGM's library, for tests of the health watches. `DOCTOR_FAKE_NVIDIA_DCGM` names its file, TOML:
//!
//! ```toml
//! major = 4                     # the DCGM release: 4 accepts the response of version 5, 3 that of version 4
//! connect = 0                   # the result of connecting: -21 is "the connection is not valid"
//! watched = 0                   # a bit mask of the watched systems
//! hang = ""                     # the name of a function that hangs
//! gpus = ["00000000:18:00.0"]
//! [[incident]]
//! gpu = 0
//! system = 16
//! health = 20
//! error = 4
//! text = "a double-bit error"
//! ```
//!
//! Enabling watches writes `DOCTOR_FAKE_NVIDIA_DCGM.watched`, which the next process reads. The offsets of struct fields
//! are computed independently from DCGM's header, in bytes, so that a mistake in the program's structs shows.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    path::PathBuf,
    sync::OnceLock,
};

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Engine {
    major: u32,
    #[serde(default)]
    connect: c_int,
    #[serde(default)]
    watched: c_uint,
    #[serde(default)]
    hang: String,
    #[serde(default)]
    gpus: Vec<String>,
    #[serde(default)]
    incident: Vec<Incident>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Incident {
    gpu: c_uint,
    system: c_uint,
    health: c_uint,
    error: c_uint,
    text: String,
}

const HANDLE: usize = 7;
const BAD_PARAMETER: c_int = -1;
const VERSION_MISMATCH: c_int = -12;
const GENERIC: c_int = -3;

fn path() -> Option<PathBuf> {
    std::env::var_os("DOCTOR_FAKE_NVIDIA_DCGM").map(PathBuf::from)
}

fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let text = path().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        toml::from_str(&text).unwrap_or_else(|error| {
            eprintln!("fake DCGM: {error}");
            Engine { connect: GENERIC, ..Engine::default() }
        })
    })
}

fn called(function: &str) -> &'static Engine {
    let engine = engine();
    if engine.hang == function {
        loop {
            std::thread::park();
        }
    }
    engine
}

#[unsafe(no_mangle)]
pub extern "C" fn dcgmInit() -> c_int {
    called("dcgmInit");
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn dcgmShutdown() -> c_int {
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn dcgmDisconnect(handle: usize) -> c_int {
    if handle == HANDLE { 0 } else { BAD_PARAMETER }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dcgmConnect_v2(_: *const c_char, params: *mut c_uint, handle: *mut usize) -> c_int {
    let engine = called("dcgmConnect_v2");
    // SAFETY: the first word of the struct is its version.
    if unsafe { *params } != 2 << 24 | 16 {
        return VERSION_MISMATCH;
    }
    // SAFETY: the caller provides a variable for the handle.
    unsafe { *handle = HANDLE };
    engine.connect
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dcgmHealthGet(_: usize, _: usize, systems: *mut c_uint) -> c_int {
    let engine = called("dcgmHealthGet");
    let stored = path().and_then(|path| std::fs::read_to_string(path.with_extension("watched")).ok());
    let stored = stored.and_then(|text| text.parse().ok()).unwrap_or(engine.watched);
    // SAFETY: the caller provides a variable for them.
    unsafe { *systems = stored };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn dcgmHealthSet(_: usize, _: usize, systems: c_uint) -> c_int {
    let written = path().map(|path| std::fs::write(path.with_extension("watched"), systems.to_string()));
    if matches!(written, Some(Ok(()))) { 0 } else { GENERIC }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dcgmGetAllDevices(_: usize, ids: *mut c_uint, count: *mut c_int) -> c_int {
    let gpus = &called("dcgmGetAllDevices").gpus;
    for (n, _) in gpus.iter().enumerate().take(32) {
        // SAFETY: the caller's list has room for 32.
        unsafe { *ids.add(n) = n as c_uint };
    }
    // SAFETY: the caller provides a variable for it.
    unsafe { *count = gpus.len().min(32) as c_int };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dcgmGetDeviceAttributes(_: usize, gpu: c_uint, attributes: *mut c_void) -> c_int {
    const SIZE: usize = 5220;
    const BUS: usize = 3636;
    let Some(bus) = called("dcgmGetDeviceAttributes").gpus.get(gpu as usize) else { return BAD_PARAMETER };
    // SAFETY: the first word of the struct is its version, which contains its size.
    if unsafe { *attributes.cast::<c_uint>() } != 3 << 24 | SIZE as c_uint {
        return VERSION_MISMATCH;
    }
    // SAFETY: the struct has the size that it contains, and so has the text in it.
    unsafe { write(attributes.cast::<u8>().add(BUS), bus, 256) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dcgmHealthCheck(_: usize, _: usize, response: *mut c_void) -> c_int {
    const INCIDENT: usize = 1044;
    let engine = called("dcgmHealthCheck");
    let (number, max_incidents) = if engine.major >= 4 { (5, 1024) } else { (4, 64) };
    // SAFETY: the first word of the struct is its version, which contains its size.
    if unsafe { *response.cast::<c_uint>() } != number << 24 | (12 + max_incidents * INCIDENT) as c_uint {
        return VERSION_MISMATCH;
    }
    let put = |at: usize, value: c_uint| {
        // SAFETY: `at` is below the size that the struct contains.
        unsafe { *response.cast::<u8>().add(at).cast::<c_uint>() = value };
    };
    let incidents = &engine.incident[..engine.incident.len().min(max_incidents)];
    put(4, incidents.iter().map(|incident| incident.health).max().unwrap_or(0));
    put(8, incidents.len() as c_uint);
    for (n, incident) in incidents.iter().enumerate() {
        let at = 12 + n * INCIDENT;
        put(at, incident.system);
        put(at + 4, incident.health);
        // SAFETY: as above; the text has 1024 bytes.
        unsafe { write(response.cast::<u8>().add(at + 8), &incident.text, 1024) };
        put(at + 1032, incident.error);
        put(at + 1036, 1);
        put(at + 1040, incident.gpu);
    }
    0
}

/// Writes a zero-terminated text, cut to `most` bytes.
///
/// # Safety
/// There is room for `most` bytes.
unsafe fn write(to: *mut u8, text: &str, max_bytes: usize) {
    let text = &text.as_bytes()[..text.len().min(max_bytes - 1)];
    // SAFETY: the caller guarantees the room, and the last byte is left for the zero.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len());
        *to.add(text.len()) = 0;
    }
}
