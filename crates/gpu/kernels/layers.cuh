// Common code of the layers: problem sizes, functions and sums with defined rounding, and the macro that turns a layer
// into a kernel.

#include "numbers.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)

// The sizes of the problems. A test compares crates/gpu/src/dl/layers/layer_inputs.rs with them.
#define LINEAR_ROWS 128
#define LINEAR_INPUTS 128
#define LINEAR_OUTPUTS 128
#define CONV_IMAGES 2
#define CONV_INPUTS 8
#define CONV_OUTPUTS 16
#define CONV_SIDE 16
#define NORM_ROWS 128
#define NORM_COLUMNS 512
#define SOFTMAX_ROWS 128
#define SOFTMAX_COLUMNS 512
#define GELU_NUMBERS 32768
#define ATTENTION_HEADS 4
#define ATTENTION_TOKENS 64
#define ATTENTION_WIDTH 32
#define EMBEDDING_TOKENS 256
#define EMBEDDING_WORDS 128
#define EMBEDDING_WIDTH 64
#define ENTROPY_ROWS 128
#define ENTROPY_CLASSES 512
#define ADAM_NUMBERS 32768

#define CONV_PLANE (CONV_SIDE * CONV_SIDE)

// ---- Functions built from operations with defined rounding. ----

__device__ __forceinline__ float exponential(float x) {
    // Beyond these limits the result would be subnormal or infinite.
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    // Adding and subtracting 1.5 * 2^23 rounds to an integer.
    const float n = __fmaf_rn(x, 0x1.715476p+0f, 0x1.8p+23f) - 0x1.8p+23f;
    // ln 2 in two parts: the second is the remainder of the first.
    const float r = __fmaf_rn(n, 0x1.05c610p-29f, __fmaf_rn(n, -0x1.62e430p-1f, x));
    float p = 0x1.a01a02p-13f;
    p = __fmaf_rn(p, r, 0x1.6c16c2p-10f);
    p = __fmaf_rn(p, r, 0x1.111112p-7f);
    p = __fmaf_rn(p, r, 0x1.555556p-5f);
    p = __fmaf_rn(p, r, 0x1.555556p-3f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return p * __int_as_float(((int)n + 127) << 23);
}

// Of a positive number that is not subnormal.
__device__ __forceinline__ float logarithm(float x) {
    const u32 bits = __float_as_uint(x);
    float exponent = (float)((int)(bits >> 23) - 127), m = __uint_as_float((bits & 0x7fffffu) | 0x3f800000u);
    if (m > 0x1.6a09e6p+0f) {
        m = m * 0.5f;
        exponent = exponent + 1.0f;
    }
    const float s = __fdiv_rn(m - 1.0f, m + 1.0f), z = s * s;
    float p = 0x1.745d18p-4f;
    p = __fmaf_rn(p, z, 0x1.c71c72p-4f);
    p = __fmaf_rn(p, z, 0x1.24924ap-3f);
    p = __fmaf_rn(p, z, 0x1.99999ap-3f);
    p = __fmaf_rn(p, z, 0x1.555556p-2f);
    p = __fmaf_rn(p, z, 1.0f);
    return __fmaf_rn(exponent, 0x1.62e430p-1f, __fmaf_rn(exponent, -0x1.05c610p-29f, (s + s) * p));
}

__device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

// Sums a row with one warp: lane l adds the positions l, l + 32, and so on; then the sums of the lanes are added in pairs.
template <typename Add>
__device__ __forceinline__ float summed(u32 count, Add add) {
    float sum = 0.0f;
#pragma unroll 1
    for (u32 i = lane(); i < count; i += 32) sum = add(sum, i);
#pragma unroll
    for (u32 distance = 16; distance; distance /= 2) sum = sum + __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

template <typename At>
__device__ __forceinline__ float largest(u32 count, At at) {
    float most = -3.0e38f;
#pragma unroll 1
    for (u32 i = lane(); i < count; i += 32) {
        const float x = at(i);
        most = x > most ? x : most;
    }
#pragma unroll
    for (u32 distance = 16; distance; distance /= 2) {
        const float x = __shfl_xor_sync(~0u, most, distance);
        most = x > most ? x : most;
    }
    return most;
}

// The maximum and the sum by which the exponentials of a row are normalised, computed by one warp.
struct Exponents { float most, sum; };

__device__ __forceinline__ Exponents exponents(const float *x, u32 count) {
    const float most = largest(count, [&](u32 i) { return x[i]; });
    return Exponents{most, summed(count, [&](float sum, u32 i) { return sum + exponential(x[i] - most); })};
}

// Defines a layer: `in` holds its inputs one after the other, and each block has `stride` numbers for its outputs.
#define LAYER(name)                                                                                                     \
    __device__ __forceinline__ void name##_of(const float *in, float *out);                                             \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const float *in, float *out, u32 stride, u32 *where) {   \
        if (threadIdx.x == 0) {                                                                                         \
            u32 multiprocessor;                                                                                         \
            asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));                                                 \
            where[blockIdx.x] = multiprocessor;                                                                         \
        }                                                                                                               \
        name##_of(in, out + (u64)blockIdx.x * stride);                                                                  \
    }                                                                                                                   \
    __device__ __forceinline__ void name##_of(const float *in, float *out)
