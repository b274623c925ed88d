"""Packages of an image that were made for another vendor. In: the installed files. Out: what is wrong.

A package with compiled files is foreign if some are for another vendor and none is for the vendor under test:
by device code, by the runtimes that it needs, by the vendor in a library's name (bitsandbytes). Inline
assembly of another vendor in sources that compile on first use is found too. Nothing is imported or loaded.
"""

import fnmatch
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import installed
from vendors import elf, software

SOURCES = (".cu", ".cuh", ".hip", ".py", ".pyx")
LARGEST_SOURCE_BYTES = 1 << 20
# torch and Triton have code for both vendors in one source tree, and choose when they are built or called.
BOTH = ("torch", "triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")
# PTX in an assembly string: an instruction with its type, as `cvt.rn.bf16x2.f32`, `ld.global.v4.b32`.
PTX = re.compile(
    r"""["'][^"'\n]*\b(?:cp\.async|mma\.sync|wgmma\.|tcgen05\.|mbarrier\.|ldmatrix\.|setmaxnreg|bar\.sync
    |membar\.
    |cvt\.(?:rn|rz|rna|rp|rm|sat|pack)\b|(?:ld|st|red|atom)\.(?:global|shared|acquire|release|relaxed)\b
    |mov\.[bus](?:16|32|64)\b|(?:add|mul|fma|lop3|prmt|shfl)\.(?:rn|b32|sync|f32|f16x2|bf16x2)\b)""",
    re.VERBOSE,
)
GCN = re.compile(
    r"""["'][^"'\n]*\b(?:v_[a-z0-9]+_[a-z0-9_]+|s_waitcnt|buffer_load_[a-z0-9]+|ds_read_[a-z0-9]+)\b"""
)
ASSEMBLY = re.compile(r"\basm\b\s*(?:volatile|__volatile__)?\s*\(|inline_asm_elementwise\s*\(|InlineAsm\b")
# A quick look first.
MARKS = (b"asm volatile", b"asm(", b"asm (", b"__volatile__", b"inline_asm", b"InlineAsm")
# A file that asks which vendor it runs on has a way around its assembly.
ASKS = re.compile(r"USE_ROCM|__HIP|is_hip|is_rocm|version\.hip|HIP_PLATFORM|is_cuda\(\)|_is_cuda")


@dataclass(frozen=True)
class Part:
    """A compiled file: for which vendors it has code, or needs a runtime."""

    path: Path
    vendors: frozenset[str]


def problems(vendor: str) -> tuple[list[str], list[str]]:
    """The problems of packages with parts for another vendor, and those packages that may have such parts.

    Args:
        vendor: The image's.
    """
    wrong: list[str] = []
    tolerated: list[str] = []
    for name, distribution in sorted(installed.named_distributions().items()):
        for problem in _of_package(vendor, name, distribution):
            excuse = _first(name, software.of(vendor).TOLERATED)
            (tolerated if excuse else wrong).append(f"{name} {distribution.version}: {excuse or problem}")
    return wrong, list(dict.fromkeys(tolerated))


def _of_package(vendor: str, name: str, distribution: importlib.metadata.Distribution) -> Iterator[str]:
    if named := _first(name, software.of(vendor).FOREIGN):
        yield named
        return
    parts = [part for path in installed.shared_objects_of(distribution) if (part := look(path)).vendors]
    others = [part for part in parts if vendor not in part.vendors]
    if others and len(others) == len(parts):
        kinds = " and ".join(sorted({one for part in others for one in part.vendors}))
        names = ", ".join(sorted(part.path.name for part in others)[:3])
        yield f"its compiled files are for {kinds} alone ({names})"
    yield from _assembly(vendor, name, distribution)


def _first(name: str, patterns: Mapping[str, str]) -> str | None:
    """The words of the first pattern that a package's name fits."""
    return next((words for pattern, words in patterns.items() if fnmatch.fnmatchcase(name, pattern)), None)


def look(path: Path) -> Part:
    """The vendors of a compiled file; none for a plain library, or for a file that is gone."""
    found = set(_named(path.name))
    if path.is_file() and path.stat().st_size:
        with elf.mapped(path) as data:
            names = {section.name for section in elf.sections(data)}
            needed = {software.stem(library) for library in elf.needed(data)}
        found |= {one for one in software.GPU_VENDORS if names & {*software.of(one).CODE_SECTIONS}}
        found |= {one for one in software.GPU_VENDORS if needed & software.runtimes(one)}
    return Part(path, frozenset(found))


def _named(file: str) -> Iterator[str]:
    """The vendor that a file's name ends with: libbitsandbytes_cuda126.so, libbitsandbytes_rocm72.so."""
    found = re.match(r"lib\w+_(cuda|rocm|hip)\d*\.so", file)
    if found:
        yield "nvidia" if found[1] == "cuda" else "amd"


def _assembly(vendor: str, name: str, distribution: importlib.metadata.Distribution) -> Iterator[str]:
    """Files with the assembly of another vendor and no question of which vendor it is."""
    if name in BOTH or vendor == "cpu":
        return
    language, pattern = ("PTX", PTX) if vendor == "amd" else ("assembly of AMD GPUs", GCN)
    for path in _sources(distribution):
        data = path.read_bytes()
        if not any(mark in data for mark in MARKS):
            continue
        text = data.decode("utf-8", "replace")
        if ASSEMBLY.search(text) and pattern.search(text) and not ASKS.search(text):
            yield f"{language} inline in {path.name}, and no other way for vendor {vendor}"
            return


def _sources(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    for file in distribution.files or ():
        if file.suffix in SOURCES:
            path = Path(str(distribution.locate_file(file)))
            if path.is_file() and path.stat().st_size <= LARGEST_SOURCE_BYTES:
                yield path
