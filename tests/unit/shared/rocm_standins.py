"""Stand-ins for what AMD and PyTorch publish for ROCm: real wheels, packages and libraries of a few kB.

In: versions. Out: files. Names, versions, tags, requirements, places of files and what an import does are
those of the real ones, as their sources say; the libraries are compiled here, answer version calls and carry
device code sections for the architectures. They compute nothing.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import device_code
import small_wheels

ARCHS = ("gfx90a", "gfx942", "gfx950")

# One C function a library, so that each tells its version as the suites ask for it.
CALLS = {
    "libamdhip64": "int hipRuntimeGetVersion(int *v) { *v = %(hip)d; return 0; }",
    "librccl": "int ncclGetVersion(int *v) { *v = %(rccl)d; return 0; }",
    "librocblas": "#include <string.h>\nint rocblas_get_version_string(char *t, size_t n)"
    ' { strncpy(t, "5.2.0", n); return 0; }',
    "libhipblaslt": "int hipblasLtGetVersion(void *h, int *v) { *v = 100202; return h == 0; }",
    "libMIOpen": "#include <stddef.h>\nint miopenGetVersion(size_t *a, size_t *b, size_t *c)"
    " { *a = 3; *b = 5; *c = 1; return 0; }",
    "libhsa-runtime64": "int hsa_init(void) { return 4096; }",
    "libamd_comgr": "void amd_comgr_get_version(size_t *a, size_t *b) { *a = 3; *b = 0; }",
    "librocm_kpack": "int kpack_open(const char *p, void **a) { return 0; }",
    "librocm_smi64": "int rsmi_init(long f) { return 8; }",
    "libtorch_hip": "int torch_hip_is_a_stand_in = 1;",
    "libtorch_cpu": "int torch_cpu_is_a_stand_in = 1;",
    "libnuma": "int numa_available(void) { return -1; }",
    "libdrm": "void drmGetVersion(void) { }",
    "libdrm_amdgpu": "int amdgpu_device_initialize(void) { return -1; }",
    "libamd_smi": "int amdsmi_init(unsigned long f) { return %(smi)d; }",
}
WITH_CODE = ("librccl", "librocblas", "libtorch_hip", "flash_attn_2_cuda")
# AMDSMI_STATUS_DRIVER_NOT_LOADED of amdsmi.h.
NO_DRIVER = 34
ROCM_LIBRARIES = (
    *(
        "libamd_comgr",
        "libhsa-runtime64",
        "libamdhip64",
        "librccl",
        "librocblas",
        "libhipblaslt",
        "libMIOpen",
    ),
    "librocm_smi64",
)
KERNELS = {
    "lib/rocblas/library/Kernels.so-000-{arch}.hsaco",
    "lib/hipblaslt/library/TensileLibrary_{arch}.co",
    "share/miopen/db/{arch}.db.txt",
}

TORCH = '''"""A stand-in for torch {version}: it loads ROCm's libraries, and imports what torch imports."""
import ctypes
from pathlib import Path

__version__ = {version!r}
for _folder in {folders!r}:
    _place = (Path(__file__).parent / _folder).resolve()
    for _name in {names!r}:
        for _file in sorted(_place.glob(_name + ".so*"))[:1]:
            ctypes.CDLL(str(_file), mode=ctypes.RTLD_GLOBAL)
from torch import _C, cuda, distributed, version
'''
# As torch/cuda/__init__.py does: an import that fails otherwise than by ImportError ends `import torch`.
TORCH_CUDA = """try:
    import amdsmi
    _HAS_PYNVML = True
except ImportError:
    _HAS_PYNVML = False

from torch.cuda import nccl

def is_available(): return False
def is_initialized(): return False
def device_count(): return 0
def _is_compiled(): return True
"""
TORCH_VERSION = "hip = {hip!r}\ncuda = None\n"
TORCH_C = "def _cuda_getArchFlags(): return {archs!r}\n"
TORCH_NCCL = "def version(): return {rccl!r}\n"
TORCH_DISTRIBUTED = "def is_nccl_available(): return True\ndef is_available(): return True\n"

TRITON = "__version__ = {version!r}\ndef jit(function=None, **options): return function\n"
TRITON_FILES = {
    "triton/language.py": "class constexpr: pass\n",
    "triton/backends/__init__.py": "backends = {}\n",
    "triton/backends/compiler.py": "class GPUTarget: pass\n",
    "triton/compiler.py": "class ASTSource: pass\n",
}

AMDSMI = '''"""A stand-in for the module of amd-smi-lib; it loads its library when it is imported."""
from . import amdsmi_wrapper
from .amdsmi_exception import AmdSmiException, AmdSmiLibraryException

def amdsmi_init(flag=2):
    code = amdsmi_wrapper.amdsmi_init(flag)
    if code:
        raise AmdSmiLibraryException(code)

