// CUDA's runtime and driver, as far as PyTorch and Triton call them, without a device. Preloaded, it takes the place of
// the libraries' functions of these names. Device memory is the host's. Launches, and copies and fills in a capture, go
// to handlers (in Python, host.py); whatever waits for the device in a capture is the error that it is on one. A
// launch of a kernel that was compiled with PyTorch itself is an error: host.py computes all of its operators. In a
// process without handlers, as that which measures tiles, nothing is computed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <time.h>

#define __CUDA_API_VERSION_INTERNAL
#include "cuda_runtime_api.h"
#include "driver_types.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Handlers {
  int (*launch)(void *function, const unsigned *grid, unsigned threads, unsigned shared, void **parameters);
  int (*copy)(void *to, const void *from, size_t size);
  int (*fill)(void *to, int value, size_t size);
  int (*replay)(void *graph);
} handlers;

std::mutex mutex;
std::map<char *, size_t> blocks;             // device memory: first address, bytes
std::map<const void *, std::string> kernels; // PyTorch's own, by the host's function
std::map<void *, void *> graphs;             // of executable graphs
long handles = 0;
cudaStream_t captured = nullptr;
void *capture = nullptr; // the graph that is captured
cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int device = 0;

int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

cudaError_t failed(cudaError_t error) { return last_error = error; }

cudaError_t waits(const char *what) {
  if (!capture) return cudaSuccess;
  fprintf(stderr, "stand-in for CUDA: %s in a capture\n", what);
  return failed(cudaErrorStreamCaptureUnsupported);
}

void *handle() {
  std::lock_guard<std::mutex> guard(mutex);
  return reinterpret_cast<void *>(0x1000 + 16 * ++handles);
}

int attribute(int which) {
  int shared = setting("STAND_IN_SHARED", 232448), capability = setting("STAND_IN_CAPABILITY", 90);
  switch (which) {
  case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
  case cudaDevAttrMaxBlockDimZ: return 64;
  case cudaDevAttrMaxGridDimX: return 2147483647;
  case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: return shared;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return shared + 1024;
  case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
  case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
  case cudaDevAttrClockRate: return setting("STAND_IN_CLOCK", 1980000);
  case cudaDevAttrMemoryClockRate: return setting("STAND_IN_MEMORY_CLOCK", 3201000);
  case cudaDevAttrGlobalMemoryBusWidth: return setting("STAND_IN_BUS", 6144);
  case cudaDevAttrMultiProcessorCount: return setting("STAND_IN_MULTIPROCESSORS", 132);
  case cudaDevAttrL2CacheSize: return setting("STAND_IN_L2", 50 << 20);
  case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
  case cudaDevAttrComputeCapabilityMajor: return capability / 10;
  case cudaDevAttrComputeCapabilityMinor: return capability % 10;
  case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrAsyncEngineCount: return 1;
  case cudaDevAttrCooperativeLaunch: return 1;
  }
  return 0;
}

cudaError_t allocate(void **out, size_t size) {
  size = size ? size : 512;
  if (posix_memalign(out, 512, size)) return failed(cudaErrorMemoryAllocation);
  memset(*out, 0xFF, size < (64u << 20) ? size : 0); // NaN: memory that nobody wrote shows
  std::lock_guard<std::mutex> guard(mutex);
  blocks[static_cast<char *>(*out)] = size;
  return cudaSuccess;
}

cudaError_t release(void *block) {
  if (!block) return cudaSuccess;
  std::lock_guard<std::mutex> guard(mutex);
  blocks.erase(static_cast<char *>(block));
  free(block);
  return cudaSuccess;
}

bool owned(const void *address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto next = blocks.upper_bound((char *)address);
  if (next == blocks.begin()) return false;
  --next;
  return (char *)address < next->first + next->second;
}

