/* Loops of which the work per turn is known exactly: what a CPU can do at most, at which clock, and how fast plain C copies.

   Built by escher_kernels/native.py with whatever C compiler is there, and called through ctypes (which releases the
   GIL) by N Python threads at once.

   peak loops   multiply-adds on named registers only: no loads, no stores. Each accumulator c_i gets a0 b0 + a0 b1 + a1 b0 +
                a1 b1 per turn, in an order of its own. With a1 = -a0 and random a0, b0, b1 it walks through four values and comes
                back, so it stays finite and normal however long the loop runs, and its bits keep changing. With all
                operands one and c_i = 0 the sum of all lanes is the number of multiply-adds: the SAME machine code counts
                itself (escher_count).
   clock loops  one chain of dependent register-register instructions of known latency. Never `add reg, imm`: Golden Cove and
                later fold those at rename (6.4 GHz was read on a 3.x GHz core). imul is the 32-bit one: the 64-bit one takes
                5 cycles on Intel's E cores.
   copies       ordinary stores (each written line is read first: 3 transfers for 2 counted) and streaming stores
                (2 transfers). The empty asm in each loop keeps a compiler from turning it into a call of memcpy, which
                would choose between the two by size.

   Traps: accumulators in an array are spilled (half the rate); a shared library built with -march=native dies elsewhere, so
   each function names its own target. */

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "native.c knows x86-64 and aarch64 only"
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__clang__)
#define GCC_OR_CLANG(gcc, clang) (__clang_major__ >= (clang))
#else
#define GCC_OR_CLANG(gcc, clang) (__GNUC__ >= (gcc))
#endif

#define EXPORT __attribute__((visibility("default")))
#define KEEP_LOOP __asm__ volatile("" ::: "memory")

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- the gate where all threads meet; Python allocates it zeroed and fills in the parties ---- */

struct gate {
    atomic_int parties;
    char pad0[60];
    atomic_int arrived;
    char pad1[60];
    atomic_int turn;
    char pad2[60];
    atomic_int aborted;
};

EXPORT int escher_gate_bytes(void) { return (int)sizeof(struct gate); }
EXPORT void escher_gate_abort(struct gate *g) { atomic_store(&g->aborted, 1); }

/* 0 when all are here, 1 when somebody called escher_gate_abort: then nobody waits, now or later. */
static int meet(struct gate *g)
{
    if (atomic_load_explicit(&g->aborted, memory_order_acquire))
        return 1;
    int turn = atomic_load_explicit(&g->turn, memory_order_acquire);
    if (atomic_fetch_add_explicit(&g->arrived, 1, memory_order_acq_rel) + 1 == atomic_load(&g->parties)) {
        atomic_store_explicit(&g->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&g->turn, turn + 1, memory_order_release);
        return 0;
    }
    for (int spins = 0; atomic_load_explicit(&g->turn, memory_order_acquire) == turn;) {
        if (atomic_load_explicit(&g->aborted, memory_order_acquire))
            return 1;
        if (spins < 2000) {
            spins++;
#if defined(__x86_64__)
            _mm_pause();
#else
            __asm__ volatile("yield");
#endif
        } else {
            sched_yield(); /* more threads than cores: let the others come here too */
        }
    }
    return 0;
}

/* ---- operands ---- */

#define TILE_BYTES 1024 /* one AMX tile: 16 rows of 64 bytes; the vector kernels use the first bytes of it */

struct operands {
    _Alignas(64) float start[20 * 16]; /* what the accumulators begin with */
    _Alignas(64) unsigned char a0[TILE_BYTES], a1[TILE_BYTES], b0[TILE_BYTES], b1[TILE_BYTES];
};

/* [0]: random, for timing. [1]: start 0 and operands 1, for counting. */
static struct operands fp32_operands[2], bf16_operands[2];

