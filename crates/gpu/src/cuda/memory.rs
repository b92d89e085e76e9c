//! Memory of the device, and memory of the host that the device can reach at full speed.

use std::{ffi::c_void, fmt, ops, ptr, slice};

use super::{CudaError, Gpu, symbols::DevicePtr};

/// Plain numbers: every pattern of bits is a value, and there is no padding.
///
/// # Safety
/// Only for such types.
pub unsafe trait Pod: Copy + Default + 'static {}

// SAFETY: plain numbers.
unsafe impl Pod for u8 {}
// SAFETY: plain numbers.
unsafe impl Pod for u16 {}
// SAFETY: plain numbers.
unsafe impl Pod for u32 {}
// SAFETY: plain numbers.
unsafe impl Pod for i32 {}
// SAFETY: plain numbers.
unsafe impl Pod for u64 {}
// SAFETY: plain numbers.
unsafe impl Pod for f32 {}
// SAFETY: plain numbers.
unsafe impl Pod for f64 {}

/// A piece of the device's memory.
pub struct Buffer<'g> {
    gpu: &'g Gpu<'g>,
    address: DevicePtr,
    bytes: usize,
}

impl fmt::Debug for Buffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl<'c> Gpu<'c> {
    pub fn allocate(&self, bytes: usize) -> Result<Buffer<'_>, CudaError> {
        let mut address = 0;
        // SAFETY: the pointer leads to a live variable; this device's context is current.
        let code = unsafe { (self.cuda.symbols.allocate)(&raw mut address, bytes) };
        self.check("cuMemAlloc", code)?;
        Ok(Buffer { gpu: self, address, bytes })
    }

    /// A buffer with these values in it.
    pub fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<'_>, CudaError> {
        let buffer = self.allocate(size_of_val(values))?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Pinned memory of the host.
    pub fn allocate_host(&self, words: usize) -> Result<HostBuffer<'_>, CudaError> {
        let mut address = ptr::null_mut();
        // SAFETY: the pointer leads to a live variable; this device's context is current.
        let code = unsafe { (self.cuda.symbols.allocate_host)(&raw mut address, words * 8, 0) };
        self.check("cuMemHostAlloc", code)?;
        let host = HostBuffer { gpu: self, address: address.cast(), words };
        // SAFETY: fresh memory of this many bytes, which becomes initialised by it.
        unsafe { ptr::write_bytes(host.address, 0, words) };
        Ok(host)
    }

    /// Whether the other device's memory can be reached from this one.
    pub fn reaches(&self, other: &Gpu<'_>) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: the pointer leads to a live variable; both devices are open.
        let code = unsafe { (self.cuda.symbols.can_access_peer)(&raw mut can, self.device, other.device) };
        self.check("cuDeviceCanAccessPeer", code)?;
        Ok(can != 0)
    }
}

