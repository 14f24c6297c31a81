#include "bindings/arrays.h"

#include <map>
#include <mutex>
#include <string>

namespace nb = nanobind;

namespace {

std::string shape_of(const WeightArray& array) {
  std::string shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape += (i ? ", " : "") + std::to_string(array.shape(i));
  return "[" + shape + "]";
}

}  // namespace

const uint16_t* weights_of(const char* name, const WeightArray& array, int rows, int columns) {
  const nb::dlpack::dtype dtype = array.dtype();
  const bool bits = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
  const bool bfloat = dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (dtype.bits != 16 || !(bits || bfloat)) {
    throw nb::type_error((std::string(name) + " must hold bf16 (or its bits as uint16)").c_str());
  }
  if (array.ndim() != 2 || array.shape(0) != static_cast<size_t>(rows) ||
      array.shape(1) != static_cast<size_t>(columns)) {
    throw nb::value_error((std::string(name) + " has shape " + shape_of(array) + "; this layer needs [" +
                           std::to_string(rows) + ", " + std::to_string(columns) + "]")
                              .c_str());
  }
  return static_cast<const uint16_t*>(array.data());
}

const float* bias_of(const char* name, const WeightArray& array, int rows) {
  const nb::dlpack::dtype dtype = array.dtype();
  if (dtype.code != static_cast<uint8_t>(nb::dlpack::dtype_code::Float) || dtype.bits != 32) {
    throw nb::type_error((std::string("the bias of ") + name + " must hold f32").c_str());
  }
  if (array.ndim() != 1 || array.shape(0) != static_cast<size_t>(rows)) {
    throw nb::value_error((std::string("the bias of ") + name + " has shape " + shape_of(array) +
                           "; this layer needs [" + std::to_string(rows) + "]")
                              .c_str());
  }
  return static_cast<const float*>(array.data());
}

nb::ndarray<nb::numpy, float> matrix(int rows, int columns, float** data) {
  *data = new float[static_cast<size_t>(rows) * columns];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::ndarray<nb::numpy, float>(*data, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner);
}

std::shared_ptr<kt::Workspace> shared_workspace(kt::Pool* pool) {
  static std::mutex mutex;
  static std::map<kt::Pool*, std::weak_ptr<kt::Workspace>> workspaces;
  const std::lock_guard lock(mutex);
  std::shared_ptr<kt::Workspace> workspace = workspaces[pool].lock();
  if (!workspace) {
    workspace = std::make_shared<kt::Workspace>(pool);
    workspaces[pool] = workspace;
  }
  return workspace;
}
