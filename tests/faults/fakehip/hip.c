/* A stand-in for libamdhip64 on a machine without a GPU: devices, memory, streams and events, all on the host.
 *
 * devices: $FAKEHIP_DEVICES lists the unique ids that the driver has, "GPU-…,GPU-…", each with facts behind it if need be ("GPU-…|…"). ROCR_VISIBLE_DEVICES chooses among
 *       them by number or id, and HIP_VISIBLE_DEVICES (CUDA_VISIBLE_DEVICES if that is not set) among what is left, by number;
 *       both stop at the first name that they do not know (ROCm's documents of both variables).
 * streams: calls are carried out at once, in the order in which they are made. A handle that no call made is refused.
 *
 * faults: $FAKEHIP_FAULT is "device-lost" (the last of the driver's devices), "no-access" or "peer-copy" (of and from device 2).
 *
 * It proves the caller's side: names, argument order, widths, handles. It proves nothing of AMD's own library.
 *
 * build: gcc -shared -fPIC -O2 -Wall -Wextra -Werror -o libamdhip64.so.7 hip.c */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_HANDLE = 400, MOST = 64, ENTRY = 160 };
enum { STREAM = 0x53545245, EVENT = 0x45564e54 };

typedef struct { int kind, device; double milliseconds; } Handle;

static _Thread_local int current;

static size_t id_length(const char *entry) { return strcspn(entry, "|"); }

static int faulty(const char *name) {
  const char *fault = getenv("FAKEHIP_FAULT");
  return fault && !strcmp(fault, name);
}

static int chosen(char names[][ENTRY], int count, const char *choice, int by_id) {
  char kept[MOST][ENTRY], text[MOST * ENTRY];
  int left = 0;
  if (!choice) return count;
  snprintf(text, sizeof text, "%s", choice);
  for (char *save, *name = strtok_r(text, ",", &save); name && left < MOST; name = strtok_r(NULL, ",", &save)) {
    int found = -1;
    char *end;
    long number = strtol(name, &end, 10);
    if (*name && !*end && number >= 0 && number < count) found = (int)number;
    for (int one = 0; by_id && found < 0 && one < count; one++)
      if (strlen(name) == id_length(names[one]) && !strncmp(names[one], name, strlen(name))) found = one;
    if (found < 0) break;
    memcpy(kept[left++], names[found], sizeof kept[0]);
  }
  memcpy(names, kept, sizeof kept[0] * left);
  return left;
}

