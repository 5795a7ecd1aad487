#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/json_file.h"
#include "model/rope.h"

namespace oscar {

std::string rope_to_json(const RopeConfig& rope) {
  if (rope.rotary_dim == 0) return {};
  nlohmann::ordered_json json{{"theta", rope.theta},
                              {"rotary_dim", rope.rotary_dim},
                              {"scaling", rope.scaling},
                              {"factor", rope.factor},
                              {"attention_factor", rope.attention_factor}};
  if (rope.scaling == "llama3") {
    json["low_freq_factor"] = rope.low_freq_factor;
    json["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.scaling == "yarn") {
    json["beta_fast"] = rope.beta_fast;
    json["beta_slow"] = rope.beta_slow;
    json["truncate"] = rope.truncate;
  }
  if (rope.scaling == "llama3" || rope.scaling == "yarn")
    json["original_context_length"] = rope.original_context_length;
  if (!rope.frequency_divisors.empty()) json["frequency_divisors"] = rope.frequency_divisors;
  return json.dump();
}

RopeConfig rope_from_json(const std::string& text, const std::string& where) {
  if (text.empty()) return {};
  const JsonValue value = parse_json(text, where);
  const JsonObject json(value, where);
  RopeConfig rope;
  rope.theta = json.number("theta");
  const int64_t rotary_dim = json.integer("rotary_dim");
  OSCAR_CHECK(rotary_dim > 0 && rotary_dim <= (1 << 20), where, ": rotary width ", rotary_dim);
  rope.rotary_dim = static_cast<size_t>(rotary_dim);
  rope.scaling = json.string("scaling");
  OSCAR_CHECK(rope.scaling == "none" || rope.scaling == "linear" || rope.scaling == "llama3" ||
                  rope.scaling == "yarn",
              where, ": unknown RoPE scaling ", rope.scaling);
  rope.factor = json.number("factor", rope.factor);
  rope.attention_factor = json.number("attention_factor", rope.attention_factor);
  rope.low_freq_factor = json.number("low_freq_factor", rope.low_freq_factor);
  rope.high_freq_factor = json.number("high_freq_factor", rope.high_freq_factor);
  rope.original_context_length = json.number("original_context_length", 0.0);
  rope.beta_fast = json.number("beta_fast", rope.beta_fast);
  rope.beta_slow = json.number("beta_slow", rope.beta_slow);
  rope.truncate = json.boolean("truncate", rope.truncate);
  if (const JsonValue* divisors = json.find("frequency_divisors"); divisors != nullptr) {
    OSCAR_CHECK(divisors->is_array() && divisors->items.size() == rope.rotary_dim / 2, where,
                ": frequency_divisors: expected ", rope.rotary_dim / 2, " numbers");
    for (const JsonValue& item : divisors->items) {
      OSCAR_CHECK(item.is_number(), where, ": frequency_divisors: expected numbers");
      rope.frequency_divisors.push_back(static_cast<float>(item.number));
    }
  }
  check(rope, where);
  return rope;
}

}  // namespace oscar
