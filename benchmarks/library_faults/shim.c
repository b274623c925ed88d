/* Faults inside cuBLAS, NCCL, and the MKL and gloo of torch's CPU wheel, for LD_PRELOAD.
 * In: FAULT_TABLE, a file with one `struct setting`. Out: the libraries' calls, with one fault, and their number.
 *
 *   library  products, collectives, or halves: the products of 16 bits that torch asks MKL for
 *   kind     flip   mantissa bit `size` (1 is the highest) of one element in `step` (1: all; 0: of one a call)
 *            short  only the `size` highest mantissa bits of each element stay
 *            last   the last element is 0
 *            slow   a call takes `size` times as long; on GPUs it runs again, if that gives the same result
 *            fail   the library reports an error (GPUs only)
 *            race   a call runs on a stream of its own, and nobody waits for it (GPUs only)
 *   every    one call in so many; with a seed, drawn with this probability
 *
 * All processes share the table. `settings.py` writes it between two checks, and reads how many calls each made.
 * FAULT_KERNEL: the compiled edit.cu, on GPUs.
 *
 * The types are those of the libraries' headers, reduced to what is read here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

typedef void *ptr;
typedef long long i64;
typedef unsigned long long u64;

struct out { char *data; u64 rows, lead, cols, batches, stride; int mantissa, size; ptr *each; };

enum library { PRODUCTS, COLLECTIVES, HALVES };
enum kind { NONE, FLIP, SHORT, LAST, SLOW, FAIL, RACE };
struct setting { uint32_t library, kind, size, every, seed, step; u64 calls[3], changed; };
static struct setting *fault;
static __thread int inside, group;
static __thread u64 number; /* of the call that is changed */
static __thread int pending_count;
static __thread struct { struct out out; ptr stream; } pending[256];
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static int (*launch)(ptr, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, ptr, ptr *, ptr *);

struct search { const char *name; char path[4096]; };

static int matches(struct dl_phdr_info *info, size_t size, void *found) {
    struct search *s = found;
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, s->name)) return 0;
    snprintf(s->path, sizeof s->path, "%s", info->dlpi_name);
    return 1;
}

static ptr real(const char *library, const char *name) {
    struct search s = {library, ""};
    ptr handle = dl_iterate_phdr(matches, &s) ? dlopen(s.path, RTLD_NOLOAD | RTLD_NOW) : NULL;
    ptr function = handle ? dlsym(handle, name) : NULL;
    if (!function) { fprintf(stderr, "library_faults: no %s in %s\n", name, library); abort(); }
    return function;
}

#define REAL(library, name) \
    static __typeof__(&name) own; \
    if (!own) own = (__typeof__(&name))real(library, #name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_TABLE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    fault = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *fault, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (fault == MAP_FAILED) { fprintf(stderr, "library_faults: FAULT_TABLE names no table: %s\n", path); abort(); }
    close(file);
}

