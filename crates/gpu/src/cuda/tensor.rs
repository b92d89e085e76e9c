//! The description of a matrix for the copy engine (TMA) of Hopper and newer GPUs.

use std::{ffi::c_void, ptr};

use super::{Buffer, CudaError, Gpu};

/// `CU_TENSOR_MAP_DATA_TYPE_UINT8`: tiles are copied as bytes, whatever their type.
const BYTES: i32 = 0;
const NO_INTERLEAVE: i32 = 0;
/// `CU_TENSOR_MAP_SWIZZLE_128B`, the layout that the tensor cores expect in shared memory.
const SWIZZLE_128: i32 = 3;
/// `CU_TENSOR_MAP_L2_PROMOTION_L2_256B`.
const L2_PROMOTION_256: i32 = 3;
const OOB_FILL_ZERO: i32 = 0;

/// An opaque descriptor, passed to a kernel as an argument.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub struct TensorMap([u64; 16]);

/// A matrix of rows of bytes that is fetched in tiles.
#[derive(Debug, Clone, Copy)]
pub struct Tile {
    pub row_bytes: u64,
    pub rows: u64,
    pub tile_row_bytes: u32,
    pub tile_rows: u32,
}

impl TensorMap {
    pub(super) const fn as_ptr(&self) -> *const c_void {
        ptr::from_ref(&self.0).cast()
    }
}

impl Gpu<'_> {
    pub fn tensor_map(&self, buffer: &Buffer<'_>, tile: Tile) -> Result<TensorMap, CudaError> {
        let mut map = TensorMap([0; 16]);
        let sizes = [tile.row_bytes, tile.rows];
        let strides = [tile.row_bytes];
        let tile_sizes = [tile.tile_row_bytes, tile.tile_rows];
        let steps = [1u32, 1];
        let address = buffer.address() as *mut c_void;
        // SAFETY: the map has the size and alignment of the header; the arrays have one entry for each of the two
        // dimensions, the strides one less; the address is the device's and only described here.
        let code = unsafe {
            (self.cuda.symbols.tensor_map)(
                ptr::from_mut(&mut map.0).cast(),
                BYTES,
                2,
                address,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile_sizes.as_ptr(),
                steps.as_ptr(),
                NO_INTERLEAVE,
                SWIZZLE_128,
                L2_PROMOTION_256,
                OOB_FILL_ZERO,
            )
        };
        self.check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}
