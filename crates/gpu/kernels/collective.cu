// arch: compute_70
// Fills each rank's shares of a sum, and checks the sums.
//
// A share is an integer that depends only on its rank and position and is never zero; at one position all ranks have
// the same sign. A sum is therefore exact in any order of addition, is never zero, and is too small if a rank's share
// is lost. crates/gpu/src/collective/test_values.rs has the same formulas in Rust.

#include "numbers.cuh"

// Returns the value that all ranks have in common at a position: its lowest bit is the sign.
__device__ __forceinline__ u32 place_at(u64 place, u32 seed) {
    return scrambled((u32)place ^ seed) + (u32)(place >> 32) * 0x9e3779b9u;
}

// From 1 to range.
__device__ __forceinline__ u32 share_at(u32 place, u32 rank, u32 range) {
    return 1u + __umulhi(scrambled(place + (rank + 1) * 0x85ebca6bu), range);
}

__device__ __forceinline__ float signed_by(u32 place, u32 size) {
    const float value = (float)size;
    return place & 1 ? -value : value;
}

extern "C" __global__ void fill_shares(float *numbers, u64 count, u32 rank, u32 seed, u32 range) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const u32 place = place_at(i, seed);
        numbers[i] = signed_by(place, share_at(place, rank, range));
    }
}

struct Wrong { u64 place; u32 expected, got; };

// Compared as bits: a NaN and minus zero are as wrong as any other number that is not the sum.
extern "C" __global__ void check_sums(const u32 *numbers, u64 count, u32 ranks, u32 seed, u32 range, u64 *wrong, Wrong *listed, u32 room) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const u32 place = place_at(i, seed), got = __ldcs(numbers + i);
        u32 sum = 0;
        for (u32 rank = 0; rank < ranks; rank++) sum += share_at(place, rank, range);
        const u32 expected = __float_as_uint(signed_by(place, sum));
        if (got != expected) {
            const u64 slot = atomicAdd(wrong, 1ull);
            if (slot < room) listed[slot] = Wrong{i, expected, got};
        }
    }
}

// Injects one error for the negative control: 0 zero, 1 the bits of `value` flipped, 2 NaN, 3 exactly these bits.
extern "C" __global__ void plant_number(u32 *numbers, u64 place, u32 kind, u32 value) {
    switch (kind) {
    case 0: numbers[place] = 0; break;
    case 1: numbers[place] ^= value; break;
    case 2: numbers[place] = 0x7fc00000u; break;
    default: numbers[place] = value;
    }
}
