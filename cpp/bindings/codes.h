// What the files of this folder share about formats and codes.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "formats/format.h"
#include "moe/layer.h"

// ValueError that lists the formats.
kt::Format format_of(const std::string& name);

void bind_codes(nanobind::module_& m, nanobind::class_<kt::Layer>& layer);
void bind_grouped(nanobind::module_& m, nanobind::class_<kt::Layer>& layer);