static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* +-[0.5, 2) with a full mantissa: no zeros, no ones, no denormals, and no sum of 32 products comes near overflow. */
static float random_float(uint32_t *state)
{
    uint32_t r = next_random(state);
    uint32_t bits = (r & 0x807fffffu) | (r & 0x00800000u ? 0x3f800000u : 0x3f000000u);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void put(unsigned char *tile, int i, int bf16, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (bf16) {
        uint16_t high = (uint16_t)(bits >> 16);
        memcpy(tile + 2 * i, &high, 2);
    } else {
        memcpy(tile + 4 * i, &bits, 4);
    }
}

static void fill(struct operands o[2], int bf16)
{
    uint32_t state = bf16 ? 0x9e3779b9u : 0x85ebca6bu;
    for (int i = 0; i < 20 * 16; i++) {
        o[0].start[i] = random_float(&state);
        o[1].start[i] = 0.0f;
    }
    for (int i = 0; i < (bf16 ? TILE_BYTES / 2 : TILE_BYTES / 4); i++) {
        float a = random_float(&state);
        put(o[0].a0, i, bf16, a);
        put(o[0].a1, i, bf16, -a);
        put(o[0].b0, i, bf16, random_float(&state));
        put(o[0].b1, i, bf16, random_float(&state));
        put(o[1].a0, i, bf16, 1.0f);
        put(o[1].a1, i, bf16, 1.0f);
        put(o[1].b0, i, bf16, 1.0f);
        put(o[1].b1, i, bf16, 1.0f);
    }
}

/* ---- peak loops ----
   PEAK(name, target, EACHn) writes one function with n accumulators c0.. in named variables, from four macros that stand
   before it: VECTOR, OPERAND(bytes), FMA(c, a, b), STORE(floats, c), and LANES. n x 4 multiply-adds per turn.
   n >= pipes x latency: 2 x 5 on AVX2 (10 + 4 operands of 16 registers), 2 x 6 on AVX-512, 4 x 4 on Neoverse V. */

#define EACH10(DO, k)                                                                                                  \
    DO(0, k) DO(1, k) DO(2, k) DO(3, k) DO(4, k) DO(5, k) DO(6, k) DO(7, k) DO(8, k) DO(9, k)
#define EACH16(DO, k) EACH10(DO, k) DO(10, k) DO(11, k) DO(12, k) DO(13, k) DO(14, k) DO(15, k)
#define EACH20(DO, k) EACH16(DO, k) DO(16, k) DO(17, k) DO(18, k) DO(19, k)

#define BEGIN(i, k) VECTOR c##i = START(o->start + (i) * LANES);
#define MULTIPLY_ADD(i, k) c##i = FMA(c##i, (((i) + (k)) & 2) ? a1 : a0, (((i) + (k)) & 1) ? b1 : b0);
#define ADD_UP(i, k)                                                                                                   \
    STORE(lanes, c##i);                                                                                                \
    for (int l = 0; l < LANES; l++)                                                                                    \
        sum += lanes[l];

#define PEAK(name, target, EACH)                                                                                       \
    target static double name(int64_t turns, const struct operands *o)                                                 \
    {                                                                                                                  \
        OPERAND_TYPE a0 = OPERAND(o->a0), a1 = OPERAND(o->a1), b0 = OPERAND(o->b0), b1 = OPERAND(o->b1);               \
        EACH(BEGIN, 0)                                                                                                 \
        for (; turns > 0; turns--) {                                                                                   \
            EACH(MULTIPLY_ADD, 0)                                                                                      \
            EACH(MULTIPLY_ADD, 1)                                                                                      \
            EACH(MULTIPLY_ADD, 2)                                                                                      \
            EACH(MULTIPLY_ADD, 3)                                                                                      \
        }                                                                                                              \
        double sum = 0;                                                                                                \
        _Alignas(64) float lanes[LANES];                                                                               \
        EACH(ADD_UP, 0)                                                                                                \
        return sum;                                                                                                    \
    }

#if defined(__x86_64__)

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define LANES 8
#define VECTOR __m256
#define OPERAND_TYPE __m256
#define OPERAND(p) _mm256_load_ps((const float *)(p))
#define START(p) _mm256_load_ps(p)
#define STORE(p, c) _mm256_store_ps(p, c)
#define FMA(c, a, b) _mm256_fmadd_ps(a, b, c)
PEAK(avx2_fp32, TARGET_AVX2, EACH10)
#undef LANES
#undef VECTOR
#undef OPERAND_TYPE
#undef OPERAND
#undef START
#undef STORE
#undef FMA

#define TARGET_AVX512 __attribute__((target("avx512f")))
#define LANES 16
#define VECTOR __m512
#define OPERAND_TYPE __m512
#define OPERAND(p) _mm512_load_ps(p)
#define START(p) _mm512_load_ps(p)
#define STORE(p, c) _mm512_store_ps(p, c)
#define FMA(c, a, b) _mm512_fmadd_ps(a, b, c)
PEAK(avx512_fp32, TARGET_AVX512, EACH16)
#undef OPERAND_TYPE
#undef OPERAND
#undef FMA

#if GCC_OR_CLANG(10, 9)
#define HAVE_AVX512_BF16 1
#define OPERAND_TYPE __m512bh
#define OPERAND(p) *(const __m512bh *)(p)
#define FMA(c, a, b) _mm512_dpbf16_ps(c, a, b)
PEAK(avx512_bf16, __attribute__((target("avx512f,avx512bf16"))), EACH16)
#endif

#if GCC_OR_CLANG(11, 12) && defined(__linux__)
#define HAVE_AMX_BF16 1
#define TARGET_AMX __attribute__((target("amx-tile,amx-bf16")))

/* TDPBF16PS starts every 16 cycles and takes 52: four accumulators (tmm0-3) keep it busy; a0 a1 b0 b1 are tmm4-7. */
TARGET_AMX static double amx_bf16(int64_t turns, const struct operands *o)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    _Alignas(64) float lanes[4][256];
    KEEP_LOOP; /* config is written before it is loaded, whatever the compiler knows of the instruction */
    _tile_loadconfig(&config);
    _tile_loadd(0, o->start, 64);
    _tile_loadd(1, o->start + 16, 64);
    _tile_loadd(2, o->start + 32, 64);
    _tile_loadd(3, o->start + 48, 64);
    _tile_loadd(4, o->a0, 64);
    _tile_loadd(5, o->a1, 64);
    _tile_loadd(6, o->b0, 64);
    _tile_loadd(7, o->b1, 64);
    for (; turns > 0; turns--) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);

        _tile_dpbf16ps(0, 4, 7);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 5, 7);
        _tile_dpbf16ps(3, 4, 6);

        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(1, 5, 7);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);

        _tile_dpbf16ps(0, 5, 7);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, lanes[0], 64);
    _tile_stored(1, lanes[1], 64);
    _tile_stored(2, lanes[2], 64);
    _tile_stored(3, lanes[3], 64);
    _tile_release();
    KEEP_LOOP;
    double sum = 0;
    for (int t = 0; t < 4; t++)
        for (int l = 0; l < 256; l++)
            sum += lanes[t][l];
    return sum;
}
#endif

