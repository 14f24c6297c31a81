#pragma once

#include <nanobind/nanobind.h>

#include "moe/layer.h"

void bind_packed(nanobind::class_<kt::Layer>& layer);
