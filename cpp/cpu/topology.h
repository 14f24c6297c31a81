// Where the usable CPUs are: NUMA nodes, physical cores, SMT siblings.
#pragma once

#include <string>
#include <vector>

namespace kt {

struct TopologyNode {
  int id = -1;             // the operating system's number; -1 when it does not tell
  int memory_id = -1;      // the node to allocate on: `id`, or the nearest one with memory; -1 = wherever
  std::vector<int> cpus;   // in the order to pin to: one CPU per physical core first, then the SMT siblings
  int physical_cores = 0;  // how many of `cpus` come before the siblings
};

struct Topology {
  std::vector<TopologyNode> nodes;  // only those with a usable CPU, by id; never empty
  int packages = 1;
  double cpu_quota = 0;  // CPUs' worth of time that the cgroup allows; 0 = no limit

  int cpus() const;
  int physical_cores() const;
};

// Reads <root>/sys and <root>/proc. Usable are the CPUs of `affinity` that are online. Never fails: where sysfs is
// missing or contradicts itself (containers), the answer is one node with the CPUs of `affinity`.
Topology read_topology(const std::string& root, const std::vector<int>& affinity);

// This process on this machine, as it is now.
Topology read_topology();

}  // namespace kt
