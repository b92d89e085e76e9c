//! NVML: the driver's readings of each GPU.
//!
//! A session is opened for one read and closed after it: while a process holds NVML open, no GPU of the machine can be
//! reset and the driver cannot be unloaded.

mod activity;
mod fields;
mod gpu_process;
mod indexed_fields;

use std::{ffi::OsStr, fmt, os::raw::c_uint, ptr};

use doctor_checks::gpu::{
    DRIVER_NOT_LOADED, Driver, FieldValue, Gpu, GpuQueryResult, VERSION_MISMATCH, normalize_bus_id,
};
use doctor_core::observation::{FailureKind, ProbeFailure};
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t, nvmlReturn_t};

/// The soname of the library.
pub const LIBRARY: &str = "libnvidia-ml.so.1";

/// An upper bound on the number of GPUs, in case the library returns nonsense.
const MAX_GPUS: c_uint = 256;

/// The NVML return codes used here.
mod code {
    pub(super) const SUCCESS: u32 = 0;
    pub(super) const NOT_SUPPORTED: u32 = 3;
    pub(super) const NO_PERMISSION: u32 = 4;
    pub(super) const NOT_FOUND: u32 = 6;
    pub(super) const INSUFFICIENT_SIZE: u32 = 7;
    pub(super) const DRIVER_NOT_LOADED: u32 = 9;
    pub(super) const FUNCTION_NOT_FOUND: u32 = 13;
    pub(super) const LIB_RM_VERSION_MISMATCH: u32 = 18;
    pub(super) const ARGUMENT_VERSION_MISMATCH: u32 = 25;
    pub(super) const DEPRECATED: u32 = 26;
}

/// A session, open for one read.
pub struct Nvml {
    lib: NvmlLib,
    /// Whether there is a session to close.
    is_open: bool,
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nvml")
    }
}

/// A GPU by the driver's handle. Valid while the session is.
#[derive(Clone, Copy)]
struct Device<'a> {
    nvml: &'a Nvml,
    handle: nvmlDevice_t,
}

/// One GPU that the driver counts.
struct GpuHandle<'a> {
    index: c_uint,
    bus: String,
    /// The reason, if it has no handle.
    device: Result<Device<'a>, FieldValue>,
}

/// Calls a function of the library, if this version has it.
macro_rules! ask {
    ($nvml:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $nvml.lib.$function.as_ref() {
            // SAFETY: the function has the type of NVIDIA's header, pointers point to live variables of its types,
            // buffers have the given lengths, and the session is open while `$nvml` lives.
            Ok(function) => $crate::nvml::check_code(unsafe { function($($argument),*) }),
            Err(_) => Err(doctor_checks::gpu::FieldValue::NotSupported),
        }
    };
}
use ask;

impl Nvml {
    /// Loads the library and opens a session.
    ///
    /// # Errors
    /// Returns `Missing` without the library or the driver, `Denied` without permission, and `Failed` with NVML's code
    /// for everything else.
    pub fn open(library: &OsStr) -> Result<Self, ProbeFailure> {
        let name = library.to_string_lossy();
        // SAFETY: loading runs the library's initialisers. It is the driver's own library, installed by root, and
        // loaded by every program that uses a GPU.
        let lib = unsafe { NvmlLib::new(library) }
            .map_err(|error| ProbeFailure::new(FailureKind::Missing, format!("{name} cannot be loaded: {error}")))?;
        let mut nvml = Self { lib, is_open: false };
        // The driver then also answers on a machine without GPUs.
        const NO_GPUS_IS_FINE: c_uint = 1;
        let opened = match ask!(nvml, nvmlInitWithFlags(NO_GPUS_IS_FINE)) {
            Err(FieldValue::NotSupported) => ask!(nvml, nvmlInit_v2()),
            other => other,
        };
        opened.map_err(|reading| init_failure(&name, &reading))?;
        nvml.is_open = true;
        Ok(nvml)
    }