def amdsmi_get_processor_handles(): return []
def amdsmi_get_lib_version(): return {version!r}
'''
# KeyError where the library is missing, as in py-interface/amdsmi_wrapper.py.
AMDSMI_WRAPPER = """import ctypes
from pathlib import Path
_libraries = {{}}
_beside = Path(__file__).resolve().parents[3] / "lib"
try:
    _libraries["libamd_smi.so"] = ctypes.CDLL(str(sorted(_beside.glob("libamd_smi.so*"))[0]))
except (IndexError, OSError) as error:
    print(error)
    print("Unable to find libamd_smi.so library try installing amd-smi-lib from your package manager")
amdsmi_init = _libraries["libamd_smi.so"].amdsmi_init
AMDSMI_STATUS_DRIVER_NOT_LOADED = {no_driver}
"""
AMDSMI_EXCEPTION = """class AmdSmiException(Exception): pass
class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, code): self.code = code; super().__init__(f"error code {code}: driver not loaded")
    def get_error_code(self): return self.code
"""

FLASH_SETUP = '''"""As flash-attn's: torch is imported, the variables decide, no GPU is asked."""
import os, shutil, sysconfig
from setuptools import setup
from setuptools.dist import Distribution
import torch

assert torch.version.hip, "no HIP"
assert os.environ["BUILD_TARGET"] == "rocm" and os.environ["FLASH_ATTENTION_FORCE_BUILD"] == "TRUE"
archs = os.environ["GPU_ARCHS"]
assert os.environ["PYTORCH_ROCM_ARCH"] == archs
data = []
if os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") != "TRUE":
    name = "flash_attn_2_cuda" + sysconfig.get_config_var("EXT_SUFFIX")
    shutil.copy(f"code/{archs.replace(';', '_')}.so", f"flash_attn/{name}")
    data = [name]

class Compiled(Distribution):
    def has_ext_modules(self): return bool(data)

setup(name="flash-attn", version=VERSION, packages=["flash_attn"], package_data={"flash_attn": data},
      install_requires=["torch", "einops"], distclass=Compiled)
'''


def library(
    folder: Path,
    stem: str,
    versions: Mapping[str, int],
    archs: Sequence[str] = ARCHS,
    *,
    suffix: str = ".so",
    split: bool = False,
) -> Path:
    """A loadable library: its one function, and device code for the architectures if the real one has any.

    A `split` one names the archives that have its code, and holds none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = CALLS.get(stem, "int stand_in = 1;") % ({"smi": NO_DRIVER, **versions})
    if "size_t" in source and "#include" not in source:
        source = "#include <stddef.h>\n" + source
    if stem in WITH_CODE:
        section = ".rocm_kpack_ref" if split else ".hip_fatbin"
        code = device_code.kpack_reference(f"lib/{stem}.so") if split else device_code.bundle(archs)
        (folder / f"{stem}.bundle").write_bytes(code)
        source += f'\n__asm__(".section {section},\\"a\\"\\n.incbin \\"{folder / stem}.bundle\\"\\n.text");'
    (folder / f"{stem}.c").write_text(source)
    output = folder / f"{stem}{suffix}"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-s",
        f"-Wl,-soname,{output.name}",
        "-o",
        str(output),
        f"{folder / stem}.c",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    for left in (f"{stem}.c", f"{stem}.bundle"):
        (folder / left).unlink(missing_ok=True)
    return output


def flash_attn(folder: Path, version: str, arch_sets: Sequence[Sequence[str]], scratch: Path) -> Path:
    """The source archive of flash-attn; what `hipcc` would compile lies in it, one file a set of them."""
    files: dict[str, bytes | str] = {
        "setup.py": FLASH_SETUP.replace("VERSION", repr(version)),
        "flash_attn/__init__.py": f"__version__ = {version!r}\n",
    }
    for archs in arch_sets:
        made = library(scratch, "flash_attn_2_cuda", {}, archs)
        files[f"code/{'_'.join(archs)}.so"] = made.read_bytes()
    return small_wheels.source_archive(folder, "flash-attn", version, files)


def deb(folder: Path, name: str, version: str, root: Path, *, needs: str = "", script: str = "") -> Path:
    """A package of the files below `root`; `script` runs after its installation."""
    control = root / "DEBIAN"
    control.mkdir(parents=True, exist_ok=True)
    fields = {
        "Package": name,
        "Version": version,
        "Architecture": "amd64",
        "Maintainer": "Stand-in <stand-in@example.org>",
        "Description": "a stand-in",
        "Depends": needs,
    }
    (control / "control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items() if value))
    if script:
        (control / "postinst").write_text(f"#!/bin/sh\n{script}\n")
        (control / "postinst").chmod(0o755)
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}_{version.partition(':')[2] or version}_amd64.deb"
    command = ["dpkg-deb", "--build", "-Zgzip", "-z1", "--root-owner-group", str(root), str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return made
