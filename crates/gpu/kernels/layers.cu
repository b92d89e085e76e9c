// arch: compute_80
// Layers of deep learning, forward and backward, each computed by one block: every block is a replica of the same
// problem and writes a whole result, so that every multiprocessor runs every layer and all results must have the same
// bits.
//
// The bits are the same on every architecture, and crates/gpu/src/dl/layers/exact computes them: only operations whose
// result IEEE 754 defines are used (the functions are built from them here), sums have a fixed order, and nothing is
// added atomically. The tensor cores round in their own way, so their inputs have exact sums.

#include "layers.cuh"
#include "layers_matrices.cuh"
#include "layers_points.cuh"
#include "layers_rows.cuh"

// ---- The inputs: each number depends only on its position. ----

enum Kind : u32 { SIGNED, POSITIVE, SMALL, INDEX };

// `range`: for SMALL, the largest integer; for INDEX, the number of values.
extern "C" __global__ void make_values(float *to, u32 count, u32 seed, u32 kind, u32 range, float scale) {
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        const u32 h = scrambled(i ^ seed);
        float value;
        switch (kind) {
        case SIGNED: value = (float)((int)(h >> 8) - 0x800000) * 0x1p-23f; break;
        case POSITIVE: value = (float)(h >> 8) * 0x1p-24f; break;
        case SMALL: value = (float)((int)(((h >> 16) * (2 * range + 1)) >> 16) - (int)range); break;
        default: value = (float)(((h >> 16) * range) >> 16);
        }
        to[i] = value * scale;
    }
}

// ---- Comparison. ----

// Reduces the bits of a replica's outputs and their positions to one number, one block per replica. A single wrong bit
// always changes it: a position adds a different number for each value. Integers are added, so the order does not matter.
extern "C" __global__ void __launch_bounds__(THREADS) fingerprint(const u32 *out, u32 stride, u32 count, u64 *prints) {
    __shared__ u64 sums[THREADS];
    u64 sum = 0;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u64 x = ((u64)i << 32) | out[(u64)blockIdx.x * stride + i];
        x ^= x >> 32;
        x *= 0xd6e8feb86659fd93ull;
        x ^= x >> 32;
        x *= 0xd6e8feb86659fd93ull;
        x ^= x >> 32;
        sum += x;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) prints[blockIdx.x] = sums[0];
}

// Injects errors for the negative control and for trials, one per thread: four words for each, the position among all
// replicas' outputs in two of them, then the kind (0 the number is lost, 1 one bit is flipped, 2 NaN), then the bit.
// `changed` is set if the value changed.
extern "C" __global__ void plant_outputs(u32 *out, const uint4 *errors, u32 *changed, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const uint4 error = errors[i];
    u32 *at = out + (((u64)error.y << 32) | error.x);
    const u32 was = *at;
    switch (error.z) {
    case 0: *at = 0; break;
    case 1: *at = was ^ (1u << (error.w & 31)); break;
    default: *at = 0x7fc00000u;
    }
    changed[i] = *at != was;
}
