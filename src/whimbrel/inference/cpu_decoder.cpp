// CPU forward pass for a few tokens: the decode step and short prompts. Compiled for this machine by cpu_decoder.py,
// which fills in the structs below; their layout must match the ctypes definitions there.
//
// Decoding reads every weight once for a handful of tokens, so it is limited by memory bandwidth. Weights are read in
// the format they are stored in (fp32, bf16, fp16, int8, int4) and converted in registers; activations are fp32. Each
// row of a matrix is summed in the same order for any batch size and number of threads, so the result for a token
// depends on neither.
//
// All threads run the complete pass on their share of the rows of each matrix, with a barrier between dependent steps;
// how many threads there are is measured.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 128;  // columns of an int4 block: 16 words of 8 codes. Activations are padded to a multiple of it.
constexpr int ROWS = 4;     // rows of a matrix that are multiplied together
constexpr int PREFETCH_BYTES = 16384;
constexpr int SPINS = 4096; // iterations before a waiting thread yields its core

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef _Float16 Halves __attribute__((vector_size(32)));

enum Kind : int32_t { FP32, BF16, FP16, INT8, INT4 };
enum Activation : int32_t { GELU, GELU_TANH, SILU, RELU2 };

struct Vector {  // floating-point values; data is null if the model has no such vector
    const void* data;
    int64_t kind;
};

struct Matrix {  // rows x columns; int8 has a scale per row, int4 one per `group` columns
    const void* data;
    const void* scales;
    int32_t kind, scale_kind;
    int64_t rows, columns, group;
    Vector bias;
};

struct Norm {
    Vector weight, bias;
};

struct Layer {
    Norm attention_norm, mlp_norm;
    Vector query_norm, key_norm;  // QK-norm weights
    Matrix qkv, out, fc, proj;
    Vector skip;                  // the weights of x and x0, see GPTConfig.embedding_skip
    void *keys, *values;          // (blocks, block size, kv heads, head size)
    int64_t window;               // 0: unlimited
};

struct Model {
    int32_t width, num_layers, heads, kv_heads, head_size, mlp_size, vocab_size, context_length;
    int32_t is_rms, activation, is_gated, norms_heads, block_size, cache_kind;
    float eps, softcap, attention_scale;
    const float* frequencies;     // rotations per position of each pair of a head; null without RoPE
    Matrix embedding, positions, head;
    Norm embedding_norm, final_norm;
    const Layer* layers;
};

inline Floats load(const float* x) { Floats v; std::memcpy(&v, x, sizeof v); return v; }
inline void store(float* x, Floats v) { std::memcpy(x, &v, sizeof v); }
inline Floats splat(float x) { return x - Floats{}; }

inline float sum(Floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
#endif
}

inline Floats exponential(Floats x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to an integer
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    return p * scale;
}

inline float to_float(uint16_t bits) {  // bf16
    uint32_t word = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

inline uint16_t to_bf16(float x) {  // round to nearest even, like torch
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    if (x != x) return 0x7fc0;
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float element(const void* data, int64_t kind, int64_t i) {
    if (kind == FP32) return static_cast<const float*>(data)[i];
    if (kind == BF16) return to_float(static_cast<const uint16_t*>(data)[i]);
    return float(static_cast<const _Float16*>(data)[i]);
}

inline float element(const Vector& v, int64_t i) { return element(v.data, v.kind, i); }

inline void set_element(void* data, int64_t kind, int64_t i, float x) {
    if (kind == FP32) static_cast<float*>(data)[i] = x;
    else if (kind == BF16) static_cast<uint16_t*>(data)[i] = to_bf16(x);
    else static_cast<_Float16*>(data)[i] = _Float16(x);
}

template <typename T>
inline T read(const void* data) {  // unaligned
    T value;
    std::memcpy(&value, data, sizeof value);
    return value;
}

// Copy `count` of SIZE bytes and zero the rest.
template <int SIZE>
inline void copy_padded(char* target, const void* data, int64_t count) {
#if defined(__AVX512BW__)
    if constexpr (SIZE <= 64) {
        const __m512i bytes = _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, data);
        std::memcpy(target, &bytes, SIZE);
        return;
    }
#endif
    std::memset(target, 0, SIZE);
    std::memcpy(target, data, size_t(count));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline Floats join(__m256 low, __m256 high) {
    Floats v;
    std::memcpy(&v, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&v) + sizeof low, &high, sizeof high);
    return v;
}
#endif

// 16 floats, or codes of int8. GCC 12 converts some of these vectors one element at a time, hence the intrinsics.
template <int KIND>
inline Floats load_floats(const void* data) {
    if constexpr (KIND == FP32) {
        return read<Floats>(data);
    } else if constexpr (KIND == BF16) {
        return (Floats)(__builtin_convertvector(read<Shorts>(data), Words) << 16);
    } else if constexpr (KIND == FP16) {
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtph_ps(read<__m256i>(data));
#elif defined(__AVX2__) && defined(__F16C__)
        const char* bytes = static_cast<const char*>(data);
        return join(_mm256_cvtph_ps(read<__m128i>(bytes)), _mm256_cvtph_ps(read<__m128i>(bytes + 16)));
#else
        return __builtin_convertvector(read<Halves>(data), Floats);
#endif
    } else {
        static_assert(KIND == INT8);
#if defined(__AVX512F__)
        return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(data)));
#elif defined(__AVX2__)
        const char* bytes = static_cast<const char*>(data);
        const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
        const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes + 8)));
        return join(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high));