cudaError_t moved(void *to, const void *from, size_t size) {
  if (capture && handlers.copy) return handlers.copy(to, from, size) ? failed(cudaErrorLaunchFailure) : cudaSuccess;
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t filled(void *to, int value, size_t size) {
  if (capture && handlers.fill) return handlers.fill(to, value, size) ? failed(cudaErrorLaunchFailure) : cudaSuccess;
  memset(to, value, size);
  return cudaSuccess;
}

cudaError_t own_kernel(const void *function) {
  auto place = kernels.find(function);
  const char *name = place == kernels.end() ? "unknown" : place->second.c_str();
  if (!handlers.launch || strstr(name, "spin_kernel")) return cudaSuccess; // the latter is torch.cuda._sleep
  fprintf(stderr, "stand-in for CUDA: a kernel of PyTorch's own is launched: %s\n", name);
  return failed(cudaErrorNotSupported);
}

double milliseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

int primary_state(int, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}

long nothing() { return 0; }

} // namespace

// What the Python side calls.
EXPORT void stand_in_handle(Handlers given) { handlers = given; }
EXPORT void *stand_in_capture() { return capture; }
EXPORT size_t stand_in_blocks(void **firsts, size_t *sizes, size_t most) {
  std::lock_guard<std::mutex> guard(mutex);
  size_t count = 0;
  for (auto &[first, size] : blocks)
    if (count < most) firsts[count] = first, sizes[count++] = size;
  return blocks.size();
}

// Devices.
EXPORT cudaError_t cudaGetDeviceCount(int *n) { *n = setting("STAND_IN_DEVICES", 1); return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *n) { *n = device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int n) { device = n; return cudaSuccess; }
EXPORT cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceFlags(unsigned *flags) { *flags = 0; return cudaSuccess; }
EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) { *value = attribute(which); return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  memset(p, 0, sizeof *p);
  const char *name = getenv("STAND_IN_NAME");
  strncpy(p->name, name ? name : "NVIDIA H200", sizeof p->name - 1);
  p->totalGlobalMem = 141ull << 30;
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = attribute(cudaDevAttrComputeCapabilityMajor), p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->maxThreadsPerMultiProcessor = 2048;
  p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->cooperativeLaunch = 1;
  p->textureAlignment = 512;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int n) { snprintf(text, size, "0000:%02x:00.0", n + 1); return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
EXPORT cudaError_t cudaGetLastError() { auto error = last_error; last_error = cudaSuccess; return error; }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORT const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaError" : "cudaSuccess"; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
  case cudaErrorNotSupported: return "operation not supported";
  case cudaErrorLaunchFailure: return "unspecified launch failure";
  default: return "an error of the stand-in for CUDA";
  }
}

// Memory.
EXPORT cudaError_t cudaMalloc(void **out, size_t size) {
  if (capture && mode == cudaStreamCaptureModeGlobal)
    if (auto error = waits("cudaMalloc")) return error;
  return allocate(out, size);
}
EXPORT cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t) { return allocate(out, size); }
EXPORT cudaError_t cudaFree(void *block) { return release(block); }
EXPORT cudaError_t cudaFreeAsync(void *block, cudaStream_t) { return release(block); }
EXPORT cudaError_t cudaHostAlloc(void **out, size_t size, unsigned) { return posix_memalign(out, 512, size ? size : 512) ? cudaErrorMemoryAllocation : cudaSuccess; }
EXPORT cudaError_t cudaFreeHost(void *block) { free(block); return cudaSuccess; }
EXPORT cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) { *unused = 140ull << 30, *total = 141ull << 30; return cudaSuccess; }
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind) {
  if (auto error = waits("cudaMemcpy")) return error;
  return moved(to, from, size);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind, cudaStream_t) { return moved(to, from, size); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t) { return moved(to, from, size); }
EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) { return filled(to, value, size); }
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t) { return filled(to, value, size); }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = owned(address) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void *>(address);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { *pool = (cudaMemPool_t)handle(); return cudaSuccess; }

