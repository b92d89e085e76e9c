// arch: compute_80
// Fills the matrices, and checks every number of a product against its expected value.
//
// The checksum of a row, the sum of each number times the weight of its column modulo 2^32, is known beforehand from
// the rows of A and B without multiplying the matrices. A single wrong number always changes it; several cancel out
// with a probability of one in four thousand million. Numbers that no sum of integers can give (fractions, infinities,
// NaN, minus zero) are errors by themselves.

#include "numbers.cuh"

// How a number is stored.
enum Kind : u32 { BF16, FP16, FP32, FP8, INT8 };

__device__ __forceinline__ u32 as_bf16(int x) { return __float_as_uint((float)x) >> 16; }

__device__ __forceinline__ u32 as_fp16(int x) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"((float)x));
    return half;
}

// e4m3 has three bits of fraction: integers up to 16 are exact.
__device__ __forceinline__ u32 as_fp8(int x) {
    const u32 sign = x < 0 ? 0x80 : 0, size = x < 0 ? -x : x;
    if (size == 0) return sign;
    const u32 power = 31 - __clz(size);
    return sign | ((power + 7) << 3) | (((size << 3) >> power) & 7);
}

template <u32 KIND>
__device__ __forceinline__ void store(void *matrix, u64 place, int x) {
    switch (KIND) {
    case BF16: ((unsigned short *)matrix)[place] = (unsigned short)as_bf16(x); break;
    case FP16: ((unsigned short *)matrix)[place] = (unsigned short)as_fp16(x); break;
    case FP32: ((float *)matrix)[place] = (float)x; break;
    case FP8: ((unsigned char *)matrix)[place] = (unsigned char)as_fp8(x); break;
    default: ((signed char *)matrix)[place] = (signed char)x;
    }
}

template <u32 KIND>
__device__ __forceinline__ void make(void *matrix, u32 rows, u32 k, u32 seed, int range) {
    const u64 all = (u64)rows * k, step = (u64)gridDim.x * blockDim.x;
    for (u64 place = (u64)blockIdx.x * blockDim.x + threadIdx.x; place < all; place += step) {
        store<KIND>(matrix, place, number_at(seed, (u32)(place / k), (u32)(place % k), range));
    }
}

#define MAKE(name, KIND)                                                                                       \
    extern "C" __global__ void make_##name(void *matrix, u32 rows, u32 k, u32 seed, u32 range) {               \
        make<KIND>(matrix, rows, k, seed, (int)range);                                                         \
    }

MAKE(bf16, BF16)
MAKE(fp16, FP16)
MAKE(fp32, FP32)
MAKE(fp8, FP8)
MAKE(int8, INT8)

// Returns whether `bits` is an integer, and which.
template <bool IS_FLOAT>
__device__ __forceinline__ bool is_integer(u32 bits, int &x) {
    if (!IS_FLOAT) {
        x = (int)bits;
        return true;
    }
    const float value = __uint_as_float(bits);
    x = __float2int_rn(value);
    // Compared as bits: minus zero is no sum of ours, and a NaN is equal to nothing.
    return __float_as_uint((float)x) == bits;
}

struct Row { u32 row, got; };

// One block per row. Rows with an unexpected checksum are added to `wrong`.
template <bool IS_FLOAT>
__device__ __forceinline__ void check_rows(const uint4 *c, u32 n, const uint4 *weights, const u32 *expected, u32 *count, Row *wrong, u32 room) {
    __shared__ u32 sums[8];
    __shared__ u32 bad[8];
    const uint4 *row = c + (u64)blockIdx.x * (n / 4);
    u32 sum = 0, odd = 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < n / 4; i += blockDim.x) {
        const uint4 bits = __ldcs(row + i), weight = __ldg(weights + i);
        int x, y, z, w;
        odd |= !is_integer<IS_FLOAT>(bits.x, x) | !is_integer<IS_FLOAT>(bits.y, y) | !is_integer<IS_FLOAT>(bits.z, z) |
               !is_integer<IS_FLOAT>(bits.w, w);
        sum += (u32)x * weight.x + (u32)y * weight.y + (u32)z * weight.z + (u32)w * weight.w;
    }
    for (u32 distance = 16; distance; distance /= 2) {
        sum += __shfl_xor_sync(~0u, sum, distance);
        odd |= __shfl_xor_sync(~0u, odd, distance);
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
        bad[threadIdx.x / 32] = odd;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 i = 1; i < blockDim.x / 32; i++) {
            sum += sums[i];
            odd |= bad[i];
        }
        if (odd || sum != expected[blockIdx.x]) {
            const u32 place = atomicAdd(count, 1u);
            if (place < room) wrong[place] = Row{blockIdx.x, sum};
        }
    }
}

extern "C" __global__ void check_rows_float(const uint4 *c, u32 n, const uint4 *weights, const u32 *expected, u32 *count, Row *wrong, u32 room) {
    check_rows<true>(c, n, weights, expected, count, wrong, room);
}

extern "C" __global__ void check_rows_int(const uint4 *c, u32 n, const uint4 *weights, const u32 *expected, u32 *count, Row *wrong, u32 room) {
    check_rows<false>(c, n, weights, expected, count, wrong, room);
}

extern "C" __global__ void make_weights(u32 *weights, u32 n) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) weights[i] = weight_at(i);
}

struct Wrong { u32 row, column, got; int expected; };

// Finds the wrong numbers of a wrong row: each is computed again from the positions alone, by the integer units.
extern "C" __global__ void locate(const u32 *c, u32 n, u32 k, u32 row, u32 seed_a, u32 seed_b, u32 range, u32 is_float, u32 *count, Wrong *wrong, u32 room) {
    const u32 column = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (column >= n) return;
    int sum = 0;
    for (u32 i = lane; i < k; i += 32) {
        sum += number_at(seed_a, row, i, (int)range) * number_at(seed_b, column, i, (int)range);
    }
    for (u32 distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane != 0) return;
    const u32 bits = c[(u64)row * n + column], right = is_float ? __float_as_uint((float)sum) : (u32)sum;
    if (bits != right) {
        const u32 place = atomicAdd(count, 1u);
        if (place < room) wrong[place] = Wrong{row, column, bits, sum};
    }
}

// Injects errors for the negative control and for trials, one per thread; `kinds`: 0 the number is lost (replaced by
// zero), 1 one bit is flipped, 2 NaN, 3 a slightly larger number. `changed` is set if the value changed.
extern "C" __global__ void plant_numbers(u32 *c, const u32 *places, const u32 *kinds, const u32 *bits, u32 is_float, u32 *changed, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const u32 was = c[places[i]];
    u32 now = was;
    switch (kinds[i]) {
    case 0: now = 0; break;
    case 1: now = was ^ (1u << (bits[i] & 31)); break;
    case 2: now = 0x7fc00000u; break;
    default: now = is_float ? __float_as_uint(__fadd_rn(__uint_as_float(was), 1.0f)) : was + 1;
    }
    c[places[i]] = now;
    changed[i] = now != was;
}
