// A tiny random model of any supported family, written as a Hugging Face folder and as a GGUF file
// with the same weights.
#pragma once

#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/float16.h"
#include "base/random.h"
#include "support/gguf_writer.h"
#include "support/safetensors_writer.h"

namespace oscar_test {

struct TinyModel {
  std::string architecture = "llama";  // llama, qwen2, qwen3
  size_t num_layers = 2, hidden = 64, intermediate = 96, vocab = 160;
  size_t num_heads = 4, num_kv_heads = 2, head_dim = 16;
  bool tied = false;
  bool attention_bias = false;  // llama and qwen3: q, k, v and o; qwen2 always has q, k, v
  bool fused_qkv = false;       // GGUF only
  uint64_t seed = 1;
  // Weights by Hugging Face name, [rows, columns] row-major or [n]; values that bfloat16 holds.
  std::map<std::string, std::pair<std::vector<size_t>, std::vector<float>>> weights = {};

  TinyModel& fill() {
    oscar::Random random(seed);
    const auto add = [&](const std::string& name, std::vector<size_t> shape, double mean,
                         double deviation) {
      std::vector<float> values(shape.size() == 2 ? shape[0] * shape[1] : shape[0]);
      for (float& value : values) {
        value = oscar::round_to_bf16(static_cast<float>(mean + deviation * random.normal()));
      }
      weights[name] = {std::move(shape), std::move(values)};
    };
    const auto matrix = [&](const std::string& name, size_t rows, size_t columns) {
      add(name, {rows, columns}, 0.0, 1.0 / std::sqrt(static_cast<double>(columns)));
    };
    const size_t q_rows = num_heads * head_dim, kv_rows = num_kv_heads * head_dim;
    add("model.embed_tokens.weight", {vocab, hidden}, 0.0, 1.0);
    add("model.norm.weight", {hidden}, 1.0, 0.1);
    if (!tied) matrix("lm_head.weight", vocab, hidden);
    for (size_t layer = 0; layer < num_layers; ++layer) {
      const std::string at = "model.layers." + std::to_string(layer) + ".";
      add(at + "input_layernorm.weight", {hidden}, 1.0, 0.1);
      add(at + "post_attention_layernorm.weight", {hidden}, 1.0, 0.1);
      matrix(at + "self_attn.q_proj.weight", q_rows, hidden);
      matrix(at + "self_attn.k_proj.weight", kv_rows, hidden);
      matrix(at + "self_attn.v_proj.weight", kv_rows, hidden);
      matrix(at + "self_attn.o_proj.weight", hidden, q_rows);
      if (attention_bias || architecture == "qwen2") {
        add(at + "self_attn.q_proj.bias", {q_rows}, 0.0, 0.3);
        add(at + "self_attn.k_proj.bias", {kv_rows}, 0.0, 0.3);
        add(at + "self_attn.v_proj.bias", {kv_rows}, 0.0, 0.3);
        if (architecture != "qwen2") add(at + "self_attn.o_proj.bias", {hidden}, 0.0, 0.3);
      }
      if (architecture == "qwen3") {
        add(at + "self_attn.q_norm.weight", {head_dim}, 1.0, 0.1);
        add(at + "self_attn.k_norm.weight", {head_dim}, 1.0, 0.1);
      }
      matrix(at + "mlp.gate_proj.weight", intermediate, hidden);
      matrix(at + "mlp.up_proj.weight", intermediate, hidden);
      matrix(at + "mlp.down_proj.weight", hidden, intermediate);
    }
    return *this;
  }

  std::string config_json() const {
    const auto field = [](const char* name, size_t value) {
      return std::string("\"") + name + "\": " + std::to_string(value) + ", ";
    };
    return "{\"model_type\": \"" + architecture + "\", " + field("hidden_size", hidden) +
           field("num_hidden_layers", num_layers) + field("num_attention_heads", num_heads) +
           field("num_key_value_heads", num_kv_heads) + field("head_dim", head_dim) +
           field("intermediate_size", intermediate) + field("vocab_size", vocab) +
           field("max_position_embeddings", 512) +
           "\"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\", " +
           "\"attention_bias\": " + (attention_bias ? "true" : "false") +
           ", \"tie_word_embeddings\": " + (tied ? "true" : "false") + ", \"eos_token_id\": 2}";
  }

  // dtype: F32, F16 (rounded) or BF16 (exact) for matrices; norms and biases are F32.
  SafeTensorsWriter safetensors(const std::string& dtype = "F32") const {
    SafeTensorsWriter writer;
    for (const auto& [name, weight] : weights) {
      const auto& [shape, values] = weight;
      if (shape.size() == 1 || dtype == "F32") {
        writer.tensor_f32(name, shape, values);
        continue;
      }
      Bytes bytes;
      for (const float value : values) {
        append_value(bytes,
                     dtype == "F16" ? oscar::float_to_fp16(value) : oscar::float_to_bf16(value));
      }
      writer.tensor(name, dtype, shape, bytes);
    }
    return writer;
  }

