#include <cmath>
#include <memory>

#include "calib/held_out.h"
#include "calib/rotation_fit.h"
#include "official_fixture.h"
#include "support/compare.h"

using namespace oscar;
using namespace oscar_test;

namespace {

struct Case {
  const char* model;
  const char* layer;
};

// Rotation and eigenvalues of the published script.
struct Reference {
  TensorF rotation, eigenvalues;
};

Reference read_reference(const Hdf5File& file, const std::string& name, const std::string& layer) {
  const std::string group = "/rotations/" + name + "/" + layer;
  return {file.read<float>(group + "/rotation", 2), file.read<float>(group + "/eigenvalues", 1)};
}

// |diag(U_ref^T U)| >= 1 - 1e-6, then the signs of the reference on our eigenvectors.
TensorD with_reference_signs(const TensorD& vectors, const TensorF& reference) {
  const size_t dim = vectors.extent(0);
  TensorD aligned = vectors;
  for (size_t c = 0; c < dim; ++c) {
    double dot = 0.0;
    for (size_t r = 0; r < dim; ++r)
      dot += vectors.values[r * dim + c] * static_cast<double>(reference.values[r * dim + c]);
    INFO("eigenvector " << c);
    CHECK(std::abs(dot) >= 1.0 - 1e-6);
    if (dot < 0.0)
      for (size_t r = 0; r < dim; ++r) aligned.values[r * dim + c] *= -1.0;
  }
  return aligned;
}

void check_eigenvalues(const FittedRotation& fit, const TensorF& reference) {
  const double largest = static_cast<double>(reference.values.back());
  for (size_t i = 0; i < reference.size(); ++i) {
    INFO("eigenvalue " << i);
    const double expected = static_cast<double>(reference.values[i]);
    // 1e-6 of the value; tiny ones cannot be better than the rounding of the largest in the
    // reference's float64 solver.
    CHECK(std::abs(fit.eigenvalues.values[i] - expected) <= 1e-6 * expected + 1e-13 * largest);
  }
}

TensorD matrix_of(const FittedRotation& fit) {
  TensorD vectors({fit.vectors.shape[1], fit.vectors.shape[2]});
  vectors.values = fit.vectors.values;
  return vectors;
}

}  // namespace

TEST_CASE("rotations of the published script are reproduced") {
  SKIP_UNLESS(shared("fixtures/official"), "no reference rotations");
  for (const Case& item :
       {Case{"smollm2", "0"}, Case{"smollm2", "15"}, Case{"qwen2.5-coder-1.5b", "14"}}) {
    const Hdf5File file =
        Hdf5File::open(shared("fixtures/official/" + std::string(item.model) + ".h5").value());
    const OfficialLayer layer = official_layer(file, item.layer);
    LayerStatistics statistics(layer.geometry, {.outputs = false});
    statistics.add({.num_tokens = layer.num_tokens,
                    .q = layer.q.data(),
                    .k = layer.k.data(),
                    .v = layer.v.data()},
                   0, layer.num_tokens);
    const MemoryRows rows(layer);
    const auto check_side = [&](const std::string& side, const std::string& target,
                                const std::vector<TensorD>& covariances) {
      const std::string prefix = side + "_rotation_" + target + "_";
      const Reference plain = read_reference(file, prefix + "plain", item.layer);
      const FittedRotation fit =
          fit_rotation(covariances, {.composition = Composition::kPlain}, "test");
      INFO(item.model << " layer " << item.layer << " " << prefix);
      check_eigenvalues(fit, plain.eigenvalues);
      const TensorD aligned = with_reference_signs(matrix_of(fit), plain.rotation);
      for (const std::string& name : composition_names()) {
        if (!file.exists("/rotations/" + prefix + name)) continue;
        INFO(name);
        const Reference reference = read_reference(file, prefix + name, item.layer);
        const TensorD rotation = compose_rotation(parse_composition(name), aligned);
        CHECK_CLOSE(rotation.data(), reference.rotation.data(), rotation.size(),
                    {.absolute = 1e-6});
      }
    };
    check_side("k", "qqt", key_covariances(statistics, KeyTarget::kQqt));
    check_side("k", "ktk", key_covariances(statistics, KeyTarget::kKtk));
    check_side("v", "sst",
               value_covariances(statistics, ValueTarget::kProxy,
                                 proxy_sums(statistics, rows, 0, layer.num_tokens)));
    check_side("v", "vtv", value_covariances(statistics, ValueTarget::kVtv, {}));
  }
}

TEST_CASE("INT2 error under our rotation equals the error under the published one") {
  SKIP_UNLESS(shared("fixtures/official"), "no reference rotations");
  const Hdf5File file = Hdf5File::open(shared("fixtures/official/smollm2.h5").value());
  const OfficialLayer layer = official_layer(file, "15");
  LayerStatistics statistics(layer.geometry, {.outputs = false});
  statistics.add({.num_tokens = layer.num_tokens,
                  .q = layer.q.data(),
                  .k = layer.k.data(),
                  .v = layer.v.data()},
                 0, layer.num_tokens);
  const FittedRotation fit = fit_rotation(key_covariances(statistics, KeyTarget::kQqt),
                                          {.composition = Composition::kPlain}, "test");
  const Reference plain = read_reference(file, "k_rotation_qqt_plain", "15");
  const Reference reference = read_reference(file, "k_rotation_qqt_r_h_pbr", "15");
  const TensorD aligned = with_reference_signs(matrix_of(fit), plain.rotation);
  const size_t dim = layer.geometry.head_dim;
  TensorF ours({1, dim, dim}), theirs({1, dim, dim});
  ours.values = to_float(compose_rotation(Composition::kRHPbr, aligned));
  theirs.values = reference.rotation.values;
  const std::vector<std::vector<double>> ones(layer.geometry.num_kv_heads,
                                              std::vector<double>(layer.num_tokens, 1.0));
  CodecSpec codec;
  codec.meta = MetaFormat::kScaleZeroFp32;
  codec.clip_ratio = 0.96;
  const auto error = [&](const TensorF& rotation) {
    const TensorD errors = storage_error(layer.k, layer.num_tokens, layer.geometry,
                                         {&rotation, nullptr, codec}, {.tokens = &ones});
    double sum = 0.0;
    for (const double value : errors.values) sum += value;
    return sum;
  };
  const double expected = error(theirs);
  CHECK(std::abs(error(ours) - expected) <= 1e-5 * expected);
}

TEST_CASE("the published Hadamard rotation is reproduced") {
  SKIP_UNLESS(shared("fixtures/official"), "no reference rotations");
  for (const char* model : {"smollm2", "qwen2.5-coder-1.5b"}) {
    const Hdf5File file =
        Hdf5File::open(shared("fixtures/official/" + std::string(model) + ".h5").value());
    const Reference reference = read_reference(file, "k_rotation_hadamard", "0");
    const size_t dim = reference.rotation.extent(0);
    const FittedRotation fit = fit_rotation({TensorD({dim, dim})}, {.hadamard = true}, "test");
    CHECK_CLOSE(fit.rotation.data(), reference.rotation.data(), dim * dim, {.absolute = 1e-7});
    CHECK_CLOSE(fit.eigenvalues.data(), reference.eigenvalues.data(), dim, {});
  }
}
