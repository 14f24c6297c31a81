// What the files of this folder share about arrays and workspaces.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>

#include "moe/workspace.h"

using WeightArray = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;

// bf16 [rows, columns]; TypeError or ValueError that names it.
const uint16_t* weights_of(const char* name, const WeightArray& array, int rows, int columns);
// f32 [rows].
const float* bias_of(const char* name, const WeightArray& array, int rows);
// A new array, to be filled at *data.
nanobind::ndarray<nanobind::numpy, float> matrix(int rows, int columns, float** data);

// All layers and linears of a pool share one workspace; it goes when the last of them does.
std::shared_ptr<kt::Workspace> shared_workspace(kt::Pool* pool);
