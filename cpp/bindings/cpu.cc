// CPU features, instruction sets and topology.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "cpu/features.h"
#include "cpu/topology.h"
#include "kernels/dispatch.h"
#include "kernels/kernel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

const char* c_str(const std::optional<std::string>& text) { return text ? text->c_str() : nullptr; }

// Whatever keeps a variant from running has to surface as ImportError: callers guard only that.
void raise_import_error(const kt::Status& status) {
  if (!status.is_ok()) throw nb::import_error(status.message().c_str());
}

kt::FeatureSet parse_features(const std::optional<std::string>& names) {
  kt::FeatureSet set = kt::cpu_features();
  if (names) {
    const kt::Status status = kt::parse_features(*names, &set);
    if (!status.is_ok()) throw nb::value_error(status.message().c_str());
  }
  return set;
}

}  // namespace

void bind_cpu(nb::module_& m) {
  nb::class_<kt::VariantInfo>(m, "Variant", "One instruction set of this build.")
      .def_ro("name", &kt::VariantInfo::name)
      .def_ro("emulated", &kt::VariantInfo::emulated)
      .def_prop_ro("needs", [](const kt::VariantInfo& v) { return kt::feature_names(v.needs); })
      .def_ro("runnable", &kt::VariantInfo::runnable)
      .def_ro("reason", &kt::VariantInfo::reason);

  m.def(
      "cpu_features", [] { return kt::feature_names(kt::cpu_features()); },
      "Features of this CPU that the operating system supports, separated by spaces.");
  m.def(
      "variants", [](std::optional<std::string> features) { return kt::variants(parse_features(features)); },
      "features"_a = nb::none(), "Every instruction set of this build, best first, and whether it runs here.");
  m.def(
      "choose_variant",
      [](std::optional<std::string> forced, std::optional<std::string> features) {
        const char* name = nullptr;
        raise_import_error(kt::choose(c_str(forced), parse_features(features), &name));
        return name;
      },
      "forced"_a = nb::none(), "features"_a = nb::none(),
      "The variant that a CPU with these features (default: this one) would get. Changes nothing.");
  m.def(
      "select_variant",
      [](std::optional<std::string> forced) {
        const kt::IsaTable* table = nullptr;
        raise_import_error(kt::select(c_str(forced), &table));
        kt::set_active(table);
        return table->name;
      },
      "forced"_a = nb::none(), "Makes a variant the one that computes, and returns its name.");

  nb::class_<kt::TopologyNode>(m, "TopologyNode", "A NUMA node with CPUs that this process may use.")
      .def_ro("id", &kt::TopologyNode::id)
      .def_ro("memory_id", &kt::TopologyNode::memory_id)
      .def_ro("cpus", &kt::TopologyNode::cpus)
      .def_ro("physical_cores", &kt::TopologyNode::physical_cores);
  nb::class_<kt::Topology>(m, "Topology", "The CPUs that this process may use.")
      .def_ro("nodes", &kt::Topology::nodes)
      .def_ro("packages", &kt::Topology::packages)
      .def_ro("cpu_quota", &kt::Topology::cpu_quota)
      .def_prop_ro("cpus", &kt::Topology::cpus)
      .def_prop_ro("physical_cores", &kt::Topology::physical_cores);
  m.def("topology", [] { return kt::read_topology(); }, "The topology as it is now: affinity and cgroup may change.");
}