#else
        return __builtin_convertvector(read<Bytes>(data), Floats);
#endif
    }
}

// The first `count` of 16 floats, then zeros.
template <int KIND>
inline Floats load_floats(const void* data, int count) {
    char bytes[64];
    copy_padded<64>(bytes, data, count * (KIND == FP32 ? 4 : 2));
    return load_floats<KIND>(bytes);
}

// Matrix products

// Where column i of an activation is stored. bf16 weights are split into even and odd columns by one shift or mask of 16
// pairs, and int4 weights into every 8th column, so activations are stored in that order.
inline int64_t place(int32_t kind, int64_t i) {
    if (kind == BF16) return i / 32 * 32 + (i % 2) * 16 + i % 32 / 2;
    if (kind == INT4) return i / BLOCK * BLOCK + (i % 8) * LANES + i % BLOCK / 8;
    return i;
}

inline int64_t padded(int64_t columns) { return (columns + BLOCK - 1) / BLOCK * BLOCK; }

inline int64_t row_bytes(const Matrix& m) {
    const int64_t sizes[] = {8, 4, 4, 2, 1};  // in half-bytes
    return m.columns * sizes[m.kind] / 2;
}

struct Rows {  // rows of one matrix: their weights, the addresses to prefetch, and their indices
    const char *data[ROWS], *prefetch[ROWS];
    int64_t index[ROWS];
};

inline Floats code_values(Words w) {  // the lowest 4 bits of each word, -8 to 7
#if defined(__AVX512F__)
    const Floats table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return (Floats)_mm512_permutexvar_ps((__m512i)w, (__m512)table);
#else
    return __builtin_convertvector((Ints)(w & 15) - 8, Floats);
#endif
}

// The scales of the 16 words of an int4 block that starts at group `first`; only `count` groups of it exist.
template <int GROUP>
inline Floats block_scales(const Matrix& m, int64_t first, int64_t count = BLOCK / GROUP) {
    const auto scale = [&](int64_t i) { return splat(element(m.scales, m.scale_kind, first + (i < count ? i : 0))); };
    const Ints second_half = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1};
    const Ints odd_quarters = {0, 0, 0, 0, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, -1, -1};
    if constexpr (GROUP == BLOCK) {
        return scale(0);
    } else if constexpr (GROUP == BLOCK / 2) {
        return second_half ? scale(1) : scale(0);
    } else {
        return odd_quarters ? (second_half ? scale(3) : scale(1)) : (second_half ? scale(2) : scale(0));
    }
}

template <int KIND>
struct Layout {
    static constexpr int PARTS = KIND <= FP16 ? 2 : 1;  // sums per row: one addition has to wait for the one before
    static constexpr int STEP = KIND == INT4 ? BLOCK : PARTS * LANES;  // columns that are read at a time
    static constexpr int BYTES = KIND == FP32 ? 128 : KIND == INT8 ? 16 : 64;
};

// Add the products of STEP columns of a row with B activations to the sums of the row.
template <int KIND, int B>
__attribute__((always_inline)) inline void accumulate(const char* from, const float* x, int64_t stride,
                                                      Floats scales, Floats (&sums)[B][Layout<KIND>::PARTS]) {
    if constexpr (KIND == BF16) {
        const Words w = read<Words>(from);
        const Floats even = (Floats)(w << 16), odd = (Floats)(w & 0xffff0000u);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
            sums[b][0] += even * load(x + b * stride);
            sums[b][1] += odd * load(x + b * stride + LANES);
        }
    } else if constexpr (KIND == INT4) {
        const Words w = read<Words>(from);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
            const float* xb = x + b * stride;
            Floats even = code_values(w) * load(xb), odd = code_values(w >> 4) * load(xb + LANES);
#pragma GCC unroll 4
            for (int i = 2; i < 8; i += 2) {
                even += code_values(w >> (4 * i)) * load(xb + i * LANES);
                odd += code_values(w >> (4 * i + 4)) * load(xb + (i + 1) * LANES);
            }
            sums[b][0] += (even + odd) * scales;
        }
    } else {
        using L = Layout<KIND>;
#pragma GCC unroll 2
        for (int part = 0; part < L::PARTS; part++) {
            const Floats w = load_floats<KIND>(from + part * L::BYTES / L::PARTS);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) sums[b][part] += w * load(x + b * stride + part * LANES);
        }
    }
}

