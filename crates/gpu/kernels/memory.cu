// arch: compute_80
// Patterns over all of the memory: writing, reading back and comparing, and injecting errors.
//
// A word is 64 bits. Its expected value is a function of its address and the pattern alone, so nothing has to be
// stored, and a word written to a wrong address is found as surely as one that changed.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Found { u64 address, expected, got; };

enum Pattern : u32 { ADDRESS, INVERSE, WALK_ONE, WALK_ZERO, RANDOM, CHECKER };

__device__ __forceinline__ u64 mixed(u64 x) {
    // Two rounds of multiply and shift: every bit of the address affects every bit of the word.
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    return x;
}

template <u32 PATTERN>
__device__ __forceinline__ u64 word_at(u64 address, u64 seed) {
    const u64 index = address >> 3;
    switch (PATTERN) {
    case ADDRESS: return address;
    case INVERSE: return ~address;
    case WALK_ONE: return 1ull << ((index + seed) & 63);
    case WALK_ZERO: return ~(1ull << ((index + seed) & 63));
    case CHECKER: return ((index + seed) & 1) ? 0xaaaaaaaaaaaaaaaaull : 0x5555555555555555ull;
    default: return mixed(address ^ seed);
    }
}

// Each thread handles four pairs of words, a whole row of threads apart, so that a warp touches 512 bytes at a time and
// every thread has four accesses in flight.
#define UNROLL 4

template <u32 PATTERN>
__device__ __forceinline__ void fill(ulonglong2 *memory, u64 pairs, u64 seed) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 at = first;
#pragma unroll 1
    for (; at + (UNROLL - 1) * step < pairs; at += UNROLL * step) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const u64 place = at + i * step;
            const u64 address = (u64)(memory + place);
            __stcs(memory + place, make_ulonglong2(word_at<PATTERN>(address, seed), word_at<PATTERN>(address + 8, seed)));
        }
    }
#pragma unroll 1
    for (; at < pairs; at += step) {
        const u64 address = (u64)(memory + at);
        memory[at] = make_ulonglong2(word_at<PATTERN>(address, seed), word_at<PATTERN>(address + 8, seed));
    }
}

__device__ __noinline__ void report(u64 address, u64 expected, u64 got, u64 *count, Found *found, u32 room) {
    const u64 place = atomicAdd(count, 1ull);
    if (place < room) found[place] = Found{address, expected, got};
}

template <u32 PATTERN>
__device__ __forceinline__ void compare(const ulonglong2 *at, ulonglong2 got, u64 seed, u64 *count, Found *found, u32 room) {
    const u64 address = (u64)at;
    const u64 x = word_at<PATTERN>(address, seed), y = word_at<PATTERN>(address + 8, seed);
    if (got.x != x) report(address, x, got.x, count, found, room);
    if (got.y != y) report(address + 8, y, got.y, count, found, room);
}

template <u32 PATTERN>
__device__ __forceinline__ void verify(const ulonglong2 *memory, u64 pairs, u64 seed, u64 *count, Found *found, u32 room) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 at = first;
#pragma unroll 1
    for (; at + (UNROLL - 1) * step < pairs; at += UNROLL * step) {
        ulonglong2 got[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) got[i] = __ldcs(memory + at + i * step);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) compare<PATTERN>(memory + at + i * step, got[i], seed, count, found, room);
    }
#pragma unroll 1
    for (; at < pairs; at += step) compare<PATTERN>(memory + at, __ldcs(memory + at), seed, count, found, room);
}

#define KERNELS(name, PATTERN)                                                                                          \
    extern "C" __global__ void fill_##name(ulonglong2 *memory, u64 pairs, u64 seed) { fill<PATTERN>(memory, pairs, seed); } \
    extern "C" __global__ void verify_##name(const ulonglong2 *memory, u64 pairs, u64 seed, u64 *count, Found *found, u32 room) { \
        verify<PATTERN>(memory, pairs, seed, count, found, room);                                                       \
    }

KERNELS(address, ADDRESS)
KERNELS(inverse, INVERSE)
KERNELS(walk_one, WALK_ONE)
KERNELS(walk_zero, WALK_ZERO)
KERNELS(checker, CHECKER)
KERNELS(random, RANDOM)

// Injects errors for the negative control and for trials, one per thread: `kinds[i]` selects what is written to the
// word `places[i]`: 0 zero, 1 one bit flipped, 2 a single-precision NaN in its lower half, 3 exactly this value.
extern "C" __global__ void plant_words(u64 *memory, const u64 *places, const u32 *kinds, const u64 *values, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    u64 *at = memory + places[i];
    switch (kinds[i]) {
    case 0: *at = 0; break;
    case 1: *at ^= 1ull << (values[i] & 63); break;
    case 2: *at = (*at & 0xffffffff00000000ull) | 0x7fc00000ull; break;
    default: *at = values[i];
    }
}
