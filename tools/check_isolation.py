"""Checks the object code of a build: python tools/check_isolation.py build/dev

One extension holds code for every instruction set, so a CPU must never meet an instruction that dispatch did not ask it
for. That holds when

- an ISA object exports its one table and nothing else: a weak symbol, such as a std:: template, could be picked by the
  linker for baseline callers too, and a static initialiser would run before dispatch;
- every other object, the emulated rows among them, has no instruction above the x86-64 baseline;
- the extension exports nothing of the core: another library in the process could be bound to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Mnemonics above the x86-64 baseline (SSE2). `tzcnt` is left out: on an older CPU it runs as `bsf`, and compilers use
# that on purpose.
_ABOVE_BASELINE = re.compile(
    r"""(
      v(?!err$|erw$|mcall$|mmcall$)[a-z].*                                          # VEX and EVEX
    | k(add|and|andn|mov|not|or|ortest|shiftl|shiftr|test|unpck|xnor|xor)[bwdq]{1,2}  # AVX-512 masks
    | ldtilecfg | sttilecfg | tile.* | tdp.* | tcmm.*                               # AMX
    | andn | bextr | bls(i|msk|r) | bzhi | mulx | pdep | pext | rorx | sarx | shlx | shrx | adcx | adox
    | lzcnt | popcnt | movbe\w* | crc32\w* | cmpxchg16b
    | addsubp[sd] | haddp[sd] | hsubp[sd] | lddqu | movddup | movs[hl]dup           # SSE3
    | pabs[bwd] | palignr | ph(add|sub)(w|d|sw) | pmaddubsw | pmulhrsw | pshufb | psign[bwd]  # SSSE3
    | blendv?p[sd] | dpp[sd] | extractps | insertps | movntdqa | mpsadbw | packusdw | pblend(vb|w) | pcmpeqq
    | pextr[bdq] | phminposuw | pinsr[bdq] | p(max|min)(sb|sd|ud|uw) | pmov[sz]x.* | pmuldq | pmulld | ptest
    | round[ps][sd] | pcmp[ei]str[im] | pcmpgtq                                     # SSE4
    | aes.* | pclmul.* | sha(1|256).* | gf2p8.*
    )""",
    re.VERBOSE,
)
_PREFIXES = {"rep", "repz", "repnz", "lock", "notrack", "bnd", "data16", "addr32", "cs", "ds", "es", "fs", "gs", "ss"}
_ISA_DIRECTORY = re.compile(r"^kt_isa_(\w+)\.dir$")


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def exports(path: Path, *, dynamic: bool = False) -> set[str]:
    """Names that the linker, or the loader, sees in an object; weak ones included."""
    table = _run("nm", *(["--dynamic"] if dynamic else []), "--format=posix", "--defined-only", "--extern-only", path)
    return {line.split()[0] for line in table.splitlines() if line and not line.endswith(":")}


def isa_object_problems(path: Path, isa: str) -> Iterator[str]:
    expected = f"kt_isa_{isa}"
    names = exports(path)
    if expected not in names:
        yield f"{path}: does not export {expected}"
    for name in sorted(names - {expected}):
        yield f"{path}: exports {name}; put it into an unnamed namespace, and use no std:: templates here"
    sections = _run("objdump", "--section-headers", path)
    if re.search(r"\s\.(init_array|ctors)\b", sections):
        yield f"{path}: has a static initialiser; make the object constexpr"


def baseline_problems(path: Path) -> Iterator[str]:
    function = "?"
    for line in _run("objdump", "--disassemble", "--demangle", "--no-show-raw-insn", path).splitlines():
        if line.endswith(">:"):
            function = line[line.index("<") + 1 : -2]
            continue
        address, _, instruction = line.partition(":\t")
        words = instruction.split()
        while words and (words[0] in _PREFIXES or words[0].startswith("rex")):
            words.pop(0)
        if words and _ABOVE_BASELINE.fullmatch(words[0]):
            yield f"{path}: {words[0]} in {function} at {address.strip()} is above the x86-64 baseline"
            return  # one per object says enough


def rows(build: Path) -> dict[str, bool]:
    """Row name -> emulated, as CMake wrote them."""
    text = (build / "generated" / "isa_list.inc").read_text()
    return {name: flag == "1" for name, flag in re.findall(r"^KT_ISA_ROW\((\w+), ([01]),", text, re.MULTILINE)}


def problems(build: Path) -> Iterator[str]:
    emulated = rows(build)
    seen = set()
    for path in sorted((build / "CMakeFiles").rglob("*.o")):
        target = path.relative_to(build / "CMakeFiles").parts[0]
        match = _ISA_DIRECTORY.match(target)
        if match is None:
            if not target.endswith("_test.dir"):  # tests are not shipped
                yield from baseline_problems(path)
            continue
        isa = match.group(1)
        if isa not in emulated:
            continue  # left over from a build with other rows
        seen.add(isa)
        yield from isa_object_problems(path, isa)
        if emulated[isa]:
            yield from baseline_problems(path)
    for isa in sorted(emulated.keys() - seen):
        yield f"{build}: no object for {isa}; build first"
    for path in sorted((build / "python" / "kt_kernel").glob("*.so")):
        for name in sorted(exports(path, dynamic=True)):  # nanobind's exception types are shared between modules
            if "2kt" in name or name.startswith("kt_"):
                yield f"{path}: exports {name}"


def main() -> int:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "generated" / "isa_list.inc").exists():
        sys.exit("usage: python tools/check_isolation.py BUILD_DIRECTORY (build/dev after `make test-cpp`)")
    build = Path(sys.argv[1])
    found = list(problems(build))
    for problem in found:
        print(problem)
    print(f"isolation: {len(rows(build))} instruction sets, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