/* 0, or the errno with which the kernel refuses this process the tile registers. Asked once; it holds for all threads. */
EXPORT int escher_amx_permission(void)
{
#if defined(HAVE_AMX_BF16)
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) ? errno : 0;
#else
    return ENOSYS;
#endif
}

#else /* aarch64 */

#define LANES 4
#define VECTOR float32x4_t
#define OPERAND_TYPE float32x4_t
#define OPERAND(p) vld1q_f32((const float *)(p))
#define START(p) vld1q_f32(p)
#define STORE(p, c) vst1q_f32(p, c)
#define FMA(c, a, b) vfmaq_f32(c, a, b)
PEAK(neon_fp32, , EACH20)
#undef OPERAND_TYPE
#undef OPERAND
#undef FMA

#if GCC_OR_CLANG(10, 16)
#define HAVE_NEON_BF16 1
#define OPERAND_TYPE bfloat16x8_t
#define OPERAND(p) *(const bfloat16x8_t *)(p)
#define FMA(c, a, b) vbfmmlaq_f32(c, a, b)
PEAK(neon_bf16, __attribute__((target("arch=armv8.2-a+bf16"))), EACH20)
#endif

EXPORT int escher_amx_permission(void) { return ENOSYS; }

#endif

/* ---- clock loops ---- */

#define TIMES4(s) s s s s
#define TIMES16(s) TIMES4(s) TIMES4(s) TIMES4(s) TIMES4(s)
#define TIMES128(s) TIMES16(s) TIMES16(s) TIMES16(s) TIMES16(s) TIMES16(s) TIMES16(s) TIMES16(s) TIMES16(s)