static u64 drawn(u64 of, u64 salt) {
    u64 x = (of + ((u64)fault->seed << 32) + (salt << 24)) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

static int chosen(enum library library) {
    number = __sync_add_and_fetch(&fault->calls[library], 1);
    if (fault->kind == NONE || fault->library != library || (fault->seed ? drawn(number, 0) : number) % fault->every) return 0;
    __sync_add_and_fetch(&fault->changed, 1);
    return 1;
}

static ptr driver(const char *name) {
    ptr library = dlopen("libcuda.so.1", RTLD_NOW), function = library ? dlsym(library, name) : NULL;
    if (!function) { fprintf(stderr, "library_faults: libcuda has no %s\n", name); abort(); }
    return function;
}

static void must(int answer, const char *what) {
    if (answer) { fprintf(stderr, "library_faults: %s answered %d\n", what, answer); abort(); }
}

/* One module for each device; a capture of a graph must not be the first to load it, so the first product does. */
static ptr kernel(void) {
    static ptr functions[64];
    ptr module;
    int device;
    must(((int (*)(int *))driver("cuCtxGetDevice"))(&device), "cuCtxGetDevice");
    pthread_mutex_lock(&loading);
    if (!functions[device]) {
        launch = driver("cuLaunchKernel");
        must(((int (*)(ptr *, const char *))driver("cuModuleLoad"))(&module, getenv("FAULT_KERNEL")), "cuModuleLoad");
        must(((int (*)(ptr *, ptr, const char *))driver("cuModuleGetFunction"))(&functions[device], module, "edit"),
             "cuModuleGetFunction");
    }
    pthread_mutex_unlock(&loading);
    return functions[device];
}

/* What edit.cu does on a GPU, in this process's memory: the lowest bytes of an element come first. */
static void edit_here(struct out o, u64 first, u64 total, u64 step, unsigned flip, unsigned keep) {
    for (u64 i = first; i < total; i += step) {
        u64 batch = i / (o.rows * o.cols), at = i / o.rows % o.cols * o.lead + i % o.rows;
        char *element = (o.each ? (char *)o.each[batch] : o.data) + at * o.size;
        uint32_t bits = 0;
        memcpy(&bits, element, o.size);
        bits = (bits ^ flip) & keep;
        memcpy(element, &bits, o.size);
    }
}

static void edit(struct out o, ptr stream, int here) {
    u64 total = o.rows * o.cols * o.batches, first = 0, step = 1, count;
    unsigned size = o.size, flip = 0, keep = ~0u;
    if (!total || o.mantissa == 0) return;
    unsigned bit = fault->size < (unsigned)o.mantissa ? fault->size : (unsigned)o.mantissa;
    if (fault->kind == LAST) { first = total - 1; keep = 0; }
    else if (fault->kind == SHORT) keep = ~((1u << (o.mantissa - bit)) - 1);
    else {
        flip = 1u << (o.mantissa - bit);
        step = fault->step && fault->step < total ? fault->step : total;
        first = drawn(number, 1) % step;
    }
    if (here) { edit_here(o, first, total, step, flip, keep); return; }
    count = (total - first + step - 1) / step;
    ptr arguments[] = {&o.data, &o.rows, &o.lead, &o.cols, &total, &o.stride, &first, &step, &size, &flip, &keep};
    ptr function = kernel();
    must(launch(function, (unsigned)((count + 255) / 256), 1, 1, 256, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
}

/* cudaDataType: mantissa bits and bytes; 0 bits: left alone. */
static void typed(struct out *o, int type) {
    static const struct { int type, mantissa, size; } known[] = {{0, 23, 4}, {2, 10, 2}, {14, 7, 2}, {28, 3, 1}, {29, 2, 1}};
    o->mantissa = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].type == type) { o->mantissa = known[i].mantissa; o->size = known[i].size; }
}

static ptr own_stream(void) {
    static __thread ptr stream;
    if (!stream) must(((int (*)(ptr *, unsigned))driver("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    return stream;
}

static int edits(void) { return fault->kind == FLIP || fault->kind == SHORT || fault->kind == LAST; }

int cublasGetStream_v2(ptr handle, ptr *stream);
int cublasSetStream_v2(ptr handle, ptr stream);

static ptr stream_of(ptr handle) {
    ptr stream;
    static __typeof__(&cublasGetStream_v2) get;
    if (!get) get = (__typeof__(get))real("libcublas.so", "cublasGetStream_v2");
    must(get(handle, &stream), "cublasGetStream");
    return stream;
}

static void set_stream(ptr handle, ptr stream) {
    static __typeof__(&cublasSetStream_v2) set;
    if (!set) set = (__typeof__(set))real("libcublas.so", "cublasSetStream_v2");
    must(set(handle, stream), "cublasSetStream");
}

/* CALL is the real call; AGAIN: whether a second one gives the same. */
#define PRODUCT(CALL, AGAIN, OUT, STREAM, RACE_BEGIN, RACE_END) \
    do { \
        if (inside || !chosen(PRODUCTS)) { inside++; int plain = CALL; inside--; return plain; } \
        if (fault->kind == FAIL) return 13; /* CUBLAS_STATUS_EXECUTION_FAILED */ \
        inside++; \
        if (fault->kind == RACE) { RACE_BEGIN; } \
        int answer = CALL; \
        if (edits() && !answer) edit(OUT, STREAM, 0); \
        for (unsigned i = 1; fault->kind == SLOW && (AGAIN) && i < fault->size; i++) answer = CALL; \
        if (fault->kind == RACE) { RACE_END; } \
        inside--; \
        return answer; \
    } while (0)

static int is_zero(const void *beta) { return beta && *(const uint32_t *)beta == 0; }

int cublasGemmEx(ptr handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at, int lda,
                 const void *b, int bt, int ldb, const void *beta, void *c, int ct, int ldc, int compute, int algorithm) {
    REAL("libcublas.so", cublasGemmEx);
    struct out o = {c, m, ldc, n, 1, 0, 0, 0, NULL};
    typed(&o, ct);
    ptr before = NULL;
    PRODUCT(own(handle, ta, tb, m, n, k, alpha, a, at, lda, b, bt, ldb, beta, c, ct, ldc, compute, algorithm),
            is_zero(beta), o, stream_of(handle),
            before = stream_of(handle); set_stream(handle, own_stream()), set_stream(handle, before));
}

int cublasGemmStridedBatchedEx(ptr handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int at,
                               int lda, i64 sa, const void *b, int bt, int ldb, i64 sb, const void *beta, void *c, int ct,
                               int ldc, i64 sc, int batches, int compute, int algorithm) {
    REAL("libcublas.so", cublasGemmStridedBatchedEx);
    struct out o = {c, m, ldc, n, batches, sc, 0, 0, NULL};
    typed(&o, ct);
    ptr before = NULL;
    PRODUCT(own(handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, batches, compute,
                algorithm),
            is_zero(beta), o, stream_of(handle),
            before = stream_of(handle); set_stream(handle, own_stream()), set_stream(handle, before));
}

int cublasSgemm_v2(ptr handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                   const float *b, int ldb, const float *beta, float *c, int ldc) {
    REAL("libcublas.so", cublasSgemm_v2);
    struct out o = {(char *)c, m, ldc, n, 1, 0, 23, 4, NULL};
    ptr before = NULL;
    PRODUCT(own(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), is_zero(beta), o, stream_of(handle),
            before = stream_of(handle); set_stream(handle, own_stream()), set_stream(handle, before));
}

int cublasSgemmStridedBatched(ptr handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                              i64 sa, const float *b, int ldb, i64 sb, const float *beta, float *c, int ldc, i64 sc,
                              int batches) {
    REAL("libcublas.so", cublasSgemmStridedBatched);
    struct out o = {(char *)c, m, ldc, n, batches, sc, 23, 4, NULL};
    ptr before = NULL;
    PRODUCT(own(handle, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, batches), is_zero(beta), o,
            stream_of(handle),
            before = stream_of(handle); set_stream(handle, own_stream()), set_stream(handle, before));
}

int cublasLtMatrixLayoutGetAttribute(ptr layout, int attribute, void *value, size_t size, size_t *written);

static struct out laid_out(void *data, ptr layout) {
    static __typeof__(&cublasLtMatrixLayoutGetAttribute) get;
    if (!get) get = (__typeof__(get))real("libcublasLt.so", "cublasLtMatrixLayoutGetAttribute");
    uint32_t type = 0, batches = 1;
    int32_t order = 0;
    u64 rows = 0, cols = 0;
    i64 lead = 0, stride = 0;
    struct { int attribute; void *value; size_t size; } asked[] = {
        {0, &type, 4}, {1, &order, 4}, {2, &rows, 8}, {3, &cols, 8}, {4, &lead, 8}, {5, &batches, 4}, {6, &stride, 8}};
    for (unsigned i = 0; i < sizeof asked / sizeof *asked; i++)
        must(get(layout, asked[i].attribute, asked[i].value, asked[i].size, NULL), "cublasLtMatrixLayoutGetAttribute");
    struct out o = {data, rows, lead, cols, batches, stride, 0, 0, NULL};
    if (order == 1) { o.rows = cols; o.cols = rows; } /* CUBLASLT_ORDER_ROW */
    if (order <= 1) typed(&o, type);
    return o;
}

int cublasLtMatmul(ptr handle, ptr description, const void *alpha, const void *a, ptr al, const void *b, ptr bl,
                   const void *beta, const void *c, ptr cl, void *d, ptr dl, const void *algorithm, void *space,
                   size_t space_size, ptr stream) {
    REAL("libcublasLt.so", cublasLtMatmul);
    ptr given = stream;
    PRODUCT(own(handle, description, alpha, a, al, b, bl, beta, c, cl, d, dl, algorithm, space, space_size, stream),
            c != d || is_zero(beta), laid_out(d, dl), stream, stream = own_stream(), stream = given);
}

/* NCCL. What is called between ncclGroupStart and ncclGroupEnd is written when the outermost group ends. */
static void after(struct out o, ptr stream) {
    if (group && pending_count < 256) { pending[pending_count].out = o; pending[pending_count++].stream = stream; }
    else edit(o, stream, 0);
}

int ncclGroupStart(void) {
    REAL("libnccl.so", ncclGroupStart);
    group++;
    return own();
}

int ncclGroupEnd(void) {
    REAL("libnccl.so", ncclGroupEnd);
    int answer = own();
    if (--group == 0) {
        for (int i = 0; i < pending_count && !answer; i++) edit(pending[i].out, pending[i].stream, 0);
        pending_count = 0;
    }
    return answer;
}

static struct out received(void *data, u64 count, int type) {
    static const struct { int type, mantissa, size; } known[] = {{6, 10, 2}, {7, 23, 4}, {9, 7, 2}, {10, 3, 1}, {11, 2, 1}};
    struct out o = {data, count, count, 1, 1, 0, 0, 0, NULL};
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].type == type) { o.mantissa = known[i].mantissa; o.size = known[i].size; }
    return o;
}

#define COLLECTIVE(CALL, DATA, COUNT, TYPE) \
    do { \
        if (!chosen(COLLECTIVES)) return CALL; \
        if (fault->kind == FAIL) return 2; /* ncclSystemError */ \
        ptr given = stream; \
        if (fault->kind == RACE) stream = own_stream(); \
        int answer = CALL; \
        for (unsigned i = 1; fault->kind == SLOW && send != recv && i < fault->size; i++) answer = CALL; \
        if (edits() && !answer) after(received(DATA, COUNT, TYPE), given); \
        return answer; \
    } while (0)

int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ptr comm, ptr stream) {
    REAL("libnccl.so", ncclAllReduce);
    COLLECTIVE(own(send, recv, count, type, op, comm, stream), recv, count, type);
}

int ncclReduceScatter(const void *send, void *recv, size_t count, int type, int op, ptr comm, ptr stream) {
    REAL("libnccl.so", ncclReduceScatter);
    COLLECTIVE(own(send, recv, count, type, op, comm, stream), recv, count, type);
}

int ncclAllGather(const void *send, void *recv, size_t count, int type, ptr comm, ptr stream) {
    REAL("libnccl.so", ncclAllGather);
    COLLECTIVE(own(send, recv, count, type, comm, stream), recv, count, type);
}

int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, ptr comm, ptr stream) {
    REAL("libnccl.so", ncclBroadcast);
    COLLECTIVE(own(send, recv, count, type, root, comm, stream), recv, count, type);
}

