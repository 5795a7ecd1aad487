#include "model/weight_matmul_dnnl.h"

#include "base/error.h"

#ifdef OSCAR_HAS_DNNL
#include <omp.h>

#include <array>
#include <dnnl.hpp>
#include <map>
#endif

namespace oscar {

#ifdef OSCAR_HAS_DNNL

namespace {

using Memory = dnnl::memory;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

struct Primitive {
  dnnl::matmul matmul;
  Memory::desc source, weights, target;
};

Primitive make_primitive(const DnnlMatmulArgs& args) {
  const auto extent = [](size_t value) { return static_cast<Memory::dim>(value); };
  const Memory::dim m = extent(args.tokens), n = extent(args.rows), k = extent(args.columns);
  Primitive p;
  p.source = Memory::desc({m, k}, Memory::data_type::bf16, Memory::dims{k, 1});
  p.weights = Memory::desc({k, n}, Memory::data_type::bf16, Memory::dims{1, k});
  p.target = Memory::desc({m, n}, Memory::data_type::f32, Memory::dims{extent(args.out_stride), 1});
  const dnnl::matmul::desc description(p.source, p.weights, p.target);
  p.matmul = dnnl::matmul(dnnl::matmul::primitive_desc(description, cpu_engine()));
  return p;
}

}  // namespace

bool dnnl_built() { return true; }

void dnnl_matmul(const DnnlMatmulArgs& args) {
  // oneDNN parallelises through OpenMP; every pool thread must keep to itself.
  thread_local const bool one_thread = (omp_set_num_threads(1), true);
  static_cast<void>(one_thread);
  using Key = std::array<size_t, 4>;
  thread_local std::map<Key, Primitive> primitives;  // code generation takes milliseconds
  try {
    const Key key{args.tokens, args.rows, args.columns, args.out_stride};
    auto found = primitives.find(key);
    if (found == primitives.end()) found = primitives.emplace(key, make_primitive(args)).first;
    const Primitive& p = found->second;
    dnnl::stream stream(cpu_engine());
    const auto memory = [](const Memory::desc& description, const void* bytes) {
      return Memory(description, cpu_engine(), const_cast<void*>(bytes));
    };
    p.matmul.execute(stream, {{DNNL_ARG_SRC, memory(p.source, args.x)},
                              {DNNL_ARG_WEIGHTS, memory(p.weights, args.weights)},
                              {DNNL_ARG_DST, memory(p.target, args.out)}});
    stream.wait();
  } catch (const dnnl::error& error) {
    fail("--compute bf16: oneDNN cannot multiply [", args.tokens, " x ", args.columns, "] by [",
         args.columns, " x ", args.rows, "] in bf16 on this CPU: ", error.what());
  }
}

#else

bool dnnl_built() { return false; }

void dnnl_matmul(const DnnlMatmulArgs&) {
  fail("--compute bf16 needs oneDNN on this CPU, and this build has none (Debian: libdnnl-dev)");
}

#endif

}  // namespace oscar