#define CHAIN(name, type, instruction)                                                                                 \
    static double name(int64_t turns, const struct operands *o)                                                        \
    {                                                                                                                  \
        type x = 0x2545f491u, y = 0x9e3779b1u;                                                                         \
        (void)o;                                                                                                       \
        for (; turns > 0; turns--)                                                                                     \
            __asm__ volatile(TIMES128(instruction "\n\t") TIMES128(instruction "\n\t") : "+r"(x) : "r"(y) : "cc");     \
        return (double)x;                                                                                              \
    }

#if defined(__x86_64__)
CHAIN(chain_add, uint64_t, "add %1, %0")
CHAIN(chain_imul, uint32_t, "imul %1, %0")
#else
CHAIN(chain_add, uint64_t, "add %0, %0, %1")
CHAIN(chain_eor, uint64_t, "eor %0, %0, %1")
#endif

/* ---- the table, and the slices ---- */

struct loop {
    const char *name;
    double (*run)(int64_t turns, const struct operands *);
    const struct operands *operands;
    int64_t flop_per_turn;   /* 0: a clock loop */
    int64_t cycles_per_turn; /* 0: a peak loop */
};

/* accumulators x 4 steps x lanes x products a lane x 2 FLOP */
static const struct loop loops[] = {
#if defined(HAVE_AMX_BF16)
    {"amx_bf16", amx_bf16, bf16_operands, 4 * 4 * 256 * 32 * 2, 0},
#endif
#if defined(HAVE_AVX512_BF16)
    {"avx512_bf16", avx512_bf16, bf16_operands, 16 * 4 * 16 * 2 * 2, 0},
#endif
#if defined(__x86_64__)
    {"avx512_fp32", avx512_fp32, fp32_operands, 16 * 4 * 16 * 2, 0},
    {"avx2_fp32", avx2_fp32, fp32_operands, 10 * 4 * 8 * 2, 0},
    {"add", chain_add, fp32_operands, 0, 256},
    {"imul", chain_imul, fp32_operands, 0, 256 * 3},
#else
#if defined(HAVE_NEON_BF16)
    {"neon_bf16", neon_bf16, bf16_operands, 20 * 4 * 4 * 4 * 2, 0},
#endif
    {"neon_fp32", neon_fp32, fp32_operands, 20 * 4 * 4 * 2, 0},
    {"add", chain_add, fp32_operands, 0, 256},
    {"eor", chain_eor, fp32_operands, 0, 256},
#endif
};

EXPORT int escher_loops(void) { return (int)(sizeof loops / sizeof loops[0]); }
EXPORT const char *escher_loop_name(int i) { return loops[i].name; }
EXPORT int64_t escher_loop_flop(int i) { return loops[i].flop_per_turn; }
EXPORT int64_t escher_loop_cycles(int i) { return loops[i].cycles_per_turn; }

/* Once, before anything else. */
EXPORT void escher_prepare(void)
{
    fill(fp32_operands, 0);
    fill(bf16_operands, 1);
}

/* The sum of all accumulators after `turns`: the number of multiply-adds done if `ones` (exact below 2^24 a lane). */
EXPORT double escher_sum(int loop, int64_t turns, int ones)
{
    return loops[loop].run(turns, loops[loop].operands + (ones != 0));
}

/* slices x n timed runs, in the order loop 0, 1, .. n-1, 0, 1, ..; start_ns and end_ns hold slices x n values.
   Returns 0, or 1 if the gate was aborted. */
EXPORT int escher_slices(struct gate *g, const int32_t *which, const int64_t *turns, int n, int64_t slices,
                         int64_t *start_ns, int64_t *end_ns, double *sums)
{
    for (int64_t s = 0; s < slices; s++)
        for (int i = 0; i < n; i++) {
            const struct loop *loop = &loops[which[i]];
            if (meet(g))
                return 1;
            start_ns[s * n + i] = now_ns();
            sums[i] = loop->run(turns[i], loop->operands);
            end_ns[s * n + i] = now_ns();
        }
    return 0;
}

/* ---- copies: n bytes, n >= 0, any alignment; the stores of the middle are aligned to 64 bytes ---- */