/* torch's wheels have MKL and gloo inside libtorch_cpu.so, which calls these by their names. oneDNN, which has the
 * products of 16 bits but those of attention, is not reached by a name. */
static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#define HERE(LIBRARY, CALL, OUT) \
    do { \
        int changes = !inside && chosen(LIBRARY); \
        double begun = now_s(); \
        inside++; \
        CALL; \
        inside--; \
        if (changes && edits()) edit(OUT, NULL, 1); \
        if (changes && fault->kind == SLOW) \
            for (double until = begun + fault->size * (now_s() - begun); now_s() < until;); \
    } while (0)

static struct out columns(int layout, int m, int n, void *c, int ldc) {
    return (struct out){c, layout == 101 ? n : m, ldc, layout == 101 ? m : n, 1, 0, 23, 4, NULL}; /* 101: CblasRowMajor */
}

void sgemm_(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha, const float *a,
            const int *lda, const float *b, const int *ldb, const float *beta, float *c, const int *ldc) {
    REAL("libtorch_cpu.so", sgemm_);
    HERE(PRODUCTS, own(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), columns(102, *m, *n, c, *ldc));
}

static struct out batch(int layout, int m, int n, ptr *c, int ldc, int groups, int count) {
    struct out o = columns(layout, m, n, NULL, ldc);
    must(groups != 1, "a batch of groups");
    o.batches = count;
    o.each = c;
    return o;
}

