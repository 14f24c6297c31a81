# The extension kt_kernel._core and the nanobind backends it loads.
#
# nanobind's split mode keeps _core on the stable ABI of Python 3.10, so that it is built once for every version; what
# depends on the version is a backend module. We ship our own inside the package, one file per Python side by side
# (kt_kernel/_nanobind.cpython-3XX-*.so), so that no further package has to be installed.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

# A package folder without __init__.py: the stub generator can import _core from it, and nothing else runs.
set(package ${CMAKE_CURRENT_BINARY_DIR}/python/kt_kernel)

# Calls of these get the versions of glibc 2.28 and older: cpp/portable/old_symbols.cc.
set(wrapped dlerror dlopen dlsym pthread_create pthread_join pthread_sigmask pthread_setaffinity_np pthread_setname_np
  _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE
  _ZNSt15__exception_ptr13exception_ptr9_M_addrefEv _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv)
list(TRANSFORM wrapped PREPEND -Wl,--wrap=)
function(kt_use_old_symbols target)
  target_sources(${target} PRIVATE cpp/portable/old_symbols.cc)
  target_link_options(${target} PRIVATE ${wrapped})
endfunction()

file(GLOB binding_sources CONFIGURE_DEPENDS cpp/bindings/*.cc)
nanobind_add_module(_core NB_SUPPRESS_WARNINGS BACKEND_MODULE kt_kernel._nanobind ${binding_sources})
target_link_libraries(_core PRIVATE kt_core)
target_link_options(_core PRIVATE -Wl,--exclude-libs,ALL)
kt_use_old_symbols(_core)
if(NOT SKBUILD_PROJECT_VERSION_FULL)
  set(SKBUILD_PROJECT_VERSION_FULL 0+cmake)  # built without pip; pyproject.toml has the version
endif()
target_compile_definitions(_core PRIVATE KT_VERSION="${SKBUILD_PROJECT_VERSION_FULL}")
set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${package})
install(TARGETS _core LIBRARY DESTINATION kt_kernel)

function(kt_add_backend interpreter)
  execute_process(
    COMMAND ${interpreter} -c "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';')"
    OUTPUT_VARIABLE facts OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  list(GET facts 0 include)
  list(GET facts 1 suffix)
  if(TARGET kt_backend${suffix})
    return()
  endif()
  if(NOT EXISTS ${include}/Python.h)
    message(FATAL_ERROR "${interpreter} has no headers (${include}/Python.h): install its development package")
  endif()
  add_library(kt_backend${suffix} MODULE ${NB_DIR}/src/nb_backend.cpp ${NB_DIR}/src/nb_combined.cpp)
  target_include_directories(kt_backend${suffix} SYSTEM PRIVATE
    ${include} ${NB_DIR}/include ${NB_DIR}/ext/robin_map/include)
  target_compile_definitions(kt_backend${suffix} PRIVATE NB_BUILD NB_BACKEND_NAME=_nanobind)
  target_compile_options(kt_backend${suffix} PRIVATE
    -w -Os -fno-strict-aliasing -fno-stack-protector -ffunction-sections -fdata-sections)
  target_link_options(kt_backend${suffix} PRIVATE -Wl,--gc-sections -s)
  kt_use_old_symbols(kt_backend${suffix})
  set_target_properties(kt_backend${suffix} PROPERTIES
    PREFIX "" OUTPUT_NAME _nanobind SUFFIX ${suffix} LIBRARY_OUTPUT_DIRECTORY ${package})
  add_dependencies(_core kt_backend${suffix})
  install(TARGETS kt_backend${suffix} LIBRARY DESTINATION kt_kernel)
endfunction()
foreach(interpreter IN LISTS Python_EXECUTABLE KT_BACKEND_PYTHONS)
  kt_add_backend(${interpreter})
endforeach()

nanobind_add_stub(_core_stub MODULE kt_kernel._core OUTPUT ${package}/_core.pyi
  PYTHON_PATH ${CMAKE_CURRENT_BINARY_DIR}/python DEPENDS _core)
install(FILES ${package}/_core.pyi DESTINATION kt_kernel)
