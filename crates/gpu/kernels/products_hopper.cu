// arch: compute_90a
// numbers: bf16 fp16 tf32 fp8 int8
// Matrix products on Hopper's tensor cores, as fast as the chip allows: C = A * B^T, A of m rows, B of n rows, both
// with `k_bytes` bytes of numbers in a row, C of 32-bit numbers.
//
// The tile of a block is 128 x 320: the larger it is, the less data comes from the cache for each product, which limits
// this kernel; 160 of the 232 registers that a multiplying thread can have hold results. One warp group fetches (the
// copy engine brings 128 bytes of each row at a time, four stages ahead), two multiply, 64 rows each. Two blocks form a
// cluster: they are one below the other, use the same rows of B, and each fetches half of them for both. Blocks are
// persistent and process tile after tile.
//
// The types of numbers differ only in the instruction: a stage is 128 bytes wide and each instruction takes 32 of them.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE_M 128
#define TILE_N 320
// A warp group computes its part of a tile in two halves of this many columns.
#define HALF_N (TILE_N / 2)
#define STAGE_BYTES 128
#define STAGES 4
#define A_BYTES (TILE_M * STAGE_BYTES)
#define B_BYTES (TILE_N * STAGE_BYTES)
#define CLUSTER 2
// The number of tiles of a column that are consecutive, so that concurrent blocks share rows and columns.
#define GROUP 8

struct __align__(64) TensorMap { u64 opaque[16]; };

// The multiprocessor of a tile, and its time in that multiprocessor's clock ticks.
struct TileRecord { u32 multiprocessor, ticks; };

__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Arrives at the barrier at the same address in a block of the cluster.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 block) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const TensorMap *map, u32 byte, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void fetch_for_all(u32 to, const TensorMap *map, u32 byte, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(byte), "r"(row), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}