// Products of ROWS rows with B activations of stride `stride`.
template <int KIND, int B, int GROUP = BLOCK>
inline void multiply(const Matrix& m, const Rows& rows, const float* x, int64_t stride, float (*y)[ROWS]) {
    using L = Layout<KIND>;
    Floats sums[ROWS][B][L::PARTS] = {};
    const int64_t bytes = row_bytes(m), groups = KIND == INT4 ? m.columns / GROUP : 0;
    const auto step = [&](int r, int64_t k, int64_t offset) __attribute__((always_inline)) {
        Floats scales = {};
        if constexpr (KIND == INT4) scales = block_scales<GROUP>(m, rows.index[r] * groups + k / GROUP);
        for (int line = 0; line < L::BYTES; line += 64) __builtin_prefetch(rows.prefetch[r] + offset + line, 0, 3);
        accumulate<KIND, B>(rows.data[r] + offset, x + k, stride, scales, sums[r]);
    };
    const int64_t steps = bytes / L::BYTES, k = steps * L::STEP, offset = steps * L::BYTES;
    if constexpr (B == 1 && KIND <= FP16) {  // hardware prefetchers follow one row at a time best
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int64_t i = 0; i < steps; i++) step(r, i * L::STEP, i * L::BYTES);
    } else {  // several rows share the activations; codes have one sum per row, too few for one row at a time
        for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) step(r, i * L::STEP, i * L::BYTES);
    }
    if (offset < bytes) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            char last[L::BYTES];
            copy_padded<L::BYTES>(last, rows.data[r] + offset, bytes - offset);
            Floats scales = {};
            if constexpr (KIND == INT4) {
                scales = block_scales<GROUP>(m, rows.index[r] * groups + k / GROUP, groups - k / GROUP);
            }
            accumulate<KIND, B>(last, x + k, stride, scales, sums[r]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        const float scale = KIND == INT8 ? element(m.scales, m.scale_kind, rows.index[r]) : 1.0f;
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) y[b][r] = sum(L::PARTS == 2 ? sums[r][b][0] + sums[r][b][L::PARTS - 1] : sums[r][b][0]) * scale;
    }
}

template <int KIND, int GROUP = BLOCK>
inline void multiply_batch(const Matrix& m, const Rows& rows, const float* x, int64_t batch, float (*y)[ROWS]) {
    const int64_t stride = padded(m.columns);
    int64_t b = 0;
    for (; b + 4 <= batch; b += 4) multiply<KIND, 4, GROUP>(m, rows, x + b * stride, stride, y + b);
    for (; b + 2 <= batch; b += 2) multiply<KIND, 2, GROUP>(m, rows, x + b * stride, stride, y + b);
    for (; b < batch; b++) multiply<KIND, 1, GROUP>(m, rows, x + b * stride, stride, y + b);
}

__attribute__((noinline)) void multiply_rows(const Matrix& m, const Rows& rows, const float* x, int64_t batch, float (*y)[ROWS]) {
    switch (m.kind) {
        case FP32: multiply_batch<FP32>(m, rows, x, batch, y); break;
        case BF16: multiply_batch<BF16>(m, rows, x, batch, y); break;
        case FP16: multiply_batch<FP16>(m, rows, x, batch, y); break;
        case INT8: multiply_batch<INT8>(m, rows, x, batch, y); break;
        default:
            if (m.group == 32) multiply_batch<INT4, 32>(m, rows, x, batch, y);
            else if (m.group == 64) multiply_batch<INT4, 64>(m, rows, x, batch, y);
            else multiply_batch<INT4, 128>(m, rows, x, batch, y);
    }
    if (m.bias.data)
        for (int64_t b = 0; b < batch; b++)
            for (int r = 0; r < ROWS; r++) y[b][r] += element(m.bias, rows.index[r]);
}

struct Range {
    int64_t begin, end;
};

// The range assigned to a thread, in multiples of `multiple`.
inline Range share(int64_t count, int thread, int threads, int64_t multiple = 1) {
    const int64_t units = (count + multiple - 1) / multiple;
    const int64_t begin = units * thread / threads * multiple, end = units * (thread + 1) / threads * multiple;
    return {begin, end < count ? end : count};
}

