// The limits of this machine.
#include "moe/limits.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <new>
#include <optional>
#include <string>

#include "bindings/status.h"
#include "kernels/dispatch.h"
#include "kernels/kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

struct Unit {
  const char* name;
  kt::PeakLoop kt::LimitLoops::* loop;
};

constexpr Unit kUnits[] = {
    {"fma_f32", &kt::LimitLoops::fma_f32},
    {"dot_bf16", &kt::LimitLoops::dot_bf16},
    {"dot_u8s8", &kt::LimitLoops::dot_u8s8},
    {"tile_bf16", &kt::LimitLoops::tile_bf16},
    {"tile_u8s8", &kt::LimitLoops::tile_u8s8},
    {"tile_bf16_l1", &kt::LimitLoops::tile_bf16_l1},
    {"tile_u8s8_l1", &kt::LimitLoops::tile_u8s8_l1},
    {"tile_bf16_2x2", &kt::LimitLoops::tile_bf16_2x2},
    {"tile_u8s8_2x2", &kt::LimitLoops::tile_u8s8_2x2},
};

void check_seconds(double seconds) {
  if (!(seconds > 0 && seconds <= 600)) throw nb::value_error("seconds must be above 0 and at most 600");
}

kt::ReadProbe make_probe(kt::Pool& pool, double gigabytes) {
  if (!(gigabytes > 0 && gigabytes <= 1024)) throw nb::value_error("gigabytes must be above 0 and at most 1024");
  kt::ReadProbe probe;
  raise_of([&] { return kt::ReadProbe::create(pool, static_cast<size_t>(gigabytes * 1e9), &probe); });
  return probe;
}

double read_bandwidth(const kt::ReadProbe& probe, double seconds) {
  check_seconds(seconds);
  double bytes_per_s = 0;
  raise_of([&] { return probe.measure(kt::active()->limits, seconds, &bytes_per_s); });
  return bytes_per_s / 1e9;
}

std::optional<double> peak(kt::Pool& pool, const std::string& name, double seconds) {
  check_seconds(seconds);
  std::string known;
  for (const Unit& unit : kUnits) {
    if (name == unit.name) {
      const kt::PeakLoop loop = kt::active()->limits.*unit.loop;
      if (!loop) return std::nullopt;
      double ops_per_s = 0;
      raise_of([&] { return kt::measure_peak(pool, loop, seconds, &ops_per_s); });
      return ops_per_s;
    }
    known += known.empty() ? "" : ", ";
    known += unit.name;
  }
  throw nb::value_error(("unit '" + name + "' is unknown; the units are: " + known).c_str());
}

}  // namespace

void bind_limits(nb::module_& m) {
  nb::class_<kt::ReadProbe>(m, "ReadProbe",
                            "Memory that all workers of a pool read, to see what the machine gives just now.")
      .def(
          "__init__",
          [](kt::ReadProbe* self, kt::Pool& pool, double gigabytes) {
            new (self) kt::ReadProbe(make_probe(pool, gigabytes));
          },
          "pool"_a, "gigabytes"_a, nb::keep_alive<1, 2>())
      .def("measure", &read_bandwidth, "seconds"_a, "GB/s of all workers together, best round.");
  m.def(
      "measure_read_bandwidth",
      [](kt::Pool& pool, double gigabytes, double seconds) {
        return read_bandwidth(make_probe(pool, gigabytes), seconds);
      },
      "pool"_a, "gigabytes"_a, "seconds"_a, "ReadProbe(pool, gigabytes).measure(seconds).");
  m.def("measure_peak", &peak, "pool"_a, "unit"_a, "seconds"_a,
        "Operations per second of one arithmetic unit on all workers (a multiply-add is 2), or None where the active "
        "variant has no such unit. Units: fma_f32, dot_bf16, dot_u8s8, tile_bf16, tile_u8s8; tile_bf16_l1, "
        "tile_u8s8_l1: with the loads of a matrix product, from L1; tile_bf16_2x2, tile_u8s8_2x2: with all eight tile "
        "registers in use.");
}
