#include "eval/partial_file.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "io/exclusive_file.h"

namespace oscar {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "oscar-eval-partial";
constexpr int kVersion = 2;

void append_hex(uint32_t value, int digits, std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) {
    text += kDigits[(value >> shift) & 0xfU];
  }
}

std::string hex_of(const std::vector<float>& values) {
  std::string text;
  text.reserve(values.size() * 8);
  for (const float value : values) append_hex(std::bit_cast<uint32_t>(value), 8, text);
  return text;
}

std::string hex_of(const std::vector<uint8_t>& values) {
  std::string text;
  for (const uint8_t value : values) append_hex(value, 2, text);
  return text;
}

std::vector<uint32_t> words_of(const std::string& hex, size_t digits) {
  OSCAR_CHECK(hex.size() % digits == 0, "an array of ", hex.size(),
              " digits, expected a multiple of ", digits);
  std::vector<uint32_t> words(hex.size() / digits);
  for (size_t i = 0; i < words.size(); ++i) {
    const char* begin = hex.data() + i * digits;
    const auto [end, problem] = std::from_chars(begin, begin + digits, words[i], 16);
    OSCAR_CHECK(problem == std::errc{} && end == begin + digits, "an array with other characters");
  }
  return words;
}

std::vector<float> floats_of(const Json& json) {
  std::vector<float> values;
  for (const uint32_t word : words_of(json.get<std::string>(), 8)) {
    values.push_back(std::bit_cast<float>(word));
  }
  return values;
}

std::vector<uint8_t> bytes_of(const Json& json) {
  std::vector<uint8_t> values;
  for (const uint32_t word : words_of(json.get<std::string>(), 2)) {
    values.push_back(static_cast<uint8_t>(word));
  }
  return values;
}

ArmWindow parse_arm(const Json& json) {
  ArmWindow arm;
  arm.nll = floats_of(json.at("nll"));
  arm.kl = floats_of(json.at("kl"));
  arm.kl_top = floats_of(json.at("kl_top"));
  arm.delta_p = floats_of(json.at("delta_p"));
  arm.agreement = bytes_of(json.at("agreement"));
  const size_t rows = arm.nll.size();
  OSCAR_CHECK(arm.kl.size() == rows && arm.kl_top.size() == rows && arm.delta_p.size() == rows &&
                  arm.agreement.size() == rows,
              "arrays of different lengths");
  arm.tokens_int2_written = json.at("tokens_int2_written").get<double>();
  arm.tokens_int2_read = json.at("tokens_int2_read").get<double>();
  arm.tokens_high_precision = json.at("tokens_high_precision").get<double>();
  arm.bytes_packed = json.at("bytes_packed").get<double>();
  arm.bytes_high_precision = json.at("bytes_high_precision").get<double>();
  arm.rows_encoded = json.at("rows_encoded").get<double>();
  arm.gains_clamped = json.at("gains_clamped").get<double>();
  arm.scales_saturated = json.at("scales_saturated").get<double>();
  arm.meta_fallbacks = json.at("meta_fallbacks").get<double>();
  arm.forward_s = json.at("forward_s").get<double>();
  return arm;
}

// The parts of "NAME VALUE; NAME VALUE; ...".
std::vector<std::string> fields_of(const std::string& provenance) {
  std::vector<std::string> fields;
  for (size_t begin = 0; begin <= provenance.size();) {
    const size_t end = std::min(provenance.find("; ", begin), provenance.size());
    fields.push_back(provenance.substr(begin, end - begin));
    begin = end + 2;
  }
  return fields;
}

// From shortly before the first character in which two fields differ.
std::string excerpt(const std::string& field, size_t first_difference) {
  constexpr size_t kBefore = 20, kShown = 80;
  const std::string name = field.substr(0, field.find(' '));
  if (field.size() <= kShown) return field;
  const size_t begin = std::max(first_difference, name.size() + 1 + kBefore) - kBefore;
  const bool from_start = begin <= name.size() + 1;
  return cat(name, from_start ? " " : " ...", field.substr(begin, kShown),
             begin + kShown < field.size() ? "..." : "");
}

