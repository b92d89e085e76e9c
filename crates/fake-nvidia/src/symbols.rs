//! The functions of NVML, under their real names. A handle is the number of a GPU, counted from one.

use std::{
    ffi::{c_char, c_int, c_uint, c_ulonglong},
    mem::size_of,
};

use nvml_wrapper_sys::bindings::{
    nvmlEccSramErrorStatus_v1_t, nvmlFieldValue_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
    nvmlMarginTemperature_v1_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use crate::{
    fixture::FakeGpu,
    nvml_fixture::{NOT_SUPPORTED, close_session, fixture, maybe_hang, open_session, place},
};

const INVALID_ARGUMENT: u32 = 2;
pub(crate) const INSUFFICIENT_SIZE: u32 = 7;
const VERSION_MISMATCH: u32 = 25;

pub(crate) type Handle = usize;

pub(crate) fn card(handle: Handle) -> Result<&'static FakeGpu, u32> {
    let card = handle.checked_sub(1).and_then(|index| fixture().gpus.get(index)).ok_or(INVALID_ARGUMENT)?;
    card.maybe_hang();
    Ok(card)
}

pub(crate) fn code(result: Result<(), u32>) -> u32 {
    result.err().unwrap_or(0)
}

/// Writes a value to the caller's variable.
///
/// # Safety
/// `to` is null or points to a writable `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), u32> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a zero-terminated text.
///
/// # Safety
/// `to` is null or points to `length` writable bytes.
unsafe fn put_text(text: &str, to: *mut c_char, length: c_uint) -> Result<(), u32> {
    if to.is_null() || text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its terminator fit.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

macro_rules! plain {
    ($($name:ident ( $($arg:ident : $type:ty),* ) $body:block)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            $crate::nvml_fixture::maybe_hang(stringify!($name));
            let answer = || -> Result<(), u32> { $body };
            $crate::symbols::code(answer())
        }
    )* };
}
pub(crate) use plain;

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> u32 {
    init("nvmlInit_v2")
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> u32 {
    init("nvmlInitWithFlags")
}

/// Opens the session before it reads the fixture, which another thread may be about to free.
fn init(function: &str) -> u32 {
    let opened = open_session();
    maybe_hang(function);
    code(opened)
}

/// Defines functions that return a text field of a GPU.
macro_rules! texts {
    ($($name:ident => $field:literal),* $(,)?) => { plain! { $(
        $name(device: Handle, to: *mut c_char, length: c_uint) {
            // SAFETY: by NVIDIA's header, `to` has `length` bytes.
            unsafe { put_text(card(device)?.text($field)?, to, length) }
        }
    )* } };
}

/// Defines functions that return a number field of a GPU.
macro_rules! numbers {
    ($($name:ident : $type:ty => $field:literal $(* $scale:literal)?),* $(,)?) => { plain! { $(
        $name(device: Handle, to: *mut $type) {
            // SAFETY: by NVIDIA's header, `to` points to one of these.
            unsafe { put(to, (card(device)?.number($field)? $(* $scale)?) as $type) }
        }
    )* } };
}

plain! {
    nvmlShutdown() {
        for _ in 0..fixture().lost_gpus {
            std::mem::forget(std::fs::File::open("/dev/null"));
        }
        close_session();
        Ok(())
    }
    nvmlSystemGetDriverVersion(to: *mut c_char, length: c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put_text(&fixture().driver, to, length) }
    }
    nvmlSystemGetCudaDriverVersion_v2(to: *mut c_int) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, fixture().cuda) }
    }
    nvmlDeviceGetCount_v2(to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, fixture().gpus.len() as c_uint) }
    }
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut Handle) {
        let card = fixture().gpus.get(index as usize).ok_or(INVALID_ARGUMENT)?;
        card.maybe_hang();
        if card.handle != 0 {
            return Err(card.handle);
        }
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, index as usize + 1) }
    }
    nvmlDeviceGetPciInfo_v3(device: Handle, to: *mut nvmlPciInfo_t) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, pci(card(device)?.pci_location())) }
    }
    nvmlDeviceValidateInforom(device: Handle) {
        if card(device)?.number("inforom.valid")? == 0.0 { Err(14) } else { Ok(()) }
    }
    nvmlDeviceGetCudaComputeCapability(device: Handle, major: *mut c_int, minor: *mut c_int) {
        let (high, low) = card(device)?.text("compute_cap")?.split_once('.').ok_or(NOT_SUPPORTED)?;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(major, high.parse().unwrap_or(0)).and(put(minor, low.parse().unwrap_or(0))) }
    }
    nvmlDeviceGetMigMode(device: Handle, current: *mut c_uint, pending: *mut c_uint) {
        let card = card(device)?;
        // SAFETY: as NVIDIA's header says.
        unsafe {
            put(current, card.number("mig.mode.current")? as c_uint)
                .and(put(pending, card.number("mig.mode.pending")? as c_uint))
        }
    }
    nvmlDeviceGetEccMode(device: Handle, current: *mut c_uint, pending: *mut c_uint) {
        let card = card(device)?;
        // SAFETY: as NVIDIA's header says.
        unsafe {
            put(current, card.number("ecc.mode.current")? as c_uint)
                .and(put(pending, card.number("ecc.mode.pending")? as c_uint))
        }
    }
    nvmlDeviceGetTotalEccErrors(device: Handle, kind: c_uint, since: c_uint, to: *mut c_ulonglong) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(&ecc(kind, since, "total")?)? as c_ulonglong) }
    }
    nvmlDeviceGetMemoryErrorCounter(
        device: Handle, kind: c_uint, since: c_uint, location: c_uint, to: *mut c_ulonglong
    ) {
        let place = match location {
            2 => "dram",
            7 => "sram",
            _ => return Err(NOT_SUPPORTED),
        };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(&ecc(kind, since, place)?)? as c_ulonglong) }
    }
    nvmlDeviceGetSramEccErrorStatus(device: Handle, to: *mut nvmlEccSramErrorStatus_v1_t) {
        let exceeded = card(device)?.number("ecc.sram.threshold_exceeded")?;
        // SAFETY: as NVIDIA's header says.
        let status = unsafe { to.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        versioned::<nvmlEccSramErrorStatus_v1_t>(status.version, 1)?;
        status.bThresholdExceeded = exceeded as c_uint;
        Ok(())
    }
    nvmlDeviceGetRemappedRows(
        device: Handle, correctable: *mut c_uint, uncorrectable: *mut c_uint, pending: *mut c_uint, failure: *mut c_uint
    ) {
        let of = |field: &str| Ok::<_, u32>(card(device)?.number(&format!("remapped_rows.{field}"))? as c_uint);
        // SAFETY: as NVIDIA's header says.
        unsafe {
            put(correctable, of("correctable")?)?;
            put(uncorrectable, of("uncorrectable")?)?;
            put(pending, of("pending")?)?;
            put(failure, of("failure")?)
        }
    }
    nvmlDeviceGetRetiredPages(device: Handle, cause: c_uint, count: *mut c_uint, to: *mut c_ulonglong) {
        let field =
            if cause == 0 { "retired_pages.single_bit_ecc.count" } else { "retired_pages.double_bit.count" };
        let pages = card(device)?.number(field)? as c_uint;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(count, pages)? };
        if pages > 0 && to.is_null() { Err(INSUFFICIENT_SIZE) } else { Ok(()) }
    }
    nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(if kind == 2 { "clocks.mem" } else { "clocks.sm" })? as c_uint) }
    }
    nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(if kind == 2 { "clocks.max.mem" } else { "clocks.max.sm" })? as c_uint) }
    }
    nvmlDeviceGetApplicationsClock(device: Handle, kind: c_uint, to: *mut c_uint) {
        let field = if kind == 2 { "clocks.applications.memory" } else { "clocks.applications.graphics" };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(field)? as c_uint) }
    }
    nvmlDeviceGetDefaultApplicationsClock(device: Handle, kind: c_uint, to: *mut c_uint) {
        let field =
            if kind == 2 { "clocks.default_applications.memory" } else { "clocks.default_applications.graphics" };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(field)? as c_uint) }
    }
    nvmlDeviceGetViolationStatus(device: Handle, policy: c_uint, to: *mut nvmlViolationTime_t) {
        let field = match policy {
            0 => "violation.power",
            1 => "violation.thermal",
            _ => return Err(NOT_SUPPORTED),
        };
        let time = nvmlViolationTime_t { referenceTime: 0, violationTime: card(device)?.number(field)? as c_ulonglong };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, time) }
    }
    nvmlDeviceGetUtilizationRates(device: Handle, to: *mut nvmlUtilization_t) {
        let gpu = card(device)?.number("utilization.gpu")? as c_uint;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, nvmlUtilization_t { gpu, memory: 0 }) }
    }
    nvmlDeviceGetTemperature(device: Handle, _sensor: c_uint, to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number("temperature.gpu")? as c_uint) }
    }
    nvmlDeviceGetTemperatureThreshold(device: Handle, kind: c_uint, to: *mut c_uint) {
        let field = match kind {
            0 => "temperature.shutdown",
            1 => "temperature.slowdown",
            _ => return Err(NOT_SUPPORTED),
        };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, card(device)?.number(field)? as c_uint) }
    }
    nvmlDeviceGetMarginTemperature(device: Handle, to: *mut nvmlMarginTemperature_v1_t) {
        let margin = card(device)?.number("temperature.gpu.tlimit")?;
        // SAFETY: as NVIDIA's header says.
        let info = unsafe { to.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        versioned::<nvmlMarginTemperature_v1_t>(info.version, 1)?;
        info.marginTemperature = margin as c_int;
        Ok(())
    }
    nvmlDeviceGetPowerManagementLimitConstraints(device: Handle, least: *mut c_uint, most: *mut c_uint) {
        let watts = card(device)?.number("power.max_limit")?;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(least, 0).and(put(most, (watts * 1000.0) as c_uint)) }
    }
    nvmlDeviceGetMemoryInfo_v2(device: Handle, to: *mut nvmlMemory_v2_t) {
        let card = card(device)?;
        // SAFETY: as NVIDIA's header says.
        let memory = unsafe { to.as_mut() }.ok_or(INVALID_ARGUMENT)?;
        versioned::<nvmlMemory_v2_t>(memory.version, 2)?;
        memory.total = card.number("memory.total")? as c_ulonglong;
        memory.used = card.number("memory.used").unwrap_or(0.0) as c_ulonglong;
        memory.reserved = card.number("memory.reserved").unwrap_or(0.0) as c_ulonglong;
        memory.free = memory.total.saturating_sub(memory.used);
        Ok(())
    }
    nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, link_number(device, link, "state")? as c_uint) }
    }
    nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, to: *mut c_uint) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, link_number(device, link, "remote_kind")? as c_uint) }
    }
    nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, to: *mut nvmlPciInfo_t) {
        let bus = card(device)?.text(&format!("nvlink.{link}.remote_bus"))?;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, pci(place(bus))) }
    }
    nvmlDeviceGetNvLinkErrorCounter(device: Handle, link: c_uint, counter: c_uint, to: *mut c_ulonglong) {
        let what = match counter {
            0 => "replay_errors",
            1 => "recovery_errors",
            2 => "crc_flit_errors",
            3 => "crc_data_errors",
            _ => return Err(NOT_SUPPORTED),
        };
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, link_number(device, link, what)? as c_ulonglong) }
    }
    nvmlDeviceGetGpuFabricInfoV(device: Handle, to: *mut nvmlGpuFabricInfo_v3_t) {
        let card = card(device)?;
        let state = card.number("fabric.state")?;
        // SAFETY: as in NVIDIA's header; version 2 is a prefix of version 3.
        let version = unsafe { (*to).version };
        if version != form::<nvmlGpuFabricInfo_v3_t>(3) && version != form::<nvmlGpuFabricInfo_v2_t>(2) {
            return Err(VERSION_MISMATCH);
        }
        // SAFETY: as above; only fields of both versions are written.
        unsafe {
            (*to).state = state as _;
            (*to).status = card.number("fabric.status").unwrap_or(0.0) as c_uint;
            (*to).healthMask = card.number("fabric.health_mask").unwrap_or(0.0) as c_uint;
            (*to).cliqueId = card.number("fabric.clique").unwrap_or(0.0) as c_uint;
        }
        Ok(())
    }
    nvmlDeviceGetTopologyCommonAncestor(device: Handle, other: Handle, to: *mut c_uint) {
        let level = card(device)?.number(&format!("topology.{}.level", other.wrapping_sub(1)))?;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, level as c_uint) }
    }
    nvmlDeviceGetP2PStatus(device: Handle, other: Handle, _index: c_uint, to: *mut c_uint) {
        let status = card(device)?.number(&format!("p2p.{}.nvlink", other.wrapping_sub(1)))?;
        // SAFETY: as NVIDIA's header says.
        unsafe { put(to, status as c_uint) }
    }
    nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: *mut nvmlFieldValue_t) {
        let card = card(device)?;
        for place in 0..usize::try_from(count).map_err(|_| INVALID_ARGUMENT)? {
            // SAFETY: by NVIDIA's header, there are `count` of them.
            let value = unsafe { &mut *values.add(place) };
            let answer = match value.fieldId {
                82 => card.number("temperature.memory"),
                230 => card.number("recovery_action"),
                _ => Err(NOT_SUPPORTED),
            };
            value.nvmlReturn = answer.err().unwrap_or(0);
            value.valueType = 1;
            value.value.uiVal = answer.unwrap_or(0.0) as c_uint;
        }
        Ok(())
    }
}

