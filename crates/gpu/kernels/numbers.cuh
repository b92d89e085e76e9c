// The numbers in the matrices, and the weights of the checksums. crates/gpu/src/dl/known.rs says the same in Rust.
//
// A number is a small integer that depends on its place alone, so that it can be had again anywhere without memory. All
// products and sums of such numbers are exact in every type that is tested, in whatever order they are added.

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

// Of matrix `seed`, from -range to range.
__device__ __forceinline__ int number_at(u32 seed, u32 row, u32 k, int range) {
    const u32 h = scrambled(((row << 16) | k) ^ seed);
    return (int)(((h >> 16) * (u32)(2 * range + 1)) >> 16) - range;
}

// Odd, so that no error of any size is multiplied away.
__device__ __forceinline__ u32 weight_at(u32 column) { return scrambled(column ^ 0x5bd1e995u) | 1u; }
