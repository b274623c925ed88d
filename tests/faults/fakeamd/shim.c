/* Answers for the DRM nodes and /dev/kfd on a machine that has no amdgpu driver; preloaded into the library's process.
 *
 * open: a node is opened O_PATH, so that fstat() shows a true device number while no driver is entered. O_PATH ignores
 *       permissions, so they are checked first, as the kernel would.
 * ioctl: answers by device number, from GPU_FOLDER/<minor & 127>, a text file of "name value" lines that the fixture
 *       writes beside the sysfs; what the KFD reports is in GPU_FOLDER/event-<gpu id>. Everything else goes to the kernel.
 * read: fails with EINVAL on a file with the sticky bit, as the driver does where it offers a file that it cannot serve, and
 *       with EPERM if its set-group-ID bit is set too, as the KFD does for a device that a container was not given.
 * getrlimit: locked memory is unlimited.
 *
 * build: gcc -shared -fPIC -O2 -Wall -Wextra -Werror -I<rootfs>/usr/include/libdrm -o shim.so shim.c
 * structures and numbers: libdrm's drm.h and amdgpu_drm.h */
#define _GNU_SOURCE
#include <amdgpu_drm.h>
#include <drm.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define GPU_FOLDER "/run/fakeamd"
enum { DRM_MAJOR = 226, KFD_MAJOR = 510, KFD_GET_VERSION = 0x01, KFD_SMI_EVENTS = 0x1f, KFD_AVAILABLE_MEMORY = 0x23 };

static uint64_t fact(unsigned minor_number, const char *name) {
  char path[64], key[64];
  snprintf(path, sizeof path, GPU_FOLDER "/%u", minor_number & 127);
  FILE *file = fopen(path, "re");
  unsigned long long value, found = 0;
  while (file && fscanf(file, "%63s %lli", key, (long long *)&value) == 2)
    if (!strcmp(key, name)) found = value;
  if (file) fclose(file);
  return found;
}

/* ---- open ---- */

static int is_node(const char *path) {
  return path && (!strcmp(path, "/dev/kfd") || (!strncmp(path, "/dev/dri/", 9) && path[9]));
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
  if (is_node(path)) {
    int wanted = (flags & O_ACCMODE) == O_RDONLY ? R_OK : R_OK | W_OK;
    if (faccessat(folder, path, wanted, AT_EACCESS)) return -1;
    flags = O_PATH | O_CLOEXEC;
  }
  return syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE(last) ({ va_list rest; va_start(rest, last); \
    mode_t given = last & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest); given; })
int open(const char *path, int flags, ...) { return open_at(AT_FDCWD, path, flags, MODE(flags)); }
int open64(const char *path, int flags, ...) { return open_at(AT_FDCWD, path, flags, MODE(flags)); }
int openat(int folder, const char *path, int flags, ...) { return open_at(folder, path, flags, MODE(flags)); }
int openat64(int folder, const char *path, int flags, ...) { return open_at(folder, path, flags, MODE(flags)); }
int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }

/* ---- read ---- */

ssize_t read(int descriptor, void *target, size_t size) {
  struct stat file;
  if (!fstat(descriptor, &file) && S_ISREG(file.st_mode) && file.st_mode & S_ISVTX) {
    errno = file.st_mode & S_ISGID ? EPERM : EINVAL;
    return -1;
  }
  return syscall(SYS_read, descriptor, target, size);
}

/* ---- the locked memory that a GPU host grants, and that this one may not be allowed to raise ---- */

int getrlimit(__rlimit_resource_t resource, struct rlimit *limits) {
  if (syscall(SYS_prlimit64, 0, resource, NULL, limits)) return -1;
  if (resource == RLIMIT_MEMLOCK) limits->rlim_cur = limits->rlim_max = RLIM_INFINITY;
  return 0;
}
int getrlimit64(__rlimit_resource_t resource, struct rlimit64 *limits) { return getrlimit(resource, (struct rlimit *)limits); }

