"""Variables of ROCm: what AMD's training containers set, and what CUDA's variables are called there.

In: nothing. Out: `VARIABLES` and `NAMES`. AMD's guide: the performance validation guide of the container
rocm/pytorch-training (FLUX.1 on MI300X and MI325X), which lists five variables.
"""

from stackcheck.vendors.environment import Renamed, Variable

GUIDE = "AMD's performance guide of rocm/pytorch-training:v25.3, FLUX.1"
WORKLOAD = "rocm.docs.amd.com, AMD Instinct MI300X workload optimization"
PYTORCH_ALLOCATOR = "pytorch/pytorch c10/core/AllocatorConfig.h"
HIP = "rocm.docs.amd.com/projects/HIP, reference/env_variables"
PUBLISHED = "a published account of pretraining on ROCm"

VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="HIP_FORCE_DEV_KERNARG",
        values=("1",),
        where="image",
        because="kernel arguments lie in device memory, which saves 2 to 3 microseconds a launch",
        source=f"{GUIDE}; {WORKLOAD}",
    ),
    Variable(
        name="DISABLE_ADDMM_CUDA_LT",
        values=("0",),
        where="image",
        because="torch on ROCm leaves hipBLASLt's fused bias out unless it is 0; newer builds do not ask",
        source=f"{GUIDE}; pytorch/pytorch aten/src/ATen/native/cuda/Blas.cpp (getDisableAddmmCudaLt)",
        torch_below="2.12",
    ),
    Variable(
        name="ROCBLAS_USE_HIPBLASLT",
        values=("1",),
        where="image",
        because="rocBLAS hands matrix products to hipBLASLt; AMD measured it on MI300X and MI325X alone",
        source=GUIDE,
        archs=("gfx942", "gfx950"),
    ),
    Variable(
        name="TORCH_NCCL_HIGH_PRIORITY",
        values=("0", "1"),
        where="job",
        because="RCCL's streams before the others: AMD sets 0 for FLUX.1 and 1 for FSDP over nodes",
        source=f"{GUIDE}; {WORKLOAD}",
    ),
    Variable(
        name="GPU_MAX_HW_QUEUES",
        values=("8", "2"),
        where="job",
        because="hardware queues a process: AMD sets 8 for FLUX.1 and 2 for FSDP over nodes",
        source=f"{GUIDE}; {WORKLOAD}",
    ),
    Variable(
        name="HSA_NO_SCRATCH_RECLAIM",
        values=("1",),
        where="job",
        because="RCCL needs it with ROCm 7.1, on gfx90a from 7.13 on, and on gfx942 with MEC below 177",
        source="vllm-project/vllm docker/Dockerfile.rocm_base; ROCm/rocm-systems projects/rccl/CHANGELOG.md",
    ),
)

NAMES: tuple[Renamed, ...] = (
    Renamed(
        nvidia="CUDA_VISIBLE_DEVICES",
        amd="HIP_VISIBLE_DEVICES",
        note="HIP reads CUDA's too, where its own is not set; ROCR_VISIBLE_DEVICES hides devices below HIP",
        source=HIP,
    ),
    Renamed(
        nvidia="NVIDIA_VISIBLE_DEVICES",
        amd="AMD_VISIBLE_DEVICES",
        note="read by the container toolkit alone: inside a container it hides nothing, whatever guides say",
        source=f"ROCm/container-toolkit; {PUBLISHED}",
    ),
    Renamed(
        nvidia="NCCL_*",
        amd="NCCL_*",
        note="RCCL reads NCCL's variables; a guide's RCCL_DEBUG is NCCL_DEBUG; RCCL_* are its additions",
        source=f"ROCm/rocm-systems projects/rccl/src/debug.cc; {PUBLISHED}",
    ),
    Renamed(
        nvidia="TORCH_CUDA_ARCH_LIST",
        amd="PYTORCH_ROCM_ARCH",
        note="gfx names in place of compute capabilities, for extensions of torch",
        source="pytorch/pytorch torch/utils/cpp_extension.py",
    ),
    Renamed(
        nvidia="PYTORCH_CUDA_ALLOC_CONF",
        amd="PYTORCH_HIP_ALLOC_CONF",
        note="both names are read on ROCm; newer torch has PYTORCH_ALLOC_CONF for every device",
        source=PYTORCH_ALLOCATOR,
    ),
    Renamed(
        nvidia="CUDA_HOME",
        amd="ROCM_HOME",
        note="ROCM_PATH for most of ROCm's own tools",
        source="pytorch/pytorch torch/utils/cpp_extension.py",
    ),
    Renamed(
        nvidia="CUDA_LAUNCH_BLOCKING",
        amd="AMD_SERIALIZE_KERNEL",
        note="3 waits before and after each kernel; HIP_LAUNCH_BLOCKING=1 is the older name",
        source=HIP,
    ),
    Renamed(
        nvidia="CUDA_DEVICE_MAX_CONNECTIONS",
        amd="GPU_MAX_HW_QUEUES",
        note="the number of hardware queues; frameworks that set CUDA's to 1 for overlap set AMD's to 2",
        source=WORKLOAD,
    ),
    Renamed(
        nvidia="nvidia-smi",
        amd="amd-smi",
        note="rocm-smi is the older tool",
        source="rocm.docs.amd.com/projects/amdsmi",
    ),
)
