// Finished windows of an interrupted run, one JSON line each, so that the same command continues
// where it stopped.
//
// Line 1: {"format": "oscar-eval-partial", "version": 1, "provenance": TEXT}; then per window
// {"window": index, "arms": [{counters..., "nll": HEX, ...}]}; arrays are float32 bits, 8
// hexadecimal digits each.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "eval/likelihood.h"

namespace oscar {

std::string to_json_line(const WindowRecord& record);
// Throws Error naming `where` when the line is not a whole record.
WindowRecord parse_window_record(const std::string& line, const std::string& where);

class PartialFile {
 public:
  // Opens or creates `path`, which no other process can open until this object ends. Records of an
  // earlier run are kept when its provenance ("NAME VALUE; NAME VALUE; ...") is the same; a last
  // line that was cut off is dropped. Throws Error naming the file, and what differs, when the
  // provenance is another one or the file holds something else; then it is left as it is.
  PartialFile(const std::string& path, const std::string& provenance);

  const std::vector<WindowRecord>& records() const { return records_; }
  // Appends and flushes to the file system. Throws Error when the disk is full.
  void append(WindowRecord record);
  // The run is complete and its results are stored: removes the file and closes it.
  void remove();

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void write_line(const std::string& line);

  std::string path_;
  std::vector<WindowRecord> records_;
  std::unique_ptr<std::FILE, Closer> file_;
};

}  // namespace oscar
