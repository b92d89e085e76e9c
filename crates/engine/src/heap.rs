//! Heap settings of a controller, to keep its memory small between cycles.
//!
//! A cycle reads more about the cluster than it keeps, and the first cycle allocates what later ones only update.

use doctor_host::heap;

/// Uses one heap for all threads and returns allocations above 128 KiB directly to the system. Must be called before
/// any other thread starts.
pub fn limit_heap() {
    heap::use_one_arena();
    heap::set_mmap_threshold(128 << 10);
}

/// Returns free heap to the system. Called before an idle period.
pub fn release_free() {
    heap::give_back();
}
