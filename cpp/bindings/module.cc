// The extension kt_kernel._core; one bind_* function per file of this folder.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_cpu(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_runtime(nb::module_& m);
void bind_limits(nb::module_& m);
void bind_dense(nb::module_& m);
void bind_decoder(nb::module_& m);

NB_MODULE(_core, m) {
  // A pool in a global of some module is still there when the interpreter ends; users should not read of leaks then.
  nb::set_leak_warnings(false);
  m.doc() = "The native core of kt-kernel.";
  m.attr("__version__") = KT_VERSION;
  bind_cpu(m);
  bind_moe(m);
  bind_dense(m);
  bind_decoder(m);
  bind_runtime(m);
  bind_limits(m);
}
