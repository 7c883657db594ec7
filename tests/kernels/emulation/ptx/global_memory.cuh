// kernels_src/ptx/global_memory.cuh on a CPU.
#pragma once
#include "../../host/ptx/global_memory.cuh"