inline const char* row_data(const Matrix& m, int64_t row) { return static_cast<const char*>(m.data) + row * row_bytes(m); }

// Calls `use(row, b, value)` for each row of the range and each of the activations. `next` is what is read afterwards.
template <typename Use>
inline void product(const Matrix& m, Range range, const float* x, int64_t batch, float (*y)[ROWS], const char* next, Use use) {
    // The hardware prefetches poorly from several short rows at a time, so rows are prefetched well ahead of use.
    const int64_t bytes = row_bytes(m), ahead = (PREFETCH_BYTES / (ROWS * bytes) + 1) * ROWS;
    for (int64_t row = range.begin; row < range.end; row += ROWS) {
        Rows rows;
        for (int r = 0; r < ROWS; r++) {
            rows.index[r] = row + r < range.end ? row + r : range.end - 1;
            rows.data[r] = row_data(m, rows.index[r]);
            const int64_t beyond = row + r + ahead - range.end;
            rows.prefetch[r] = beyond < 0 ? row_data(m, row + r + ahead) : next + beyond * bytes;
        }
        multiply_rows(m, rows, x, batch, y);
        for (int64_t b = 0; b < batch; b++)
            for (int r = 0; r < ROWS && row + r < range.end; r++) use(row + r, b, y[b][r]);
    }
}

// Threads

class Threads {
  public:
    // The threads of this process, shared by all decoders. They are never joined: they sleep between runs.
    static Threads& get(int count) {
        static std::mutex mutex;
        static std::map<int, Threads*> all;
        std::lock_guard lock(mutex);
        Threads*& threads = all[count];
        if (!threads) threads = new Threads(count);
        return *threads;
    }

    int count() const { return count_; }

    template <typename Job>
    void run(Job&& job) {
        std::lock_guard lock(mutex_);
        if (pid_ != getpid()) start();  // threads do not survive a fork; the objects of the parent are leaked
        call_ = [](void* data, int thread) { (*static_cast<std::remove_reference_t<Job>*>(data))(thread); };
        data_ = &job;
        wake();
        job(0);
        barrier();
    }

    // Wait until all threads have called this.
    void barrier() {
        if (count_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) pause(spins);
    }

  private:
    explicit Threads(int count) : count_(count) { start(); }

    static void pause(int spins) {
        if (spins >= SPINS) {
            std::this_thread::yield();
            return;
        }
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void start() {
        pid_ = getpid();
        arrived_ = 0;
        threads_ = new std::vector<std::thread>;
        for (int thread = 1; thread < count_; thread++) {
            try {
                threads_->emplace_back([this, thread, seen = job_.load()] { work(thread, seen); });
            } catch (const std::system_error&) {  // too many threads in the system: use those that there are
                count_ = thread;
            }
        }
    }

    void wake() {
        job_.fetch_add(1);
        job_.notify_all();
    }

    void work(int thread, uint32_t seen) {
        for (;; seen++) {
            for (int spins = 0; spins < SPINS && job_.load(std::memory_order_acquire) == seen; spins++) pause(0);
            job_.wait(seen, std::memory_order_acquire);
            call_(data_, thread);
            barrier();
        }
    }

    int count_;
    std::mutex mutex_;
    pid_t pid_ = 0;
    std::vector<std::thread>* threads_ = nullptr;
    void (*call_)(void*, int) = nullptr;
    void* data_ = nullptr;
    std::atomic<uint32_t> job_{0}, phase_{0};
    std::atomic<int> arrived_{0};
};

// Chooses how many threads decode a token, from the time that they take: more of them are slower if they share a core or
// its bandwidth, or if other programs keep some of them from running, since all wait for the slowest.
class ThreadCount {
  public:
    explicit ThreadCount(int max) {
        for (int count = max; count >= 1; count /= 2) options_.push_back(count);
    }

    int max() const { return options_.front(); }
    int current() const { return options_[size_t(trial_ >= 0 ? trial_ : best_)]; }

    // Record the duration of a pass with `current()` threads. Now and then a few passes run with half or twice the
    // threads; the longer the choice lasts, the rarer.
    void record(double seconds) {
        if (options_.size() == 1) return;
        if (passes_ >= 0) sum_ += seconds;
        if (++passes_ < (trial_ >= 0 ? TRIAL : interval_)) return;
        const double mean = sum_ / passes_;
        sum_ = 0, passes_ = 0;
        if (trial_ < 0) {
            best_mean_ = mean;
            const bool can_halve = best_ + 1 < int(options_.size());
            halves_ = best_ == 0 || (can_halve && !halves_);
            trial_ = halves_ ? best_ + 1 : best_ - 1;
            return;
        }
        const bool is_better = mean < MARGIN * best_mean_;
        best_ = is_better ? trial_ : best_;
        interval_ = is_better ? TRIAL : interval_ < MAX_INTERVAL ? 2 * interval_ : interval_;
        trial_ = -1;
    }