texts! {
    nvmlDeviceGetName => "name",
    nvmlDeviceGetUUID => "uuid",
    nvmlDeviceGetSerial => "serial",
    nvmlDeviceGetBoardPartNumber => "board_part",
    nvmlDeviceGetVbiosVersion => "vbios_version",
    nvmlDeviceGetInforomImageVersion => "inforom.image",
}

numbers! {
    nvmlDeviceGetMinorNumber: c_uint => "minor_number",
    nvmlDeviceGetArchitecture: c_uint => "architecture",
    nvmlDeviceGetPersistenceMode: c_uint => "persistence_mode",
    nvmlDeviceGetComputeMode: c_uint => "compute_mode",
    nvmlDeviceGetRetiredPagesPendingStatus: c_uint => "retired_pages.pending",
    nvmlDeviceGetPerformanceState: c_uint => "pstate",
    nvmlDeviceGetPcieReplayCounter: c_uint => "pcie.replay",
    nvmlDeviceGetCurrentClocksEventReasons: c_ulonglong => "clocks_event_reasons.active",
    nvmlDeviceGetPowerUsage: c_uint => "power.draw" * 1000.0,
    nvmlDeviceGetPowerManagementLimit: c_uint => "power.limit" * 1000.0,
    nvmlDeviceGetPowerManagementDefaultLimit: c_uint => "power.default_limit" * 1000.0,
    nvmlDeviceGetCurrPcieLinkGeneration: c_uint => "pcie.link.gen.current",
    nvmlDeviceGetMaxPcieLinkGeneration: c_uint => "pcie.link.gen.max",
    nvmlDeviceGetCurrPcieLinkWidth: c_uint => "pcie.link.width.current",
    nvmlDeviceGetMaxPcieLinkWidth: c_uint => "pcie.link.width.max",
}