static void copy_bytes(unsigned char *d, const unsigned char *s, size_t n)
{
    for (; n > 0; n--) {
        *d++ = *s++;
        KEEP_LOOP;
    }
}

#define COPY(name, target, BLOCK, MOVE, FENCE)                                                                         \
    target static void name(unsigned char *d, const unsigned char *s, size_t n)                                        \
    {                                                                                                                  \
        size_t head = (size_t)(-(uintptr_t)d & 63);                                                                    \
        head = head < n ? head : n;                                                                                    \
        copy_bytes(d, s, head);                                                                                        \
        for (d += head, s += head, n -= head; n >= (BLOCK); d += (BLOCK), s += (BLOCK), n -= (BLOCK)) {                \
            MOVE                                                                                                       \
            KEEP_LOOP;                                                                                                 \
        }                                                                                                              \
        copy_bytes(d, s, n);                                                                                           \
        FENCE;                                                                                                         \
    }

#if defined(__x86_64__)
#define MOVE4(V, LOAD, STORE_TO)                                                                                       \
    V *to = (V *)d;                                                                                                    \
    const V *from = (const V *)s;                                                                                      \
    V v0 = LOAD(from), v1 = LOAD(from + 1), v2 = LOAD(from + 2), v3 = LOAD(from + 3);                                  \
    STORE_TO(to, v0);                                                                                                  \
    STORE_TO(to + 1, v1);                                                                                              \
    STORE_TO(to + 2, v2);                                                                                              \
    STORE_TO(to + 3, v3);
COPY(copy_plain_16, , 64, MOVE4(__m128i, _mm_loadu_si128, _mm_store_si128), )
COPY(copy_plain_32, TARGET_AVX2, 128, MOVE4(__m256i, _mm256_loadu_si256, _mm256_store_si256), )
COPY(copy_plain_64, TARGET_AVX512, 256, MOVE4(__m512i, _mm512_loadu_si512, _mm512_store_si512), )
COPY(copy_streaming_16, , 64, MOVE4(__m128i, _mm_loadu_si128, _mm_stream_si128), _mm_sfence())
COPY(copy_streaming_32, TARGET_AVX2, 128, MOVE4(__m256i, _mm256_loadu_si256, _mm256_stream_si256), _mm_sfence())
COPY(copy_streaming_64, TARGET_AVX512, 256, MOVE4(__m512i, _mm512_loadu_si512, _mm512_stream_si512), _mm_sfence())
#else
#define MOVE_PAIRS(store)                                                                                              \
    __asm__ volatile("ldp q16, q17, [%1]\n\tldp q18, q19, [%1, #32]\n\t" store " q16, q17, [%0]\n\t" store             \
                     " q18, q19, [%0, #32]"                                                                            \
                     :                                                                                                 \
                     : "r"(d), "r"(s)                                                                                  \
                     : "v16", "v17", "v18", "v19", "memory");
COPY(copy_plain_16, , 64, MOVE_PAIRS("stp"), )
COPY(copy_streaming_16, , 64, MOVE_PAIRS("stnp"), __asm__ volatile("dmb ishst" ::: "memory"))
#endif

typedef void copier(unsigned char *, const unsigned char *, size_t);

/* One thread's share. vector_bytes: 16, 32 (AVX) or 64 (AVX-512). Returns 0, 1 if the gate was aborted, 2 if no such
   vector. times_ns: start, end. */
EXPORT int escher_copy(struct gate *g, unsigned char *dst, const unsigned char *src, int64_t nbytes, int streaming,
                       int vector_bytes, int64_t *times_ns)
{
    copier *copy;
    if (vector_bytes == 16)
        copy = streaming ? copy_streaming_16 : copy_plain_16;
#if defined(__x86_64__)
    else if (vector_bytes == 32)
        copy = streaming ? copy_streaming_32 : copy_plain_32;
    else if (vector_bytes == 64)
        copy = streaming ? copy_streaming_64 : copy_plain_64;
#endif
    else
        return 2;
    if (meet(g))
        return 1;
    times_ns[0] = now_ns();
    copy(dst, src, (size_t)nbytes);
    times_ns[1] = now_ns();
    return 0;
}
