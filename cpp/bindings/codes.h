// What the files of this folder share about formats and codes.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "formats/format.h"
#include "moe/layer.h"

// ValueError that lists the formats.
kt::Format format_of(const std::string& name);

// "q4_k", or of different formats "q4_k/q4_k/q6_k": gate, up and down.
std::string formats_name(const kt::LayerConfig& config);

void bind_codes(nanobind::module_& m, nanobind::class_<kt::Layer>& layer);
void bind_grouped(nanobind::module_& m, nanobind::class_<kt::Layer>& layer);
void bind_gguf(nanobind::class_<kt::Layer>& layer);