    /// Reads the fields of every GPU. `on_pci` lists the GPUs on the bus, with which the driver may disagree.
    ///
    /// `begins` is called with index and bus id before each GPU is queried, so that the caller knows on which GPU a
    /// driver hangs. Until the driver has returned the bus id, it is derived from the order on the bus, which NVML
    /// follows. It is empty if driver and bus count differently.
    pub fn query(&self, fields: &[String], on_pci: Vec<String>, begins: &mut dyn FnMut(u32, &str)) -> GpuQueryResult {
        let driver = Driver {
            version: self.driver_version().unwrap_or_default(),
            cuda: self.cuda_version(),
            source: "nvml".to_owned(),
        };
        let mut count: c_uint = 0;
        if let Err(reading) = ask!(self, nvmlDeviceGetCount_v2(&mut count)) {
            let failure =
                ProbeFailure::new(FailureKind::Failed, format!("counting GPUs: {}", describe_reading(&reading)));
            return GpuQueryResult { on_pci, driver: Err(failure), gpus: Vec::new() };
        }
        let cards = self.gpu_handles(count.min(MAX_GPUS), &on_pci, begins);
        let gpus = read_fields(&cards, fields, begins);
        GpuQueryResult { on_pci, driver: Ok(driver), gpus }
    }

    /// Returns handle and bus id of each GPU.
    fn gpu_handles(&self, count: c_uint, on_pci: &[String], begins: &mut dyn FnMut(u32, &str)) -> Vec<GpuHandle<'_>> {
        let agree = usize::try_from(count).is_ok_and(|count| count == on_pci.len());
        let mut cards = Vec::new();
        for (index, position) in (0..count).zip(0..) {
            begins(index, on_pci.get(position).filter(|_| agree).map_or("", String::as_str));
            let mut handle: nvmlDevice_t = ptr::null_mut();
            let device = ask!(self, nvmlDeviceGetHandleByIndex_v2(index, &mut handle));
            let device = device.map(|()| Device { nvml: self, handle });
            let bus = device.as_ref().ok().and_then(|device| device.bus()).unwrap_or_default();
            cards.push(GpuHandle { index, bus, device });
        }
        cards
    }

    fn driver_version(&self) -> Option<String> {
        match text(|buffer, length| ask!(self, nvmlSystemGetDriverVersion(buffer, length))) {
            FieldValue::Text(version) => Some(version),
            FieldValue::Number(_) | FieldValue::NotSupported | FieldValue::Failed { .. } => None,
        }
    }

    fn cuda_version(&self) -> Option<String> {
        let mut version = 0;
        ask!(self, nvmlSystemGetCudaDriverVersion_v2(&mut version)).ok()?;
        Some(format!("{}.{}", version / 1000, version % 1000 / 10))
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // There is nothing to do about a failed shutdown. The library is unloaded after this.
        if self.is_open {
            drop(ask!(self, nvmlShutdown()));
        }
    }
}