impl Buffer<'_> {
    pub const fn address(&self) -> u64 {
        self.address
    }

    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    pub const fn len<T>(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Every 32-bit word.
    pub fn fill(&self, word: u32) -> Result<(), CudaError> {
        // SAFETY: as many words as the buffer has.
        let code = unsafe { (self.gpu.cuda.symbols.set_words)(self.address, word, self.bytes / 4, ptr::null_mut()) };
        self.gpu.check("cuMemsetD32", code)
    }

    /// Copies from the host and waits.
    ///
    /// # Panics
    /// If there are more values than room.
    pub fn write<T: Pod>(&self, values: &[T]) -> Result<(), CudaError> {
        let bytes = size_of_val(values);
        assert!(bytes <= self.bytes, "{bytes} bytes do not fit into {}", self.bytes);
        // SAFETY: both sides have this many bytes; the slice lives until the copy has ended.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_device)(self.address, values.as_ptr().cast(), bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyHtoD", code)?;
        self.gpu.synchronize()
    }

    /// Copies the first `count` values to the host and waits.
    ///
    /// # Panics
    /// If the buffer has fewer.
    pub fn read<T: Pod>(&self, count: usize) -> Result<Vec<T>, CudaError> {
        self.read_from(0, count)
    }

    /// Copies `count` values after the first `skipped` ones to the host and waits.
    ///
    /// # Panics
    /// If the buffer has fewer.
    pub fn read_from<T: Pod>(&self, skipped: usize, count: usize) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); count];
        let (before, bytes) = (skipped * size_of::<T>(), size_of_val(values.as_slice()));
        assert!(
            before + bytes <= self.bytes,
            "{bytes} bytes after {before} are more than the {} there are",
            self.bytes
        );
        let from = self.address + before as DevicePtr;
        // SAFETY: both sides have this many bytes; any bits are a value; the vector lives until the copy has ended.
        let code = unsafe { (self.gpu.cuda.symbols.to_host)(values.as_mut_ptr().cast(), from, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoH", code)?;
        self.gpu.synchronize()?;
        Ok(values)
    }

    /// Asks for a copy of the first `bytes` of another buffer of the same device, and does not wait.
    ///
    /// # Panics
    /// If either buffer is shorter.
    pub fn copy_from(&self, other: &Buffer<'_>, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= self.bytes && bytes <= other.bytes, "a copy within both buffers");
        // SAFETY: both buffers have this many bytes and live as long as their context.
        let code = unsafe { (self.gpu.cuda.symbols.on_device)(self.address, other.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoD", code)
    }

    /// Asks for a copy of the first `bytes` of this buffer to `to` bytes further in it, and does not wait.
    ///
    /// # Panics
    /// If the two parts overlap or the second is not all within the buffer.
    pub fn copy_within(&self, to: usize, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= to && to + bytes <= self.bytes, "two parts of one buffer");
        let symbols = &self.gpu.cuda.symbols;
        // SAFETY: both parts are in the buffer and apart.
        let code = unsafe { (symbols.on_device)(self.address + to as u64, self.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoD", code)
    }

    /// As [`Buffer::copy_from`], from another device.
    ///
    /// # Panics
    /// If either buffer is shorter.
    pub fn copy_from_peer(&self, other: &Buffer<'_>, bytes: usize) -> Result<(), CudaError> {
        assert!(bytes <= self.bytes && bytes <= other.bytes, "a copy within both buffers");
        // SAFETY: both buffers have this many bytes, each in the context that is named with it.
        let code = unsafe {
            (self.gpu.cuda.symbols.to_peer)(
                self.address,
                self.gpu.context,
                other.address,
                other.gpu.context,
                bytes,
                ptr::null_mut(),
            )
        };
        self.gpu.check("cuMemcpyPeer", code)
    }

    /// Asks for a copy from pinned memory, and does not wait.
    pub fn load(&self, host: &HostBuffer<'_>) -> Result<(), CudaError> {
        let bytes = self.bytes.min(host.words * 8);
        // SAFETY: both sides have this many bytes. The host's memory is pinned and given back only after its context has
        // been waited for.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_device)(self.address, host.address.cast(), bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyHtoD", code)
    }

    /// Asks for a copy to pinned memory, and does not wait. Taking it mutably keeps others from reading it meanwhile only
    /// until this returns: wait before you look.
    pub fn store(&self, host: &mut HostBuffer<'_>) -> Result<(), CudaError> {
        let bytes = self.bytes.min(host.words * 8);
        // SAFETY: as above.
        let code =
            unsafe { (self.gpu.cuda.symbols.to_host)(host.address.cast(), self.address, bytes, ptr::null_mut()) };
        self.gpu.check("cuMemcpyDtoH", code)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this context and used by nobody else. The driver waits for work that uses it.
        let _given_back = unsafe { (self.gpu.cuda.symbols.free)(self.address) };
    }
}

/// Pinned memory of the host, as 64-bit words.
pub struct HostBuffer<'g> {
    gpu: &'g Gpu<'g>,
    address: *mut u64,
    words: usize,
}

impl fmt::Debug for HostBuffer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("words", &self.words).finish_non_exhaustive()
    }
}

impl ops::Deref for HostBuffer<'_> {
    type Target = [u64];
    fn deref(&self) -> &[u64] {
        // SAFETY: this many initialised words, ours until dropped.
        unsafe { slice::from_raw_parts(self.address, self.words) }
    }
}

impl ops::DerefMut for HostBuffer<'_> {
    fn deref_mut(&mut self) -> &mut [u64] {
        // SAFETY: this many initialised words, ours alone while borrowed.
        unsafe { slice::from_raw_parts_mut(self.address, self.words) }
    }
}

impl Drop for HostBuffer<'_> {
    fn drop(&mut self) {
        // A copy may still be under way; its end comes first.
        let _waited = self.gpu.synchronize();
        let address: *mut c_void = self.address.cast();
        // SAFETY: allocated by this context and used by nobody else.
        let _given_back = unsafe { (self.gpu.cuda.symbols.free_host)(address) };
    }
}