  void write_folder(const std::filesystem::path& folder, const std::string& dtype = "F32") const {
    std::filesystem::create_directories(folder);
    write_file((folder / "config.json").string(), config_json());
    safetensors(dtype).write((folder / "model.safetensors").string());
  }

  GgufWriter gguf() const {
    GgufWriter writer;
    const auto u32 = [&](const char* name, size_t value) {
      writer.u32(architecture + name, static_cast<uint32_t>(value));
    };
    writer.string("general.architecture", architecture);
    writer.string("general.name", "tiny " + architecture);
    u32(".block_count", num_layers);
    u32(".context_length", 512);
    u32(".embedding_length", hidden);
    u32(".feed_forward_length", intermediate);
    u32(".attention.head_count", num_heads);
    u32(".attention.head_count_kv", num_kv_heads);
    u32(".attention.key_length", head_dim);
    u32(".attention.value_length", head_dim);
    u32(".rope.dimension_count", head_dim);
    writer.f32(architecture + ".rope.freq_base", 10000.0F);
    writer.f32(architecture + ".attention.layer_norm_rms_epsilon", 1e-5F);
    writer.u32("tokenizer.ggml.eos_token_id", 2);
    add_gguf_tensors(writer);
    return writer;
  }

 private:
  // As the converter writes llama: row b * D/2 + i of a head goes to row 2i + b.
  std::vector<float> interleave(const std::vector<float>& values, size_t columns) const {
    std::vector<float> result(values.size());
    const size_t half = head_dim / 2;
    for (size_t row = 0; row < values.size() / columns; ++row) {
      const size_t lane = row % head_dim;
      const size_t target = row - lane + 2 * (lane % half) + lane / half;
      for (size_t c = 0; c < columns; ++c) {
        result[target * columns + c] = values[row * columns + c];
      }
    }
    return result;
  }

  void add_gguf_tensors(GgufWriter& writer) const {
    const std::vector<std::pair<std::string, std::string>> parts = {
        {"input_layernorm", "attn_norm"},    {"post_attention_layernorm", "ffn_norm"},
        {"self_attn.q_proj", "attn_q"},      {"self_attn.k_proj", "attn_k"},
        {"self_attn.v_proj", "attn_v"},      {"self_attn.o_proj", "attn_output"},
        {"self_attn.q_norm", "attn_q_norm"}, {"self_attn.k_norm", "attn_k_norm"},
        {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
        {"mlp.down_proj", "ffn_down"}};
    const auto put = [&](const std::string& hf_name, const std::string& name) {
      const auto found = weights.find(hf_name);
      if (found == weights.end()) return;
      const auto& [shape, values] = found->second;
      const bool permuted = architecture == "llama" && (name.find("attn_q.") != std::string::npos ||
                                                        name.find("attn_k.") != std::string::npos);
      writer.tensor_f32(name, {shape.rbegin(), shape.rend()},
                        permuted ? interleave(values, shape.size() == 2 ? shape[1] : 1) : values);
    };
    put("model.embed_tokens.weight", "token_embd.weight");
    put("model.norm.weight", "output_norm.weight");
    put("lm_head.weight", "output.weight");
    for (size_t layer = 0; layer < num_layers; ++layer) {
      const std::string hf = "model.layers." + std::to_string(layer) + ".";
      const std::string blk = "blk." + std::to_string(layer) + ".";
      for (const auto& [hf_part, part] : parts) {
        for (const char* ending : {".weight", ".bias"}) {
          const bool is_qkv = part == "attn_q" || part == "attn_k" || part == "attn_v";
          if (fused_qkv && is_qkv) continue;
          put(hf + hf_part + ending, blk + part + ending);
        }
      }
      if (fused_qkv) put_fused(writer, hf, blk);
    }
  }

  void put_fused(GgufWriter& writer, const std::string& hf, const std::string& blk) const {
    for (const std::string ending : {".weight", ".bias"}) {
      std::vector<float> all;
      for (const std::string part : {"q", "k", "v"}) {
        const auto found = weights.find(hf + "self_attn." + part + "_proj" + ending);
        if (found == weights.end()) return;
        const size_t columns = ending == ".weight" ? hidden : 1;
        const std::vector<float>& values = found->second.second;
        const bool permuted = architecture == "llama" && part != "v";
        const std::vector<float> rows = permuted ? interleave(values, columns) : values;
        all.insert(all.end(), rows.begin(), rows.end());
      }
      std::vector<uint64_t> ne = {all.size()};
      if (ending == ".weight") ne = {hidden, all.size() / hidden};
      writer.tensor_f32(blk + "attn_qkv" + ending, ne, all);
    }
  }
};

}  // namespace oscar_test
