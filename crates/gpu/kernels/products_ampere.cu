// arch: compute_80
// numbers: bf16 fp16 tf32 int8
// Matrix products on the tensor cores of any GPU since Ampere (mma.sync): C = A * B^T, A of m rows, B of n rows, both
// with `k_bytes` bytes of numbers in a row, C of 32-bit numbers.
//
// The types of numbers differ only in the instruction: tiles are moved as bytes, and each instruction takes 32 bytes of
// a row. A block computes 128 x 128 numbers with eight warps of 64 x 32.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 128
#define STAGE_BYTES 64
#define STAGES 4
#define TILE_BYTES (TILE * STAGE_BYTES)

// The multiprocessor of a tile, and its time in that multiprocessor's clock ticks.
struct TileRecord { u32 multiprocessor, ticks; };

__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void fetch(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void load_four(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// A tile in shared memory: rows of 64 bytes, their four chunks of 16 in an order that depends on the row, so that eight
// rows read at the same chunk are in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 piece) { return row * STAGE_BYTES + ((piece ^ ((row >> 1) & 3)) * 16); }

#define MULTIPLY(NAME, SHAPE, NUMBER, CONSTRAINT)                                                                       \
    struct NAME {                                                                                                       \
        typedef NUMBER Number;                                                                                          \
        static __device__ __forceinline__ void multiply(NUMBER (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {            \
            asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"   \
                         : CONSTRAINT(d[0]), CONSTRAINT(d[1]), CONSTRAINT(d[2]), CONSTRAINT(d[3])                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                               \
        }                                                                                                               \
    };

MULTIPLY(Type_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", float, "+f")
MULTIPLY(Type_fp16, "m16n8k16.row.col.f32.f16.f16.f32", float, "+f")
MULTIPLY(Type_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32", float, "+f")
MULTIPLY(Type_int8, "m16n8k32.row.col.s32.s8.s8.s32", int, "+r")

__device__ __forceinline__ void fetch_tile(u32 to, const unsigned char *from, u64 row_bytes) {
    // 128 rows of four chunks: two for each thread.
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        const u32 at = threadIdx.x + i * 256, row = at / 4, piece = at % 4;
        fetch(to + place(row, piece), from + row * row_bytes + piece * 16);
    }
}

template <typename Type>
__device__ __forceinline__ void product(const unsigned char *a, const unsigned char *b, typename Type::Number *c, TileRecord *records,
                                        u32 m, u32 n, u32 k_bytes) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 a_tiles = shared_address(memory), b_tiles = a_tiles + STAGES * TILE_BYTES;
    const u32 columns = n / TILE, tiles = m / TILE * columns, steps = k_bytes / STAGE_BYTES;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;

#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long began = clock64();
        const u32 tile_m = tile / columns, tile_n = tile % columns;
        const unsigned char *a_rows = a + (u64)tile_m * TILE * k_bytes, *b_rows = b + (u64)tile_n * TILE * k_bytes;
        typename Type::Number d[4][4][4] = {};
        for (u32 stage = 0; stage < STAGES - 1; stage++) {
            if (stage < steps) {
                fetch_tile(a_tiles + stage * TILE_BYTES, a_rows + stage * STAGE_BYTES, k_bytes);
                fetch_tile(b_tiles + stage * TILE_BYTES, b_rows + stage * STAGE_BYTES, k_bytes);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            const u32 next = step + STAGES - 1;
            if (next < steps) {
                fetch_tile(a_tiles + next % STAGES * TILE_BYTES, a_rows + (u64)next * STAGE_BYTES, k_bytes);
                fetch_tile(b_tiles + next % STAGES * TILE_BYTES, b_rows + (u64)next * STAGE_BYTES, k_bytes);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            const u32 a_tile = a_tiles + step % STAGES * TILE_BYTES, b_tile = b_tiles + step % STAGES * TILE_BYTES;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 x[4][4], y[2][4];
#pragma unroll
                for (u32 i = 0; i < 4; i++) load_four(x[i], a_tile + place(warp_m + i * 16 + lane % 16, half * 2 + lane / 16));
#pragma unroll
                for (u32 i = 0; i < 2; i++) load_four(y[i], b_tile + place(warp_n + i * 16 + lane % 8 + lane / 16 * 8, half * 2 + lane / 8 % 2));
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
#pragma unroll
                    for (u32 j = 0; j < 4; j++) Type::multiply(d[i][j], x[i], y[j / 2][j % 2 * 2], y[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                struct __align__(8) Two { typename Type::Number x, y; };
                const u32 row = tile_m * TILE + warp_m + i * 16 + lane / 4, column = tile_n * TILE + warp_n + j * 8 + lane % 4 * 2;
                *(Two *)(c + (u64)row * n + column) = Two{d[i][j][0], d[i][j][1]};
                *(Two *)(c + (u64)(row + 8) * n + column) = Two{d[i][j][2], d[i][j][3]};
            }
        }
        if (threadIdx.x == 0 && records) {
            u32 multiprocessor;
            asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
            records[tile] = TileRecord{multiprocessor, (u32)(clock64() - began)};
        }
    }
}

#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define TYPE JOINED(Type_, NUMBER)

extern "C" __global__ void __launch_bounds__(256, 2)
    product_of_matrices(const unsigned char *a, const unsigned char *b, TYPE::Number *c, TileRecord *records, u32 m, u32 n,
                        u32 k_bytes) {
    product<TYPE>(a, b, c, records, m, n, k_bytes);
}
