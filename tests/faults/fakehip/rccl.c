/* A stand-in for librccl: collectives between the processes of one host, through shared memory. Like RCCL it has no
 * ncclAlltoAll, so the suite takes its path of grouped sends and receives.
 *
 * It holds the caller to rccl.h: types and operations by number, a stream that HIP made, the communicator that it gave, groups
 * that are opened before they are closed. Every call is carried out at once. Sums of bfloat16 are made in float32, rounded once.
 *
 * $FAKEHIP_FAULT plants a fault: "last" leaves the last element out, "peer" takes a sum without the last rank,
 * "swap" delivers an all-to-all to the wrong peer.
 *
 * build: gcc -shared -fPIC -O2 -Wall -Wextra -Werror -pthread -o librccl.so.1 rccl.c libamdhip64.so.7 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, BFLOAT16 = 9, SUM = 0, MOST_RANKS = 16, MOST_CALLS = 64 };
#define AREA_BYTES (64ull << 20)

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { pthread_barrier_t barrier; volatile int ready; } Shared;
typedef struct { int ranks, rank; char name[128]; Shared *shared; char *areas; } Communicator;
typedef struct { int is_send, peer; char *buffer; size_t bytes; Communicator *world; } Call;

int fakehip_is_stream(const void *handle); /* of libamdhip64 */

static Communicator *made;
static Call calls[MOST_CALLS];
static int pending, depth;

static int faulty(const char *name) {
  const char *fault = getenv("FAKEHIP_FAULT");
  return fault && !strcmp(fault, name);
}

static int wrong(const Communicator *world, int kind, const void *stream) {
  return world != made || !world || kind != BFLOAT16 || !fakehip_is_stream(stream);
}

static char *area(const Communicator *world, int rank) { return world->areas + rank * AREA_BYTES; }
static void meet(const Communicator *world) { pthread_barrier_wait(&world->shared->barrier); }

int ncclGetVersion(int *version) { *version = 22707; return SUCCESS; } /* RCCL 2.27.7 of ROCm 7.2 */

int ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/fakehip-%d-%ld", getpid(), (long)random());
  return SUCCESS;
}

int ncclCommInitRank(Communicator **communicator, int ranks, ncclUniqueId id, int rank) {
  if (ranks < 1 || ranks > MOST_RANKS || rank < 0 || rank >= ranks || strncmp(id.internal, "/fakehip-", 9)) return INVALID_ARGUMENT;
  size_t size = 4096 + ranks * AREA_BYTES;
  int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, size)) return SYSTEM_ERROR;
  char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return SYSTEM_ERROR;
  Communicator *world = calloc(1, sizeof *world);
  *world = (Communicator){.ranks = ranks, .rank = rank, .shared = (Shared *)memory, .areas = memory + 4096};
  memcpy(world->name, id.internal, sizeof world->name);
  if (rank == 0) {
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&world->shared->barrier, &attributes, ranks);
    __sync_synchronize();
    world->shared->ready = 1;
  }
  while (!world->shared->ready) usleep(100);
  meet(world);
  if (rank == 0) shm_unlink(world->name);
  *communicator = made = world;
  return SUCCESS;
}

int ncclCommDestroy(Communicator *world) {
  if (world != made || !world) return INVALID_ARGUMENT;
  munmap(world->shared, 4096 + world->ranks * AREA_BYTES);
  free(world);
  made = NULL;
  return SUCCESS;
}

static float wide(uint16_t half) { uint32_t bits = (uint32_t)half << 16; float value; memcpy(&value, &bits, 4); return value; }
static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest, ties to even */
}

/* The sum of elements from `first` on of what every rank has put into its area. */
static void add(const Communicator *world, uint16_t *out, size_t first, size_t count) {
  int ranks = world->ranks - faulty("peer");
  for (size_t i = 0; i < count - (count && faulty("last")); i++) {
    float total = 0;
    for (int rank = 0; rank < ranks; rank++) total += wide(((uint16_t *)area(world, rank))[first + i]);
    out[i] = narrow(total);
  }
}

static int put(const Communicator *world, const void *sent, size_t bytes) {
  if (bytes > AREA_BYTES) return INVALID_ARGUMENT;
  memcpy(area(world, world->rank), sent, bytes);
  meet(world);
  return SUCCESS;
}

int ncclAllReduce(const void *sent, void *out, size_t count, int kind, int operation, Communicator *world, void *stream) {
  if (wrong(world, kind, stream) || operation != SUM || put(world, sent, 2 * count)) return INVALID_ARGUMENT;
  add(world, out, 0, count);
  meet(world);
  return SUCCESS;
}

int ncclReduceScatter(const void *sent, void *out, size_t count, int kind, int operation, Communicator *world, void *stream) {
  if (wrong(world, kind, stream) || operation != SUM || put(world, sent, 2 * count * world->ranks)) return INVALID_ARGUMENT;
  add(world, out, count * world->rank, count);
  meet(world);
  return SUCCESS;
}

int ncclAllGather(const void *sent, void *out, size_t count, int kind, Communicator *world, void *stream) {
  if (wrong(world, kind, stream) || put(world, sent, 2 * count)) return INVALID_ARGUMENT;
  for (int rank = 0; rank < world->ranks; rank++)
    memcpy((char *)out + 2 * count * rank, area(world, rank), 2 * count - (faulty("last") && count ? 2 : 0));
  meet(world);
  return SUCCESS;
}

static int queue(int is_send, void *buffer, size_t count, int kind, int peer, Communicator *world, void *stream) {
  if (!depth || pending == MOST_CALLS) return INVALID_USAGE; /* this stand-in, unlike RCCL, serves groups only */
  if (wrong(world, kind, stream) || peer < 0 || peer >= world->ranks) return INVALID_ARGUMENT;
  calls[pending++] = (Call){is_send, peer, buffer, 2 * count, world};
  return SUCCESS;
}

int ncclSend(const void *buffer, size_t count, int kind, int peer, Communicator *world, void *stream) {
  return queue(1, (void *)buffer, count, kind, peer, world, stream);
}
int ncclRecv(void *buffer, size_t count, int kind, int peer, Communicator *world, void *stream) {
  return queue(0, buffer, count, kind, peer, world, stream);
}
int ncclGroupStart(void) { depth++; return SUCCESS; }

/* What goes to peer p lies in this rank's area at p times the part of a peer. */
int ncclGroupEnd(void) {
  if (depth <= 0) return INVALID_USAGE;
  if (--depth || !pending) return SUCCESS;
  const Communicator *world = calls[0].world;
  size_t part = AREA_BYTES / world->ranks;
  for (int i = 0; i < pending; i++)
    if (calls[i].bytes > part) return INVALID_ARGUMENT;
    else if (calls[i].is_send) memcpy(area(world, world->rank) + part * calls[i].peer, calls[i].buffer, calls[i].bytes);
  meet(world);
  for (int i = 0; i < pending; i++) {
    int place = faulty("swap") ? (world->rank + 1) % world->ranks : world->rank;
    if (!calls[i].is_send) memcpy(calls[i].buffer, area(world, calls[i].peer) + part * place, calls[i].bytes);
  }
  meet(world);
  pending = 0;
  return SUCCESS;
}