// Streams and events: all is done when it is asked for, in order.
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { *stream = (cudaStream_t)handle(); return cudaSuccess; }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { *priority = 0; return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return waits("cudaStreamQuery"); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return waits("cudaStreamSynchronize"); }
EXPORT cudaError_t cudaDeviceSynchronize() { return waits("cudaDeviceSynchronize"); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { *event = (cudaEvent_t) new double(milliseconds()); return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (double *)event; return cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) { *(double *)event = milliseconds(); return cudaSuccess; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return cudaEventRecordWithFlags(event, nullptr, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return waits("cudaEventSynchronize"); }
EXPORT cudaError_t cudaEventElapsedTime(float *time, cudaEvent_t from, cudaEvent_t to) {
  *time = *(double *)to - *(double *)from;
  if (*time <= 0) *time = 1e-3f;
  return cudaSuccess;
}

// Captures and graphs.
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode how) {
  capture = handle(), captured = stream, mode = how;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
  *graph = (cudaGraph_t)capture, capture = nullptr;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  *status = capture && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = (unsigned long long)capture;
  if (graph) *graph = (cudaGraph_t)capture;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *other) { std::swap(mode, *other); return cudaSuccess; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  *executable = (cudaGraphExec_t)handle();
  graphs[*executable] = graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) { return handlers.replay && handlers.replay(graphs[executable]) ? failed(cudaErrorLaunchFailure) : cudaSuccess; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) { *count = 1; return cudaSuccess; }

// PyTorch's own kernels.
EXPORT void **__cudaRegisterFatBinary(void *) { static void *binary[4]; return binary; }
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *, int *) { kernels[host] = name; }
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORT char __cudaInitModule(void **) { return 1; }
EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *) { return cudaSuccess; }
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = const_cast<void *>(function); return cudaSuccess; }
EXPORT cudaError_t __cudaLaunchKernel(void *function, dim3, dim3, void **, size_t, void *) { return own_kernel(function); }
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) { return own_kernel(function); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **) { return own_kernel(function); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3, dim3, void **, size_t, cudaStream_t) { return own_kernel(function); }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = 49152;
  attributes->binaryVersion = attributes->ptxVersion = setting("STAND_IN_CAPABILITY", 90);
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) { *count = 2; return cudaSuccess; }

// The driver.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *result) {
  *function = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)primary_state;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT int cuDeviceGet(int *out, int n) { *out = n; return 0; }
EXPORT int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
EXPORT int cuDeviceGetAttribute(int *value, int which, int) { *value = attribute(which); return 0; }
EXPORT int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString((cudaError_t)error); return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int n, unsigned *flags, int *active) { return primary_state(n, flags, active); }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int) { *context = (void *)16; return 0; }
EXPORT int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
EXPORT int cuCtxSetCurrent(void *) { return 0; }
EXPORT int cuCtxPushCurrent_v2(void *) { return 0; }
EXPORT int cuCtxPopCurrent_v2(void **) { return 0; }
EXPORT int cuModuleLoadData(void **module, const void *) {
  if (auto error = waits("cuModuleLoadData")) return error;
  *module = handle();
  return 0;
}
EXPORT int cuModuleUnload(void *) { return 0; }
EXPORT int cuModuleGetFunction(void **function, void *, const char *) { *function = handle(); return 0; }
EXPORT int cuFuncGetAttribute(int *value, int which, void *) { *value = which ? 0 : 1024; return 0; }
EXPORT int cuFuncSetAttribute(void *, int, int) { return 0; }
EXPORT int cuFuncSetCacheConfig(void *, int) { return 0; }
EXPORT int cuOccupancyMaxActiveClusters(int *count, void *, const void *) { *count = 8; return 0; }
EXPORT int cuPointerGetAttribute(unsigned long long *value, int, unsigned long long address) { *value = address; return 0; }
struct LaunchConfig { unsigned grid[3], threads[3], shared; }; // the beginning of CUlaunchConfig
EXPORT int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **) {
  bool faulty = handlers.launch && handlers.launch(function, config->grid, config->threads[0], config->shared, parameters);
  return faulty ? cudaErrorLaunchFailure : cudaSuccess;
}
EXPORT int cuLaunchKernel(
    void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned shared, void *,
    void **parameters, void **) {
  const unsigned grid[] = {x, y, z};
  return handlers.launch && handlers.launch(function, grid, threads, shared, parameters) ? cudaErrorLaunchFailure : cudaSuccess;
}
EXPORT int cuCtxGetLimit(size_t *value, int) { *value = 0; return 0; }
EXPORT int cuCtxSetLimit(int, size_t) { return 0; }
EXPORT int cuTensorMapEncodeTiled(...) { return handlers.launch ? cudaErrorNotSupported : cudaSuccess; }
