#include "cpu/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

namespace kt {
namespace {

constexpr int kMaxCpus = 1 << 16;  // bounds what a damaged list can make us allocate

std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) return std::nullopt;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "0-3,8" as sysfs writes it; an empty file is an empty list.
std::optional<std::set<int>> parse_list(const std::string& text) {
  std::set<int> ids;
  std::istringstream stream(text);
  for (std::string range; std::getline(stream, range, ',');) {
    const size_t dash = range.find('-');
    const auto first = parse_number<int>(std::string_view(range).substr(0, dash));
    const auto last = dash == std::string::npos ? first : parse_number<int>(std::string_view(range).substr(dash + 1));
    if (!first || !last || *first < 0 || *first > *last || *last >= kMaxCpus) return std::nullopt;
    for (int id = *first; id <= *last; ++id) ids.insert(ids.end(), id);
  }
  return ids;
}

std::optional<std::set<int>> read_list(const std::string& path) {
  const auto text = read_file(path);
  return text ? parse_list(*text) : std::nullopt;
}

std::optional<int> read_int(const std::string& path) {
  const auto text = read_file(path);
  return text ? parse_number<int>(*text) : std::nullopt;
}

std::string cpu_dir(const std::string& root, int cpu) {
  return root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
}

// A core is named by its lowest sibling. core_id will not do: it repeats across dies and packages.
int core_of(const std::string& root, int cpu) {
  for (const char* file : {"core_cpus_list", "thread_siblings_list"}) {
    const auto siblings = read_list(cpu_dir(root, cpu) + file);
    if (siblings && siblings->count(cpu)) return *siblings->begin();
  }
  return cpu;
}

TopologyNode make_node(const std::string& root, const std::set<int>& cpus) {
  std::map<int, std::vector<int>> by_core;
  for (int cpu : cpus) by_core[core_of(root, cpu)].push_back(cpu);
  TopologyNode node;
  node.physical_cores = static_cast<int>(by_core.size());
  for (size_t sibling = 0; node.cpus.size() < cpus.size(); ++sibling) {
    for (const auto& [core, threads] : by_core) {
      if (sibling < threads.size()) node.cpus.push_back(threads[sibling]);
    }
  }
  return node;
}

int nearest_with_memory(const std::string& nodes_dir, int id, const std::set<int>& online,
                        const std::set<int>& memory) {
  if (memory.count(id)) return id;
  const auto text = read_file(nodes_dir + "node" + std::to_string(id) + "/distance");
  std::istringstream distances(text.value_or(""));
  int best = -1;
  int best_distance = 0;
  for (int other : online) {  // one column per online node
    int distance;
    if (!(distances >> distance)) break;
    if (memory.count(other) && (best < 0 || distance < best_distance)) {
      best = other;
      best_distance = distance;
    }
  }
  return best;
}

// Empty when sysfs does not place every usable CPU on exactly one node.
std::vector<TopologyNode> read_nodes(const std::string& root, const std::set<int>& usable) {
  const std::string dir = root + "/sys/devices/system/node/";
  const auto online = read_list(dir + "online");
  if (!online) return {};
  const std::set<int> memory = read_list(dir + "has_memory").value_or(*online);

  std::vector<TopologyNode> nodes;
  size_t placed = 0;
  for (int id : *online) {
    const auto listed = read_list(dir + "node" + std::to_string(id) + "/cpulist");
    if (!listed) return {};
    std::set<int> cpus;
    std::set_intersection(listed->begin(), listed->end(), usable.begin(), usable.end(),
                          std::inserter(cpus, cpus.end()));
    if (cpus.empty()) continue;
    placed += cpus.size();
    nodes.push_back(make_node(root, cpus));
    nodes.back().id = id;
    nodes.back().memory_id = nearest_with_memory(dir, id, *online, memory);
  }
  return placed == usable.size() ? nodes : std::vector<TopologyNode>{};
}

// Quota over period of one cgroup directory, v2 (cpu.max: "150000 100000" or "max 100000") or v1.
std::optional<double> read_quota(const std::string& dir) {
  std::string quota_text, period_text;
  if (const auto max = read_file(dir + "/cpu.max")) {
    std::istringstream(*max) >> quota_text >> period_text;
  } else {
    quota_text = read_file(dir + "/cpu.cfs_quota_us").value_or("");
    period_text = read_file(dir + "/cpu.cfs_period_us").value_or("");
  }
  const auto quota = parse_number<long>(quota_text);
  const auto period = parse_number<long>(period_text);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// The tightest quota on the way from `path` up to the mount: every ancestor limits too. Inside a container the path may
// name directories of the host that are not mounted; the walk then still ends at the mount, which is the container's.
double tightest_quota(const std::string& mount, std::string path) {
  double tightest = 0;
  while (true) {
    const auto quota = read_quota(mount + path);
    if (quota && (tightest == 0 || *quota < tightest)) tightest = *quota;
    if (path.empty()) return tightest;
    path.resize(path.find_last_of('/'));
  }
}

double read_cpu_quota(const std::string& root) {
  double tightest = 0;
  std::istringstream lines(read_file(root + "/proc/self/cgroup").value_or("0::/"));
  for (std::string line; std::getline(lines, line);) {  // "0::/path" is v2, "4:cpu,cpuacct:/path" is v1
    const size_t colon = line.find(':');
    const size_t second = colon == std::string::npos ? colon : line.find(':', colon + 1);
    if (second == std::string::npos || second + 1 >= line.size() || line[second + 1] != '/') continue;
    const std::string controllers = line.substr(colon + 1, second - colon - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
    const double quota = tightest_quota(mount, path);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  }
  return tightest;
}

std::vector<int> process_affinity() {
  for (int capacity = 1024; capacity <= kMaxCpus; capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    if (!set) break;
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    const bool known = sched_getaffinity(0, bytes, set) == 0;  // EINVAL while the mask is too small
    std::vector<int> cpus;
    for (int cpu = 0; known && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) return cpus;
  }
  std::vector<int> cpus(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  return cpus;
}

}  // namespace

int Topology::cpus() const {
  int total = 0;
  for (const TopologyNode& node : nodes) total += static_cast<int>(node.cpus.size());
  return total;
}

int Topology::physical_cores() const {
  int total = 0;
  for (const TopologyNode& node : nodes) total += node.physical_cores;
  return total;
}

Topology read_topology(const std::string& root, const std::vector<int>& affinity) {
  const std::set<int> mask(affinity.begin(), affinity.end());
  std::set<int> usable = mask;
  if (const auto online = read_list(root + "/sys/devices/system/cpu/online")) {
    std::erase_if(usable, [&](int cpu) { return !online->count(cpu); });
    if (usable.empty()) usable = mask;
  }

  Topology topology;
  topology.nodes = read_nodes(root, usable);
  if (topology.nodes.empty()) topology.nodes.push_back(make_node(root, usable));
  std::set<int> packages;
  for (int cpu : usable) packages.insert(read_int(cpu_dir(root, cpu) + "physical_package_id").value_or(0));
  topology.packages = std::max<int>(1, static_cast<int>(packages.size()));
  topology.cpu_quota = read_cpu_quota(root);
  return topology;
}

Topology read_topology() { return read_topology("", process_affinity()); }

}  // namespace kt