  private:
    static constexpr int TRIAL = 4, MAX_INTERVAL = 512;  // passes
    static constexpr double MARGIN = 0.95;

    std::vector<int> options_;
    int best_ = 0, trial_ = -1, passes_ = -1, interval_ = TRIAL;  // the first pass, which reads the weights from disk, is not counted
    bool halves_ = false;
    double sum_ = 0, best_mean_ = 0;
};

// The forward pass

inline void normalize(const Model& m, const Norm& norm, const float* x, float* y, int32_t kind) {
    float mean = 0, square = 0;
    if (!m.is_rms) {
        for (int i = 0; i < m.width; i++) mean += x[i];
        mean /= float(m.width);
    }
    for (int i = 0; i < m.width; i++) square += (x[i] - mean) * (x[i] - mean);
    const float scale = 1.0f / std::sqrt(square / float(m.width) + m.eps);
    for (int i = 0; i < m.width; i++) {
        float value = (x[i] - mean) * scale;
        if (norm.weight.data) value *= element(norm.weight, i);
        if (norm.bias.data) value += element(norm.bias, i);
        y[place(kind, i)] = value;
    }
}

inline void activate(int32_t kind, float* x, int64_t count) {  // count is a multiple of LANES
    for (int64_t i = 0; i < count; i += LANES) {
        Floats v = load(x + i);
        if (kind == SILU) {
            v = v / (1.0f + exponential(-v));
        } else if (kind == GELU_TANH) {
            Floats u = 0.7978845608f * (v + 0.044715f * v * v * v);
            v = v - v / (1.0f + exponential(2.0f * u));  // v (1 + tanh u) / 2
        } else if (kind == RELU2) {
            v = v < 0.0f ? splat(0.0f) : v * v;
        } else {
            for (int j = 0; j < LANES; j++) v[j] *= 0.5f * (1.0f + std::erf(v[j] * 0.7071067812f));
        }
        store(x + i, v);
    }
}

class Decoder {
  public:
    Decoder(const Model& model, int threads) : m_(model), layers_(model.layers, model.layers + model.num_layers),
        thread_count_(threads), scratch_(size_t(threads)) {}

