// The numbers in the matrices, and the weights of the checksums. crates/gpu/src/dl/expected_sums.rs has the same in Rust.
//
// A number is a small integer that depends only on its position, so that it can be recomputed anywhere without memory.
// All products and sums of such numbers are exact in every tested type, in any order of addition.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 scrambled(u32 x) {
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    x ^= x >> 15;
    return x;
}

// Returns a number of matrix `seed`, from -range to range.
__device__ __forceinline__ int number_at(u32 seed, u32 row, u32 k, int range) {
    const u32 h = scrambled(((row << 16) | k) ^ seed);
    return (int)(((h >> 16) * (u32)(2 * range + 1)) >> 16) - range;
}

// Odd, so that no error is multiplied to zero.
__device__ __forceinline__ u32 weight_at(u32 column) { return scrambled(column ^ 0x5bd1e995u) | 1u; }