/* ---- amdgpu's INFO ioctl ---- */

static int reply(struct drm_amdgpu_info *query, const void *answer, size_t size) {
  memcpy((void *)(uintptr_t)query->return_pointer, answer, size < query->return_size ? size : query->return_size);
  return 0;
}

static int refuse(int error) {
  errno = error;
  return -1;
}

static int device_info(struct drm_amdgpu_info *query, unsigned gpu) {
  struct drm_amdgpu_info_device device = {
      .device_id = fact(gpu, "device_id"), .external_rev = fact(gpu, "external_revision"), .family = 141,
      .num_shader_engines = fact(gpu, "shader_engines"), .num_shader_arrays_per_engine = 1,
      .gpu_counter_freq = 100000, .max_engine_clock = 2100000, .max_memory_clock = 1300000,
      .cu_active_number = fact(gpu, "compute_units"), .num_cu_per_sh = 10, .wave_front_size = 64,
      .vram_type = AMDGPU_VRAM_TYPE_HBM, .vram_bit_width = fact(gpu, "bus_bits"),
      .virtual_address_offset = 0x200000, .virtual_address_max = 0x800000000000,
      .virtual_address_alignment = 4096, .pte_fragment_size = 2 << 20, .gart_page_size = 4096,
      .high_va_offset = 0xffff800000000000, .high_va_max = 0xfffffffffffff000};
  return reply(query, &device, sizeof device);
}

static int memory_info(struct drm_amdgpu_info *query, unsigned gpu) {
  uint64_t total = fact(gpu, "memory_bytes"), used = fact(gpu, "used_bytes");
  struct drm_amdgpu_heap_info heap = {
      .total_heap_size = total, .usable_heap_size = total - (256 << 20), .heap_usage = used, .max_allocation = total / 4 * 3};
  struct drm_amdgpu_memory_info memory = {.vram = heap, .cpu_accessible_vram = heap,
      .gtt = {.total_heap_size = 1ull << 40, .usable_heap_size = 1ull << 40}};
  return reply(query, &memory, sizeof memory);
}

static int vbios_info(struct drm_amdgpu_info *query) {
  struct drm_amdgpu_info_vbios vbios = {.name = "AMD Instinct", .vbios_pn = "113-M3000100-102",
      .vbios_ver_str = "022.040.003.042.000001", .date = "2023/11/11 02:40"};
  uint32_t size = 65536;
  if (query->vbios_info.type == AMDGPU_INFO_VBIOS_INFO) return reply(query, &vbios, sizeof vbios);
  if (query->vbios_info.type == AMDGPU_INFO_VBIOS_SIZE) return reply(query, &size, sizeof size);
  return refuse(EINVAL);
}

static int amdgpu_info(struct drm_amdgpu_info *query, unsigned gpu) {
  uint64_t number = 0;
  switch (query->query) {
  case AMDGPU_INFO_DEV_INFO: return device_info(query, gpu);
  case AMDGPU_INFO_MEMORY: return memory_info(query, gpu);
  case AMDGPU_INFO_VBIOS: return vbios_info(query);
  case AMDGPU_INFO_VRAM_GTT: {
    struct drm_amdgpu_info_vram_gtt sizes = {
        .vram_size = fact(gpu, "memory_bytes"), .vram_cpu_accessible_size = fact(gpu, "memory_bytes"), .gtt_size = 1ull << 40};
    return reply(query, &sizes, sizeof sizes); }
  case AMDGPU_INFO_FW_VERSION: {
    struct drm_amdgpu_info_firmware firmware = {.ver = 168, .feature = 1};
    return reply(query, &firmware, sizeof firmware); }
  case AMDGPU_INFO_HW_IP_INFO: {
    struct drm_amdgpu_info_hw_ip block = {.hw_ip_version_major = 9, .hw_ip_version_minor = 4, .available_rings = 1};
    return reply(query, &block, sizeof block); }
  case AMDGPU_INFO_VRAM_USAGE: case AMDGPU_INFO_VIS_VRAM_USAGE: number = fact(gpu, "used_bytes"); break;
  case AMDGPU_INFO_ACCEL_WORKING: case AMDGPU_INFO_HW_IP_COUNT: number = 1; break;
  case AMDGPU_INFO_RAS_ENABLED_FEATURES: number = 0x2ff; break;
  case AMDGPU_INFO_GTT_USAGE: case AMDGPU_INFO_SENSOR: case AMDGPU_INFO_NUM_BYTES_MOVED: case AMDGPU_INFO_VRAM_LOST_COUNTER: break;
  case AMDGPU_INFO_READ_MMR_REG: memset((void *)(uintptr_t)query->return_pointer, 0, query->return_size); return 0;
  default: return refuse(EINVAL);
  }
  return reply(query, &number, sizeof number);
}