__device__ __forceinline__ u32 block_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Describes a tile in shared memory to the tensor cores: rows of 128 bytes, swizzled, eight of them 1024 bytes.
__device__ __forceinline__ u64 described(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#define ACCUMULATORS \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"

#define EIGHT(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define ALL(c, d) \
    EIGHT(c, d, 0), EIGHT(c, d, 8), EIGHT(c, d, 16), EIGHT(c, d, 24), EIGHT(c, d, 32), \
    EIGHT(c, d, 40), EIGHT(c, d, 48), EIGHT(c, d, 56), EIGHT(c, d, 64), EIGHT(c, d, 72)

// One instruction: 64 rows of A against 160 of B over 32 bytes of each.
#define MULTIPLY(NAME, SHAPE, NUMBER, CONSTRAINT, FLAGS)                                                                 \
    struct NAME {                                                                                                       \
        typedef NUMBER Number;                                                                                          \
        static __device__ __forceinline__ void multiply(NUMBER (&d)[80], u64 a, u64 b, u32 add) {                       \
            asm volatile(                                                                                               \
                "{\n"                                                                                                   \
                ".reg .pred add;\n"                                                                                     \
                "setp.ne.b32 add, %82, 0;\n"                                                                            \
                "wgmma.mma_async.sync.aligned." SHAPE " {" ACCUMULATORS "}, %80, %81, add" FLAGS ";\n"                  \
                "}\n"                                                                                                   \
                : ALL(CONSTRAINT, d)                                                                                    \
                : "l"(a), "l"(b), "r"(add));                                                                            \
        }                                                                                                               \
    };

MULTIPLY(Type_bf16, "m64n160k16.f32.bf16.bf16", float, "+f", ", 1, 1, 0, 0")
MULTIPLY(Type_fp16, "m64n160k16.f32.f16.f16", float, "+f", ", 1, 1, 0, 0")
MULTIPLY(Type_tf32, "m64n160k8.f32.tf32.tf32", float, "+f", ", 1, 1")
MULTIPLY(Type_fp8, "m64n160k32.f32.e4m3.e4m3", float, "+f", ", 1, 1")
MULTIPLY(Type_int8, "m64n160k32.s32.s8.s8", int, "+r", "")

struct Tile { u32 m, n; };

// Returns the pair of tiles that a cluster computes in a turn.
__device__ __forceinline__ Tile pair_at(u32 turn, u32 rows, u32 columns) {
    const u32 in_group = GROUP * columns, group = turn / in_group, rest = turn % in_group;
    const u32 first = group * GROUP, height = min((u32)GROUP, rows - first);
    return Tile{first + rest % height, rest / height};
}

template <typename Type>
__device__ __forceinline__ void product(const TensorMap *a, const TensorMap *b, typename Type::Number *c, TileRecord *records,
                                        u32 m, u32 n, u32 k_bytes) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ __align__(8) u64 full[STAGES];
    __shared__ __align__(8) u64 empty[STAGES];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    const u32 a_tiles = base, b_tiles = base + STAGES * A_BYTES;
    const u32 group = threadIdx.x / 128, rank = block_in_cluster();
    const u32 rows = m / (TILE_M * CLUSTER), columns = n / TILE_N, turns = rows * columns;
    const u32 steps = k_bytes / STAGE_BYTES, clusters = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&full[i]), 1);
            // Both multiplying groups of both blocks.
            barrier_init(shared_address(&empty[i]), 2 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            u32 stage = 0, parity = 1;
            for (u32 turn = cluster; turn < turns; turn += clusters) {
                const Tile pair = pair_at(turn, rows, columns);
                const u32 a_row = (pair.m * CLUSTER + rank) * TILE_M;
                const u32 b_row = pair.n * TILE_N + rank * (TILE_N / CLUSTER);
#pragma unroll 1
                for (u32 step = 0; step < steps; step++) {
                    const u32 arrived = shared_address(&full[stage]);
                    barrier_wait(shared_address(&empty[stage]), parity);
                    barrier_expect(arrived, A_BYTES + B_BYTES);
                    fetch(a_tiles + stage * A_BYTES, a, step * STAGE_BYTES, a_row, arrived);
                    fetch_for_all(b_tiles + stage * B_BYTES + rank * (B_BYTES / CLUSTER), b, step * STAGE_BYTES, b_row, arrived);
                    if (++stage == STAGES) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const u32 half = group - 1, lane = threadIdx.x % 128;
        u32 stage = 0, parity = 0, before = 0;
#pragma unroll 1
        for (u32 turn = cluster; turn < turns; turn += clusters) {
            const Tile pair = pair_at(turn, rows, columns);
            const long long began = clock64();
            typename Type::Number d[2][80];
#pragma unroll 1
            for (u32 step = 0; step < steps; step++) {
                barrier_wait(shared_address(&full[stage]), parity);
                const u64 x = described(a_tiles + stage * A_BYTES + half * (A_BYTES / 2));
                const u64 y = described(b_tiles + stage * B_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (u32 part = 0; part < STAGE_BYTES / 32; part++) {
                    const u32 add = step > 0 || part > 0;
                    Type::multiply(d[0], x + part * 2, y + part * 2, add);
                    Type::multiply(d[1], x + part * 2, y + part * 2 + HALF_N * STAGE_BYTES / 16, add);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                // When at most one group is in flight, the step before this one has been read entirely.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > 0 && lane < CLUSTER) barrier_arrive_in(shared_address(&empty[before]), lane);
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (lane < CLUSTER) barrier_arrive_in(shared_address(&empty[before]), lane);

            const u32 tile_m = pair.m * CLUSTER + rank;
            const u32 row = tile_m * TILE_M + half * 64 + lane / 32 * 16 + lane % 32 / 4;
            const u32 column = pair.n * TILE_N + lane % 4 * 2;
            typename Type::Number *upper = c + (u64)row * n + column, *lower = upper + (u64)8 * n;
#pragma unroll
            for (u32 i = 0; i < TILE_N / 8; i++) {
                struct __align__(8) Two { typename Type::Number x, y; };
                const typename Type::Number *four = &d[i / (HALF_N / 8)][i % (HALF_N / 8) * 4];
                *(Two *)(upper + i * 8) = Two{four[0], four[1]};
                *(Two *)(lower + i * 8) = Two{four[2], four[3]};
            }
            if (half == 0 && lane == 0 && records) {
                u32 multiprocessor;
                asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
                records[tile_m * columns + pair.n] = TileRecord{multiprocessor, (u32)(clock64() - began)};
            }
        }
    }
    // The other block may still write here.
    cluster_sync();
}

#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define TYPE JOINED(Type_, NUMBER)

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1)
    product_of_matrices(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, TYPE::Number *c,
                        TileRecord *records, u32 m, u32 n, u32 k_bytes) {
    product<TYPE>(&a, &b, c, records, m, n, k_bytes);
}