// "NAME VALUE there, NAME VALUE here" of the first field that differs.
std::string first_difference(const std::string& there, const std::string& here) {
  const std::vector<std::string> theirs = fields_of(there), ours = fields_of(here);
  for (size_t i = 0; i < std::max(theirs.size(), ours.size()); ++i) {
    const std::string a = i < theirs.size() ? theirs[i] : "", b = i < ours.size() ? ours[i] : "";
    if (a == b) continue;
    size_t at = 0;
    while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
    return cat("\"", excerpt(a, at), "\" there, \"", excerpt(b, at), "\" here");
  }
  return {};
}

constexpr const char* kWhatToDo = "; remove it or choose another --out";

void check_header(const std::string& line, const std::string& path, const std::string& provenance) {
  const Json header = Json::parse(line, nullptr, false);
  OSCAR_CHECK(header.is_object() && header.value("format", "") == kFormat &&
                  header.value("version", 0) == kVersion,
              path, ": is not a file of finished windows (format ", kFormat, ", version ", kVersion,
              ")", kWhatToDo);
  const std::string found = header.value("provenance", "");
  OSCAR_CHECK(found == provenance, path,
              ": holds finished windows of a run with other options or inputs: ",
              first_difference(found, provenance), kWhatToDo);
}

}  // namespace

std::string to_json_line(const WindowRecord& record) {
  Json json;
  json["window"] = record.window;
  json["arms"] = Json::array();
  for (const ArmWindow& arm : record.arms) {
    json["arms"].push_back({{"nll", hex_of(arm.nll)},
                            {"kl", hex_of(arm.kl)},
                            {"kl_top", hex_of(arm.kl_top)},
                            {"delta_p", hex_of(arm.delta_p)},
                            {"agreement", hex_of(arm.agreement)},
                            {"tokens_int2_written", arm.tokens_int2_written},
                            {"tokens_int2_read", arm.tokens_int2_read},
                            {"tokens_high_precision", arm.tokens_high_precision},
                            {"bytes_packed", arm.bytes_packed},
                            {"bytes_high_precision", arm.bytes_high_precision},
                            {"rows_encoded", arm.rows_encoded},
                            {"gains_clamped", arm.gains_clamped},
                            {"scales_saturated", arm.scales_saturated},
                            {"meta_fallbacks", arm.meta_fallbacks},
                            {"forward_s", arm.forward_s}});
  }
  return json.dump();
}

WindowRecord parse_window_record(const std::string& line, const std::string& where) {
  try {
    const Json json = Json::parse(line);
    WindowRecord record;
    record.window = json.at("window").get<size_t>();
    for (const Json& arm : json.at("arms")) record.arms.push_back(parse_arm(arm));
    return record;
  } catch (const Json::exception& problem) {
    fail(where, ": not a finished window: ", problem.what());
  } catch (const Error& problem) {
    fail(where, ": not a finished window: ", problem.what());
  }
}

PartialFile::PartialFile(const std::string& path, const std::string& provenance) : path_(path) {
  const int descriptor = open_exclusively(path);
  file_.reset(fdopen(descriptor, "r+b"));
  if (file_ == nullptr) close(descriptor);
  OSCAR_CHECK(file_ != nullptr, path, ": cannot open the file for finished windows");
  const std::string header =
      Json{{"format", kFormat}, {"version", kVersion}, {"provenance", provenance}}.dump();
  std::ifstream existing{path, std::ios::binary};
  std::string line;
  size_t number = 0;
  uintmax_t good_bytes = 0;
  // A line without its newline was cut off by a kill: it is dropped.
  while (std::getline(existing, line) && !existing.eof()) {
    ++number;
    if (number == 1) {
      check_header(line, path, provenance);
    } else {
      records_.push_back(parse_window_record(line, cat(path, " line ", number)));
    }
    good_bytes += line.size() + 1;
  }
  if (number == 0 && !header.starts_with(line)) check_header(line, path, provenance);
  std::filesystem::resize_file(path, good_bytes);
  std::fseek(file_.get(), 0, SEEK_END);
  if (good_bytes == 0) write_line(header);
}

void PartialFile::write_line(const std::string& line) {
  const std::string text = line + "\n";
  const bool written = std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
                       std::fflush(file_.get()) == 0;
  OSCAR_CHECK(written, path_, ": writing failed (disk full?)");
}

void PartialFile::append(WindowRecord record) {
  write_line(to_json_line(record));
  records_.push_back(std::move(record));
}

void PartialFile::remove() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
  file_.reset();  // the lock goes last
}

}  // namespace oscar
