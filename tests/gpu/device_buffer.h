// Device memory of a test: poisoned, between guard words that are checked on destruction.
#pragma once

#include <cuda_runtime.h>

#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oscar_test {

inline void cuda_ok(cudaError_t status) {
  INFO(cudaGetErrorString(status));
  REQUIRE(status == cudaSuccess);
}

// Tests call this first: without a GPU they say so and end.
inline bool has_gpu() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  cudaGetLastError();
  WARN("skipped: no CUDA device here");
  return false;
}

template <class T>
class DeviceBuffer {
 public:
  static constexpr size_t kGuardBytes = 256;
  static constexpr uint8_t kGuard = 0x5C;

  // Every byte of the payload is 0xFF at first: NaN in bf16, fp16 and fp32.
  explicit DeviceBuffer(size_t count, int poison = 0xFF) : count_(count) {
    cuda_ok(cudaMalloc(&base_, 2 * kGuardBytes + bytes()));
    cuda_ok(cudaMemset(base_, kGuard, 2 * kGuardBytes + bytes()));
    cuda_ok(cudaMemset(base_ + kGuardBytes, poison, bytes()));
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    upload(values);
  }
  ~DeviceBuffer() {
    CHECK(guards_intact());
    cudaFree(base_);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* get() const { return reinterpret_cast<T*>(base_ + kGuardBytes); }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  void upload(const std::vector<T>& values) {
    REQUIRE(values.size() == count_);
    if (count_ > 0) cuda_ok(cudaMemcpy(get(), values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  void poison(int byte = 0xFF) { cuda_ok(cudaMemset(get(), byte, bytes())); }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ > 0) cuda_ok(cudaMemcpy(values.data(), get(), bytes(), cudaMemcpyDeviceToHost));
    return values;
  }
  bool guards_intact() const {
    std::vector<uint8_t> guard(kGuardBytes);
    for (const size_t offset : {size_t{0}, kGuardBytes + bytes()}) {
      if (cudaMemcpy(guard.data(), base_ + offset, kGuardBytes, cudaMemcpyDeviceToHost) !=
          cudaSuccess)
        return false;
      for (const uint8_t byte : guard) {
        if (byte != kGuard) return false;
      }
    }
    return true;
  }

 private:
  uint8_t* base_ = nullptr;
  size_t count_;
};

}  // namespace oscar_test
