// Timing of launches through a captured graph: private to the kernel benches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/kernel_bench.h"
#include "kernels/launch_check.cuh"

namespace oscar::bench {

// Device memory that is freed with its owner.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    check_cuda(cudaMalloc(&pointer_, std::max<size_t>(1, count) * sizeof(T)), "bench: allocation");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    check_cuda(cudaMemcpy(pointer_, values.data(), values.size() * sizeof(T), cudaMemcpyDefault),
               "bench: upload");
  }
  ~Buffer() { cudaFree(pointer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* get() const { return pointer_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* pointer_ = nullptr;
  size_t count_;
};

// Launches body(stream, i) for i in [0, launches) inside one graph, replays it `replays` times
// after two warm-ups, and returns microseconds a launch (median, min, max over the replays). The
// gaps between dependent launches are part of the number, as they are in a decode step.
template <class Body>
KernelTiming time_launches(int launches, int replays, const Body& body) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check_cuda(cudaStreamCreate(&stream), "bench: stream");
  body(stream, 0);  // module load and attributes stay outside the capture
  check_cuda(cudaStreamSynchronize(stream), "bench: first launch");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "bench: capture");
  for (int i = 0; i < launches; ++i) body(stream, i);
  check_cuda(cudaStreamEndCapture(stream, &graph), "bench: capture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "bench: graph");
  check_cuda(cudaEventCreate(&begin), "bench: event");
  check_cuda(cudaEventCreate(&end), "bench: event");
  std::vector<double> times;
  for (int r = -2; r < replays; ++r) {
    check_cuda(cudaEventRecord(begin, stream), "bench: event");
    check_cuda(cudaGraphLaunch(executable, stream), "bench: replay");
    check_cuda(cudaEventRecord(end, stream), "bench: event");
    check_cuda(cudaEventSynchronize(end), "bench: replay");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "bench: event");
    if (r >= 0) times.push_back(static_cast<double>(ms) * 1000.0 / launches);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  KernelTiming timing;
  timing.time_us = times[times.size() / 2];
  timing.time_us_min = times.front();
  timing.time_us_max = times.back();
  timing.replays = replays;
  return timing;
}

inline void count_bytes(KernelTiming& timing, double bytes, double read_ceiling_tb_per_s) {
  timing.bytes = bytes;
  timing.bandwidth_tb_per_s = bytes / timing.time_us * 1e-6;
  timing.read_fraction =
      read_ceiling_tb_per_s > 0 ? timing.bandwidth_tb_per_s / read_ceiling_tb_per_s : 0;
}

// Copies of a buffer of `bytes` needed so that a round over all of them leaves nothing in the
// cache.
inline int cold_copies(double bytes) {
  const double target = 320e6;  // more than five times the H200's 60 MB
  return std::max(1, std::min(64, static_cast<int>(target / std::max(1.0, bytes)) + 1));
}

void fill_records(void* records, int64_t num_records, int head_dim, uint32_t seed);
void fill_bf16(uint16_t* values, int64_t count, uint32_t seed);

}  // namespace oscar::bench
