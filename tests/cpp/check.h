// A test runner of one header: KT_TEST(name) { KT_CHECK(a == b); }. Every *_test.cc is an executable of its own, and
// runs the tests whose name contains its first argument (default: all).
#pragma once

#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace kt_test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}

inline int failures_of_current_test = 0;

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  std::printf("  %s:%d: %s\n", file, line, what.c_str());
  ++failures_of_current_test;
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " is not " << b;
  fail(file, line, what.str());
}

}  // namespace kt_test

#define KT_TEST(name)                                                                       \
  static void kt_test_##name();                                                             \
  [[maybe_unused]] static const bool kt_added_##name = kt_test::add(#name, kt_test_##name); \
  static void kt_test_##name()

// A failed check is counted and the test goes on.
#define KT_CHECK(condition)                                          \
  do {                                                               \
    if (!(condition)) kt_test::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define KT_CHECK_EQ(a, b) kt_test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

int main(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const auto& test : kt_test::tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    kt_test::failures_of_current_test = 0;
    test.body();
    const bool ok = kt_test::failures_of_current_test == 0;
    ++(ok ? passed : failed);
    std::printf("%s %s\n", ok ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