impl Device<'_> {
    fn bus(self) -> Option<String> {
        let mut pci = fields::zeroed();
        let pci: nvml_wrapper_sys::bindings::nvmlPciInfo_t =
            ask!(self.nvml, nvmlDeviceGetPciInfo_v3(self.handle, &mut pci)).map(|()| pci).ok()?;
        normalize_bus_id(&format!("{:08x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device))
    }
}

/// Reads every field of every GPU. Paths between GPUs are read last: by then each GPU has answered for itself, and a
/// hang on one is not attributed to another.
fn read_fields(cards: &[GpuHandle<'_>], fields: &[String], begins: &mut dyn FnMut(u32, &str)) -> Vec<Gpu> {
    let mut read: Vec<Vec<(usize, String, FieldValue)>> = cards.iter().map(|_| Vec::new()).collect();
    for between in [false, true] {
        let now: Vec<_> =
            fields.iter().enumerate().filter(|(_, field)| indexed_fields::is_peer_field(field) == between).collect();
        if now.is_empty() {
            continue;
        }
        for (card, read) in cards.iter().zip(&mut read) {
            match &card.device {
                Ok(device) => {
                    begins(card.index, &card.bus);
                    device.read(card.index, cards, &now, read);
                }
                // Without a handle, every field of the GPU fails for the same reason.
                Err(reading) => {
                    read.extend(now.iter().map(|(position, field)| (*position, (*field).clone(), reading.clone())))
                }
            }
        }
    }
    let gpu = |(card, mut read): (&GpuHandle<'_>, Vec<(usize, String, FieldValue)>)| {
        read.sort_by_key(|(position, ..)| *position);
        let fields = read.into_iter().map(|(_, field, reading)| (field, reading)).collect();
        Gpu { index: card.index, bus: card.bus.clone(), fields }
    };
    cards.iter().zip(read).map(gpu).collect()
}

/// Converts a return code.
fn check_code(code: nvmlReturn_t) -> Result<(), FieldValue> {
    match code {
        code::SUCCESS => Ok(()),
        code::NOT_SUPPORTED | code::FUNCTION_NOT_FOUND | code::ARGUMENT_VERSION_MISMATCH | code::DEPRECATED => {
            Err(FieldValue::NotSupported)
        }
        code => Err(FieldValue::Failed { code, text: error_text(code).to_owned() }),
    }
}

fn init_failure(library: &str, reading: &FieldValue) -> ProbeFailure {
    let kind = match reading {
        FieldValue::Failed { code: code::DRIVER_NOT_LOADED, .. } => FailureKind::Missing,
        FieldValue::Failed { code: code::NO_PERMISSION, .. } => FailureKind::Denied,
        _ => FailureKind::Failed,
    };
    ProbeFailure::new(kind, format!("{library} cannot be initialised: {}", describe_reading(reading)))
}

fn describe_reading(reading: &FieldValue) -> String {
    match reading {
        FieldValue::Failed { code, text } => format!("{text} (NVML {code})"),
        FieldValue::NotSupported => "not supported by this version of the library".to_owned(),
        FieldValue::Number(number) => number.to_string(),
        FieldValue::Text(text) => text.clone(),
    }
}

/// Returns our text for a code. The library's own texts need a session and change between versions.
const fn error_text(code: u32) -> &'static str {
    match code {
        1 => "NVML is not initialised",
        2 => "invalid argument",
        code::NO_PERMISSION => "no permission",
        code::NOT_FOUND => "not found",
        code::INSUFFICIENT_SIZE => "the buffer is too small",
        8 => "a power cable is not attached",
        code::DRIVER_NOT_LOADED => DRIVER_NOT_LOADED,
        10 => "the driver timed out",
        11 => "interrupts of the GPU do not arrive",
        12 => "a shared library is missing",
        14 => "the infoROM is corrupt",
        15 => "the GPU is lost",
        16 => "the GPU needs a reset",
        17 => "the operating system or a cgroup blocks the GPU",
        code::LIB_RM_VERSION_MISMATCH => VERSION_MISMATCH,
        19 => "the GPU is in use",
        20 => "out of memory",
        21 => "no data",
        _ => "unknown error",
    }
}

/// Reads a text that the library writes into a buffer.
fn text(fill: impl FnOnce(*mut std::os::raw::c_char, c_uint) -> Result<(), FieldValue>) -> FieldValue {
    let mut buffer = [0_u8; 256];
    match fill(buffer.as_mut_ptr().cast(), buffer.len() as c_uint) {
        Ok(()) => {
            let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
            FieldValue::Text(String::from_utf8_lossy(&buffer[..end]).trim().to_owned())
        }
        Err(reading) => reading,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check `gpu-driver` recognises these failures by their texts.
    #[test]
    fn a_driver_that_is_not_loaded_or_of_another_version_has_the_shared_error_text() {
        for (code, kind, text) in [
            (code::DRIVER_NOT_LOADED, FailureKind::Missing, DRIVER_NOT_LOADED),
            (code::LIB_RM_VERSION_MISMATCH, FailureKind::Failed, VERSION_MISMATCH),
        ] {
            let failure = init_failure(LIBRARY, &check_code(code).unwrap_err());
            assert_eq!(failure.kind, kind);
            assert!(failure.text.contains(text), "{failure:?}");
        }
    }
}