static int devices(char names[][ENTRY]) {
  char text[MOST * ENTRY];
  int count = 0;
  const char *listed = getenv("FAKEHIP_DEVICES"), *hip = getenv("HIP_VISIBLE_DEVICES");
  snprintf(text, sizeof text, "%s", listed ? listed : "");
  for (char *save, *name = strtok_r(text, ",", &save); name && count < MOST; name = strtok_r(NULL, ",", &save))
    snprintf(names[count++], ENTRY, "%s", name);
  if (faulty("device-lost") && count) count--;
  count = chosen(names, count, getenv("ROCR_VISIBLE_DEVICES"), 1);
  return chosen(names, count, hip ? hip : getenv("CUDA_VISIBLE_DEVICES"), 0);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static int make(int kind, void **handle) {
  Handle *made = calloc(1, sizeof *made);
  *made = (Handle){.kind = kind, .device = current};
  *handle = made;
  return SUCCESS;
}

int fakehip_is_stream(const void *handle) { return handle && ((const Handle *)handle)->kind == STREAM; }

int hipRuntimeGetVersion(int *version) { *version = 70253211; return SUCCESS; } /* 7.2.53211 */

int hipGetDeviceCount(int *count) {
  char names[MOST][ENTRY];
  *count = devices(names);
  return *count ? SUCCESS : 100; /* hipErrorNoDevice */
}

int hipSetDevice(int device) {
  char names[MOST][ENTRY];
  if (device < 0 || device >= devices(names)) return INVALID_DEVICE;
  current = device;
  return SUCCESS;
}

int hipDeviceGetUuid(char uuid[16], int device) {
  char names[MOST][ENTRY];
  if (device < 0 || device >= devices(names) || id_length(names[device]) != 20) return INVALID_DEVICE;
  memcpy(uuid, names[device] + 4, 16); /* the unique id as letters, without GPU- (ROCm/ROCm#4203) */
  return SUCCESS;
}

/* What $FAKEHIP_DEVICES says of a device behind its id. HIP has a structure of hundreds of fields for it. */
int fakehip_facts(char *facts, int size, int device) {
  char names[MOST][ENTRY];
  if (device < 0 || device >= devices(names)) return INVALID_DEVICE;
  const char *rest = names[device] + id_length(names[device]);
  snprintf(facts, size, "%s", *rest ? rest + 1 : "");
  return SUCCESS;
}

int hipDeviceCanAccessPeer(int *can, int device, int peer) {
  char names[MOST][ENTRY];
  int count = devices(names);
  if (device < 0 || device >= count || peer < 0 || peer >= count) return INVALID_DEVICE;
  *can = device != peer && !(faulty("no-access") && (device == 2 || peer == 2));
  return SUCCESS;
}

int hipMalloc(void **pointer, size_t size) { *pointer = aligned_alloc(256, (size + 255) / 256 * 256); return *pointer ? SUCCESS : 2; }
int hipFree(void *pointer) { free(pointer); return SUCCESS; }

int hipMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
  if (kind < 0 || kind > 4) return INVALID_VALUE;
  if (!fakehip_is_stream(stream)) return INVALID_HANDLE;
  memmove(target, source, size);
  return SUCCESS;
}

int hipMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size, void *stream) {
  char names[MOST][ENTRY];
  int count = devices(names);
  if (to < 0 || to >= count || from < 0 || from >= count) return INVALID_DEVICE;
  if (!fakehip_is_stream(stream)) return INVALID_HANDLE;
  memmove(target, source, size);
  if (faulty("peer-copy") && from == 2 && size) ((char *)target)[size - 1] ^= 1;
  return SUCCESS;
}

/* Not HIP's: the tensors of the stand-in for torch, which would take Python seconds. */
void fakehip_affine(long long *out, size_t count, long long scale, long long offset) {
  for (size_t i = 0; i < count; i++) out[i] = (long long)i * scale + offset;
}
size_t fakehip_different(const long long *one, const long long *other, size_t count) {
  size_t found = 0;
  for (size_t i = 0; i < count; i++) found += one[i] != other[i];
  return found;
}

int hipStreamCreate(void **stream) { return make(STREAM, stream); }
int hipStreamSynchronize(void *stream) { return fakehip_is_stream(stream) ? SUCCESS : INVALID_HANDLE; }
int hipStreamDestroy(void *stream) {
  if (!fakehip_is_stream(stream)) return INVALID_HANDLE;
  ((Handle *)stream)->kind = 0;
  free(stream);
  return SUCCESS;
}

static int is_event(const void *handle) { return handle && ((const Handle *)handle)->kind == EVENT; }
int hipEventCreate(void **event) { return make(EVENT, event); }
int hipEventRecord(void *event, void *stream) {
  if (!is_event(event) || !fakehip_is_stream(stream)) return INVALID_HANDLE;
  ((Handle *)event)->milliseconds = now();
  return SUCCESS;
}
int hipEventSynchronize(void *event) { return is_event(event) ? SUCCESS : INVALID_HANDLE; }
int hipEventElapsedTime(float *milliseconds, void *start, void *stop) {
  if (!is_event(start) || !is_event(stop)) return INVALID_HANDLE;
  if (!((Handle *)start)->milliseconds || !((Handle *)stop)->milliseconds) return 600; /* hipErrorNotReady */
  *milliseconds = (float)(((Handle *)stop)->milliseconds - ((Handle *)start)->milliseconds);
  return SUCCESS;
}
