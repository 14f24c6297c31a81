# The one table of instruction sets. Dispatch, the build, the tests and the checks all read it; nothing else lists them.
#
# A row is a list of features, and a feature is one compiler flag here and one CPUID bit of the same name in
# cpp/cpu/features.h. So a row cannot use an instruction that dispatch does not ask the CPU for.

# feature -> flag
set(KT_FLAG_popcnt -mpopcnt)
set(KT_FLAG_avx2 -mavx2)
set(KT_FLAG_fma -mfma)
set(KT_FLAG_f16c -mf16c)
set(KT_FLAG_bmi1 -mbmi)
set(KT_FLAG_bmi2 -mbmi2)
set(KT_FLAG_avx512f -mavx512f)
set(KT_FLAG_avx512cd -mavx512cd)
set(KT_FLAG_avx512bw -mavx512bw)
set(KT_FLAG_avx512dq -mavx512dq)
set(KT_FLAG_avx512vl -mavx512vl)
set(KT_FLAG_avx512_vnni -mavx512vnni)
set(KT_FLAG_avx512_vbmi -mavx512vbmi)
set(KT_FLAG_avx512_bf16 -mavx512bf16)
set(KT_FLAG_amx_tile -mamx-tile)
set(KT_FLAG_amx_int8 -mamx-int8)
set(KT_FLAG_amx_bf16 -mamx-bf16)

# Each set contains the one before it.
set(avx2 popcnt avx2 fma f16c bmi1 bmi2)
set(avx512_base ${avx2} avx512f avx512cd avx512bw avx512dq avx512vl)
set(avx512_vnni ${avx512_base} avx512_vnni)
set(avx512_vbmi ${avx512_vnni} avx512_vbmi)
set(avx512_bf16 ${avx512_vbmi} avx512_bf16)
set(amx ${avx512_bf16} amx_tile amx_int8 amx_bf16)

# The rows, best first: at import the first one the CPU can run is chosen. The emulated twins need nothing, run the same
# algorithm with the same vector shape in plain C++, and are chosen only by name.
set(KT_ISA_NATIVE amx avx512_bf16 avx512_vbmi avx512_vnni avx512_base avx2)
set(KT_ISA_EMULATED emu_amx emu_avx512_bf16 emu_avx512_vnni emu_avx512_base emu)

set(KT_ISAS ${KT_ISA_NATIVE} ${KT_ISA_EMULATED} CACHE STRING "Rows to build (default: all), or native")
include(cmake/isa_choice.cmake)
kt_choose_isas(KT_BUILT_ISAS)
message(STATUS "Instruction sets: ${KT_BUILT_ISAS}")

# kt_add_isa(<row>): object library kt_isa_<row> with cpp/kernels/instances.cc compiled for that row, and its line of
# isa_list.inc appended to KT_ISA_LIST.
function(kt_add_isa name)
  string(TOUPPER ${name} upper)
  set(definitions KT_ISA=${name} KT_ISA_NAME="${name}" KT_ISA_${upper}=1)
  set(flags)
  set(level -O3)
  if(name IN_LIST KT_ISA_NATIVE)
    foreach(feature IN LISTS ${name})
      list(APPEND flags ${KT_FLAG_${feature}})
    endforeach()
    if("avx512f" IN_LIST ${name})
      list(APPEND flags -mprefer-vector-width=512)  # what the intrinsics around such a loop already cost
    endif()
    list(TRANSFORM ${name} PREPEND ::kt::feature:: OUTPUT_VARIABLE needs)
    list(JOIN needs " | " needs)
    set(emulated 0)
  else()
    list(APPEND definitions KT_EMULATED=1)
    set(level -O2)  # twice as fast to compile as -O3
    set(needs 0)
    set(emulated 1)
  endif()

  if(flags)
    string(JOIN " " CMAKE_REQUIRED_FLAGS ${flags})
    check_cxx_source_compiles("int main() { return 0; }" KT_COMPILES_${upper})
    if(NOT KT_COMPILES_${upper})
      string(JOIN " " flags ${flags})
      message(FATAL_ERROR
        "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} does not know the flags of '${name}': ${flags}\n"
        "Use gcc >= 12 or clang >= 14 (-DCMAKE_CXX_COMPILER=...), or leave the row out with -DKT_ISAS=...")
    endif()
  endif()

  add_library(kt_isa_${name} OBJECT cpp/kernels/instances.cc)
  target_compile_definitions(kt_isa_${name} PRIVATE ${definitions})
  # No LTO: it may clone code between rows. No exceptions, RTTI or guards: they bring weak symbols that the linker would
  # share with baseline code.
  target_compile_options(kt_isa_${name} PRIVATE
    ${flags} $<IF:$<CONFIG:Debug>,-O1,${level}> -fno-lto -fno-exceptions -fno-rtti -fno-threadsafe-statics
    -ffp-contract=off)  # packed weights must not depend on the CPU that packs them
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Left alone, gcc 12 sums products before it adds them to the accumulators and spills: avx2 int8 tiles ran at 0.94 of
    # the FMA peak instead of 1.40, int4 at 1.44 instead of 2.23.
    # Its intrinsics headers use an undefined register on purpose and warn about it (gcc bug 105593).
    target_compile_options(kt_isa_${name} PRIVATE -flive-range-shrinkage -fno-tree-reassoc -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  target_link_libraries(kt_isa_${name} PRIVATE kt_options)
  set(KT_ISA_LIST "${KT_ISA_LIST}KT_ISA_ROW(${name}, ${emulated}, ${needs})\n" PARENT_SCOPE)
endfunction()

# kt_add_isa_test(<row> <source>): object library <row>_<source name>_test compiled exactly as kt_isa_<row> is.
function(kt_add_isa_test name source)
  get_filename_component(stem ${source} NAME_WE)
  set(target ${name}_${stem}_test)
  add_library(${target} OBJECT ${source})
  target_compile_definitions(${target} PRIVATE $<TARGET_PROPERTY:kt_isa_${name},COMPILE_DEFINITIONS>)
  target_compile_options(${target} PRIVATE $<TARGET_PROPERTY:kt_isa_${name},COMPILE_OPTIONS>)
  target_link_libraries(${target} PRIVATE kt_options)
endfunction()