/* ---- ioctl ---- */

static void text(char *target, __kernel_size_t *room, const char *value) {
  size_t size = strlen(value);
  if (target && *room) memcpy(target, value, size < *room ? size : *room);
  *room = size;
}

static int drm(unsigned minor_number, unsigned long request, void *argument) {
  switch (_IOC_NR(request)) {
  case _IOC_NR(DRM_IOCTL_VERSION): {
    struct drm_version *version = argument;
    version->version_major = 3; version->version_minor = 64; version->version_patchlevel = 0;
    text(version->name, &version->name_len, "amdgpu");
    text(version->date, &version->date_len, "20150101");
    text(version->desc, &version->desc_len, "AMD GPU");
    return 0; }
  case _IOC_NR(DRM_IOCTL_GET_CLIENT): {
    struct drm_client *client = argument;
    if (client->idx) return refuse(EINVAL);
    client->auth = 1; client->pid = getpid();
    return 0; }
  case _IOC_NR(DRM_IOCTL_GET_CAP): ((struct drm_get_cap *)argument)->value = 0; return 0;
  case DRM_COMMAND_BASE + DRM_AMDGPU_INFO: return amdgpu_info(argument, minor_number);
  default: return refuse(EINVAL);
  }
}

/* A socket that never blocks, as the kernel's: the mask written to it is kept, what the fixture left is read. */
static int smi_events(uint32_t *gpu_and_descriptor) {
  char path[64], line[256];
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends)) return -1;
  snprintf(path, sizeof path, GPU_FOLDER "/event-%u", gpu_and_descriptor[0]);
  FILE *file = fopen(path, "re");
  while (file && fgets(line, sizeof line, file))
    if (write(ends[1], line, strlen(line)) < 0) break;
  if (file) fclose(file);
  gpu_and_descriptor[1] = ends[0];
  return 0;
}

static int kfd(unsigned long request, void *argument) {
  uint32_t *version = argument;
  switch (_IOC_NR(request)) {
  case KFD_GET_VERSION: version[0] = 1; version[1] = 17; return 0;
  case KFD_SMI_EVENTS: return smi_events(argument);
  case KFD_AVAILABLE_MEMORY: *(uint64_t *)argument = fact(0, "memory_bytes") - fact(0, "used_bytes"); return 0;
  default: return refuse(EINVAL);
  }
}

int ioctl(int descriptor, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void *argument = va_arg(rest, void *);
  va_end(rest);
  struct stat node;
  if (!fstat(descriptor, &node) && S_ISCHR(node.st_mode)) {
    if (major(node.st_rdev) == DRM_MAJOR && _IOC_TYPE(request) == DRM_IOCTL_BASE) return drm(minor(node.st_rdev), request, argument);
    if (major(node.st_rdev) == KFD_MAJOR && _IOC_TYPE(request) == 'K') return kfd(request, argument);
  }
  return syscall(SYS_ioctl, descriptor, request, argument);
}
