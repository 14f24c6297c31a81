#include "cpu/topology.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

namespace {

namespace fs = std::filesystem;

// A machine as sysfs and procfs show it, in a directory that lives as long as the test.
class Machine {
 public:
  Machine() {
    std::string pattern = (fs::temp_directory_path() / "kt_topology_XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~Machine() { fs::remove_all(root_); }

  Machine& file(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
    return *this;
  }
  Machine& cpu(int id, int package, const std::string& siblings) {
    const std::string dir = "sys/devices/system/cpu/cpu" + std::to_string(id) + "/topology/";
    return file(dir + "physical_package_id", std::to_string(package)).file(dir + "core_cpus_list", siblings);
  }
  Machine& node(int id, const std::string& cpus, const std::string& distance = "") {
    const std::string dir = "sys/devices/system/node/node" + std::to_string(id) + "/";
    return file(dir + "cpulist", cpus).file(dir + "distance", distance);
  }
  Machine& online(const std::string& cpus, const std::string& nodes) {
    return file("sys/devices/system/cpu/online", cpus).file("sys/devices/system/node/online", nodes);
  }
  kt::Topology read(const std::vector<int>& affinity) const { return kt::read_topology(root_.string(), affinity); }

 private:
  fs::path root_;
};

std::vector<int> range(int end) {
  std::vector<int> ids;
  for (int i = 0; i < end; ++i) ids.push_back(i);
  return ids;
}

// "0:[0,1|4,5] 1:[2,3|6,7]": node id, one CPU per core, then the siblings.
std::string text(const kt::Topology& topology) {
  std::string out;
  for (const auto& node : topology.nodes) {
    out += (out.empty() ? "" : " ") + std::to_string(node.id) + ":[";
    for (size_t i = 0; i < node.cpus.size(); ++i) {
      if (i > 0) out += i == static_cast<size_t>(node.physical_cores) ? "|" : ",";
      out += std::to_string(node.cpus[i]);
    }
    out += "]";
  }
  return out;
}

// Two sockets of two cores with two threads each, numbered as Intel servers do: siblings are 4 apart.
void two_sockets(Machine& machine) {
  machine.online("0-7", "0-1").node(0, "0-1,4-5").node(1, "2-3,6-7");
  for (int id = 0; id < 8; ++id) {
    const int core = id % 4;
    machine.cpu(id, core / 2, std::to_string(core) + "," + std::to_string(core + 4));
  }
}

}  // namespace

KT_TEST(two_sockets_with_smt) {
  Machine machine;
  two_sockets(machine);
  const kt::Topology topology = machine.read(range(8));
  KT_CHECK_EQ(text(topology), "0:[0,1|4,5] 1:[2,3|6,7]");
  KT_CHECK_EQ(topology.packages, 2);
  KT_CHECK_EQ(topology.cpus(), 8);
  KT_CHECK_EQ(topology.physical_cores(), 4);
  KT_CHECK_EQ(topology.nodes[1].memory_id, 1);
  KT_CHECK_EQ(topology.cpu_quota, 0.0);
}

KT_TEST(siblings_numbered_side_by_side) {
  Machine machine;
  machine.online("0-3", "0").node(0, "0-3");
  for (int id = 0; id < 4; ++id) machine.cpu(id, 0, id < 2 ? "0-1" : "2-3");
  KT_CHECK_EQ(text(machine.read(range(4))), "0:[0,2|1,3]");
}

KT_TEST(sub_numa_clusters_share_a_package) {
  Machine machine;
  machine.online("0-3", "0-1").node(0, "0,2").node(1, "1,3");
  for (int id = 0; id < 4; ++id) machine.cpu(id, 0, std::to_string(id));
  const kt::Topology topology = machine.read(range(4));
  KT_CHECK_EQ(text(topology), "0:[0,2] 1:[1,3]");
  KT_CHECK_EQ(topology.packages, 1);
}

KT_TEST(offline_cpus_are_not_used) {
  Machine machine;
  two_sockets(machine);
  machine.online("0-4,6", "0-1").node(0, "0-1,4").node(1, "2-3,6").cpu(1, 0, "1").cpu(3, 1, "3");
  KT_CHECK_EQ(text(machine.read(range(8))), "0:[0,1|4] 1:[2,3|6]");
}

KT_TEST(an_affinity_mask_smaller_than_the_machine) {
  Machine machine;
  two_sockets(machine);
  KT_CHECK_EQ(text(machine.read({2, 6, 7})), "1:[2,7|6]");
  KT_CHECK_EQ(text(machine.read({4, 3})), "0:[4] 1:[3]");
  KT_CHECK_EQ(machine.read({2, 6, 7}).packages, 1);
}

KT_TEST(a_node_without_memory_takes_the_nearest_with) {
  Machine machine;
  machine.online("0-1", "0-2").file("sys/devices/system/node/has_memory", "1-2");
  machine.node(0, "0", "10 30 20").node(1, "1", "30 10 40").node(2, "", "20 40 10");
  const kt::Topology topology = machine.read(range(2));
  KT_CHECK_EQ(text(topology), "0:[0] 1:[1]");
  KT_CHECK_EQ(topology.nodes[0].memory_id, 2);
  KT_CHECK_EQ(topology.nodes[1].memory_id, 1);
}

KT_TEST(no_sysfs_gives_one_node_with_the_mask) {
  const kt::Topology topology = Machine().read({3, 5});
  KT_CHECK_EQ(text(topology), "-1:[3,5]");
  KT_CHECK_EQ(topology.nodes[0].memory_id, -1);
  KT_CHECK_EQ(topology.packages, 1);
}

KT_TEST(damaged_sysfs_gives_one_node_with_the_mask) {
  for (const char* list : {"garbage", "3-1", "0-", "0-99999999", "-4", "0,,1"}) {
    Machine machine;
    two_sockets(machine);
    machine.node(1, list);
    KT_CHECK_EQ(text(machine.read(range(4))), "-1:[0,1,2,3]");
  }
  Machine twice;
  two_sockets(twice);
  twice.node(1, "0-3");
  KT_CHECK_EQ(text(twice.read(range(4))), "-1:[0,1,2,3]");
}

KT_TEST(a_mask_that_contradicts_online_wins) {
  Machine machine;
  machine.online("0", "0").node(0, "0");
  KT_CHECK_EQ(text(machine.read({1})), "-1:[1]");
}

KT_TEST(cgroup_v2_quota_of_the_tightest_ancestor) {
  Machine machine;
  two_sockets(machine);
  machine.file("proc/self/cgroup", "0::/pods/a");
  machine.file("sys/fs/cgroup/pods/a/cpu.max", "max 100000");
  KT_CHECK_EQ(machine.read(range(8)).cpu_quota, 0.0);
  machine.file("sys/fs/cgroup/pods/cpu.max", "250000 100000");
  KT_CHECK_EQ(machine.read(range(8)).cpu_quota, 2.5);
  KT_CHECK_EQ(machine.read(range(8)).cpus(), 8);
}

KT_TEST(cgroup_quota_inside_a_container_that_sees_the_host_path) {
  Machine machine;
  machine.file("proc/self/cgroup", "0::/not/mounted/here").file("sys/fs/cgroup/cpu.max", "50000 100000");
  KT_CHECK_EQ(machine.read({0}).cpu_quota, 0.5);
}

KT_TEST(cgroup_v1_quota) {
  Machine machine;
  machine.file("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n3:cpuset:/");
  machine.file("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "300000");
  machine.file("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000");
  KT_CHECK_EQ(machine.read({0}).cpu_quota, 3.0);
  machine.file("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1");
  KT_CHECK_EQ(machine.read({0}).cpu_quota, 0.0);
}

KT_TEST(this_machine_has_a_cpu) {
  const kt::Topology topology = kt::read_topology();
  KT_CHECK(topology.cpus() >= 1);
  KT_CHECK(topology.physical_cores() >= 1);
  std::printf("  %s\n", text(topology).c_str());
}