fn pci((domain, bus, device): (u32, u32, u32)) -> nvmlPciInfo_t {
    nvmlPciInfo_t { busIdLegacy: [0; 16], domain, bus, device, pciDeviceId: 0, pciSubSystemId: 0, busId: [0; 32] }
}

fn ecc(kind: c_uint, since: c_uint, location: &str) -> Result<String, u32> {
    let kind = ["corrected", "uncorrected"].get(kind as usize).ok_or(INVALID_ARGUMENT)?;
    let since = ["volatile", "aggregate"].get(since as usize).ok_or(INVALID_ARGUMENT)?;
    Ok(format!("ecc.errors.{kind}.{since}.{location}"))
}

/// Reads a number of a link. A link that the chip does not have is an invalid argument.
fn link_number(device: Handle, link: c_uint, what: &str) -> Result<f64, u32> {
    let card = card(device)?;
    if what != "state" && card.number(&format!("nvlink.{link}.state")).is_err() {
        return Err(INVALID_ARGUMENT);
    }
    card.number(&format!("nvlink.{link}.{what}"))
        .map_err(|code| if code == NOT_SUPPORTED && what == "state" { INVALID_ARGUMENT } else { code })
}

/// Returns the first word of a versioned struct: its size and version.
const fn form<T>(number: c_uint) -> c_uint {
    size_of::<T>() as c_uint | number << 24
}

fn versioned<T>(found: c_uint, number: c_uint) -> Result<(), u32> {
    if found == form::<T>(number) { Ok(()) } else { Err(VERSION_MISMATCH) }
}