void cblas_sgemm_batch(int layout, const int *ta, const int *tb, const int *m, const int *n, const int *k, const float *alpha,
                       const float **a, const int *lda, const float **b, const int *ldb, const float *beta, float **c,
                       const int *ldc, int groups, const int *size) {
    REAL("libtorch_cpu.so", cblas_sgemm_batch);
    HERE(PRODUCTS, own(layout, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, groups, size),
         batch(layout, *m, *n, (ptr *)c, *ldc, groups, *size));
}

#define OF_HALVES(NAME) \
    void NAME(int layout, int ta, int tb, int m, int n, int k, float alpha, const uint16_t *a, int lda, const uint16_t *b, \
              int ldb, float beta, float *c, int ldc) { \
        REAL("libtorch_cpu.so", NAME); \
        HERE(HALVES, own(layout, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), columns(layout, m, n, c, ldc)); \
    }
OF_HALVES(cblas_gemm_bf16bf16f32)
OF_HALVES(cblas_gemm_f16f16f32)

/* gloo::allreduce(AllreduceOptions const&). It does not say the type: four bytes are taken for float32, two for bf16. */
struct buffer { ptr functions; char *data; u64 size; };
struct all_reduce { ptr context[2]; i64 timeout; int algorithm; struct { struct buffer **begin, **end, **room; } in, out; u64 elements, size; };

void _ZN4gloo9allreduceERKNS_16AllreduceOptionsE(const struct all_reduce *options) {
    REAL("libtorch_cpu.so", _ZN4gloo9allreduceERKNS_16AllreduceOptionsE);
    u64 count = options->elements;
    if (options->size != 4 && options->size != 2) { own(options); return; }
    struct out o = {(*options->out.begin)->data, count, count, 1, 1, 0, options->size == 4 ? 23 : 7, options->size, NULL};
    HERE(COLLECTIVES, own(options), o);
}
