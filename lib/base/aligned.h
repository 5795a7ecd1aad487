// Memory on cache-line boundaries: a vector, and a buffer that grows without keeping its content.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace oscar {

inline constexpr size_t kCacheLine = 64;

template <class T>
struct AlignedAllocator {
  using value_type = T;
  AlignedAllocator() = default;
  template <class U>
  AlignedAllocator(const AlignedAllocator<U>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{kCacheLine}));
  }
  void deallocate(T* pointer, size_t) { ::operator delete (pointer, std::align_val_t{kCacheLine}); }
  bool operator==(const AlignedAllocator&) const { return true; }
};

template <class T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

// Elements are neither initialised nor kept when it grows.
template <class T>
class AlignedBuffer {
 public:
  T* get(size_t count) {
    if (count > capacity_) {
      memory_.reset();
      memory_.reset(AlignedAllocator<T>{}.allocate(count));
      capacity_ = count;
    }
    return memory_.get();
  }
  T* data() { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* pointer) const { AlignedAllocator<T>{}.deallocate(pointer, 0); }
  };
  std::unique_ptr<T, Free> memory_;
  size_t capacity_ = 0;
};

}  // namespace oscar