    // Process one token per row. Rows may be tokens of one sequence, in order of their positions. `tables` has the block
    // table of each row, `table_width` wide. `logits` gets those of the rows in `wanted`, (num_wanted, vocab_size).
    void run(int64_t rows, const int32_t* tokens, const int32_t* positions, const int32_t* tables, int64_t table_width,
             int64_t num_wanted, const int32_t* wanted, float* logits) {
        const int64_t attention_width = int64_t(m_.heads) * m_.head_size;
        const int64_t qkv_width = attention_width + 2 * int64_t(m_.kv_heads) * m_.head_size;
        rows_ = rows, tokens_ = tokens, positions_ = positions, tables_ = tables, table_width_ = table_width;
        x_.resize(size_t(rows * m_.width));
        x0_.resize(layers_[0].skip.data ? x_.size() : 0);
        qkv_.resize(size_t(rows * qkv_width));
        heads_.assign(size_t(rows * padded(attention_width)), 0.0f);
        hidden_.assign(size_t(rows * padded(m_.mlp_size)), 0.0f);
        rotations_.resize(m_.frequencies ? size_t(rows * m_.head_size) : 0);
        threads_ = &Threads::get(rows == 1 ? thread_count_.current() : thread_count_.max());
        const auto start = std::chrono::steady_clock::now();
        threads_->run([&](int thread) { work(thread, qkv_width, num_wanted, wanted, logits); });
        if (rows == 1) thread_count_.record(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }

  private:
    struct Scratch {
        std::vector<float> normed, gates, query, scores;
        std::vector<float> products;
        float (*y(int64_t rows))[ROWS] {
            products.resize(size_t(rows * ROWS));
            return reinterpret_cast<float(*)[ROWS]>(products.data());
        }
    };

    void work(int thread, int64_t qkv_width, int64_t num_wanted, const int32_t* wanted, float* logits) {
        Scratch& s = scratch_[size_t(thread)];
        const int threads = threads_->count();
        embed(thread, threads);
        threads_->barrier();
        for (const Layer& layer : layers_) {
            if (layer.skip.data) {  // every thread mixes its share of x, which the next steps read completely
                const float a = element(layer.skip, 0), b = element(layer.skip, 1);
                const Range range = share(int64_t(x_.size()), thread, threads);
                for (int64_t i = range.begin; i < range.end; i++) x_[size_t(i)] = a * x_[size_t(i)] + b * x0_[size_t(i)];
                threads_->barrier();
            }
            const float* normed = norm_rows(layer.attention_norm, layer.qkv, rows_, nullptr, s);
            product(layer.qkv, share(qkv_width, thread, threads, ROWS), normed, rows_, s.y(rows_), first_row(layer.out, thread),
                [&](int64_t row, int64_t b, float value) { qkv_[size_t(b * qkv_width + row)] = value; });
            threads_->barrier();
            store_keys(layer, qkv_width, share(rows_ * m_.kv_heads, thread, threads), s);
            threads_->barrier();
            attend(layer, qkv_width, share(rows_ * m_.heads, thread, threads), s);
            threads_->barrier();
            add_product(layer.out, heads_, m_.attention_scale, thread, first_row(layer.fc, thread), s);
            threads_->barrier();
            expand(layer, thread, s);
            threads_->barrier();
            const Matrix& next = &layer == &layers_.back() ? m_.head : (&layer + 1)->qkv;
            add_product(layer.proj, hidden_, 1.0f, thread, first_row(next, thread), s);
            threads_->barrier();
        }
        const float* normed = norm_rows(m_.final_norm, m_.head, num_wanted, wanted, s);
        product(m_.head, share(m_.vocab_size, thread, threads, ROWS), normed, num_wanted, s.y(num_wanted), first_row(layers_[0].qkv, thread),
            [&](int64_t row, int64_t b, float value) {
                if (m_.softcap > 0) value = m_.softcap * std::tanh(value / m_.softcap);
                logits[b * m_.vocab_size + row] = value;
            });
    }

    // `count` rows of x, the first ones or those in `rows`, normalized and in the order that `m` needs. Every thread
    // computes all of them, which takes less time than a barrier.
    const float* norm_rows(const Norm& norm, const Matrix& m, int64_t count, const int32_t* rows, Scratch& s) {
        const int64_t stride = padded(m_.width);
        s.normed.assign(size_t(count * stride), 0.0f);
        for (int64_t b = 0; b < count; b++) {
            const int64_t row = rows ? rows[b] : b;
            normalize(m_, norm, &x_[size_t(row * m_.width)], &s.normed[size_t(b * stride)], m.kind);
        }
        return s.normed.data();
    }

    const char* first_row(const Matrix& m, int thread) const {
        const int64_t rows = &m == &m_.head ? m_.vocab_size : m.rows;
        return row_data(m, share(rows, thread, threads_->count(), ROWS).begin);
    }

    void embed(int thread, int threads) {
        const Range range = share(rows_, thread, threads);
        for (int64_t b = range.begin; b < range.end; b++) {
            float* x = &x_[size_t(b * m_.width)];
            read_row(m_.embedding, tokens_[b], x);
            if (m_.positions.data) {
                for (int i = 0; i < m_.width; i++)
                    x[i] += element(m_.positions.data, m_.positions.kind, int64_t(positions_[b]) * m_.width + i);
            }
            if (layers_[0].skip.data) {
                normalize(m_, m_.embedding_norm, x, x, FP32);
                std::memcpy(&x0_[size_t(b * m_.width)], x, size_t(m_.width) * sizeof(float));
            }
            for (int i = 0; m_.frequencies && i < m_.head_size / 2; i++) {
                const float angle = float(positions_[b]) * m_.frequencies[i];
                rotations_[size_t(b * m_.head_size + i)] = std::cos(angle);
                rotations_[size_t(b * m_.head_size + m_.head_size / 2 + i)] = std::sin(angle);
            }
        }
    }

    static void read_row(const Matrix& m, int64_t row, float* x) {
        const char* data = static_cast<const char*>(m.data) + row * row_bytes(m);
        for (int64_t i = 0; i < m.columns; i++) {
            if (m.kind == INT8) {
                x[i] = float(int8_t(data[i])) * element(m.scales, m.scale_kind, row);
            } else if (m.kind == INT4) {
                const int code = (uint8_t(data[i / 2]) >> (i % 2 * 4) & 15) - 8;
                x[i] = float(code) * element(m.scales, m.scale_kind, row * (m.columns / m.group) + i / m.group);
            } else {
                x[i] = element(data, m.kind, i);
            }
        }
    }

    // Normalize and rotate one head in place.
    void prepare_head(float* head, const Vector& weight, int64_t b) const {
        const int size = m_.head_size, half = size / 2;
        if (m_.norms_heads) {
            float square = 0;
            for (int i = 0; i < size; i++) square += head[i] * head[i];
            const float scale = 1.0f / std::sqrt(square / float(size) + m_.eps);
            for (int i = 0; i < size; i++) head[i] *= weight.data ? scale * element(weight, i) : scale;
        }
        if (m_.frequencies) {
            const float *cosine = &rotations_[size_t(b * size)], *sine = cosine + half;
            for (int i = 0; i < half; i++) {
                const float first = head[i], second = head[i + half];
                head[i] = first * cosine[i] - second * sine[i];
                head[i + half] = second * cosine[i] + first * sine[i];
            }
        }
    }

    int64_t cache_offset(int64_t b, int64_t position, int64_t head) const {
        const int64_t block = tables_[b * table_width_ + position / m_.block_size];
        return ((block * m_.block_size + position % m_.block_size) * m_.kv_heads + head) * m_.head_size;
    }

    void store_keys(const Layer& layer, int64_t qkv_width, Range items, Scratch& s) {
        const int64_t size = m_.head_size, heads = int64_t(m_.heads) * size, keys = int64_t(m_.kv_heads) * size;
        s.query.resize(size_t(size + LANES));
        for (int64_t item = items.begin; item < items.end; item++) {
            const int64_t b = item / m_.kv_heads, head = item % m_.kv_heads;
            const float* key = &qkv_[size_t(b * qkv_width + heads + head * size)];
            const float* value = key + keys;
            std::memcpy(s.query.data(), key, size_t(size) * sizeof(float));
            prepare_head(s.query.data(), layer.key_norm, b);
            const int64_t offset = cache_offset(b, positions_[b], head);
            for (int64_t i = 0; i < size; i++) {
                set_element(layer.keys, m_.cache_kind, offset + i, s.query[size_t(i)]);
                set_element(layer.values, m_.cache_kind, offset + i, value[i]);
            }
        }
    }

    void attend(const Layer& layer, int64_t qkv_width, Range items, Scratch& s) {
        switch (m_.cache_kind) {
            case FP32: attend_sized<FP32>(layer, qkv_width, items, s); break;
            case BF16: attend_sized<BF16>(layer, qkv_width, items, s); break;
            default: attend_sized<FP16>(layer, qkv_width, items, s);
        }
    }

    template <int KIND>
    void attend_sized(const Layer& layer, int64_t qkv_width, Range items, Scratch& s) {
        const int full = m_.head_size / LANES;
        if (m_.head_size % LANES == 0 && full == 4) attend_cached<KIND, 4>(layer, qkv_width, items, s);
        else if (m_.head_size % LANES == 0 && full == 8) attend_cached<KIND, 8>(layer, qkv_width, items, s);
        else attend_cached<KIND, 0>(layer, qkv_width, items, s);
    }

    // Call `use(i, offset)` for each cached token of a row, at position start + i, with the head's offset in the cache.
    template <typename Use>
    void for_each_cached(int64_t b, int64_t start, int64_t count, int64_t head, Use use) const {
        const int64_t stride = int64_t(m_.kv_heads) * m_.head_size;
        for (int64_t i = 0; i < count;) {
            int64_t offset = cache_offset(b, start + i, head);
            const int64_t left = m_.block_size - (start + i) % m_.block_size, end = i + left < count ? i + left : count;
            for (; i < end; i++, offset += stride) use(i, offset);
        }
    }

    // FULL: the vectors of a head, known at compile time so that its output stays in registers; 0 for other sizes.
    template <int KIND, int FULL>
    void attend_cached(const Layer& layer, int64_t qkv_width, Range items, Scratch& s) {
        constexpr int64_t bytes = KIND == FP32 ? 4 : 2;
        const int64_t size = m_.head_size, group = m_.heads / m_.kv_heads;
        const int full = FULL ? FULL : int(size / LANES), rest = FULL ? 0 : int(size % LANES);
        const float scale = 1.0f / std::sqrt(float(size));
        const char *keys = static_cast<const char*>(layer.keys), *values = static_cast<const char*>(layer.values);
        s.query.assign(size_t((full + 1) * LANES), 0.0f);
        s.scores.resize(size_t(m_.context_length + LANES));
        s.gates.resize(s.query.size());
        const float* query = s.query.data();
        float *scores = s.scores.data(), *out = s.gates.data();
        for (int64_t item = items.begin; item < items.end; item++) {
            const int64_t b = item / m_.heads, head = item % m_.heads, kv_head = head / group, position = positions_[b];
            const int64_t start = layer.window && position >= layer.window ? position - layer.window + 1 : 0;
            const int64_t count = position - start + 1;
            std::memcpy(s.query.data(), &qkv_[size_t(b * qkv_width + head * size)], size_t(size) * sizeof(float));
            prepare_head(s.query.data(), layer.query_norm, b);
            float largest = -INFINITY;
            for_each_cached(b, start, count, kv_head, [&](int64_t i, int64_t offset) {
                const char* key = keys + offset * bytes;
                Floats total = {};
#pragma GCC unroll 8
                for (int d = 0; d < full; d++) total += load_floats<KIND>(key + d * LANES * bytes) * load(query + d * LANES);
                if (rest) total += load_floats<KIND>(key + full * LANES * bytes, rest) * load(query + full * LANES);
                scores[i] = sum(total) * scale;
                largest = scores[i] > largest ? scores[i] : largest;
            });
            for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;  // its exponential is 1e-38, which adds nothing
            Floats sums = {};
            for (int64_t i = 0; i < count; i += LANES) {
                const Floats v = exponential(load(scores + i) - largest);
                store(scores + i, v);
                sums += v;
            }
            if constexpr (FULL) {
                Floats totals[FULL] = {};
                for_each_cached(b, start, count, kv_head, [&](int64_t i, int64_t offset) {
                    const Floats weight = splat(scores[i]);
#pragma GCC unroll 8
                    for (int d = 0; d < FULL; d++) totals[d] += weight * load_floats<KIND>(values + (offset + d * LANES) * bytes);
                });
                std::memcpy(out, totals, sizeof totals);
            } else {
                std::memset(out, 0, s.gates.size() * sizeof(float));
                for_each_cached(b, start, count, kv_head, [&](int64_t i, int64_t offset) {
                    const char* value = values + offset * bytes;
                    const Floats weight = splat(scores[i]);
                    for (int d = 0; d < full; d++)
                        store(out + d * LANES, load(out + d * LANES) + weight * load_floats<KIND>(value + d * LANES * bytes));
                    if (rest) {
                        const Floats last = load_floats<KIND>(value + full * LANES * bytes, rest);
                        store(out + full * LANES, load(out + full * LANES) + weight * last);
                    }
                });
            }
            const float inverse = 1.0f / sum(sums);
            float* y = &heads_[size_t(b * padded(layer.out.columns))];
            for (int64_t d = 0; d < size; d++) y[place(layer.out.kind, head * size + d)] = out[d] * inverse;
        }
    }

    void expand(const Layer& layer, int thread, Scratch& s) {
        const int64_t count = m_.mlp_size, stride = padded(count);
        const float* normed = norm_rows(layer.mlp_norm, layer.fc, rows_, nullptr, s);
        const Range range = share(count, thread, threads_->count(), ROWS);
        const int64_t own = range.end - range.begin, width = (own + LANES - 1) / LANES * LANES;
        s.gates.assign(size_t(rows_ * width), 0.0f);
        const char *up = row_data(layer.fc, count + range.begin), *down = first_row(layer.proj, thread);
        product(layer.fc, range, normed, rows_, s.y(rows_), m_.is_gated ? up : down,
            [&](int64_t row, int64_t b, float value) { s.gates[size_t(b * width + row - range.begin)] = value; });
        activate(m_.activation, s.gates.data(), rows_ * width);
        if (m_.is_gated) {
            product(layer.fc, {count + range.begin, count + range.end}, normed, rows_, s.y(rows_), down,
                [&](int64_t row, int64_t b, float value) { s.gates[size_t(b * width + row - count - range.begin)] *= value; });
        }
        for (int64_t b = 0; b < rows_; b++)
            for (int64_t i = 0; i < own; i++)
                hidden_[size_t(b * stride + place(layer.proj.kind, range.begin + i))] = s.gates[size_t(b * width + i)];
    }

    void add_product(const Matrix& m, const std::vector<float>& input, float scale, int thread, const char* next, Scratch& s) {
        product(m, share(m.rows, thread, threads_->count(), ROWS), input.data(), rows_, s.y(rows_), next,
            [&](int64_t row, int64_t b, float value) { x_[size_t(b * m_.width + row)] += scale * value; });
    }

    Model m_;
    std::vector<Layer> layers_;
    ThreadCount thread_count_;
    Threads* threads_ = nullptr;
    std::vector<Scratch> scratch_;
    std::vector<float> x_, x0_, qkv_, heads_, hidden_, rotations_;
    int64_t rows_ = 0, table_width_ = 0;
    const int32_t *tokens_ = nullptr, *positions_ = nullptr, *tables_ = nullptr;
};

}  // namespace

extern "C" {

void* whimbrel_create(const Model* model, int32_t threads) { return new Decoder(*model, threads); }

void whimbrel_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

void whimbrel_run(void* decoder, int64_t rows, const int32_t* tokens, const int32_t* positions, const int32_t* tables,
                  int64_t table_width, int64_t num_wanted, const int32_t* wanted, float* logits) {
    static_cast<Decoder*>(decoder)->run(rows, tokens, positions, tables, table_width, num_wanted, wanted, logits);
}

}
