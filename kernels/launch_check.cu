#include "kernels/launch_check.cuh"

namespace oscar {
namespace {

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  OSCAR_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

void check_device_pointer(const void* pointer, size_t alignment, const char* op, const char* name) {
  OSCAR_CHECK(pointer != nullptr, op, ": ", name, " must not be null");
  OSCAR_CHECK(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, op, ": ", name,
              " must be aligned to ", alignment, " bytes, got address ", pointer);
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), op);
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  OSCAR_CHECK(attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged,
              op, ": ", name, " must be device memory");
  OSCAR_CHECK(attributes.device == device, op, ": ", name, " is on device ", attributes.device,
              ", the current device is ", device);
}

int device_compute_capability() {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
         device_attribute(cudaDevAttrComputeCapabilityMinor);
}
int device_multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }
int device_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

}  // namespace oscar
