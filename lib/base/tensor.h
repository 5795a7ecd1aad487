// Row-major tensors: an owning one and a non-owning view that carry their shape.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"

namespace oscar {

using Shape = std::vector<size_t>;

// "[3, 64, 64]"
inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// Number of elements; throws when the product overflows size_t. `what` names the tensor in the
// message.
inline size_t num_elements(const Shape& shape, const std::string& what = "tensor") {
  size_t count = 1;
  for (const size_t extent : shape) {
    OSCAR_CHECK(extent == 0 || count <= std::numeric_limits<size_t>::max() / extent, what,
                ": shape ", to_string(shape), " overflows");
    count *= extent;
  }
  return count;
}

// Owning, contiguous, last index fastest.
template <class T>
struct Tensor {
  Shape shape;
  std::vector<T> values;

  Tensor() = default;
  explicit Tensor(Shape extents, T fill = T{})
      : shape(std::move(extents)), values(num_elements(shape), fill) {}

  bool empty() const { return values.empty(); }
  size_t size() const { return values.size(); }
  size_t extent(size_t axis) const { return shape.at(axis); }
  T* data() { return values.data(); }
  const T* data() const { return values.data(); }
  // Start of the sub-tensor at `index` of the first axis.
  T* at(size_t index) { return values.data() + index * (values.size() / shape[0]); }
  const T* at(size_t index) const { return values.data() + index * (values.size() / shape[0]); }
};

using TensorF = Tensor<float>;
using TensorD = Tensor<double>;

}  // namespace oscar
