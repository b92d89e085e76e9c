//! What a controller keeps in memory while it waits.
//!
//! It reads a cluster's nodes and pods in pages and throws most of each page away; the first cycle makes what later ones only
//! change; and to start takes more of the program than all that follows.

use doctor_host::memory;

/// Before any other thread is there.
pub fn be_frugal() {
    memory::one_heap();
    memory::return_from(128 << 10);
}

/// Gives back what is free, before a while of waiting.
pub fn rest() {
    memory::give_back();
}
