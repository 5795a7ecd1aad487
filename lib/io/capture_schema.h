// Private to capture_file.cpp and capture_reader.cpp: names, attributes and geometry of capture.h5.
#pragma once

#include <string>

#include "io/capture_file.h"
#include "io/hdf5_file.h"

namespace oscar {

inline constexpr CaptureTensor kCaptureTensors[] = {CaptureTensor::kQ, CaptureTensor::kK,
                                                    CaptureTensor::kV, CaptureTensor::kO};

size_t capture_heads(const CaptureInfo& info, CaptureTensor tensor);
std::string capture_dataset(int64_t layer, CaptureTensor tensor);
void check_capture_geometry(const CaptureInfo& info, const std::string& path);
void write_capture_info(Hdf5File& file, const CaptureInfo& info);
CaptureInfo read_capture_info(const Hdf5File& file);

}  // namespace oscar
